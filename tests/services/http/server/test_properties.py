"""Whatever requests come, in whatever pieces: each is answered, in order, by what it says."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from areal.services.http.messages import ServerLimits
from tests.services.http.server.server_fixture import echo, serving

NAMES = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=12)


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    body: bytes
    chunks: tuple[int, ...] | None  # None: by its length
    fields: tuple[str, ...]

    def wire(self) -> bytes:
        lines = [f"{self.method} /{self.path} HTTP/1.1", "Host: here", *(f"x-{name}: y" for name in self.fields)]
        if self.chunks is None:
            return "\r\n".join([*lines, f"Content-Length: {len(self.body)}", "", ""]).encode() + self.body
        edges = sorted({0, len(self.body), *(cut % (len(self.body) + 1) for cut in self.chunks)})
        parts = [self.body[start:end] for start, end in itertools.pairwise(edges)]
        chunked = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part)
        return "\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode() + chunked + b"0\r\n\r\n"


REQUESTS = st.builds(
    Asked,
    st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
    NAMES,
    st.binary(max_size=2000),
    st.none() | st.lists(st.integers(0, 5000), max_size=6).map(tuple),
    st.lists(NAMES, max_size=4).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=12), st.lists(st.integers(0, 2**20), max_size=30), st.booleans())
def test_requests_in_any_chunks_are_answered_in_order(asked: list[Asked], cuts: list[int], hurried: bool) -> None:
    wire = b"".join(each.wire() for each in asked)
    edges = sorted({0, len(wire), *(cut % (len(wire) + 1) for cut in cuts)})

    async def talk() -> None:
        async with serving(echo) as fixture, fixture.caller() as caller:
            for start, end in itertools.pairwise(edges):
                await caller.say(wire[start:end])
                if not hurried:
                    await asyncio.sleep(0.001)
            for each in asked:
                answer = await caller.answer()
                assert (answer.status, answer.body) == (200, each.body)
                assert (answer.headers["x-method"], answer.headers["x-path"]) == (each.method, f"/{each.path}")

    asyncio.run(talk())


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=1, max_size=400))
def test_noise_is_refused_without_fault(noise: bytes) -> None:
    """A server that met noise goes on serving others."""

    async def talk() -> None:
        async with serving(echo, ServerLimits(keep_alive_s=5.0)) as fixture:
            async with fixture.caller() as caller:
                await caller.say(noise + b"\r\n\r\n")
                caller.writer.write_eof()  # ends an incomplete request without waiting for a deadline
                with contextlib.suppress(asyncio.IncompleteReadError):  # blank lines are no request
                    status, _ = await asyncio.wait_for(caller.head(), 10)
                    assert 200 <= status < 500 or status == 505
            assert (await fixture.ask(b"GET / HTTP/1.0\r\n\r\n")).status == 200

    asyncio.run(talk())
