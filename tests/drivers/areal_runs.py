"""Runs of AReaL's example drivers, unmodified, for two steps each on a tiny model and tiny data sets.

``AREAL_EXAMPLES=CHECKOUT pytest -m slow tests/drivers/test_areal_runs.py`` runs them. ``FAMILIES`` has names, keys and
values only: overrides make the models and data local, the engine the embedded one, and batches small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from areal.state.job_metrics import steps_of
from tests.conversation.families import families
from tests.services.processes import REPOSITORY

QUESTIONS = 8
LIMIT_S = 300


@dataclass(frozen=True)
class Family:
    """``driver`` and ``config`` below ``examples``; ``data``: the folder of the data sets; ``needs``: packages."""

    driver: str
    config: str
    data: str = "gsm8k"
    overrides: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


TRAINED = (
    "total_train_steps=2",
    "actor.backend=fsdp:d1",
    "actor.dtype=float32",
    "actor.gradient_checkpointing=false",
    "train_dataset.batch_size=2",
    "valid_dataset.batch_size=2",
)
SAMPLED = (
    *TRAINED,
    "rollout.backend=embedded:d1",
    "rollout.max_concurrent_rollouts=8",
    "gconfig.n_samples=2",
    "gconfig.max_new_tokens=8",
    "actor.weight_update_mode=shm",
)


def _math(name: str, *overrides: str) -> Family:
    return Family("math/gsm8k_rl.py", f"math/{name}.yaml", overrides=(*SAMPLED, *overrides))


FAMILIES = {
    "sft": Family("math/gsm8k_sft.py", "math/gsm8k_sft.yaml", overrides=TRAINED),
    "rw": Family("alignment/hhrlhf_rw.py", "alignment/hhrlhf_rw.yaml", "pairs", TRAINED),
    "dpo": Family("alignment/hhrlhf_dpo.py", "alignment/hhrlhf_dpo.yaml", "pairs", TRAINED),
    "grpo": _math("gsm8k_grpo"),
    "ppo": _math("gsm8k_ppo"),
    "gspo": _math("gsm8k_gspo"),
    "dapo": _math("gsm8k_dapo_dynamic_bs", "actor.overlong_tokens=4"),
    "drgrpo": _math("gsm8k_drgrpo"),
    "rloo": _math("gsm8k_rloo"),
    "reinforce": _math("gsm8k_reinforce"),
    "reinforce with a baseline": _math("gsm8k_reinforce_baseline"),
    "liteppo": _math("gsm8k_liteppo"),
    "m2po": _math("gsm8k_m2po"),
    "sapo": _math("gsm8k_sapo"),
    "lora": _math("gsm8k_grpo_lora"),
    "multi-turn": Family("multi_turn_math/gsm8k_rl_mt.py", "multi_turn_math/gsm8k_grpo_mt.yaml", overrides=SAMPLED),
    "openai agents": Family(
        "openai_agents/train_agents.py",
        "openai_agents/config.yaml",
        overrides=(*SAMPLED, "gconfig.max_tokens=16"),
        needs=("agents",),
    ),
    "agent workflow, openai": Family("agent_workflow/train.py", "agent_workflow/config.yaml", overrides=SAMPLED),
    "agent workflow, langchain": Family(
        "agent_workflow/train.py",
        "agent_workflow/config.yaml",
        overrides=(*SAMPLED, "workflow=areal.workflow.langchain.math_agent.MathAgent"),
        needs=("langchain_openai",),
    ),
    "countdown": Family("countdown/train.py", "countdown/train_config.yaml", "countdown/train.jsonl", SAMPLED),
    "tools": Family(
        "tir/train_tir.py",
        "tir/tir_math_config.yaml",
        overrides=(*SAMPLED, "tir.enable_tools=calculator"),
        needs=("qwen_agent",),
    ),
    # Its judge is asked without a model, which OpenAI's client refuses: nothing is sent there, and the reward is 0.
    "search": Family(
        "search_agent/tongyi_deepresearch/train.py",
        "search_agent/tongyi_deepresearch/config.yaml",
        "search/train.jsonl",
        (*SAMPLED, "max_llm_calls_per_run=2", "judge_engine.gateway_addr=http://127.0.0.1:9/v1"),
        needs=("qwen_agent", "tiktoken", "json5", "aiohttp"),
    ),
}

REFUSED_FAMILIES = {
    "camel": "areal.experimental.camel.openai_model",
    "scaffolding": "areal.experimental.openai.cache",
    "evaluation": "areal.engine: trainer.type=null, or areal inf collect, evaluates",
    "vision": "actor.path: models of Qwen-VL have three-dimensional positions",
    "distillation": "teacher: there is no distillation",
    "fp8": "actor.megatron.fp8_config, actor.archon: training in FP8 is not there",
    "lora of megatron": "actor.use_lora: adapters are of fsdp",
    "critic of megatron": "critic.backend: fsdp has critics",
}
"""What ends such a driver where it says it: an import or a key."""


def write_model(folder: Path) -> Path:
    """A randomly initialised model of 40 k parameters with the chat template of Qwen3, whose answers have some four
    tokens: the first component of each state is alike, and asks for the end."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    family = families()["qwen3"]
    family.write_folder(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=-(-len(family.tokenizer) // 16) * 16,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        eos_token_id=list(family.generation_ends),
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[family.id_of("<|im_end|>"), 0] = 0.85
    model.save_pretrained(folder)
    return folder


def write_data(folder: Path) -> None:
    """Data sets in the forms of GSM8K, of preferences and of countdown."""
    asked = [(f"{n} + {n + 1} = ?", 2 * n + 1) for n in range(11, 11 + QUESTIONS)]
    sets: dict[str, list[dict[str, object]]] = {
        "gsm8k": [{"question": question, "answer": f"It is so.\n#### {answer}"} for question, answer in asked],
        "pairs": [
            {
                "chosen": f"\n\nHuman: {question}\n\nAssistant: {answer}",
                "rejected": f"\n\nHuman: {question}\n\nAssistant: no",
            }
            for question, answer in asked
        ],
        "countdown": [
            {"query": question, "target": answer, "numbers": [answer, 1], "nums": [answer, 1]}
            for question, answer in asked
        ],
    }
    sets["search"] = [{"qid": str(n), "question": each[0], "answer": [str(each[1])]} for n, each in enumerate(asked)]
    for name, rows in sets.items():
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(checkout: Path, family: Family, model: Path, data: Path, folder: Path) -> list[dict[str, float]]:
    """The metrics of ``python examples/DRIVER --config examples/CONFIG key=value ...`` in the checkout. Raises
    AssertionError with the end of its log."""
    folder.mkdir(parents=True, exist_ok=True)
    path = data / family.data
    words = [
        f"actor.path={model}",
        f"cluster.fileroot={folder}",
        f"train_dataset.path={path}",
        f"valid_dataset.path={path}",
        *family.overrides,
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{checkout}",
        "OMP_NUM_THREADS": "1",
        "AREAL_HOME": str(folder / "home"),
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        **family.environment,
    }
    examples = checkout / "examples"
    argv = [sys.executable, str(examples / family.driver), "--config", str(examples / family.config), *words]
    log = folder / "log"
    with log.open("wb") as out:
        ended = subprocess.run(
            argv, cwd=checkout, env=environment, stdout=out, stderr=out, timeout=LIMIT_S, check=False
        )
    assert ended.returncode == 0, f"exit {ended.returncode}\n" + log.read_text(errors="replace")[-4000:]
    (metrics,) = folder.rglob("metrics.jsonl")
    return steps_of(metrics)


Check = Callable[[list[dict[str, float]]], bool]
