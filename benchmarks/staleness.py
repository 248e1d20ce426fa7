"""What stragglers cost: 2 % of the rollouts take forty times as long, and nothing too old is trained on.

    python benchmarks/staleness.py [--steps 60] [--rounds 5] [--eta 2] [--share 0.02] [--write]

Asynchronous GRPO with every real part: gateway, router, data proxy, embedded engine, trainer, weight updates after each
step. A rollout is one answer and then a tool that is 0.4 to 1.2 seconds slow, or forty times that (see
``benchmarks/learning/straggling.py``). *Balanced*: a step takes 0.4 seconds at least, so rollouts are one to three
steps long. *Starved*: a step takes what it takes, a fraction of that; it waits for rollouts, the longest of them are
overtaken though none straggles, and every slot that a straggler holds is missed.

Batch 16, at most 64 rollouts at once. The arms take turns, and medians of their runs count; the first tenth of a run is
left out. *Age* is of each trained token: the version that is trained less the version recorded with the token. Target:
no age above eta, and balanced less than 5 % of the throughput lost, by wall time and by CPU time of all processes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.learning.course import Course, Place, course, service
from benchmarks.reporting import header, publish, table

EXAMPLE = ROOT / "examples" / "reverse_digits"
MODEL = EXAMPLE / "model"
BATCH, AT_ONCE, LEAST_S, MOST_S, TIMES = 16, 64, 0.4, 1.2, 40.0
STEP_S = {"balanced": 0.4, "starved": 0.0}
MOST_LOST = 0.05


@dataclass
class Arm:
    """Rates are accepted trajectories a second of wall and of CPU time, a run each; ``ages`` count trained tokens."""

    regime: str
    share: float
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)
    trained: int = 0
    straggled: int = 0
    dropped: int = 0
    given_up: int = 0

    def add(self, run: Course) -> None:
        by_wall, by_cpu = run.rate()
        self.wall.append(by_wall * BATCH)
        self.cpu.append(by_cpu * BATCH)
        for point in run.points:
            self.trained += int(point.metrics["trajectories"])
            for name, count in point.metrics.items():
                if name.startswith("age/"):
                    self.ages[int(name[4:])] += int(count)
        last = run.points[-1].metrics
        self.straggled += int(last["straggled"])
        self.dropped += int(last["rollouts/dropped"])
        self.given_up += int(last["prompts/given_up"])

    def to_json(self) -> dict[str, Any]:
        return {
            "regime": self.regime,
            "share": self.share,
            "per_wall_s": [round(each, 2) for each in self.wall],
            "per_cpu_s": [round(each, 2) for each in self.cpu],
            "trained": self.trained,
            "straggled": self.straggled,
            "dropped": self.dropped,
            "given_up": self.given_up,
            "tokens_by_age": dict(sorted(self.ages.items())),
        }


def run_arm(place: Place, folder: Path, arm: Arm, args: argparse.Namespace) -> None:
    arguments = [
        "--config", str(EXAMPLE / "grpo.yaml"), f"actor.path={MODEL}", f"total_train_steps={args.steps}",
        "recover.mode=disabled", "valid_dataset=null", "evaluator.freq_steps=null", "evaluator.eval_before_train=false",
        f"train_dataset.batch_size={BATCH}", f"rollout.max_concurrent_rollouts={AT_ONCE}", "gconfig.n_samples=1",
        f"rollout.max_head_offpolicyness={args.eta}", "actor.reward_norm={mean_level: batch, std_level: batch}",
        "actor.use_decoupled_loss=true",
        f"slow={LEAST_S},{MOST_S},{arm.share},{TIMES},{STEP_S[arm.regime]}",
    ]  # fmt: skip
    arm.add(course(place, folder, "benchmarks.learning.straggling:main", arguments))


def lost(arms: Sequence[Arm], regime: str) -> tuple[float, float]:
    """Of the throughput by wall and by CPU time: the median of the runs with stragglers against those without."""
    steady, straggling = (arm for arm in arms if arm.regime == regime)
    wall = 1 - statistics.median(straggling.wall) / statistics.median(steady.wall)
    return wall, 1 - statistics.median(straggling.cpu) / statistics.median(steady.cpu)


def report(arms: Sequence[Arm], eta: int) -> str:
    columns = ("regime", "stragglers", "trajectories a second", "a CPU-second", "lost", "straggled", "too old",
               "prompts given up", "oldest token", "tokens by age")  # fmt: skip
    rows = []
    for arm in arms:
        whole = max(1, sum(arm.ages.values()))
        ages = ", ".join(f"{age}: {count / whole:.0%}" for age, count in sorted(arm.ages.items()))
        rates = (statistics.median(arm.wall), statistics.median(arm.cpu))
        loss = " / ".join(f"{each:.1%}" for each in lost(arms, arm.regime)) if arm.share else ""
        rows.append((arm.regime, f"{arm.share:.0%}", *(f"{rate:.1f}" for rate in rates), loss, arm.straggled,
                     arm.dropped, arm.given_up, f"{max(arm.ages)} of {eta}", ages))  # fmt: skip
    return table(columns, rows) + "\n\n*Lost*: of the throughput by wall time / by CPU time."


def measured(args: argparse.Namespace) -> list[Arm]:
    arms = [Arm(regime, share) for regime in STEP_S for share in (0.0, args.share)]
    with (
        tempfile.TemporaryDirectory() as scratch,
        service(Path(scratch, "service"), MODEL, "--dtype", "float32") as served,
    ):
        for number in range(args.rounds):
            for place, arm in enumerate(arms if number % 2 == 0 else reversed(arms)):
                run_arm(served, Path(scratch, f"{number}-{place}"), arm, args)
    return arms


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--eta", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    arms = measured(args)
    losses = {regime: dict(zip(("wall", "cpu"), lost(arms, regime), strict=True)) for regime in STEP_S}
    fresh = max(max(arm.ages) for arm in arms) <= args.eta
    found = {
        **header("staleness"),
        "eta": args.eta,
        "lost": {name: {by: round(each, 4) for by, each in loss.items()} for name, loss in losses.items()},
        "target_met": fresh and max(losses["balanced"].values()) < MOST_LOST,
        "arms": [arm.to_json() for arm in arms],
    }
    publish(found, report(arms, args.eta), args.write)


if __name__ == "__main__":
    main()
