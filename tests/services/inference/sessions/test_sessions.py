"""Sessions through the gateway: started where there is room, spoken to where they are recorded, exported as one."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.services.inference.recorder.rollouts import CHAT, Rollout, begin_group, export
from tests.services.inference.sessions.recording_service import RecordingService, tag_of
from tests.services.inference.test_refusals import refused
from tests.services.processes import chat_text, engine_calls, script, wait_until


def test_sequential_sessions_are_balanced(recording: RecordingService) -> None:
    recording.end_all()
    rollouts = [recording.begin() for _ in range(10)]
    assert sorted(recording.spread(rollouts).values()) == [5, 5]


def test_group_shares_a_replica_and_groups_are_balanced(recording: RecordingService) -> None:
    def balanced() -> bool:
        recording.end_all()
        groups = [recording.begin_group(4) for _ in range(4)]
        assert [len(recording.spread(group)) for group in groups] == [1, 1, 1, 1]
        together = recording.spread(rollout for group in groups for rollout in group)
        return sorted(together.values()) == [8, 8]

    wait_until(balanced, what="a balance: a probe that is on its way while a group starts may count it twice")


def test_session_turns_stay_on_one_replica(recording: RecordingService) -> None:
    rollouts = recording.on_each_replica()
    for rollout in rollouts:
        for text in ("a", "b", "c"):
            rollout.chat(text)
    assert [len(engine_calls(engine)) for engine in recording.engines] == [3, 3]


def test_export_matches_sampled_tokens(recording: RecordingService) -> None:
    for engine in recording.engines:
        script(engine, token_ids=[40, 41], version=7)
    rollout = recording.begin()
    first = rollout.chat("a")
    with_events = rollout.stream("b")
    assert chat_text(list(with_events.events()))
    reply = rollout.reward(1.0)
    assert reply["session_id"] == rollout.session_id
    assert (reply["interaction_count"], reply["trajectory_ready"]) == (2, True)
    exported = rollout.export(discount=0.5)
    assert exported["rows"][0]["interaction_id"] == first["id"]
    assert exported["traj"]["rewards"] == [0.5, 1.0]
    assert {version for row in exported["traj"]["versions"] for version in row} == {-1, 7}


def rewarded(rollout: Rollout, text: str, value: float) -> Rollout:
    rollout.chat(text)
    rollout.reward(value)
    return rollout


def test_export_merges_sessions_of_several_replicas(recording: RecordingService) -> None:
    short, long = recording.on_each_replica()
    rewarded(short, "a", 0.5)
    rewarded(long, "a much longer prompt than the other one has", 2.0)
    ids = [long.session_id, short.session_id]
    reply = export(recording.gateway, recording.key, ids)
    assert [row["session_id"] for row in reply["rows"]] == ids
    traj = reply["traj"]
    assert traj["rewards"] == [2.0, 0.5]
    widths = {len(values) for name in ("input_ids", "versions", "attention_mask") for values in traj[name]}
    assert widths == {sum(traj["attention_mask"][0])}
    padded = traj["attention_mask"][1].index(False)
    assert (traj["versions"][1][-1], traj["input_ids"][1][padded], traj["turn_ids"][1][-1]) == (-1, 0, -1)


def test_multi_replica_export_repeats_until_acknowledged(recording: RecordingService) -> None:
    ids = [rewarded(rollout, "a", 1.0).session_id for rollout in recording.on_each_replica()]
    tried = recording.admin("POST", "/export_trajectories", {"session_ids": ids, "dry_run": True})
    assert (tried.status, tried.json()) == (200, {"status": "ok"}), "nothing is taken"
    first = export(recording.gateway, recording.key, ids)
    assert first["removed"]
    assert export(recording.gateway, recording.key, ids) == first
    ack = {"export_id": first["export_id"]}
    reply = recording.admin("POST", "/export_trajectories/ack", ack).json()
    assert reply == {"status": "ok", "released": True}
    assert recording.admin("POST", "/export_trajectories/ack", ack).json()["released"] is False
    refused(recording.admin("POST", "/export_trajectories", {"session_ids": ids}), 404)


def test_export_applies_its_reward_once(recording: RecordingService) -> None:
    rollout = recording.begin()
    rollout.chat("One?")
    wanted = {"session_ids": [rollout.session_id], "reward": 0.25}
    refused(recording.admin("POST", "/export_trajectories", {**wanted, "dry_run": True}), 400)
    first = recording.admin("POST", "/export_trajectories", wanted).json()
    assert first["traj"]["rewards"] == [0.25]
    assert recording.admin("POST", "/export_trajectories", wanted).json() == first, "an answer that was lost"
    error = refused(recording.admin("POST", "/export_trajectories", {**wanted, "reward": 0.75}), 409)
    assert error["code"] == "trajectory_sealed", "a reward that has no effect"
    others = [each.session_id for each in recording.on_each_replica()]
    error = refused(recording.admin("POST", "/export_trajectories", {"session_ids": others, "reward": 1}), 400)
    assert error["param"] == "reward"
    refused(recording.admin("POST", "/export_trajectories", {"session_ids": others[:1], "reward": 1}), 400)


def test_npz_of_several_replicas_holds_the_same_columns(recording: RecordingService) -> None:
    ids = [
        rewarded(rollout, f"say {place}", 1.0).session_id for place, rollout in enumerate(recording.on_each_replica())
    ]
    reply = export(recording.gateway, recording.key, ids)
    answer = recording.admin("POST", "/export_trajectories", {"session_ids": ids, "format": "npz"})
    assert answer.status == 200, answer.body
    assert answer.headers["x-areal-export-id"] == reply["export_id"]
    with np.load(io.BytesIO(answer.body)) as columns:
        kinds = {name: columns[name].dtype.str for name in columns.files if name != "about.json"}
        assert set(kinds) == set(reply["traj"])
        assert (kinds["input_ids"], kinds["logprobs"], kinds["turn_ids"]) == ("<i8", "<f4", "<i4")
        for name, values in reply["traj"].items():
            assert np.array_equal(columns[name], np.array(values, dtype=columns[name].dtype)), name


def test_export_takes_nothing_when_one_session_is_unready(recording: RecordingService) -> None:
    ready, open_ = recording.on_each_replica()
    rewarded(ready, "a", 1.0)
    open_.chat("a")
    ids = [ready.session_id, open_.session_id]
    error = refused(recording.admin("POST", "/export_trajectories", {"session_ids": ids}), 425)
    assert error["code"] == "trajectory_not_ready"
    assert [ready.export()["rows"][0]["session_id"]] == ids[:1]


def test_group_is_exported_by_its_id(recording: RecordingService) -> None:
    group = recording.begin_group(3)
    for rollout in group:
        rewarded(rollout, "a", 1.0)
    answer = recording.admin("POST", "/export_trajectories", {"group_id": group[0].group_id})
    assert [row["session_id"] for row in answer.json()["rows"]] == [rollout.session_id for rollout in group]


def test_export_of_sessions_outside_group_is_refused(recording: RecordingService) -> None:
    group, other = recording.begin_group(2), recording.begin()
    for rollout in (*group, other):
        rewarded(rollout, "a", 1.0)
    for port in (recording.admin, partial(recording.proxies[0].call, key=recording.key)):
        body = {"session_ids": [group[0].session_id, other.session_id], "group_id": group[0].group_id}
        assert refused(port("POST", "/export_trajectories", body), 400)["param"] == "group_id"
    body["session_ids"] = [group[1].session_id]
    answer = recording.admin("POST", "/export_trajectories", body)
    assert [row["session_id"] for row in answer.json()["rows"]] == body["session_ids"]


def test_own_key_opens_session_and_is_refused_while_active(recording: RecordingService) -> None:
    key = "own-key-of-an-agent"
    rollout = recording.begin(api_key=key)
    assert rollout.key == key
    rollout.chat("a")
    start = {"task_id": "again", "api_key": key}
    assert refused(recording.admin("POST", "/rl/start_session", start), 409)["message"]
    rollout.reward(1.0)
    again = recording.begin(api_key=key)
    assert again.session_id != rollout.session_id
    again.chat("b")
    assert again.reward(0.0)["session_id"] == again.session_id


def test_ended_session_is_ready_and_refuses_calls(recording: RecordingService) -> None:
    rollout = recording.begin()
    rollout.chat("a")
    reply = rollout.post("/rl/end_session", {}).json()
    assert reply["ready_trajectory_ids"] == [0]
    refused(rollout.post(CHAT, rollout.body("b")), 409)
    (row,) = rollout.export()["rows"]
    assert row["rewarded"] is False


def test_admin_ends_a_group_by_its_id(recording: RecordingService) -> None:
    group = recording.begin_group(2)
    ended = recording.admin("POST", "/rl/end_session", {"group_id": group[0].group_id}).json()["ended"]
    assert [each["session_id"] for each in ended] == [rollout.session_id for rollout in group]
    refused(group[1].post("/rl/end_session", {"group_id": group[0].group_id}), 403)


def test_admin_rewards_session_by_id_or_interaction(recording: RecordingService) -> None:
    first, second = recording.on_each_replica()
    first.chat("a")
    reply = recording.admin("POST", "/rl/set_reward", {"reward": 1.0, "session_id": first.session_id}).json()
    assert reply["session_id"] == first.session_id
    interaction = second.chat("a")["id"]
    by_interaction = {"reward": 1.0, "interaction_id": interaction, "session_id": second.session_id}
    assert recording.admin("POST", "/rl/set_reward", by_interaction).json()["session_id"] == second.session_id


def test_session_pages_cover_all_replicas(recording: RecordingService) -> None:
    started = {rollout.session_id for _ in range(2) for rollout in recording.on_each_replica()}
    found: list[str] = []
    after = ""
    while True:
        page = recording.admin("GET", f"/rl/sessions?limit=3{after}").json()
        assert page["journals_away"] == []
        found += [each["session_id"] for each in page["sessions"]]
        if page["next"] is None:
            break
        after = f"&after={page['next']}"
    assert len(found) == len(set(found))
    assert started <= set(found)
    assert {tag_of(each) for each in found if not each.startswith("__hitl__")} == {tag_of(each) for each in started}


def test_session_is_described_by_its_replica(recording: RecordingService) -> None:
    for rollout in recording.on_each_replica():
        interaction = rollout.chat("a")["id"]
        reply = recording.admin("GET", f"/rl/sessions/{rollout.session_id}").json()
        assert reply["state"] == "active"
        assert [turn["interaction_id"] for turn in reply["trajectories"][0]["interactions"]] == [interaction]


@pytest.mark.parametrize("group_size", [0, 1025, "2", True, 1.5])
def test_invalid_group_size_is_400(recording: RecordingService, group_size: object) -> None:
    body = {"task_id": "task", "group_size": group_size}
    assert refused(recording.admin("POST", "/rl/start_session", body))["param"] == "group_size"


def test_largest_group_starts_at_once(recording: RecordingService) -> None:
    group = begin_group(recording.gateway, recording.key, 1024)
    assert len({rollout.key for rollout in group}) == 1024
    ended = recording.admin("POST", "/rl/end_session", {"group_id": group[0].group_id})
    assert len(ended.json()["ended"]) == 1024


def test_router_finds_a_session_by_id_and_by_key(recording: RecordingService) -> None:
    own = recording.begin(api_key="a-key-that-the-caller-chose")
    for rollout in (*recording.on_each_replica(), own):
        tag = tag_of(rollout.session_id)
        asked: list[dict[str, Any]] = [{"session_id": rollout.session_id}, {"api_key": rollout.key}]
        for body in asked:
            reply = recording.router.call("POST", "/route", body, key=recording.key).json()
            assert reply["journal"] == tag
            assert reply["worker_addr"] == reply["url"]
    refused(recording.router.call("POST", "/route", {"api_key": "absent-key"}, key=recording.key), 404)
