"""Rollouts on the first rank: prompts, batches from the controller, the outcome of each prompt; and evaluation.

A prompt that was trained on or rejected is spent. A prompt that failed or was too stale is sampled again, and given up
after repeated failures. The run fails if most prompts are given up; otherwise it would silently train on the rest of
the data.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from areal.api import stats
from areal.api.cli_args import EvaluatorConfig, PPOConfig
from areal.client.errors import Blame
from areal.dataclasses import dataclass, field, replace
from areal.dataset.images import images_key, row_images
from areal.errors import ArealError, UsageFault
from areal.http import tracing
from areal.rollout.controller import RolloutController
from areal.rollout.dump import episodes_of, write_step
from areal.rollout.evaluation import Estimate, PromptScores, estimates
from areal.rollout.staleness import EndCause, EpisodeEnd, Rollout
from areal.rollout.tensors import concat_padded_tensors, with_token_temperatures
from areal.training.batches import Batch
from areal.training.frontier import DataOrder, FailureWindow, Frontier
from areal.training.metrics import Metrics, MetricsLog, ProgressLine, open_trackers
from areal.training.run_folder import RunFolder, run_folder
from areal.training.services import own_service
from areal.trajectories.record import Episode
from areal.wire.columns import COLUMNS
from areal.wire.training_health import WITHOUT_SPREAD

_log = logging.getLogger(__name__)
_MIN_WINDOW = 8
_REQUIRED = ("input_ids", "attention_mask", "loss_mask", "logprobs", "rewards")
_TYPES: Mapping[str, torch.dtype] = {
    **{name: getattr(torch, column.dtype) for name, column in COLUMNS.items()},
    "truncated": torch.bool,
    "images": torch.int64,
}
"""The columns of ``areal.api.workflow_api.Trajectory``."""


class Prompt(dict[str, object]):
    """A prompt: row ``row`` of the data set, a plain dict for workflows. ``position`` counts prompts over epochs,
    ``tries`` the failed rollouts of this prompt."""

    def __init__(self, columns: Mapping[str, object], position: int, row: int, tries: int = 0) -> None:
        super().__init__(columns)
        self.position = position
        self.row = row
        self.tries = tries


def number_rows(dataset: Sequence[Mapping[str, object]], start: int = 0) -> list[Prompt]:
    """Return the rows as prompts for evaluation, numbered from ``start``."""
    return [Prompt(columns, number, number) for number, columns in enumerate(dataset, start)]


@dataclass
class PromptStream:
    """An endless iterator over prompts that takes positions from the frontier."""

    dataset: Sequence[Mapping[str, object]]
    order: DataOrder
    frontier: Frontier

    def __iter__(self) -> Iterator[Prompt]:
        while True:
            position = self.frontier.take()
            row = self.order.row(position)
            yield Prompt(self.dataset[row], position, row, self.frontier.tries.get(position, 0))


class PromptsFailed(ArealError):
    """Most of the last prompts were given up."""


@dataclass(frozen=True)
class RolloutBatch:
    """The batch of a step. ``groups`` [B]: the number of each row's episode (one prompt's group). ``images``: the
    images by their numbers in the batch's column ``images``."""

    batch: Batch
    groups: Tensor
    positions: tuple[int, ...]
    metrics: Metrics
    images: Mapping[int, tuple[bytes, ...]]


@dataclass
class Sampling:
    """Arguments of the controller for every batch."""

    workflow: Any
    workflow_kwargs: Mapping[str, object] | None
    accept: Callable[[Any], bool] | str | None
    group_size: int
    dynamic_batch: bool = False


@dataclass
class RolloutSource:
    """Takes ``prompts`` as the controller needs them, and records the outcome of each in their frontier.
    ``min_rollouts`` of a step: one for each rank. ``temperature``: that of rows without their own."""

    controller: RolloutController
    prompts: PromptStream
    sampling: Sampling
    min_rollouts: int = 1
    temperature: float = 1.0
    _taken: list[Rollout] = field(default_factory=list)
    _taken_at: float = 0.0  # Unix time
    _last: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._failures = FailureWindow(max(_MIN_WINDOW, 2 * self.controller.config.consumer_batch_size))
        self.controller.ends()  # starts the record

    def take(self) -> RolloutBatch:
        """Return the next batch; one that is too small is merged with the one after it. Raises TimedOut,
        RolloutsFailed, PromptsFailed."""
        sampling = self.sampling
        rollouts: list[Rollout] = []
        while len(rollouts) < self.min_rollouts:
            self._record_ends()
            rollouts += self.controller.take_prepared(
                self.prompts,
                sampling.workflow,
                sampling.workflow_kwargs,
                sampling.accept,
                sampling.group_size,
                sampling.dynamic_batch,
            )
        self._taken, self._taken_at = rollouts, time.time()
        version = self.controller.get_version()
        batch, groups = to_batch(rollouts, self.temperature)
        positions = tuple(rollout.data.position for rollout in rollouts)  # type: ignore[attr-defined]
        return RolloutBatch(batch, groups, positions, self._metrics(rollouts, batch, version), images_of(rollouts))

    def consumed(self, positions: Sequence[int], step: int) -> None:
        """Record that these prompts were trained on, in ``step``."""
        about = {"areal.step": step, "areal.weight_version": self.controller.get_version()}
        tracing.record_step("training_step", [rollout.span for rollout in self._taken], self._taken_at, about)
        self.prompts.frontier.consume(positions)
        self._failures.ended(len(positions))
        self._record_ends()

    def write(self, folder: Path, step: int, advantages: Sequence[float | None]) -> None:
        """Write the file of a step from the last batch. ``advantages``: one value for each row."""
        remaining, episodes = iter(advantages), list[Episode]()
        for rollout in self._taken:
            own = list(islice(remaining, len(rollout.trajectory["attention_mask"])))
            episodes += episodes_of(rollout, self.controller.model, step=step, advantages=own)
        write_step(folder, step, episodes)

    def _record_ends(self) -> None:
        for end in self.controller.ends():
            self._record_end(end)
        if self._failures.is_exceeded:
            count, window = self._failures.count, self._failures.window
            raise PromptsFailed(
                f"{count} of the last {window} prompts were given up; the first, {self._failures.first_cause}",
                hint="the log names each prompt that was given up, and why",
            )

    def _record_end(self, end: EpisodeEnd) -> None:
        if not isinstance(end.data, Prompt):  # submitted by the driver
            return
        frontier, position = self.prompts.frontier, end.data.position
        if end.cause is EndCause.REJECTED:
            frontier.reject(position)
            self._failures.ended()
            return
        failure = end.failure
        is_permanent = failure is not None and failure.blame == Blame.CALLER
        if frontier.fail(position, is_permanent=is_permanent):
            why = f"by fault of the {failure.blame}: {failure.error!r}" if failure else "its answers come too late"
            cause = f"row {self.prompts.order.row(position)} of the data set: {why}"
            self._failures.given_up(cause)
            _log.warning("a prompt is given up: %s", cause)

    def _metrics(self, rollouts: Sequence[Rollout], batch: Batch, version: int) -> Metrics:
        mask = batch["loss_mask"].bool()
        lengths = mask.sum(1).float()
        by_group = [sample_rewards(rollout.trajectory) for rollout in rollouts]
        several = [rewards for rewards in by_group if len(rewards) > 1]
        rewards = torch.cat(by_group)
        ages = (version - batch["versions"][mask]).float()
        now, before = time.monotonic(), self._last
        self._last = now
        stats = self.controller.export_stats()
        temperatures = batch["token_temperatures"][mask] if "token_temperatures" in batch else torch.ones(1)
        numbers: Metrics = {
            "temperature/mean": float(temperatures.mean()),
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std(correction=0)),
            "reward/min": float(rewards.min()),
            "reward/max": float(rewards.max()),
            "length/mean": float(lengths.mean()),
            "length/max": float(lengths.max()),
            "length/prompt": float((batch["attention_mask"].sum(1) - lengths).mean()),
            "staleness/mean": float(ages.mean()) if len(ages) else 0.0,
            "staleness/max": float(version - min(rollout.head_version for rollout in rollouts)),
            "rollouts/seconds": sum(rollout.seconds for rollout in rollouts) / len(rollouts),
            "rollouts/retried": float(sum(rollout.attempts > 1 for rollout in rollouts)),
            "tokens": float(batch["attention_mask"].sum()),
            "tokens_per_second": float(lengths.sum()) / max(now - before, 1e-9),
        }
        if several:
            alike = sum(len(set(group.tolist())) == 1 for group in several)
            numbers[WITHOUT_SPREAD] = alike / len(several)
        if "truncated" in batch:
            numbers["length/truncated"] = float(batch["truncated"].float().mean())
        names = ("rejected", "failed", "dropped", "running", "pending", "ready")
        return numbers | {f"rollouts/{name}": float(stats[name]) for name in names}

    def counts(self) -> Metrics:
        """Return the numbers of prompts by outcome, over all attempts of the run."""
        counts = self.prompts.frontier.counts
        return {
            "prompts/consumed": float(counts.trained),
            "prompts/rejected": float(counts.rejected),
            "prompts/returned": float(counts.returned),
            "prompts/given_up": float(counts.given_up),
        }


def to_batch(rollouts: Sequence[Rollout], temperature: float = 1.0) -> tuple[Batch, Tensor]:
    """Return the concatenated rows, and the rollout's number for each row [B]. ``token_temperatures`` [B, T] is
    included only if not all are 1, ``sample_ids`` [B] only if a sample of a group has several rows. ``temperature``:
    that of rows without their own. Raises UsageFault."""
    columns: list[Mapping[str, Tensor]] = [_columns(rollout, temperature) for rollout in rollouts]
    if any("images" in each for each in columns):
        columns = [{"images": torch.zeros(len(each["rewards"]), dtype=torch.int64), **each} for each in columns]
    if any("token_temperatures" in each for each in columns):
        columns = [with_token_temperatures(each) for each in columns]
    shared = set.intersection(*map(set, columns))
    joined = concat_padded_tensors([{name: each[name] for name in each if name in shared} for each in columns])
    samples = [_samples(rollout.trajectory) for rollout in rollouts]
    groups = torch.tensor([number for number, each in enumerate(samples) for _ in each])
    batch = _tempered({name: column.to(_TYPES[name]) for name, column in joined.items()}, rollouts, groups)
    if len(set(numbers := _numbered(samples))) < len(groups):
        batch["sample_ids"] = torch.tensor(numbers)
    return batch, groups


def _numbered(samples: Sequence[list[int]]) -> list[int]:
    """Return the rows' numbers of samples, counted over all groups. The turns of a group's only sample count as
    samples, because they are compared with each other."""
    samples = [each if max(each) else list(range(len(each))) for each in samples]
    firsts = accumulate((max(each) + 1 for each in samples), initial=0)
    return [first + number for first, each in zip(firsts, samples, strict=False) for number in each]


def images_of(rollouts: Sequence[Rollout]) -> dict[int, tuple[bytes, ...]]:
    """Return the images that rollouts were sampled with, read from their rows of the data set. Raises UsageFault if a
    rollout used other images than its row has."""
    found: dict[int, tuple[bytes, ...]] = {}
    for rollout in rollouts:
        keys = rollout.trajectory.get("images")
        for key in () if keys is None else set(keys.tolist()) - {0}:
            if key not in found:
                images = row_images(rollout.data)
                if images_key(images) != key:
                    raise UsageFault(
                        f"episode {rollout.task_id} cannot be trained on: its row of the data set has other images "
                        "than those that its prompt was sampled with",
                        hint="the files have changed, or the workflow shows images that are not in the column images",
                    )
                found[key] = images
    return found


def _samples(trajectory: Mapping[str, Tensor]) -> list[int]:
    """Return the number of each row's sample, from 0. A row without ``sample_ids`` is a separate sample."""
    if "sample_ids" not in trajectory:
        return list(range(len(trajectory["rewards"])))
    given = trajectory["sample_ids"].tolist()
    numbers = {sample: number for number, sample in enumerate(sorted(set(given)))}
    return [numbers[sample] for sample in given]


def sample_rewards(trajectory: Mapping[str, Tensor]) -> Tensor:
    """Return the reward of each sample of a group: [N]. For several turns it is the sum before discounts if that is
    known, else their mean."""
    rewards, samples = trajectory["rewards"].float(), _samples(trajectory)
    if len(set(samples)) == len(samples):
        return rewards
    given, members = trajectory.get("original_rewards"), torch.tensor(samples)
    sizes = torch.bincount(members)
    sums = torch.zeros(len(sizes)).index_add_(0, members, rewards if given is None else given.float())
    return sums / sizes if given is None else sums


def _columns(rollout: Rollout, temperature: float) -> dict[str, Tensor]:
    """Return the columns of ``_TYPES``. Without ``versions`` all tokens have the episode's head version, without
    temperatures all rows have ``temperature``. Raises UsageFault."""
    given = rollout.trajectory if isinstance(rollout.trajectory, Mapping) else {}
    missing = [name for name in _REQUIRED if name not in given]
    if missing:
        raise UsageFault(
            f"episode {rollout.task_id} cannot be trained on: its trajectory has no {', '.join(missing)}",
            hint="a workflow returns tensors of areal.api.workflow_api.Trajectory",
        )
    if given.get("multi_modal_input"):
        raise UsageFault(
            f"episode {rollout.task_id} cannot be trained on: multi_modal_input is not read",
            hint="areal.workflow.vision_rlvr:VisionRLVRWorkflow returns the numbers of a row's images",
        )
    found = {name: given[name] for name in _TYPES if name in given}
    if "versions" not in found:
        found["versions"] = torch.where(found["loss_mask"].bool(), rollout.head_version, -1)
    if "temperatures" not in found and "token_temperatures" not in found:
        found["temperatures"] = torch.full((len(found["rewards"]),), temperature)
    return found


def _tempered(batch: Batch, rollouts: Sequence[Rollout], groups: Tensor) -> Batch:
    """Return the batch with ``token_temperatures`` [B, T], 1 at tokens that were not sampled, unless all are 1. Raises
    UsageFault for greedy rows: greedy decoding has no policy gradient."""
    given = batch["token_temperatures" if "token_temperatures" in batch else "temperatures"]
    found = torch.where(batch["loss_mask"].bool(), given if given.dim() == 2 else given[:, None], 1.0)
    is_greedy = ~(found > 0).all(1)  # also NaN
    if bool(is_greedy.any()):
        episode = rollouts[int(groups[is_greedy][0])].task_id
        raise UsageFault(
            f"episode {episode} cannot be trained on: some of its tokens were taken greedily (temperature 0)",
            hint="sample with a temperature above 0, also in an agent's own calls",
        )
    batch = {name: column for name, column in batch.items() if not name.endswith("temperatures")}
    return batch if bool((found == 1).all()) else {**batch, "token_temperatures": found}


def rollout_controller(config: PPOConfig, folder: RunFolder) -> RolloutController:
    return RolloutController(
        config.rollout,
        seed=config.seed,
        dump_folder=folder.trajectories,
        drop_incomplete_group=config.gconfig.drop_incomplete_group,
    )


@dataclass
class Validation:
    """The results of an evaluation: the rewards of each prompt's ``samples``, and the lengths of the answers."""

    evaluator: EvaluatorConfig
    samples: int
    _scores: list[PromptScores] = field(default_factory=list)
    _lengths: list[float] = field(default_factory=list)
    _truncated: list[float] = field(default_factory=list)

    def add(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            number, trajectory = len(self._scores), rollout.trajectory
            rewards = tuple(map(float, sample_rewards(trajectory)))
            self._scores.append(PromptScores(str(number), number, rewards))
            if "loss_mask" in trajectory:  # an evaluation needs only rewards
                self._lengths += trajectory["loss_mask"].float().sum(1).tolist()
            if "truncated" in trajectory:
                self._truncated += trajectory["truncated"].float().tolist()

    @property
    def reward(self) -> float:
        """The mean reward over all samples."""
        rewards = [reward for each in self._scores for reward in each.rewards]
        return statistics.fmean(rewards) if rewards else math.nan

    def metrics(self, prompts: int) -> Metrics:
        """Return the metrics. ``prompts``: the number of prompts. An interval is ``low`` and ``high``; not for one
        prompt."""
        rewards = [reward for each in self._scores for reward in each.rewards]
        found: Metrics = {
            "reward/mean": self.reward,
            "reward/std": statistics.pstdev(rewards) if rewards else math.nan,
            "rollouts": float(len(rewards)),
            "failed": float(max(0, prompts * self.samples - len(rewards))),
        }
        for name, estimate in self._estimates().items():
            if name != "reward":
                found[f"{name}/mean"] = estimate.value
            if not math.isnan(estimate.low):
                found |= {f"{name}/low": estimate.low, f"{name}/high": estimate.high}
        if self._lengths:
            found["length/mean"] = statistics.fmean(self._lengths)
        if self._truncated:
            found["length/truncated"] = statistics.fmean(self._truncated)
        return found

    def summary(self, metrics: Metrics) -> str:
        """Return the result of ``metrics`` as one line for the log."""
        parts, share = [], f"{self.evaluator.confidence:.4g}"
        for name, estimate in self._estimates().items():
            parts.append(f"{name} {replace(estimate, value=metrics[f'{name}/mean']).text()}")
        if "length/truncated" in metrics:
            parts.append(f"truncated {metrics['length/truncated']:.1%}")
        parts.append(f"{metrics['rollouts']:.0f} samples, {metrics['failed']:.0f} failed; intervals of {share}")
        return ", ".join(parts)

    def _estimates(self) -> Mapping[str, Estimate]:
        return estimates(self._scores, self.samples, self.evaluator.pass_threshold, self.evaluator.confidence)


class Evaluation:
    """Rewards of rollouts of ``dataset`` from the served weights: ``eval_gconfig.n_samples`` responses to each row,
    or ``gconfig.n_samples`` without an ``eval_gconfig``."""

    def __init__(self, config: PPOConfig, dataset: Sequence[Any] | None) -> None:
        if not dataset:
            raise UsageFault("no data set for the evaluation is configured", hint="valid_dataset.path=FILE")
        self.config = config
        self.dataset = dataset
        self.folder = run_folder(config)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.folder.prepare()
        self.folder.write_config(self.config)
        trackers = open_trackers(self.config, self.folder.root)
        self.log = MetricsLog(self.folder.metrics, self.folder.attempt, trackers)
        self._stack.callback(self.log.close)
        self.config.rollout.dump_to_file = True
        try:
            self._stack.enter_context(own_service(self.config, self.folder))
            self.controller = self._stack.enter_context(rollout_controller(self.config, self.folder))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(
        self,
        workflow: Any,
        workflow_kwargs: Mapping[str, object] | None = None,
        eval_workflow_kwargs: Mapping[str, object] | None = None,
    ) -> Metrics:
        """Evaluate the data set in batches. Returns the metrics over all samples."""
        size = max(self.config.rollout.consumer_batch_size, self.config.rollout.concurrency)
        stated, plain = self.config.eval_gconfig, self.config.gconfig.new(n_samples=1)
        samples = self.config.gconfig.n_samples if stated is None or stated == plain else stated.n_samples
        progress = ProgressLine(len(self.dataset))
        validation = Validation(self.config.evaluator, samples)
        for first in range(0, len(self.dataset), size):
            rows = number_rows([self.dataset[n] for n in range(first, min(first + size, len(self.dataset)))], first)
            kwargs = eval_workflow_kwargs or workflow_kwargs
            rollouts = self.controller.run_batch(rows, workflow, kwargs, group_size=samples, is_eval=True)
            validation.add(rollouts)
            episodes = [sample for each in rollouts for sample in episodes_of(each, self.controller.model, step=0)]
            write_step(self.folder.trajectories, 0, episodes, is_eval=True, append=first > 0)
            self.controller.acknowledge(self.controller.spent_leases())
            progress.step(first + len(rows), {"reward/mean": validation.reward})
        found = validation.metrics(len(self.dataset))
        progress.info(f"evaluation: {validation.summary(found)}")
        metrics = {f"eval/{name}": value for name, value in found.items()}
        self.log.write(0, stats.numbers_of(stats.taken()) | metrics)
        (self.folder.root / "evaluation.json").write_text(json.dumps(metrics, indent=1) + "\n")
        return metrics
