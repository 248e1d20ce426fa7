"""The component's output on disk: raw bytes, rotated by size, never a reason for the component to fail.

``current.log`` is being written, ``current.log.1`` is the one before it. Lines that begin with ``[areal]`` are the
shim's own: they mark starts and ends, with the time. Beside each log lies ``<log>.times``: about once a second of
output a line ``<milliseconds since the epoch> <offset>``, so that logs can be cut and merged by time without a
stamp in front of every line.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from areal.runtime.records import CURRENT_LOG, LOG_FOLDER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

MARK = "[areal] "
TIMES = ".times"
TIMES_STEP_S = 1.0
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


class RotatingLog:
    """At most ``files`` files of at most ``max_bytes`` each. A line is split only if it is longer than a file. While
    the disk is full, output is dropped and counted, and the loss is noted once there is room."""

    def __init__(self, run_dir: str, max_bytes: int, files: int, clock: Callable[[], float] = time.time) -> None:
        self._path = os.path.join(run_dir, LOG_FOLDER, CURRENT_LOG)
        self._clock = clock
        self._max_bytes = max_bytes
        self._files = files
        self._lost = 0
        self._at_line_start = True
        self._fd = self._times_fd = -1
        self._open()

    def _open(self) -> None:
        """Open the new files before closing the old ones, so that there is always a file to write to."""
        fd = os.open(self._path, _APPEND, 0o600)
        times_fd = os.open(self._path + TIMES, _APPEND, 0o600)
        self.close()
        self._fd, self._times_fd = fd, times_fd
        self._size = os.fstat(fd).st_size
        self._timed_at = 0.0

    def write(self, data: bytes) -> None:
        while data:
            room = self._max_bytes - self._size
            part = data if len(data) <= room else data[: data.rfind(b"\n", 0, max(0, room)) + 1]
            if not part and self._size == 0:
                part = data[: self._max_bytes]
            if part:
                self._append(part)
                data = data[len(part) :]
            if data and not self._rotate():
                self._lost += len(data)
                return

    def mark(self, text: str) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        start = "" if self._at_line_start else "\n"
        self.write(f"{start}{MARK}{stamp} {text}\n".encode())

    def close(self) -> None:
        for fd in (self._fd, self._times_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._times_fd = -1

    def _append(self, data: bytes) -> None:
        """Write the data, or drop it: a full disk must not block the component on a full pipe."""
        now = self._clock()
        if abs(now - self._timed_at) >= TIMES_STEP_S:  # the clock may be set back
            self._timed_at = now
            with suppress(OSError):
                os.write(self._times_fd, f"{int(now * 1000)} {self._size}\n".encode())
        self._at_line_start = data.endswith(b"\n")
        self._size += len(data)
        try:
            if self._lost:
                note = f"\n{MARK}{self._lost} bytes of output were lost: the disk was full\n".encode()
                os.write(self._fd, note)
                self._lost = 0
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self._lost += len(data)

    def _rotate(self) -> bool:
        """Rotate the files. Return False if the folder cannot be written; output that does not fit is then dropped."""
        try:
            for number in range(self._files - 1, 0, -1):
                newer = f"{self._path}.{number - 1}" if number > 1 else self._path
                for suffix in ("", TIMES):
                    if os.path.exists(newer + suffix):
                        os.replace(newer + suffix, f"{self._path}.{number}{suffix}")
            if self._files == 1:
                os.truncate(self._path, 0)
                os.truncate(self._path + TIMES, 0)
            self._open()
        except OSError:
            return False
        return True
