"""Whose key opens what: the admin's everything, a session's its own session, and any other key nothing."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.services.inference.recorder.rollouts import CHAT, Rollout
from tests.services.inference.sessions.recording_service import RecordingService
from tests.services.inference.test_refusals import refused
from tests.services.processes import REPOSITORY

BODY = {"messages": [{"role": "user", "content": "Hello"}]}
ADMIN_ROUTES = [
    ("POST", "/rl/start_session"),
    ("GET", "/rl/sessions"),
    ("GET", "/rl/sessions/x-aaaaaaaa-1"),
    ("POST", "/export_trajectories"),
    ("POST", "/export_trajectories/ack"),
    ("GET", "/trajectories"),
    ("POST", "/trajectories/ack"),
]
SESSION_ROUTES = [("POST", CHAT), ("POST", "/rl/set_reward"), ("POST", "/rl/end_session"), ("GET", "/v1/models")]


@pytest.fixture(scope="module")
def rollout(shared_recording: RecordingService) -> Rollout:
    return shared_recording.begin()


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
def test_session_key_on_an_admin_route_is_403(
    recording: RecordingService, rollout: Rollout, method: str, path: str
) -> None:
    refused(recording.gateway.call(method, path, {}, key=rollout.key), 403)


@pytest.mark.parametrize(("method", "path"), [*ADMIN_ROUTES, *SESSION_ROUTES])
def test_missing_or_malformed_key_is_401(recording: RecordingService, method: str, path: str) -> None:
    refused(recording.gateway.call(method, path, BODY), 401)
    refused(recording.gateway.call(method, path, BODY, headers={"Authorization": "Bearer kl\xe9"}), 401)


@pytest.mark.parametrize(("method", "path"), SESSION_ROUTES)
@pytest.mark.parametrize("key", ["absent-key", f"sk-aaaaaaaa-{'x' * 43}"])
def test_key_without_session_is_401(recording: RecordingService, method: str, path: str, key: str) -> None:
    assert refused(recording.gateway.call(method, path, BODY, key=key), 401)["code"] == "invalid_api_key"


OF_SESSIONS = ("/v1/", "/rl/set_reward", "/rl/end_session")
COMPONENTS = {"gateway": "gateway", "router": "router", "data-proxy": "proxy"}


@pytest.mark.parametrize("component", COMPONENTS)
def test_session_key_opens_only_session_routes(recording: RecordingService, rollout: Rollout, component: str) -> None:
    """Over every documented route."""
    routes = yaml.safe_load((REPOSITORY / "docs/reference/routes.yaml").read_text())[component]["routes"]
    wanted = [route.split() for route in routes if not route.split()[1].startswith(OF_SESSIONS)]
    process, opened = getattr(recording, COMPONENTS[component]), {}
    for method, path in wanted:
        if path in ("/http_sd",) and method == "GET":
            continue  # as open as /metrics
        filled = re.sub(r"\{[^}]*\}", "all", path)
        answer = process.call(method, filled, {} if method != "GET" else None, key=rollout.key)
        if answer.status != 403:
            opened[method, path] = answer.status
    assert len(wanted) > 5 and opened == {}


def test_invented_key_with_the_tag_of_a_journal_is_401(recording: RecordingService, rollout: Rollout) -> None:
    invented = f"{rollout.key[:12]}{'x' * 43}"
    for method, path in SESSION_ROUTES:
        assert refused(recording.gateway.call(method, path, BODY, key=invented), 401)["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models/tiny"])
def test_key_of_ended_session_lists_no_models(recording: RecordingService, path: str) -> None:
    ended, exported = recording.begin(), recording.begin()
    for each in (ended, exported):
        assert recording.gateway.call("GET", path, key=each.key).status == 200
    recording.admin("POST", "/rl/end_session", {"session_id": ended.session_id})
    assert refused(recording.gateway.call("GET", path, key=ended.key), 409)["code"] == "session_ended"
    exported.chat("a")
    exported.reward(1.0)
    exported.export()
    assert refused(recording.gateway.call("GET", path, key=exported.key), 401)["code"] == "invalid_api_key"


def test_session_key_cannot_reward_other_session(recording: RecordingService, rollout: Rollout) -> None:
    other = recording.begin()
    other.chat("a")
    refused(rollout.post("/rl/set_reward", {"reward": 1.0, "session_id": other.session_id}), 403)
    assert other.reward(0.5)["trajectory_ready"]


def test_admin_key_is_refused_as_session_key(recording: RecordingService) -> None:
    body = {"task_id": "task", "api_key": recording.key}
    assert refused(recording.admin("POST", "/rl/start_session", body))["param"] == "api_key"


def test_session_key_is_bound_to_its_model(recording: RecordingService, rollout: Rollout) -> None:
    rollout.chat("a", model="tiny")
    refused(rollout.post(CHAT, {**BODY, "model": "another"}), 404)
