"""A worker that is drained: its sessions move with all that is recorded, or their calls are refused at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from areal.http.headers import JOURNAL
from areal.services.inference.recorder.session import LeaseName
from tests.services.inference.recorder.rollouts import Rollout
from tests.services.inference.running_service import CHAT, later
from tests.services.inference.sessions.recording_service import RecordingService, tag_of
from tests.services.inference.sessions.test_outages import by_replica
from tests.services.inference.test_refusals import refused
from tests.services.processes import chat_text, engine_calls, release, script, wait_until

Build = Callable[..., RecordingService]


@pytest.fixture
def service(build: Build) -> RecordingService:
    return build()


def drain(service: RecordingService, worker_id: str, verb: str = "drain") -> None:
    """Returns once the gateway goes by it."""
    answer = service.admin("POST", f"/{verb}/{worker_id}")
    assert answer.status == 200, answer.body
    serial = answer.json()["serial"]
    wait_until(lambda: service.gateway.call("GET", "/health").json()["table"]["serial"] >= serial, what=verb)


def on_first(service: RecordingService, count: int) -> list[Rollout]:
    """Sessions of the worker ``tiny-0``."""
    found: list[Rollout] = []
    while len(found) < count:
        found += by_replica(service, [service.begin()])[0]
    return found


def moved(service: RecordingService, rollout: Rollout) -> bool:
    """Whether ``tiny-1`` has the session."""
    path = f"/rl/sessions/{rollout.session_id}"
    return service.proxies[1].call("GET", path, key=service.key).status == 200


@pytest.mark.extended
def test_sessions_of_drained_worker_move_with_records(service: RecordingService) -> None:
    talking, idle, rewarded = on_first(service, 3)
    first = [rollout.chat("a")["id"] for rollout in (talking, idle, rewarded)]
    rewarded.reward(0.5)
    drain(service, "tiny-0")
    talking.chat("b")
    for rollout in (talking, idle):
        rollout.reward(1.0)
    assert len(engine_calls(service.engines[1])) == 1
    exports = [rollout.export() for rollout in (talking, idle, rewarded)]
    assert [export["rows"][0]["interaction_id"] for export in exports] == first
    assert [len(export["rows"]) for export in exports] == [2, 1, 1]
    assert exports[0]["rows"][1]["parent_id"] == first[0]
    drain(service, "tiny-0", "undrain")
    service.wait_state("tiny-0", "ready")
    (again,) = on_first(service, 1)  # in a journal of its own
    again.chat("a")


@pytest.mark.extended
def test_stream_in_flight_is_recorded_before_move(service: RecordingService) -> None:
    streaming, waiting = on_first(service, 2)
    waiting.chat("a")
    script(service.engine, gate=2)
    stream = streaming.stream("a")
    events = stream.events()
    seen = [next(events)]
    drain(service, "tiny-0")
    assert waiting.reward(0.25)["trajectory_ready"]  # what needs no engine is served where the session is
    body = waiting.body("b")
    turned_away = waiting.post(CHAT, body)
    assert refused(turned_away, 503)["code"] == "session_moving"
    assert turned_away.headers["retry-after"]
    release(service.engine)
    seen += events
    assert chat_text(seen) == "Hello there, friend!"
    assert streaming.reward(1.0)["interaction_count"] == 1
    wait_until(lambda: moved(service, streaming) and moved(service, waiting), what="both have moved")
    waiting.chat("b")
    assert waiting.reward(0.75)["trajectory_id"] == 1
    assert waiting.export()["traj"]["original_rewards"] == [0.25, 0.75]
    assert streaming.export()["traj"]["rewards"] == [1.0]


def test_rewards_by_own_key_are_accepted_during_move(service: RecordingService) -> None:
    """Such a key does not name its journal: a data proxy that has just left it does not know the key."""
    rollouts = [service.begin(api_key=f"a-key-of-my-own-{number}") for number in range(24)]
    for rollout in rollouts:
        rollout.chat("a")
    leaving = by_replica(service, rollouts)[0]
    drain(service, "tiny-0")
    assert len(leaving) > 4 and all(rollout.reward(1.0)["trajectory_ready"] for rollout in leaving)
    wait_until(lambda: all(moved(service, rollout) for rollout in leaving), what="all have moved")
    tag = tag_of(leaving[0].session_id)
    gone = service.proxy.call("POST", "/rl/set_reward", {"reward": 1.0}, key=leaving[0].key, headers={JOURNAL: tag})
    assert refused(gone, 421)["code"] == "session_elsewhere"


@pytest.mark.extended
@pytest.mark.parametrize("replicas", [1, 2])
def test_unmovable_sessions_are_refused_without_loss(build: Build, replicas: int) -> None:
    service = build(replicas=replicas)
    (rollout,) = on_first(service, 1)
    first = rollout.chat("a")["id"]
    drain(service, "all")
    answer = rollout.post(CHAT, rollout.body("b"))
    assert refused(answer, 503)["code"] == "session_moving"
    assert answer.headers["retry-after"]
    assert rollout.reward(0.5)["trajectory_ready"]
    assert rollout.export(remove_session=False)["rows"][0]["interaction_id"] == first
    drain(service, "all", "undrain")
    rollout.chat("b")
    assert rollout.reward(1.0)["trajectory_id"] == 1


@pytest.mark.extended
def test_killed_draining_worker_loses_no_acknowledged_data(service: RecordingService) -> None:
    flying, idle = on_first(service, 2)
    flying.chat("a")
    idle.chat("a")
    idle.reward(0.5)
    script(service.engine, gate=1)
    asked = later(flying.chat, "b")
    engine_calls(service.engine, until="any", count=3)
    drain(service, "tiny-0")
    service.proxy.kill()
    service.register(service.proxies[1])
    asked.result(60)
    flying.reward(1.0)
    assert [len(rollout.export()["rows"]) for rollout in (flying, idle)] == [2, 1]


@pytest.mark.extended
def test_undrain_keeps_sessions_not_moved_yet(service: RecordingService) -> None:
    streaming, other = on_first(service, 2)
    other.chat("a")
    script(service.engine, gate=2)
    stream = streaming.stream("a")
    events = stream.events()
    seen = [next(events)]
    drain(service, "tiny-0")
    drain(service, "tiny-0", "undrain")
    release(service.engine)
    seen += events
    assert chat_text(seen) == "Hello there, friend!"
    other.chat("b")
    assert len(engine_calls(service.engine)) == 3
    assert not moved(service, other)


@pytest.mark.extended
def test_repeated_ack_after_move_releases_nothing(
    service: RecordingService,
) -> None:
    (rollout,) = on_first(service, 1)
    rollout.chat("a")
    rollout.reward(1.0)
    drain(service, "tiny-0")
    wait_until(lambda: moved(service, rollout), what="it has moved")
    ack = {"export_id": rollout.export()["export_id"]}
    assert service.admin("POST", "/export_trajectories/ack", ack).json()["released"] is True
    leased = {"lease_ids": [str(LeaseName(tag_of(rollout.session_id), 1, 0))]}

    def is_gone() -> bool:
        gone = len(service.proxies[1].call("GET", "/ready", key=service.key).json()["journals"]) == 1
        again = service.admin("POST", "/export_trajectories/ack", ack)
        assert (again.status, again.json()) == (200, {"status": "ok", "released": False})
        again = service.admin("POST", "/trajectories/ack", leased)
        assert (again.status, again.json()) == (200, {"status": "ok", "released": 0})
        return gone

    wait_until(is_gone, what="the journal is empty and gone")
