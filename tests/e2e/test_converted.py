"""A converted configuration of another framework trains, on a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.e2e.conftest import ROOT, Box

SCRIPT = r"""
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator={estimator} data.train_files=$PWD/train.jsonl data.val_files=$PWD/train.jsonl \
    data.train_batch_size=8 data.max_response_length=8 actor_rollout_ref.model.path={model} \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.model.use_remove_padding=True \
    custom_reward_function.path=$PWD/score.py trainer.logger=[console] trainer.total_training_steps=2 \
    trainer.n_gpus_per_node=1 trainer.save_freq=2 trainer.test_freq=2 $@
"""
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str.strip() == ground_truth)}
"""


@pytest.mark.extended
@pytest.mark.parametrize("estimator", ["grpo", pytest.param("gae", marks=pytest.mark.slow)])
def test_script_of_verl_trains_two_steps_after_its_conversion(box: Box, estimator: str) -> None:
    model = ROOT / "examples" / "reverse_digits" / "model"
    (box.folder / "run.sh").write_text(SCRIPT.format(estimator=estimator, model=model))
    (box.folder / "score.py").write_text(SCORE)
    rows = [json.loads(line) for line in (ROOT / "examples/reverse_digits/train.jsonl").read_text().splitlines()[:32]]
    with (box.folder / "train.jsonl").open("w") as file:
        for row in rows:
            prompt = [{"role": "user", "content": row["question"]}]
            truth = {"style": "rule", "ground_truth": row["answer"]}
            file.write(json.dumps({"data_source": "digits", "prompt": prompt, "reward_model": truth}) + "\n")
    inside = replace(box, env={**box.env, "PWD": str(box.folder)})
    backends = ("--backend", "embedded:d1", "--train-backend", "fsdp:d1")
    inside.ok("convert", "run.sh", "--from", "verl", "--out", "job", "--name", "moved", *backends)
    inside = replace(inside, folder=box.folder / "job")
    port = ("--set", f"inferenceservice/moved:spec.gateway.port={box.port}")
    inside.ok("apply", "-f", "manifests.yaml", *port)
    inside.ok("wait", "trainjob/moved", "--for", "completed", "--timeout", "200s")
    lines = (box.home / "jobs" / "moved" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row["step"]]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(0 <= row["reward/mean"] <= 1 for row in steps)
    assert (box.home / "jobs" / "moved" / "models" / "step_2" / "config.json").is_file()
