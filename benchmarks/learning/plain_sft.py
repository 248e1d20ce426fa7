"""A training loop over a ``transformers`` model, as people write it; one thread.

    python benchmarks/learning/plain_sft.py MODEL STEPS BATCH padded|packed

*Padded*: a batch is padded to its longest row. *Packed*: its rows are laid end to end and cut into blocks of the
longest length, as packing data sets are; a row then sees the rows before it in its block, which is not the same
training, and the block's last row goes on in the next one. After each step it prints a line of JSON: the step, the
tokens that were real, the loss, and the seconds of wall and CPU time so far.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.learning.sft_rows import LONGEST, LR, make_rows


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    width = max(len(row["input_ids"]) for row in rows)
    filled = [width - len(row["input_ids"]) for row in rows]
    labels = [
        [token if trained else -100 for token, trained in zip(row["input_ids"], row["loss_mask"], strict=True)]
        for row in rows
    ]
    return {
        "input_ids": torch.tensor([row["input_ids"] + [0] * fill for row, fill in zip(rows, filled, strict=True)]),
        "attention_mask": torch.tensor([[1] * (width - fill) + [0] * fill for fill in filled]),
        "labels": torch.tensor([each + [-100] * fill for each, fill in zip(labels, filled, strict=True)]),
    }


def packed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    tokens, labels = [], []
    for row in rows:
        tokens += row["input_ids"]
        labels += [t if trained else -100 for t, trained in zip(row["input_ids"], row["loss_mask"], strict=True)]
    fill = -len(tokens) % LONGEST
    shape = (-1, LONGEST)
    ids = torch.tensor(tokens + [0] * fill).view(shape)
    return {"input_ids": ids, "labels": torch.tensor(labels + [-100] * fill).view(shape)}


def main() -> None:
    import torch
    import transformers

    folder, steps, size, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    collate = {"padded": padded, "packed": packed}[how]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    rows = make_rows(size * steps)
    for step in range(steps):
        taken = rows[step * size : (step + 1) * size]
        loss = model(**collate(taken), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        spent = {"wall": time.perf_counter(), "cpu": time.process_time()}
        tokens = sum(len(row["input_ids"]) for row in taken)
        sys.stdout.write(json.dumps({"step": step + 1, "tokens": tokens, "loss": loss.item(), **spent}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
