"""Locks held by the kernel: one ``flock``ed file an object, freed when its holder dies, however it dies.

The lock is the descriptor; the file is only its name, and the readable *holder* in it is for people. Taking a lock
therefore changes nothing on disk once its file is there, and a command announces itself (``Held.announce``) only when
it has planned something to do: in the file of its first lock, for all of them, so that an apply of a thousand objects
does not write and empty a thousand files. The holder of an unannounced lock is read from /proc/locks.

Locks are taken in one order (sorted by reference), so two commands can never wait for each other. A lock file may be
removed while it is held, so whoever gets a lock checks that the name still leads to the file that was locked.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from areal.dataclasses import asdict, dataclass
from areal.errors import Locked
from areal.files import lock_named, parse_json, try_lock, write_all
from areal.resources.kinds import Ref, check_name
from areal.state.files import explain
from areal.state.home import Home

# ``flock`` belongs to the open file: it is freed when the last descriptor closes, so by any death of its owner.
# Descriptors are close-on-exec: a child that a command starts never keeps the command's locks.

_POLL_S = (0.01, 0.2)  # the pause between attempts grows from the first value to the second


def acquire(path: Path, timeout_s: float, pause: Callable[[float], object] = time.sleep) -> int | None:
    """Open ``path`` for appending, created if necessary, and lock it. Return the descriptor, or None if another process
    holds the lock for longer than ``timeout_s``. ``pause`` is called between attempts with the seconds to wait. Raises
    OSError."""

    def attempts() -> Iterator[None]:
        deadline = time.monotonic() + timeout_s
        wait, longest = _POLL_S
        yield
        while time.monotonic() < deadline:
            pause(wait)
            wait = min(wait * 2, longest)
            yield

    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return lock_named(path, lambda: os.open(path, flags, 0o600), attempts())


def flock_owner(path: Path) -> int:
    """Return the pid that holds an exclusive lock on ``path``; 0 when none can be seen (another host or pid
    namespace)."""
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        fields = line.split()
        if fields[1:2] == ["FLOCK"] and fields[3] == "WRITE" and fields[5].endswith(f":{inode}"):
            return max(int(fields[4]), 0)
    return 0


_STORE_TIMEOUT_S = 30.0
_SHARE_POLL_S = 0.01
_GRACE_S = 0.1  # a reader that looks up a lock's holder takes the lock for microseconds, which is not "locked"
HOUSEKEEPING = "areal.reconcilers.background"  # in the command of a background process, which ends by itself
_HOUSEKEEPING_S = 120.0


@dataclass(frozen=True)
class LockHolder:
    """The holder of a lock. ``pid`` is 0 and ``since`` None where the holder cannot be seen from here."""

    who: str
    host: str
    pid: int
    command: str
    since: float | None

    def __str__(self) -> str:
        if not self.pid:
            return "another process, which cannot be seen from here"
        since = time.strftime(", since %Y-%m-%d %H:%M:%S", time.localtime(self.since)) if self.since else ""
        return f"{self.who}@{self.host}, pid {self.pid}, running `{self.command}`{since}"


class Held:
    """The locks that a command holds."""

    def __init__(self, home: Home, command: str, wait: _Wait) -> None:
        self._home = home
        self._command = command
        self._wait = wait
        self._fds: dict[Ref, int] = {}
        self._announced: int | None = None  # the descriptor of the file that names the holder

    @property
    def refs(self) -> tuple[Ref, ...]:
        return tuple(self._fds)

    @property
    def waited(self) -> bool:
        """Whether another command held one of the locks."""
        return self._wait.waited_s > 0

    def announce(self) -> None:
        """Write the readable holder of all locks into the first one. For commands that will change something."""
        who, _, host = actor().partition("@")
        announced = asdict(LockHolder(who, host, os.getpid(), self._command, time.time()))
        body = json.dumps({**announced, "refs": [str(ref) for ref in self._fds]})
        for ref, fd in self._fds.items():
            try:
                if os.fstat(fd).st_size:  # of a holder that was killed
                    os.ftruncate(fd, 0)
                if self._announced is None:
                    self._announced = fd
                    write_all(fd, f"{body}\n".encode())
            except OSError as error:
                raise explain(error, lock_path(self._home, ref), "write") from error

    def _acquire(self, ref: Ref, timeout_s: float) -> None:
        """Acquire a lock. Housekeeping after a job is waited for whatever the timeout, since users do not know about
        it."""
        deadline = time.monotonic() + _HOUSEKEEPING_S
        while True:
            try:
                found = _acquire(
                    lock_path(self._home, ref),
                    timeout_s,
                    lambda: _refusal(str(ref), _described(self._home, ref)),
                    self._wait,
                )
            except Locked:
                by = holder(self._home, ref)
                if by is not None and (HOUSEKEEPING not in by.command or time.monotonic() > deadline):
                    raise
            else:
                self._fds[ref] = found
                return

    def _release(self) -> None:
        for ref, fd in reversed(self._fds.items()):
            with contextlib.suppress(OSError):
                if fd == self._announced:
                    os.ftruncate(fd, 0)
                if not self._home.object_folder(ref).exists():
                    lock_path(self._home, ref).unlink(missing_ok=True)
            os.close(fd)
        self._fds.clear()


class _Wait:
    """Options of waiting: an event that ends it, and a callback that gets the holder once."""

    def __init__(
        self, interrupted: threading.Event | None = None, on_wait: Callable[[str], None] | None = None
    ) -> None:
        self._interrupted = interrupted or threading.Event()
        self._on_wait = on_wait
        self.waited_s = 0.0

    def pause(self, seconds: float, refusal: Callable[[], Locked]) -> None:
        if self._interrupted.wait(seconds):
            raise KeyboardInterrupt
        self.waited_s += seconds
        if self._on_wait is not None and self.waited_s > _GRACE_S:
            self._on_wait(refusal().message)
            self._on_wait = None


def lock_path(home: Home, ref: Ref) -> Path:
    """Return the path of an object's lock file. Names have no dot, so no two objects share a lock file."""
    return Path(f"{home.locks}/{ref.kind.lower()}.{check_name(ref.name)}.lock")


@contextlib.contextmanager
def lock_objects(
    home: Home,
    refs: Iterable[Ref],
    timeout_s: float = 0,
    command: str | None = None,
    *,
    interrupted: threading.Event | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[Held]:
    """Lock all objects in ``refs``. Raises Locked with the holder if ``timeout_s`` passes, and KeyboardInterrupt if
    ``interrupted`` is set. ``on_wait`` is called once with the holder before a wait."""
    wait = _Wait(interrupted, on_wait if timeout_s > _GRACE_S else None)
    held = Held(home, command or command_line(), wait)
    deadline = time.monotonic() + timeout_s
    try:
        for ref in sorted(set(refs)):
            held._acquire(ref, deadline - time.monotonic())
        yield held
    finally:
        held._release()


@contextlib.contextmanager
def lock_store(home: Home) -> Iterator[None]:
    """Hold the short lock around a change of object files and of the serial. Raises Locked."""
    path = store_lock_path(home)
    fd = _acquire(path, _STORE_TIMEOUT_S, lambda: _refusal("the store", _seen(path)), _Wait())
    try:
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def share_store(home: Home) -> Iterator[None]:
    """Keep changes out while reading, so that no writer is between its serial and its object. Writes nothing and needs
    no existing file: a store without its lock file has never been written."""
    try:
        fd = os.open(store_lock_path(home), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    deadline = time.monotonic() + _STORE_TIMEOUT_S
    try:
        while not try_lock(fd, shared=True):
            if time.monotonic() > deadline:
                raise _refusal("the store", _seen(store_lock_path(home)))
            time.sleep(_SHARE_POLL_S)
        yield
    finally:
        os.close(fd)


def store_lock_path(home: Home) -> Path:
    return home.locks / "store.lock"


def holder(home: Home, ref: Ref) -> LockHolder | None:
    """Return the holder of an object's lock, or None. Writes nothing."""
    try:
        fd = os.open(lock_path(home, ref), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if try_lock(fd, shared=True):
            return None
    finally:
        os.close(fd)
    return _described(home, ref)


def _acquire(path: Path, timeout_s: float, refusal: Callable[[], Locked], wait: _Wait) -> int:
    """Return the descriptor that holds ``path``'s lock, or raise what ``refusal`` makes."""
    try:
        fd = acquire(path, max(timeout_s, _GRACE_S), lambda seconds: wait.pause(seconds, refusal))
    except OSError as error:
        raise explain(error, path, "lock") from error
    if fd is None:
        raise refusal()
    return fd


def _refusal(what: str, by: LockHolder) -> Locked:
    return Locked(f"{what} is locked by {by}", hint="wait for it with --lock-timeout, for example --lock-timeout 60")


def _described(home: Home, ref: Ref) -> LockHolder:
    """Return the announced holder, unless the kernel names another one: the announcement of a killed holder stays."""
    own = lock_path(home, ref)
    seen = _seen(own)
    with contextlib.suppress(OSError):
        for path in (own, *home.locks.glob("*.*.lock")):
            with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
                fields = parse_json(path.read_bytes()) if path.stat().st_size else {}
                refs = fields.pop("refs", [])
                announced = LockHolder(**fields)
                if seen.pid in (0, announced.pid) and (path == own or str(ref) in refs):
                    return announced
    return seen


def _seen(path: Path) -> LockHolder:
    """Return the process that holds ``path``'s lock, as /proc shows it."""
    pid = flock_owner(path)
    try:
        owner = user_name(Path(f"/proc/{pid}").stat().st_uid)
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return LockHolder("", "", 0, "", None)
    return LockHolder(owner, os.uname().nodename, pid, command_line([word for word in words if word]), None)


# The actor and its command, recorded beside every change: they must hold no secret.

_HIDDEN = "REDACTED"
_WORDS = "key|token|secret|password|passwd|credential|credentials"
_FLAG = re.compile(rf"--?(?:.*[-_.])?(?:{_WORDS})", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"""((?:(?<![A-Za-z])(?i:{_WORDS})|(?<=[a-z0-9])(?:Key|Token|Secret|Password))["']?\s*[:=]\s*["']?)[^"'\s,}}]+"""
)
_SECRET_VALUE = re.compile(r"\b(?:sk-|hf_|ghp_|xox[abp]-)[A-Za-z0-9_-]{8,}")
_BEARER = re.compile(r"(?<=\b[Bb]earer )\S+")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def actor() -> str:
    """``user@host`` of the effective user."""
    return f"{user_name(os.geteuid())}@{os.uname().nodename}"


def user_name(uid: int) -> str:
    """Return the login name of a uid, or ``uid N`` where the system knows none (containers)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def command_line(argv: Sequence[str] | None = None) -> str:
    """Return the command as it could be typed again, with every value that looks like a secret replaced by REDACTED."""
    words = list(sys.argv if argv is None else argv)
    if words:
        words[0] = Path(words[0]).name
    shown: list[str] = []
    hide_next = False
    for word in words:
        hidden = hide_next and not word.startswith("--")
        hide_next = not hidden and _FLAG.fullmatch(word) is not None
        shown.append(_HIDDEN if hidden else shlex.quote(redact(word)))
    return " ".join(shown)


def redact(text: str) -> str:
    """Return ``text`` without likely secrets: values of keys and tokens, bearer and vendor tokens, logins in URLs."""
    for pattern in (_SECRET_VALUE, _BEARER, _USERINFO):
        text = pattern.sub(_HIDDEN, text)
    return _ASSIGNED.sub(rf"\g<1>{_HIDDEN}", text)
