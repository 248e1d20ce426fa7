"""What a request may look like, and what is refused."""

from __future__ import annotations

import asyncio
import json

import pytest

from areal.services.http.messages import AnyResponse, Request, Response, ServerLimits
from tests.services.http.server.server_fixture import echo, get, post, serving

CHUNKED = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"


def code(body: bytes) -> str:
    found: str = json.loads(body)["error"]["code"]
    return found


async def test_body_of_any_framing_is_read() -> None:
    async with serving(echo) as fixture:
        assert (await fixture.ask(post(b"hello"))).body == b"hello"
        assert (await fixture.ask(CHUNKED + b"2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nTrailer: t\r\n\r\n")).body == b"hello"
        assert (await fixture.ask(get())).body == b""


async def test_trailers_are_not_read_as_headers() -> None:
    async def names(request: Request) -> AnyResponse:
        await request.read(100)
        return Response(200, " ".join(request.headers).encode())

    async with serving(names) as fixture:
        trailers = b"0\r\nAuthorization: Bearer x\r\nIdempotency-Key: a\r\n\r\n"
        assert (await fixture.ask(CHUNKED + b"2\r\nhe\r\n" + trailers)).body == b"host transfer-encoding"


async def test_request_sent_byte_by_byte_is_read() -> None:
    async with serving(echo) as fixture, fixture.caller() as caller:
        for byte in post(b"hello", "x-a: b", path="/deep?x=1"):
            await caller.say(bytes([byte]))
            await asyncio.sleep(0)
        answer = await caller.answer()
    assert answer.body == b"hello" and answer.headers["x-path"] == "/deep"


async def test_connection_is_reused_until_close() -> None:
    async with serving(echo) as fixture, fixture.caller() as caller:
        for _ in range(3):
            await caller.say(post(b"x"))
            assert "connection" not in (await caller.answer()).headers
        await caller.say(post(b"x", "Connection: close"))
        assert (await caller.answer()).headers["connection"] == "close"
        assert await caller.ended()


async def test_http_1_0_is_answered_and_closed() -> None:
    async with serving(echo) as fixture, fixture.caller() as caller:
        await caller.say(b"POST / HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi")
        answer = await caller.answer()
        assert answer.body == b"hi" and answer.headers["connection"] == "close"
        assert await caller.ended()


async def test_head_is_answered_without_a_body() -> None:
    async with serving(echo) as fixture, fixture.caller() as caller:
        await caller.say(b"HEAD / HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\nhello")
        assert (await caller.answer(of="HEAD")).headers["content-length"] == "5"
        await caller.say(get())
        assert (await caller.answer()).status == 200


async def test_continue_is_sent_only_when_body_is_read() -> None:
    async def refusing(request: Request) -> AnyResponse:
        return Response(401) if request.path == "/no" else await echo(request)

    async with serving(refusing) as fixture, fixture.caller() as caller:
        await caller.say(post(b"hello", "Expect: 100-continue")[:-5])
        assert (await caller.answer()).status == 100
        await caller.say(b"hello")
        assert (await caller.answer()).body == b"hello"
        await caller.say(post(b"hello", "Expect: 100-continue", path="/no")[:-5])
        answer = await caller.answer()
        assert answer.status == 401 and answer.headers["connection"] == "close"
    async with serving(echo) as fixture:
        assert (await fixture.ask(get("/", "Expect: miracles"))).status == 417


async def test_pipelined_requests_are_answered_in_order() -> None:
    running = most = 0

    async def slow(request: Request) -> AnyResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return await echo(request)

    async with serving(slow) as fixture, fixture.caller() as caller:
        await caller.say(b"".join(post(b"x" * number, path=f"/{number}") for number in range(40)))
        assert [(await caller.answer()).headers["x-path"] for _ in range(40)] == [f"/{n}" for n in range(40)]
    assert most == 1


async def test_excessive_pipelining_is_429() -> None:
    async with serving(echo, ServerLimits(pipelined=4)) as fixture, fixture.caller() as caller:
        await caller.say(get() * 100)
        statuses = [(await caller.answer()).status for _ in range(6)]
        assert statuses == [200] * 5 + [429]
        assert await caller.ended()


async def test_repeated_field_is_joined_case_insensitively() -> None:
    async def fields(request: Request) -> AnyResponse:
        headers = request.headers
        assert headers["X-A"] == "1, 2" and headers.get("nope") is None and headers.get("nope", "") == ""
        assert "x-a" in set(headers) and len(headers) == 4
        return Response(200, headers["x-bytes"].encode("utf-8", "surrogateescape"))

    async with serving(fields) as fixture:
        answer = await fixture.ask(get("/", "x-a: 1", "X-A: 2", "X-Bytes: caf\udce9", "x-b:"))
    assert answer.body == b"caf\xe9"


@pytest.mark.parametrize(
    "given", ["/a%20b?q=%C3%A9&q=2&e=", "http://here:80/a%20b?q=%C3%A9&q=2&e="], ids=["path", "whole-url"]
)
async def test_target_is_split_and_the_query_decoded(given: str) -> None:
    async def where(request: Request) -> AnyResponse:
        assert request.path == "/a%20b" and request.query == {"q": "é", "e": ""}
        return Response(204)

    async with serving(where) as fixture:
        assert (await fixture.ask(get(given))).status == 204


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nx : y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nx: a\x00b\r\n\r\n", 400),
        (b"GET / HTTP/3.7\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\nhello", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, x\r\n\r\n", 400),
        (CHUNKED.replace(b"chunked", b"gzip, chunked") + b"2\r\n{}\r\n0\r\n\r\n", 400),
        (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"2\r\n{}\r\n0\r\n\r\n", 400),
        (CHUNKED + b"zz\r\n", 400),
        (CHUNKED + b"2\r\nheyo", 400),
    ],
)
async def test_malformed_request_is_refused_and_connection_closed(data: bytes, status: int) -> None:
    async with serving(echo) as fixture, fixture.caller() as caller:
        await caller.say(data)
        answer = await caller.answer()
        assert answer.status == status and answer.headers["connection"] == "close"
        error = json.loads(answer.body)["error"]
        assert error["request_id"] and error["message"]
        assert await caller.ended()


SINGLE = (
    "Authorization", "x-api-key", "X-AReaL-Session-Key", "Idempotency-Key", "Content-Type", "Content-Encoding",
    "Expect", "Origin", "x-areal-call", "x-areal-journal", "anthropic-version", "X-Stainless-Retry-Count",
)  # fmt: skip


@pytest.mark.parametrize("name", SINGLE)
async def test_single_valued_header_given_twice_is_400(name: str) -> None:
    async with serving(echo) as fixture:
        answer = await fixture.ask(post(b"hello", f"{name}: a", f"{name.lower()}: a"))
    assert answer.status == 400 and name.lower() in json.loads(answer.body)["error"]["message"]


async def test_multi_valued_header_may_repeat() -> None:
    async def accepted(request: Request) -> AnyResponse:
        return Response(body=request.headers["Accept"].encode())

    async with serving(accepted) as fixture:
        assert (await fixture.ask(get("/", "Accept: a", "accept: b"))).body == b"a, b"


@pytest.mark.parametrize(
    "data",
    [
        get("/", "x: " + "y" * 70_000),
        get("/" + "y" * 70_000),
        get("/", *(f"x-{number}: y" for number in range(200))),
        b"GET / HTTP/1.1\r\nHost: a\r\nx: " + b"y" * 5_000_000,
        b"GET /" + b"y" * 5_000_000,
    ],
    ids=["value", "path", "many", "value-without-end", "path-without-end"],
)
async def test_head_too_large_is_431(data: bytes) -> None:
    async with serving(echo) as fixture, fixture.caller() as caller:
        await caller.say(data)
        answer = await caller.answer()
        assert answer.status == 431 and code(answer.body) == "header_too_large"
        assert await caller.ended()


async def test_broken_request_after_good_one_is_refused_in_order() -> None:
    async with serving(echo) as fixture, fixture.caller() as caller:
        await caller.say(post(b"x") + b"nonsense\r\n\r\n")
        assert [(await caller.answer()).status for _ in range(2)] == [200, 400]
        assert await caller.ended()


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_body_too_large_is_413_before_it_arrives(framing: str) -> None:
    size = 2**25
    head = CHUNKED if framing == "chunked" else post(b"x" * 0).replace(b"Length: 0", b"Length: %d" % size)
    async with serving(echo) as fixture, fixture.caller() as caller:
        if framing == "chunked":
            await caller.say(head + b"%x\r\n%b\r\n" % (2**21, b"x" * 2**21))
        else:
            await caller.say(head)
        answer = await caller.answer()
        assert answer.status == 413 and code(answer.body) == "body_too_large"


async def test_caller_sending_refused_body_reads_refusal() -> None:
    async with serving(echo) as fixture, fixture.caller() as caller:
        await caller.say(post(b"x" * 2**25))
        assert (await caller.answer()).status == 413


async def test_unread_body_is_not_buffered_and_closes_connection() -> None:
    seen: list[int] = []

    async def deaf(request: Request) -> AnyResponse:
        await asyncio.sleep(0.2)
        seen.append(request.size)
        return Response(200)

    async with serving(deaf) as fixture, fixture.caller() as caller:
        caller.writer.write(post(b"x" * 2**24))
        answer = await caller.answer()
        assert answer.status == 200 and answer.headers["connection"] == "close"
    assert seen[0] < 2**20


async def test_upgrade_is_ignored() -> None:
    fields = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")
    async with serving(echo) as fixture, fixture.caller() as caller:
        await caller.say(get("/a", *fields))
        answer = await caller.answer()
        assert answer.status == 200 and answer.headers["connection"] == "close"
        assert await caller.ended()


async def test_upgrade_of_http_1_0_is_refused() -> None:
    async with serving(echo) as fixture, fixture.caller() as caller:
        await caller.say(CHUNKED.replace(b"1.1", b"1.0").replace(b"\r\n\r\n", b"\r\nUpgrade: h2c\r\n\r\n"))
        assert (await caller.answer()).status == 400


@pytest.mark.parametrize("cut", [0, 2, 5])
async def test_upgrade_with_body_is_answered_normally(cut: int) -> None:
    data = post(b"hello", "Connection: Upgrade", "Upgrade: h2c")
    async with serving(echo) as fixture, fixture.caller() as caller:
        await caller.say(data[: len(data) - cut])
        await asyncio.sleep(0.05)
        if cut:
            await caller.say(data[len(data) - cut :])
        assert (await caller.answer()).body == b"hello"


async def test_valid_request_id_of_caller_is_kept() -> None:
    async with serving(echo) as fixture:
        assert (await fixture.ask(get("/", "x-request-id: mine-1"))).headers["x-request-id"] == "mine-1"
        for bad in ("two words", "x" * 200, "caf\udce9"):
            assert (await fixture.ask(get("/", f"x-request-id: {bad}"))).headers["x-request-id"].startswith("req_")
