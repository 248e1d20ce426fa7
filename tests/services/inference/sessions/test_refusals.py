"""What a caller of sessions can get wrong: 4xx in OpenAI's shape, the field named, and nothing recorded."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from tests.services.inference.recorder.rollouts import CHAT, Rollout
from tests.services.inference.sessions.recording_service import RecordingService
from tests.services.inference.test_refusals import refused
from tests.services.processes import Answer, engine_calls

USER = {"role": "user", "content": "Hello"}


def interactions(recording: RecordingService, rollout: Rollout) -> int:
    reply = recording.admin("GET", f"/rl/sessions/{rollout.session_id}").json()
    return sum(len(trajectory["interactions"]) for trajectory in reply["trajectories"])


def raw(recording: RecordingService, path: str, body: bytes, key: bytes) -> Answer:
    """A call whose bytes no client library would send."""
    connection = http.client.HTTPConnection("127.0.0.1", recording.gateway.port, timeout=30)
    connection.putrequest("POST", path)
    connection.putheader("Authorization", b"Bearer " + key)
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body)
    response = connection.getresponse()
    answer = Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    connection.close()
    return answer


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "absent", "messages": [USER]}, 404),
        ({"n": 0, "messages": [USER]}, 400),
        ({"n": 1025, "messages": [USER]}, 400),
        ({"messages": []}, 400),
        ({"messages": [USER], "temperature": "hot"}, 400),
        ({"messages": [USER], "max_tokens": -1}, 400),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, 400),
    ],
    ids=["unknown-model", "n=0", "n=1025", "no-messages", "temperature", "max_tokens", "too-long"],
)
def test_bad_chat_of_a_session_is_refused_and_not_recorded(
    recording: RecordingService, body: dict[str, Any], status: int
) -> None:
    rollout = recording.begin()
    refused(rollout.post(CHAT, body), status)
    assert interactions(recording, rollout) == 0
    assert all(engine_calls(engine) == [] for engine in recording.engines)


@pytest.mark.parametrize("path", [CHAT, "/rl/set_reward", "/rl/end_session"])
@pytest.mark.parametrize("body", [b"{", b"[]", b'"text"', b"\xff\xfe{}", b'{"messages": "\xe9"}', b"nul"])
def test_non_object_body_is_400(recording: RecordingService, path: str, body: bytes) -> None:
    rollout = recording.begin()
    refused(raw(recording, path, body, rollout.key.encode()), 400)
    assert interactions(recording, rollout) == 0


@pytest.mark.parametrize("path", [CHAT, "/rl/set_reward", "/rl/start_session", "/export_trajectories", "/v1/messages"])
@pytest.mark.parametrize("key", [b"kl\xc3\xa9", b"\xff\xfe", b"a b"])
def test_malformed_key_is_401(recording: RecordingService, path: str, key: bytes) -> None:
    answer = raw(recording, path, json.dumps({"messages": [USER]}).encode(), key)
    assert answer.status == 401, answer.body


def test_oversized_body_is_413_and_not_recorded(recording: RecordingService) -> None:
    rollout = recording.begin()
    big = {"messages": [{"role": "user", "content": "x" * 2**20}]}
    recording.tell_router("/configure", limits={"max_body_bytes": 2**19})
    try:
        refused(rollout.post(CHAT, big), 413)
    finally:
        recording.tell_router("/configure", limits={"max_body_bytes": 2**25})
    refused(rollout.post("/rl/set_reward", {"reward": 1.0, "x": "x" * 2**21}), 413)
    assert interactions(recording, rollout) == 0


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e39", "true", '"1"', "null", "[1]"])
def test_invalid_reward_is_400_and_seals_nothing(recording: RecordingService, value: str) -> None:
    rollout = recording.begin()
    rollout.chat("a")
    refused(raw(recording, "/rl/set_reward", f'{{"reward": {value}}}'.encode(), rollout.key.encode()), 400)
    assert rollout.reward(1.0)["ready_transition"] is True


def test_reward_of_a_session_without_an_interaction_is_400(recording: RecordingService) -> None:
    refused(recording.begin().post("/rl/set_reward", {"reward": 1.0}), 400)


@pytest.mark.parametrize("path", ["/rl/set_reward", "/rl/end_session"])
def test_reward_for_missing_model_is_404_at_once(recording: RecordingService, path: str) -> None:
    answer = recording.admin("POST", path, {"reward": 1.0, "model": "absent"})
    assert refused(answer, 404)["code"] == "model_not_found"


def test_reward_of_foreign_interaction_is_refused(recording: RecordingService) -> None:
    first, second = recording.on_each_replica()
    interaction = first.chat("a")["id"]
    second.chat("b")
    answer = second.post("/rl/set_reward", {"reward": 1.0, "interaction_id": interaction})
    assert answer.status in (400, 404), answer.body
    refused(answer, answer.status)


def test_different_second_reward_is_409(recording: RecordingService) -> None:
    rollout = recording.begin()
    rollout.chat("a")
    first = rollout.reward(0.5)
    assert rollout.reward(0.5)["trajectory_id"] == first["trajectory_id"]
    refused(rollout.post("/rl/set_reward", {"reward": 0.75}), 409)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "session_ids"),
        ({"session_ids": []}, 400, "session_ids"),
        ({"session_ids": "a"}, 400, "session_ids"),
        ({"session_ids": [7]}, 400, "session_ids"),
        ({"session_ids": ["absent"]}, 404, "session_ids"),
        ({"session_ids": ["task-aaaaaaaa-1"]}, 404, None),
        ({"group_id": "grp"}, 404, "group_id"),
        ({"group_id": "grp-aaaaaaaa-1-1"}, 404, None),
    ],
)
def test_export_of_missing_session_is_refused(
    recording: RecordingService, body: dict[str, Any], status: int, param: str | None
) -> None:
    error = refused(recording.admin("POST", "/export_trajectories", body), status)
    assert param in (None, error["param"]) or error["param"] == "session_id"


@pytest.mark.parametrize(
    ("field", "value"), [("style", "poem"), ("format", "csv"), ("discount", 1.5), ("trajectory_id", -1)]
)
def test_invalid_export_option_is_400_on_any_replicas(recording: RecordingService, field: str, value: object) -> None:
    rollouts = recording.on_each_replica()
    for rollout in rollouts:
        rollout.chat("a")
        rollout.reward(1.0)
    for chosen in (rollouts[:1], rollouts):
        ids = [rollout.session_id for rollout in chosen]
        body = {"session_ids": ids, field: value}
        assert refused(recording.admin("POST", "/export_trajectories", body))["param"] == field
    for rollout in rollouts:
        rollout.export()  # nothing was taken


def test_export_of_unready_session_is_425(recording: RecordingService) -> None:
    rollout = recording.begin()
    rollout.chat("a")
    answer = recording.admin("POST", "/export_trajectories", {"session_ids": [rollout.session_id]})
    refused(answer, 425)
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("export_id", [None, 7, "", "exp", "~", "exp-aaaaaaaa-1-12345678~nothing"])
def test_ack_of_invalid_export_is_400(recording: RecordingService, export_id: object) -> None:
    error = refused(recording.admin("POST", "/export_trajectories/ack", {"export_id": export_id}))
    assert error["param"] == "export_id"


@pytest.mark.parametrize("session_id", ["absent", "task-aaaaaaaa-1", "..%2F..%2Fetc"])
def test_unknown_session_is_404(recording: RecordingService, session_id: str) -> None:
    refused(recording.admin("GET", f"/rl/sessions/{session_id}"), 404)
    refused(recording.admin("POST", "/rl/end_session", {"session_id": session_id}), 404)


@pytest.mark.parametrize("body", [{}, {"task_id": ""}, {"task_id": 7}, {"task_id": "a\nb"}, {"task_id": "x" * 257}])
def test_session_without_a_task_is_400(recording: RecordingService, body: dict[str, Any]) -> None:
    assert refused(recording.admin("POST", "/rl/start_session", body))["param"] == "task_id"


@pytest.mark.parametrize("key", ["short", "with a space", "kl\xe9sschen", 7, "x" * 513, f"sk-aaaaaaaa-{'x' * 43}"])
def test_invalid_own_key_is_refused(recording: RecordingService, key: object) -> None:
    answer = recording.admin("POST", "/rl/start_session", {"task_id": "task", "api_key": key})
    assert answer.status in (400, 404), answer.body


def test_session_of_an_unknown_model_is_404(recording: RecordingService) -> None:
    refused(recording.admin("POST", "/rl/start_session", {"task_id": "task", "model": "absent"}), 404)


def test_unknown_fields_of_bodies_are_listed_as_ignored(recording: RecordingService) -> None:
    started = recording.admin("POST", "/rl/start_session", {"task_id": "t", "group_sise": 2, "x": None, "a b": 1})
    (session,) = started.json()["sessions"]
    assert started.headers["x-areal-ignored"] == "a%20b, group_sise"
    key, body = session["session_api_key"], {"messages": [USER]}
    assert recording.gateway.call("POST", CHAT, body, key=key).status == 200
    rewarded = recording.gateway.call("POST", "/rl/set_reward", {"reward": 1, "interaction": "first"}, key=key)
    assert (rewarded.status, rewarded.headers.get("x-areal-ignored")) == (200, "interaction")
    ended = recording.gateway.call("POST", "/rl/end_session", {"session": "x"}, key=key)
    assert (ended.status, ended.headers.get("x-areal-ignored")) == (200, "session")
    wanted = {"session_ids": [session["session_id"]], "stile": "concat"}
    exported = recording.admin("POST", "/export_trajectories", wanted)
    assert (exported.status, exported.headers.get("x-areal-ignored")) == (200, "stile")
