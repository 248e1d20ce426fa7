"""Training rows from recorded turns: one per turn (``individual``) or one per leaf of the tree (``concat``).

Columns, right-padded to the longest row with 0, or with -1 in ``versions`` and ``turn_ids``, where 0 is a value:

    input_ids int64       prompt and generated tokens, including the one that ended the answer
    loss_mask int64       0 prompt, 1 generated
    logprobs float32      0 on prompt
    versions int64        weights that sampled the token, -1 on prompt
    turn_ids int32        0, 1, 2... for the turns of the row that generated the tokens, -1 on prompt
    attention_mask bool   true on tokens, false on padding
    rewards, original_rewards float32 [B]   the second without discount
    temperatures float32 [B]   of sampling and log-probabilities, 0 greedy; NaN if the row's turns differ

If the turns of any row differ in temperature, there is also a column ``token_temperatures`` float32 [B, T], 1 on prompt
and padding.

Turns come in recording order, so a parent precedes its children. A turn is *joined* to its parent when its prompt
begins with all the parent's tokens; only then can both share one training row.
"""

from __future__ import annotations

import io
import math
import zipfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from areal.dataclasses import dataclass, field, replace
from areal.services.http.errors import bad_field
from areal.services.inference.recorder.records import RecordedTurn, TextTurn, TokenTurn, TrajectoryTurns
from areal.wire.bodies import LARGEST_F32
from areal.wire.columns import COLUMNS, TOKEN_COLUMNS, ExportedInteraction, ExportedRow, ExportError, FailedCalls


def own_reward(turn: RecordedTurn) -> float:
    return 0.0 if turn.reward is None else turn.reward


def discounted_rewards(turns: Sequence[RecordedTurn], discount: float) -> dict[int, float]:
    """Return each turn's return, by sequence number: its reward plus ``discount`` times the return of each child."""
    rewards = {turn.seq: own_reward(turn) for turn in turns}
    for turn in reversed(turns):
        if turn.parent is not None and turn.parent in rewards:
            rewards[turn.parent] += discount * rewards[turn.seq]
    return rewards


@dataclass(frozen=True)
class TreePath:
    """Joined turns from a root to a leaf: one row of the ``concat`` style.

    ``own`` is the sum of the turns' own rewards. ``reward`` adds ``discount`` times the return of each child that is
    not joined and therefore begins another row. If only the last turn has a reward, both equal that reward.
    """

    turns: tuple[RecordedTurn, ...]
    reward: float
    own: float

    @property
    def leaf(self) -> RecordedTurn:
        return self.turns[-1]


def tree_paths(turns: Sequence[RecordedTurn], discount: float) -> list[TreePath]:
    """Return one path per leaf, in the order of the leaves."""
    by_seq = {turn.seq: turn for turn in turns}
    continued = {turn.parent for turn in turns if turn.joined}
    returns = discounted_rewards(turns, discount)
    given_back = dict.fromkeys(by_seq, 0.0)
    for turn in turns:
        if not turn.joined and turn.parent in given_back:
            given_back[turn.parent] += discount * returns[turn.seq]
    found = []
    for leaf in turns:
        if leaf.seq in continued:
            continue
        line = [leaf]
        while line[-1].joined and line[-1].parent is not None:
            line.append(by_seq[line[-1].parent])
        line.reverse()
        own = sum(map(own_reward, line))
        found.append(TreePath(tuple(line), own + sum(given_back[turn.seq] for turn in line), own))
    return found


class Style(StrEnum):
    INDIVIDUAL = "individual"
    CONCAT = "concat"


def parse_rows(query: Mapping[str, str]) -> tuple[Style, float]:
    """Return ``style`` and ``discount`` of a query. Raises 400."""
    text = query.get("style", Style.INDIVIDUAL.value)
    if text not in [each.value for each in Style]:
        raise bad_field("style", "must be individual or concat")
    try:
        discount = float(query.get("discount", "1"))
    except ValueError:
        discount = math.nan
    if not 0 <= discount <= 1:  # nor NaN
        raise bad_field("discount", "must be from 0 to 1")
    return Style(text), discount


@dataclass(frozen=True)
class TrainingRow:
    """One row without padding. ``about`` is its entry in ``Export.rows``."""

    input_ids: array[int]
    loss_mask: array[int]
    logprobs: array[float]
    versions: array[int]
    turn_ids: array[int]
    temperatures: tuple[float, ...]  # of each generated turn
    reward: float
    original_reward: float
    about: ExportedRow

    @property
    def temperature(self) -> float:
        return self.temperatures[0] if len(set(self.temperatures)) == 1 else math.nan

    def token_temperatures(self) -> array[float]:
        of_turn = (*self.temperatures, 1.0)  # index -1, on prompt, is the 1.0
        return array("f", [of_turn[turn] for turn in self.turn_ids])


@dataclass(frozen=True)
class ArrayColumn:
    """One array of an export: ``data`` is little-endian and row-major; ``kind`` is NumPy's type string."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: bytes

    def tolist(self) -> list[Any]:
        if self.kind == "|b1":
            flat: list[Any] = [byte != 0 for byte in self.data]
        else:
            flat = array(_CODES[self.kind], self.data).tolist()
        if len(self.shape) == 1:
            return flat
        width = self.shape[1]
        return [flat[row * width : (row + 1) * width] for row in range(self.shape[0])]


_CODES = {"<i8": "q", "<i4": "i", "<f4": "f"}
_TYPESTRS = {"int64": "<i8", "int32": "<i4", "float32": "<f4", "bool": "|b1"}
KINDS = {name: _TYPESTRS[column.dtype] for name, column in COLUMNS.items()}


def token_rows(trajectory: TrajectoryTurns, style: Style, discount: float) -> list[TrainingRow]:
    """Return the training rows of a trajectory. All its turns must be ``TokenTurn``."""
    abouts = _abouts(trajectory)
    if style is Style.INDIVIDUAL:
        returns = discounted_rewards(trajectory.turns, discount)
        return [_row([turn], returns[turn.seq], own_reward(turn), abouts[turn.seq]) for turn in trajectory.turns]
    rows = []
    for path in tree_paths(trajectory.turns, discount):
        about = abouts[path.leaf.seq]
        about["rewarded"] = any(turn.reward is not None for turn in path.turns)
        about["turns"] = [{"interaction_id": turn.interaction_id, "reward": turn.reward} for turn in path.turns]
        rows.append(_row(path.turns, path.reward, path.own, about))
    return rows


def _row(line: Sequence[RecordedTurn], reward: float, original: float, about: ExportedRow) -> TrainingRow:
    turns = [turn for turn in line if isinstance(turn, TokenTurn)]
    assert len(turns) == len(line)
    temperatures = tuple(turn.temperature for turn in turns)
    row = TrainingRow(array("q"), array("q"), array("f"), array("q"), array("i"), temperatures, reward, original, about)
    for number, turn in enumerate(turns):
        prompt, generated = turn.prompt_ids[len(row.input_ids) :], len(turn.output_ids)
        row.input_ids.extend(array("q", prompt))
        row.input_ids.extend(array("q", turn.output_ids))
        row.loss_mask.extend(_repeat("q", 0, len(prompt)) + _repeat("q", 1, generated))
        row.logprobs.extend(_repeat("f", 0, len(prompt)) + turn.logprobs)
        row.versions.extend(_repeat("q", -1, len(prompt)) + turn.versions)
        row.turn_ids.extend(_repeat("i", -1, len(prompt)) + _repeat("i", number, generated))
    return row


def _repeat(code: str, value: int, count: int) -> array[Any]:
    return array(code, [value]) * count


def _abouts(trajectory: TrajectoryTurns) -> dict[int, ExportedRow]:
    """Return each turn's entry in ``rows``, by sequence number."""
    names = {turn.seq: turn.interaction_id for turn in trajectory.turns}
    return {
        turn.seq: {
            "session_id": trajectory.session_id,
            "trajectory_id": trajectory.number,
            "interaction_id": turn.interaction_id,
            "parent_id": names.get(turn.parent) if turn.parent is not None else None,
            "finish_reason": turn.finish_reason,
            "truncated": turn.truncated,
            "rewarded": turn.reward is not None,
            "model": turn.model,
            "kind": "text" if isinstance(turn, TextTurn) else "tokens",
        }
        for turn in trajectory.turns
    }


def columns(rows: Sequence[TrainingRow]) -> list[ArrayColumn]:
    width = max((len(row.input_ids) for row in rows), default=0)
    found = []
    temperatures = [row.temperature for row in rows]
    for name in TOKEN_COLUMNS:
        found.append(_token_column(name, [getattr(row, name) for row in rows], width))
    if any(map(math.isnan, temperatures)):
        found.append(_token_column("token_temperatures", [row.token_temperatures() for row in rows], width))
    mask = b"".join(b"\1" * len(row.input_ids) + b"\0" * (width - len(row.input_ids)) for row in rows)
    found.append(ArrayColumn("attention_mask", "|b1", (len(rows), width), mask))
    for name, values in (
        ("rewards", [row.reward for row in rows]),
        ("original_rewards", [row.original_reward for row in rows]),
        ("temperatures", temperatures),
    ):
        found.append(ArrayColumn(name, "<f4", (len(rows),), array("f", values).tobytes()))
    return found


def _token_column(name: str, values: Sequence[array[Any]], width: int) -> ArrayColumn:
    whole = array(_CODES[KINDS[name]])
    for each in values:
        whole.extend(each)
        whole.extend(_repeat(whole.typecode, COLUMNS[name].padding, width - len(each)))
    return ArrayColumn(name, KINDS[name], (len(values), width), whole.tobytes())


class RewardOverflow(Exception):
    """The returns of a trajectory exceed the float32 range of a training row."""

    code = "reward_overflow"


@dataclass(frozen=True)
class TrajectoryExport:
    """One trajectory's export: training rows of token turns, and interactions of external models."""

    session_id: str
    tokens: list[TrainingRow]
    texts: list[tuple[ExportedRow, ExportedInteraction]]
    failures: list[FailedCalls]


@dataclass(frozen=True)
class Export:
    """The response to an export request: columns of token rows, and interactions of external models.

    ``rows`` has an entry for each row of the columns, then one for each interaction. ``errors`` has an entry for each
    requested trajectory or session that is left out.
    """

    rows: list[ExportedRow]
    columns: list[ArrayColumn]
    interactions: list[ExportedInteraction]
    failures: list[FailedCalls]
    errors: list[ExportError] = field(default_factory=list)

    def traj(self) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {column.name: column.tolist() for column in self.columns}
        if not self.interactions:
            return columns
        return {**(columns if len(self.rows) > len(self.interactions) else {}), "interactions": self.interactions}


def export_trajectory(trajectory: TrajectoryTurns, style: Style, discount: float) -> TrajectoryExport:
    """Return the export of one trajectory. Raises RewardOverflow."""
    tokens = [turn for turn in trajectory.turns if isinstance(turn, TokenTurn)]
    texts = [turn for turn in trajectory.turns if isinstance(turn, TextTurn)]
    failures: list[FailedCalls] = [
        {"session_id": trajectory.session_id, "trajectory_id": trajectory.number, "code": code, "count": count}
        for code, count in trajectory.failures.items()
    ]
    rows = token_rows(replace(trajectory, turns=tokens), style, discount) if tokens else []
    for row in rows:
        if max(abs(row.reward), abs(row.original_reward)) > LARGEST_F32:
            where = f"trajectory {trajectory.number} of session {trajectory.session_id}"
            raise RewardOverflow(f"{where}: its rewards add up to more than a float32 holds")
    abouts = _abouts(trajectory)
    returns = discounted_rewards(trajectory.turns, discount)
    interactions: list[tuple[ExportedRow, ExportedInteraction]] = [
        (
            abouts[turn.seq],
            {
                "messages": list(turn.messages),
                "response": dict(turn.response),
                "reward": returns[turn.seq],
                "original_reward": own_reward(turn),
            },
        )
        for turn in texts
    ]
    return TrajectoryExport(trajectory.session_id, rows, interactions, failures)


def join_exports(parts: Sequence[TrajectoryExport], errors: Sequence[ExportError] = ()) -> Export:
    rows = [row for part in parts for row in part.tokens]
    texts = [text for part in parts for text in part.texts]
    return Export(
        rows=[row.about for row in rows] + [about for about, _ in texts],
        columns=columns(rows),
        interactions=[interaction for _, interaction in texts],
        failures=[failure for part in parts for failure in part.failures],
        errors=list(errors),
    )


def export_all(trajectories: Iterable[TrajectoryTurns], style: Style, discount: float) -> Export:
    """Return the export of several trajectories. Raises RewardOverflow."""
    return join_exports([export_trajectory(each, style, discount) for each in trajectories])


_MAGIC = b"\x93NUMPY\x01\x00"
_ALIGNMENT = 64


def npz(columns: Iterable[ArrayColumn], more: Mapping[str, bytes]) -> bytes:
    """Return a ``.npz`` file with one array per column. ``more``: members that are not arrays; NumPy loads them as
    bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for column in columns:
            archive.writestr(f"{column.name}.npy", npy(column))
        for name, data in more.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def npy(column: ArrayColumn) -> bytes:
    header = repr({"descr": column.kind, "fortran_order": False, "shape": column.shape}).encode("ascii")
    length = len(_MAGIC) + 2 + len(header) + 1
    header += b" " * (-length % _ALIGNMENT) + b"\n"
    return _MAGIC + len(header).to_bytes(2, "little") + header + column.data
