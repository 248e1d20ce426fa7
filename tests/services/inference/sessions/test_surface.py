"""Every documented route exists where it is documented, and asks for a key."""

from __future__ import annotations

import pytest

from tests.services.inference.sessions.recording_service import RecordingService
from tests.services.inference.test_refusals import refused

MODEL_CALLS = [
    f"{prefix}/{call}"
    for prefix in ("/v1", "")
    for call in ("chat/completions", "completions", "responses", "messages", "messages/count_tokens")
]
SESSIONS = ["/rl/start_session", "/rl/set_reward", "/rl/end_session"]
EXPORTS = ["/export_trajectories", "/export_trajectories/ack", "/trajectories/ack"]
CONTROLS = [
    "/pause_generation",
    "/continue_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/set_version",
]
GATEWAY = [
    *(("POST", path) for path in (*MODEL_CALLS, *SESSIONS, *EXPORTS, "/register_model", "/deregister_model")),
    *(("POST", f"{path}/all") for path in (*CONTROLS, "/drain", "/undrain")),
    *(
        ("GET", path)
        for path in (
            "/v1/models",
            "/models",
            "/models/tiny",
            "/rl/sessions",
            "/rl/sessions/x-aaaaaaaa-1",
            "/trajectories",
        )
    ),
    *(("GET", path) for path in ("/get_version/all", "/workers")),
]
ROUTER = [
    *(("POST", path) for path in ("/register", "/unregister", "/route", "/register_session", "/remove_session")),
    *(("POST", path) for path in ("/register_model", "/remove_model", "/drain", "/undrain", "/configure", "/synced")),
    *(("GET", path) for path in ("/workers", "/models", "/resolve_worker/tiny-0", "/watch", "/table")),
]
DATA_PROXY = [
    *(
        ("POST", path)
        for path in (*MODEL_CALLS, *SESSIONS, *EXPORTS, *CONTROLS, "/register_model", "/configure_backend")
    ),
    *(("GET", path) for path in ("/get_version", "/rl/sessions", "/trajectories", "/v1/models", "/models")),
]


@pytest.mark.parametrize(
    ("component", "method", "path"),
    [
        (name, *route)
        for name, routes in (("gateway", GATEWAY), ("router", ROUTER), ("proxy", DATA_PROXY))
        for route in routes
    ],
)
def test_route_exists_and_requires_key(recording: RecordingService, component: str, method: str, path: str) -> None:
    answer = getattr(recording, component).call(method, path, {} if method == "POST" else None)
    assert answer.status == 401, (answer.status, answer.body)


@pytest.mark.parametrize("component", ["gateway", "router", "proxy"])
@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
def test_probe_is_open_on_loopback(recording: RecordingService, component: str, path: str) -> None:
    assert getattr(recording, component).call("GET", path).status == 200


def test_router_resolves_workers_and_removes_groups(recording: RecordingService) -> None:
    worker = recording.router.call("GET", "/resolve_worker/tiny-0", key=recording.key).json()
    assert (worker["worker_id"], worker["worker_addr"]) == ("tiny-0", recording.proxy.url)
    refused(recording.router.call("GET", "/resolve_worker/absent", key=recording.key), 404)
    started = recording.router.call("POST", "/register_session", {"task_id": "t", "group_size": 2}, key=recording.key)
    assert started.status == 201
    group = {"group_id": started.json()["group_id"]}
    reply = recording.router.call("POST", "/remove_session", group, key=recording.key).json()
    assert (reply["removed"], len(reply["ended"])) == (True, 2)
    refused(recording.router.call("POST", "/remove_session", {"group_id": "grp"}, key=recording.key), 404)
