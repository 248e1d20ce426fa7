"""Where evaluations are stored: the folders of ``areal eval``, and the validations of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from areal.errors import NotFound
from areal.files import parse_json
from areal.resources.kinds import name_problem
from areal.state.files import NEWER, UnreadableFile
from areal.state.home import Home
from areal.trajectories.reading import JSONL, TRAJECTORIES
from areal.trajectories.steps import step_files

JOB = re.compile(r"(?:trainjobs?|train|job)/(?P<name>[^/@]+)(?:@(?P<step>\d{1,12}))?", re.IGNORECASE)
RUN, SUMMARY = "run.json", "summary.json"
FORMAT = 1  # of run.json, and of the folder that it describes


class EvaluationFiles(NamedTuple):
    """An evaluation on disk. ``name``: as the user wrote it. ``path``: the folder of an evaluation, or the file of a
    job's validation, which has no ``summary``."""

    name: str
    path: Path
    summary: Mapping[str, Any]

    @property
    def samples(self) -> Path:
        """The file with its episodes."""
        return self.path / f"{TRAJECTORIES}{JSONL}" if self.path.suffix != JSONL else self.path


def evaluations_folder(home: Home) -> Path:
    return home.root / "evaluations"


def find_evaluation(home: Home, text: str) -> EvaluationFiles:
    """Return the finished evaluation of this name, folder, or ``trainjob/NAME[@STEP]``. Raises NotFound."""
    if match := JOB.fullmatch(text):
        return _validation(home, text, match["name"], match["step"])
    folder = Path(text).expanduser()
    if name_problem(text) is None and not folder.exists():
        folder = evaluations_folder(home) / text
    folder = folder.parent if folder.name == SUMMARY else folder
    if not (folder / SUMMARY).is_file():
        known = sorted(each.parent.name for each in evaluations_folder(home).glob(f"*/{SUMMARY}"))
        raise NotFound(
            f"there is no finished evaluation in {folder}",
            hint=f"evaluations of this home: {', '.join(known)}" if known else "evaluate the baseline first",
        )
    if (folder / RUN).exists():
        read_settings(folder)
    return EvaluationFiles(text, folder.absolute(), _document(folder / SUMMARY))


def read_settings(folder: Path) -> dict[str, Any]:
    """Return ``run.json`` of a collection's folder. Raises UnreadableFile, also for a file of a newer version."""
    settings = _document(folder / RUN)
    found = settings.get("format")
    if type(found) is not int or not isinstance(settings.get("run_id"), str):
        reason = "it does not describe a collection"
        raise UnreadableFile(folder / RUN, reason, damaged=False, hint="choose another folder")
    if found > FORMAT:
        reason = f"{NEWER} (format {found}, this one knows {FORMAT})"
        raise UnreadableFile(folder / RUN, reason, damaged=False, hint="upgrade areal, or choose another folder")
    return settings


def _document(path: Path) -> dict[str, object]:
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UnreadableFile(path, str(error), damaged=False, hint="choose another folder") from error
    if not isinstance(found, dict):
        raise UnreadableFile(path, "it is not a JSON object", damaged=False, hint="choose another folder")
    return found


def _validation(home: Home, text: str, job: str, step: str | None) -> EvaluationFiles:
    """Return the job's validation after a step; without a step, the last one."""
    folder = home.jobs / job / "trajectories"
    found = {each.step: each.name for each in step_files(folder) if each.is_eval}
    chosen = int(step) if step is not None else max(found, default=-1)
    if chosen not in found:
        listed = ", ".join(map(str, found)) or "none"
        raise NotFound(f"trainjob/{job} has no evaluation after step {step or 'any'}; there are: {listed}")
    return EvaluationFiles(text, folder / found[chosen], {})
