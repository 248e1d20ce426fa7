"""GRPO on "reverse four digits": ours, with every process that it needs, against TRL's ``GRPOTrainer``.

    AREAL_BENCH_TRL=peers/trl/bin/python python benchmarks/grpo.py [--seeds 5] [--steps 240] [--quick] [--write]

The same model, rows, batch (16 prompts x 8 samples), loss (mean over tokens, clip 0.2 / 0.28, no KL), normalization
(mean and deviation of the group), AdamW and temperature. *Synchronous* is TRL's algorithm to the letter: every batch is
sampled from the weights that it trains. *Asynchronous* lets samples be two versions old and corrects for it. CPU time
is that of all processes: for ours gateway, router, data proxy, engine, trainer, weight-update gateway, reward workers.
One thread each. Nobody writes the samples to a file. The arms take turns, seed by seed. Starting is left out: time runs
from the end of the first step. TRL samples by ``generate``; its continuous batching was tried on this task and took a
hundred times as long a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.course import Course, Place, Point, course, service
from benchmarks.reporting import header, publish, table

EXAMPLE = ROOT / "examples" / "reverse_digits"
MODEL = EXAMPLE / "model"
TRL = "AREAL_BENCH_TRL"
TARGET = 0.9
SYNCHRONOUS, ASYNCHRONOUS, PEER = "synchronous", "asynchronous", "TRL"


def ours(place: Place, folder: Path, seed: int, steps: int, staleness: int) -> Course:
    arguments = [
        "--config", str(EXAMPLE / "grpo.yaml"), f"seed={seed}", f"total_train_steps={steps}", "recover.mode=disabled",
        "valid_dataset=null", "evaluator.freq_steps=null", "evaluator.eval_before_train=false",
        f"rollout.max_head_offpolicyness={staleness}", f"actor.path={MODEL}", "rollout.dump_to_file=false",
    ]  # fmt: skip
    return course(place, folder, "areal.training.drivers:grpo", arguments)


def theirs(python: str, folder: Path, seed: int, steps: int) -> tuple[Course, dict[str, str]]:
    """And the versions of what they ran with."""
    order = {
        "model": str(MODEL), "rows": str(EXAMPLE / "train.jsonl"), "folder": str(folder), "steps": steps, "seed": seed,
        "prompts": 16, "samples": 8, "newTokens": 8, "lr": 3e-4, "clip": [0.2, 0.28], "continuous": False,
    }  # fmt: skip
    script = ROOT / "benchmarks" / "learning" / "trl_grpo.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, str(script), json.dumps(order)], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"TRL ended with {done.returncode}:\n{done.stderr[-4000:]}")
    first, *lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    began = lines[0]
    points = tuple(
        Point(line["step"], line["wall"] - began["wall"], line["cpu"] - began["cpu"], {"reward/mean": line["reward"]})
        for line in lines
    )
    return Course(points, first["startCpu"], {"trainer": points[-1].cpu}), first["versions"]


def one_seed(folder: Path, seed: int, steps: int, python: str | None) -> tuple[dict[str, Course], dict[str, str]]:
    found: dict[str, Course] = {}
    versions: dict[str, str] = {}
    for name, staleness in ((SYNCHRONOUS, 0), (ASYNCHRONOUS, 2)):
        with service(folder / f"{name}-service", MODEL, "--max-batch-size", "128") as place:
            found[name] = ours(place, folder / name, seed, steps, staleness)
    if python:
        found[PEER], versions = theirs(python, folder / "trl", seed, steps)
    return found, versions


def summary(courses: list[Course]) -> dict[str, Any]:
    """Medians over seeds. A run that never got there has no time."""
    rates = [each.rate() for each in courses]
    reached = [each.reached(TARGET) for each in courses]
    there = [point for point in reached if point is not None]

    def median(values: list[float]) -> float | None:
        return round(statistics.median(values), 3) if len(there) == len(courses) else None

    steps = len(courses[0].points)
    return {
        "stepsPerSecond": round(statistics.median(wall for wall, _ in rates), 2),
        "stepsPerCpuSecond": round(statistics.median(cpu for _, cpu in rates), 2),
        "startCpu": round(statistics.median(each.start_cpu for each in courses), 2),
        "reached": len(there),
        "stepsTo": median([point.step for point in there]),
        "wallTo": median([point.wall for point in there]),
        "cpuTo": median([point.cpu for point in there]),
        "lastReward": round(statistics.median(each.last_reward() for each in courses), 3),
        "cpuMsByProcess": {
            name: round(statistics.median(each.cpu_by[name] for each in courses) / steps * 1e3, 2)
            for name in courses[0].cpu_by
        },
        "curves": [[round(point.reward, 4) for point in each.points] for each in courses],
    }


def rows(arms: dict[str, dict[str, Any]]) -> list[tuple[object, ...]]:
    peer = arms.get(PEER)

    def against(arm: dict[str, Any], key: str, *, less: bool) -> str:
        if peer is None or arm is peer or not arm[key] or not peer[key]:
            return ""
        ratio = peer[key] / arm[key] if less else arm[key] / peer[key]
        return f" ({ratio:.2f}x)"

    return [
        (
            name,
            f"{arm['stepsPerCpuSecond']}{against(arm, 'stepsPerCpuSecond', less=False)}",
            f"{arm['stepsPerSecond']}{against(arm, 'stepsPerSecond', less=False)}",
            f"{arm['reached']} of {len(arm['curves'])}",
            arm["stepsTo"],
            f"{arm['cpuTo']}{against(arm, 'cpuTo', less=True)}",
            f"{arm['wallTo']}{against(arm, 'wallTo', less=True)}",
            arm["lastReward"],
        )
        for name, arm in arms.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--quick", action="store_true", help="one seed, 60 steps")
    parser.add_argument("--write", action="store_true", help="keep the results in benchmarks/results")
    options = parser.parse_args()
    seeds, steps = (1, 60) if options.quick else (options.seeds, options.steps)
    python = os.environ.get(TRL)
    if not python:
        sys.stderr.write(f"{TRL} names no interpreter with TRL: ours alone\n")
    courses: dict[str, list[Course]] = {}
    versions: dict[str, str] = {}
    load = os.getloadavg()[0]
    for seed in range(1, seeds + 1):
        with tempfile.TemporaryDirectory() as name:
            found, told = one_seed(Path(name), seed, steps, python)
        versions |= told
        for arm, run in found.items():
            courses.setdefault(arm, []).append(run)
            sys.stderr.write(f"seed {seed}, {arm}: {run.rate()[1]:.1f} steps a CPU-second, {run.last_reward():.2f}\n")
    arms = {name: summary(runs) for name, runs in courses.items()}
    own = {name: version(name) for name in ("torch", "transformers")}
    found_all = {
        **header("grpo", **own, **{f"peer-{name}": number for name, number in versions.items()}),
        "seeds": seeds,
        "steps": steps,
        "loadBefore": round(load, 2),
        "loadAfter": round(os.getloadavg()[0], 2),
        "arms": arms,
    }
    columns = (
        "arm",
        "steps / CPU-s",
        "steps / s",
        f"at {TARGET}",
        "steps to it",
        "CPU-s to it",
        "s to it",
        "at the end",
    )
    text = f"{seeds} seeds, {steps} steps, medians; load average {load:.1f} before.\n\n{table(columns, rows(arms))}"
    publish(found_all, text, options.write)


if __name__ == "__main__":
    main()
