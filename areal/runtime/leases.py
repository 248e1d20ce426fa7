"""TCP ports and GPUs: leases of them, one ``flock``ed file each, and the claims for a run's start.

The kernel frees a lease when its last holder dies. A port or GPU is *chosen* by ``choose_...`` and held here until
``take`` hands its descriptor to a shim; ``take`` itself leases the rest, all or nothing. Nothing waits for a lease.

Leases separate areal's own processes; a bind test detects all others. Automatic ports come from a range below the
kernel's ephemeral ports, so that an outgoing connection cannot take one between claim and start.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pwd
import re
import stat
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from areal.dataclasses import asdict, dataclass
from areal.errors import ArealError, NoCapacity, TimedOut
from areal.files import lock_named, parse_json, read_bytes, still_named, try_lock
from areal.runtime import procfs
from areal.runtime.backends.base import RunSpec

FIRST_PORT = 20000
LAST_PORT = 29999
_LISTEN = "0A"
_NO_SUCH_ADDRESS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
_SOCKET_LINK = re.compile(r"socket:\[(\d+)\]")
T = TypeVar("T")
LEASE_DIR_VARIABLE = "AREAL_LEASE_DIR"
_GUARD_TIMEOUT_S = 10.0
_PROBE_TRIES = 40  # a process that tests a lease holds it for an instant, or longer if it is not scheduled
_PROBE_PAUSE_S = 0.005


@dataclass(frozen=True)
class PortOwner:
    """The listener of a port. ``pid`` is None when its process may not be inspected or is in another namespace."""

    port: int
    pid: int | None
    command: str
    user: str

    def __str__(self) -> str:
        if self.pid is None:
            return f"a process of user {self.user} that cannot be inspected"
        return f"pid {self.pid} ({self.command}) of user {self.user}"

    @property
    def remedy(self) -> str:
        """What frees the port. A run whose folder was lost can only be ended by ``areal doctor`` of its home; another
        one would be started again by its supervisor, so that its object has to be found."""
        folder = procfs.environment(self.pid).get(procfs.RUN_DIR_VARIABLE) if self.pid is not None else None
        if not folder:
            return "stop that process"
        home = os.path.dirname(os.path.dirname(folder))
        if os.path.isdir(folder):
            return f"`areal get processes --home {home}` shows whose process it is: stop that object"
        return f"its run folder is lost, and `areal doctor --fix --yes --home {home}` ends it"


def bind_error(port: int) -> OSError | None:
    """Return the error of a server that listens on ``port`` of any address now, or None. TIME_WAIT is ignored."""
    import socket

    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # this address family does not exist here
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    return error
    return None


def candidates(owner: str, scope: str = "") -> Iterator[int]:
    """Iterate over the automatic ports from a starting point that depends on the owner and its home. A port just
    released is thus not chosen next, and an owner of the same name in another home does not take the port of a process
    that is replaced."""
    low, high = map(int, read_bytes("/proc/sys/net/ipv4/ip_local_port_range").split())
    usable = [port for port in range(FIRST_PORT, LAST_PORT + 1) if not low <= port <= high]
    start = zlib.crc32(f"{scope} {owner}".encode("utf-8", "surrogateescape")) % max(1, len(usable))
    yield from usable[start:]
    yield from usable[:start]


def port_owner(port: int) -> PortOwner | None:
    """Return the listener of the port, or None."""
    for inode, uid in _listeners(port):
        pid = next((pid for pid in procfs.pids() if inode in _sockets_of(pid)), None)
        command = procfs.command_line(pid) if pid is not None else ""
        return PortOwner(port, pid, command, _user_name(uid))
    return None


def foreign_listener(port: int, sessions: Collection[int]) -> PortOwner | None:
    """Return a listener of the port that no member of these sessions owns; with SO_REUSEPORT it would get calls."""
    found: PortOwner | None = None
    for _ in range(2):
        listening = list(_listeners(port))
        if len(listening) < 2:  # one at most: no other process listens
            return None
        ours = {inode for stat in procfs.processes() if stat.session in sessions for inode in _sockets_of(stat.pid)}
        others = {inode: uid for inode, uid in listening if inode not in ours}
        if not others:
            return None
        pids = ((pid, inode) for pid in procfs.pids() for inode in _sockets_of(pid) if inode in others)
        pid, inode = next(pids, (None, next(iter(others))))
        found = PortOwner(port, pid, procfs.command_line(pid) if pid is not None else "", _user_name(others[inode]))
    return found


def ports_of(pid: int) -> tuple[int, ...]:
    """Return the ports a process listens on, in ascending order; none when it is gone or may not be inspected."""
    inodes = set(_sockets_of(pid))
    return tuple(sorted({port for port, inode, _ in _all_listeners(f"/proc/{pid}/net") if inode in inodes}))


def session_listens(port: int, session_id: int) -> bool:
    """Return whether a member of the session owns the port. Otherwise an answer to a probe is another process's."""
    inodes = {inode for inode, _ in _listeners(port)}
    members = (stat.pid for stat in procfs.processes() if stat.session == session_id)
    return any(inode in inodes for pid in members for inode in _sockets_of(pid))


def _listeners(port: int) -> Iterator[tuple[int, int]]:
    """Return (socket inode, user id) of each listening socket of the port."""
    return ((inode, uid) for found, inode, uid in _all_listeners("/proc/net") if found == port)


def _all_listeners(tables: str) -> Iterator[tuple[int, int, int]]:
    """Return (port, socket inode, user id) of each listening socket of a network namespace."""
    for table in ("tcp", "tcp6"):
        try:
            text = Path(tables, table).read_text()
        except OSError:
            continue
        for line in text.splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                yield int(fields[1].rpartition(":")[2], 16), int(fields[9]), int(fields[7])


def _sockets_of(pid: int) -> Iterator[int]:
    """Return the inodes of a process's sockets, as far as it may be inspected."""
    matches = map(_SOCKET_LINK.fullmatch, procfs.open_files(pid))
    return (int(match[1]) for match in matches if match)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


_DEFAULT = "/dev/shm/areal-leases"
_GPU = "gpu-"


@dataclass(frozen=True)
class LeaseHolder:
    """The holder of a lease. ``scope`` distinguishes equal owners of different homes."""

    owner: str  # "Model/qwen"
    scope: str  # the home
    uid: str  # run uid, "" between claim and start
    user: int
    pid: int  # the process that claimed it; the shim that holds it now is its descendant
    at: float

    def __str__(self) -> str:
        run = f", run {self.uid}" if self.uid else ""
        return f"{self.owner} (home {self.scope}{run}, user id {self.user})"


def _attempts(count: int = _PROBE_TRIES) -> Iterator[int]:
    """Iterate ``count`` times, with pauses: by default for as long as a test of a lease may take."""
    for attempt in range(count):
        if attempt:
            time.sleep(_PROBE_PAUSE_S)
        yield attempt


@dataclass
class ResourceLease:
    """A held lock: closing ``fd`` in every process that has it gives the resource back."""

    name: str
    fd: int
    shared: bool = False

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class LeaseDir:
    """The machine's leases. ``scope`` is the home on whose behalf they are taken."""

    def __init__(self, path: Path | None, scope: str) -> None:
        self.path = str(path or os.environ.get(LEASE_DIR_VARIABLE) or _DEFAULT)
        self.scope = scope

    def acquire(self, name: str, *, owner: str, uid: str = "") -> ResourceLease:
        """Acquire ``name`` exclusively. Raises NoCapacity naming the holder."""
        lease = self.try_acquire(name, owner=owner, uid=uid, tries=_PROBE_TRIES)
        if lease is None:
            raise self._taken(name)
        return lease

    def try_acquire(self, name: str, *, owner: str, uid: str = "", tries: int = 1) -> ResourceLease | None:
        """Acquire ``name`` exclusively, or return None. Several ``tries`` outlast a test, which locks briefly."""
        fd = lock_named(self._file(name), partial(self._open, name), _attempts(tries))
        if fd is None:
            return None
        lease = ResourceLease(name, fd)
        self.describe(lease, owner=owner, uid=uid)
        return lease

    def acquire_shared(self, name: str, *, owner: str, uid: str = "") -> tuple[ResourceLease, bool]:
        """Acquire ``name`` together with other runs of one owner and home. Return it, and whether we are the first.

        The first holder locks exclusively, writes its name, and downgrades, which the guard keeps two owners from.
        """
        with self._guard(name):
            for _ in _attempts():
                fd = self._open(name)
                lease = ResourceLease(name, fd, shared=True)
                alone = self._locked(name, fd)
                if not alone:
                    holder = self.holder(name)
                    same = holder is not None and holder.owner == owner and self.is_of_this_home(holder)
                    if same and self._locked(name, fd, shared=True):
                        alone = self._locked(name, fd)  # who held it alone has left: the name in it is a former one's
                        if not alone and self._locked(name, fd, shared=True):  # a failed lock has lost the other
                            return lease, False
                if alone:
                    self.describe(lease, owner=owner, uid=uid)
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    return lease, True
                os.close(fd)
        raise self._taken(name)

    def is_of_this_home(self, holder: LeaseHolder) -> bool:
        """Return whether a run of this home holds the lease, even if the home has been moved since."""
        if holder.scope == self.scope or not holder.uid or os.path.exists(holder.scope):
            return holder.scope == self.scope
        return os.path.exists(f"{self.scope}/runs/{holder.uid}")

    def tidy(self, name: str) -> None:
        """Remove the file of a free lease. ``_locked`` checks that a locked file still has its name."""
        for part in (name, f"{name}.guard"):
            with suppress(OSError):
                fd = os.open(self._file(part), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if not self._locked(part, fd):
                        return
                    os.unlink(self._file(part))
                finally:
                    os.close(fd)

    def _locked(self, name: str, fd: int, *, shared: bool = False) -> bool:
        """Lock ``fd``. Return False if another process holds the lock, or the name is another file's by now."""
        return try_lock(fd, shared=shared) and still_named(fd, self._file(name))

    def share(self, lease: ResourceLease) -> None:
        """Downgrade an exclusive lock to one shared with the same owner."""
        with self._guard(lease.name):
            fcntl.flock(lease.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            lease.shared = True

    def describe(self, lease: ResourceLease, *, owner: str, uid: str) -> None:
        """Write the holder into the file. Another user's file that cannot be written is left as it is."""
        holder = LeaseHolder(owner, self.scope, uid, os.getuid(), os.getpid(), time.time())
        with suppress(OSError):
            text = json.dumps(asdict(holder)).encode()
            os.pwrite(lease.fd, text, 0)
            os.ftruncate(lease.fd, len(text))

    def holder(self, name: str) -> LeaseHolder | None:
        """Return the holder that the file names, None if it is unreadable. The lease may be free."""
        try:
            return LeaseHolder(**parse_json(read_bytes(self._file(name))))
        except (OSError, ValueError, TypeError):
            return None

    def is_held(self, name: str) -> bool:
        """Return whether the lease is held. A GPU's lease is exclusive, so it is tested with a shared lock: tests do
        not disturb another. A port's lease may be shared: it is tested with an exclusive lock, for longer than a
        test."""
        try:
            fd = os.open(self._file(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            if name.startswith(_GPU):
                return not try_lock(fd, shared=True)
            return not any(try_lock(fd) for _ in _attempts())
        finally:
            os.close(fd)

    def holding_pids(self, name: str) -> list[int]:
        """Return the processes that have the lease's file open, as far as they may be inspected. For reports: slow."""
        path = os.path.realpath(self._file(name))
        return [pid for pid in procfs.pids() if path in procfs.open_files(pid)]

    def names(self) -> list[str]:
        """Return every resource that was ever leased here."""
        try:
            return sorted(name for name in os.listdir(self.path) if not name.endswith(".guard"))
        except FileNotFoundError:
            return []

    def _taken(self, name: str) -> NoCapacity:
        kind, _, which = name.partition("-")
        holder = self.holder(name)
        noun = "GPU" if kind == "gpu" else kind
        home = "" if holder is None or self.is_of_this_home(holder) else f" --home {holder.scope}"
        return NoCapacity(
            f"{noun} {which} is held by {holder or 'an unknown process'}",
            hint=f"areal get processes{home} shows it, or areal doctor{home}",
        )

    def _file(self, name: str) -> str:
        return f"{self.path}/{name}"

    @contextmanager
    def _guard(self, name: str) -> Iterator[None]:
        guard = f"{name}.guard"
        tries = round(_GUARD_TIMEOUT_S / _PROBE_PAUSE_S)
        fd = lock_named(self._file(guard), partial(self._open, guard), _attempts(tries))
        if fd is None:
            raise TimedOut(f"{self._file(guard)} stayed locked for {_GUARD_TIMEOUT_S:g} s")
        try:
            yield
        finally:
            os.close(fd)

    def _open(self, name: str) -> int:
        """Open without O_CREAT first: in a shared sticky folder the kernel may refuse O_CREAT on others' files."""
        self._ensure()
        path = self._file(name)
        flags = os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            while True:
                try:
                    return os.open(path, os.O_RDWR | flags)
                except FileNotFoundError:
                    with suppress(FileExistsError):
                        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | flags, 0o666)
                        os.fchmod(fd, 0o666)
                        return fd
                except PermissionError:
                    return os.open(path, os.O_RDONLY | flags)
        except OSError as error:
            raise ArealError(f"cannot open the lease {path}: {error.strerror}", hint=f"set {LEASE_DIR_VARIABLE}")

    def _ensure(self) -> None:
        try:
            os.mkdir(self.path)
            os.chmod(self.path, 0o1777)
        except FileExistsError:
            # Without the sticky bit, any user could replace the file that another one has locked.
            mode = os.stat(self.path).st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise ArealError(
                    f"the lease folder {self.path} is writable by everyone without the sticky bit: other users could "
                    "remove leases that are held",
                    hint=f"chmod 1777 {self.path}",
                )
        except OSError as error:
            raise ArealError(
                f"cannot make the lease folder {self.path}: {error.strerror}",
                hint=f"set {LEASE_DIR_VARIABLE} to a folder that all users of this machine share",
            )


def port_lease(port: int) -> str:
    return f"port-{port}"


def gpu_lease(uuid: str) -> str:
    return f"{_GPU}{uuid}"


class Claims:
    """Leases that this process has chosen and not yet handed to a shim, by name."""

    def __init__(self, leases: LeaseDir) -> None:
        self._leases = leases
        self._chosen: dict[str, ResourceLease] = {}
        self._lock = threading.Lock()

    def choose_ports(self, count: int, owner: str, prefer: Sequence[int]) -> tuple[int, ...]:
        """Return ``count`` ports without a lease and without a listener, ``prefer`` first. Raises NoCapacity."""
        others = candidates(owner, self._leases.scope)
        return self._choose(count, owner, prefer, others, port_lease, "ports", lambda port: bind_error(port) is None)

    def choose_gpus(self, count: int, owner: str, uuids: Sequence[str]) -> tuple[str, ...]:
        """Return the first ``count`` of ``uuids`` without a lease. Raises NoCapacity, and then holds none."""
        return self._choose(count, owner, uuids, (), gpu_lease, "GPUs", lambda uuid: True)

    def _choose(
        self,
        count: int,
        owner: str,
        wanted: Sequence[T],
        others: Iterable[T],
        lease_name: Callable[[T], str],
        noun: str,
        is_usable: Callable[[T], bool],
    ) -> tuple[T, ...]:
        """Choose free items, first from ``wanted``, outlasting tests by other processes, then from ``others``."""
        found: dict[T, ResourceLease] = {}
        try:
            for item, tries in chain(((each, _PROBE_TRIES) for each in wanted), ((each, 1) for each in others)):
                if len(found) == count:
                    break
                if item in found:
                    continue
                lease = self._leases.try_acquire(lease_name(item), owner=owner, tries=tries)
                if lease is not None and is_usable(item):
                    found[item] = lease
                elif lease is not None:
                    lease.close()
            if len(found) < count:
                raise NoCapacity(f"{owner} needs {count} {noun} and only {len(found)} are free", hint="areal doctor")
        except BaseException:
            _close(found.values())
            raise
        with self._lock:
            self._chosen.update((lease.name, lease) for lease in found.values())
        return tuple(found)

    def release(self) -> None:
        """Release chosen leases that will not be started."""
        with self._lock:
            _close(self._chosen.values())
            self._chosen.clear()

    def take(self, spec: RunSpec) -> list[ResourceLease]:
        """Return all leases of the run. The caller closes its copies once the shim has them. Raises NoCapacity."""
        held: list[ResourceLease] = []
        try:
            for port in sorted(spec.ports):
                held.append(self._port(port, spec, shared=False))
            for port in sorted(spec.shared_ports):
                held.append(self._port(port, spec, shared=True))
            for uuid in sorted(spec.gpus):
                name = gpu_lease(uuid)
                held.append(self._pop(name, spec) or self._leases.acquire(name, owner=spec.owner, uid=spec.uid))
        except BaseException:
            _close(held)
            raise
        return held

    def _port(self, port: int, spec: RunSpec, *, shared: bool) -> ResourceLease:
        name = port_lease(port)
        chosen = self._pop(name, spec)
        if chosen is not None:
            if shared:
                self._leases.share(chosen)
            return chosen
        if shared:
            lease, is_first = self._leases.acquire_shared(name, owner=spec.owner, uid=spec.uid)
        else:
            lease, is_first = self._leases.acquire(name, owner=spec.owner, uid=spec.uid), True
        if is_first:
            _refuse_foreign_listener(port, lease)
        return lease

    def _pop(self, name: str, spec: RunSpec) -> ResourceLease | None:
        with self._lock:
            lease = self._chosen.pop(name, None)
        if lease:
            self._leases.describe(lease, owner=spec.owner, uid=spec.uid)
        return lease


def _refuse_foreign_listener(port: int, lease: ResourceLease) -> None:
    """Raise NoCapacity naming a process outside areal that listens on a port without a lease."""
    error = bind_error(port)
    if error is None:
        return
    lease.close()
    owner = port_owner(port)
    if owner:
        raise NoCapacity(f"port {port} is in use by {owner}", hint=f"{owner.remedy}, or choose another port")
    raise NoCapacity(f"port {port} cannot be bound: {error.strerror}", hint="choose another port")


def _close(leases: Iterable[ResourceLease]) -> None:
    for lease in leases:
        lease.close()
