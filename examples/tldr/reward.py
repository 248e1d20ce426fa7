"""What a summary is worth: the score of the reward model that the job `tldr-rw` trained."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any


def reward_model() -> Path:
    """Return the folder that `REWARD_MODEL` names, else the newest that the job `tldr-rw` of the same home has
    saved."""
    if named := os.environ.get("REWARD_MODEL"):
        return Path(named)
    saved = Path(os.environ["AREAL_RUN_FOLDER"]).parent / "tldr-rw" / "models"
    steps = sorted(saved.glob("step_*"), key=lambda folder: int(folder.name.removeprefix("step_")))
    if not steps:
        raise FileNotFoundError(f"{saved} has no reward model: rw.yaml trains it")
    return steps[-1]


@cache
def _model() -> Any:
    """On the GPU of the trainer, where there is one."""
    import torch
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(reward_model())
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def score(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    """Return the score of the last token, as in training: above 0 or below, without a bound."""
    import torch

    model = _model()
    tokens = torch.tensor([[*prompt_ids, *completion_ids]], device=model.device)
    with torch.no_grad():
        return float(model(input_ids=tokens).logits[0, -1, 0])
