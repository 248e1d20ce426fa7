"""The steps of a training job by their files: an index of the steps, and one step at a time. Only the file of the step
that is asked for is read, line by line: tokens are dropped once a sample's line is summarised, and read again by the
line's place when the sample is opened.
"""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from areal.dataclasses import dataclass
from areal.errors import ArealError, NotFound
from areal.files import last_lines, parse_json
from areal.trajectories.record import Episode, Interaction, read_episode
from areal.trajectories.view import HINT, TokenDecoder, answer_hint

_STEP_FILE = re.compile(r"trajectories-(eval-)?(\d{1,12})\.jsonl")
FAILURES = "failures.jsonl"  # beside the steps' files
_FAILURES_BYTES = 1 << 20
_MOST_DAMAGED = 20
_DECODED = 64  # tokens of an answer that its hint is made of


class StepFile(NamedTuple):
    step: int
    is_eval: bool
    name: str


def step_file(step: int, *, is_eval: bool = False) -> str:
    """Return the name of the file of a step, or of the evaluation after it."""
    return f"trajectories-{'eval-' if is_eval else ''}{step:06d}.jsonl"


def step_files(folder: Path) -> list[StepFile]:
    """Return the steps that have a file, in order, an evaluation behind its step. Nothing is opened."""
    try:
        names = os.listdir(folder)  # noqa: PTH208  # 100,000 names without a Path each
    except FileNotFoundError:
        return []
    matches = map(_STEP_FILE.fullmatch, names)
    return sorted(StepFile(int(each[2]), each[1] is not None, each[0]) for each in matches if each)


@dataclass(frozen=True, slots=True)
class SampleSummary:
    """A sample of a step without its tokens. ``line``: its place in the file, in bytes. ``tokens``: generated ones.
    ``hint``: how the model's last answer begins."""

    line: int
    episode: str
    group: str
    prompt: int
    sample: int
    reward: float | None
    advantage: float | None
    tokens: int
    turns: int
    truncated: bool
    seconds: float
    mean_logprob: float | None
    versions: tuple[int, ...]
    question: str
    hint: str
    failures: tuple[str, ...]


@dataclass(frozen=True)
class GroupSummary:
    """The samples of a prompt. ``spread``: the standard deviation of their rewards; at 0 the group has no gradient."""

    name: str
    samples: tuple[SampleSummary, ...]

    @property
    def rewards(self) -> list[float]:
        return [each.reward for each in self.samples if each.reward is not None]

    @property
    def mean(self) -> float | None:
        return _mean(self.rewards)

    @property
    def spread(self) -> float | None:
        known = self.rewards
        return statistics.pstdev(known) if all(map(math.isfinite, known)) and known else math.nan if known else None

    @property
    def is_without_spread(self) -> bool:
        return len(self.rewards) > 1 and max(self.rewards) == min(self.rewards)


@dataclass(frozen=True)
class StepSummary:
    """``damaged``: why lines could not be read, the first twenty; ``damaged_lines``: how many there are."""

    groups: tuple[GroupSummary, ...]
    damaged: tuple[str, ...]
    damaged_lines: int


def read_step(
    path: Path,
    decoder: TokenDecoder | None = None,
    group_of: Callable[[Episode], str] = lambda episode: episode.group or episode.episode,
) -> StepSummary:
    """Summarise the file of a step. Raises NotFound. A damaged line is reported, not raised: the writer does not check
    what a model of another server answered."""
    groups: dict[str, list[SampleSummary]] = {}
    damaged: list[str] = []
    count = place = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                begin, place = place, place + len(line)
                if not line.strip():
                    continue
                try:
                    episode = read_episode(parse_json(line))
                    summary = _summary(episode, begin, decoder)
                except (ValueError, TypeError, AttributeError, OverflowError) as error:
                    count += 1
                    if len(damaged) < _MOST_DAMAGED:
                        damaged.append(f"{path}:{number}: {error}"[:500])
                    continue
                groups.setdefault(group_of(episode), []).append(summary)
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {path}") from error
    return StepSummary(tuple(GroupSummary(name, tuple(each)) for name, each in groups.items()), tuple(damaged), count)


def read_sample(path: Path, line: int) -> Episode:
    """Return the episode whose line begins at byte ``line``. Raises NotFound, and ArealError if no line begins
    there."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, line - 1))
            if line and file.read(1) != b"\n":
                raise ArealError(f"no line of {path} begins at byte {line}: the step was written again")
            return read_episode(parse_json(file.readline()))
    except FileNotFoundError as error:
        raise NotFound(f"there is no file {path}") from error
    except ValueError as error:
        raise ArealError(f"{path}: the line at byte {line}: {error}") from error


def _mean(values: Sequence[float]) -> float | None:
    """Return the mean; NaN if one of the values is not finite, None without values."""
    if not values:
        return None
    return statistics.fmean(values) if all(map(math.isfinite, values)) else math.nan


def _summary(episode: Episode, line: int, decoder: TokenDecoder | None) -> SampleSummary:
    rows = episode.interactions
    logprobs = [
        value for row in rows for value, is_answer in zip(row.logprobs, row.loss_mask, strict=True) if is_answer
    ]
    advantages = [row.advantage for row in rows if row.advantage is not None]
    versions = {version for row in rows for version in row.versions if version >= 0}
    return SampleSummary(
        line=line,
        episode=episode.episode,
        group=episode.group,
        prompt=episode.prompt,
        sample=episode.sample,
        reward=episode.reward,
        advantage=_mean(advantages),
        tokens=episode.generated_tokens,
        turns=episode.turns,
        truncated=any(row.truncated for row in rows),
        seconds=episode.seconds,
        mean_logprob=math.fsum(logprobs) / len(logprobs) if logprobs and all(map(math.isfinite, logprobs)) else None,
        versions=tuple(sorted(versions)),
        question=question_of(episode),
        hint=_hint(rows[-1], decoder) if rows else "",
        failures=tuple(episode.failure_texts),
    )


def _hint(row: Interaction, decoder: TokenDecoder | None) -> str:
    ids = [token for token, is_answer in zip(row.input_ids, row.loss_mask, strict=True) if is_answer][:_DECODED]
    return answer_hint(row, ids, decoder.texts(ids) if decoder is not None else [None] * len(ids))


def question_of(episode: Episode) -> str:
    """Return how the prompt's last message begins, or the first text of the example."""
    messages = episode.example.get("messages")
    if isinstance(messages, Sequence) and messages and isinstance(messages[-1], dict):
        content = messages[-1].get("content")
        if isinstance(content, str):
            return content[:HINT]
    texts = (value for name, value in episode.example.items() if isinstance(value, str) and name != "answer")
    return next(texts, "")[:HINT]


class FailedRollout(NamedTuple):
    at: float
    episode: str
    prompt: int
    blame: str
    error: str


def read_failures(folder: Path, first: float = -math.inf, last: float = math.inf) -> tuple[list[FailedRollout], bool]:
    """Return the failed rollouts between two times, newest first, and whether older ones were left unread."""
    try:
        lines, is_all = last_lines(folder / FAILURES, _FAILURES_BYTES)
    except FileNotFoundError:
        return [], False
    failures = [each for each in map(_failure, reversed(lines)) if each is not None]
    is_cut = not is_all and (not failures or failures[-1].at > first)
    return [each for each in failures if first < each.at <= last], is_cut


def _failure(line: bytes) -> FailedRollout | None:
    try:
        found: Any = parse_json(line)
        return FailedRollout(
            float(found["at"]), str(found["episode"]), int(found["prompt"]), str(found["blame"]), str(found["error"])
        )
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
