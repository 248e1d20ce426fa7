"""TRL's ``GRPOTrainer`` on the "reverse four digits" task, in TRL's own environment.

    PYTHON benchmarks/learning/trl_grpo.py ORDER

``ORDER`` is JSON: model and rows (paths), steps, seed, prompts, samples, newTokens, lr, clip, continuous. It imports
nothing of ours. After each step it prints a line of JSON: the step, its mean reward, and the seconds of wall and CPU
time (its own and its children's) since training began; first one line with the versions and what starting cost.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

BEGAN = time.time()


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def reversed_digits(completions: list[Any], answer: list[str], **_: object) -> list[float]:
    """1 for exactly the digits of the question in reverse, 0 otherwise."""
    return [float(each[0]["content"].strip() == wanted) for each, wanted in zip(completions, answer, strict=True)]


def settings(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments of ``GRPOConfig``. What it would do by default and costs time without changing the result
    (checkpointed activations, progress bars, saving) is off."""
    low, high = order["clip"]
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": order["prompts"] * order["samples"],
        "num_generations": order["samples"],
        "max_completion_length": order["newTokens"],
        "max_steps": order["steps"],
        "learning_rate": order["lr"],
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "beta": 0.0,
        "epsilon": low,
        "epsilon_high": high,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "num_iterations": 1,
        "use_transformers_continuous_batching": order["continuous"],
        "gradient_checkpointing": False,
        "disable_dropout": True,
        "use_cpu": True,
        "bf16": False,
        "seed": order["seed"],
        "data_seed": order["seed"],
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": [],
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }


def main() -> None:
    import datasets
    import torch
    import transformers
    import trl

    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    rows = [json.loads(line) for line in Path(order["rows"]).read_text().splitlines()]
    prompts = [{"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]} for row in rows]
    began: list[float] = []

    class Steps(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            began.extend((time.perf_counter(), cpu_seconds()))
            versions = {each.__name__: each.__version__ for each in (trl, transformers, torch)}
            say(versions=versions, startWall=time.time() - BEGAN, startCpu=cpu_seconds())

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if logs and "reward" in logs:
                spent = {"wall": time.perf_counter() - began[0], "cpu": cpu_seconds() - began[1]}
                say(step=state.global_step, reward=logs["reward"], **spent)

    trainer = trl.GRPOTrainer(
        model=order["model"],
        reward_funcs=reversed_digits,
        args=trl.GRPOConfig(**settings(order, Path(order["folder"]))),
        train_dataset=datasets.Dataset.from_list(prompts),
        callbacks=[Steps()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main()
