"""From the bytes of an engine's answer to deltas.

What came in one read is one delta a choice: where the engine is faster than its readers, or sends several steps at
once, each step costs them little more than its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import orjson

from areal.services.inference.engines.base import EngineDelta, EngineError, EngineFailed, EngineRefused

ReadObject = Callable[[dict[str, Any]], Iterable[EngineDelta]]
"""The deltas in one JSON object of an answer. Raises EngineFailed for one that says that the engine failed."""

MISREAD = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading raises where a field is missing, or is of another kind."""


def makes_no_sense(error: Exception) -> EngineFailed:
    return EngineFailed(f"the engine's answer makes no sense: {type(error).__name__}: {str(error)[:200]}")


class Lines:
    """The lines that each part of a body completes, without their newlines; empty ones are skipped, and so is an
    unfinished last one."""

    def __init__(self) -> None:
        self._rest = b""

    def passes(self, part: bytes) -> bool:
        """Whether ``part`` is one whole line and nothing else, as a step of a stream nearly always is."""
        return not self._rest and part.find(b"\n") == len(part) - 1 > 0

    def feed(self, part: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + part).split(b"\n")
        return [line for line in lines if line]


class JsonLines:
    """An answer with an object a line."""

    def __init__(self, read: ReadObject) -> None:
        self._read = read
        self._lines = Lines()

    def feed(self, part: bytes) -> Iterable[EngineDelta]:
        """The deltas that ``part`` completes. Raises EngineFailed, after what came before."""
        if not self._lines.passes(part):
            return self._deltas(self._lines.feed(part))
        try:
            return merged([*self._read(orjson.loads(part))])
        except MISREAD as error:
            raise makes_no_sense(error) from error

    def _deltas(self, payloads: Iterable[bytes]) -> Iterator[EngineDelta]:
        deltas: list[EngineDelta] = []
        failure: EngineError | None = None
        try:
            for payload in payloads:
                deltas += self._read(orjson.loads(payload))
        except EngineError as error:
            failure = error
        except MISREAD as error:
            failure = makes_no_sense(error)
        yield from merged(deltas)
        if failure is not None:
            raise failure

    def end(self) -> Iterable[EngineDelta]:
        """The body has ended: what is left of it. Raises EngineFailed when the answer has not."""
        return ()


class JsonWhole(JsonLines):
    """An answer that is read at its end, in one object or in many."""

    def __init__(self, read: ReadObject) -> None:
        super().__init__(read)
        self._parts: list[bytes] = []

    def feed(self, part: bytes) -> Iterable[EngineDelta]:
        self._parts.append(part)
        return ()

    def end(self) -> Iterable[EngineDelta]:
        return self._deltas(self._lines.feed(b"".join([*self._parts, b"\n"])))


class JsonEvents(JsonLines):
    """An answer with a server-sent event an object, until ``[DONE]``."""

    def __init__(self, read: ReadObject) -> None:
        super().__init__(read)
        self._done = False

    def feed(self, part: bytes) -> Iterable[EngineDelta]:
        return self._deltas(self._payloads(part))

    def _payloads(self, part: bytes) -> Iterator[bytes]:
        for line in self._lines.feed(part):
            payload = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            self._done = self._done or payload == b"[DONE]"
            if payload and not self._done:
                yield payload

    def end(self) -> Iterable[EngineDelta]:
        if not self._done:
            raise EngineFailed("the engine's stream was cut")
        return ()


def check_event(data: Mapping[str, Any]) -> None:
    """Raises EngineFailed for an error event; EngineRefused for one that calls the request wrong, which some engines
    say only after a good status."""
    if "error" not in data:
        return
    told = data["error"] if isinstance(data["error"], Mapping) else {"message": data["error"]}
    code, message = told.get("code"), str(told.get("message") or told)
    if isinstance(code, int) and 400 <= code < 500 and code != 429:
        raise EngineRefused(message)
    raise EngineFailed(f"the engine failed: {message}")


def merged(deltas: Sequence[EngineDelta]) -> Iterable[EngineDelta]:
    """One a choice."""
    if len(deltas) < 2:
        return deltas
    of_choice: dict[int, list[EngineDelta]] = {}
    for delta in deltas:
        parts = of_choice.setdefault(delta.index, [])
        if not parts or parts[-1].finish_reason is None:  # what comes after the end is nobody's
            parts.append(delta)
    return [_joined(parts) if len(parts) > 1 else parts[0] for parts in of_choice.values()]


def _joined(parts: Sequence[EngineDelta]) -> EngineDelta:
    last = parts[-1]
    tops = None if last.top_logprobs is None else [part.top_logprobs or () for part in parts]
    return EngineDelta(
        index=last.index,
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        versions=tuple(chain.from_iterable(part.versions for part in parts)),
        top_logprobs=None if tops is None else tuple(chain.from_iterable(tops)),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
    )
