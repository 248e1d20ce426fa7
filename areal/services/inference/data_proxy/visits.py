"""One model call of a session, from its arrival to its record.

A repetition of a call waits for the one in flight and is answered from the record; only a call that was not recorded
generates. What is recorded is durable before the answer's last byte. A call that fails is counted beside the session's
trajectory by its error's code, and scores nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Protocol

from areal.services.inference.data_proxy.callers import Caller, Callers, check_active
from areal.services.inference.recording.conversation import DIGEST_BYTES, Conversation, body_digest, conversation
from areal.services.inference.recording.flights import (
    Flight,
    Flights,
    Identity,
    check_idempotency_key,
    read_retry_count,
)
from areal.services.inference.recording.names import new_answer_id
from areal.services.inference.recording.recent import Known
from areal.services.inference.recording.values import Call, Sample, Turn
from areal.services.inference.recording.vault import Vault
from areal.services.web.errors import ApiError
from areal.services.web.keys import AdminKey

_log = logging.getLogger(__name__)
_COUNTED_REFUSALS = ("context_length_exceeded",)  # a 4xx that says something about the rollout


class Visit(Protocol):
    """``replayed``: the turns of the call that this one repeats; then nothing is generated. ``conversation``: the
    chat's, once ``known`` was asked. ``of_a_session``: the caller has a session's key."""

    replayed: Sequence[Turn] | None
    conversation: Conversation | None
    of_a_session: bool

    def answer_id(self, prefix: str) -> str: ...

    def keeps(self, store: bool) -> bool:
        """Whether this call is recorded, when it says ``store``."""
        ...

    async def known(self, messages: Sequence[Mapping[str, Any]]) -> Known | None:
        """The recorded turn that this chat goes on from."""
        ...

    async def answered(self) -> Known | None:
        """The recorded turn whose answer is the last of the chat's, once ``known`` was asked."""
        ...

    def goes_on(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        """The chat's conversation, where its tokens are not ours."""
        ...

    async def record(self, answer: Answer) -> None:
        """Durable when it returns."""
        ...

    async def failed(self, code: str) -> None:
        """The call failed without an error of ours."""
        ...


@dataclass(frozen=True)
class Answer:
    answer_id: str
    model: str
    created: int
    samples: Sequence[Sample]


class RecordedVisit:
    def __init__(
        self, caller: Caller, identity: Identity, replayed: Sequence[Turn] | None, flight: Flight | None = None
    ) -> None:
        self.replayed = replayed
        self._flight = flight
        self._caller = caller
        self._identity = identity
        self.conversation: Conversation | None = None
        self.of_a_session = not caller.admin

    def answer_id(self, prefix: str) -> str:
        return new_answer_id(prefix, self._caller.journal.tag)

    def keeps(self, store: bool) -> bool:
        return store

    async def known(self, messages: Sequence[Mapping[str, Any]]) -> Known | None:
        return await self._caller.journal.known(self._caller.session, self.goes_on(messages))

    async def answered(self) -> Known | None:
        assert self.conversation is not None
        last = replace(self.conversation, answered=self.conversation.answered[-1:])
        return await self._caller.journal.known(self._caller.session, last)

    def goes_on(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        self.conversation = conversation(messages)
        return self.conversation

    async def failed(self, code: str) -> None:
        await _count_failure(self._caller, ApiError(502, "", code=code))

    async def record(self, answer: Answer) -> None:
        call = Call(
            answer_id=answer.answer_id,
            model=answer.model,
            created=answer.created,
            digest=self._identity.digest,
            samples=answer.samples,
            conversation=self.conversation,
            idempotency=self._identity.idempotency,
        )
        recorded = await self._caller.journal.record(self._caller.session, call)
        if self._flight is not None:
            self._flight.recorded = recorded.first


class UnrecordedVisit:
    """Where no journal is kept."""

    replayed: Sequence[Turn] | None = None
    conversation: Conversation | None = None
    of_a_session = False

    def answer_id(self, prefix: str) -> str:
        return new_answer_id(prefix, None)

    def keeps(self, store: bool) -> bool:
        return False

    async def known(self, messages: Sequence[Mapping[str, Any]]) -> Known | None:
        return None

    async def answered(self) -> Known | None:
        return None

    def goes_on(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        return conversation(())

    async def record(self, answer: Answer) -> None:
        raise AssertionError("nothing is kept")

    async def failed(self, code: str) -> None:
        return None


class Visits:
    """``vault`` None: nothing is recorded."""

    def __init__(self, vault: Vault | None, key: AdminKey | None) -> None:
        self._callers = Callers(vault, key) if vault is not None else None
        self._flights = Flights()

    def caller(self, headers: Mapping[str, str]) -> Caller | None:
        """Who calls; the first thing to ask. Raises 401, 421, and 409 for a session that ended."""
        if self._callers is None:
            return None
        caller = self._callers.of(headers)
        check_active(caller)
        return caller

    @contextlib.asynccontextmanager
    async def enter(self, caller: Caller | None, headers: Mapping[str, str], body: bytes) -> AsyncIterator[Visit]:
        """Raises 507 at once where the journal takes no more, 422 for an Idempotency-Key with another body, 421 where
        the session is at another data proxy."""
        if caller is None:
            yield UnrecordedVisit()
            return
        with caller.journal.in_use():
            async with self._entered(caller, headers, body) as visit:
                yield visit

    @contextlib.asynccontextmanager
    async def _entered(self, caller: Caller, headers: Mapping[str, str], body: bytes) -> AsyncIterator[Visit]:
        await caller.journal.check_writable()
        identity = _identity(caller, headers, body)
        while identity.repeatable:
            row = await self._flights.join(identity)
            found = await (
                caller.journal.answer(row)
                if row is not None
                else caller.journal.replay(caller.session, identity.digest, identity.idempotency)
            )
            if found:
                yield RecordedVisit(caller, identity, found)
                return
            if not self._flights.running(identity):
                break
        with self._flights.leading(identity) as flight:
            try:
                yield RecordedVisit(caller, identity, None, flight)
            except ApiError as error:
                await _count_failure(caller, error)
                raise


def _identity(caller: Caller, headers: Mapping[str, str], body: bytes) -> Identity:
    key = check_idempotency_key(headers.get("Idempotency-Key"))
    return Identity(
        session=(caller.journal.tag, caller.session),
        digest=body_digest(body),
        idempotency=blake2b(key.encode(), digest_size=DIGEST_BYTES).digest() if key is not None else None,
        retry=read_retry_count(headers.get("x-stainless-retry-count")),
    )


async def _count_failure(caller: Caller, error: ApiError) -> None:
    if error.status < 500 and error.code not in _COUNTED_REFUSALS:
        return
    try:
        await caller.journal.note_failure(caller.session, error.code or str(error.status))
    except ApiError as other:  # the call's own failure is what its caller is told
        _log.warning("a failure could not be counted: %s", other)
