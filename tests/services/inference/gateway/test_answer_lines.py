"""Lines of an answer that comes in parts."""

from __future__ import annotations

import sys
from typing import Any, cast

from areal.http.client import Connection
from areal.services.inference.gateway.routing import AnswerLines


class _Answer:
    def __init__(self, *parts: bytes) -> None:
        self._parts = [*parts, b""]

    async def part(self) -> bytes:
        return self._parts.pop(0)


def lines_of(*parts: bytes) -> AnswerLines:
    return AnswerLines(cast(Connection, _Answer(*parts)))


async def test_lines_are_reassembled_from_any_chunks() -> None:
    assert [line async for line in lines_of(b"a\nb", b"", b"never read")] == [b"a"]
    assert [line async for line in lines_of(b"a", b"b\n\nc\n", b"d\nunfinished")] == [b"ab", b"c", b"d"]


async def test_abandoned_line_reader_leaves_no_task() -> None:
    closed: list[Any] = []
    before = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(finalizer=closed.append)
    try:
        async for line in lines_of(b"a\nb\n"):
            assert line == b"a"
            break
        assert closed == []
    finally:
        sys.set_asyncgen_hooks(*before)
