"""What the arms of the SFT benchmark share: rows, model, and our driver over them.

Rows have random tokens and lengths that vary as those of conversations do: log-normal, a median of 48 tokens, at most
256, a third of each the prompt. They are the same for everyone, and so is their order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCABULARY, LONGEST, SHORTEST, MEDIAN = 2048, 256, 8, 48
SHAPE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6}
LR = 1e-3


def make_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        length = min(LONGEST, max(SHORTEST, round(chance.lognormvariate(0.0, 0.8) * MEDIAN)))
        asked = length // 3
        tokens = [chance.randrange(3, VOCABULARY) for _ in range(length)]
        rows.append({"input_ids": tokens, "loss_mask": [0] * asked + [1] * (length - asked)})
    return rows


def make_model(folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LONGEST, **SHAPE)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def main(args: Sequence[str]) -> None:
    """Our driver. ``total_train_steps`` batches, each row once."""
    from areal import SFTTrainer, load_expr_config
    from areal.api.cli_args import SFTConfig

    config, _ = load_expr_config(args, SFTConfig)
    rows = make_rows(config.train_dataset.batch_size * (config.total_train_steps or 1))
    with SFTTrainer(config, rows) as trainer:
        trainer.train()
