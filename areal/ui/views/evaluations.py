"""``/evaluations``: the evaluations of ``areal eval``; the prompts of one beside those of another; samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from areal.dataclasses import dataclass
from areal.dataset.examples import prompt_digest
from areal.errors import ArealError, NotFound
from areal.files import parse_json, size_of, stamp
from areal.rollout.evaluation import PromptScores, compare, prompt_keys
from areal.rollout.evaluation_files import JOB, RUN, SUMMARY, EvaluationFiles, evaluations_folder, find_evaluation
from areal.trajectories.record import Episode
from areal.trajectories.steps import GroupSummary, StepSummary, read_step
from areal.trajectories.view import TokenDecoder
from areal.ui.jobs import FileMemo, decoder_named, decoder_of, job_of
from areal.ui.samples import group_row, side_by_side
from areal.ui.views import Marks, ViewContext, cursor_of

_MOST = 5000  # prompts in one answer
_SHOWN = ("changed", "worse", "better", "all")

_documents: FileMemo[dict[str, object]] = FileMemo(lambda path: parse_json(path.read_bytes()), 512)
_samples: FileMemo[dict[tuple[str, str], _Samples]] = FileMemo(lambda path: {}, 4)  # by tokenizer and prompt field


@dataclass(frozen=True)
class _Samples:
    """The samples of an evaluation by prompt, in the order of the data set, and the key of each prompt's number."""

    summary: StepSummary
    keys: Mapping[int, str]

    @property
    def prompts(self) -> list[GroupSummary]:
        return sorted(self.summary.groups, key=_number)

    @property
    def by_key(self) -> dict[str, GroupSummary]:
        return {self.keys[_number(group)]: group for group in self.summary.groups}

    def scores(self) -> list[PromptScores]:
        rewarded = (group for group in self.prompts if group.rewards)
        return [PromptScores(self.keys[_number(each)], _number(each), tuple(each.rewards)) for each in rewarded]


def read(view: ViewContext) -> dict[str, object]:
    """Without ``name`` the evaluations of the home. ``against``: another evaluation  [default: the baseline of the
    command, if it had one]; ``show``: the prompts that are ``changed``, ``worse`` or ``better`` than there, or ``all``;
    ``prompt``: the samples of one, by its number in the data set."""
    if not view.query.get("name"):
        return {"evaluations": [_row(folder) for folder in _folders(view)]}
    folder = evaluations_folder(view.home) / view.name()
    if not (folder / SUMMARY).is_file() and not (folder / RUN).is_file():
        raise NotFound(f"there is no evaluation {folder}", hint="esc goes to the evaluations of this home")
    own = EvaluationFiles(view.name(), folder, _document(folder / RUN) | _document(folder / SUMMARY))
    samples = _samples_of(view, own)
    other, problem = _other(view, own)
    before = _samples_of(view, other) if other is not None else None
    confidence = float(own.summary.get("confidence", 0.95))
    pairs = (samples.scores(), before.scores()) if before is not None else None
    comparison = compare(*pairs, _threshold(own), confidence) if pairs is not None else None
    changes = comparison.changes if comparison is not None else ()
    wanted = view.query.get("show") or ("changed" if before is not None else "all")
    rows = [row for row in _prompts(own, samples, before) if row.is_shown(wanted)]
    document = _row(folder) | {
        "folder": str(folder),
        "against": other.name if other is not None else None,
        "againstProblem": problem,
        "choices": [each.name for each in _folders(view) if each != folder and (each / SUMMARY).is_file()],
        "difference": _estimates(comparison.document()) if comparison is not None else [],
        "isDropped": comparison is not None and comparison.dropped,
        "better": sum(each.after > each.before for each in changes),
        "worse": sum(each.after < each.before for each in changes),
        "both": comparison.reward.prompts if comparison is not None else 0,
        "show": wanted,
        "damaged": list(samples.summary.damaged),
        "decoded": _decoder(view, own) is not None,
    }
    if view.query.get("prompt"):
        return document | _prompt(view, own, samples, other, before, [row.prompt for row in rows])
    return document | {"prompts": [row._asdict() for row in rows[:_MOST]], "leftOut": max(0, len(rows) - _MOST)}


def count_of(view: ViewContext, job: str) -> int:
    """Return the evaluations of a job's weights."""
    matches = (JOB.fullmatch(str(_row(folder)["target"])) for folder in _folders(view))
    return sum(match is not None and match["name"] == job for match in matches)


def marks(view: ViewContext) -> Marks:
    """Return the size of a file that grows counts by an eighth: it is read again as a whole."""
    folders = _folders(view)
    stamps = ((folder.name, stamp(folder / name)) for folder in folders for name in (SUMMARY, RUN))
    found: dict[str, int | str] = {"files": cursor_of(stamps)}
    if name := view.query.get("name"):
        size = size_of(EvaluationFiles(name, evaluations_folder(view.home) / name, {}).samples)
        found["samples"] = size >> max(0, size.bit_length() - 4) | size.bit_length() << 8
    return found


def _folders(view: ViewContext) -> list[Path]:
    """Return the newest first."""
    folders = [path for path in evaluations_folder(view.home).glob("*/") if (path / RUN).is_file()]
    return sorted(folders, key=lambda path: (path / RUN).stat().st_mtime, reverse=True)


def _document(path: Path) -> dict[str, Any]:
    """Return the content of a file, empty if there is no file. Raises ArealError for a damaged one."""
    if not path.is_file():
        return {}
    try:
        found = _documents.get(path)
    except (OSError, ValueError) as error:
        raise ArealError(f"{path} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}


def _row(folder: Path) -> dict[str, object]:
    run: dict[str, Any] = {}
    try:
        run = _document(folder / RUN)
        found, problem = _document(folder / SUMMARY), ""
    except ArealError as error:
        found, problem = {}, error.message
    compared = found.get("comparison") or {}
    return {
        "name": folder.name,
        "problem": problem,
        "isFinished": bool(found),
        "at": (folder / (SUMMARY if found else RUN)).stat().st_mtime,
        "target": found.get("target", run.get("target")),
        "dataset": (found.get("dataset") or {}).get("source"),
        "samples": found.get("samples"),
        "threshold": found.get("pass_threshold"),
        "confidence": found.get("confidence"),
        "done": found.get("done"),
        "planned": found.get("planned"),
        "failures": found.get("failures") or {},
        "truncated": found.get("truncated"),
        "tokens": (found.get("answer_tokens") or {}).get("mean"),
        "scores": _estimates(found.get("scores") or {}),
        "baseline": compared.get("baseline"),
        "change": (compared.get("reward") or {}).get("value"),
        "dropped": bool(compared.get("dropped")),
    }


def _estimates(document: Mapping[str, object]) -> list[dict[str, object]]:
    return [{"name": name, **each} for name, each in document.items() if isinstance(each, Mapping)]


def _other(view: ViewContext, own: EvaluationFiles) -> tuple[EvaluationFiles | None, str]:
    """Return what ``own`` is compared with, and why it cannot be. A path is only taken from the command's record."""
    recorded = own.summary.get("comparison") or {}
    name = view.query.get("against") or recorded.get("baseline")
    if not name or view.query.get("against") == "none":
        return None, ""
    try:
        if name == recorded.get("baseline"):
            found = find_evaluation(view.home, name if JOB.fullmatch(name) else recorded.get("baseline_path") or name)
            return found._replace(name=name), ""
        if name not in {each.name for each in _folders(view)}:
            raise NotFound(f"this home has no evaluation {name[:200]!r}")
        return find_evaluation(view.home, str(evaluations_folder(view.home) / name))._replace(name=name), ""
    except ArealError as error:
        return None, f"{name[:200]}: {error.message}"


def _samples_of(view: ViewContext, files: EvaluationFiles) -> _Samples:
    """Return the samples within the limits of the run, which its folder may have more of."""
    path = files.samples
    if not path.is_file():
        return _Samples(StepSummary((), (), 0), {})
    decoder = _decoder(view, files)
    field = files.summary.get("prompt_field")
    known = _samples.get(path)
    key = (decoder.source if decoder is not None else "", str(field))
    if key not in known:
        digests: dict[int, str] = {}

        def prompt_of(episode: Episode) -> str:
            if episode.prompt not in digests:
                digests[episode.prompt] = prompt_digest(episode.example, field)
            return str(episode.prompt)

        known[key] = _Samples(read_step(path, decoder, prompt_of), prompt_keys(digests))
    return known[key]


def _number(group: GroupSummary) -> int:
    return int(group.name)


def _decoder(view: ViewContext, files: EvaluationFiles) -> TokenDecoder | None:
    target = str(files.summary.get("target") or files.name)
    if match := JOB.fullmatch(target):
        try:
            return decoder_of(view.home, job_of(view.home, match["name"]))
        except NotFound:
            return None
    return decoder_named(view.home, target.rpartition("/")[2])


def _threshold(own: EvaluationFiles) -> float:
    return float(own.summary.get("pass_threshold", 1.0))


class _PromptRow(NamedTuple):
    """A prompt in both evaluations. ``change``: of its mean reward, None if one of them has none."""

    prompt: int
    question: str
    now: dict[str, object]
    before: dict[str, object] | None
    change: float | None

    def is_shown(self, wanted: str) -> bool:
        if wanted not in _SHOWN or wanted == "all":
            return True
        change = self.change or 0.0
        return change != 0 and (wanted == "changed" or (change > 0) == (wanted == "better"))


def _prompts(own: EvaluationFiles, samples: _Samples, before: _Samples | None) -> Iterator[_PromptRow]:
    old, threshold = before.by_key if before is not None else {}, _threshold(own)
    for group in samples.prompts:
        now, then, change = _side(group, threshold), None, None
        if (earlier := old.get(samples.keys[_number(group)])) is not None:
            then = _side(earlier, threshold)
            if group.mean is not None and earlier.mean is not None:
                change = group.mean - earlier.mean
        yield _PromptRow(_number(group), group.samples[0].question, now, then, change)


def _side(group: GroupSummary, threshold: float) -> dict[str, object]:
    rewards = group.rewards
    answers: Sequence[str] = list(dict.fromkeys(each.hint for each in group.samples))
    return {
        "rewards": rewards,
        "mean": group.mean,
        "passes": sum(reward >= threshold for reward in rewards),
        "answers": answers[:4],
    }


def _prompt(
    view: ViewContext,
    own: EvaluationFiles,
    samples: _Samples,
    other: EvaluationFiles | None,
    before: _Samples | None,
    shown: Sequence[int],
) -> dict[str, object]:
    """``previous`` and ``next``: of the prompts that are shown."""
    number = view.number("prompt", 0)
    group = next((each for each in samples.summary.groups if _number(each) == number), None)
    if group is None:
        raise NotFound(f"evaluation {own.name} has no sample of prompt {number}", hint="esc goes to its prompts")
    sides = [_with_tokens(view, own, group)]
    earlier = before.by_key.get(samples.keys[number]) if before is not None else None
    if other is not None and earlier is not None:
        sides.append(_with_tokens(view, other, earlier))
    return {
        "prompt": number,
        "sides": sides,
        "previous": max((each for each in shown if each < number), default=None),
        "next": min((each for each in shown if each > number), default=None),
    }


def _with_tokens(view: ViewContext, files: EvaluationFiles, group: GroupSummary) -> dict[str, object]:
    samples = sorted(group.samples, key=lambda each: each.sample)
    shown = side_by_side(files.samples, samples, _decoder(view, files))
    return {"name": files.name, "group": group_row(group), **shown}
