"""GRPO against a running service: rollouts within their staleness, weights that arrive, prompts that are counted."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from areal.api import stats
from areal.api.algorithm_api import AdvantageInputs, LossInputs
from areal.api.cli_args import (
    AgentConfig,
    EvaluatorConfig,
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    NormConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOCriticConfig,
    RecoverConfig,
    TrainDatasetConfig,
    ValidDatasetConfig,
)
from areal.api.io_struct import ModelRequest
from areal.api.workflow_api import RolloutWorkflow
from areal.client import InferenceClient, RolloutsFailed
from areal.client.gateway import GatewayClient
from areal.client.prometheus import parse
from areal.dataset import get_custom_dataset
from areal.errors import ArealError, UsageFault
from areal.rollout.tensors import RewardedResponse, response_rows
from areal.state.job_metrics import steps_of
from areal.training.algorithms.actor import rows_with_gradient
from areal.training.algorithms.advantages import kl_estimate, prepare
from areal.training.run_folder import RunFolder
from areal.training.trainers.ppo import PPOTrainer
from areal.trajectories.reading import read_episodes
from areal.trajectories.record import Episode
from areal.workflow.rlvr import RLVRWorkflow
from tests.hub_standin import files_of, hub_standin
from tests.services.processes import Process, Processes, wait_until
from tests.services.weight_update.conftest import embedded_worker
from tests.training.test_prometheus import scrape
from tests.training.trainers.reversing import MODEL, digits, engine, experiment, optimizer, prompts

ANSWERS = GenerationHyperparameters(n_samples=4, max_new_tokens=8)
WORKFLOW: dict[str, Any] = {
    "workflow": "areal.workflow.rlvr:RLVRWorkflow",
    "workflow_kwargs": {
        "reward_fn": "tests.training.trainers.rewards:reversed_digits",
        "gconfig": ANSWERS,
        "tokenizer": str(MODEL),
    },
}


@dataclass(frozen=True)
class Service:
    processes: Processes
    gateway: Process
    proxy: Process

    def version(self) -> int:
        version: int = self.proxy.call("GET", "/get_version", key=self.processes.key).json()["version"]
        return version


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    processes = Processes(folder)
    try:
        _, proxy = embedded_worker(processes, "--state-dir", str(folder / "journal"))
        router = processes.router()
        gateway = processes.gateway(router)
        processes.register(router, proxy, model="m")
        yield Service(processes, gateway, proxy)
    finally:
        processes.stop()


def _config(tmp_path: Path, service: Service, steps: int, *, staleness: int = 2, **more: Any) -> GRPOConfig:
    actor = {
        "optimizer": optimizer(3e-4),
        "ppo_n_minibatches": 1,
        "kl_ctl": 0.0,
        "weight_update_mode": "shm",
        "reward_norm": NormConfig(mean_level="group", std_level="group", group_size=4),
    } | more.pop("actor", {})
    rollout = InferenceEngineConfig(
        gateway_addr=service.gateway.url,
        admin_api_key=service.processes.key,
        model="m",
        max_head_offpolicyness=staleness,
        max_concurrent_rollouts=16,
    )
    return GRPOConfig(
        **experiment(tmp_path, total_train_steps=steps, **more),
        train_dataset=TrainDatasetConfig(batch_size=8),
        gconfig=ANSWERS,
        rollout=rollout,
        actor=PPOActorConfig(**engine(**actor)),
    )


@pytest.mark.extended
def test_user_trajectories_are_acknowledged_after_their_step(tmp_path: Path, service: Service) -> None:
    config = _config(tmp_path, service, 3, recover=RecoverConfig(mode="auto", freq_steps=2))
    config.train_dataset.batch_size, config.gconfig = 2, ANSWERS.new(n_samples=1)
    config.rollout.agent, config.actor.reward_norm = AgentConfig(mode="online"), None
    reported: list[tuple[int, int]] = []

    class Telling(PPOTrainer):
        def recover(self) -> bool:
            assert self.rollout is not None
            acknowledge = self.rollout.acknowledge

            def tell(leases: Sequence[str]) -> None:
                acknowledge(leases)
                newest = self.checkpoints.newest()
                reported.append((newest.step if newest else 0, len(leases)))

            self.rollout.acknowledge = tell  # type: ignore[method-assign]
            return super().recover()

    with InferenceClient(service.gateway.url, service.processes.key, model="m") as client:
        for number in range(6):
            session = client.start_session("a user", online=True)
            session.chat(prompts(1)[0]["messages"], max_tokens=8)
            session.reward(float(number % 2))
        with Telling(config) as trainer:
            trainer.train()
        assert reported == [(0, 2), (0, 2), (2, 2)]
        assert client.lend() == []


@pytest.mark.extended
def test_epochs_passed_to_train_set_the_schedule(tmp_path: Path, service: Service) -> None:
    config = _config(
        tmp_path,
        service,
        1,
        actor={"optimizer": OptimizerConfig(lr=1e-3, lr_scheduler_type="linear", warmup_steps_proportion=0.0)},
    )
    config.total_train_steps = None
    with PPOTrainer(config, prompts(8)) as trainer:
        trainer.train(**WORKFLOW, total_epochs=3)
        lines = steps_of(trainer.folder.metrics)
    rates = [line["lr"] for line in lines]
    assert len(rates) == 3 and rates[0] > rates[1] > 0 and trainer.actor.total_steps == 3
    assert lines[-1]["total_steps"] == 3
    assert all(0.0 <= line["groups/without_spread"] <= 1.0 for line in lines)


def test_schedule_counts_actual_updates(tmp_path: Path, service: Service) -> None:
    critic = PPOCriticConfig(**engine(optimizer=optimizer(2e-3)), ppo_n_minibatches=50)
    config = _config(tmp_path, service, 2, actor={"ppo_n_minibatches": 100, "ppo_epochs": 2}, critic=critic)
    with PPOTrainer(config, prompts(8)) as trainer:
        assert trainer.actor.total_steps == 2 * 2 * 32, "a step has 8 prompts of 4 samples"
        assert trainer.critic is not None and trainer.critic.total_steps == 2 * 2 * 32


def _run(config: GRPOConfig, count: int = 200) -> list[dict[str, Any]]:
    with PPOTrainer(config, prompts(count), prompts(8, seed=1)) as trainer:
        trainer.train(**WORKFLOW)
    return steps_of(trainer.folder.metrics)


def test_reward_that_raises_from_the_start_is_a_usage_error(tmp_path: Path, service: Service) -> None:
    workflow = {**WORKFLOW["workflow_kwargs"], "reward_fn": "tests.training.trainers.rewards:of_missing_column"}
    config = _config(tmp_path, service, 1)
    with PPOTrainer(config, prompts(50)) as trainer, pytest.raises(RolloutsFailed, match="solution") as caught:
        trainer.train(**{**WORKFLOW, "workflow_kwargs": workflow})
    assert caught.value.exit_code == 2, "a job does not start again"


def test_asynchronous_steps_respect_staleness_and_serve_weights(tmp_path: Path, service: Service) -> None:
    lines = _run(_config(tmp_path, service, 8, actor={"use_decoupled_loss": True}))
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert max(line["staleness/max"] for line in lines) <= 2
    assert [line["prompts/consumed"] for line in lines] == [8.0 * step for step in range(1, 9)]
    assert [line["version"] - lines[0]["version"] for line in lines] == list(range(8))
    assert service.version() == lines[-1]["version"]
    assert all(line["weights/paused_ms"] > 0 for line in lines)


class Scraped(PPOTrainer):
    """Looks before its last step for what Prometheus would find."""

    found: ClassVar[list[tuple[float | None, float | None]]] = []

    def train_step(self) -> dict[str, float]:
        if self.step == self.total_steps - 1:

            def listed() -> list[str]:
                reported = GatewayClient(self.config.rollout.gateway_addr, None).get("/http_sd")
                return [f"http://{each['targets'][0]}" for each in reported if each["labels"]["job"] == "areal-trainer"]

            def ours() -> tuple[float | None, float | None] | None:
                """Trainers of the tests before may be listed for a while."""
                for url in listed():
                    with contextlib.suppress(OSError):
                        page = parse(scrape(url))
                        return page.total("areal_trainer_step"), page.total("areal_trainer_reward")
                return None

            self.found.append(wait_until(ours))
        return super().train_step()


def test_synchronous_steps_train_on_newest_weights(tmp_path: Path, service: Service) -> None:
    config = _config(tmp_path, service, 4, staleness=0, actor={"use_decoupled_loss": True})
    with Scraped(config, prompts(200)) as trainer:
        trainer.train(**WORKFLOW)
    lines = steps_of(trainer.folder.metrics)
    assert Scraped.found == [(3.0, lines[2]["reward/mean"])]
    for line in lines:
        assert line["staleness/max"] == 0
        assert abs(line["mismatch_kl"]) < 1e-4  # the engine's log-probabilities are the trainer's own
        assert abs(line["importance_weight"] - 1) < 1e-4


HOW = [
    {"temperature": temperature, **shaping}
    for temperature in (0.3, 0.6, 1.0, 1.4, 2.0)
    for shaping in ({}, {"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.1, "repetition_penalty": 1.3})
]


class EveryWay(RolloutWorkflow):
    """Samples each prompt in another way, the first one of ``HOW`` first."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        gconfig = ANSWERS.new(n_samples=1, **HOW[data["number"] % len(HOW)])
        answer = await engine.agenerate(ModelRequest(input_ids=[1, *digits(data["number"]), 14], gconfig=gconfig))
        return response_rows([RewardedResponse(answer, float(data["number"] % 2))])


class Watched(PPOTrainer):
    """Keeps what it trains on, and what it says itself of the tokens."""

    seen: ClassVar[list[tuple[dict[str, torch.Tensor], torch.Tensor]]] = []

    def _prepare_batch(self, batch: Any, groups: torch.Tensor) -> Any:
        self.seen.append((batch, self.actor.forward(batch, lambda outputs, micro: outputs.logprobs)))
        return super()._prepare_batch(batch, groups)


def test_on_policy_ratio_is_one_at_mixed_temperatures(tmp_path: Path, service: Service) -> None:
    config = _config(tmp_path, service, 1, staleness=0)
    config.train_dataset.batch_size = config.rollout.consumer_batch_size = len(HOW)
    config.gconfig = config.gconfig.new(n_samples=1)
    Watched.seen.clear()
    with Watched(config, [{"number": number} for number in range(len(HOW))]) as trainer:
        trainer.train(workflow=EveryWay())
    ((batch, ours),) = Watched.seen
    mask = batch["loss_mask"].bool()
    assert {round(each, 3) for each in batch["token_temperatures"][mask].tolist()} == {0.3, 0.6, 1.0, 1.4, 2.0}
    ours, theirs = ours.cpu(), batch["logprobs"]
    assert float((ours - theirs)[mask].abs().max()) < 1e-4
    assert float(((ours - theirs).exp() - 1)[mask].abs().max()) < 1e-4
    for estimator in ("k1", "k2", "k3"):
        assert float(kl_estimate(theirs, ours, estimator)[mask].abs().max()) < 1e-4
    (line,) = steps_of(trainer.folder.metrics)
    assert abs(line["mismatch_kl"]) < 1e-5 and abs(line["importance_weight"] - 1) < 1e-4


def test_clipped_rewards_are_told_once_and_records_end_with_their_run(
    tmp_path: Path, service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(tmp_path, service, 2, actor={"reward_bias": 1.0, "reward_clip": 0.5})  # beyond it, whatever it is
    with PPOTrainer(config, prompts(40)) as trainer:
        trainer.train(**WORKFLOW)
        assert [line["reward/clipped"] for line in steps_of(trainer.folder.metrics)] == [1.0, 1.0]
        stats.get("left").scalar(over=1.0)  # as by an episode that ends after the last step
    assert (
        capsys.readouterr().err.count("warning: actor.reward_clip is 0.5, and 100% of the rewards are beyond it") == 1
    )
    assert stats.taken() == {}


class Greedy(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        request = ModelRequest(input_ids=[1, *digits(0), 14], gconfig=ANSWERS.new(n_samples=1, greedy=True))
        return response_rows([RewardedResponse(await engine.agenerate(request), 1.0)])


@pytest.mark.extended
def test_greedy_answers_are_not_trained_on(tmp_path: Path, service: Service) -> None:
    with (
        PPOTrainer(_config(tmp_path, service, 1), prompts(20)) as trainer,
        pytest.raises(UsageFault, match="greedily"),
    ):
        trainer.train(workflow=Greedy())


def test_temperature_differing_from_samples_is_refused() -> None:
    actor = PPOActorConfig(temperature=0.6)
    with pytest.raises(ValueError, match=r"actor\.temperature 0.6 .* gconfig.temperature is 1"):
        GRPOConfig(actor=actor, gconfig=ANSWERS)
    GRPOConfig(actor=PPOActorConfig(temperature=0.6), gconfig=ANSWERS.new(temperature=0.6))


@pytest.mark.extended
def test_default_kl_without_reference_is_disabled_and_logged(
    tmp_path: Path, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config(tmp_path, service, 1, actor={"kl_ctl": PPOActorConfig().kl_ctl})
    _run(config)
    assert "no KL penalty: actor.kl_ctl is 0.1, and there is no ref" in caplog.text
    assert config.actor.kl_ctl == 0.0


@pytest.mark.extended
def test_critic_and_reference_are_used(tmp_path: Path, service: Service) -> None:
    config = _config(
        tmp_path,
        service,
        6,
        actor={"kl_ctl": 0.05, "ppo_n_minibatches": 2, "gae_lambda": 0.95, "reward_norm": None, "reward_bias": 2.0},
        critic=PPOCriticConfig(**engine(optimizer=optimizer(2e-3)), ppo_n_minibatches=2, ppo_epochs=2),
        ref=PPOActorConfig(**engine()),
    )
    with PPOTrainer(config, prompts(200)) as trainer:
        trainer.train(**WORKFLOW)
        assert trainer.critic is not None
        assert (trainer.critic.steps, trainer.actor.steps) == (6 * 2 * 2, 6 * 2)
    lines = steps_of(trainer.folder.metrics)
    losses = [line["critic/loss"] for line in lines]
    assert min(losses[3:]) < losses[0]


@pytest.mark.extended
def test_reference_is_logged_without_penalty_every_epoch(tmp_path: Path, service: Service) -> None:
    more = {"ppo_epochs": 3, "ppo_n_minibatches": 2, "kl_target": 1e-3, "kl_loss_coef": 0.1, "kl_horizon": 100}
    config = _config(tmp_path, service, 2, staleness=0, actor=more, ref=PPOActorConfig(**engine()))
    with PPOTrainer(config, prompts(50)) as trainer:
        trainer.train(**WORKFLOW)
        assert trainer.actor.steps == 2 * 2 * 3
        state = trainer.state()
    lines = steps_of(trainer.folder.metrics)
    assert abs(lines[0]["ref_kl"]) < 1e-5 < abs(lines[1]["ref_kl"])  # the policy began as the reference
    assert lines[0]["kl_coef"] == 0.1
    assert lines[1]["kl_coef"] == pytest.approx(0.1 * (1 - 0.2 * 32 / 100))
    assert state["kl_factor"] != 1.0


@pytest.mark.extended
def test_kl_target_moves_the_penalty_in_the_rewards(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    penalties: list[float] = []

    def seen(batch: Any, groups: Any, config: Any, auxiliary: Any, *rest: Any, **more: Any) -> Any:
        charged = prepare(batch, groups, config, auxiliary, *rest, **more)
        free = prepare(batch, groups, config, auxiliary, *rest, **more | {"kl_factor": 0.0})
        unit = prepare(batch, groups, config, auxiliary, *rest, **more | {"kl_factor": 1.0})
        mask, per_unit = batch["loss_mask"].bool(), unit["returns"] - free["returns"]
        penalties.append(((charged["returns"] - free["returns"])[mask].sum() / per_unit[mask].sum()).item())
        return charged

    monkeypatch.setattr("areal.training.trainers.ppo.prepare", seen)
    more = {"kl_target": 1e-3, "kl_ctl": 0.1, "kl_horizon": 100, "reward_norm": None}
    config = _config(tmp_path, service, 3, staleness=0, actor=more, ref=PPOActorConfig(**engine()))
    with PPOTrainer(config, prompts(50)) as trainer:
        trainer.train(**WORKFLOW)
    coefficients = [line["kl_coef"] for line in steps_of(trainer.folder.metrics)]
    assert coefficients[1] != 0.1
    assert [0.1 * penalty for penalty in penalties[1:]] == pytest.approx(coefficients[1:], rel=0.01)


def likelihood_of_right_answers(given: LossInputs) -> Tensor:
    return -given.logprobs * given.advantages


def right_or_nothing(given: AdvantageInputs) -> Tensor:
    return given.rewards[:, None].expand(given.loss_mask.shape)


@pytest.mark.extended
def test_custom_loss_and_advantages_train_by_name_or_function(tmp_path: Path, service: Service) -> None:
    named = {"loss_fn": f"{__name__}:likelihood_of_right_answers", "advantage_fn": f"{__name__}:right_or_nothing"}
    config = _config(tmp_path / "named", service, 2, actor=named | {"reward_norm": None})
    with PPOTrainer(config, prompts(50)) as trainer:
        trainer.train(**WORKFLOW)
    given = _config(tmp_path / "given", service, 2, actor={"reward_norm": None})
    calls: list[AdvantageInputs] = []

    def counted(inputs: AdvantageInputs) -> Tensor:
        calls.append(inputs)
        return right_or_nothing(inputs)

    with PPOTrainer(given, prompts(50), loss_fn=likelihood_of_right_answers, advantage_fn=counted) as other:
        other.train(**WORKFLOW)
    assert len(calls) == 2
    for run in (trainer, other):
        lines = steps_of(run.folder.metrics)
        assert len(lines) == 2
        assert any(line["grad_norm"] > 0 for line in lines)  # a batch without a right answer has none
        assert all(line["trained_share"] == 1 for line in lines)


@pytest.mark.extended
def test_entropy_covers_all_and_trained_tokens(tmp_path: Path, service: Service) -> None:
    """Rows without a gradient count with minus the log-probabilities of what was sampled, which is as much in the mean:
    no forward pass is made for them."""
    seen: list[tuple[float, float, float, dict[str, Any]]] = []

    class Measuring(PPOTrainer):
        def _update(self, batch: Any) -> dict[str, Any]:
            entropies = self.actor.forward(batch, lambda outputs, micro: outputs.entropies).cpu()
            mask, rows = batch["loss_mask"].bool(), rows_with_gradient(batch, self.config.actor)
            counted = -batch["logprobs"].clone()
            counted[rows] = entropies[rows]
            noise = (entropies + batch["logprobs"])[mask].std() / mask.sum().sqrt()
            with mock.patch.object(self.actor, "forward", side_effect=AssertionError("a pass of its own")):
                metrics = super()._update(batch)
            seen.append((float(entropies[mask].mean()), float(counted[mask].mean()), float(noise), metrics))
            return metrics

    with Measuring(_config(tmp_path, service, 3), prompts(50)) as trainer:
        trainer.train(**WORKFLOW)
    assert any(metrics["trained_share"] < 1 for *_, metrics in seen)
    for entropy, counted, noise, metrics in seen:
        assert metrics["entropy"] == pytest.approx(counted, rel=1e-4)
        assert metrics["entropy"] == pytest.approx(entropy, abs=5 * noise)
        if metrics["trained_share"] < 1:
            assert metrics["trained_entropy"] != pytest.approx(entropy, rel=1e-4)


@pytest.mark.extended
def test_weighted_rewards_are_each_in_metrics(tmp_path: Path, service: Service) -> None:
    rewards = ["tests.training.trainers.rewards:reversed_digits", "tests.training.trainers.rewards:ended"]
    kwargs = WORKFLOW["workflow_kwargs"] | {"reward_fn": rewards, "reward_weights": [1.0, 0.25]}
    with PPOTrainer(_config(tmp_path, service, 1), prompts(50)) as trainer:
        trainer.train(workflow=WORKFLOW["workflow"], workflow_kwargs=kwargs)
    (line,) = steps_of(trainer.folder.metrics)
    assert line["rollout/reward/ended"] > 0
    assert 0 < line["reward/mean"] <= 1.25
    assert line["reward/mean"] != line["rollout/reward/reversed_digits"]


@pytest.mark.extended
def test_hub_ids_train_like_folders(tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in prompts(16))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub_standin() as standin:
        monkeypatch.setenv("HF_ENDPOINT", standin.url)
        standin.repository("org/reverse").push(files_of(MODEL), "model")
        standin.repository("org/digits", "dataset").push({"train.jsonl": lines.encode()}, "rows")
        config = _config(tmp_path, service, 1, actor={"path": "org/reverse"})
        config.tokenizer_path = "org/reverse"
        config.train_dataset.path = "org/digits"
        rows = get_custom_dataset("train", config.train_dataset, type="rl")
        with PPOTrainer(config, rows) as trainer:
            kwargs = {**WORKFLOW["workflow_kwargs"], "tokenizer": "org/reverse"}
            trainer.train(workflow=WORKFLOW["workflow"], workflow_kwargs=kwargs)
        assert [line["step"] for line in steps_of(trainer.folder.metrics)] == [1]
        weights = [line for line in standin.asked if line.startswith("GET") and line.endswith("model.safetensors")]
        assert len(weights) == 1


def test_evaluation_uses_served_weights(tmp_path: Path, service: Service) -> None:
    config = _config(tmp_path, service, 2)
    config.evaluator = EvaluatorConfig(freq_steps=2, eval_before_train=True)
    config.valid_dataset = ValidDatasetConfig()
    config.eval_gconfig = ANSWERS.new(n_samples=2)
    lines = _run(config)
    evaluated = [line for line in lines if "eval/reward/mean" in line]
    assert [line["step"] for line in evaluated] == [0, 2]
    assert [line["eval/rollouts"] for line in evaluated] == [8 * 2, 8 * 2]
    assert [line["eval/failed"] for line in evaluated] == [0, 0]
    for line in evaluated:
        assert 0 <= line["eval/pass@1/low"] <= line["eval/pass@1/mean"] <= line["eval/pass@2/mean"] <= 1
        assert line["eval/reward/low"] <= line["eval/reward/mean"] <= line["eval/reward/high"]
        assert line["eval/length/mean"] >= 1 and 0 <= line["eval/length/truncated"] <= 1


class OddAnswersFail(RLVRWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        if int(data["answer"]) % 2:
            raise ValueError("odd")
        return await super().arun_episode(engine, data)


@pytest.mark.extended
def test_evaluation_counts_failed_rollouts(tmp_path: Path, service: Service) -> None:
    config = _config(tmp_path, service, 1)
    config.evaluator = EvaluatorConfig(freq_steps=1)
    config.valid_dataset = ValidDatasetConfig()
    config.eval_gconfig = ANSWERS.new(n_samples=1)
    rows = prompts(8, seed=1)
    odd = sum(int(row["answer"]) % 2 for row in rows)
    with PPOTrainer(config, prompts(50), rows) as trainer:
        trainer.train(**WORKFLOW, eval_workflow=OddAnswersFail)
        (line,) = steps_of(trainer.folder.metrics)
    assert 0 < odd < 8 and (line["eval/rollouts"], line["eval/failed"]) == (8 - odd, odd)


@pytest.mark.extended
def test_runs_with_same_seed_train_on_same_samples(tmp_path: Path, service: Service) -> None:
    class Killed(Exception):
        pass

    def run(trial: str, seed: int, *, killed_at: int | None = None) -> list[tuple[str, list[list[int]]]]:
        config = _config(tmp_path, service, 2, staleness=0, trial_name=trial, seed=seed)
        config.rollout.dump_to_file = True
        config.recover = RecoverConfig(mode="auto", freq_steps=1)
        with PPOTrainer(config, prompts(50)) as trainer:
            take = trainer.train_step

            def step() -> dict[str, float]:
                if trainer.step == killed_at:
                    raise Killed
                return take()

            trainer.train_step = step  # type: ignore[method-assign]
            trainer.train(**WORKFLOW)
        written = read_episodes(RunFolder(tmp_path / "runs" / "reversing" / trial).trajectories)
        return [(str(each.prompt), [list(one.input_ids) for one in each.interactions]) for each in written]

    first = run("one", 1)
    assert len(first) == 2 * 8 * ANSWERS.n_samples
    assert run("two", 1) == first
    with pytest.raises(Killed):
        run("resumed", 1, killed_at=1)
    assert run("resumed", 1) == first
    assert run("one-again", 2) != first


def test_resumed_run_consumes_each_prompt_once(tmp_path: Path, service: Service) -> None:
    config = _config(tmp_path, service, 6)
    config.recover = RecoverConfig(mode="auto", freq_steps=2)
    config.rollout.dump_to_file = True
    config.evaluator = EvaluatorConfig(freq_steps=5)
    config.valid_dataset = ValidDatasetConfig()
    trained: list[int] = []

    class Killed(Exception):
        pass

    def run(stop_at: int | None) -> None:
        with PPOTrainer(config, prompts(200), prompts(3, seed=1)) as trainer:
            take = trainer.train_step

            def step() -> dict[str, float]:
                if trainer.step == stop_at:
                    raise Killed
                spent = trainer.frontier.spent
                metrics = take()
                trained.append(trainer.frontier.spent - spent)
                return metrics

            trainer.train_step = step  # type: ignore[method-assign]
            trainer.train(**WORKFLOW)
            state = trainer.frontier.state()
            assert state["frontier"] + len(state["beyond"]) == 48

    with pytest.raises(Killed):
        run(stop_at=5)
    first = service.version()
    run(stop_at=None)
    assert trained == [8] * 5 + [8] * 2  # step 5 was after the checkpoint: its prompts are trained on again
    # Published meanwhile: what it resumed with, and 2 steps. A version never means two weights.
    assert service.version() == first + 1 + 2
    _check_written(list(read_episodes(RunFolder(tmp_path / "runs" / "reversing" / "t").trajectories)))


def _check_written(episodes: list[Episode]) -> None:
    """Each sample of each step is there once, with its group, row and advantage; evaluation is marked."""
    trained = [each for each in episodes if not each.is_eval]
    assert Counter(each.step for each in trained) == dict.fromkeys(range(1, 7), 8 * ANSWERS.n_samples)
    groups: dict[str, list[Episode]] = {}
    for each in trained:
        groups.setdefault(each.group, []).append(each)
    assert len(groups) == 48 == len({each.prompt for each in trained})
    for group in groups.values():
        assert [each.sample for each in group] == list(range(ANSWERS.n_samples))
        rewards = torch.tensor([each.reward for each in group])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-9)
        advantages = [each.interactions[0].advantage for each in group]
        assert advantages == pytest.approx(expected.tolist(), abs=1e-3)
    evaluated = [each for each in episodes if each.is_eval]
    assert [(each.step, each.prompt, each.interactions[0].advantage) for each in evaluated] == [
        (5, row, None) for row in range(3)
    ]
    assert not {each.group for each in evaluated} & set(groups)


class Unreliable(RolloutWorkflow):
    """Rows that say so fail: ``fails`` times each, without a cause in the service."""

    failed: ClassVar[Counter[str]] = Counter()

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        asked = data["messages"][0]["content"]
        if self.failed[asked] < data["fails"]:
            self.failed[asked] += 1
            raise ConnectionError("the tool is gone")
        return await RLVRWorkflow(**WORKFLOW["workflow_kwargs"]).arun_episode(engine, data)


def _unreliable(tmp_path: Path, service: Service, fails: list[int]) -> tuple[PPOTrainer, list[dict[str, Any]]]:
    """Two steps that see each of 16 prompts, of which these fail so often."""
    config = _config(tmp_path, service, 2)
    config.rollout.request_retries = 0
    rows = [{**row, "fails": count} for row, count in zip(prompts(16), fails, strict=True)]
    Unreliable.failed.clear()
    with PPOTrainer(config, rows) as trainer:
        trainer.train(workflow=Unreliable())
    return trainer, steps_of(trainer.folder.metrics)


def test_failed_prompt_is_resampled_and_trained_on(tmp_path: Path, service: Service) -> None:
    trainer, lines = _unreliable(tmp_path, service, [1] * 3 + [0] * 13)
    counts = trainer.frontier.counts
    assert (counts.trained, counts.given_up) == (16, 0)
    assert trainer.frontier.spent == 16
    assert lines[-1]["prompts/returned"] == counts.returned <= 3


def test_permanently_failing_prompt_is_dropped_and_reported(
    tmp_path: Path, service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, lines = _unreliable(tmp_path, service, [1000] * 2 + [0] * 14)
    counts = trainer.frontier.counts
    assert counts.trained == 16
    assert counts.given_up <= 4 and counts.returned >= 2
    assert lines[-1]["prompts/consumed"] == 16
    warnings = [record.message for record in caplog.records if "given up" in record.message]
    assert len(warnings) == counts.given_up
    assert all("ConnectionError('the tool is gone')" in text for text in warnings)


def test_run_with_mostly_failing_prompts_reports_first_cause(tmp_path: Path, service: Service) -> None:
    with pytest.raises(ArealError, match=r"the first, .*the tool is gone"):
        _unreliable(tmp_path, service, [1000] * 13 + [0] * 3)


def test_mismatched_batch_sizes_are_an_error(tmp_path: Path, service: Service) -> None:
    config = _config(tmp_path, service, 1)
    config.rollout.consumer_batch_size = 5
    with pytest.raises(UsageFault, match=r"consumer_batch_size is 5 and train_dataset\.batch_size 8"):
        PPOTrainer(config, prompts(20))
