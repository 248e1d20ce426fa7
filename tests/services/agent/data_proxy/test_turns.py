"""Turns of a session: their events, what they leave in its history, and their order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.agent.data_proxy.pair import Pair, start_pair
from tests.services.processes import Processes, wait_until


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in events]


def test_turn_streams_events_and_ends_with_answer(pair: Pair) -> None:
    session = pair.start(metadata={"who": "me"})
    stream = pair.stream(session, "wait", metadata={"more": 1})
    events = iter(stream)
    assert [next(events)["type"], next(events)["text"]] == ["accepted", "begun"]
    assert pair.show(session)["state"] == "running"
    pair.release()
    assert list(events) == [{"type": "complete", "summary": "wait 0", "metadata": {"of": "wait"}}]
    (call,) = pair.calls(session)
    assert (call["metadata"], call["session_key"], call["history"]) == ({"who": "me", "more": 1}, session, [])
    shown = pair.show(session)
    assert (shown["state"], shown["turns"], shown["metadata"]) == ("idle", 1, {"who": "me"})
    assert shown["history"] == [{"role": "user", "content": "wait"}, {"role": "assistant", "content": "wait 0"}]


def test_next_turn_sends_history_to_worker(pair: Pair) -> None:
    session = pair.start()
    assert [pair.say(session, text) for text in ("a", "b", "c")] == ["a 0", "b 2", "c 4"]
    assert pair.calls(session)[2]["history"] == pair.show(session)["history"][:4]


def test_parallel_tool_results_match_their_calls(pair: Pair) -> None:
    session = pair.start()
    assert kinds(pair.turn(session, "tools")) == [
        "accepted",
        *["tool_call"] * 2,
        *["tool_result"] * 2,
        "delta",
        "tool_call",
        "delta",
        "complete",
    ]
    user, both, a, b, alone, c, last = pair.show(session)["history"]
    assert [call["id"] for call in both["tool_calls"]] == ["call-a", "call-b"]
    assert both["tool_calls"][0]["function"] == {"name": "a", "arguments": '{"of": "a"}'}
    assert [(a["tool_call_id"], a["content"]), (b["tool_call_id"], b["content"])] == [
        ("call-a", "result a"),
        ("call-b", "result b"),
    ]
    assert [call["id"] for call in alone["tool_calls"]] == ["call-c"]
    assert (both["content"], alone["content"]) == (None, "more")
    assert (c["role"], c["tool_call_id"], c["content"]) == ("tool", "call-c", "")
    assert (user["content"], last["content"]) == ("tools", "tools 0")


def test_stream_of_the_agent_is_passed_on(pair: Pair) -> None:
    session = pair.start()
    assert kinds(pair.turn(session, "stream")) == ["accepted", "response", "data", "complete"]
    assert len(pair.show(session)["history"]) == 2


@pytest.mark.parametrize(
    ("message", "failure", "error"),
    [
        ("fail", "agent", "ValueError: no"),
        ("odd", "agent", "none"),
        ("nonsense", "infra", "an event of the worker cannot be read"),
        ("cut", "infra", "the worker's answer ended before the turn"),
    ],
)
def test_failed_turn_is_recorded_but_not_in_history(pair: Pair, message: str, failure: str, error: str) -> None:
    session = pair.start()
    pair.say(session, "before")
    last = pair.turn(session, message)[-1]
    assert (last["type"], last["failure"]) == ("failed", failure)
    assert error in last["error"]
    assert pair.say(session, "after") == "after 2"
    shown = pair.show(session)
    assert [turn["outcome"] for turn in shown["recorded_turns"]] == ["complete", failure, "complete"]
    assert error in shown["recorded_turns"][1]["error"]
    assert len(shown["history"]) == 4


def test_concurrent_followups_run_in_sequence(pair: Pair) -> None:
    session = pair.start()
    first = pair.later(session, "wait", queue_mode="followup")
    pair.wait_begun(session)
    second = pair.later(session, "b", queue_mode="followup")
    wait_until(lambda: pair.show(session)["waiting"] == 1)
    third = pair.later(session, "c", queue_mode="followup")
    wait_until(lambda: pair.show(session)["waiting"] == 2)
    assert len(pair.calls(session)) == 1
    pair.release()
    assert [each.result()[-1]["summary"] for each in (first, second, third)] == ["wait 0", "b 2", "c 4"]


def test_collected_messages_share_one_turn_and_answer(pair: Pair) -> None:
    session = pair.start()
    first = pair.later(session, "wait")
    pair.wait_begun(session)
    collected = []
    for number, message in enumerate(("b", "c", "d")):
        collected.append(pair.later(session, message, metadata={message: number}))
        wait_until(lambda: pair.show(session)["waiting"] == len(collected))
    pair.release()
    first.result()
    answers = [each.result() for each in collected]
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][-1]["summary"] == "b\n\nc\n\nd 2"
    _, call = pair.calls(session)
    assert call["metadata"] == {"b": 0, "c": 1, "d": 2}


def test_caller_disconnect_cancels_turn(pair: Pair) -> None:
    session = pair.start()
    stream = pair.stream(session, "wait")
    assert kinds([next(iter(stream))]) == ["accepted"]
    pair.wait_begun(session)
    stream.close()
    wait_until(lambda: pair.calls(session)[0]["ended"] == "cancelled")
    wait_until(lambda: pair.show(session)["state"] == "idle")
    (turn,) = pair.show(session)["recorded_turns"]
    assert (turn["outcome"], turn["error"]) == ("cancelled", "its caller left")
    assert pair.say(session, "after") == "after 0"


def test_disconnect_of_waiting_caller_drops_its_message(pair: Pair) -> None:
    session = pair.start()
    first = pair.later(session, "wait")
    pair.wait_begun(session)
    leaving = pair.stream(session, "b", metadata={"b": 1, "both": "b"})
    staying = pair.later(session, "c", metadata={"both": "c"})
    wait_until(lambda: pair.show(session)["waiting"] == 2)
    leaving.close()
    wait_until(lambda: pair.show(session)["waiting"] == 1)
    pair.release()
    first.result()
    assert staying.result()[-1]["summary"] == "c 2"
    assert pair.calls(session)[1]["metadata"] == {"both": "c"}


def test_cancelled_turn_is_on_disk_before_reply(pair: Pair) -> None:
    session = pair.start()
    running = pair.later(session, "wait")
    pair.wait_begun(session)
    answer = pair.call("DELETE", pair.path(session, "/turn"))
    assert answer.json() == {"session_key": session, "cancelled": True}
    assert pair.show(session)["recorded_turns"][0]["outcome"] == "cancelled"
    assert running.result()[-1] == {"type": "failed", "failure": "cancelled", "error": "the turn was cancelled"}
    assert pair.call("DELETE", pair.path(session, "/turn")).json()["cancelled"] is False


def test_cancel_by_idempotency_key_removes_waiting_message(pair: Pair) -> None:
    session = pair.start()
    running = pair.later(session, "wait")
    pair.wait_begun(session)
    asked = []
    for message, more in (("b", {"idempotency_key": "k"}), ("c", {}), ("d", {"queue_mode": "followup"})):
        asked.append(pair.later(session, message, **more))
        wait_until(lambda: pair.show(session)["waiting"] == len(asked))
    path = pair.path(session, "/turn?idempotency_key=")
    assert pair.call("DELETE", f"{path}k").json()["cancelled"] is True
    assert asked[0].result()[-1] == {"type": "failed", "failure": "cancelled", "error": "the turn was cancelled"}
    for key in ("k", "absent", ""):
        assert pair.call("DELETE", path + key).json()["cancelled"] is False
    pair.release()
    assert [each.result()[-1]["summary"] for each in (running, *asked[1:])] == ["wait 0", "c 2", "d 4"]


def test_cancel_by_idempotency_key_ends_unshared_turn(pair: Pair) -> None:
    session = pair.start()
    alone = pair.later(session, "wait", idempotency_key="alone")
    pair.wait_begun(session)
    collected = []
    for message in ("wait b", "c"):
        collected.append(pair.later(session, message, idempotency_key=message[-1]))
        wait_until(lambda: pair.show(session)["waiting"] == len(collected))
    path = pair.path(session, "/turn?idempotency_key=")
    assert pair.call("DELETE", f"{path}alone").json()["cancelled"] is True
    assert alone.result()[-1]["failure"] == "cancelled"
    pair.wait_begun(session, 2)
    assert pair.call("DELETE", f"{path}b").json()["cancelled"] is True
    assert collected[0].result()[-1]["failure"] == "cancelled"
    pair.release()
    assert collected[1].result()[-1]["summary"] == "wait b\n\nc 0"


def test_collected_messages_keep_their_place_among_followups(pair: Pair) -> None:
    session = pair.start()
    first = pair.later(session, "wait")
    pair.wait_begun(session)
    asked = []
    for message, mode in (("b", "collect"), ("c", "followup"), ("d", "collect"), ("e", "collect")):
        asked.append(pair.later(session, message, queue_mode=mode))
        wait_until(lambda: pair.show(session)["waiting"] == len(asked))
    pair.release()
    first.result()
    assert [each.result()[-1]["summary"] for each in asked] == ["b 2", "c 4", "d\n\ne 6", "d\n\ne 6"]


def test_large_number_of_deltas_is_passed_on(pair: Pair) -> None:
    session = pair.start()
    events = pair.turn(session, "flood 3000")
    assert sum(len(event["text"]) for event in events if event["type"] == "delta") == 3_000_000
    assert len(pair.show(session)["history"]) == 2


def test_slow_caller_slows_agent(own: Pair) -> None:
    session = own.start()
    stream = own.stream(session, "flood 30000")
    own.wait_begun(session)
    assert own.say(own.start(), "a") == "a 0"  # no other call waits
    assert own.calls(session)[0]["ended"] == "running"
    assert len(list(stream)) == 30_002
    assert own.reported("finished", 2)


def test_slow_caller_does_not_slow_others_of_turn(own: Pair) -> None:
    session = own.start()
    first = own.later(session, "wait")
    own.wait_begun(session)
    lagging = own.stream(session, "flood 20000")
    wait_until(lambda: own.show(session)["waiting"] == 1)
    reading = own.later(session, "b")
    wait_until(lambda: own.show(session)["waiting"] == 2)
    own.release()
    first.result()
    assert sum(event["type"] == "delta" for event in reading.result(60)) == 20_000
    *_, last = lagging
    assert (last["type"], last["failure"]) == ("failed", "infra") and "reads too slowly" in last["error"]
    assert own.say(session, "c") == "c 4"


def test_answer_over_body_limit_fails_turn(processes: Processes, tmp_path: Path) -> None:
    pair = start_pair(processes, tmp_path / "state", "--max-body-bytes", "100000")
    session = pair.start()
    assert pair.turn(session, "large 90000")[-1]["type"] == "complete"
    for message in ("large 110000", "large 300000", "large 3000000", "delta 300000"):  # in one part, or in several
        last = pair.turn(session, message)[-1]
        assert last["failure"] == "agent"
        assert "larger than a turn may be" in last["error"]
    body = {"message": "x" * 100_000, "run_id": "r"}
    assert pair.call("POST", pair.path(session, "/turn"), body).status == 413
    assert pair.say(session, "a") == "a 4"


# -- idempotency


def test_retry_is_answered_from_the_record(pair: Pair) -> None:
    session = pair.start()
    first = pair.turn(session, "tools", idempotency_key="k")
    again = pair.turn(session, "tools", idempotency_key="k")
    assert len(pair.calls(session)) == 1
    assert [event for event in first if event["type"] == "complete"] == again[-1:]
    assert {event["id"]: event["arguments"] for event in again if event["type"] == "tool_call"} == {
        "call-a": '{"of": "a"}',
        "call-b": '{"of": "b"}',
        "call-c": "{}",
    }
    assert again[0] == first[0]


def test_retry_of_turn_without_summary_has_empty_summary(pair: Pair) -> None:
    session = pair.start()
    first = pair.turn(session, "quiet", idempotency_key="k")
    again = pair.turn(session, "quiet", idempotency_key="k")
    assert kinds(first) == kinds(again) == ["accepted", "delta", "tool_call", "tool_result", "complete"]
    assert first[-1] == again[-1] == {"type": "complete", "summary": "", "metadata": {}}


def test_retry_replays_agents_raw_stream(pair: Pair) -> None:
    session = pair.start()
    first = pair.turn(session, "stream 1000", idempotency_key="k")
    assert kinds(first) == ["accepted", "response", *["data"] * 1001, "complete"]
    assert pair.turn(session, "stream 1000", idempotency_key="k") == first


def test_retry_replays_deltas_calls_and_raw_stream_in_order(pair: Pair) -> None:
    session = pair.start()
    first = pair.turn(session, "speak", idempotency_key="k")
    assert kinds(first) == ["accepted", "delta", "tool_call", "tool_result", "response", "data", "complete"]
    assert pair.turn(session, "speak", idempotency_key="k") == first
    assert len(pair.calls(session)) == 1


def test_retry_of_overlong_stream_reports_stream_lost(pair: Pair) -> None:
    session = pair.start()
    assert pair.turn(session, "stream 5000", idempotency_key="k")[-1]["type"] == "complete"
    assert kinds(pair.turn(session, "stream 5000", idempotency_key="k")) == ["accepted", "stream_lost", "complete"]
    assert len(pair.calls(session)) == 1


def test_retry_joins_running_or_waiting_turn(pair: Pair) -> None:
    session = pair.start()
    first = pair.later(session, "wait", idempotency_key="k")
    pair.wait_begun(session)
    later = pair.later(session, "b", idempotency_key="l")
    wait_until(lambda: pair.show(session)["waiting"] == 1)
    again = [pair.later(session, "wait", idempotency_key="k"), pair.later(session, "b", idempotency_key="l")]
    wait_until(lambda: pair.show(session)["waiting"] == 2)
    pair.release()
    assert again[0].result()[-1] == first.result()[-1]
    assert again[1].result()[-1] == later.result()[-1]
    assert len(pair.calls(session)) == 2


def test_joining_retry_gets_past_and_remaining_events(pair: Pair) -> None:
    session = pair.start()
    events = iter(pair.stream(session, "wait", idempotency_key="k"))
    first_events = [next(events) for _ in range(2)]
    assert kinds(first_events) == ["accepted", "delta"]
    again = iter(pair.stream(session, "wait", idempotency_key="k"))
    assert [next(again) for _ in range(2)] == first_events  # while the turn runs
    whole = pair.later(session, "wait", idempotency_key="k", stream=False)
    wait_until(lambda: pair.show(session)["state"] == "running")
    pair.release()
    rest = list(events)
    assert rest[-1]["summary"] == "wait 0" and list(again) == rest
    assert whole.result() == [*first_events, *rest]


def test_joining_retry_of_long_turn_gets_its_end(pair: Pair) -> None:
    session = pair.start()
    events = iter(pair.stream(session, "flood 5000 wait", idempotency_key="k"))
    for _ in range(5001):
        next(events)
    again = pair.later(session, "flood 5000 wait", idempotency_key="k")
    wait_until(lambda: pair.show(session)["state"] == "running")
    pair.release()
    assert again.result()[-1] == list(events)[-1] and len(again.result()) == 2


def test_raw_stream_of_agent_enters_history(pair: Pair) -> None:
    session = pair.start()
    assert pair.say(session, "stream") == "own"
    assert pair.say(session, "a") == "a 2"
    assert [message["content"] for message in pair.show(session)["history"]] == ["stream", "own", "a", "a 2"]


def test_turn_with_an_idempotency_key_outlives_its_caller(pair: Pair) -> None:
    session = pair.start()
    stream = pair.stream(session, "wait", idempotency_key="k")
    pair.wait_begun(session)
    stream.close()
    again = pair.later(session, "wait", idempotency_key="k")
    pair.release()
    assert again.result()[-1]["summary"] == "wait 0"
    assert pair.calls(session)[0]["ended"] == "finished"


def test_idempotency_key_with_another_message_is_422(pair: Pair) -> None:
    session, other = pair.start(), pair.start()
    pair.turn(session, "a", idempotency_key="k")
    body = {"message": "b", "run_id": "r", "idempotency_key": "k"}
    refused = pair.call("POST", pair.path(session, "/turn"), body)
    assert (refused.status, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert pair.say(other, "b", idempotency_key="k") == "b 0"


def test_retry_reruns_turn_only_after_infra_failure(pair: Pair) -> None:
    session = pair.start()
    for message, calls in (("fail", 1), ("cut", 3)):
        for _ in range(2):
            assert pair.turn(session, message, idempotency_key=message)[-1]["type"] == "failed"
        assert len(pair.calls(session)) == calls


def test_concurrent_turns_stay_within_configured_limit(own: Pair) -> None:
    assert own.call("POST", "/configure", {"max_concurrent": 2}).json()["max_concurrent"] == 2
    sessions = [own.start() for _ in range(4)]
    turns = [own.later(session, "wait") for session in sessions]
    own.reported("any", 2)
    wait_until(lambda: sum(own.show(session)["state"] == "running" for session in sessions) == 4)
    assert len(own.reported()["calls"]) == 2
    own.call("POST", "/configure", {"max_concurrent": 3})
    own.reported("any", 3)
    own.release()
    own.reported("any", 4)
    own.release()
    assert {turn.result()[-1]["summary"] for turn in turns} == {"wait 0"}


def test_silent_agent_fails_turn(own: Pair) -> None:
    own.proxy.kill()
    own.flags = ("--turn-timeout", "0.3")
    own.restart()
    session = own.start()
    last = own.turn(session, "wait")[-1]
    assert (last["failure"], last["error"]) == ("agent", "the agent gave no sign of life for 0.3 s")
    assert own.reported("cancelled")["calls"][0]["ended"] == "cancelled"
