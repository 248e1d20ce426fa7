"""The columns of training rows: what a data proxy exports, clients read, and trainers concatenate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class Column(NamedTuple):
    """``dtype``: its name in NumPy and torch. ``padding``: the value behind the last token of a row, and of a token
    that was not sampled."""

    dtype: Literal["int64", "int32", "float32", "bool"]
    padding: int = 0


COLUMNS: Mapping[str, Column] = {
    "input_ids": Column("int64"),
    "loss_mask": Column("int64"),
    "logprobs": Column("float32"),
    "versions": Column("int64", -1),
    "turn_ids": Column("int32", -1),
    "attention_mask": Column("bool", False),
    "rewards": Column("float32"),
    "original_rewards": Column("float32"),
    "temperatures": Column("float32"),
    "token_temperatures": Column("float32", 1),
}
TOKEN_COLUMNS = ("input_ids", "loss_mask", "logprobs", "versions", "turn_ids")
"""The columns with a value for each token that every row has."""
