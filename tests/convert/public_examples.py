"""What becomes of the keys of public examples: names of files and keys alone, as ``public_examples.json``.

    python -m tests.convert.public_examples verl=CHECKOUT trl=CHECKOUT openrlhf=CHECKOUT

A ``CHECKOUT`` is a folder with the framework's repository. The summary on stderr covers all of its examples.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from areal.convert.drafts import Fate
from areal.convert.reading import Unread
from areal.convert.rules import convert
from areal.convert.sources import SOURCES, read_keys

TABLE = Path(__file__).with_name("public_examples.json")
CHOSEN = {
    "verl": (
        "examples/grpo_trainer/run_qwen3-8b.sh",
        "examples/grpo_trainer/run_deepseek7b_llm_math.sh",
        "examples/grpo_trainer/run_qwen2-7b_math_megatron_lora.sh",
        "examples/grpo_trainer/run_qwen2_5_vl-7b_freeze_vision.sh",
        "examples/grpo_trainer/run_qwen3moe-30b_megatron_96gb.sh",
        "examples/ppo_trainer/run_deepseek7b_llm_pfppo.sh",
        "examples/ppo_trainer/run_qwen2-7b_rm_reward_loop_colocate.sh",
        "examples/gspo_trainer/run_qwen3_32b_gspo_npu.sh",
        "examples/reinforce_plus_plus_trainer/run_qwen2-7b_math_rf_baseline.sh",
        "examples/tuning/0.5b/qwen2-0.5b_grpo-lora_1_h100_fsdp_vllm.sh",
        "examples/sft/gsm8k/run_qwen_05_peft.sh",
        "examples/sft/gsm8k/run_seed_oss_36b_sft.sh",
        "examples/sft/multiturn/run_qwen_05_sp2.sh",
        "examples/sft/vlm/run_qwen3_vl_2b.sh",
        "verl/trainer/config/_generated_ppo_trainer.yaml",
        "verl/experimental/fully_async_policy/shell/dapo_7b_math_fsdp2_64_64_mis.sh",
        "verl/experimental/one_step_off_policy/shell/grpo_0.6b_gsm8k_fsdp2_2_6.sh",
    ),
    "trl": (
        "examples/cli_configs/example_config.yaml",
        "examples/scripts/dpo_vlm.py",
        "examples/scripts/grpo_agent.py",
        "examples/scripts/grpo_continuous_batching.py",
        "examples/scripts/grpo_vlm.py",
        "examples/scripts/gspo.py",
        "examples/scripts/reward_modeling.py",
        "examples/scripts/rloo_vlm.py",
        "examples/scripts/sft_gpt_oss.py",
        "examples/scripts/sft_nemotron_3.py",
        "examples/scripts/sft_vlm_gemma3.py",
    ),
    "openrlhf": tuple(
        f"examples/scripts/train_{name}.sh"
        for name in (
            "dapo_ray_hybrid_engine",
            "dpo_llama",
            "ppo_ray_hybrid_engine",
            "ppo_ray_slurm",
            "ppo_with_reward_fn",
            "prorlv2_math_hybrid_engine",
            "reinforce_baseline_hybrid_engine",
            "reinforce_baseline_ray_agent_async",
            "rm",
            "sft",
            "sft_mixtral_lora",
            "vlm_math_hybrid_engine",
        )
    ),
}
TRAINERS = {"examples/cli_configs/example_config.yaml": "sft"}  # as the file's first line says


def row(framework: str, text: str, name: str) -> dict[str, Any]:
    """The trainer, and the keys by what becomes of them."""
    trainer, keys, *_ = read_keys(framework, TRAINERS.get(name), text, {"HOME": "/home/user", "PWD": "/work"}, name)
    entries = convert(SOURCES[framework].trainers[trainer], keys).entries
    return {
        "trainer": trainer,
        **{str(fate): " ".join(sorted(each.key for each in entries if each.fate is fate)) for fate in Fate},
    }


def rows(framework: str, root: Path) -> dict[str, dict[str, Any]]:
    """Those of the chosen examples, by file."""
    totals, found = Counter[str](), dict[str, dict[str, Any]]()
    for path in sorted([*root.glob("examples/**/*"), *(root / name for name in CHOSEN[framework])]):
        name = str(path.relative_to(root))
        if name in found or path.suffix not in (".sh", ".py", ".yaml"):
            continue
        try:
            made = row(framework, path.read_text(encoding="utf-8"), name)
        except (Unread, UnicodeDecodeError):
            totals["unread"] += 1
            continue
        totals["read"] += 1
        totals["without a refused key"] += not made[Fate.REFUSED]
        if name in CHOSEN[framework]:
            found[name] = made
    print(framework, dict(totals), file=sys.stderr)
    return found


if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    table = {framework: rows(framework, Path(checkout)) for framework, checkout in given.items()}
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
