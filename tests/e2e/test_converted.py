"""Converted configurations of other frameworks train, on a tiny model: two steps of each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from tests.e2e.conftest import ROOT, Box

MODEL = ROOT / "examples" / "reverse_digits" / "model"
VERL = r"""
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator={estimator} data.train_files=$PWD/train.jsonl data.val_files=$PWD/train.jsonl \
    data.train_batch_size=8 data.max_response_length=8 actor_rollout_ref.model.path={model} \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.model.use_remove_padding=True \
    custom_reward_function.path=$PWD/score.py trainer.logger=[console] trainer.total_training_steps=2 \
    trainer.n_gpus_per_node=1 trainer.save_freq=2 trainer.test_freq=2 $@
"""
VERL_SFT = r"""
torchrun --standalone --nnodes=1 --nproc_per_node=1 -m verl.trainer.fsdp_sft_trainer \
    data.train_files="['$PWD/train.jsonl', '$PWD/train.jsonl']" data.train_batch_size=8 \
    data.prompt_key=extra_info data.prompt_dict_keys=['question'] \
    data.response_key=reward_model data.response_dict_keys=['ground_truth'] \
    model.partial_pretrain={model} trainer.logger=console trainer.total_training_steps=2 trainer.save_freq=2
"""
TRL = """
model_name_or_path: {model}
dataset_name: {folder}/train.jsonl
reward_funcs: [scores.right]
num_generations: 4
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
max_completion_length: 8
max_steps: 2
save_steps: 2
use_cpu: true
"""
TRL_SFT = r"""
CUDA_VISIBLE_DEVICES=0 accelerate launch --num_processes 1 trl/scripts/sft.py --model_name_or_path {model} \
    --dataset_name $PWD/train.jsonl --completion_only_loss --max_length 64 --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 2 --max_steps 2 --save_steps 2 --use_cpu
"""
OPENRLHF = r"""
ray job submit --address="http://127.0.0.1:8265" \
   --runtime-env-json='{{"working_dir": "/openrlhf"}}' \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   --actor.model_name_or_path {model} --reward.remote_url $PWD/score.py --data.prompt_dataset $PWD/train.jsonl \
   --data.input_key prompt --data.label_key label --data.apply_chat_template --algo.advantage.estimator group_norm \
   --rollout.batch_size 8 --rollout.n_samples_per_prompt 4 --train.batch_size 16 --rollout.max_new_tokens 8 \
   --actor.num_gpus_per_node 1 --vllm.num_engines 1 --train.colocate_all --ckpt.save_steps 2 \
   --ds.attn_implementation sdpa
"""
AREAL = """
experiment_name: moved
trial_name: trial0
total_train_steps: 2
reward_fn: areal.reward.gsm8k:gsm8k_reward_fn
rollout: {{backend: "embedded:d1", max_head_offpolicyness: 0}}
gconfig: {{n_samples: 4, max_new_tokens: 8}}
actor:
  backend: "fsdp:d1"
  path: {model}
  dtype: float32
  optimizer: {{lr: 1.0e-4}}
train_dataset: {{path: {folder}/train.jsonl, type: rl, batch_size: 8, pin_memory: true}}
saver: {{freq_steps: 2}}
"""
SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str.strip() == ground_truth)}


def reward_func(queries, prompts, labels, **kwargs):
    return {"rewards": [float(query.strip().endswith(label)) for query, label in zip(queries, labels, strict=True)]}
"""
SCORES = """
def right(prompts, completions, label, **kwargs):
    return [float(each[0]["content"].strip() == truth) for each, truth in zip(completions, label, strict=True)]
"""


class Case(NamedTuple):
    framework: str
    file: str
    text: str
    more: tuple[str, ...] = ()
    served: bool = True


CASES = [
    pytest.param(Case("verl", "run.sh", VERL.replace("{estimator}", "grpo")), id="verl"),
    pytest.param(Case("verl", "run.sh", VERL.replace("{estimator}", "gae")), id="verl-gae", marks=pytest.mark.slow),
    pytest.param(Case("verl", "sft.sh", VERL_SFT, served=False), id="verl-sft"),
    pytest.param(Case("trl", "grpo.yaml", TRL, ("--trainer", "grpo")), id="trl"),
    pytest.param(Case("trl", "sft.sh", TRL_SFT, ("--allow-lossy",), served=False), id="trl-sft"),
    pytest.param(Case("openrlhf", "ppo.sh", OPENRLHF), id="openrlhf"),
    pytest.param(Case("areal", "grpo.yaml", AREAL, served=False), id="areal"),
]


def write_rows(box: Box) -> None:
    rows = [json.loads(line) for line in (ROOT / "examples/reverse_digits/train.jsonl").read_text().splitlines()[:16]]
    with (box.folder / "train.jsonl").open("w") as file:
        for row in rows:
            question, answer = row["question"], row["answer"]
            made: dict[str, Any] = {
                "data_source": "digits",
                "prompt": [{"role": "user", "content": question}],
                "reward_model": {"style": "rule", "ground_truth": answer},
                "extra_info": {"question": question},
                "label": answer,
                "answer": answer,
            }
            file.write(json.dumps(made) + "\n")


@pytest.mark.extended
@pytest.mark.parametrize("case", CASES)
def test_converted_config_trains_two_steps(box: Box, case: Case) -> None:
    text = case.text.replace("{{", "{").replace("}}", "}") if "{{" in case.text else case.text
    text = text.replace("{model}", str(MODEL)).replace("{folder}", str(box.folder))
    (box.folder / case.file).write_text(text)
    (box.folder / "score.py").write_text(SCORE)
    write_rows(box)
    inside = replace(box, env={**box.env, "PWD": str(box.folder)})
    backends = ("--train-backend", "fsdp:d1") + (("--backend", "embedded:d1") if case.served else ())
    chosen = ("--from", case.framework, "--out", "job", "--name", "moved", *backends, *case.more)
    inside.ok("convert", case.file, *chosen)
    (box.folder / "job" / "scores.py").write_text(SCORES)
    inside = replace(inside, folder=box.folder / "job")
    port = ("--set", f"inferenceservice/moved:spec.gateway.port={box.port}") if case.served else ()
    inside.ok("apply", "-f", "manifests.yaml", *port)
    inside.ok("wait", "trainjob/moved", "--for", "completed", "--timeout", "200s")
    lines = (box.home / "jobs" / "moved" / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if row["step"]]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(0 <= row.get("reward/mean", 0) <= 1 for row in steps)
    assert (box.home / "jobs" / "moved" / "models" / "step_2" / "config.json").is_file()
