"""The shim: its gate, the component it starts, and its loop, until the component is stopped or given up.

The component gets the shim's session but its own process group (which it may kill), death with the shim
(PR_SET_PDEATHSIG), /dev/null as input, the log pipe as output, default signals, and none of the shim's descriptors.

States: a component lives; or one is due at ``_restart_at`` (back-off); or the run is over. ``SIGTERM`` stops,
``SIGUSR1`` ends a back-off now. Each turn of the loop reaps dead processes before it acts on signals, so that a kick
that races with a death restarts the component. If the disk does not accept a record, the newest one is written again
each second; the last record, of the end, is tried for ``_RECORD_S``.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import select
import signal
import time
from contextlib import suppress

from areal.proxies import loopback_without_proxy
from areal.runtime import procfs, records
from areal.runtime.causes import failing_line, run_log_paths
from areal.runtime.procfs import RUN_DIR_VARIABLE, RUN_UID_VARIABLE, run_members, sweep
from areal.runtime.shim import ACK, GO, NO_FOLDER, NOT_STARTED, PARENT_VARIABLE
from areal.runtime.shim.log import RotatingLog
from areal.runtime.shim.policy import CRASHLOOP, RESTART, Exit, RestartBudget
from areal.wire import notes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType
    from typing import Any

    from areal.runtime.exchange import LivenessCheck

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_EXEC_FAILED = 127
_FILES = 65536  # open at once, where the hard limit allows it
_LIMITS = (
    *(resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_DATA, resource.RLIMIT_FSIZE),
    *(resource.RLIMIT_NPROC, resource.RLIMIT_RSS),
)

_libc = ctypes.CDLL(None, use_errno=True)
STAGE_FILE_VARIABLE = "AREAL_STAGE_FILE"
ATTEMPT_VARIABLE = "AREAL_ATTEMPT"  # the number of the component's start; the intent may set the first number
_READ_SIZE = 65536
_READS_PER_TURN = 32
_PIPE_SIZE = 1 << 20
_F_SETPIPE_SZ = 1031
_WRITE_AGAIN_S = 1.0
_RECORD_S = 300.0


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
    """Fork and exec. The second value says why the program could not be executed, or is "".

    In that case the child has exited with status 127 and is reaped like any other.
    """
    read_fd, write_fd = os.pipe()  # closed by a successful exec, written by a failed one
    shim_pid = os.getpid()
    try:
        pid = os.fork()
    except OSError:
        os.close(read_fd)
        os.close(write_fd)
        raise
    if pid == 0:
        _execute_component(argv, env, cwd, output_fd, write_fd, shim_pid)
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as pipe:
        failure = pipe.read().decode("utf-8", "replace")
    return Child(pid), failure


def _execute_component(
    argv: Sequence[str], env: Mapping[str, str], cwd: str, output_fd: int, failure_fd: int, shim_pid: int
) -> None:
    """Execute the component, in the child process; never returns."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != shim_pid:  # the shim died before the line above
            os._exit(_EXEC_FAILED)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)  # set by the shim, or ignored by whoever called us
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output_fd, 1)
        os.dup2(output_fd, 2)
        try:
            os.chdir(cwd)
        except OSError as error:
            os.write(failure_fd, f"{NO_FOLDER}{cwd}: {error.strerror}".encode())
            return
        os.execvpe(argv[0], list(argv), dict(env))
    except (OSError, ValueError) as error:
        os.write(failure_fd, f"cannot start {argv[0]} in {cwd}: {error}".encode())
    finally:
        os._exit(_EXEC_FAILED)


def leave_the_callers_limits() -> None:
    """Raise the soft limits of the caller's shell to the hard limits, and make our files private to this user."""
    os.umask(0o077)
    for limit in _LIMITS:
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (hard, hard))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES if hard < 0 else max(soft, min(hard, _FILES)), hard))


def describe_exit(status: int, cause: str = "", *, out_of_memory: bool = False) -> Exit:
    """Decode a wait status. ``cause`` replaces the plain words if the shim knows better. ``out_of_memory``: the kernel
    has killed a process for lack of memory meanwhile, perhaps one that the component had started."""
    code = os.waitstatus_to_exitcode(status)
    note = " (meanwhile the kernel killed a process of this machine for want of memory)" * (out_of_memory and code != 0)
    if code >= 0:
        return Exit(code, None, time.time(), (cause or f"exited {code}") + note)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return Exit(None, -code, time.time(), (cause or f"killed by {name}") + note)


def out_of_memory_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory since boot; 0 if it is unknown."""
    with suppress(OSError), open("/proc/vmstat", "rb") as file:
        return next((int(line.split()[1]) for line in file if line.startswith(b"oom_kill ")), 0)
    return 0


_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class RunSupervisor:
    def __init__(self, run_dir: str, held_fds: list[int]) -> None:
        intent = records.read_object(run_dir, records.INTENT)
        if intent is None:
            raise FileNotFoundError(f"{run_dir}/{records.INTENT}")
        self._run_dir = run_dir
        self._intent = intent
        self._held_fds = held_fds
        self._cwd = intent["cwd"]
        self._env = self._environment()
        self._first_attempt = int(intent["env"].get(ATTEMPT_VARIABLE, 1))
        self._budget = RestartBudget(intent["restart"])
        self._log = RotatingLog(run_dir, int(intent["log_max_bytes"]), int(intent["log_files"]))
        self._probe: LivenessCheck | None = None
        if intent.get("liveness"):
            from areal.runtime.exchange import LivenessCheck  # the socket module is not free: only where it is used

            self._probe = LivenessCheck(intent["liveness"])
        self._poller = select.poll()
        self._signals: list[int] = []
        self._child: Child | None = None
        self._cause = ""  # why the component is about to die, when we know
        self._memory_kills = 0  # ``out_of_memory_kills`` when it started
        self._restarts = 0
        self._last_exit: Exit | None = None
        self._restart_at: float | None = None
        self._kill_at: float | None = None
        self._stopping = False
        self._swept: list[int] = []
        self._unwritten: tuple[str, dict[str, object]] | None = None  # the file and content of a record
        self._write_at: float | None = None
        self._leave_by: float | None = None  # the run has ended, and only its record is missing
        self._over = False

    def _environment(self) -> dict[str, str]:
        secret = records.read_object(self._run_dir, records.SECRET) or {}
        ours = {
            RUN_UID_VARIABLE: str(self._intent["uid"]),
            RUN_DIR_VARIABLE: self._run_dir,
            STAGE_FILE_VARIABLE: os.path.join(self._run_dir, records.STAGE),
        }
        if self._intent.get("events"):
            ours |= {notes.EVENTS_VARIABLE: self._intent["events"], notes.OWNER_VARIABLE: self._intent["owner"]}
        alone = (PARENT_VARIABLE, notes.EVENTS_VARIABLE, notes.OWNER_VARIABLE)  # of this run, or of its caller's
        inherited = {name: value for name, value in os.environ.items() if name not in alone}
        whole = {**inherited, **self._intent["env"], **secret, **ours}
        return {**whole, **loopback_without_proxy(whole)}

    def begin(self) -> None:
        """Record the shim's identity, then start the component: the record is always older than the process."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._install_signals()
        if os.environ.get(PARENT_VARIABLE) == str(os.getppid()):
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # nothing outlives the job
        self._output_fd, self._component_fd = os.pipe()
        os.set_blocking(self._output_fd, False)
        with suppress(OSError):  # over the user's limit for pipes: the default size works too
            fcntl.fcntl(self._output_fd, _F_SETPIPE_SZ, _PIPE_SIZE)
        self._poller.register(self._output_fd, select.POLLIN)
        pipe = os.readlink(f"/proc/self/fd/{self._output_fd}")
        records.write_json(self._run_dir, records.ID, {**procfs.identity_fields(os.getpid()), "log_pipe": pipe})
        os.chdir("/")  # keep no file system busy
        if self._cwd == self._run_dir:  # a program of ours
            leave_the_callers_limits()
        self._start_component()

    def _install_signals(self) -> None:
        wakeup_read, wakeup_write = os.pipe()
        os.set_blocking(wakeup_read, False)
        os.set_blocking(wakeup_write, False)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        self._wakeup_fd = wakeup_read
        self._poller.register(wakeup_read, select.POLLIN)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGCHLD):
            signal.signal(number, self._note_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def run(self) -> int:
        while not self._over:
            self._turn()
        return 0

    def _turn(self) -> None:
        watched = self._probe.interest if self._probe and self._child else None
        if watched:
            self._poller.register(*watched)
        ready = [fd for fd, _ in self._poller.poll(self._patience_ms())]
        if watched:
            self._poller.unregister(watched[0])
        if self._wakeup_fd in ready:
            os.read(self._wakeup_fd, 4096)
        self._copy_output()
        self._reap()
        while self._signals and not self._over:
            if self._signals.pop(0) == signal.SIGUSR1:
                self._budget.reset()
                if self._restart_at is not None:
                    self._restart_at = time.monotonic()
            else:
                self._stop()
        if not self._over:
            self._on_time(watched is not None and watched[0] in ready)

    def _patience_ms(self) -> float | None:
        probe_due = self._probe.due if self._probe and self._child else None
        times = [at for at in (self._restart_at, self._kill_at, self._write_at, probe_due) if at is not None]
        if not times:
            return None
        return max(0.0, min(times) - time.monotonic()) * 1000 + 1

    def _copy_output(self) -> None:
        for _ in range(_READS_PER_TURN):
            try:
                data = os.read(self._output_fd, _READ_SIZE)
            except BlockingIOError:
                return
            self._log.write(data)

    def _reap(self) -> None:
        """Collect dead processes: the component, and orphans that we adopted as subreaper."""
        ended: int | None = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if self._child and pid == self._child.pid:
                ended = status
        if ended is not None:
            killed = out_of_memory_kills() > self._memory_kills
            self._on_exit(describe_exit(ended, self._cause, out_of_memory=killed))

    def _on_time(self, probe_ready: bool) -> None:
        now = time.monotonic()
        if self._restart_at is not None and now >= self._restart_at:
            self._restart_at = None
            self._restarts += 1
            self._start_component()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._sweep()
        if self._probe and self._child and not self._cause:
            if probe_ready:
                self._probe.on_ready(now)
            self._probe.tick(now)
            if self._probe.failed:
                self._terminate("liveness probe failed", float(self._intent["stop_grace_s"]))
        if self._unwritten and self._write_at is not None and now >= self._write_at:
            self._write(*self._unwritten)

    def _start_component(self) -> None:
        records.remove(os.path.join(self._run_dir, records.STAGE))
        self._cause, self._memory_kills = "", out_of_memory_kills()
        if self._probe:
            self._probe.restart(time.monotonic())
        try:
            env = {**self._env, ATTEMPT_VARIABLE: str(self._first_attempt + self._restarts)}
            if not os.path.isdir(env.get("TMPDIR", "/")):  # of a CI job, or of a login, that is over
                del env["TMPDIR"]
            self._child, self._cause = spawn(self._intent["argv"], env, self._cwd, self._component_fd)
        except OSError as error:  # no process could be made: treat it as a start that failed
            self._on_exit(Exit(None, None, time.time(), f"cannot fork: {error.strerror}"))
            return
        self._log.mark(f"started pid {self._child.pid}" + (f", restart {self._restarts}" if self._restarts else ""))
        if self._restarts:
            self._note("Normal", "Restarted", f"pid {self._child.pid}, restart {self._restarts}")
        self._record_child("running")

    def _on_exit(self, exit: Exit) -> None:
        now = time.monotonic()
        ran_s = now - self._child.started_monotonic if self._child else 0.0
        healthy_s = now - (self._probe.healthy_since or now) if self._probe else None
        self._child = None
        self._kill_at = None
        self._last_exit = exit
        self._copy_output()
        if self._stopping:
            self._finish("exited", "stopped")
            return
        if not self._budget.is_success(exit):
            exit.line = failing_line(run_log_paths(self._run_dir), last_start=True)
        line = f": {exit.line}" if exit.line else ""
        spread = int.from_bytes(os.urandom(4), "big") / 2**32
        decision = self._budget.decide(exit, ran_s, now, spread, healthy_s)
        if decision.action == RESTART:
            self._restart_at = time.monotonic() + decision.delay_s
            self._record_child("backoff", next_start_at=time.time() + decision.delay_s)
            self._log.mark(f"{exit.reason}; next start in {decision.delay_s:.1f} s")
            soon = f"in {decision.delay_s:.0f} s" if decision.delay_s else "at once"
            self._note("Warning", "Died", f"{exit.reason} after {ran_s:.0f} s, starts again {soon}{line}")
            self._sweep()
        else:
            is_loop = decision.action == CRASHLOOP
            if is_loop or not self._budget.is_success(exit):
                self._note("Warning", "CrashLoop" if is_loop else "Died", f"{decision.reason}{line}")
            self._finish("crashloop" if is_loop else "exited", decision.reason)

    def _terminate(self, cause: str, grace_s: float) -> None:
        """Ask the component to end, and set the time at which it is killed."""
        if self._child is None:
            return
        self._cause = cause
        os.kill(self._child.pid, signal.SIGTERM)  # not reaped yet, so the number is still its own
        os.kill(self._child.pid, signal.SIGCONT)
        self._kill_at = time.monotonic() + grace_s

    def _stop(self) -> None:
        """Handle SIGTERM. A second one can only shorten the grace period of the first."""
        order: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            order = records.read_object(self._run_dir, records.STOP) or order
        grace_s = float(order.get("grace_s", self._intent["stop_grace_s"]))
        if self._leave_by is not None:
            self._stopping = True
            self._leave_by = self._write_at = time.monotonic()  # a last try
        elif self._child is None:
            self._stopping = True
            self._finish("exited", "stopped")
        elif self._stopping and self._kill_at is not None:
            self._kill_at = min(self._kill_at, time.monotonic() + grace_s)
        elif not self._stopping:
            self._stopping = True
            self._terminate("stopped", grace_s)

    def _sweep(self) -> None:
        own = os.getpid()
        member = run_members(own, self._run_dir, frozenset({own}))

        def is_orphan(stat: procfs.Stat) -> bool:
            """Return whether it belonged to the component: our child, even if it has left the session and cleared its
            environment, but not the supervisor of another run that the component started, which continues."""
            return stat.ppid == own and procfs.environment(stat.pid).get(RUN_DIR_VARIABLE) in (None, self._run_dir)

        self._swept += sweep(lambda stat: is_orphan(stat) or member(stat))[0]

    def _note(self, type: str, reason: str, message: str) -> None:
        slot = f"{self._intent['component']}/{self._intent['replica']}"
        notes.note(self._env, type, reason, f"{slot}: {message}", "supervisor")

    def _record_child(self, state: str, **extra: object) -> None:
        record: dict[str, object] = {
            "state": state,
            "restarts": self._restarts,
            "last_exit": self._last_exit.to_record() if self._last_exit else None,
            **extra,
        }
        if self._child:
            record.update(pid=self._child.pid, start_ticks=self._child.start_ticks, started_at=self._child.started_at)
        self._write(records.CHILD, record)

    def _write(self, name: str, record: dict[str, object]) -> None:
        try:
            records.write_json(self._run_dir, name, record, durable=name == records.EXIT)
        except FileNotFoundError:  # the run's folder is gone, and its records have no reader
            self._unwritten = self._write_at = None
        except OSError as error:
            if self._unwritten is None or self._unwritten[0] != name:
                self._log.mark(f"cannot write {name}: {error}")
            self._unwritten, self._write_at = (name, record), time.monotonic() + _WRITE_AGAIN_S
        else:
            self._unwritten = self._write_at = None
        if self._leave_by is not None and (self._unwritten is None or time.monotonic() >= self._leave_by):
            self._leave()

    def _finish(self, phase: str, reason: str) -> None:
        """End the run completely: sweep, release the leases, and only then record that it is over."""
        self._sweep()
        self._copy_output()
        self._log.mark(reason)
        records.remove(os.path.join(self._run_dir, records.SECRET))
        while len(self._held_fds) > 1:
            os.close(self._held_fds.pop())
        self._restart_at = self._kill_at = None
        record: dict[str, object] = {
            "phase": phase,
            "reason": reason,
            "restarts": self._restarts,
            "last_exit": self._last_exit.to_record() if self._last_exit else None,
            "swept": self._swept,
        }
        # Whoever stops it records the end where the shim cannot.
        self._leave_by = time.monotonic() + (0.0 if self._stopping else _RECORD_S)
        if self._is_orphan():  # how that ended is its scheduler's word
            self._leave()
        else:
            self._write(records.EXIT, record)

    def _leave(self) -> None:
        self._log.close()
        os.close(self._held_fds.pop())  # the life lock
        self._over = True
        if self._intent.get("on_end") and not self._stopping:
            self._start_on_end()

    def _is_orphan(self) -> bool:
        """Return whether the node program that started it has died: killed with its job, or with its node."""
        parent = os.environ.get(PARENT_VARIABLE)
        return parent is not None and parent != str(os.getppid())

    def _start_on_end(self) -> None:
        """Start the ``on_end`` command in a session of its own, no member of this run."""
        ours = (RUN_UID_VARIABLE, RUN_DIR_VARIABLE, STAGE_FILE_VARIABLE, PARENT_VARIABLE)
        env = {name: value for name, value in os.environ.items() if name not in ours}
        null = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1, 2)]
        with suppress(OSError):  # the next reconcile does its work
            os.posix_spawnp(
                self._intent["on_end"][0],
                self._intent["on_end"],
                env,
                file_actions=actions,
                setsid=True,
                setsigdef=_ENDS,
            )


def main(argv: list[str]) -> int:
    """Wait at the gate, then supervise. The caller writes ``G`` after it has made the intent durable and noted our pid.
    Anything else, in particular end of file (the caller died), means that no command knows us: exit."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a caller may have blocked what we wait for
    run_dir = argv[0]
    gate, ack, *held = (int(text) for text in argv[1:])
    for fd in (gate, ack, *held):
        os.set_inheritable(fd, False)  # the component must not keep a lease alive
    if os.read(gate, 1) != GO:
        return NOT_STARTED
    os.close(gate)
    supervisor = RunSupervisor(run_dir, held)
    supervisor.begin()
    with suppress(BrokenPipeError):  # the caller died after the "go": the record is complete, carry on
        os.write(ack, ACK)
    os.close(ack)
    return supervisor.run()
