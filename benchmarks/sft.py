"""Supervised fine-tuning: tokens a second of ours and of a plain loop over the same ``transformers`` model.

    python benchmarks/sft.py [--rounds 3] [--steps 40] [--quick] [--write]

The same random Llama, rows, order, AdamW, learning rate and clipping, 32 rows a step, one thread, no activation
checkpointing. Only real tokens count. The plain loop pads a batch to its longest row, or packs it (which is another
training: rows see each other). Ours is measured as it is by default, and with ``mb_spec.max_tokens_per_mb``, which
puts rows of like length together. The padded loop and ours take the same steps: their losses are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.course import course
from benchmarks.reporting import header, publish, table

ROWS = 32
MOST_TOKENS = 1024
CONFIG = ROOT / "benchmarks" / "learning" / "sft.yaml"
PADDED, PACKED, DEFAULT, BY_LENGTH = "plain loop, padded", "plain loop, packed", "areal", "areal, rows by length"


@dataclass(frozen=True)
class Speed:
    """Real tokens a second, of wall and of CPU time, and the last step's loss."""

    wall: float
    cpu: float
    loss: float


def speed(lines: list[dict[str, Any]]) -> Speed:
    """From lines with what was spent when each step had ended; the first tenth is warming up."""
    first = max(1, len(lines) // 10)
    tokens = sum(line["tokens"] for line in lines[first:])
    wall, cpu = (lines[-1][name] - lines[first - 1][name] for name in ("wall", "cpu"))
    return Speed(tokens / wall, tokens / cpu, lines[-1]["loss"])


def plain(model: Path, steps: int, how: str) -> Speed:
    argv = [sys.executable, str(ROOT / "benchmarks" / "learning" / "plain_sft.py"), str(model)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*argv, str(steps), str(ROWS), how], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"the plain loop ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return speed([json.loads(line) for line in done.stdout.splitlines()])


def ours(folder: Path, model: Path, steps: int, *more: str) -> Speed:
    arguments = ["--config", str(CONFIG), f"model.path={model}", f"total_train_steps={steps}", *more]
    found = course(None, folder, "benchmarks.learning.sft_rows:main", arguments)
    return speed([{"wall": each.wall, "cpu": each.cpu, **each.metrics} for each in found.points])


def one_round(folder: Path, model: Path, steps: int) -> dict[str, Speed]:
    return {
        PADDED: plain(model, steps, "padded"),
        DEFAULT: ours(folder / "default", model, steps),
        PACKED: plain(model, steps, "packed"),
        BY_LENGTH: ours(folder / "length", model, steps, f"model.mb_spec.max_tokens_per_mb={MOST_TOKENS}"),
    }


def summary(speeds: list[Speed]) -> dict[str, float]:
    return {
        "tokensPerSecond": round(statistics.median(each.wall for each in speeds)),
        "tokensPerCpuSecond": round(statistics.median(each.cpu for each in speeds)),
        "lastLoss": round(speeds[0].loss, 4),
    }


def rows(arms: dict[str, dict[str, float]]) -> list[tuple[object, ...]]:
    base = arms[PADDED]
    return [
        (
            name,
            arm["tokensPerSecond"],
            f"{arm['tokensPerSecond'] / base['tokensPerSecond']:.2f}x",
            arm["tokensPerCpuSecond"],
            f"{arm['tokensPerCpuSecond'] / base['tokensPerCpuSecond']:.2f}x",
            arm["lastLoss"],
        )
        for name, arm in arms.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="one round, 12 steps")
    parser.add_argument("--write", action="store_true", help="keep the results in benchmarks/results")
    options = parser.parse_args()
    rounds, steps = (1, 12) if options.quick else (options.rounds, options.steps)
    found: dict[str, list[Speed]] = {}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        from benchmarks.learning.sft_rows import SHAPE, make_model

        make_model(Path(name) / "model")
        for number in range(rounds):
            for arm, measured in one_round(Path(name) / str(number), Path(name) / "model", steps).items():
                found.setdefault(arm, []).append(measured)
    arms = {arm: summary(speeds) for arm, speeds in found.items()}
    document = {
        **header("sft", **{name: version(name) for name in ("torch", "transformers")}),
        "rounds": rounds,
        "steps": steps,
        "model": SHAPE,
        "loadBefore": round(load, 2),
        "loadAfter": round(os.getloadavg()[0], 2),
        "arms": arms,
    }
    columns = ("arm", "tokens / s", "", "tokens / CPU-s", "", "last loss")
    text = f"{rounds} rounds of {steps} steps, medians; load average {load:.1f} before.\n\n{table(columns, rows(arms))}"
    publish(document, text, options.write)


if __name__ == "__main__":
    main()
