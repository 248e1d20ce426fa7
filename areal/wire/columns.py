"""Exported trajectories: the columns of training rows, which trainers concatenate, and the entries beside them. A data
proxy writes them, a gateway merges them, clients and files hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict


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


class RewardedTurn(TypedDict):
    interaction_id: str
    reward: float | None


class ExportedRow(TypedDict):
    """An entry of an export's ``rows``. ``turns``: those of a concatenated row."""

    session_id: str
    trajectory_id: int
    interaction_id: str
    parent_id: str | None
    finish_reason: str
    truncated: bool
    rewarded: bool
    model: str
    kind: Literal["tokens", "text"]
    turns: NotRequired[list[RewardedTurn]]


class ExportedInteraction(TypedDict):
    """A row of an external model, which has messages instead of tokens."""

    messages: list[Mapping[str, object]]
    response: Mapping[str, object]
    reward: float
    original_reward: float


class FailedCalls(TypedDict):
    """How many calls of a trajectory failed with ``code``; such calls have no reward."""

    session_id: str
    trajectory_id: int
    code: str
    count: int


class ExportError(TypedDict):
    """A trajectory that is left out of an export: it is damaged, or its rewards overflow. None: its whole session."""

    session_id: str
    trajectory_id: int | None
    code: str
    message: str


class ExportAnswer(TypedDict):
    """An export as JSON. ``traj``: the columns, and ``interactions``. ``rows`` has an entry for each row of the
    columns, then one for each interaction. ``removed``: its sessions are removed."""

    traj: dict[str, list[Any]]
    rows: list[ExportedRow]
    failures: list[FailedCalls]
    errors: list[ExportError]
    export_id: NotRequired[str]
    removed: NotRequired[bool]


class LeasedExport(ExportAnswer):
    lease_id: str
    session_id: str
    trajectory_id: int
