"""The home, the folder of all state: ``$AREAL_HOME`` (default ``~/.areal``), private to its owner.

Building paths touches nothing; only ``ensure`` creates folders, and only mutating commands call it. Kind and name are
checked where a path is built, so that no name can leave the folder that it names.
"""

from __future__ import annotations

import base64
import contextlib
import os
from pathlib import Path

from areal.dataclasses import dataclass
from areal.errors import ArealError, NotFound
from areal.files import sync_folder
from areal.resources.kinds import INFERENCE_SERVICE, KINDS, Ref, check_name
from areal.state.files import explain, make_folder, write_new

VARIABLE = "AREAL_HOME"
_ELSEWHERE = "choose another home with --home DIR or AREAL_HOME=DIR"


class _HomePath:
    """A folder or file of the home, by its name; made once."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __set_name__(self, owner: type[Home], attribute: str) -> None:
        self._attribute = attribute

    def __get__(self, home: Home, owner: type[Home]) -> Path:
        path = vars(home)[self._attribute] = home.root / self._name
        return path


@dataclass(frozen=True)
class Home:
    """The layout of the folder."""

    root: Path
    objects = _HomePath("objects")
    runs = _HomePath("runs")
    journal = _HomePath("journal")
    locks = _HomePath("locks")
    credentials = _HomePath("credentials")
    jobs = _HomePath("jobs")
    data = _HomePath("data")  # data/<model>: records of the data proxies of a Model
    sessions = _HomePath("sessions")  # sessions/<agent service>: its conversations
    config = _HomePath("config.yaml")
    current_sessions = _HomePath("current-sessions.json")  # of agent services, by name or URL

    @classmethod
    def resolve(cls, flag: str | None = None) -> Home:
        """Return the home: ``--home``, or else ``$AREAL_HOME``, or else ``~/.areal``, made absolute. Symbolic links are
        kept as written, except in a path with ``..``: a folder on the way to the home may be removed while the home
        stays."""
        chosen = flag or os.environ.get(VARIABLE) or "~/.areal"
        if "\0" in chosen:
            raise ArealError("the path of the home contains a zero byte", hint=_ELSEWHERE)
        try:
            path = Path(chosen).expanduser()
            return cls(path.resolve() if ".." in path.parts else path.absolute())
        except (RuntimeError, OSError) as error:  # no such user; the working folder is gone
            raise ArealError(f"cannot tell which folder {chosen} is: {error}", hint=_ELSEWHERE) from error

    @property
    def folders(self) -> tuple[Path, ...]:
        return self.objects, self.runs, self.journal, self.locks, self.credentials, self.jobs, self.data, self.sessions

    def job_metrics(self, name: str) -> Path:
        """Return the metrics file of the job called ``name``, which has one line per step."""
        return self.jobs / name / "metrics.jsonl"

    def object_folder(self, ref: Ref, *below: str) -> Path:
        """``objects/<kind>/<name>``, or a path below it. Raises UsageFault for a malformed name, NotFound for a kind
        that does not exist."""
        if ref.kind not in KINDS:
            raise NotFound(f'unknown kind "{ref.kind}"', hint=f"kinds: {', '.join(KINDS)}")
        return Path("/".join((str(self.objects), ref.kind.lower(), check_name(ref.name), *below)))  # one parse

    def ensure(self) -> Home:
        """Create missing folders (mode 0700). Raises ArealError with the path that fails, and why."""
        try:
            for folder in (self.root, *self.folders):
                make_folder(folder)
        except OSError as error:
            culprit = next((path for path in (self.root, *self.folders) if path.exists() and not path.is_dir()), None)
            if culprit is None:
                raise ArealError(explain(error, self.root, "use").message, hint=_ELSEWHERE) from error
            raise ArealError(f"cannot use {self.root} as a home: {culprit} is not a folder", hint=_ELSEWHERE) from error
        if closed := self.closed():
            raise ArealError(f"cannot use {closed}", hint=_ELSEWHERE)
        return self

    def closed(self) -> str:
        """Return which existing folder cannot be written, and by whom, or ""."""
        for folder in (self.root, *self.folders):
            if folder.exists() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                return f"{folder}: it cannot be written by uid {os.geteuid()} (permissions, or a read-only file system)"
        return ""


_KEY_BYTES = 32


def admin_key_path(home: Home, service: str, kind: str = INFERENCE_SERVICE) -> Path:
    """Return the path of a service's admin key, whether it exists or not. No name has a dot: services of two kinds with
    one name have two keys."""
    name = check_name(service)
    return home.credentials / (name if kind == INFERENCE_SERVICE else f"{kind.lower()}.{name}")


def ensure_admin_key(home: Home, service: str, kind: str = INFERENCE_SERVICE) -> Path:
    """Return the path of the service's key, which is generated the first time. Two concurrent commands get the same
    key."""
    path = admin_key_path(home, service, kind)
    if not path.exists():
        _create_key(path, base64.urlsafe_b64encode(os.urandom(_KEY_BYTES)).rstrip(b"=") + b"\n")
    read_key(path, hint=f"remove it to have a new key generated: rm {path}")
    return path


def read_key(path: Path | str, *, hint: str | None = None) -> str:
    """Return the key in a file. Raises ArealError when it cannot be read or is empty; ``hint``: what to do about it
    then."""
    try:
        key = Path(path).expanduser().read_text("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ArealError(f"{path} does not hold a key: it is not text", hint=hint) from error
    except OSError as error:
        raise explain(error, path, "read the key in") from error
    if not key:
        raise ArealError(f"{path} holds no key: it is empty", hint=hint)
    if not key.isprintable():
        raise ArealError(f"{path} does not hold a key: it is not text", hint=hint)
    return key


def forget_admin_key(home: Home, service: str, kind: str = INFERENCE_SERVICE) -> None:
    """Remove the service's key, if it exists."""
    path = admin_key_path(home, service, kind)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise explain(error, path, "remove") from error


def _create_key(path: Path, content: bytes) -> None:
    """Write and link into place: unlike a rename, a link never replaces the key that another command made first."""
    temp = path.with_name(f".{path.name}.tmp-{os.getpid()}-{os.urandom(4).hex()}")
    try:
        try:
            write_new(temp, content, 0o600)
            with contextlib.suppress(FileExistsError):
                os.link(temp, path)
        finally:
            temp.unlink(missing_ok=True)
        sync_folder(path.parent)
    except OSError as error:
        raise explain(error, path, "write") from error
