"""Which TCP ports a process listens on."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"


def ports_of(pid: int) -> tuple[int, ...]:
    """In ascending order; empty when the process is gone, listens on nothing, or may not be inspected."""
    inodes = set()
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and fields[9] in inodes:
                    found.add(int(fields[1].rpartition(":")[2], 16))
    return tuple(sorted(found))
