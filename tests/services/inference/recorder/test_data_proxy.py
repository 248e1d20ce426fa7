"""One data proxy with a journal, over HTTP: what the engine saw is what is exported, and nothing is there twice."""

from __future__ import annotations

import io
import json
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal.http import headers as names
from tests.services.inference.recorder.rollouts import CHAT, Rollout, begin, begin_group, export
from tests.services.inference.running_service import later
from tests.services.processes import (
    Answer,
    Process,
    Processes,
    Stream,
    chat_text,
    engine_calls,
    release,
    script,
    wait_ready,
    wait_until,
)


@dataclass(frozen=True)
class Bench:
    processes: Processes
    engine: Process
    proxy: Process

    @property
    def key(self) -> str:
        return self.processes.key

    def begin(self, **more: Any) -> Rollout:
        return begin(self.proxy, self.key, **more)

    def admin(self, method: str, path: str, body: Any = None) -> Answer:
        return self.proxy.call(method, path, body, key=self.key)


@pytest.fixture(scope="module")
def shared(module_processes: Processes, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    engine = module_processes.engine(tokenizer)
    state = tmp_path_factory.mktemp("state")
    proxy = module_processes.data_proxy(engine, tokenizer, "--state-dir", str(state))
    yield Bench(module_processes, engine, proxy)


@pytest.fixture
def bench(shared: Bench) -> Bench:
    script(shared.engine, reset=True)
    return shared


def prompts(bench: Bench) -> list[list[int]]:
    return [call["body"]["input_ids"] for call in engine_calls(bench.engine)]


def rows(traj: dict[str, Any], column: str) -> list[list[Any]]:
    """Without padding."""
    return [values[: sum(mask)] for values, mask in zip(traj[column], traj["attention_mask"], strict=True)]


def test_export_matches_engine_output(bench: Bench) -> None:
    script(bench.engine, token_ids=[40, 41, 42], version=7)
    rollout = bench.begin()
    rollout.chat("a")
    rollout.chat("b")
    rollout.reward(1.0)
    reply = rollout.export(discount=0.5)
    seen = prompts(bench)
    end = seen[1][len(seen[0]) + 3]  # the end token, which the template wrote after the answer
    assert rows(reply["traj"], "input_ids") == [[*prompt, 40, 41, 42, end] for prompt in seen]
    assert rows(reply["traj"], "versions") == [[-1] * len(prompt) + [7] * 4 for prompt in seen]
    assert rows(reply["traj"], "loss_mask") == [[0] * len(prompt) + [1] * 4 for prompt in seen]
    assert rows(reply["traj"], "logprobs")[0][-4:] == [-0.25, -0.75, -0.25, -0.25 - 0.5 * (end % 2)]
    assert reply["traj"]["rewards"] == [0.5, 1.0]
    assert reply["rows"][1]["parent_id"] == reply["rows"][0]["interaction_id"]


def test_next_turn_continues_with_sampled_tokens(bench: Bench) -> None:
    letters = [bench_token(bench, letter) for letter in "Hello"]  # not how an encoder would cut it
    script(bench.engine, token_ids=letters)
    rollout = bench.begin()
    rollout.chat("a")
    rollout.chat("b")
    rollout.reward(1.0)
    first, second = prompts(bench)
    assert second[: len(first) + 5] == [*first, *letters]
    reply = rollout.export(style="concat")
    assert len(reply["rows"]) == 1
    assert rows(reply["traj"], "input_ids")[0][: len(second)] == second


def bench_token(bench: Bench, text: str) -> int:
    """The token of one character."""
    answer = bench.admin("POST", "/v1/completions", {"prompt": text, "max_tokens": 1, "return_token_ids": True})
    (token,) = answer.json()["choices"][0]["prompt_token_ids"]
    script(bench.engine, reset=True)
    return int(token)


def test_edited_history_starts_new_branch(bench: Bench) -> None:
    rollout = bench.begin()
    rollout.chat("a")
    kept = rollout.messages
    rollout.chat("b")
    rollout.messages = kept
    rollout.chat("c")
    rollout.messages = [{"role": "user", "content": "something else"}]
    rollout.chat(None)
    rollout.reward(1.0)
    reply = rollout.export(style="concat")
    assert len(reply["rows"]) == 3
    by_name = {row["interaction_id"]: row["parent_id"] for row in reply["rows"]}
    assert len(set(by_name.values()) - {None}) == 1


def test_answer_is_on_disk_before_the_caller_has_it_all(bench: Bench) -> None:
    script(bench.engine, gate=2)
    rollout = bench.begin()
    stream = rollout.stream()
    events = stream.events()
    next(events)
    assert bench.admin("GET", f"/rl/sessions/{rollout.session_id}").json()["trajectories"] == []
    release(bench.engine)
    *_, done = events
    assert done == "[DONE]"
    detail = bench.admin("GET", f"/rl/sessions/{rollout.session_id}").json()
    assert len(detail["trajectories"][0]["interactions"]) == 1


def test_failed_call_is_counted_but_not_recorded(bench: Bench) -> None:
    rollout = bench.begin()
    rollout.chat("a")
    script(bench.engine, cut_after=2)
    assert rollout.post(CHAT, rollout.body("b")).status == 502
    script(bench.engine, reset=True)
    rollout.reward(1.0)
    reply = rollout.export()
    assert len(reply["rows"]) == 1
    assert [(item["code"], item["count"]) for item in reply["failures"]] == [("engine_failed", 1)]


def test_caller_disconnect_records_nothing(bench: Bench) -> None:
    script(bench.engine, gate=2)
    rollout = bench.begin()
    stream = rollout.stream()
    next(stream.events())
    stream.close()
    engine_calls(bench.engine, until="cancelled")
    release(bench.engine)
    assert rollout.post("/rl/set_reward", {"reward": 1.0}).json()["error"]["code"] == "no_interaction"


RETRY = {"x-stainless-retry-count": "1"}


@pytest.mark.parametrize("again", [RETRY, {"Idempotency-Key": "k"}])
@pytest.mark.parametrize("stream", [False, True])
def test_repeated_call_is_answered_from_the_record(bench: Bench, again: dict[str, str], stream: bool) -> None:
    rollout = bench.begin()
    body = rollout.body("a", stream=stream, logprobs=True, top_logprobs=1, n=2, seed=1)
    first = rollout.post(CHAT, body, **({} if again is RETRY else again))
    script(bench.engine, reset=True, text="something else")
    second = rollout.post(CHAT, body, **again)
    assert engine_calls(bench.engine) == []
    assert output_of(first) == output_of(second)
    assert rollout.reward(1.0)["interaction_count"] == 2


def output_of(answer: Answer) -> Any:
    """What was answered, however the stream was cut."""
    assert answer.status == 200
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()
    events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    logprobs = sorted(str(item) for choice in choices if choice["logprobs"] for item in choice["logprobs"]["content"])
    return [chat_text(events, index) for index in range(2)], events[0]["id"], events[0]["created"], logprobs


def test_retry_is_not_answered_from_earlier_trajectory(bench: Bench) -> None:
    """Each episode of a session may begin with the same body."""
    rollout = bench.begin()
    earlier = rollout.post(CHAT, rollout.body("a")).json()["id"]
    rollout.reward(1.0)
    retry = rollout.post(CHAT, rollout.body("a"), **RETRY).json()["id"]
    assert retry != earlier
    assert rollout.post(CHAT, rollout.body("a"), **RETRY).json()["id"] == retry
    assert rollout.reward(0.0)["interaction_count"] == 1


def test_relay_retry_gets_answer_of_its_own_call(bench: Bench) -> None:
    """Two samples of one body are two calls; sealed or not, each is known again."""
    rollout = bench.begin()

    def bodies(call: str, **more: str) -> str:
        answered = rollout.post(CHAT, rollout.body("a"), **{names.CALL: call}, **more)
        assert answered.status == 200
        return str(answered.json()["id"])

    reported = {call: bodies(call) for call in ("one", "two")}
    again = {names.AGAIN: "1"}
    assert {call: bodies(call, **again) for call in reported} == reported
    assert bodies("three", **again) not in reported.values()
    rollout.reward(1.0)
    assert {call: bodies(call, **again) for call in reported} == reported
    assert bodies("four", **again, **RETRY) not in reported.values()


def test_retry_joins_the_newest_equal_call_in_flight(bench: Bench) -> None:
    script(bench.engine, gate=2)
    rollout = bench.begin()
    body = rollout.body("a")
    sample = later(rollout.post, CHAT, body)
    engine_calls(bench.engine, until="any")
    first = later(rollout.post, CHAT, body)
    engine_calls(bench.engine, until="any", count=2)
    retry = later(rollout.post, CHAT, body, **RETRY)
    wait_until(lambda: bench.proxy.call("GET", "/health").json()["in_flight"] == 3)
    release(bench.engine)
    assert first.result().json() == retry.result().json() != sample.result().json()
    assert len(engine_calls(bench.engine)) == 2


def test_retry_after_disconnect_samples_again(bench: Bench) -> None:
    script(bench.engine, gate=2)
    rollout = bench.begin()
    stream = rollout.stream("a")
    next(stream.events())
    retry = later(lambda: Stream(bench.proxy.port, CHAT, rollout.body("a"), rollout.key))
    stream.close()
    engine_calls(bench.engine, until="cancelled")
    release(bench.engine)
    assert "[DONE]" in list(retry.result().events())
    assert rollout.reward(1.0)["interaction_count"] == 1


def test_equal_bodies_are_two_samples(bench: Bench) -> None:
    rollout = bench.begin()
    body = rollout.body("a")
    assert rollout.post(CHAT, body).json()["id"] != rollout.post(CHAT, body).json()["id"]
    assert rollout.reward(1.0)["interaction_count"] == 2


def test_idempotency_key_with_another_body_is_422(bench: Bench) -> None:
    rollout = bench.begin()
    rollout.chat("a", headers={"Idempotency-Key": "k"})
    other = bench.begin()
    assert other.post(CHAT, other.body("b"), **{"Idempotency-Key": "k"}).status == 200  # keys are a session's own
    assert rollout.post(CHAT, rollout.body("b"), **{"Idempotency-Key": "k"}).status == 422


def test_store_false_is_not_recorded(bench: Bench) -> None:
    rollout = bench.begin()
    rollout.chat("a", store=False)
    assert rollout.post("/rl/set_reward", {"reward": 1.0}).status == 400


def test_completions_and_choices_are_interactions(bench: Bench) -> None:
    rollout = bench.begin()
    body = {"prompt": ["Hello", "How"], "n": 2, "max_tokens": 4}
    answer = rollout.post("/v1/completions", body).json()
    reply = rollout.reward(1.0, interaction_id=f"{answer['id']}-3")
    assert (reply["interaction_count"], reply["trajectory_ready"]) == (4, True)
    exported = rollout.export()
    assert [row["truncated"] for row in exported["rows"]] == [True] * 4
    assert exported["traj"]["rewards"] == [0.0, 0.0, 0.0, 1.0]


def test_dialects_record_same_conversation(bench: Bench) -> None:
    rollout = bench.begin()
    reply = rollout.post("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 99}).json()
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": reply["content"][0]["text"]},
        {"role": "user", "content": "b"},
    ]
    assert rollout.post("/v1/responses", {"input": messages}).status == 200
    rollout.reward(1.0)
    assert len(rollout.export(style="concat")["rows"]) == 1


def test_reward_answers_and_refusals(bench: Bench) -> None:
    rollout = bench.begin()
    assert rollout.post("/rl/set_reward", {"reward": 1.0}).status == 400
    first = rollout.chat("a")["id"]
    rollout.chat("b")
    for bad in (None, "1", True, 1e39):
        assert rollout.post("/rl/set_reward", {"reward": bad}).status == 400
    assert rollout.post("/rl/set_reward", b'{"reward": NaN}').status == 400
    assert rollout.post("/rl/set_reward", {"reward": 1.0, "interaction_id": "chatcmpl-0"}).status == 400
    assert not rollout.reward(0.25, interaction_id=first)["trajectory_ready"]
    reply = rollout.reward(1.0)
    assert reply.pop("message")
    assert reply.pop("interaction_id")
    assert reply == {
        "interaction_count": 2,
        "session_id": rollout.session_id,
        "trajectory_id": 0,
        "trajectory_ready": True,
        "ready_transition": True,
    }
    assert rollout.reward(1.0)["ready_transition"]
    assert rollout.post("/rl/set_reward", {"reward": 0.0}).status == 409


def test_start_session_refusals(bench: Bench) -> None:
    good = {"task_id": "t"}
    for bad in (
        {},
        {"task_id": 3},
        {**good, "group_size": 0},
        {**good, "group_size": 1025},
        {**good, "api_key": "short"},
        {**good, "api_key": bench.key},
        {**good, "online": 1},
    ):
        assert bench.admin("POST", "/rl/start_session", bad).status == 400, bad
    assert bench.admin("POST", "/rl/start_session", {**good, "model": "other"}).status == 404
    own = {**good, "api_key": "my-very-own-key"}
    assert bench.admin("POST", "/rl/start_session", own).json()["sessions"][0]["session_api_key"] == "my-very-own-key"
    assert bench.admin("POST", "/rl/start_session", own).status == 409


def test_keys_open_only_their_routes(bench: Bench) -> None:
    rollout = bench.begin()
    rollout.chat("a")

    def status(method: str, path: str, key: str | None, body: Any = None) -> int:
        return bench.proxy.call(method, path, body or {}, key=key).status

    for method, path in (
        ("POST", "/rl/start_session"),
        ("GET", "/rl/sessions"),
        ("GET", f"/rl/sessions/{rollout.session_id}"),
        ("POST", "/export_trajectories"),
        ("POST", "/export_trajectories/ack"),
        ("GET", "/trajectories"),
        ("POST", "/trajectories/ack"),
        ("POST", "/rl/find_key"),
    ):
        assert status(method, path, None) == 401, path
        assert status(method, path, rollout.key) == 403, path
    for path in (CHAT, "/rl/set_reward", "/rl/end_session", "/v1/messages/count_tokens"):
        assert status("POST", path, None) == 401, path
        assert status("POST", path, "no-such-key") == 401, path
        assert status("POST", path, rollout.key[:-1] + "~") == 401, path
        assert status("POST", path, "sk-aaaaaaaa-" + "x" * 43) == 421, path
    other = bench.begin()
    assert status("POST", "/rl/set_reward", other.key, {"reward": 1.0, "session_id": rollout.session_id}) == 403
    assert status("POST", "/rl/set_reward", bench.key, {"reward": 1.0, "session_id": rollout.session_id}) == 200


def test_end_session_closes_and_marks_unrewarded(bench: Bench) -> None:
    rollout = bench.begin()
    rollout.chat("a")
    assert rollout.post("/rl/end_session", {}).json()["ready_trajectory_ids"] == [0]
    assert rollout.post(CHAT, rollout.body("b")).json()["error"]["code"] == "session_ended"
    reply = rollout.export()
    assert (reply["traj"]["rewards"], reply["rows"][0]["rewarded"]) == ([0.0], False)
    assert rollout.post(CHAT, rollout.body("b")).status == 401  # removed with its export


def test_group_is_exported_and_ended_by_its_id(bench: Bench) -> None:
    group = begin_group(bench.proxy, bench.key, 3)
    for number, rollout in enumerate(group):
        rollout.chat("a")
        if number:
            rollout.reward(number)
    body = {"group_id": group[0].group_id}
    assert bench.admin("POST", "/export_trajectories", body).status == 425
    ended = bench.admin("POST", "/rl/end_session", body).json()["ended"]
    assert [each["session_id"] for each in ended] == [rollout.session_id for rollout in group]
    reply = bench.admin("POST", "/export_trajectories", body).json()
    assert reply["traj"]["rewards"] == [0.0, 1.0, 2.0]
    assert bench.admin("POST", "/export_trajectories", body).json() == reply, "an answer that was lost"
    error = bench.admin("POST", "/export_trajectories", {**body, "style": "concat"}).json()["error"]
    assert error["code"] == "nothing_to_export"
    assert bench.admin("POST", "/export_trajectories/ack", {"export_id": reply["export_id"]}).json()["released"]
    gone = bench.admin("POST", "/export_trajectories", body)
    assert (gone.status, gone.json()["error"]["code"]) == (404, "group_not_found")


def test_engine_abort_counts_as_truncated(bench: Bench) -> None:
    rollout = bench.begin()
    script(bench.engine, abort_after=1)
    rollout.chat("a")
    rollout.reward(1.0)
    (row,) = rollout.export()["rows"]
    assert (row["finish_reason"], row["truncated"]) == ("abort", True)


def test_export_repeats_until_acknowledged_also_as_npz(bench: Bench) -> None:
    rollout = bench.begin()
    rollout.chat("a")
    rollout.reward(0.5)
    reply = rollout.export()
    assert rollout.export() == reply
    packed = bench.admin("POST", "/export_trajectories", {"session_ids": [rollout.session_id], "format": "npz"})
    assert packed.headers["x-areal-export-id"] == reply["export_id"]
    loaded = np.load(io.BytesIO(packed.body))
    assert {name: loaded[name].tolist() for name in reply["traj"]} == reply["traj"]
    assert bench.admin("POST", "/export_trajectories/ack", {"export_id": reply["export_id"]}).json()["released"]
    assert bench.admin("POST", "/export_trajectories", {"session_ids": [rollout.session_id]}).status == 404


def test_export_refusals(bench: Bench) -> None:
    rollout = bench.begin()
    good = {"session_ids": [rollout.session_id]}
    bad: dict[str, Any]
    for bad in (
        {},
        {"session_ids": []},
        {"session_ids": "x"},
        {**good, "discount": 2},
        {**good, "style": "x"},
        {**good, "format": "x"},
        {**good, "trajectory_id": -1},
        {"session_ids": good["session_ids"] * 2},
    ):
        assert bench.admin("POST", "/export_trajectories", bad).status == 400, bad
    assert bench.admin("POST", "/export_trajectories", good).status == 425
    assert bench.admin("POST", "/export_trajectories", {"session_ids": ["absent"]}).status == 404
    assert bench.admin("POST", "/export_trajectories/ack", {"export_id": "x"}).status == 400


def test_online_trajectories_are_waited_for_and_acknowledged(bench: Bench) -> None:
    drain_online(bench)
    waiting = later(bench.admin, "GET", "/trajectories?wait=20&limit=5")
    quiet = bench.begin(online=False)
    rollout = bench.begin()
    for each in (quiet, rollout):
        each.chat("a")
        each.reward(1.0)
    (item,) = waiting.result().json()["items"]
    assert (item["session_id"], item["trajectory_id"], item["traj"]["rewards"]) == (rollout.session_id, 0, [1.0])
    assert bench.admin("GET", "/trajectories").json()["items"] == []
    assert bench.admin("POST", "/trajectories/ack", {"lease_ids": [item["lease_id"]]}).json()["released"] == 1
    assert bench.admin("GET", "/trajectories?limit=0").json()["ready"] == 0


def drain_online(bench: Bench) -> None:
    items = bench.admin("GET", "/trajectories?limit=1000").json()["items"]
    bench.admin("POST", "/trajectories/ack", {"lease_ids": [item["lease_id"] for item in items]})


def test_admin_key_is_the_human_in_the_loop(bench: Bench) -> None:
    drain_online(bench)
    human = Rollout(bench.proxy, bench.key, "__hitl__", bench.key)
    bench.admin("POST", "/rl/end_session")  # whatever other tests sent with this key
    drain_online(bench)
    human.chat("a")
    assert human.reward(1.0)["ready_transition"]
    human.chat("b")
    (item,) = bench.admin("GET", "/trajectories").json()["items"]
    exported = export(bench.proxy, bench.key, [item["session_id"]], trajectory_id=item["trajectory_id"])
    assert exported["traj"]["rewards"] == [1.0]
    reply = human.reward(2.0)  # the conversation in progress is still there
    assert (reply["trajectory_id"], reply["interaction_count"]) == (item["trajectory_id"] + 1, 1)


def test_sessions_are_paginated(bench: Bench) -> None:
    begin_group(bench.proxy, bench.key, 5)
    whole = bench.admin("GET", "/rl/sessions?limit=1000").json()["sessions"]
    paged, after = [], ""
    while after is not None:
        page = bench.admin("GET", f"/rl/sessions?limit=3&after={after}").json()
        paged += page["sessions"]
        after = page["next"]
    assert paged == whole
    assert len({each["session_id"] for each in whole}) == len(whole)


def test_viewing_session_returns_rows_without_taking_them(bench: Bench) -> None:
    rollout = bench.begin()
    rollout.chat("a")
    rollout.chat("b")
    path = f"/rl/sessions/{rollout.session_id}"
    assert bench.admin("GET", path).json()["reward"] is None
    rollout.reward(0.5)
    shown = bench.admin("GET", f"{path}?rows=true").json()
    assert (shown["interaction_count"], shown["reward"], shown["ready"]) == (2, 0.5, 1)
    (trajectory,) = shown["trajectories"]
    exported = rollout.export()
    assert (trajectory["traj"], trajectory["rows"]) == (exported["traj"], exported["rows"])


def test_restart_after_kill_9_finds_all_acknowledged_data(processes: Processes, tokenizer: Path) -> None:
    state = ("--state-dir", str(processes.key_file.parent / "state"), "--adopt-after", "0.1")
    engine = processes.engine(tokenizer)
    proxy = processes.data_proxy(engine, tokenizer, *state)
    open_one, rewarded, exported = (begin(proxy, processes.key) for _ in range(3))
    for rollout in (open_one, rewarded, exported):
        rollout.chat("a")
    rewarded.reward(0.5)
    exported.reward(1.0)
    before = exported.export()
    body = open_one.body("again")
    answered = open_one.post(CHAT, body).json()
    proxy.kill()
    heir = processes.data_proxy(engine, tokenizer, *state)  # another process, another run
    wait_until(lambda: len(heir.call("GET", "/ready").json()["journals"]) == 2)
    for rollout in (open_one, rewarded, exported):
        rollout.front = heir
    script(engine, reset=True, text="something else")
    assert open_one.post(CHAT, body, **RETRY).json() == answered
    open_one.messages = [*body["messages"], answered["choices"][0]["message"]]
    open_one.chat("b")
    assert len(engine_calls(engine)) == 1
    assert open_one.reward(1.0)["interaction_count"] == 3
    assert rewarded.reward(0.5)["ready_transition"]
    assert exported.export() == before
    assert len(open_one.export(style="concat")["rows"]) == 1


def test_full_disk_is_507_before_sampling(processes: Processes, tokenizer: Path) -> None:
    engine = processes.engine(tokenizer)
    proxy = processes.data_proxy(engine, tokenizer, "--state-dir", str(processes.key_file.parent / "state"))
    rollout = begin(proxy, processes.key)
    rollout.chat("a")
    limit = resource.prlimit(proxy.popen.pid, resource.RLIMIT_FSIZE, (4096, -1))
    assert rollout.post(CHAT, rollout.body("b")).json()["error"]["code"] == "storage_full"
    sampled = len(engine_calls(engine))
    assert rollout.post(CHAT, rollout.body("b")).status == 507
    assert rollout.post("/rl/set_reward", {"reward": 1.0}).status == 507
    assert len(engine_calls(engine)) == sampled
    assert proxy.call("GET", "/ready").json()["journal_failing"]
    resource.prlimit(proxy.popen.pid, resource.RLIMIT_FSIZE, limit)
    assert rollout.reward(1.0)["interaction_count"] == 1
    rollout.chat("b")
    wait_ready(proxy)
    assert len(rollout.export()["rows"]) == 1


def test_data_proxy_without_state_has_no_sessions(processes: Processes, tokenizer: Path) -> None:
    proxy = processes.data_proxy(processes.engine(tokenizer), tokenizer)
    assert proxy.call("POST", "/rl/start_session", {"task_id": "t"}, key=processes.key).status == 404
    assert proxy.call("POST", CHAT, {"messages": [{"role": "user", "content": "a"}]}, key=processes.key).status == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_replayed_response_keeps_item_ids(bench: Bench, streamed: bool) -> None:
    rollout = bench.begin()
    answers = [
        rollout.post("/v1/responses", {"input": "a", "stream": streamed}, **{"Idempotency-Key": "k"}) for _ in range(2)
    ]
    if not streamed:
        assert answers[0].json() == answers[1].json()
        return
    last = [json.loads(each.body.decode().strip().split("data: ")[-1])["response"] for each in answers]
    assert last[0] == last[1] and last[0]["output"]


@pytest.mark.parametrize("key", [None, "sk-of-the-engine"])
def test_external_engine_gets_its_own_key_only(
    processes: Processes, tokenizer: Path, tmp_path: Path, key: str | None
) -> None:
    engine = processes.engine(tokenizer)
    (tmp_path / "engine.key").write_text(f"{key}\n")
    flags = () if key is None else ("--engine-key-file", str(tmp_path / "engine.key"))
    proxy = processes.data_proxy(engine, tokenizer, "--state-dir", str(tmp_path), "--attached", *flags)
    rollout = begin(proxy, processes.key)
    rollout.chat("a")
    rollout.reward(1.0)
    assert rollout.export()["traj"]["rewards"] == [1.0]
    [call] = engine_calls(engine)
    headers = {name.lower(): value for name, value in call["headers"].items()}
    assert headers.get("authorization") == (None if key is None else f"Bearer {key}")
    assert processes.key not in str(call)
