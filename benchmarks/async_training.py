"""Asynchronous against synchronous training, where a step's generation and its training are about as much work.

    python benchmarks/async_training.py [--rounds 3] [--steps 100] [--case NAME] [--quick] [--write]

GRPO on a random model. Synchronous (``max_head_offpolicyness: 0``) samples a batch, trains on it, samples the next;
asynchronous (2, 4) samples while it trains. Everything else is equal, the number of answers in flight too: the
synchronous arm has its whole batch in one go. Two cases:

* *even*: 64 answers a step of 128 tokens each. A synchronous batch is then generated in lockstep and is full to its
  end: nothing is better for it. What can be won is the overlap alone, bounded by how even generation and training are,
  which is what the model's and the batch's sizes are chosen for: the table has the share of a step that waits for
  generation; at a half, two cores can win twice the steps. New weights cost the asynchronous arm alone something: the
  cache of what is being answered is computed anew.
* *varied*: 128 answers a step that end where the model ends them, after some 11 tokens in the mean, the longest after
  five times as many. A synchronous step waits for that one, with a batch that is nearly empty by then; an asynchronous
  one fills it with the next prompts. Real answers are like this.

Wall time is what counts, so this one wants a machine with two idle cores. Beside it stand the CPU time of a step, and
what it is all for: how soon the sampled reward is 0.9, in steps and in seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.learning.course import Course, Point, course, service
from benchmarks.reporting import header, publish, table

CONFIG = ROOT / "benchmarks" / "learning" / "asynchronous.yaml"
TOKENIZER = ROOT / "examples" / "reverse_digits" / "model"
STALENESS = {"synchronous": 0, "asynchronous, 2 stale": 2, "asynchronous, 4 stale": 4}
TARGET, OVER = 0.9, 5  # mean reward, of so many steps
SHAPE = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
CASES: dict[str, tuple[str, ...]] = {  # what each changes of the configuration
    "even": (),
    "varied": (
        "gconfig.min_new_tokens=0",
        "train_dataset.batch_size=16",
        "rollout.max_concurrent_rollouts=16",
        "reward_fn=benchmarks.learning.rewards:share_of_sevens_said",
    ),
}


def make_model(folder: Path) -> None:
    """Random weights, the example's tokens. In a process of its own: torch is not for whoever measures."""
    import json
    import shutil
    import subprocess

    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TOKENIZER / name, folder / name)
    code = (
        "import json, sys, torch, transformers as t; torch.manual_seed(0)\n"
        "config = t.LlamaConfig(vocab_size=16, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, "
        "eos_token_id=2, **json.loads(sys.argv[2]))\n"
        "t.LlamaForCausalLM(config).save_pretrained(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), json.dumps(SHAPE)], check=True, capture_output=True)


def run(folder: Path, model: Path, case: str, steps: int, staleness: int) -> Course:
    with service(folder / "service", model, "--max-batch-size", "128") as place:
        arguments = ["--config", str(CONFIG), *CASES[case], f"total_train_steps={steps}", f"actor.path={model}"]
        staleness_of = f"rollout.max_head_offpolicyness={staleness}"
        return course(place, folder / "run", "areal.training.drivers:grpo", [*arguments, staleness_of])


def summary(courses: list[Course]) -> dict[str, Any]:
    rates = [each.rate() for each in courses]
    settled = [point.metrics for each in courses for point in each.points[len(each.points) // 10 :]]

    def mean_ms(name: str) -> float:
        return round(statistics.fmean(metrics[name] for metrics in settled) * 1e3, 1)

    return {
        "cpuMsByProcess": {
            name: round(statistics.median(each.cpu_by[name] / len(each.points) for each in courses) * 1e3, 1)
            for name in courses[0].cpu_by
        },
        "stepsPerSecond": round(statistics.median(wall for wall, _ in rates), 3),
        "cpuMsPerStep": round(1e3 / statistics.median(cpu for _, cpu in rates), 1),
        "waitedForRolloutsMs": mean_ms("time/rollout"),
        "trainedMs": mean_ms("time/train"),
        "weightsMs": mean_ms("time/weights"),
        "stepMs": mean_ms("time/step"),
        "answerTokens": round(statistics.fmean(metrics["length/mean"] for metrics in settled), 1),
        "longestAnswerTokens": round(statistics.fmean(metrics["length/max"] for metrics in settled), 1),
        "staleness": round(statistics.fmean(metrics["staleness/mean"] for metrics in settled), 2),
        "stepsTo": _median([each.reached(TARGET, OVER) for each in courses], "step"),
        "wallTo": _median([each.reached(TARGET, OVER) for each in courses], "wall"),
        "lastReward": round(statistics.median(each.last_reward() for each in courses), 3),
        "curves": [[round(point.reward, 4) for point in each.points] for each in courses],
    }


def _median(points: list[Point | None], of: str) -> float | None:
    """None where a run never got there."""
    values = [float(getattr(point, of)) for point in points if point is not None]
    return round(statistics.median(values), 1) if len(values) == len(points) else None


def rows(case: str, arms: dict[str, dict[str, Any]]) -> list[tuple[object, ...]]:
    base = arms["synchronous"]
    return [
        (
            case,
            name,
            arm["stepsPerSecond"],
            "" if arm is base else f"{arm['stepsPerSecond'] / base['stepsPerSecond']:.2f}x",
            arm["cpuMsPerStep"],
            f"{arm['waitedForRolloutsMs'] / arm['stepMs']:.0%}",
            f"{arm['trainedMs'] / arm['stepMs']:.0%}",
            f"{arm['weightsMs'] / arm['stepMs']:.0%}",
            f"{arm['answerTokens']:.0f} / {arm['longestAnswerTokens']:.0f}",
            arm["staleness"],
            arm["stepsTo"],
            arm["wallTo"],
            arm["lastReward"],
        )
        for name, arm in arms.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--case", choices=list(CASES), help="that one alone")
    parser.add_argument("--quick", action="store_true", help="one round, 20 steps")
    parser.add_argument("--write", action="store_true", help="keep the results in benchmarks/results")
    options = parser.parse_args()
    rounds, steps = (1, 20) if options.quick else (options.rounds, options.steps)
    cases = [options.case] if options.case else list(CASES)
    courses: dict[str, dict[str, list[Course]]] = {case: {arm: [] for arm in STALENESS} for case in cases}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        for number in range(rounds):
            for case in cases:
                for arm, staleness in STALENESS.items():
                    place = folder / f"{number}-{case}-{staleness}"
                    found = run(place, folder / "model", case, steps, staleness)
                    courses[case][arm].append(found)
                    sys.stderr.write(f"round {number + 1}, {case}, {arm}: {found.rate()[0]:.2f} steps a second\n")
    summaries = {case: {arm: summary(runs) for arm, runs in of.items()} for case, of in courses.items()}
    document = {
        **header("async_training", **{name: version(name) for name in ("torch", "transformers")}),
        "rounds": rounds,
        "steps": steps,
        "model": SHAPE,
        "loadBefore": round(load, 2),
        "loadAfter": round(os.getloadavg()[0], 2),
        "cases": summaries,
    }
    reached = (f"steps to {TARGET}", f"s to {TARGET}")
    shares = ("waiting for rollouts", "training", "publishing")
    tokens = "tokens an answer, mean / longest"
    columns = ("case", "arm", "steps / s", "", "CPU ms / step", *shares, tokens, "staleness", *reached, "at the end")
    lines = [row for case, arms in summaries.items() for row in rows(case, arms)]
    text = f"{rounds} rounds of {steps} steps; load average {load:.1f} before.\n\n{table(columns, lines)}"
    publish(document, text, options.write)


if __name__ == "__main__":
    main()
