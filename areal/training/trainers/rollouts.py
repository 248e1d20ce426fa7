"""The first rank's side of rollouts: the prompts of a run, batches from the controller, the outcome of each prompt;
and evaluation, which samples and trains nothing.

A prompt that was trained on or rejected is spent. One that failed or was too old is sampled again; where it fails over
and over it is given up, and where most are, so is the run: it would silently go on with the rest of the data.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from areal.api import stats
from areal.api.cli_args import PPOConfig
from areal.client.errors import Blame
from areal.errors import ArealError, UsageFault
from areal.rollout.controller import RolloutController
from areal.rollout.dump import episodes_of, write_step
from areal.rollout.staleness import EndCause, EpisodeEnd, Rollout
from areal.rollout.tensors import concat_padded_tensors
from areal.training.batches import Batch
from areal.training.frontier import DataOrder, FailureWindow, Frontier
from areal.training.metrics import Metrics, MetricsLog, ProgressLine, open_trackers
from areal.training.run_folder import run_folder
from areal.training.services import own_service
from areal.trajectories.record import Episode

# -- prompts


class Prompt(dict[str, Any]):
    """The ``row``-th of the data set; workflows see a plain dict. ``position`` counts prompts over epochs."""

    def __init__(self, columns: Mapping[str, Any], position: int, row: int) -> None:
        super().__init__(columns)
        self.position = position
        self.row = row


def number_rows(dataset: Sequence[Mapping[str, Any]], start: int = 0) -> list[Prompt]:
    """For evaluation: the rows in their order, counted from ``start``."""
    return [Prompt(columns, number, number) for number, columns in enumerate(dataset, start)]


class PromptStream:
    """Takes positions from the frontier as they are asked for."""

    def __init__(self, dataset: Sequence[Mapping[str, Any]], order: DataOrder, frontier: Frontier) -> None:
        self._dataset = dataset
        self._order = order
        self.frontier = frontier

    def row(self, position: int) -> int:
        return self._order.row(position)

    def __iter__(self) -> Iterator[Prompt]:
        while True:
            position = self.frontier.take()
            row = self.row(position)
            yield Prompt(self._dataset[row], position, row)


_log = logging.getLogger(__name__)
_FEWEST_ENDS = 8
NEEDED = ("input_ids", "attention_mask", "loss_mask", "logprobs", "rewards")
_TYPES = {
    "input_ids": torch.int64,
    "attention_mask": torch.bool,
    "loss_mask": torch.int64,
    "logprobs": torch.float32,
    "versions": torch.int64,
    "turn_ids": torch.int32,
    "rewards": torch.float32,
    "original_rewards": torch.float32,
    "temperatures": torch.float32,
    "token_temperatures": torch.float32,
    "truncated": torch.bool,
}
"""The columns of ``areal.api.workflow_api.Trajectory``."""


class PromptsFailed(ArealError):
    """Most prompts fail, each as often as it is tried."""


@dataclass(frozen=True)
class RolloutBatch:
    """``groups`` [B]: rows of one episode (one prompt's group) have one number."""

    batch: Batch
    groups: Tensor
    positions: tuple[int, ...]
    metrics: Metrics


@dataclass
class Sampling:
    """Arguments of the controller for every batch."""

    workflow: Any
    workflow_kwargs: Mapping[str, Any] | None
    accept: Callable[[Any], bool] | str | None
    group_size: int
    dynamic_batch: bool = False


class RolloutSource:
    """``prompts`` are taken as the controller needs them; what became of each is told to their frontier. ``least``: so
    many episodes a step needs, one for each rank. ``temperature``: of rows that do not say theirs."""

    def __init__(
        self,
        controller: RolloutController,
        prompts: PromptStream,
        sampling: Sampling,
        least: int = 1,
        temperature: float = 1.0,
    ) -> None:
        self._controller = controller
        self.prompts = prompts
        self._sampling = sampling
        self._least = least
        self._temperature = temperature
        self._failures = FailureWindow(max(_FEWEST_ENDS, 2 * controller.config.consumer_batch_size))
        self._last = time.monotonic()
        self._taken: list[Rollout] = []
        controller.ends()  # from now on

    def take(self) -> RolloutBatch:
        """The next batch; one that is too small is taken with the one after it. Raises TimedOut, RolloutsFailed,
        PromptsFailed."""
        how = self._sampling
        rollouts: list[Rollout] = []
        while len(rollouts) < self._least:
            self._settle()
            rollouts += self._controller.take_prepared(
                self.prompts, how.workflow, how.workflow_kwargs, how.accept, how.group_size, how.dynamic_batch
            )
        self._taken = rollouts
        version = self._controller.get_version()
        batch, groups = to_batch(rollouts, self._temperature)
        positions = tuple(rollout.data.position for rollout in rollouts)  # type: ignore[attr-defined]
        return RolloutBatch(batch, groups, positions, self._metrics(rollouts, batch, version))

    def consumed(self, positions: Sequence[int]) -> None:
        """These were trained on."""
        self.prompts.frontier.consume(positions)
        self._failures.ended(len(positions))
        self._settle()

    def write(self, folder: Path, step: int, advantages: Sequence[float | None]) -> None:
        """The batch that was taken last, as the files of this step. ``advantages``: one a row."""
        rest, episodes = iter(advantages), list[Episode]()
        for rollout in self._taken:
            own = list(islice(rest, len(rollout.trajectory["attention_mask"])))
            episodes += episodes_of(rollout, self._controller.model, step=step, advantages=own)
        write_step(folder, step, episodes)

    def _settle(self) -> None:
        for end in self._controller.ends():
            self._ended(end)
        if self._failures.hopeless:
            lost, window = self._failures.lost, self._failures.window
            raise PromptsFailed(
                f"{lost} of the last {window} prompts were given up; the first, {self._failures.first_cause}",
                hint="the log names each prompt that was given up, and why",
            )

    def _ended(self, end: EpisodeEnd) -> None:
        if not isinstance(end.data, Prompt):  # submitted by somebody else
            return
        frontier, position = self.prompts.frontier, end.data.position
        if end.cause is EndCause.REJECTED:
            frontier.reject(position)
            self._failures.ended()
            return
        failure = end.failure
        hopeless = failure is not None and failure.blame == Blame.CALLER
        if frontier.fail(position, hopeless=hopeless):
            why = f"by fault of the {failure.blame}: {failure.error!r}" if failure else "its answers come too late"
            cause = f"row {self.prompts.row(position)} of the data set: {why}"
            self._failures.given_up(cause)
            _log.warning("a prompt is given up: %s", cause)

    def _metrics(self, rollouts: Sequence[Rollout], batch: Batch, version: int) -> Metrics:
        mask = batch["loss_mask"].bool()
        lengths, rewards = mask.sum(1).float(), batch["rewards"].float()
        ages = (version - batch["versions"][mask]).float()
        now, before = time.monotonic(), self._last
        self._last = now
        stats = self._controller.export_stats()
        temperatures = batch["token_temperatures"][mask] if "token_temperatures" in batch else torch.ones(1)
        numbers: Metrics = {
            "temperature/mean": float(temperatures.mean()),
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std(correction=0)),
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
        if "truncated" in batch:
            numbers["length/truncated"] = float(batch["truncated"].float().mean())
        names = ("rejected", "failed", "dropped", "running", "pending", "ready")
        return numbers | {f"rollouts/{name}": float(stats[name]) for name in names}

    def counts(self) -> Metrics:
        """Numbers of prompts by outcome, over all attempts of the run."""
        counts = self.prompts.frontier.counts
        return {
            "prompts/consumed": float(counts.trained),
            "prompts/rejected": float(counts.rejected),
            "prompts/returned": float(counts.returned),
            "prompts/given_up": float(counts.given_up),
        }


def to_batch(rollouts: Sequence[Rollout], temperature: float = 1.0) -> tuple[Batch, Tensor]:
    """The rows of all, one under the other, and the number of its rollout for each row. ``token_temperatures`` [B, T]
    is there where not all are 1. ``temperature``: of rows that do not say theirs."""
    batches = [_columns(rollout, temperature) for rollout in rollouts]
    shared = set.intersection(*(set(batch) for batch in batches))
    batch = concat_padded_tensors(
        [{name: column for name, column in each.items() if name in shared} for each in batches]
    )
    if bool((batch["token_temperatures"] == 1).all()):
        del batch["token_temperatures"]
    counts = torch.tensor([len(each["attention_mask"]) for each in batches])
    return batch, torch.repeat_interleave(torch.arange(len(batches)), counts)


def _columns(rollout: Rollout, temperature: float) -> dict[str, Tensor]:
    """Those that training knows, in its types, whatever integers and floats the workflow made them of. Without
    ``versions`` all of it is as old as the episode. Raises UsageFault."""
    given = rollout.trajectory if isinstance(rollout.trajectory, Mapping) else {}
    missing = [name for name in NEEDED if name not in given]
    if missing:
        raise UsageFault(
            f"episode {rollout.task_id} cannot be trained on: its trajectory has no {', '.join(missing)}",
            hint="a workflow returns tensors of areal.api.workflow_api.Trajectory",
        )
    if given.get("multi_modal_input"):
        raise UsageFault(f"episode {rollout.task_id} cannot be trained on: images are not supported, only tokens")
    found = {name: given[name].to(kind) for name, kind in _TYPES.items() if name in given}
    if "versions" not in found:
        found["versions"] = torch.where(found["loss_mask"].bool(), rollout.head_version, -1)
    found["token_temperatures"] = _token_temperatures(found, rollout, temperature)
    found.pop("temperatures", None)
    return found


def _token_temperatures(columns: Mapping[str, Tensor], rollout: Rollout, otherwise: float) -> Tensor:
    """[B, T], 1 where nothing was sampled. Raises UsageFault for greedy rows: the log-probabilities of an answer that
    could not have been another have no gradient that means anything."""
    mask = columns["loss_mask"].bool()
    said = columns.get("token_temperatures", columns.get("temperatures", torch.full((len(mask),), otherwise)))
    found = torch.where(mask, said if said.dim() == 2 else said[:, None], 1.0)
    if not bool((found > 0).all()):  # nor NaN
        raise UsageFault(
            f"episode {rollout.task_id} cannot be trained on: some of its tokens were taken greedily (temperature 0)",
            hint="sample with a temperature above 0, also in an agent's own calls",
        )
    return found


# -- evaluation


class Evaluation:
    """Rollouts of ``dataset`` from the weights that are served, and their rewards: ``eval_gconfig.n_samples`` answers
    to each row, where it asks for several, else as many as ``gconfig`` says."""

    def __init__(self, config: PPOConfig, dataset: Sequence[Any] | None) -> None:
        if not dataset:
            raise UsageFault("there is nothing to evaluate on", hint="valid_dataset.path=FILE")
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
        self._stack.enter_context(own_service(self.config, self.folder))
        controller = RolloutController(
            self.config.rollout,
            seed=self.config.seed,
            dump_folder=self.folder.trajectories,
            drop_incomplete_group=self.config.gconfig.drop_incomplete_group,
        )
        self.controller = self._stack.enter_context(controller)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run(
        self,
        workflow: Any,
        workflow_kwargs: Mapping[str, Any] | None = None,
        eval_workflow_kwargs: Mapping[str, Any] | None = None,
    ) -> Metrics:
        """Batches of ``rollout.consumer_batch_size`` rows at a time; the mean over all at the end."""
        size = max(self.config.rollout.consumer_batch_size, self.config.rollout.concurrency)
        asked = self.config.eval_gconfig.n_samples if self.config.eval_gconfig is not None else 1
        samples = asked if asked > 1 else self.config.gconfig.n_samples
        progress, rewards = ProgressLine(len(self.dataset)), list[float]()
        for first in range(0, len(self.dataset), size):
            rows = number_rows([self.dataset[n] for n in range(first, min(first + size, len(self.dataset)))], first)
            kwargs = eval_workflow_kwargs or workflow_kwargs
            given = self.controller.run_batch(rows, workflow, kwargs, group_size=samples, is_eval=True)
            rewards += [float(reward) for each in given for reward in each.trajectory["rewards"]]
            episodes = [sample for each in given for sample in episodes_of(each, self.controller.model, step=0)]
            write_step(self.folder.trajectories, 0, episodes, is_eval=True, append=first > 0)
            progress.step(first + len(rows), {"reward/mean": _mean(rewards)})
        progress.close()
        metrics: Metrics = {
            "eval/reward/mean": _mean(rewards),
            "eval/reward/std": statistics.pstdev(rewards) if rewards else math.nan,
            "eval/rollouts": float(len(rewards)),
            "eval/failed": float(len(self.controller.failures())),
        }
        self.log.write(0, stats.numbers_of(stats.taken()) | metrics)
        (self.folder.root / "evaluation.json").write_text(json.dumps(metrics, indent=1) + "\n")
        return metrics


def _mean(rewards: Sequence[float]) -> float:
    return statistics.fmean(rewards) if rewards else math.nan
