"""What is lost when a process is killed: nothing that was acknowledged, and no other process notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.services.inference.recorder.rollouts import Rollout
from tests.services.inference.running_service import later
from tests.services.inference.sessions.recording_service import RecordingService, tag_of
from tests.services.processes import engine_calls, script, wait_until

Build = Callable[..., RecordingService]


@pytest.fixture
def service(build: Build) -> RecordingService:
    return build("--relays", "2")


def by_replica(service: RecordingService, rollouts: list[Rollout]) -> tuple[list[Rollout], list[Rollout]]:
    """The sessions of the first replica, and those of the second."""
    (first,) = service.workers()[0:1]
    tag = service.router.call("GET", "/table", key=service.key).json()["models"]["tiny"]["workers"][0]["journals"][0]
    assert first["worker_addr"] == service.proxy.url
    mine = [rollout for rollout in rollouts if tag_of(rollout.session_id) == tag]
    return mine, [rollout for rollout in rollouts if rollout not in mine]


@pytest.mark.extended
def test_sessions_return_with_restarted_data_proxy(service: RecordingService) -> None:
    rollouts = [service.begin() for _ in range(10)]
    interaction_ids = {rollout.session_id: rollout.chat("a")["id"] for rollout in rollouts}
    mine, others = by_replica(service, rollouts)
    assert len(mine) == len(others) == 5
    mine[0].reward(0.5)
    service.proxy.kill()
    waiting = [later(rollout.chat, "b") for rollout in mine[1:]]
    for rollout in others:  # who is elsewhere never notices
        rollout.chat("b")
        rollout.reward(1.0)
    restarted = service.start_proxy(0)
    service.register(restarted, service.proxies[1])
    for rollout, future in zip(mine[1:], waiting, strict=True):
        future.result(60)
        assert rollout.reward(1.0)["interaction_count"] == 2
    exported = {rollout.session_id: rollout.export() for rollout in rollouts}
    assert {each: export["rows"][0]["interaction_id"] for each, export in exported.items()} == interaction_ids
    assert exported[mine[0].session_id]["traj"]["original_rewards"] == [0.5]


@pytest.mark.extended
def test_sessions_of_lost_data_proxy_are_adopted(service: RecordingService) -> None:
    rollouts = [service.begin() for _ in range(4)]
    first = {rollout.session_id: rollout.chat("a")["id"] for rollout in rollouts}
    service.proxy.kill()
    service.register(service.proxies[1])
    for rollout in rollouts:
        rollout.chat("b")
        rollout.reward(1.0)
        exported = rollout.export()
        assert exported["rows"][0]["interaction_id"] == first[rollout.session_id]
        assert len(exported["rows"]) == 2


@pytest.mark.extended
def test_call_at_killed_data_proxy_is_recorded_once(service: RecordingService) -> None:
    rollout = service.begin()
    mine, _ = by_replica(service, [rollout])
    number = 0 if mine else 1
    engine, proxy = service.engines[number], service.proxies[number]
    script(engine, gate=1)
    asked = later(rollout.chat, "a")
    engine_calls(engine, until="any")
    proxy.kill()
    script(engine, reset=True)
    restarted = [service.start_proxy(number) if each == number else service.proxies[each] for each in range(2)]
    service.register(*restarted)
    answer = asked.result(60)
    rollout.reward(1.0)
    (row,) = rollout.export()["rows"]
    assert row["interaction_id"] == answer["id"]


@pytest.mark.extended
def test_callers_own_key_is_found_after_adoption(service: RecordingService) -> None:
    keys = [f"key-of-agent-{number}" for number in range(4)]
    rollouts = [service.begin(api_key=key) for key in keys]
    service.proxy.kill()
    service.register(service.proxies[1])
    for rollout in rollouts:  # whoever was adopted is waited for
        rollout.chat("a")


@pytest.mark.extended
def test_session_survives_router_restart_without_state(service: RecordingService) -> None:
    rollouts = service.on_each_replica()
    port = service.router.port
    service.router.kill()
    for rollout in rollouts:
        rollout.chat("a")
    starting = later(service.begin)
    router = service.processes.service("router", "--health-period", "0.2", "--port", str(port))
    for rollout in rollouts:
        rollout.chat("b")
    service.processes.register(router, *service.proxies)
    starting.result(60).chat("a")
    for rollout in rollouts:
        rollout.chat("c")
        assert rollout.reward(1.0)["interaction_count"] == 3


@pytest.mark.extended
def test_own_key_is_looked_up_once_router_is_back(service: RecordingService) -> None:
    rollout = service.begin(api_key="a-key-of-my-own")
    port = service.router.port
    service.router.kill()
    asked = later(rollout.chat, "a")
    router = service.processes.service("router", "--health-period", "0.2", "--port", str(port))
    service.processes.register(router, *service.proxies)
    asked.result(60)
    assert rollout.reward(1.0)["interaction_count"] == 1


def test_session_starts_once_a_data_proxy_is_there(build: Build) -> None:
    service = build(replicas=1)
    service.proxy.kill()
    service.wait_state("tiny-0", "dead")
    starting = later(service.begin)
    restarted = service.start_proxy(0)
    assert not starting.done()
    service.register(restarted)
    starting.result(60).chat("a")


@pytest.mark.extended
def test_every_relay_finds_every_session(service: RecordingService) -> None:
    """Each call may reach another relay: connections are new ones, and the kernel deals them out."""
    own = service.begin(api_key="the-key-of-somebody")
    for rollout in (*service.on_each_replica(), own):
        for _ in range(12):
            rollout.chat("a")
        assert rollout.reward(1.0)["interaction_count"] == 12


def test_sessions_of_a_damaged_journal_are_refused_with_its_name(service: RecordingService) -> None:
    rollouts = service.on_each_replica()
    mine, (whole,) = by_replica(service, rollouts)
    service.proxy.kill()
    database = service.state / "replica-0" / "journal.db"
    database.with_name("journal.db-wal").unlink()
    database.write_bytes(b"x" * 8192)
    service.register(service.proxies[1])

    def refused(key: str) -> bool:
        body = {"messages": [{"role": "user", "content": "b"}]}
        answer = service.gateway.call("POST", "/v1/chat/completions", body, key=key)
        return answer.status == 503 and answer.json()["error"]["code"] == "journal_damaged"

    wait_until(lambda: refused(mine[0].key), what="the other data proxy has seen the damage")
    call = {"session_id": mine[0].session_id, "reward": 1.0}
    answers = [
        service.admin("POST", "/rl/set_reward", call),
        service.admin("GET", f"/rl/sessions/{mine[0].session_id}"),
        service.admin("POST", "/export_trajectories", {"session_ids": [mine[0].session_id]}),
        service.gateway.call("POST", "/rl/set_reward", {"reward": 1.0}, key=mine[0].key),
        service.gateway.call("POST", "/rl/set_reward", {"reward": 1.0}, key="an-unknown-key"),
        service.router.call("POST", "/route", {"session_id": mine[0].session_id}, key=service.key),
    ]
    assert [(each.status, each.json()["error"]["code"]) for each in answers] == [(503, "journal_damaged")] * 6
    assert "the journal replica-0, which is damaged" in answers[0].json()["error"]["message"]
    whole.chat("b")
    service.begin().chat("a")
    database.parent.rename(service.state.with_name("set-aside"))
    wait_until(lambda: service.gateway.call("POST", "/rl/set_reward", {"reward": 1.0}, key="k").status == 401)
    assert service.admin("POST", "/rl/set_reward", call).status == 404
