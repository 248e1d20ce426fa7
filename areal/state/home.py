"""Where areal keeps what it knows: one folder, ``$AREAL_HOME`` (default ``~/.areal``), private to its owner.

Building paths touches nothing; only ``ensure`` creates folders, and only mutating commands call it. Kind and name are
checked where a path is built, so that no name can leave the folder that it names.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from areal.errors import ArealError, NotFound
from areal.resources.kinds import KINDS, Ref, check_name
from areal.state.files import explain, make_folder

VARIABLE = "AREAL_HOME"
_ELSEWHERE = "choose another home with --home DIR or AREAL_HOME=DIR"


@dataclass(frozen=True)
class Home:
    """The layout of the folder; see the design for what each part holds."""

    root: Path

    @classmethod
    def resolve(cls, flag: str | None = None) -> Home:
        """``--home``, else ``$AREAL_HOME``, else ``~/.areal``, made absolute; symbolic links are kept as written."""
        chosen = flag or os.environ.get(VARIABLE) or "~/.areal"
        if "\0" in chosen:
            raise ArealError("the path of the home contains a zero byte", hint=_ELSEWHERE)
        try:
            return cls(Path(chosen).expanduser().absolute())
        except (RuntimeError, OSError) as error:  # no such user; the working folder is gone
            raise ArealError(f"cannot tell which folder {chosen} is: {error}", hint=_ELSEWHERE) from error

    @property
    def objects(self) -> Path:
        return self.root / "objects"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    @property
    def credentials(self) -> Path:
        return self.root / "credentials"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    def job_metrics(self, name: str) -> Path:
        """A line a step of the job called ``name``."""
        return self.jobs / name / "metrics.jsonl"

    @property
    def data(self) -> Path:
        """``data/<model>``: what the data proxies of a Model record."""
        return self.root / "data"

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.objects, self.runs, self.journal, self.locks, self.credentials, self.jobs, self.data)

    def object_folder(self, ref: Ref) -> Path:
        """``objects/<kind>/<name>``. Raises UsageFault or NotFound for what is no kind or no name."""
        if ref.kind not in KINDS:
            raise NotFound(f'unknown kind "{ref.kind}"', hint=f"kinds: {', '.join(KINDS)}")
        return self.objects / ref.kind.lower() / check_name(ref.name)

    def ensure(self) -> Home:
        """Create what is missing (mode 0700). Raises ArealError naming the path and why it cannot serve as a home."""
        try:
            for folder in (self.root, *self.folders):
                make_folder(folder)
        except OSError as error:
            raise self._unusable(error) from error
        for folder in (self.root, *self.folders):
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                who = f"uid {os.geteuid()} (permissions, or a read-only file system)"
                raise ArealError(f"cannot use {folder}: it cannot be written by {who}", hint=_ELSEWHERE)
        return self

    def _unusable(self, error: OSError) -> ArealError:
        culprit = next((path for path in (self.root, *self.folders) if path.exists() and not path.is_dir()), None)
        if culprit is not None:
            return ArealError(f"cannot use {self.root} as a home: {culprit} is not a folder", hint=_ELSEWHERE)
        told = explain(error, self.root, "use")
        return ArealError(told.message, hint=_ELSEWHERE)
