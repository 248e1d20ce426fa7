"""Small durable files: replaced whole or not at all, and checked when read; written together by several threads.

A write is temp + fsync + rename + fsync of the folder: a reader, or a crash at any instant, sees the old bytes or the
new ones. When the disk refuses, the old file stays as it was, the temp is removed and the error names path and cause.
A *sealed* file is a JSON document that carries the SHA-256 of its own body, so that a torn or edited file differs from
a good one: reading it raises ``UnreadableFile``. Absence is FileNotFoundError; the two are never confused. Only
mutating commands move a damaged file aside (``quarantine``); nothing here deletes one.

``crash_point`` names the points at which fault-injection tests end the process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Event, Lock
from typing import Any, Generic, TypeVar

from areal.dataclasses import dataclass, field
from areal.errors import ArealError, InvalidManifest, UsageFault
from areal.files import parse_json, read_bytes, sync_folder, write_all

VARIABLE = "AREAL_CRASH_AT"

CRASH_POINTS: tuple[str, ...] = (
    # areal.state: one small file
    "write-before",
    "write-synced",
    "write-after",
    # areal.state: removing an object
    "delete-before",
    "delete-after",
    # areal.state: the journal
    "journal-open-before",
    "journal-open-after",
    "journal-append-before",
    "journal-append-after",
    "journal-commit-before",
    "journal-commit-after",
    # areal.runtime: one process
    "intent-before",
    "intent-after",
    "lease-after",
    "fork-after",
    "pid-after",
    "go-after",
    "ack-after",
    "stop-before",
    "stop-signalled",
    "stop-after",
    "forget-before",
    "forget-after",
)

_WANTED = re.compile(r"(?P<name>[a-z-]+)(?::(?P<at>[1-9]\d*))?")
_passed: dict[str, int] = {}
_lock = Lock()


def crash_point(name: str) -> None:
    """Die here if the environment says so. Raises UsageFault when it names no registered point."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    match = _WANTED.fullmatch(wanted)
    if match is None or match["name"] not in ("any", *CRASH_POINTS):
        raise UsageFault(f'{VARIABLE}="{wanted}" names no crash point', hint=f"one of: any, {', '.join(CRASH_POINTS)}")
    target, at = match["name"], int(match["at"] or "1")
    if name not in CRASH_POINTS:
        raise ValueError(f'"{name}" is not registered in CRASH_POINTS')
    if target not in ("any", name):
        return
    with _lock:
        _passed[target] = _passed.get(target, 0) + 1
        if _passed[target] == at:
            os._exit(137)


QUARANTINED = ".quarantined-"
_TEMP = ".tmp-"

_HEAD = b'{"sha256": "'
_JOINT = b'",\n"body": '
_TAIL = b"}\n"
_DIGEST_END = len(_HEAD) + 64
_BODY = _DIGEST_END + len(_JOINT)

_CAUSES = {
    errno.ENOSPC: ("the disk is full", "free some space, or use another home: --home DIR"),
    errno.EDQUOT: ("your disk quota is used up", "free some space, or use another home: --home DIR"),
    errno.EFBIG: ("the file size limit was reached (ulimit -f)", "raise the limit: ulimit -f unlimited"),
    errno.EROFS: ("the file system is read-only", "use a home that can be written: --home DIR or AREAL_HOME"),
    errno.EACCES: ("permission denied", "use a home of your own: --home DIR or AREAL_HOME"),
    errno.EPERM: ("permission denied", "use a home of your own: --home DIR or AREAL_HOME"),
    errno.ENOTDIR: ("a file stands where a folder is needed", "use another home: --home DIR or AREAL_HOME"),
    errno.EEXIST: ("a file stands where a folder is needed", "use another home: --home DIR or AREAL_HOME"),
    errno.EMFILE: ("too many open files", "raise the limit: ulimit -n 65536"),
}


NEWER = "a newer areal wrote it"  # the beginning of the reason for a file that must not be changed here


def remedy(reason: str) -> str:
    """Return the next step for an object whose file is unreadable for ``reason``."""
    return "upgrade areal" if reason.startswith(NEWER) else "areal doctor --fix restores it from its newest revision"


class UnreadableFile(ArealError):
    """A file exists but cannot be used. ``damaged``: its content is wrong, so it may be quarantined and restored;
    otherwise (permissions, I/O, a newer format) it must be left alone."""

    exit_code = InvalidManifest.exit_code

    def __init__(self, path: Path | str, reason: str, *, damaged: bool, hint: str | None = None) -> None:
        repair = "areal doctor --fix sets it aside and restores the newest revision"
        super().__init__(f"{path} is unreadable: {reason}", hint=hint or (repair if damaged else None))
        self.path = Path(path)
        self.reason = reason
        self.damaged = damaged


def explain(error: OSError, path: Path | str, doing: str) -> ArealError:
    """Return an ``OSError`` as an error for a user: the attempt, its path, the cause, and the next step."""
    cause, hint = _CAUSES.get(error.errno or 0, ((error.strerror or str(error)).lower(), "areal doctor"))
    return ArealError(f"cannot {doing} {path}: {cause}", hint=hint)


def write_atomic(path: Path, data: bytes | str, mode: int = 0o600) -> None:
    """Replace ``path`` by ``data``, creating missing folders. Raises ArealError and leaves ``path`` as it was."""
    content = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    write_together([(path, content)], mode)


def write_together(files: Sequence[tuple[Path, bytes]], mode: int = 0o600) -> None:
    """Replace each file by its content, all of them durable on return. Each file is replaced whole or not at all; after
    a failure (ArealError) or a crash, any number of them have been replaced. Writing them together is faster, because a
    sync also commits what was written before it. Many files are made durable by a sync of their whole file system, if
    that reports failures."""
    crash_point("write-before")
    temps: list[tuple[Path, Path]] = []
    path = files[0][0]
    sync_all = _whole_sync(path.parent) if len(files) >= _MANY else None
    sync = sync_all is None
    try:
        try:
            for path, content in files:
                if path.exists() and not path.is_file():  # a device must not be replaced
                    raise OSError(errno.EINVAL, "it is not a regular file")
                temps.append((path, path.with_name(f".{path.name}{_TEMP}{os.getpid()}-{os.urandom(4).hex()}")))
                write_new(temps[-1][1], content, mode, sync=sync)
            folders = dict.fromkeys(path.parent for path, _ in temps)
            if sync_all is not None:
                sync_all(folders)
            crash_point("write-synced")
            for path, temp in temps:
                temp.replace(path)
        except BaseException:
            for _, temp in temps:
                with contextlib.suppress(OSError):
                    temp.unlink()
            raise
        if sync_all is not None:
            sync_all(folders)
        else:
            for folder in folders:
                sync_folder(folder)
    except OSError as error:
        raise explain(error, path, "write") from error
    crash_point("write-after")


_MANY = 32
_WHOLE_SYNCS = frozenset({0xEF53, 0x58465342, 0x9123683E})  # ext2 to ext4, XFS, Btrfs
_REPORTS_FAILURES = (5, 8)  # the Linux since which syncfs(2) does


def _whole_sync(folder: Path) -> Callable[[Iterable[Path]], None] | None:
    """Return a function that syncs the file systems of folders as a whole, or None if each file needs its own
    ``fsync``."""
    import ctypes
    import platform

    release = re.match(r"(\d+)\.(\d+)", platform.release())
    libc = ctypes.CDLL(None, use_errno=True)
    if release is None or tuple(map(int, release.groups())) < _REPORTS_FAILURES or not hasattr(libc, "syncfs"):
        return None
    while not folder.exists():
        folder = folder.parent
    status = ctypes.create_string_buffer(512)  # a struct statfs begins with the number of the file system's type
    if libc.statfs(os.fsencode(folder), status) or ctypes.c_long.from_buffer(status).value not in _WHOLE_SYNCS:
        return None

    def sync(folders: Iterable[Path]) -> None:
        by_device = {each.stat().st_dev: each for each in folders}
        for each in by_device.values():
            fd = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if libc.syncfs(fd):
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(each))
            finally:
                os.close(fd)

    return sync


def make_folder(path: Path, *, sync: bool = True) -> None:
    """Create a folder and its parents with mode 0700, each new entry made durable. Raises OSError."""
    if path.is_dir():
        return
    if not path.parent.is_dir():
        make_folder(path.parent, sync=sync)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if sync:
        sync_folder(path.parent)


def names_in(folder: Path | str) -> list[str]:
    """Return the names in a folder, sorted; none when there is no such folder. Raises ArealError when it cannot be
    listed."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise explain(error, folder, "list") from error


def seal(body: Any) -> bytes:
    """``body`` as a document that carries its own checksum. Plain JSON values only."""
    text = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return _HEAD + hashlib.sha256(text).hexdigest().encode() + _JOINT + text + _TAIL


def unseal(raw: bytes) -> Any:
    """Return the body of a sealed document. Raises ValueError naming the damage."""
    if not raw.strip(b"\0\n\t "):
        raise ValueError("it is empty")
    if not raw.startswith(_HEAD) or raw[_DIGEST_END:_BODY] != _JOINT:
        raise ValueError("it does not begin as one of areal's files")
    if not raw.endswith(_TAIL):
        raise ValueError("its end is missing (torn write)")
    text = raw[_BODY : -len(_TAIL)]
    if hashlib.sha256(text).hexdigest().encode() != raw[len(_HEAD) : _DIGEST_END]:
        raise ValueError("its checksum does not match its content (damaged, or edited by hand)")
    return parse_json(text.decode("utf-8", "surrogatepass"))


def read_raw(path: Path | str) -> bytes:
    """Return all bytes of a file. Raises FileNotFoundError when there is none, UnreadableFile when it cannot be
    read."""
    try:
        return read_bytes(os.fspath(path))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None
    except OSError as error:
        cause, hint = _CAUSES.get(error.errno or 0, ((error.strerror or str(error)).lower(), None))
        raise UnreadableFile(path, cause, damaged=False, hint=hint) from error


def read_json(path: Path | str) -> Any:
    """Return the body of a sealed file. Raises FileNotFoundError if there is none, UnreadableFile if it cannot be
    trusted."""
    raw = read_raw(path)
    try:
        return unseal(raw)
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(path, str(error), damaged=True) from error


def write_json(path: Path, body: Any, mode: int = 0o600) -> None:
    """Seal ``body`` and replace ``path`` by it, see ``write_atomic``."""
    write_atomic(path, seal(body), mode)


def quarantine(path: Path) -> Path:
    """Move a damaged file aside, in the same folder, and return its new path. Raises ArealError."""
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    target = path.with_name(f"{path.name}{QUARANTINED}{stamp}")
    attempt = 1
    while target.exists():
        attempt += 1
        target = path.with_name(f"{path.name}{QUARANTINED}{stamp}-{attempt}")
    try:
        path.rename(target)
        sync_folder(path.parent)
    except OSError as error:
        raise explain(error, path, "set aside") from error
    return target


def quarantined(path: Path | str) -> list[str]:
    """Return the names under which copies of ``path`` were set aside, oldest first."""
    folder, name = os.path.split(path)
    return [entry for entry in names_in(folder) if entry.startswith(f"{name}{QUARANTINED}")]


def is_temp(name: str) -> bool:
    """Return whether a file of this name is an unfinished write, whose content must be ignored."""
    return name.startswith(".") and _TEMP in name


def write_new(temp: Path, content: bytes, mode: int, *, sync: bool = True) -> None:
    """Write a file that does not exist yet, creating missing folders. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(temp, flags, mode)
    except FileNotFoundError:
        make_folder(temp.parent, sync=sync)
        fd = os.open(temp, flags, mode)
    try:
        write_all(fd, content)
        if sync:
            os.fsync(fd)
    finally:
        os.close(fd)


# Group commit: the first thread commits its own item, then whatever has queued up meanwhile as one batch, until the
# queue is empty. A caller returns when its own item is durable. If a batch fails, its items are tried again one by one,
# so that each caller gets its own failure; ``commit`` must therefore be repeatable.

T = TypeVar("T")


@dataclass
class _Commit(Generic[T]):
    item: T
    ended: Event = field(default_factory=Event)
    error: BaseException | None = None


class GroupCommit(Generic[T]):
    """Group commit. ``commit`` makes a batch durable, in the order in which its items arrived, and is never called by
    two threads at once."""

    def __init__(self, commit: Callable[[Sequence[T]], None]) -> None:
        self._commit = commit
        self._queue: list[_Commit[T]] = []
        self._is_leading = False
        self._mutex = Lock()

    def submit(self, item: T) -> None:
        """Return when ``item`` is durable. Raises the error that ``commit`` raised for it."""
        entry = _Commit(item)
        with self._mutex:
            self._queue.append(entry)
            leads, self._is_leading = not self._is_leading, True
        while leads:
            with self._mutex:
                batch, self._queue = self._queue, []
                leads = self._is_leading = bool(batch)
            if batch:
                self._end(batch)
        entry.ended.wait()
        if entry.error is not None:
            raise entry.error

    def _end(self, batch: list[_Commit[T]]) -> None:
        try:
            self._commit([entry.item for entry in batch])
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
            if len(batch) > 1:
                for entry in batch:
                    self._end([entry])
                return
            batch[0].error = error
        for entry in batch:
            entry.ended.set()
