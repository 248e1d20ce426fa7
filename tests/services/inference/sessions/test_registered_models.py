"""External APIs that are registered at the gateway, and engines that are exchanged, while everything runs.

The API is this service's own gateway: OpenAI-compatible, and it takes a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from areal.client.inference import AsyncInferenceClient
from areal.rollout.sessions import reward_session
from areal.rollout.workflows import trajectory_rows
from tests.services.inference.running_service import CHAT
from tests.services.inference.sessions.recording_service import RecordingService, tag_of
from tests.services.inference.sessions.test_online import take
from tests.services.inference.test_refusals import refused
from tests.services.processes import Answer, engine_calls, script, wait_until

Build = Callable[..., RecordingService]
BODY = {"model": "friend", "messages": [{"role": "user", "content": "Hello"}]}


def register(service: RecordingService, **more: Any) -> Answer:
    api = {"model": "friend", "url": f"{service.gateway.url}/v1", "api_key": service.key, "provider_model": "tiny"}
    body = {name: value for name, value in {**api, **more}.items() if value is not None}
    return service.admin("POST", "/register_model", body)


def deregister(service: RecordingService) -> Answer:
    return service.admin("POST", "/deregister_model", {"model": "friend"})


@pytest.fixture
def friend(recording: RecordingService) -> Iterator[RecordingService]:
    answer = register(recording)
    assert answer.status == 200, answer.body
    assert sorted(answer.json()["data_proxy_addrs"]) == sorted(proxy.url for proxy in recording.proxies)
    yield recording
    assert deregister(recording).json() == {"status": "ok", "model": "friend"}


def test_registered_api_is_listed_called_and_deregistered(recording: RecordingService) -> None:
    assert register(recording).status == 200
    assert recording.models() == ["tiny", "friend"]
    listed = recording.admin("GET", "/v1/models").json()["data"]
    assert [entry.keys() & {"root", "max_model_len"} for entry in listed] == [{"max_model_len"}, set()]
    results = recording.admin("GET", "/get_version/all").json()["results"]
    models = {each["worker_id"]: each["model"] for each in recording.workers()}
    assert {models[result["worker_id"]] for result in results} == {"tiny"}
    assert recording.admin("POST", CHAT, BODY).json()["choices"][0]["message"]["content"] == "Hello there, friend!"
    assert deregister(recording).status == 200
    assert recording.models() == ["tiny"]
    refused(recording.admin("POST", CHAT, BODY), 404)
    for proxy in recording.proxies:
        refused(proxy.call("POST", CHAT, BODY, key=recording.key), 404)
    refused(deregister(recording), 404)


def test_session_of_registered_api_is_recorded_as_messages(friend: RecordingService) -> None:
    rollouts = friend.on_each_replica(model="friend")
    for rollout in rollouts:
        rollout.chat("a", model="friend")
        assert rollout.reward(1.0)["trajectory_ready"]
    ids = [rollout.session_id for rollout in rollouts]
    exported = friend.admin("POST", "/export_trajectories", {"session_ids": ids}).json()
    assert [row["model"] for row in exported["rows"]] == ["friend", "friend"]
    for interaction in exported["traj"]["interactions"]:
        assert interaction["messages"] == [{"role": "user", "content": "a"}]
        assert interaction["response"]["content"] == "Hello there, friend!"
        assert interaction["reward"] == 1.0


def test_text_and_token_sessions_export_together(friend: RecordingService) -> None:
    text, tokens = friend.on_each_replica(model="tiny")
    text.chat("a", model="friend")
    tokens.chat("a", model="tiny")
    for rollout in (text, tokens):
        rollout.reward(1.0)
    ids = [text.session_id, tokens.session_id]
    npz = friend.admin("POST", "/export_trajectories", {"session_ids": ids, "format": "npz"})
    assert refused(npz)["param"] == "format"
    exported = friend.admin("POST", "/export_trajectories", {"session_ids": ids}).json()
    assert [(row["session_id"], row["kind"]) for row in exported["rows"]] == [
        (tokens.session_id, "tokens"),
        (text.session_id, "text"),
    ]
    assert len(exported["traj"]["input_ids"]) == len(exported["traj"]["interactions"]) == 1
    assert exported["traj"]["rewards"] == [1.0]


def test_session_keeps_both_policy_and_judge_calls(friend: RecordingService) -> None:
    session = friend.begin(model="tiny")
    session.chat("a", model="tiny")
    session.chat("b", model="friend")
    assert session.reward(0.5)["trajectory_id"] == 1  # of the newest interaction, the judge's
    session.post("/rl/end_session", {})

    def taken(kind: str = "") -> list[dict[str, Any]]:
        """Ours, of all that there are: other tests' are lent again after a minute."""
        return [each for each in take(friend, limit=1000, kind=kind) if each["session_id"] == session.session_id]

    found = {item["trajectory_id"]: item for item in taken()}
    assert sorted(found) == [0, 1]
    assert ([*found[1]["traj"]], found[0]["traj"]["rewards"]) == (["interactions"], [0.0])
    assert [row["rewarded"] for row in (*found[0]["rows"], *found[1]["rows"])] == [False, True]
    assert not taken(kind="text"), "they are lent"
    exported = session.export()
    assert [row["kind"] for row in exported["rows"]] == ["tokens", "text"]
    assert len(exported["traj"]["input_ids"]) == len(exported["traj"]["interactions"]) == 1


async def test_reward_of_judged_agent_reaches_policy_tokens(friend: RecordingService) -> None:
    async with AsyncInferenceClient(friend.gateway.url, friend.key) as client:
        session = await client.start_session("task", model="tiny", online=False)
        for model in ("tiny", "friend"):
            await session.chat([{"role": "user", "content": "a"}], model=model)
        await reward_session(session, 0.5)
        exported = await session.export()
        assert exported.columns["rewards"].tolist() == [0.5]
        assert [each["reward"] for each in exported.interactions] == [0.5]
        assert [row["rewarded"] for row in exported.rows] == [True, True]
        assert exported.token_rows == exported.rows[:1]
        assert len(trajectory_rows(exported)["truncated"]) == 1


def test_session_is_routed_to_engine_model_beside_external(friend: RecordingService) -> None:
    session = {"session_id": friend.begin(model="tiny").session_id}
    assert friend.router.call("POST", "/route", session, key=friend.key).json()["model"] == "tiny"


def test_allow_private_field_permits_private_address(recording: RecordingService) -> None:
    error = refused(register(recording, url="http://10.0.0.1/v1"), 400)
    assert "set allow_private: true" in error["message"]


@pytest.mark.parametrize(
    ("more", "status", "param"),
    [
        ({"url": "http://127.0.0.1:9/v1"}, 502, "url"),
        ({"api_key": "not-the-key"}, 502, "url"),
        ({"url": "http://169.254.169.254/latest"}, 400, "url"),
        ({"url": "ftp://api/v1"}, 400, "url"),
        ({"url": "http://user:secret@127.0.0.1/v1"}, 400, "url"),
        ({"url": 7}, 400, "url"),
        ({"api": "soap"}, 400, "api"),
        ({"api_key": "two words"}, 400, "api_key"),
        ({"model": "tiny"}, 409, "name"),
        ({"model": "no such name!"}, 400, "name"),
        ({"model": None}, 400, "model"),
        ({"url": None}, 400, "api_key"),
        ({"data_proxy_addrs": ["127.0.0.1:9"]}, 502, None),
    ],
)
def test_invalid_registration_is_refused_without_effect(
    recording: RecordingService, more: dict[str, Any], status: int, param: str | None
) -> None:
    answer = register(recording, **more)
    assert answer.json()["error"]["param"] == param, answer.body
    refused(answer, status)
    assert b"secret" not in answer.body and recording.key.encode() not in answer.body
    assert recording.models() == ["tiny"]
    for proxy in recording.proxies:
        assert proxy.call("GET", "/v1/models", key=recording.key).json()["models"] == ["tiny"]


def test_registration_refused_by_one_proxy_is_rolled_back(recording: RecordingService) -> None:
    addrs = [recording.proxy.url, "127.0.0.1:9"]
    refused(register(recording, data_proxy_addrs=addrs), 502)
    assert recording.proxy.call("GET", "/v1/models", key=recording.key).json()["models"] == ["tiny"]


@pytest.mark.extended
def test_registered_api_survives_data_proxy_restart(build: Build) -> None:
    service = build(replicas=1)
    assert register(service).status == 200
    rollout = service.begin(model="friend")
    rollout.chat("a", model="friend")
    service.proxy.kill()
    restarted = service.start_proxy(0)
    assert restarted.call("GET", "/v1/models", key=service.key).json()["models"] == ["tiny", "friend"]
    files = list(service.state.glob("*.json"))
    assert files and all(file.stat().st_mode & 0o077 == 0 for file in files)
    service.register(restarted)
    service.register(restarted, model="friend")
    rollout.chat("b", model="friend")
    assert rollout.reward(1.0)["interaction_count"] == 2


@pytest.mark.extended
def test_configured_backend_takes_over_during_calls(build: Build) -> None:
    service = build(replicas=2)
    first, second = service.engines
    rollout = next(each for each in service.on_each_replica() if tag_of(each.session_id) in _journals(service, 0))
    rollout.chat("a")
    assert len(engine_calls(first)) == 1
    script(first, reset=True)
    result = service.proxy.call("POST", "/configure_backend", {"backend_addr": second.url}, key=service.key)
    assert (result.status, result.json()) == (200, {"status": "ok", "backend_addr": second.url})
    rollout.chat("b")
    assert (len(engine_calls(first)), len(engine_calls(second))) == (0, 1)
    assert rollout.reward(1.0)["interaction_count"] == 2


def _journals(service: RecordingService, number: int) -> list[str]:
    journals: list[str] = wait_until(lambda: service.proxies[number].call("GET", "/ready").json()["journals"])
    return journals


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"backend_addr": 7}, 400),
        ({"backend_addr": "http://h/x"}, 400),
        ({"backend_addr": "127.0.0.1:9"}, 502),
    ],
)
def test_invalid_backend_changes_nothing(recording: RecordingService, body: dict[str, Any], status: int) -> None:
    refused(recording.proxy.call("POST", "/configure_backend", body, key=recording.key), status)
    refused(recording.proxy.call("POST", "/configure_backend", body, key="somebody"), 403)
    assert recording.chat().status == 200
