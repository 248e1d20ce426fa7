"""Start the component and say how it ended.

The component gets: the shim's session but a process group of its own (so that a component that kills its group
does not kill its supervisor), death with the shim (PR_SET_PDEATHSIG), /dev/null as input, the log pipe as output,
default signal dispositions, and none of the shim's descriptors.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

from areal.runtime import procfs
from areal.runtime.shim.policy import Exit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_EXEC_FAILED = 127
_RESET = (  # what the shim has set, what its Python ignores, and what a script in the background had ignored
    *(signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT),
    *(signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD),
)

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")


class Child:
    """One start of the component."""

    __slots__ = ("pid", "start_ticks", "started_at", "started_monotonic")

    def __init__(self, pid: int) -> None:
        stat = procfs.read_stat(pid)  # ours and not yet reaped: it has a stat even when it is a zombie
        self.pid = pid
        self.start_ticks = stat.start_ticks if stat else 0
        self.started_at = time.time()
        self.started_monotonic = time.monotonic()


def spawn(argv: Sequence[str], env: Mapping[str, str], cwd: str, output_fd: int) -> tuple[Child, str]:
    """Fork and exec; the second value says why the program could not be executed, or is empty.

    Then the child has left with status 127 and is reaped like any other.
    """
    read_fd, write_fd = os.pipe()  # closed by a successful exec, written by a failed one
    shim_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(argv, env, cwd, output_fd, write_fd, shim_pid)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        failure = pipe.read().decode("utf-8", "replace")
    return Child(pid), failure


def _become(
    argv: Sequence[str], env: Mapping[str, str], cwd: str, output_fd: int, failure_fd: int, shim_pid: int
) -> None:
    """In the child: never returns."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != shim_pid:  # the shim died before the line above
            os._exit(_EXEC_FAILED)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        os.chdir(cwd)
        os.execvpe(argv[0], list(argv), dict(env))
    except (OSError, ValueError) as error:
        os.write(failure_fd, f"cannot start {argv[0]} in {cwd}: {error}".encode())
    finally:
        os._exit(_EXEC_FAILED)


def describe_exit(status: int, cause: str = "") -> Exit:
    """Decode a wait status; ``cause`` replaces the plain words when the shim knows better."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return Exit(code, None, time.time(), cause or f"exited {code}")
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return Exit(None, -code, time.time(), cause or f"killed by {name}")
