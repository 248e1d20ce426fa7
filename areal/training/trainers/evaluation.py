"""Evaluation of what is served: rollouts of a data set and their rewards; no weights are touched, no torch is needed
but for the rows."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Self

from areal.api import stats
from areal.api.cli_args import PPOConfig
from areal.errors import UsageFault
from areal.rollout.controller import RolloutController
from areal.rollout.dump import episodes_of, write_step
from areal.training.metrics import Metrics, MetricsLog, open_trackers
from areal.training.run_folder import ProgressLine, run_folder
from areal.training.services import own_service
from areal.training.trainers.rollouts import each_once


class Evaluation:
    """``eval_gconfig.n_samples`` answers to each row of ``dataset``, where it asks for several, else as many as
    ``gconfig`` says."""

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
            rows = each_once([self.dataset[n] for n in range(first, min(first + size, len(self.dataset)))], first)
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
