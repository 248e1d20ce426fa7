"""What came from an engine in one read is handed on as one delta a choice: where the engine is faster than its readers,
or sends several steps at once, each step costs them little more than its tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain

from areal.services.inference.engines.base import EngineDelta, EngineFailed

NextPart = Callable[[], Awaitable[bytes]]
"""The next bytes of a body; empty at its end."""


async def line_batches(next_part: NextPart) -> AsyncGenerator[list[bytes], None]:
    """The lines that each read completes, without their newlines; empty ones are skipped, and so is an unfinished last
    one."""
    rest = b""
    while part := await next_part():
        *lines, rest = (rest + part).split(b"\n")
        if complete := [line for line in lines if line]:
            yield complete


def read_all(lines: Iterable[bytes], read: Callable[[bytes], Iterable[EngineDelta]]) -> Iterator[EngineDelta]:
    """The deltas in ``lines``, one a choice. Raises what ``read`` raises, after what came before."""
    deltas: list[EngineDelta] = []
    failure: EngineFailed | None = None
    for line in lines:
        try:
            deltas += read(line)
        except EngineFailed as error:
            failure = error
            break
    yield from merged(deltas)
    if failure is not None:
        raise failure


def merged(deltas: Sequence[EngineDelta]) -> Iterable[EngineDelta]:
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
