"""Samples as the page has them: of a group, side by side with their tokens; made of a recorded session, whose id stands
in the trajectory files of jobs; and the tokens that each version of the weights has sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

from areal.files import parse_json
from areal.reconcilers.home_view import fields_document
from areal.state.home import Home
from areal.trajectories.record import Episode, read_episode
from areal.trajectories.steps import GroupSummary, SampleSummary, StepFile, read_sample, step_files
from areal.trajectories.view import TokenDecoder, shown_episode
from areal.ui.jobs import FileMemo

_SIDE_BY_SIDE = 16  # samples of a group with their tokens
_TOKENS = 60_000  # of all samples side by side
_MOST_BYTES = 128 << 20  # of files that are searched
_MOST_FOUND = 20
_COUNTED_FILES, _COUNTED_BYTES = 100, 32 << 20  # of a job, the newest


def group_row(group: GroupSummary) -> dict[str, object]:
    return {
        "group": group.name,
        "mean": group.mean,
        "spread": group.spread,
        "withoutSpread": group.is_without_spread,
        "samples": [sample_row(each) for each in group.samples],
    }


def sample_row(sample: SampleSummary) -> dict[str, object]:
    return {name: each for name, each in fields_document(sample).items() if name not in ("line", "group")}


def side_by_side(path: Path, samples: Sequence[SampleSummary], decoder: TokenDecoder | None) -> dict[str, object]:
    """``episodes``: samples of a file with their tokens, as many as fit; ``leftOut``: how many do not."""
    shown: list[dict[str, object]] = []
    tokens = 0
    for each in samples[:_SIDE_BY_SIDE]:
        if shown and tokens + each.tokens > _TOKENS:
            break
        tokens += each.tokens
        shown.append({**sample_row(each), "shown": shown_episode(read_sample(path, each.line), decoder)})
    return {"episodes": shown, "leftOut": len(samples) - len(shown)}


def find_trained(home: Home, session: str, since: float) -> dict[str, object]:
    """Return the session's ``samples`` in the files that jobs wrote after it began, and if the search was ``whole``."""
    files = [
        (path.stat().st_mtime, path.stat().st_size, folder.parent.name, each, path)
        for folder in sorted(home.jobs.glob("*/trajectories"))
        for each in step_files(folder)
        if (path := folder / each.name).exists() and path.stat().st_mtime >= since
    ]
    samples: list[dict[str, object]] = []
    room = _MOST_BYTES
    for _, size, job, step, path in sorted(files, key=lambda found: found[0]):
        room -= size
        if room < 0 or len(samples) >= _MOST_FOUND:
            return {"samples": samples, "whole": False}
        samples += _samples(path, session, job, step)
    return {"samples": samples, "whole": True}


def _samples(path: Path, session: str, job: str, step: StepFile) -> Iterator[dict[str, object]]:
    for episode in _episodes(path, session.encode()):
        if any(row.session_id == session for row in episode.interactions):
            about = {"job": job, "step": step.step, "isEval": step.is_eval, "reward": episode.reward}
            yield {**about, "group": episode.group or episode.episode, "sample": episode.sample}


def _episodes(path: Path, needle: bytes = b"") -> Iterator[Episode]:
    """Yield the episodes of the lines that have ``needle`` and can be read; none where the file is gone."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            if needle in line:
                with suppress(ValueError):
                    yield read_episode(parse_json(line))


def _count(path: Path) -> Counter[int]:
    """Return how many tokens of a step's file each version has sampled."""
    rows = chain.from_iterable(episode.interactions for episode in _episodes(path))
    return Counter(version for row in rows for version in row.versions if version >= 0)


_counts = FileMemo[Counter[int]](_count, most=2000)


def tokens_by_version(folder: Path) -> dict[str, object]:
    """Return the tokens by version of a job's newest training steps with samples, and which were counted."""
    files = [each for each in step_files(folder) if not each.is_eval]
    chosen: list[StepFile] = []
    room = _COUNTED_BYTES
    for each in files[: -_COUNTED_FILES - 1 : -1]:
        room -= (folder / each.name).stat().st_size
        if chosen and room < 0:
            break
        chosen.append(each)
    total = sum((_counts.get(folder / each.name) for each in chosen), Counter[int]())
    return {
        "job": folder.parent.name,
        "steps": [chosen[-1].step, chosen[0].step] if chosen else [],
        "whole": len(chosen) == len(files),
        "versions": [{"version": version, "tokens": count} for version, count in sorted(total.items(), reverse=True)],
    }
