"""Training rows from recorded turns: one a turn (``individual``) or one a leaf of the tree (``concat``).

Columns, right-padded to the longest row with 0, or -1 in ``versions`` and ``turn_ids``, where 0 means something:

    input_ids int64       prompt and generated tokens, the one that ended the answer too
    loss_mask int64       0 prompt, 1 generated
    logprobs float32      0 on prompt
    versions int64        weights that sampled the token, -1 on prompt
    turn_ids int32        0, 1, 2... by generated turn of the row, -1 on prompt
    attention_mask bool   true on tokens, false on padding
    rewards, original_rewards float32 [B]   the second without discount
    temperatures float32 [B]   of the row's sampling and its logprobs, 0 greedy; NaN where its turns differ

Where a row's turns differ in their temperature there is one more column, ``token_temperatures`` float32 [B, T], 1 on
prompt and padding.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from areal.services.inference.recording.session import LARGEST_F32
from areal.services.inference.recording.tree import Path, discounted, own_reward, paths
from areal.services.inference.recording.values import TextTurn, TokenTurn, TrajectoryTurns, Turn


class Style(StrEnum):
    INDIVIDUAL = "individual"
    CONCAT = "concat"


@dataclass(frozen=True)
class Row:
    """Unpadded. ``about`` is the row's entry in ``rows``."""

    input_ids: array[int]
    loss_mask: array[int]
    logprobs: array[float]
    versions: array[int]
    turn_ids: array[int]
    temperatures: tuple[float, ...]  # of each generated turn
    reward: float
    original_reward: float
    about: dict[str, Any]

    @property
    def temperature(self) -> float:
        return self.temperatures[0] if len(set(self.temperatures)) == 1 else math.nan

    def token_temperatures(self) -> array[float]:
        of_turn = (*self.temperatures, 1.0)  # the last one for -1, on prompt
        return array("f", [of_turn[turn] for turn in self.turn_ids])


@dataclass(frozen=True)
class Column:
    """One array of the answer: ``data`` is little-endian and row-major; ``kind`` is NumPy's type string."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: bytes

    def tolist(self) -> list[Any]:
        flat: list[Any] = _flat(self.kind, self.data)
        if len(self.shape) == 1:
            return flat
        width = self.shape[1]
        return [flat[row * width : (row + 1) * width] for row in range(self.shape[0])]


_CODES = {"<i8": "q", "<i4": "i", "<f4": "f"}
_TOKEN_TEMPERATURES = ("token_temperatures", "<f4", 1)
_TOKEN_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("input_ids", "<i8", 0),
    ("loss_mask", "<i8", 0),
    ("logprobs", "<f4", 0),
    ("versions", "<i8", -1),
    ("turn_ids", "<i4", -1),
)
KINDS = {name: kind for name, kind, _ in _TOKEN_COLUMNS} | {
    "attention_mask": "|b1",
    "rewards": "<f4",
    "original_rewards": "<f4",
    "temperatures": "<f4",
    "token_temperatures": "<f4",
}
PADDINGS: dict[str, int | bool] = {
    **{name: padding for name, _, padding in (*_TOKEN_COLUMNS, _TOKEN_TEMPERATURES)},
    "attention_mask": False,
}


def _flat(kind: str, data: bytes) -> list[Any]:
    if kind == "|b1":
        return [byte != 0 for byte in data]
    return array(_CODES[kind], data).tolist()


def token_rows(trajectory: TrajectoryTurns, style: Style, discount: float) -> list[Row]:
    about = _About(trajectory)
    if style is Style.CONCAT:
        return [_path_row(about, path) for path in paths(trajectory.turns, discount)]
    returns = discounted(trajectory.turns, discount)
    return [
        _row([_token_turn(turn)], returns[turn.seq], own_reward(turn), about.turn(turn)) for turn in trajectory.turns
    ]


def _path_row(of: _About, path: Path) -> Row:
    about = of.turn(path.leaf)
    about["rewarded"] = any(turn.reward is not None for turn in path.turns)
    about["turns"] = [{"interaction_id": turn.interaction_id, "reward": turn.reward} for turn in path.turns]
    return _row([_token_turn(turn) for turn in path.turns], path.reward, path.own, about)


def _row(line: Sequence[TokenTurn], reward: float, original: float, about: dict[str, Any]) -> Row:
    temperatures = tuple(turn.temperature for turn in line)
    row = Row(array("q"), array("q"), array("f"), array("q"), array("i"), temperatures, reward, original, about)
    for number, turn in enumerate(line):
        asked, answered = turn.prompt_ids[len(row.input_ids) :], len(turn.output_ids)
        row.input_ids.extend(array("q", asked))
        row.input_ids.extend(array("q", turn.output_ids))
        row.loss_mask.extend(_repeat("q", 0, len(asked)) + _repeat("q", 1, answered))
        row.logprobs.extend(_repeat("f", 0, len(asked)) + turn.logprobs)
        row.versions.extend(_repeat("q", -1, len(asked)) + turn.versions)
        row.turn_ids.extend(_repeat("i", -1, len(asked)) + _repeat("i", number, answered))
    return row


def _repeat(code: str, value: int, count: int) -> array[Any]:
    return array(code, [value]) * count


class _About:
    """The entries in ``rows`` of one trajectory's turns."""

    def __init__(self, trajectory: TrajectoryTurns) -> None:
        self._trajectory = trajectory
        self._names = {turn.seq: turn.interaction_id for turn in trajectory.turns}

    def turn(self, turn: Turn) -> dict[str, Any]:
        return {
            "session_id": self._trajectory.session_id,
            "trajectory_id": self._trajectory.number,
            "interaction_id": turn.interaction_id,
            "parent_id": self._names.get(turn.parent) if turn.parent is not None else None,
            "finish_reason": turn.finish_reason,
            "truncated": turn.truncated,
            "rewarded": turn.reward is not None,
            "model": turn.model,
            "kind": "text" if isinstance(turn, TextTurn) else "tokens",
        }


def _token_turn(turn: Turn) -> TokenTurn:
    assert isinstance(turn, TokenTurn)
    return turn


def columns(rows: Sequence[Row]) -> list[Column]:
    width = max((len(row.input_ids) for row in rows), default=0)
    found = []
    temperatures = [row.temperature for row in rows]
    for name, kind, padding in _TOKEN_COLUMNS:
        found.append(_token_column(name, kind, padding, [getattr(row, name) for row in rows], width))
    if any(map(math.isnan, temperatures)):
        found.append(_token_column(*_TOKEN_TEMPERATURES, [row.token_temperatures() for row in rows], width))
    mask = b"".join(b"\1" * len(row.input_ids) + b"\0" * (width - len(row.input_ids)) for row in rows)
    found.append(Column("attention_mask", "|b1", (len(rows), width), mask))
    for name, values in (
        ("rewards", [row.reward for row in rows]),
        ("original_rewards", [row.original_reward for row in rows]),
        ("temperatures", temperatures),
    ):
        found.append(Column(name, "<f4", (len(rows),), array("f", values).tobytes()))
    return found


class RewardOverflow(Exception):
    """A trajectory whose returns do not fit the float32 of a training row."""

    code = "reward_overflow"


@dataclass(frozen=True)
class Part:
    """The rows of one trajectory: those of token models and, beside them, the interactions of external ones."""

    session_id: str
    tokens: list[Row]
    texts: list[tuple[dict[str, Any], dict[str, Any]]]  # entry in ``rows``, interaction
    failures: list[dict[str, Any]]


def _token_column(name: str, kind: str, padding: int, values: Sequence[array[Any]], width: int) -> Column:
    whole = array(_CODES[kind])
    for each in values:
        whole.extend(each)
        whole.extend(_repeat(whole.typecode, padding, width - len(each)))
    return Column(name, kind, (len(values), width), whole.tobytes())


@dataclass(frozen=True)
class Export:
    """What an export answers: columns of token rows and, beside them, the interactions of external models.

    ``rows`` has an entry for each row of the columns, then one for each interaction. ``errors`` names what was asked
    for and is left out.
    """

    rows: list[dict[str, Any]]
    columns: list[Column]
    interactions: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    errors: list[dict[str, Any]] = field(default_factory=list)

    def traj(self) -> dict[str, Any]:
        columns = {column.name: column.tolist() for column in self.columns}
        if not self.interactions:
            return columns
        return {**(columns if len(self.rows) > len(self.interactions) else {}), "interactions": self.interactions}


def part_of(trajectory: TrajectoryTurns, style: Style, discount: float) -> Part:
    """Raises RewardOverflow."""
    tokens = [turn for turn in trajectory.turns if isinstance(turn, TokenTurn)]
    texts = [turn for turn in trajectory.turns if isinstance(turn, TextTurn)]
    failures = [
        {"session_id": trajectory.session_id, "trajectory_id": trajectory.number, "code": code, "count": count}
        for code, count in trajectory.failures.items()
    ]
    rows = token_rows(replace(trajectory, turns=tokens), style, discount) if tokens else []
    for row in rows:
        if max(abs(row.reward), abs(row.original_reward)) > LARGEST_F32:
            where = f"trajectory {trajectory.number} of session {trajectory.session_id}"
            raise RewardOverflow(f"{where}: its rewards add up to more than a float32 holds")
    about = _About(trajectory)
    returns = discounted(trajectory.turns, discount)
    interactions = [
        (
            about.turn(turn),
            {
                "messages": list(turn.messages),
                "response": dict(turn.response),
                "reward": returns[turn.seq],
                "original_reward": own_reward(turn),
            },
        )
        for turn in texts
    ]
    return Part(trajectory.session_id, rows, interactions, failures)


def join_parts(parts: Sequence[Part], errors: Sequence[dict[str, Any]] = ()) -> Export:
    rows = [row for part in parts for row in part.tokens]
    texts = [text for part in parts for text in part.texts]
    return Export(
        rows=[row.about for row in rows] + [about for about, _ in texts],
        columns=columns(rows),
        interactions=[interaction for _, interaction in texts],
        failures=[failure for part in parts for failure in part.failures],
        errors=list(errors),
    )


def export(trajectories: Iterable[TrajectoryTurns], style: Style, discount: float) -> Export:
    """Raises RewardOverflow."""
    return join_parts([part_of(each, style, discount) for each in trajectories])
