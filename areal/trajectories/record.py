"""A trajectory in files and views: unpadded rows, one per interaction, with their metadata.

The data plane exports columns padded to the longest row. Here each row has its own length, so that a file has no
padding and a row can be read alone. All token columns of a row have the same length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from areal.dataclasses import dataclass, field
from areal.wire.columns import TOKEN_COLUMNS

_COLUMN_TYPES: dict[str, set[type]] = {
    **{name: {int, bool} for name in TOKEN_COLUMNS},
    "logprobs": {int, float, type(None)},
    "token_temperatures": {int, float},
}
_ABOUT = (
    *("session_id", "trajectory_id", "interaction_id", "parent_id"),
    *("finish_reason", "truncated", "rewarded", "model"),
)
_PLAIN = ("episode", "prompt", "sample", "group", "step", "is_eval", "reward", "answer")


@dataclass(frozen=True)
class Interaction:
    """One row of an export.

    ``loss_mask``: 0 prompt, 1 generated. ``logprobs``: natural logarithms, 0 on prompt. ``versions`` and ``turn_ids``:
    -1 on prompt. ``temperature``: of sampling and ``logprobs``, 0 greedy; None if the turns of the row differ, which
    then has ``token_temperatures``, 1 on prompt. ``reward`` is discounted along the conversation, ``original_reward``
    is the interaction's own. ``advantage``: the trainer's mean over the tokens that it trained on; None if it trained
    on none. A row of an external model has ``messages`` and ``response`` instead of tokens.
    """

    interaction_id: str
    parent_id: str | None = None
    session_id: str = ""
    trajectory_id: int = 0
    model: str = ""
    finish_reason: str = ""
    truncated: bool = False
    rewarded: bool = False
    reward: float = 0.0
    original_reward: float = 0.0
    advantage: float | None = None
    input_ids: Sequence[int] = ()
    loss_mask: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    versions: Sequence[int] = ()
    turn_ids: Sequence[int] = ()
    temperature: float | None = 1.0
    token_temperatures: Sequence[float] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    response: Mapping[str, Any] | None = None

    @property
    def generated_tokens(self) -> int:
        return sum(self.loss_mask)

    @property
    def prompt_tokens(self) -> int:
        return len(self.loss_mask) - self.generated_tokens

    def document(self) -> dict[str, object]:
        found: dict[str, object] = {name: getattr(self, name) for name in _ABOUT}
        found |= {"reward": self.reward, "original_reward": self.original_reward, "advantage": self.advantage}
        if self.response is not None:
            return {**found, "messages": list(self.messages), "response": dict(self.response)}
        columns: dict[str, object] = {name: list(getattr(self, name)) for name in TOKEN_COLUMNS}
        found["temperature"] = None if self.temperature is None else _short(self.temperature)
        if self.temperature is None:
            columns["token_temperatures"] = [_short(each) for each in self.token_temperatures]
        return found | columns | {"logprobs": [_short(each) for each in self.logprobs]}


def _short(value: float) -> float:
    """Return ``value`` with nine significant digits, which identify a float32; its own repr has twice as many."""
    return float(f"{value:.9g}") if value else 0.0


@dataclass(frozen=True)
class Episode:
    """One sample of a prompt: the interactions (turns) of its conversation, and the metadata of its collector.

    ``prompt``: the number of its example in the data set; ``sample``: its number among the prompt's samples. Both are
    -1 without a collector. ``group``: the trainer's id of the group of samples. ``step``: the training step that used
    the episode, or after which it was evaluated (``is_eval``).
    """

    episode: str
    interactions: tuple[Interaction, ...]
    prompt: int = -1
    sample: int = -1
    reward: float | None = None
    answer: str | None = None
    seconds: float = 0.0
    export_id: str = ""
    example: Mapping[str, object] = field(default_factory=dict)
    failures: tuple[Mapping[str, object], ...] = ()
    group: str = ""
    step: int | None = None
    is_eval: bool = False

    @property
    def generated_tokens(self) -> int:
        return sum(row.generated_tokens for row in self.interactions)

    @property
    def turns(self) -> int:
        return sum(len({turn for turn in row.turn_ids if turn >= 0}) or 1 for row in self.interactions)

    @property
    def failure_texts(self) -> list[str]:
        return [f"{each.get('code')} ×{each.get('count')}" for each in self.failures]

    def document(self) -> dict[str, Any]:
        """Return the JSON document of one line of a ``.jsonl`` file."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "seconds": round(self.seconds, 4),
            "export_id": self.export_id,
            "example": dict(self.example),
            "failures": [dict(each) for each in self.failures],
            "interactions": [each.document() for each in self.interactions],
        }


def read_episode(document: Mapping[str, Any]) -> Episode:
    """Return the inverse of ``Episode.document``. Raises ValueError naming the invalid field."""
    try:
        return Episode(
            episode=str(document["episode"]),
            interactions=tuple(_interaction(each) for each in document["interactions"]),
            prompt=int(document.get("prompt", -1)),
            sample=int(document.get("sample", -1)),
            group=str(document.get("group") or ""),
            step=document.get("step"),
            is_eval=bool(document.get("is_eval")),
            reward=_number(document, "reward"),
            answer=document.get("answer"),
            seconds=float(document.get("seconds") or 0.0),
            export_id=str(document.get("export_id") or ""),
            example=dict(document.get("example") or {}),
            failures=tuple(map(dict, document.get("failures") or ())),
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no episode: {error!r}") from error


def _number(document: Mapping[str, object], name: str) -> float | None:
    value = document.get(name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{name} is not a number: {value!r:.100}")


def _interaction(document: Mapping[str, Any]) -> Interaction:
    known = {name: document[name] for name in Interaction.__dataclass_fields__ if name in document}
    for name in ("interaction_id", "parent_id", "session_id", "model", "finish_reason"):
        if not isinstance(known.get(name), str | None):
            raise ValueError(f"{name} is not a text: {known[name]!r:.100}")
    for name in ("reward", "original_reward", "advantage", "temperature"):
        if name in known:
            value = _number(document, name)
            known[name] = math.nan if value is None and name in ("reward", "original_reward") else value
    for name, types in _COLUMN_TYPES.items():
        if name in known and not set(map(type, known[name])) <= types:
            raise ValueError(f"{name} has a value that is not a number")
    if None in known.get("logprobs", ()):  # NaN, as JSON writes it
        known["logprobs"] = [math.nan if value is None else value for value in known["logprobs"]]
    if not all(isinstance(each, Mapping) for each in (*(known.get("messages") or ()), known.get("response") or {})):
        raise ValueError("a message is not an object")
    made = Interaction(**known)
    if len({len(getattr(made, name)) for name in TOKEN_COLUMNS}) > 1:
        raise ValueError(f"the token columns of {made.interaction_id} differ in length")
    return made


def rows_of_export(answer: Mapping[str, Any]) -> tuple[Interaction, ...]:
    """Return the rows of an export response (``traj`` and ``rows``), without padding. Raises ValueError."""
    try:
        traj, rows = answer["traj"], answer["rows"]
        texts = traj.get("interactions") or ()
        tokens = rows[: len(rows) - len(texts)]
        return (
            *(_token_row(traj, row, place) for place, row in enumerate(tokens)),
            *(_interaction({**_about(row), **each}) for row, each in zip(rows[len(tokens) :], texts, strict=True)),
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"no export: {error!r}") from error


def _token_row(traj: Mapping[str, Any], row: Mapping[str, Any], place: int) -> Interaction:
    length = sum(map(bool, traj["attention_mask"][place]))
    columns = {name: list(traj[name][place][:length]) for name in TOKEN_COLUMNS}
    rewards = {"reward": traj["rewards"][place], "original_reward": traj["original_rewards"][place]}
    temperature = traj["temperatures"][place] if "temperatures" in traj else 1.0
    if temperature is None or math.isnan(temperature):
        temperature, columns["token_temperatures"] = None, list(traj["token_temperatures"][place][:length])
    return _interaction({**_about(row), **rewards, **columns, "temperature": temperature})


def _about(row: Mapping[str, object]) -> dict[str, object]:
    return {name: row[name] for name in _ABOUT if name in row}


def episodes_of_export(answer: Mapping[str, Any]) -> list[Episode]:
    """Return an export response's episodes, without a collector's metadata, by trajectory. Raises ValueError."""
    failures = answer.get("failures") or ()
    export_id = str(answer.get("export_id") or "")
    return by_trajectory(rows_of_export(answer), failures, export_id)


def by_trajectory(
    rows: Iterable[Interaction], failures: Iterable[Mapping[str, object]] = (), export_id: str = ""
) -> list[Episode]:
    found = []
    for (session, number), each in groupby(rows, key=lambda row: (row.session_id, row.trajectory_id)):
        own = tuple(each)
        mine = tuple(f for f in failures if (f.get("session_id"), f.get("trajectory_id")) == (session, number))
        found.append(Episode(f"{session}/{number}", own, reward=total_reward(own), export_id=export_id, failures=mine))
    return found


def total_reward(rows: Sequence[Interaction]) -> float | None:
    """Return the sum of the rows' own rewards; None if no row was rewarded."""
    if not any(row.rewarded for row in rows):
        return None
    return sum(row.original_reward for row in rows)
