"""The driver that ``benchmarks/staleness.py`` measures: GRPO on answers that a tool of a known slowness follows.

The service, the engine and its answers are real. What takes long is the tool that an episode waits for after its
answer, so how long is known, and costs no CPU time; a step may wait as well, as if it trained as long. Each step's
metrics say how stale its trained tokens were: by the versions recorded with them, against the version that is trained.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.api.workflow_api import RolloutWorkflow
from areal.dataset import get_custom_dataset
from areal.training.metrics import Metrics
from areal.training.trainers.ppo import PPOTrainer
from areal.training.trainers.rollouts import RolloutBatch
from areal.workflow.rlvr import RLVRWorkflow


@dataclass
class Slowness:
    """Seconds that a rollout takes beside its answer, ``least`` to ``most``, and the ``share`` that straggles ``times``
    as long. A step takes ``step`` seconds at least."""

    least: float
    most: float
    share: float
    times: float
    step: float
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    straggled: int = 0

    def next(self) -> float:
        seconds = self.chance.uniform(self.least, self.most)
        if self.chance.random() >= self.share:
            return seconds
        self.straggled += 1
        return seconds * self.times


class Straggling(RolloutWorkflow):
    def __init__(self, answers: RLVRWorkflow, slowness: Slowness) -> None:
        self._answers = answers
        self._slowness = slowness

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        given = await self._answers.arun_episode(engine, data)
        await asyncio.sleep(self._slowness.next())
        return given


class Measured(PPOTrainer):
    """Its metrics have, of each step, how many trained tokens were so and so many versions old."""

    def __init__(self, config: GRPOConfig, rows: Sequence[Mapping[str, Any]], slowness: Slowness) -> None:
        super().__init__(config, rows)
        self._slowness = slowness
        self._ages: Metrics = {}
        self._taken_at = 0.0

    def _take(self) -> RolloutBatch | None:
        taken = super()._take()
        self._taken_at = time.monotonic()
        if taken is not None:
            versions = taken.batch["versions"][taken.batch["loss_mask"].bool()]
            ages = (self.actor.version - versions).tolist()
            self._ages = {f"age/{age}": float(ages.count(age)) for age in sorted(set(ages))}
            self._ages |= {"trajectories": float(len(taken.positions)), "straggled": float(self._slowness.straggled)}
        return taken

    def train_step(self) -> Metrics:
        metrics = super().train_step()
        time.sleep(max(0.0, self._slowness.step - (time.monotonic() - self._taken_at)))
        return metrics | self._ages


def main(args: Sequence[str]) -> None:
    """Beside the configuration's own arguments: ``slow=LEAST,MOST,SHARE,TIMES,STEP``."""
    slow = next(word.partition("=")[2] for word in args if word.startswith("slow="))
    config, _ = load_expr_config([word for word in args if not word.startswith("slow=")], GRPOConfig)
    reward = "examples.reverse_digits.reward:reversed_digits"
    answers = RLVRWorkflow(reward_fn=reward, gconfig=config.gconfig, tokenizer=config.actor.path)
    least, most, share, times, step = map(float, slow.split(","))
    slowness = Slowness(least, most, share, times, step)
    with Measured(config, get_custom_dataset("train", config.train_dataset), slowness) as trainer:
        trainer.train(workflow=Straggling(answers, slowness))
