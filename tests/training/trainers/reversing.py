"""The task of the tests: answer four digits reversed, in the token ids of examples/reverse_digits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from areal.api.cli_args import ClusterSpecConfig, MicroBatchSpec, OptimizerConfig

MODEL = Path(__file__).parents[3] / "examples" / "reverse_digits" / "model"
BOS, EOS, ZERO, ASKS = 1, 2, 4, 14


def digits(seed: int) -> list[int]:
    return [ZERO + random.Random(seed).randrange(10) for seed in range(4 * seed, 4 * seed + 4)]


def _row(answer: list[int], asked: list[int]) -> dict[str, Any]:
    prompt = [BOS, *asked, ASKS]
    return {"input_ids": [*prompt, *answer, EOS], "loss_mask": [0] * len(prompt) + [1] * (len(answer) + 1)}


def solved(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [_row(asked[::-1], asked) for asked in map(digits, range(first, first + count))]


def preferences(count: int, first: int = 0) -> list[dict[str, Any]]:
    """The reversed digits are chosen; the digits as they were are rejected."""
    return [
        {"chosen_ids": _row(asked[::-1], asked)["input_ids"], "rejected_ids": _row(asked, asked)["input_ids"]}
        for asked in map(digits, range(first, first + count))
    ]


def optimizer(lr: float = 2e-3) -> OptimizerConfig:
    return OptimizerConfig(lr=lr, beta2=0.95, warmup_steps_proportion=0.0)


def engine(**more: Any) -> dict[str, Any]:
    return {"path": str(MODEL), "dtype": "float32", "optimizer": optimizer(), "mb_spec": MicroBatchSpec()} | more


def experiment(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "experiment_name": "reversing",
        "trial_name": "t",
        "cluster": ClusterSpecConfig(fileroot=str(tmp_path)),
    } | more


def prompts(count: int, seed: int = 0) -> list[dict[str, Any]]:
    source = random.Random(f"prompts-{seed}")
    asked = ["".join(source.choice("0123456789") for _ in range(4)) for _ in range(count)]
    return [{"messages": [{"role": "user", "content": text}], "answer": text[::-1]} for text in asked]
