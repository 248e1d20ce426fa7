"""What is lost when a process of the pair is killed, drained or has no disk: nothing that was acknowledged."""

from __future__ import annotations

import resource
import sqlite3
from typing import Any

import pytest

from areal.http.headers import JOURNAL
from areal.services.journal.keys import key_digest
from tests.services.agent.data_proxy.pair import Pair, start_proxy, start_worker
from tests.services.processes import TERM, Process, wait_ready, wait_until


def ready(proxy: Process) -> dict[str, Any]:
    reported: dict[str, Any] = proxy.call("GET", "/ready").json()
    return reported


def another(pair: Pair, uid: str = "pair-1") -> Pair:
    """A second pair of the same service."""
    worker = start_worker(pair.processes)
    return Pair(pair.processes, worker, start_proxy(pair.processes, worker, pair.state, uid=uid), pair.state)


# -- the worker


def test_killed_worker_fails_running_turn_and_session_survives(own: Pair) -> None:
    session, other = own.start(), own.start()
    own.say(session, "a")
    waiting = own.later(other, "wait")
    own.wait_begun(other)
    events = own.turn(session, "die")
    assert events[1] == {"type": "delta", "text": "half"}
    assert [event[-1]["failure"] for event in (events, waiting.result())] == ["infra", "infra"]
    assert "the worker was lost" in events[-1]["error"]
    asked = own.later(session, "b")  # while there is none
    wait_until(lambda: own.proxy.call("GET", "/ready").status == 503)
    assert "the worker does not answer" in ready(own.proxy)["reason"]
    assert own.show(session)["state"] == "running"
    own.restart_worker()
    assert asked.result()[-1]["summary"] == "b 2"
    assert [turn["outcome"] for turn in own.show(session)["recorded_turns"]] == ["complete", "infra", "complete"]
    wait_ready(own.proxy)


# -- the data proxy


def test_restarted_data_proxy_finds_its_sessions(own: Pair) -> None:
    session, running = own.start("mine", metadata={"a": 1}), own.start()
    own.turn(session, "tools", idempotency_key="k")
    before = own.show(session)
    broken = own.stream(running, "wait", idempotency_key="l")
    own.wait_begun(running)
    own.proxy.kill()
    assert {event["type"] for event in broken} == {"accepted", "delta"}
    own.reported("cancelled")
    own.restart()
    assert own.show(session) == before
    assert own.turn(session, "tools", idempotency_key="k")[-1]["summary"] == "tools 0"
    assert own.show(running)["recorded_turns"] == []
    again = own.later(running, "wait", idempotency_key="l")
    own.wait_begun(running, 2)
    own.release()
    assert again.result()[-1]["summary"] == "wait 0"


@pytest.mark.extended
def test_sessions_of_lost_data_proxy_are_adopted(own: Pair) -> None:
    session = own.start("mine")
    own.say(session, "a")
    (tag,) = ready(own.proxy)["journals"]
    heir = another(own)
    own.proxy.kill()
    wait_until(lambda: tag in ready(heir.proxy)["journals"])
    assert heir.say(session, "b") == "b 2"
    assert heir.start("mine") == session
    heir.call("POST", heir.path(session, "/close"))
    wait_until(lambda: tag not in ready(heir.proxy)["journals"])  # it is empty


@pytest.mark.extended
def test_drained_data_proxy_hands_over_sessions_after_turns(own: Pair) -> None:
    idle, busy = own.start("idle"), own.start("busy")
    own.say(idle, "a")
    running = own.later(busy, "wait")
    own.wait_begun(busy)
    heir = another(own)
    (tag,) = ready(own.proxy)["journals"]
    assert own.call("POST", "/drain", {}).json()["journals"] == [tag]
    assert own.show(busy)["state"] == "running"
    own.release()
    assert running.result()[-1]["summary"] == "wait 0"
    wait_until(lambda: tag in ready(heir.proxy)["journals"])
    assert sorted(own.reported("closed", 2)["closed"]) == ["busy", "idle"]
    refused = own.call("POST", own.path(idle, "/turn"), {"message": "b", "run_id": "r"})
    assert refused.status == 404
    assert (heir.say(idle, "b"), heir.say(busy, "b")) == ("b 2", "b 2")
    own.call("POST", "/undrain", {})
    made = own.start()
    assert own.say(made, "a") == "a 0"  # it goes on with a journal of its own


def test_session_started_during_drain_is_handed_over(own: Pair) -> None:
    heir = another(own)
    own.call("POST", "/drain", {})
    session = own.start("late")
    wait_until(lambda: heir.call("GET", f"/session/{session}").status == 200, what="the session moves")
    assert own.call("GET", f"/session/{session}").status != 200


def test_session_is_never_unknown_during_journal_handover(own: Pair) -> None:
    session = own.start("mine")
    own.say(session, "a")
    digest = {"digest": key_digest(session.encode()).hex()}
    (tag,) = own.call("POST", "/drain", {}).json()["journals"]
    wait_until(lambda: tag not in ready(own.proxy)["journals"])
    found = own.call("POST", "/rl/find_key", digest).json()
    assert (found["journal"], found["elsewhere"]) == (None, [tag]), "the router asks again: a journal was not searched"
    assert tag in ready(own.proxy)["journals_elsewhere"]
    _assert_refused_where_it_is_named(own, session, tag)
    heir = another(own)
    wait_until(lambda: tag in ready(heir.proxy)["journals"])
    assert heir.call("POST", "/rl/find_key", digest).json()["journal"] == tag
    assert own.call("GET", own.path(session)).status == 404
    _assert_refused_where_it_is_named(own, session, tag)


def _assert_refused_where_it_is_named(own: Pair, session: str, tag: str) -> None:
    """The router and the gateway name the journal: they ask again elsewhere, and answer no 404."""
    for method, path, body in (
        ("GET", own.path(session), None),
        ("POST", own.path(session, "/turn"), {"message": "b", "run_id": "r"}),
        ("POST", "/rl/start_session", {"api_key": session}),
    ):
        refused = own.proxy.call(method, path, body, key=own.key, headers={JOURNAL: tag})
        assert (refused.status, refused.json()["error"]["code"]) == (421, "session_elsewhere")


def test_stopped_data_proxy_finishes_its_turns(own: Pair) -> None:
    session = own.start("mine")
    running = own.later(session, "wait")
    own.wait_begun(session)
    own.proxy.signal(TERM)
    own.proxy.wait_log("drains 1 requests")
    own.release()
    assert running.result()[-1]["summary"] == "wait 0"
    assert own.proxy.wait() == 0
    own.restart()
    assert len(own.show(session)["history"]) == 2


def test_turn_orphaned_by_caller_can_be_repeated_after_restart(own: Pair) -> None:
    session = own.start("mine")
    stream = own.stream(session, "wait", idempotency_key="k")
    own.wait_begun(session)
    stream.close()
    own.proxy.signal(TERM)
    assert own.proxy.wait() == 0
    own.restart()
    (turn,) = own.show(session)["recorded_turns"]
    assert (turn["outcome"], turn["error"]) == ("infra", "the data proxy was stopped")
    again = own.later(session, "wait", idempotency_key="k")
    own.wait_begun(session, 2)
    own.release()
    assert again.result()[-1]["summary"] == "wait 0"


# -- the disk


def test_full_disk_is_507_before_agent_runs(own: Pair) -> None:
    session = own.start()
    own.say(session, "a")
    before = own.show(session)
    limit = resource.prlimit(own.proxy.popen.pid, resource.RLIMIT_FSIZE, (4096, -1))
    last = own.turn(session, "b")[-1]
    assert (last["failure"], "could not be recorded" in last["error"]) == ("infra", True)
    refused = own.call("POST", own.path(session, "/turn"), {"message": "c", "run_id": "r"})
    assert (refused.status, refused.json()["error"]["code"]) == (507, "storage_full")
    assert own.call("POST", "/rl/start_session", {}).status == 507
    assert own.call("POST", own.path(session, "/close")).status == 507
    assert len(own.calls(session)) == 2
    assert own.show(session) == before
    assert ready(own.proxy)["journal_failing"]
    resource.prlimit(own.proxy.popen.pid, resource.RLIMIT_FSIZE, limit)
    assert own.say(session, "d") == "d 2"
    own.proxy.kill()
    own.restart()
    assert len(own.show(session)["history"]) == 4


def test_damaged_turn_is_reported_and_other_sessions_are_served(own: Pair) -> None:
    bad, good = own.start("bad"), own.start("good")
    own.say(bad, "a")
    own.say(good, "a")
    own.proxy.kill()
    (file,) = own.state.rglob("journal.db")
    db = sqlite3.connect(file, isolation_level=None)
    db.execute("UPDATE turns SET messages=X'5B5D' WHERE id<2*4294967296")
    db.close()
    own.restart()
    answer = own.call("GET", own.path(bad))
    assert (answer.status, answer.json()["error"]["code"]) == (500, "record_corrupted")
    assert own.turn(bad, "b")[-1]["failure"] == "infra"
    assert own.say(good, "b") == "b 2"
    assert ready(own.proxy)["journal_damaged"] == 1
