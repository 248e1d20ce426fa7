"""``RolloutController`` before a scripted engine: admission, results, failures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.api.io_struct import ModelRequest
from areal.api.workflow_api import RolloutWorkflow
from areal.client import CallerError, DeadlineExceeded, RolloutController, RolloutsFailed, ServiceError
from areal.errors import NotFound, TimedOut, UsageFault
from areal.rollout.controller import ServiceAddress, find_service
from areal.rollout.tensors import row
from areal.trajectories.reading import read_episodes
from areal.workflow.rlvr import RLVRWorkflow
from tests.client.conftest import Place
from tests.reward.rewards import length, process_id
from tests.rollout.conftest import Make
from tests.services.processes import engine_calls, script, wait_until

SHORT = GenerationHyperparameters(max_new_tokens=64)


def one_row(value: int, version: int = 0, reward: float = 0.0) -> dict[str, torch.Tensor]:
    return row([1, value], [0, 1], [0.0, -0.5], [-1, version], [-1, 0], reward)


class Gated(RolloutWorkflow):
    """Runs of episodes end when they are released, in any order; ``data["n"]`` is its number."""

    def __init__(self, version: Any = None) -> None:
        self.started: list[int] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        self.changed = threading.Condition()

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        self.loop, version = asyncio.get_running_loop(), engine.get_version()
        gate = self.gates.setdefault(data["n"], asyncio.Event())
        with self.changed:
            self.started.append(data["n"])
            self.changed.notify_all()
        await gate.wait()
        return one_row(data["n"], version)

    def wait_started(self, count: int) -> list[int]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.started) >= count, 20), self.started
            return list(self.started)

    def release(self, *numbers: int) -> None:
        self.wait_started(1)
        assert self.loop is not None
        for number in numbers:
            self.loop.call_soon_threadsafe(self._open, number)

    def _open(self, number: int) -> None:
        self.gates.setdefault(number, asyncio.Event()).set()


class AtOnce(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        return one_row(data["n"], engine.get_version(), float(data["n"]))


class Broken(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        if data["n"] >= 0:
            raise KeyError("answer")
        return one_row(1)


class Sampled(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        answer = await engine.agenerate(ModelRequest(input_ids=[5, 6, 7], gconfig=SHORT))
        ids, count = answer.input_tokens + answer.output_tokens, len(answer.output_tokens)
        mask = [0] * 3 + [1] * count
        return row(ids, mask, [0.0] * 3 + answer.output_logprobs, [-1] * 3 + answer.output_versions, mask, 1.0)


def rows(*numbers: int) -> list[dict[str, int]]:
    return [{"n": number} for number in numbers]


def values(trajectories: list[Any]) -> list[int]:
    return [int(each["input_ids"][0, 1]) for each in trajectories]


def test_starts_stay_within_window_until_next_version(make: Make) -> None:
    controller, gated = make(max_head_offpolicyness=1, max_concurrent_rollouts=64, queue_size=64), Gated()
    for data in rows(*range(9)):
        controller.submit(data, gated)
    assert sorted(gated.wait_started(4)) == [0, 1, 2, 3]  # (eta + 1) * B
    gated.release(0, 1)
    assert sorted(values(controller.wait(2))) == [0, 1]
    assert controller.export_stats()["running"] == 2  # consumed, but its version is yet to come
    controller.set_version(1)
    assert sorted(gated.wait_started(6)) == [0, 1, 2, 3, 4, 5]


def test_stale_straggler_is_dropped_and_its_prompt_rerun(make: Make) -> None:
    controller, gated = make(max_head_offpolicyness=0, max_concurrent_rollouts=8, consumer_batch_size=1), Gated()
    controller.submit({"n": 0}, gated)
    gated.wait_started(1)
    controller.set_version(1)
    gated.release(0)  # it started at version 0, and the run is at 1: the second run of its prompt ends at once
    (taken,) = controller.take(1)
    assert (taken.head_version, taken.data) == (1, {"n": 0})
    assert controller.export_stats()["dropped"] == 1
    assert gated.started == [0, 0]


def test_stale_running_episode_is_abandoned(place: Place, make: Make) -> None:
    controller = make(max_head_offpolicyness=1, consumer_batch_size=1, max_concurrent_rollouts=4)
    script(place.engine, gate=1)
    controller.submit({"n": 0}, Sampled())
    engine_calls(place.engine, until="any")
    controller.set_version(1)
    assert controller.export_stats()["running"] == 1
    controller.set_version(2)
    assert engine_calls(place.engine, until="cancelled")
    with pytest.raises(RolloutsFailed, match="cannot be completed: 0 running"):
        controller.wait(1)
    assert controller.export_stats()["abandoned"] == 1


class CleansUp(Sampled):
    """Closes something in two steps when it is cancelled."""

    def __init__(self) -> None:
        self.cleaning, self.cleaned, self.gate = threading.Event(), threading.Event(), asyncio.Event()

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        try:
            return await super().arun_episode(engine, data)
        finally:
            self.loop = asyncio.get_running_loop()
            self.cleaning.set()
            await self.gate.wait()
            self.cleaned.set()


@pytest.mark.parametrize("end", ["set_version", "destroy"])
def test_aborted_episode_closes_its_sessions(place: Place, make: Make, end: str) -> None:
    controller, workflow = make(max_head_offpolicyness=0, consumer_batch_size=1, max_concurrent_rollouts=1), CleansUp()
    script(place.engine, gate=1)
    controller.submit({"n": 0}, workflow)
    engine_calls(place.engine, until="any")
    controller.set_version(1)
    assert workflow.cleaning.wait(20)
    if end == "set_version":
        controller.set_version(2)
        controller.export_stats()  # the loop has come past the cancellation
        workflow.loop.call_soon_threadsafe(workflow.gate.set)
    else:
        workflow.loop.call_soon_threadsafe(workflow.loop.call_later, 0.1, workflow.gate.set)
        controller.destroy()
    assert workflow.cleaned.wait(20)


def test_batch_order_is_independent_of_timing(make: Make) -> None:
    orders = []
    for ends in ([0, 1, 2, 3], [3, 1, 2, 0]):
        controller, gated = make(consumer_batch_size=4), Gated()
        for data in rows(0, 1, 2, 3):
            controller.submit(data, gated)
        gated.wait_started(4)
        gated.release(*ends)
        orders.append(values(controller.wait(4)))
    assert orders[0] == orders[1]


def test_rollout_batch_keeps_row_order_outside_window(make: Make) -> None:
    controller = make(consumer_batch_size=1, max_concurrent_rollouts=3)
    for _ in range(3):
        assert values(controller.rollout_batch(rows(*range(7)), AtOnce())) == list(range(7))


def test_timed_out_rollout_batch_leaves_no_episode(make: Make) -> None:
    controller, gated = make(consumer_batch_size=1, max_concurrent_rollouts=2), Gated()
    with pytest.raises(TimedOut, match="3 rollouts took longer"):
        controller.rollout_batch(rows(0, 1, 2), gated, timeout=0.2)
    controller.submit({"n": 7}, AtOnce())
    assert values(controller.wait(1)) == [7]
    assert sorted(gated.started) == [0, 1]


def test_prepare_batch_continues_through_loader_epochs(make: Make) -> None:
    controller, seen = make(consumer_batch_size=2, max_head_offpolicyness=1), []
    loader = [rows(0, 1), rows(2, 3), rows(4, 5)]
    for step in range(6):
        seen += values(controller.prepare_batch(loader, AtOnce()))
        controller.set_version(step + 1)
    assert sorted(seen) == sorted([0, 1, 2, 3, 4, 5] * 2)


def test_unbounded_staleness_reads_few_extra_prompts(make: Make) -> None:
    controller, read = make(consumer_batch_size=2, max_head_offpolicyness=10**9, max_concurrent_rollouts=4), []

    class Loader:
        def __iter__(self) -> Iterator[dict[str, int]]:
            for number in range(10**9):
                read.append(number)
                yield {"n": number}

    loader = Loader()
    for _ in range(3):
        assert len(controller.prepare_batch(loader, AtOnce())) == 2
    assert len(read) < 60


def test_filtered_rollouts_are_replaced_by_other_prompts(make: Make) -> None:
    controller = make(consumer_batch_size=3, max_concurrent_rollouts=4)
    batch = controller.prepare_batch(
        rows(*range(10)), AtOnce(), should_accept_fn=lambda trajectory: int(trajectory["rewards"][0]) % 2 == 1
    )
    assert all(value % 2 for value in values(batch)) and len(batch) == 3
    assert controller.export_stats()["rejected"] >= 2


def test_dynamic_batch_returns_accepted_rollouts_of_its_prompts(make: Make) -> None:
    controller = make(consumer_batch_size=4)
    odd = controller.prepare_batch(
        rows(0, 1, 2, 3),
        AtOnce(),
        should_accept_fn=lambda trajectory: int(trajectory["rewards"][0]) % 2 == 1,
        dynamic_bs=True,
    )
    assert sorted(values(odd)) == [1, 3]


def test_evaluation_is_not_counted(make: Make) -> None:
    controller = make(max_concurrent_rollouts=4)
    task = controller.submit({"n": 7}, AtOnce(), is_eval=True)
    trajectory = controller.wait_for_task(task)
    assert trajectory is not None and values([trajectory]) == [7]
    assert controller.export_stats()["submitted"] == 0
    with pytest.raises(NotFound):
        controller.wait_for_task(task)


def test_repeated_rejections_are_reported_and_sampling_continues(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    controller = make(consumer_batch_size=2, max_head_offpolicyness=2)
    first = 100
    taken = controller.prepare_batch(
        rows(*range(2 * first)), AtOnce(), should_accept_fn=lambda trajectory: int(trajectory["rewards"][0]) >= first
    )
    assert min(values(taken)) >= first
    assert [record.args for record in caplog.records if "were all rejected" in record.message] == [(32,), (64,)]


def test_endless_rejections_are_an_error(make: Make) -> None:
    controller = make(consumer_batch_size=2, max_head_offpolicyness=2)
    with pytest.raises(RolloutsFailed, match="prompts were all rejected, by the workflow or by dynamic sampling"):
        controller.prepare_batch(rows(*range(2000)), AtOnce(), should_accept_fn=lambda trajectory: False)
    taken = controller.prepare_batch(rows(*range(2000)), AtOnce())
    assert len(taken) == 2


def test_rejected_task_is_none(make: Make) -> None:
    controller = make()
    task = controller.submit({"n": 1}, AtOnce(), should_accept_fn=lambda trajectory: False)
    assert controller.wait_for_task(task) is None


@pytest.mark.parametrize("waits", [False, True])
def test_stale_running_task_is_none_at_once(place: Place, make: Make, waits: bool) -> None:
    controller = make(max_head_offpolicyness=0, consumer_batch_size=1)
    script(place.engine, gate=1)
    task = controller.submit({"n": 0}, Sampled())
    engine_calls(place.engine, until="any")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(controller.wait_for_task, task, 20) if waits else None
        wait_until(lambda: not waits or controller._executor._awaited)
        controller.set_version(1)
        assert engine_calls(place.engine, until="cancelled")
        assert (waiting.result() if waiting else controller.wait_for_task(task)) is None


def test_raising_workflow_is_reported_with_failures(make: Make) -> None:
    controller = make()
    with pytest.raises(RolloutsFailed, match=r"fault of the workflow: KeyError: 'answer'"):
        controller.prepare_batch(rows(1, 2, 3), Broken())
    failure = controller.failures()[0]
    assert (failure.blame, failure.attempts) == ("workflow", 1)
    assert len(controller.rollout_batch(rows(1, -1), Broken())) == 1
    with pytest.raises(RolloutsFailed, match="all 2 episodes failed"):
        controller.rollout_batch(rows(1, 2), Broken())


def test_consecutive_failed_attempts_are_reported_until_success(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = tmp_path / "stage.json"
    monkeypatch.setenv("AREAL_STAGE_FILE", str(stage))
    controller = make()
    with pytest.raises(RolloutsFailed):
        controller.rollout_batch(rows(1, 2, 3), Broken())
    assert not stage.exists()
    with pytest.raises(RolloutsFailed):
        controller.rollout_batch(rows(4), Broken())
    line = (
        r"4 attempts of episodes in a row failed, by fault of the workflow: KeyError: 'answer' \(.*, in arun_episode\)"
    )
    assert re.fullmatch(line, json.loads(stage.read_text())["failing"])
    controller.rollout_batch(rows(-1), Broken())
    assert "failing" not in json.loads(stage.read_text())


def test_waiting_for_more_than_submitted_is_an_error(make: Make) -> None:
    controller = make()
    controller.submit({"n": 1}, AtOnce())
    with pytest.raises(RolloutsFailed, match="2 rollouts cannot be completed"):
        controller.wait(2)


def test_wait_reports_reason(make: Make) -> None:
    controller = make(consumer_batch_size=1, queue_size=8)
    for data in rows(1, 2):
        controller.submit(data, AtOnce())
    controller.wait(1)
    with pytest.raises(TimedOut, match="none may start before version 1: call set_version"):
        controller.wait(1, timeout=0.2)
    assert controller.wait(1, timeout=0.1, raise_timeout=False) == []
    controller.set_version(1)
    assert values(controller.wait(1)) == [2]


def test_full_queue_is_refused(make: Make) -> None:
    controller, gated = make(consumer_batch_size=1, queue_size=2), Gated()
    for data in rows(0, 1, 2):
        controller.submit(data, gated)
    with pytest.raises(CallerError, match="2 episodes wait already"):
        controller.submit({"n": 3}, gated)


def test_pause_holds_new_episodes_and_finishes_running_ones(make: Make) -> None:
    controller, gated = make(consumer_batch_size=1, max_head_offpolicyness=3, max_concurrent_rollouts=8), Gated()
    controller.submit({"n": 0}, gated)
    gated.wait_started(1)
    controller.pause()
    controller.submit({"n": 1}, gated)
    gated.release(0, 1)
    assert values(controller.wait(1)) == [0]
    assert gated.started == [0]
    controller.resume()
    assert values(controller.wait(1)) == [1]


def test_outstanding_prompts_exclude_consumed_ones(make: Make) -> None:
    controller, gated = make(consumer_batch_size=1, max_head_offpolicyness=1, max_concurrent_rollouts=8), Gated()
    for data in rows(0, 1, 2, 3):
        controller.submit(data, gated)
    gated.wait_started(2)
    gated.release(0)
    controller.wait(1)
    assert sorted(each["n"] for each in controller.outstanding()) == [1, 2, 3]


def test_version_cannot_decrease(make: Make) -> None:
    controller = make()
    controller.set_version(3)
    assert controller.get_version() == 3
    with pytest.raises(ValueError, match="cannot become 2"):
        controller.set_version(2)


def test_failing_engine_is_retried_then_a_service_failure(place: Place, make: Make) -> None:
    controller = make(request_retries=1, consumer_batch_size=1)
    script(place.engine, fail=500)
    with pytest.raises(RolloutsFailed) as caught:
        controller.rollout_batch(rows(1), Sampled())
    (failure,) = caught.value.failures
    assert (failure.blame, failure.attempts) == ("service", 2)
    assert isinstance(failure.error, ServiceError)


class NoRow(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        return {"input_ids": torch.ones(1, 2)}


def test_check_trajectory_format_rejects_malformed_rows(make: Make) -> None:
    checked, unchecked = (make(check_trajectory_format=check) for check in (True, False))
    with pytest.raises(RolloutsFailed) as caught:
        checked.rollout_batch(rows(1), NoRow())
    assert "a trajectory needs attention_mask" in str(caught.value.failures[0].error)
    assert len(unchecked.rollout_batch(rows(1), NoRow())) == 1


def test_episode_timeout_ends_hanging_workflow(make: Make) -> None:
    with pytest.raises(RolloutsFailed, match=r"did not end within 0\.05 s, rollout\.episode_timeout") as caught:
        make(episode_timeout=0.05).rollout_batch(rows(1), Gated())
    assert caught.value.failures[0].blame == "workflow"


def test_request_timeout_ends_hanging_call(place: Place, make: Make) -> None:
    script(place.engine, gate=1)
    with pytest.raises(RolloutsFailed) as caught:
        make(request_timeout=0.3, request_retries=0).rollout_batch(rows(1), Sampled(), timeout=20)
    assert isinstance(caught.value.failures[0].error, DeadlineExceeded)


def test_batch_wait_may_exceed_request_timeout(make: Make) -> None:
    controller, gated = make(request_timeout=0.2), Gated()
    with ThreadPoolExecutor() as pool:
        batch = pool.submit(controller.rollout_batch, rows(1), gated)
        with pytest.raises(concurrent.futures.TimeoutError):
            batch.result(0.5)
        gated.release(1)
        assert values(batch.result()) == [1]


def test_reward_workers_limit_reward_processes(place: Place, make: Make) -> None:
    script(place.engine, token_ids=[10, 11, 12])
    workflow = RLVRWorkflow(process_id, SHORT, str(place.folder))
    given = make(reward_workers=1).rollout_batch([{"input_ids": [5, 6, 7]}] * 6, workflow)
    assert len({float(each["rewards"][0]) for each in given}) == 1


def test_sampled_model_is_configured_one() -> None:
    here = ServiceAddress("http://127.0.0.1:1")
    assert find_service(InferenceEngineConfig(model="b"), here, {"AREAL_INFERENCE_MODEL": "c"}).model == "b"
    assert find_service(InferenceEngineConfig(), here, {"AREAL_INFERENCE_MODEL": "c"}).model == "c"


def test_aborted_answer_is_continued(place: Place, make: Make) -> None:
    """``abort`` after two tokens: the rest is asked for with what there is, within the same budget."""
    controller = make(consumer_batch_size=1)
    script(place.engine, token_ids=[10, 11, 12], abort_after=2)
    workflow = RLVRWorkflow(length, GenerationHyperparameters(max_new_tokens=3, min_new_tokens=3), str(place.folder))
    (trajectory,) = controller.rollout_batch([{"input_ids": [5, 6, 7]}], workflow)
    first, second = (call["body"] for call in engine_calls(place.engine))
    assert second["input_ids"] == [5, 6, 7, 10, 11]
    assert (first["sampling"]["min_new_tokens"], second["sampling"]["min_new_tokens"]) == (3, 1)
    assert second["sampling"]["max_new_tokens"] == first["sampling"]["max_new_tokens"] - 2
    assert trajectory["input_ids"].tolist()[0][3:5] == [10, 11]


def test_group_is_one_call_and_aborted_members_continue(place: Place, make: Make) -> None:
    controller = make(consumer_batch_size=1)
    script(place.engine, token_ids=[10, 11, 12], abort_after=2)
    workflow = RLVRWorkflow(length, GenerationHyperparameters(max_new_tokens=3), str(place.folder))
    (group,) = controller.rollout_batch([{"input_ids": [5, 6, 7]}], workflow, group_size=4)
    first, *rest = (call["body"] for call in engine_calls(place.engine))
    assert first["sampling"]["n"] == 4
    assert [(each["input_ids"], each["sampling"].get("n", 1)) for each in rest] == [([5, 6, 7, 10, 11], 1)] * 4
    assert group["input_ids"][:, 3:5].tolist() == [[10, 11]] * 4
    assert group["loss_mask"].sum(1).tolist() == [3] * 4


def test_seeded_sampling_depends_only_on_data_order(place: Place, make: Make) -> None:
    seeds = []
    for trial in ("one", "two"):
        script(place.engine, reset=True)
        controller = make(deterministic_sampling=True, trial_name=trial)
        controller.rollout_batch(rows(1, 2), Sampled(), group_size=2)
        seeds.append(sorted(call["body"]["sampling"]["seed"] for call in engine_calls(place.engine)))
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 4


def test_aborted_seeded_group_continues_with_new_seeds(place: Place, make: Make) -> None:
    script(place.engine, token_ids=[10, 11, 12], abort_after=2)
    workflow = RLVRWorkflow(length, GenerationHyperparameters(max_new_tokens=3, seed=1), str(place.folder))
    make(consumer_batch_size=1).rollout_batch([{"input_ids": [5, 6, 7]}], workflow, group_size=4)
    first, *rest = (call["body"]["sampling"] for call in engine_calls(place.engine))
    assert first["n"] == 4 and len({first["seed"], *(each["seed"] for each in rest)}) == 5


def test_consumed_rollouts_are_dumped_for_viewer(make: Make, tmp_path: Path) -> None:
    controller = make(dump_to_file=True, fileroot=str(tmp_path), experiment_name="e", trial_name="t")
    controller.prepare_batch(rows(1, 2), Sampled())
    episodes = list(read_episodes(tmp_path / "e" / "t" / "trajectories"))
    assert [each.reward for each in episodes] == [1.0, 1.0]
    assert json.dumps(episodes[0].document())


def test_failed_rollouts_are_dumped_with_responsible_party(make: Make, tmp_path: Path) -> None:
    controller = make(dump_to_file=True, fileroot=str(tmp_path), consumer_batch_size=1)
    controller.rollout_batch(rows(-1, 7), Broken())
    (line,) = (tmp_path / "trajectories" / "failures.jsonl").read_text().splitlines()
    told = json.loads(line)
    assert (told["blame"], told["example"]) == ("workflow", {"n": 7})
    assert re.fullmatch(r"KeyError: 'answer' \(.*test_controller\.py:\d+, in arun_episode\)", told["error"])


def test_rollouts_are_returned_when_dump_fails(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "full").touch()  # a file where the folder would be
    controller = make(dump_to_file=True, fileroot=str(tmp_path / "full"))
    assert len(controller.prepare_batch(rows(1, 2), Sampled())) == 2
    assert any("2 rollouts are not written" in record.message for record in caplog.records)


def test_service_is_found_from_config_or_environment(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageFault, match="address of the inference service"):
        RolloutController(InferenceEngineConfig()).initialize()
    (tmp_path / "key").write_text(f"{place.key}\n")
    monkeypatch.setenv("AREAL_INFERENCE_ADDR", place.proxy.url)
    monkeypatch.setenv("AREAL_INFERENCE_KEY_FILE", str(tmp_path / "key"))
    with RolloutController(InferenceEngineConfig(setup_timeout=20)) as controller:
        answer = controller.chat_completion([{"role": "user", "content": "Hi"}], store=False)
    assert answer["choices"][0]["message"]["content"] == "Hello there, friend!"
    controller.destroy()
    with pytest.raises(RuntimeError, match="not initialized"):
        controller.get_version()
