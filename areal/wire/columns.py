"""The columns of training rows: what a data proxy exports, clients read, and trainers concatenate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class TrainingColumn(NamedTuple):
    """``dtype``: its name in NumPy and torch. ``padding``: the value behind the last token of a row, and of a token
    that was not sampled."""

    dtype: Literal["int64", "int32", "float32", "bool"]
    padding: int = 0


COLUMNS: Mapping[str, TrainingColumn] = {
    "input_ids": TrainingColumn("int64"),
    "loss_mask": TrainingColumn("int64"),
    "logprobs": TrainingColumn("float32"),
    "versions": TrainingColumn("int64", -1),
    "turn_ids": TrainingColumn("int32", -1),
    "attention_mask": TrainingColumn("bool", False),
    "rewards": TrainingColumn("float32"),
    "original_rewards": TrainingColumn("float32"),
    "temperatures": TrainingColumn("float32"),
    "token_temperatures": TrainingColumn("float32", 1),
}
TOKEN_COLUMNS = ("input_ids", "loss_mask", "logprobs", "versions", "turn_ids")
"""The columns with a value for each token that every row has."""
