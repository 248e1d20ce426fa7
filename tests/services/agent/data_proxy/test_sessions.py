"""Sessions of a data proxy: their keys, their start and end, and who may ask for them."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from areal.services.journal.keys import key_digest, tag_of_key
from tests.services.agent.data_proxy.pair import Pair, start_proxy
from tests.services.processes import TERM, wait_until

AWKWARD = (
    "/",
    "..",
    ".",
    "a/b/../c",
    "%2F",
    "%",
    "a b",
    "?x=1",
    "#",
    "é",
    "日本語",
    "\u202e",
    "ключ/1",
    "x" * 1024,
    "é" * 512,
    "'\"\\",
)


@pytest.mark.parametrize("key", AWKWARD, ids=range(len(AWKWARD)))
def test_every_key_has_its_own_session(pair: Pair, key: str) -> None:
    assert pair.start(key) == key
    assert pair.say(key, "a") == "a 0"
    assert pair.call("GET", pair.path(key, "/history")).json()["session_key"] == key
    found = pair.call("POST", "/rl/find_key", {"digest": key_digest(key.encode()).hex()}).json()
    assert found["journal"] in pair.proxy.call("GET", "/ready").json()["journals"]
    assert pair.call("DELETE", pair.path(key, "/turn")).json() == {"session_key": key, "cancelled": False}
    assert pair.call("POST", pair.path(key, "/close")).json() == {"session_key": key, "closed": True}
    assert key in pair.reported("closed")["closed"]
    assert pair.call("GET", pair.path(key)).json()["error"]["code"] == "session_ended"


@pytest.mark.parametrize("key", ["", "a\n", "x" * 1025, "é" * 513, "\x7f"])
def test_invalid_key_is_refused(pair: Pair, key: str) -> None:
    refused = pair.call("POST", "/rl/start_session", {"api_key": key})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "api_key")


def test_generated_keys_are_random_and_carry_journal_tag(pair: Pair) -> None:
    first, second = pair.start(), pair.start()
    assert first != second
    assert len(first) > 50
    assert tag_of_key(first) == pair.proxy.call("GET", "/ready").json()["journals"][0]


def test_concurrent_starts_with_one_key_return_one_session(pair: Pair) -> None:
    with ThreadPoolExecutor(16) as pool:
        started = list(
            pool.map(
                lambda number: pair.call(
                    "POST", "/rl/start_session", {"api_key": "the-same", "metadata": {"n": number}}
                ),
                range(16),
            )
        )
    assert [answer.status for answer in started] == [201] * 16
    assert sum(answer.json()["sessions"][0]["created"] for answer in started) == 1
    assert sum(each["session_key"] == "the-same" for each in listed(pair)) == 1


def listed(pair: Pair, limit: int = 1000) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = ""
    while True:
        page = pair.call("GET", f"/sessions?limit={limit}&after={after}").json()
        found += page["sessions"]
        if page["next"] is None:
            return found
        after = page["next"]


def test_sessions_are_paginated_in_key_order(pair: Pair) -> None:
    keys = [f"page-{number}" for number in range(7)]
    for key in keys:
        pair.start(key, metadata={"of": key})
    for limit in (1, 3, 1000):
        found = [each["session_key"] for each in listed_from(pair, "page-", limit)]
        assert found[:7] == keys
    (one,) = [each for each in listed(pair) if each["session_key"] == "page-3"]
    assert (one["state"], one["turns"], one["metadata"], one["running"]) == ("idle", 0, {"of": "page-3"}, None)
    assert "history" not in one


def listed_from(pair: Pair, after: str, limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < 7:
        page = pair.call("GET", f"/sessions?limit={limit}&after={after}").json()
        found += page["sessions"]
        after = page["next"]
    return found


def test_unknown_session_is_404_everywhere(pair: Pair) -> None:
    turn, reward = {"message": "a", "run_id": "r"}, {"reward": 1.0}
    for method, verb, body in (
        ("GET", "", None),
        ("POST", "/turn", turn),
        ("DELETE", "/turn", None),
        ("POST", "/close", {}),
        ("POST", "/reward", reward),
        ("POST", "/export", {}),
    ):
        answer = pair.call(method, pair.path("absent", verb), body)
        assert (answer.status, answer.json()["error"]["code"]) == (404, "session_not_found"), verb


def test_bad_requests_are_refused_by_name(pair: Pair) -> None:
    session = pair.start()
    path, turn = pair.path(session, "/turn"), {"message": "a", "run_id": "r"}
    for body, param in (
        ({"run_id": "r"}, "message"),
        ({**turn, "queue_mode": "later"}, "queue_mode"),
        ({**turn, "idempotency_key": ""}, "idempotency_key"),
        ({**turn, "metadata": {"areal_inference": {}}}, "metadata.areal_inference"),
    ):
        answer = pair.call("POST", path, body)
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    assert pair.call("POST", "/rl/start_session", {"metadata": {"areal_inference": 1}}).status == 400
    assert pair.call("POST", "/rl/start_session", {"model": "other"}).status == 404
    assert pair.call("POST", "/configure", {"idle_timeout": 0}).status == 400
    assert pair.call("POST", pair.path(session, "/reward"), {"reward": 1.0}).json()["error"]["code"] == "no_inference"
    assert pair.calls(session) == []


def test_routes_require_admin_key(pair: Pair) -> None:
    session = pair.start()
    for method, path in (("POST", "/rl/start_session"), ("GET", "/sessions"), ("POST", pair.path(session, "/turn"))):
        assert pair.proxy.call(method, path, {}).status == 401
        assert pair.proxy.call(method, path, {}, key="wrong-key-0123456789").status in (401, 403)


def test_close_ends_turns_and_key_can_be_reopened(pair: Pair) -> None:
    session = pair.start("again")
    pair.say(session, "a")
    running, waiting = pair.later(session, "wait"), None
    pair.wait_begun(session, 2)
    waiting = pair.later(session, "b")
    wait_until(lambda: pair.show(session)["waiting"] == 1)
    assert pair.call("POST", pair.path(session, "/close")).status == 200
    for turn in (running, waiting):
        assert turn.result()[-1] == {"type": "failed", "failure": "cancelled", "error": "the session was closed"}
    assert pair.start("again", reopen=True) == session
    assert pair.say(session, "c") == "c 0"


@pytest.mark.extended
def test_key_of_ended_session_is_not_reused_without_reopen(own: Pair) -> None:
    made, chosen = own.start(), own.start("chosen")
    for session in (made, chosen):
        own.say(session, "a")
        assert own.call("POST", own.path(session, "/close")).status == 200

    def refused(pair: Pair) -> None:
        for session in (made, chosen):
            for path, body in (
                (pair.path(session, "/turn"), {"message": "b", "run_id": "r"}),
                ("/rl/start_session", {"api_key": session}),
            ):
                answer = pair.call("POST", path, body)
                assert (answer.status, answer.json()["error"]["code"]) == (410, "session_ended")

    refused(own)
    own.proxy.signal(TERM)
    own.proxy.wait()
    own.restart()
    refused(own)
    (tag,) = own.proxy.call("GET", "/ready").json()["journals"]
    heir = Pair(own.processes, own.worker, start_proxy(own.processes, own.worker, own.state, uid="heir"), own.state)
    own.proxy.kill()
    wait_until(lambda: heir.call("GET", heir.path(chosen)).status == 410)
    wait_until(lambda: tag not in heir.proxy.call("GET", "/ready").json()["journals"])  # what it knew has its heir
    found = heir.call("POST", "/rl/find_key", {"digest": key_digest(chosen.encode()).hex()}).json()
    assert found["journal"] == heir.proxy.call("GET", "/ready").json()["journals"][0]
    assert heir.call("GET", heir.path(chosen)).status == 410
    assert heir.start(chosen, reopen=True) == chosen
    assert heir.say(chosen, "c") == "c 0"


def test_state_files_are_private_to_owner(pair: Pair) -> None:
    pair.say(pair.start(), "a")
    files = [path for path in pair.state.rglob("*") if path.name.startswith("journal.db")]
    assert {path.name for path in files} == {"journal.db", "journal.db-wal"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700


def test_idle_session_is_closed_unless_a_turn_runs(own: Pair) -> None:
    idle, busy = own.start("idle"), own.start("busy")
    own.say(idle, "a")
    running = own.later(busy, "wait")
    own.wait_begun(busy)
    assert own.call("POST", "/configure", {"idle_timeout": 0.5}).json()["idle_timeout"] == 0.5
    assert own.reported("closed")["closed"] == ["idle"]
    wait_until(lambda: own.call("GET", own.path(idle)).status == 410)
    unused = own.start("unused")
    wait_until(lambda: own.call("GET", own.path(unused)).status == 410)
    assert own.show(busy)["state"] == "running"
    own.release()
    assert running.result()[-1]["summary"] == "wait 0"
    wait_until(lambda: own.call("GET", own.path(busy)).status == 410)
    assert own.reported("closed", 2)["closed"] == ["idle", "busy"]
    wait_until(lambda: own.proxy.call("GET", "/ready").json()["sessions"] == 0)


def test_configured_settings_survive_restart(own: Pair, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"max_concurrent": 4, "idle_timeout": 60}')
    own.proxy.kill()
    own.flags = ("--config", str(config))
    own.restart()
    reported = own.proxy.call("GET", "/ready").json()["settings"]
    assert reported == {"idle_timeout": 60, "turn_timeout": 600, "max_concurrent": 4, "health_period": 0.5}
    changes = {"idle_timeout": 90, "health_period": 0.25, "turn_timeout": 9}
    assert own.call("POST", "/configure", changes).status == 200
    own.proxy.kill()
    own.restart()
    reported = own.proxy.call("GET", "/ready").json()["settings"]
    assert reported == {
        "idle_timeout": 90,
        "turn_timeout": 9,
        "max_concurrent": 4,
        "health_period": 0.5,
    }  # the flag wins


def test_metrics_count_sessions_and_turns(own: Pair) -> None:
    session = own.start()
    own.say(session, "a")
    own.turn(session, "fail")
    scraped = own.proxy.call("GET", "/metrics").body.decode()
    for line in (
        "areal_sessions_open 1.0",
        "areal_sessions_started_total 1.0",
        'areal_agent_turns_total{outcome="complete"} 1.0',
        'areal_agent_turns_total{outcome="agent"} 1.0',
        "areal_agent_turn_seconds_count 2.0",
        "areal_agent_turns_running 0.0",
        "areal_agent_turns_waiting 0.0",
    ):
        assert line in scraped.splitlines(), line
