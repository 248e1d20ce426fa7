"""The columns of training rows: what a data proxy exports, clients read, and trainers concatenate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple


class ArrayColumn(NamedTuple):
    """``dtype``: its name in NumPy and torch. ``padding``: the value behind the last token of a row, and of a token
    that was not sampled."""

    dtype: Literal["int64", "int32", "float32", "bool"]
    padding: int = 0


COLUMNS: Mapping[str, ArrayColumn] = {
    "input_ids": ArrayColumn("int64"),
    "loss_mask": ArrayColumn("int64"),
    "logprobs": ArrayColumn("float32"),
    "versions": ArrayColumn("int64", -1),
    "turn_ids": ArrayColumn("int32", -1),
    "attention_mask": ArrayColumn("bool", False),
    "rewards": ArrayColumn("float32"),
    "original_rewards": ArrayColumn("float32"),
    "temperatures": ArrayColumn("float32"),
    "token_temperatures": ArrayColumn("float32", 1),
}
TOKEN_COLUMNS = ("input_ids", "loss_mask", "logprobs", "versions", "turn_ids")
"""The columns with a value for each token that every row has."""
