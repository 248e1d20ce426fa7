"""What becomes of the keys of public examples: names and counts alone, as ``public_examples.json``.

    python -m tests.convert.public_examples verl CHECKOUT > tests/convert/public_examples.json

``CHECKOUT``: a folder with the framework's repository. The summary on stderr covers all of its examples.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from areal.convert.reading import Unread, assignments, script_command
from areal.convert.rules import Fate, convert
from areal.convert.verl import PROGRAMS, VERL

CHOSEN = (
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
)


def row(text: str, name: str) -> dict[str, Any]:
    """Counts of mapped and ignored keys, and the lossy and refused ones by name."""
    words = script_command(text, PROGRAMS, {"HOME": "/home/user"}, name)
    entries = convert(VERL, assignments(words, name)).entries
    counts = {str(fate): sum(each.fate is fate for each in entries) for fate in (Fate.MAPPED, Fate.IGNORED)}
    lost = {str(fate): sorted(each.key for each in entries if each.fate is fate) for fate in (Fate.LOSSY, Fate.REFUSED)}
    return {**counts, **lost}


def main(framework: str, checkout: str) -> None:
    root, totals, rows = Path(checkout), Counter[str](), dict[str, dict[str, Any]]()
    for path in sorted(root.glob("examples/**/*.sh")):
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(root))
        if PROGRAMS[0] not in text:
            continue
        try:
            found = row(text, name)
        except Unread as error:
            totals["unread"] += 1
            print(error.message, file=sys.stderr)
            continue
        totals["read"] += 1
        totals["without a refused key"] += not found["refused"]
        if name in CHOSEN:
            rows[name] = found
    print(dict(totals), file=sys.stderr)
    print(json.dumps({framework: rows}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
