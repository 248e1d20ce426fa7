"""The RL sessions behind an agent's sessions, at a real inference service."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.agent.data_proxy.pair import Pair, start_pair
from tests.services.inference.sessions.recording_service import RecordingService, build_recording_service
from tests.services.processes import Processes, wait_ready, wait_until


@pytest.fixture(scope="module")
def inference(
    module_processes: Processes, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> RecordingService:
    return build_recording_service(module_processes, tokenizer, tmp_path_factory.mktemp("recordings"), replicas=1)


@pytest.fixture(scope="module")
def trained(inference: RecordingService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair whose sessions are recorded."""
    access = {"addr": inference.gateway.url, "admin_key_file": str(inference.processes.key_file), "model": "tiny"}
    state = tmp_path_factory.mktemp("state")
    yield start_pair(inference.processes, state, "--inference", json.dumps(access))


def rl_session(pair: Pair, session: str) -> str:
    name: str = pair.show(session)["inference_session_id"]
    return name


def state_of(inference: RecordingService, rl: str) -> str:
    state: str = inference.admin("GET", f"/rl/sessions/{rl}").json()["state"]
    return state


def reward(pair: Pair, session: str, value: float = 1.0) -> dict[str, Any]:
    answer = pair.call("POST", pair.path(session, "/reward"), {"reward": value})
    assert answer.status == 200, answer.body
    rewarded: dict[str, Any] = answer.json()
    return rewarded


def test_model_calls_of_turn_are_recorded_rewarded_and_exported(trained: Pair) -> None:
    session = trained.start(metadata={"task_id": "gsm8k-7"})
    rl = rl_session(trained, session)
    assert rl.startswith("gsm8k-7-")
    trained.say(session, "model")
    assert reward(trained, session, 0.5)["trajectory_ready"]
    exported = trained.call("POST", trained.path(session, "/export"), {"style": "concat"}).json()
    assert [row["session_id"] for row in exported["rows"]] == [rl]
    assert exported["traj"]["rewards"] == [0.5]


def test_export_can_give_reward(trained: Pair) -> None:
    session = trained.start()
    trained.say(session, "model")
    exported = trained.call("POST", trained.path(session, "/export"), {"reward": 0.75}).json()
    assert exported["traj"]["rewards"] == [0.75]


def test_exported_rl_session_is_not_queried_or_ended_again(trained: Pair, inference: RecordingService) -> None:
    session = trained.start()
    trained.say(session, "model")
    before = rl_session(trained, session)
    assert trained.call("POST", trained.path(session, "/export"), {"reward": 1.0}).status == 200
    reported = trained.turn(session, "model")[-1]["metadata"]["areal_inference"]
    assert (reported["replaced"], reported["reason"]) == (before, "it was exported")
    assert trained.call("POST", trained.path(session, "/export"), {"reward": 1.0}).status == 200
    ends = ends_asked(inference)
    trained.call("POST", trained.path(session, "/close"))
    assert ends_asked(inference) == ends


def ends_asked(inference: RecordingService) -> float:
    """Requests to end an RL session."""
    page = inference.gateway.call("GET", "/metrics", key=inference.key).body.decode()
    own = (line for line in page.splitlines() if line.startswith('areal_http_requests_total{route="/rl/end_session"'))
    return sum(float(line.split()[-1]) for line in own)


def test_exported_rl_session_is_replaced_before_next_turn(trained: Pair) -> None:
    session = trained.start()
    trained.say(session, "model")
    reward(trained, session)
    first = rl_session(trained, session)
    assert trained.call("POST", trained.path(session, "/export"), {}).status == 200
    for verb, body in (("/reward", {"reward": 0}), ("/export", {"style": "concat"})):
        refused = trained.call("POST", trained.path(session, verb), body)
        assert (refused.status, refused.json()["error"]["code"]) == (409, "rl_session_ended"), verb
    last = trained.turn(session, "model")[-1]
    reported = last["metadata"]["areal_inference"]
    assert (reported["replaced"], reported["session_id"]) == (first, rl_session(trained, session))
    assert reported["session_id"] != first
    assert reward(trained, session)["session_id"] == reported["session_id"]
    assert "areal_inference" not in trained.turn(session, "model")[-1]["metadata"]


def test_ended_rl_session_fails_one_turn(trained: Pair, inference: RecordingService) -> None:
    session = trained.start()
    inference.admin("POST", "/rl/end_session", {"session_id": rl_session(trained, session)})
    assert trained.turn(session, "model")[-1]["failure"] == "agent"
    assert trained.turn(session, "model")[-1]["metadata"]["areal_inference"]["reason"] == "it has ended"


def test_rl_session_survives_data_proxy_restart(trained: Pair, inference: RecordingService) -> None:
    kept, ended = trained.start(), trained.start()
    trained.say(kept, "model")
    before, gone = rl_session(trained, kept), rl_session(trained, ended)
    trained.proxy.kill()
    inference.admin("POST", "/rl/end_session", {"session_id": gone})
    trained.restart()
    assert trained.turn(ended, "model")[-1]["metadata"]["areal_inference"]["replaced"] == gone
    trained.say(kept, "model")
    assert rl_session(trained, kept) == before
    assert reward(trained, kept)["interaction_count"] == 2


def test_rl_session_key_is_visible_to_agent_only(trained: Pair) -> None:
    session = trained.start()
    reported = [
        trained.turn(session, "model"),
        trained.show(session),
        trained.call("GET", "/sessions?limit=1000").json(),
    ]
    access = trained.calls(session)[0]["metadata"]["areal_inference"]
    assert access["model"] == "tiny"
    assert len(access["api_key"]) > 40
    assert access["api_key"] not in json.dumps(reported)
    assert access["api_key"] not in "".join(trained.proxy.log)


def test_close_ends_rl_session(trained: Pair, inference: RecordingService) -> None:
    session = trained.start()
    rl = rl_session(trained, session)
    trained.say(session, "model")
    assert state_of(inference, rl) == "active"
    ends = ends_asked(inference)
    trained.call("POST", trained.path(session, "/close"))
    assert state_of(inference, rl) == "ended"
    assert ends_asked(inference) == ends + 1


def test_caller_may_supply_its_rl_session(trained: Pair, inference: RecordingService) -> None:
    theirs, other = inference.begin(), inference.begin()
    access = {"base_url": inference.gateway.url, "api_key": theirs.key, "model": "tiny"}
    session = trained.start(inference=access)
    assert rl_session(trained, session) is None
    trained.say(session, "model")
    assert reward(trained, session)["session_id"] == theirs.session_id
    refused = trained.call("POST", trained.path(session, "/export"), {})
    assert (refused.status, refused.json()["error"]["code"]) == (400, "not_our_rl_session")
    trained.say(session, "model", inference={**access, "api_key": other.key})
    assert reward(trained, session)["session_id"] == other.session_id
    trained.call("POST", trained.path(session, "/close"))
    assert state_of(inference, other.session_id) == "active"


def test_disconnect_of_collected_turn_drops_its_rl_session(trained: Pair, inference: RecordingService) -> None:
    theirs = inference.begin()
    session = trained.start()
    own = rl_session(trained, session)
    running = trained.later(session, "wait")
    trained.wait_begun(session)
    access = {"base_url": inference.gateway.url, "api_key": theirs.key, "model": "tiny"}
    leaving = trained.stream(session, "b", inference=access)
    staying = trained.later(session, "c")
    wait_until(lambda: trained.show(session)["waiting"] == 2)
    leaving.close()
    wait_until(lambda: trained.show(session)["waiting"] == 1)
    trained.release()
    running.result()
    assert staying.result()[-1]["type"] == "complete"
    assert rl_session(trained, session) == own


def test_unknown_rl_session_key_is_refused_before_turn(trained: Pair, inference: RecordingService) -> None:
    access = {"base_url": inference.gateway.url, "api_key": "absent", "model": "tiny"}
    session = trained.start()
    turn = {"message": "free", "run_id": "run-x", "inference": access}
    for path, body in (("/rl/start_session", {"inference": access}), (trained.path(session, "/turn"), turn)):
        refused = trained.call("POST", path, body)
        assert (refused.status, refused.json()["error"]["code"]) == (401, "invalid_session_api_key"), path
    assert trained.show(session)["turns"] == 0
    assert "replaced" not in trained.turn(session, "model")[-1]["metadata"]


def test_pair_with_refused_key_is_unready_until_key_is_fixed(
    trained: Pair, inference: RecordingService, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    file.touch(mode=0o600)
    file.write_text("another-key-of-before-0123456789")
    access = {"addr": inference.gateway.url, "admin_key_file": str(file), "model": "tiny"}
    flags = ("--worker-url", trained.worker.url, "--state-dir", str(tmp_path / "state"))
    proxy = trained.processes.service("agent.data_proxy", *flags, "--inference", json.dumps(access))

    def reported() -> str:
        return str(proxy.call("GET", "/ready").json().get("reason"))

    wait_until(lambda: "refuses this service's key" in reported(), what="the reason")
    assert str(file) in reported()
    file.write_text(inference.processes.key)
    started = proxy.call("POST", "/rl/start_session", {}, key=inference.processes.key)
    assert started.status == 201, "a call does not wait for the next probe"
    wait_ready(proxy)


def test_export_during_turn_is_409(trained: Pair) -> None:
    session = trained.start()
    running = trained.later(session, "wait")
    trained.wait_begun(session)
    refused = trained.call("POST", trained.path(session, "/export"), {})
    assert (refused.status, refused.json()["error"]["code"]) == (409, "turn_running")
    trained.release()
    running.result()


def test_session_does_not_start_without_its_inference_service(processes: Processes, tmp_path: Path) -> None:
    pair = start_pair(processes, tmp_path / "state", "--inference", '{"addr": "http://127.0.0.1:9"}')
    refused = pair.call("POST", "/rl/start_session", {"api_key": "mine"})
    assert (refused.status, refused.json()["error"]["code"]) == (503, "inference_unavailable")
    assert pair.call("GET", "/sessions").json()["sessions"] == []
