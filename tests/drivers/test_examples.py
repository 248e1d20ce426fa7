"""The shipped examples, as they are, get better at what they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal.dataset.files import read_rows
from areal.dataset.tokenizers import load_hf_tokenizer
from areal.loading import load_attr
from areal.reconcilers.kinds.job_config import choose_driver, config_tree
from areal.state.job_metrics import steps_of
from tests.drivers.conftest import Service
from tests.services.processes import REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "reverse_digits"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``run(name, *overrides)``: the example's metrics, a line a step."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("AREAL_RUN_FOLDER", str(tmp_path))

    def run(name: str, *overrides: str) -> list[dict[str, Any]]:
        config = EXAMPLE / f"{name}.yaml"
        driver = choose_driver(None, config_tree(config, overrides), name)
        load_attr(driver)(["--config", str(config), *overrides])
        return steps_of(tmp_path / "metrics.jsonl")

    return run


def evaluated(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[f"eval/{name}"] for line in lines if f"eval/{name}" in line]


def exact_matches(model: Path) -> float:
    """Share of the test questions that the model, taking its likeliest token, answers right."""
    rows = list(read_rows(EXAMPLE / "test.jsonl"))
    tokenizer = load_hf_tokenizer(str(model))
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    asked = [[{"role": "user", "content": row["question"]}] for row in rows]
    tokens = torch.tensor(tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False))
    prompt = tokens.shape[1]
    with torch.no_grad():
        for _ in range(5):
            tokens = torch.cat([tokens, network(tokens).logits[:, -1:].argmax(-1)], dim=1)
    answers = tokenizer.batch_decode(tokens[:, prompt:], skip_special_tokens=True)
    return sum(answer == row["answer"] for answer, row in zip(answers, rows, strict=True)) / len(rows)


def test_sft_example_answers_unseen_questions(run: Any, tmp_path: Path) -> None:
    losses = evaluated(run("sft"), "loss")
    assert losses[-1] < 0.25 * losses[0]
    assert exact_matches(EXAMPLE / "model") < 0.5
    assert exact_matches(tmp_path / "models" / "step_50") > 0.8


@pytest.mark.extended
def test_dpo_example_ranks_unseen_pairs(run: Any) -> None:
    lines = run("dpo")
    assert evaluated(lines, "accuracy")[-1] > 0.85  # without training there is no margin at all
    assert evaluated(lines, "loss")[-1] < 0.55 < evaluated(lines, "loss")[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_reward_model_example_ranks_unseen_pairs(run: Any, seed: int) -> None:
    accuracy = evaluated(run("rw", f"seed={seed}"), "accuracy")
    assert accuracy[0] < 0.62  # a coin, within twice its deviation
    assert accuracy[-1] > 0.8


def mean_reward(lines: list[dict[str, Any]]) -> float:
    return sum(line["reward/mean"] for line in lines) / len(lines)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ppo_example_raises_reward(run: Any, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in service.environment().items():
        monkeypatch.setenv(name, value)
    lines = [line for line in run("ppo", "rollout.model=m") if line["step"] > 0]
    assert mean_reward(lines[:5]) < 0.35
    assert mean_reward(lines[-10:]) > 0.6
    assert lines[-1]["critic/loss"] < 0.125  # a critic that knew nothing would err by half the variance of a coin
