"""Retries that join the call in flight instead of sampling again.

A call is a repetition of another one of its session when it has the same Idempotency-Key, or when it is an SDK's
retry of the same body. The first one leads; one that comes while it runs waits for it. When the leader is recorded the
follower replays what is on disk; when the leader failed, or its caller left, the follower leads.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from areal.services.http.errors import ApiError, bad_request
from areal.services.inference.recorder.records import DIGEST_BYTES

_RETRY_COUNT = "x-stainless-retry-count"


@dataclass(frozen=True)
class CallIdentity:
    """What tells a call from another. ``retry``: the caller says that it is a repetition of the same body."""

    session: tuple[str, int]  # the journal's tag and the session's number
    digest: bytes
    idempotency: bytes | None = None
    retry: bool = False

    def __post_init__(self) -> None:
        assert len(self.digest) == DIGEST_BYTES

    @property
    def repeatable(self) -> bool:
        return self.retry or self.idempotency is not None


def read_retry_count(text: str | None) -> bool:
    """Whether an SDK says that this is not its first try."""
    return text is not None and text.isascii() and text.isdecimal() and int(text) > 0


def check_idempotency_key(text: str | None) -> str | None:
    """Raises 400 for a key that is none."""
    if text is None:
        return None
    if not 1 <= len(text) <= 255 or not text.isprintable():
        raise bad_request("Idempotency-Key must be 1 to 255 printable characters", param="Idempotency-Key")
    return text


class CallsInFlight:
    """The calls of all sessions that run now, by body and by key. The newest of equal ones is the one to join."""

    def __init__(self) -> None:
        self._by_digest: dict[tuple[tuple[str, int], bytes], list[CallInFlight]] = {}
        self._by_key: dict[tuple[tuple[str, int], bytes], CallInFlight] = {}

    async def join(self, call: CallIdentity) -> int | None:
        """While a call that this one repeats is in flight, wait for it: where its answer is recorded. None when there
        is none, or when it failed. Raises 422 for a key used with another body."""
        while (flight := self._leader(call)) is not None:
            if flight.call.digest != call.digest:
                raise other_body()
            await flight.over.wait()
            if flight.recorded is not None:
                return flight.recorded
        return None

    def running(self, call: CallIdentity) -> bool:
        """Whether a call that this one repeats is in flight. If not, this one may lead, before anything else runs."""
        return self._leader(call) is not None

    def _leader(self, call: CallIdentity) -> CallInFlight | None:
        if call.idempotency is not None:
            return self._by_key.get((call.session, call.idempotency))
        running = self._by_digest.get((call.session, call.digest)) if call.retry else None
        return running[-1] if running else None

    @contextlib.contextmanager
    def leading(self, call: CallIdentity) -> Iterator[CallInFlight]:
        """While it is entered, others that repeat this call wait until it is over, whether it succeeds or fails."""
        flight = CallInFlight(call)
        same = self._by_digest.setdefault((call.session, call.digest), [])
        same.append(flight)
        if call.idempotency is not None:
            self._by_key[call.session, call.idempotency] = flight
        try:
            yield flight
        finally:
            same.remove(flight)
            if not same:
                del self._by_digest[call.session, call.digest]
            if call.idempotency is not None:
                self._by_key.pop((call.session, call.idempotency), None)
            flight.over.set()

    def __len__(self) -> int:
        return sum(map(len, self._by_digest.values()))


@dataclass(eq=False)
class CallInFlight:
    """``recorded``: the row of its answer, once that is durable."""

    call: CallIdentity
    over: asyncio.Event = field(default_factory=asyncio.Event)
    recorded: int | None = None


def other_body() -> ApiError:
    message = "this Idempotency-Key was used in this session with another body"
    return ApiError(422, message, code="idempotency_key_reused", param="Idempotency-Key")
