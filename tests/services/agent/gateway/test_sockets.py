"""Turns by WebSocket: frames as they happen, several at once, broken ones, slow readers, the end of the process."""

from __future__ import annotations

import json
import signal
from typing import Any

import aiohttp
import pytest

from tests.services.agent.gateway.conftest import INFERENCE, AgentService
from tests.services.agent.gateway.socket_client import ACCEPTED, Caller
from tests.services.processes import TERM, Processes, wait_until


def connect(service: AgentService) -> Caller:
    caller = Caller(service.gateway.port, key=service.key)
    assert caller.status == 101, caller.head
    return caller


def test_handshake(service: AgentService) -> None:
    with connect(service) as caller:
        assert f"Sec-WebSocket-Accept: {ACCEPTED}" in caller.head
        caller.ping()
        caller.agent(1, "hello")
        caller.answer(1, "complete")
        assert caller.pongs == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-WebSocket-Version": "8"}, 426),
        ({"Upgrade": "h2c"}, 426),
        ({"Connection": "close"}, 426),
        ({"Sec-WebSocket-Key": "short"}, 400),
        ({"Sec-WebSocket-Key": None}, 400),
    ],
)
def test_bad_handshake_is_refused(service: AgentService, headers: dict[str, str | None], status: int) -> None:
    with Caller(service.gateway.port, key=service.key, headers=headers) as caller:
        assert caller.status == status
    assert service.call("POST", "/ws").status == 405


def test_events_arrive_as_they_happen(service: AgentService) -> None:
    with connect(service) as caller:
        caller.agent("a", "wait", "as-they-happen")
        accepted, delta = caller.next(), caller.next()
        assert (accepted["ok"], accepted["payload"]["status"]) == (True, "accepted")
        run_id = accepted["payload"]["runId"]
        assert accepted["payload"]["sessionKey"] == "as-they-happen"
        assert delta == {"type": "event", "event": "agent", "payload": {"runId": run_id, "delta": "waiting"}}
        service.wait_running(1)
        service.release()
        complete = caller.answer("a")
        assert (complete["payload"]["status"], complete["payload"]["summary"]) == ("complete", "waiting")
        assert complete["payload"]["runId"] == run_id


def test_tool_calls_and_results_are_events(service: AgentService) -> None:
    with connect(service) as caller:
        caller.agent(1, "tools")
        payloads = [frame["payload"] for frame in (caller.next() for _ in range(7))]
        call, result = payloads[1]["toolCall"], payloads[3]["toolResult"]
        assert (call["name"], json.loads(call["args"])) == ("weather", {"city": "Rome"})
        assert result == {"id": call["id"], "name": "weather", "result": "sun 1"}
        assert payloads[6]["summary"] == "Sunny."


def test_raw_agent_stream_is_sent_as_deltas_and_summary(service: AgentService) -> None:
    with connect(service) as caller:
        caller.agent(1, "stream")
        payloads = [caller.next()["payload"] for _ in range(4)]
    assert [payload.get("delta") for payload in payloads] == [None, "one", "\ntwo", None]
    assert (payloads[-1]["status"], payloads[-1]["summary"]) == ("complete", "one\ntwo")


def test_raw_agent_json_is_sent_as_one_delta_and_summary(service: AgentService) -> None:
    with connect(service) as caller:
        caller.agent(1, "json")
        payloads = [caller.next()["payload"] for _ in range(3)]
    assert [payload.get("delta") for payload in payloads] == [None, '{"mine": 1}', None]
    assert (payloads[-1]["status"], payloads[-1]["summary"]) == ("complete", '{"mine": 1}')


def request(frame_id: int, method: str, session: str, **params: Any) -> dict[str, Any]:
    return {"type": "req", "id": frame_id, "method": method, "params": {"sessionKey": session, **params}}


@pytest.mark.parametrize("mode", ["followup", "collect"])
def test_messages_to_new_session_keep_order(service: AgentService, mode: str) -> None:
    words = [f"word-{place}" for place in range(6)]
    for number in range(10):
        session = f"at-once-{mode}-{number}"
        frames = [request(place, "agent", session, message=word, queueMode=mode) for place, word in enumerate(words)]
        with connect(service) as caller:
            caller.send(*frames)
            ended: set[object] = set()
            while len(ended) < len(words):
                frame = caller.answer_any()
                ended |= {frame["id"]} if frame["payload"]["status"] == "complete" else set()
        history = service.call("GET", f"/sessions/{session}").json()["history"]
        user_messages = [message["content"] for message in history if message["role"] == "user"]
        assert "\n\n".join(user_messages).split("\n\n") == words


def test_cancel_directly_after_message_cancels_it(service: AgentService) -> None:
    for number in range(10):
        session = f"cancelled-at-once-{number}"
        with connect(service) as caller:
            caller.send(request(1, "agent", session, message="wait"), request(2, "cancel", session))
            answers = {frame["id"]: frame["payload"] for frame in (caller.answer_any() for _ in range(3))}
            assert answers[2].get("cancelled") is True, answers
            assert answers[1]["error"]["code"] == "turn_cancelled"


def test_waiting_cancel_does_not_block_other_frames(service: AgentService) -> None:
    session = "cancelled-while-it-waits"
    with connect(service) as caller:
        for proxy in service.proxies:
            proxy.signal(signal.SIGSTOP)
        try:
            caller.send(request(1, "agent", session, message="wait"), request(2, "cancel", session))
            caller.send(request(3, "agent", session, message="hello"), {"type": "req", "id": 4, "method": "nothing"})
            assert caller.next()["id"] == 4
        finally:
            for proxy in service.proxies:
                proxy.signal(signal.SIGCONT)
        assert caller.answer(2)["payload"]["cancelled"] is True
        assert caller.answer(3, "complete")["payload"]["summary"] == "You said: hello"


def test_messages_waiting_for_session_do_not_block_others(service: AgentService) -> None:
    with connect(service) as caller:
        waiting = [request(place, "agent", "held", message="x", queueMode="followup") for place in range(2, 6)]
        caller.send(request(1, "agent", "held", message="wait"), *waiting, request(9, "agent", "free", message="hello"))
        assert caller.answer(9, "complete")["ok"]
        service.wait_running(1)
        service.release()
        assert caller.answer(5, "complete")["ok"]


def test_turns_of_several_sessions_run_concurrently(service: AgentService) -> None:
    with connect(service) as caller:
        for number in range(5):
            caller.agent(number, "wait", f"at-once-{number}")
        service.wait_running(5)
        caller.agent("quick", "hello", "at-once-quick")
        assert caller.answer("quick", "complete")["ok"]
        service.release()
        done: set[object] = set()
        while len(done) < 5:
            frame = caller.next()
            done |= {frame["id"]} if frame["payload"].get("status") == "complete" else set()


def test_turns_of_one_session_run_in_sequence(service: AgentService) -> None:
    with connect(service) as caller:
        caller.agent(1, "wait", "serial", queueMode="followup")
        service.wait_running(1)
        caller.agent(2, "hello", "serial", queueMode="followup")
        service.release()
        assert caller.answer(1, "complete")["ok"] and caller.answer(2, "complete")["ok"]
    history = service.call("GET", "/sessions/serial").json()["history"]
    assert [turn["content"] for turn in history][::2] == ["wait", "hello"]


def test_cancel(service: AgentService) -> None:
    with connect(service) as caller:
        caller.agent(1, "wait", "cancelled")
        service.wait_running(1)
        accepted = caller.answer(1, "accepted")
        mine = {"sessionKey": "cancelled", "idempotencyKey": "mine/1?"}
        caller.send({"type": "req", "id": 4, "method": "cancel", "params": mine})
        assert caller.answer(4)["payload"]["cancelled"] is False
        caller.send({"type": "req", "id": 2, "method": "cancel", "params": {"sessionKey": "cancelled"}})
        answers = {frame["id"]: frame for frame in (accepted, *(caller.answer_any() for _ in "12"))}
        assert answers[2]["payload"]["cancelled"] is True
        assert (answers[1]["ok"], answers[1]["payload"]["error"]["code"]) == (False, "turn_cancelled")
        caller.send({"type": "req", "id": 3, "method": "cancel", "params": {"sessionKey": "absent"}})
        assert caller.answer(3)["payload"]["error"]["code"] == "session_not_found"


def test_caller_disconnect_cancels_turns(service: AgentService) -> None:
    with connect(service) as caller:
        caller.agent(1, "wait")
        caller.agent(2, "wait")
        service.wait_running(2)
    service.wait_running(0)


def test_failures_are_answers(service: AgentService) -> None:
    with connect(service) as caller:
        caller.agent(1, "fail", "failing")
        failed = caller.answer(1, "failed")
        assert failed["ok"] is False and failed["payload"]["error"]["message"].startswith("ValueError: no")
        caller.agent(2, "lose", "failing")
        assert caller.answer(2, "failed")["payload"]["error"]["code"] == "worker_lost"
        caller.agent(3, "hello", "failing")
        assert caller.answer(3, "complete")["ok"]


def test_caller_may_supply_inference_session(service: AgentService) -> None:
    with connect(service) as caller:
        caller.agent(1, "metadata", inf_base_url=INFERENCE, session_api_key="sk-mine", metadata={"task": 1})
        reported = json.loads(caller.answer(1, "complete")["payload"]["summary"])
        assert reported["task"] == 1 and reported["areal_inference"]["api_key"] == "sk-mine"


RESERVED = {"chat_request": 1}
UNREADABLE = [
    "{",
    "[]",
    '"req"',
    "null",
    json.dumps({"id": 1, "method": "agent"}),
    json.dumps({"type": "res", "id": 1}),
    json.dumps({"type": "req", "method": "agent", "params": {"message": "x"}}),
    json.dumps({"type": "req", "id": True, "method": "agent", "params": {"message": "x"}}),
    json.dumps({"type": "req", "id": 1}),
    json.dumps({"type": "req", "id": 1, "method": "destroy"}),
    json.dumps({"type": "req", "id": 1, "method": ["agent"]}),
    json.dumps({"type": "req", "id": 1, "method": "agent", "params": 3}),
    json.dumps({"type": "req", "id": 1, "method": "agent", "params": {}}),
    json.dumps({"type": "req", "id": 1, "method": "agent", "params": {"message": 3}}),
    json.dumps({"type": "req", "id": 1, "method": "agent", "params": {"message": "x", "sessionKey": ""}}),
    json.dumps({"type": "req", "id": 1, "method": "agent", "params": {"message": "x", "queueMode": "later"}}),
    json.dumps({"type": "req", "id": 1, "method": "agent", "params": {"message": "x", "idempotencyKey": ""}}),
    json.dumps({"type": "req", "id": 1, "method": "agent", "params": {"message": "x", "idempotencyKey": "k"}}),
    json.dumps({"type": "req", "id": 1, "method": "agent", "params": {"message": "x", "inf_model": "m"}}),
    json.dumps(
        {"type": "req", "id": 1, "method": "agent", "params": {"message": "x", "metadata": {"chat_request": 1}}}
    ),
    json.dumps({"type": "req", "id": 1, "method": "cancel", "params": {}}),
    json.dumps({"type": "req", "id": 1, "method": "auth", "params": {"token": "wrong"}}),
]


def test_unreadable_frame_is_answered_and_connection_kept(service: AgentService) -> None:
    with connect(service) as caller:
        for text in UNREADABLE:
            caller.text(text)
            refused = caller.next()
            assert (refused["type"], refused["ok"], refused["payload"]["status"]) == ("res", False, "failed"), text
            assert refused["payload"]["error"]["message"], text
        caller.agent("last", "hello")
        assert caller.answer("last", "complete")["ok"]


def _fragments(caller: Caller) -> None:
    caller.raw(0x1, b"{", first=0)
    caller.raw(0x1, b"}")


def _large_fragments(caller: Caller) -> None:
    caller.raw(0x1, b"x" * 40_000, first=0)
    caller.raw(0x0, b"x" * 40_000, first=0)


BROKEN: dict[str, tuple[Any, int]] = {
    "binary": (lambda caller: caller.raw(0x2, b"\x00\x01"), 1003),
    "unmasked": (lambda caller: caller.raw(0x1, b"{}", mask=False), 1002),
    "reserved opcode": (lambda caller: caller.raw(0x3, b"{}"), 1002),
    "reserved control opcode": (lambda caller: caller.raw(0xB), 1002),
    "reserved bit": (lambda caller: caller.raw(0x1, b"{}", first=0xC0), 1002),
    "not UTF-8": (lambda caller: caller.raw(0x1, b"\xc3\x28"), 1007),
    "half a character": (lambda caller: caller.raw(0x1, b"\xe2\x82"), 1007),
    "fragmented control": (lambda caller: caller.raw(0x9, b"x", first=0), 1002),
    "oversized control": (lambda caller: caller.raw(0x9, b"x" * 126), 1002),
    "continuation without a start": (lambda caller: caller.raw(0x0, b"x"), 1002),
    "start within a message": (_fragments, 1002),
    "close of one byte": (lambda caller: caller.raw(0x8, b"x"), 1002),
    "close with a code that is not assigned": (lambda caller: caller.raw(0x8, b"\x03\xed"), 1002),
    "close with a reason that is not UTF-8": (lambda caller: caller.raw(0x8, b"\x03\xe8\xff"), 1007),
    "too large": (lambda caller: caller.raw(0x1, b"x" * 70_000), 1009),
    "too large in fragments": (_large_fragments, 1009),
    "a header of 2^62 bytes": (lambda caller: caller.socket.sendall(b"\x81\xff" + (2**62).to_bytes(8) + b"mask"), 1009),
}


@pytest.fixture(scope="module")
def small(shared: AgentService) -> AgentService:
    """The service with a second gateway, for small frames."""
    flags = ("--router-url", shared.router.url, "--service", "helper", "--max-body-bytes", "65536")
    gateway = shared.processes.service("agent.gateway", *flags)
    return AgentService(shared.processes, shared.router, gateway, shared.workers, shared.proxies)


@pytest.mark.parametrize("what", BROKEN)
def test_broken_frame_closes_only_its_connection(small: AgentService, what: str) -> None:
    send, code = BROKEN[what]
    with connect(small) as other, connect(small) as caller:
        other.agent(1, "wait", f"other-{what}")
        small.wait_running(1)
        send(caller)
        assert caller.close_code() == code
        small.release()
        assert other.answer(1, "complete")["ok"]


def test_garbage_for_a_handshake_or_a_frame(small: AgentService) -> None:
    with connect(small) as caller:
        caller.socket.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert caller.close_code() == 1002
    assert small.respond("hello").status == 200


def test_close_frame_is_answered(service: AgentService) -> None:
    with connect(service) as caller:
        caller.raw(0x8, b"\x03\xe8bye")
        assert caller.close_code() == 1000


def test_fragmented_message_is_read(service: AgentService) -> None:
    text = json.dumps({"type": "req", "id": 1, "method": "agent", "params": {"message": "héllo"}}, ensure_ascii=False)
    data = text.encode()
    with connect(service) as caller:
        for place in range(len(data) - 1):
            caller.raw(0x0 if place else 0x1, data[place : place + 1], first=0)
            caller.ping()
        caller.raw(0x0, data[-1:])
        assert caller.answer(1, "complete")["payload"]["summary"] == "You said: héllo"


@pytest.mark.extended
def test_slow_reader_slows_only_its_stream(service: AgentService) -> None:
    with connect(service) as slow, connect(service) as other:
        slow.agent(1, "many", "slow-reader")
        other.agent(1, "hello")
        assert other.answer(1, "complete")["ok"]
        before = service.gateway.rss()
        other.agent(2, "hello")
        assert other.answer(2, "complete")["ok"]
        assert service.gateway.rss() - before < 8 << 20
        assert slow.answer(1, "complete")["ok"]


def test_too_many_turns_of_one_connection_are_refused(service: AgentService) -> None:
    with connect(service) as caller:
        for number in range(64):
            caller.agent(number, "wait", "crowded", queueMode="followup")
        service.wait_running(1)
        caller.agent("more", "hello")
        assert caller.answer("more")["payload"]["error"]["code"] == "too_many_requests"
    service.wait_running(0)


# The admin key.


def test_key_may_be_sent_in_first_frame(service: AgentService) -> None:
    with Caller(service.gateway.port) as caller:
        assert caller.status == 101
        caller.send({"type": "req", "id": 1, "method": "auth", "params": {"token": service.key}})
        assert caller.answer(1)["ok"]
        caller.agent(2, "hello")
        assert caller.answer(2, "complete")["ok"]


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "req", "id": 1, "method": "auth", "params": {"token": "wrong"}},
        {"type": "req", "id": 1, "method": "auth", "params": {"token": "é\ud800"}},
        {"type": "req", "id": 1, "method": "agent", "params": {"message": "hello"}},
        {"type": "req", "id": 1, "method": "auth"},
    ],
)
def test_first_frame_without_the_key_closes_the_connection(service: AgentService, frame: object) -> None:
    with Caller(service.gateway.port) as caller:
        caller.send(frame)
        assert caller.next()["ok"] is False
        assert caller.close_code() == 4001


def test_frames_after_refused_first_frame_are_ignored(service: AgentService) -> None:
    cancel = {"type": "req", "id": 2, "method": "cancel", "params": {"sessionKey": "victim"}}
    with connect(service) as victim, Caller(service.gateway.port) as caller:
        victim.agent(1, "wait", "victim")
        service.wait_running(1)
        caller.send({}, cancel, cancel, cancel)
        assert caller.next()["ok"] is False
        assert list(caller.frames()) == [] and caller.closed == 4001
        assert caller.socket.recv(1) == b"", "the gateway has ended the connection"
        victim.send(cancel)
        answers = [victim.answer(1, "accepted"), *(victim.answer_any() for _ in "12")]
        assert {frame["id"]: frame for frame in answers}[2]["payload"]["cancelled"] is True, "it ran until now"


def test_wrong_key_is_refused_before_the_upgrade(service: AgentService) -> None:
    with Caller(service.gateway.port, key="wrong-key-0123456789") as caller:
        assert caller.status == 403
    with Caller(service.gateway.port, "/ws?token=wrong") as caller:
        assert caller.status == 403
    with Caller(service.gateway.port, "/ws?token=%FF%FE") as caller:
        assert caller.status == 403


@pytest.mark.extended
def test_missing_first_frame_closes_connection(service: AgentService) -> None:
    with Caller(service.gateway.port) as caller:
        assert caller.close_code() == 4001


def test_unauthenticated_sender_is_disconnected(service: AgentService) -> None:
    frame = b"\x01\xff" + (2**32).to_bytes(8, "big") + bytes(4) + b"x" * 2**20
    sent = 0
    with Caller(service.gateway.port) as stranger:
        with pytest.raises(OSError):
            while sent < 2**30:
                sent += stranger.socket.send(frame[min(sent, len(frame) - 2**16) :])
    assert sent < 64 * 2**20, "what the sockets' buffers hold"
    with connect(service) as caller:
        caller.agent(1, "hello")
        assert caller.answer(1, "complete")["ok"]


def test_cross_origin_page_is_refused_without_key(processes: Processes) -> None:
    router = processes.router()
    gateway = processes.service("agent.gateway", "--router-url", router.url, keyed=False)
    for origin, status in (("http://evil.example", 403), ("http://localhost:3000", 101)):
        with Caller(gateway.port, headers={"Origin": origin}) as caller:
            assert caller.status == status


def test_query_token_is_never_logged(processes: Processes) -> None:
    router = processes.router()
    flags = ("--router-url", router.url, "--log-level", "debug")
    gateway = processes.service("agent.gateway", *flags)
    with Caller(gateway.port, f"/ws?token={processes.key}") as caller:
        assert caller.status == 101
        caller.text("{")
        assert caller.next()["ok"] is False
    with Caller(gateway.port, f"/ws?token={processes.key}x") as caller:
        assert caller.status == 403
    gateway.signal(TERM)
    assert gateway.wait() == 0
    assert processes.key not in "".join(gateway.log)


# The end.


def test_stopped_gateway_finishes_turns_and_exits(own: AgentService) -> None:
    with connect(own) as caller, connect(own) as idle:
        caller.agent(1, "wait")
        own.wait_running(1)
        own.gateway.signal(TERM)
        assert idle.close_code() == 1001
        own.release()
        assert caller.answer(1, "complete")["ok"]
        assert caller.close_code() == 1001
    assert own.gateway.wait() == 0


async def test_aiohttp_client_converses(service: AgentService) -> None:
    headers = {"Authorization": f"Bearer {service.key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(f"{service.gateway.url}/ws", headers=headers) as ws,
    ):
        await ws.send_json({"type": "req", "id": 1, "method": "agent", "params": {"message": "x" * 200_000}})
        frames = [await ws.receive_json() for _ in range(5)]
        assert frames[-1]["payload"]["summary"] == "You said: " + "x" * 200_000
    assert ws.close_code == 1000


def test_idle_connections_are_cheap(own: AgentService) -> None:
    with connect(own) as caller:
        caller.agent(1, "hello")
        caller.answer(1, "complete")
    before = own.gateway.rss()
    callers = [connect(own) for _ in range(300)]
    each = (own.gateway.rss() - before) / len(callers)
    for caller in callers:
        caller.socket.close()
    assert each < 20_000
    wait_until(lambda: own.call("GET", "/health").status == 200)
