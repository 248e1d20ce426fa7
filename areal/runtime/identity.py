"""The identity of a recorded process, and whether it still lives. A process counts as dead only on proof.

The fields are needed because pids are reused; start ticks restart at boot; two containers share a boot id and, on a
shared home, a record; and several machines may see a home on NFS. The command line and the environment are not part of
it, since engines rewrite both.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from areal.dataclasses import dataclass
from areal.runtime import procfs


class Liveness(StrEnum):
    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"  # on another machine or in another pid namespace: nothing can be proved from here


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    machine_id: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int
    session_id: int
    autogroup: str = ""  # of the session; "" where the kernel has none

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ProcessIdentity:
        """Raise KeyError, TypeError or ValueError on a damaged record."""
        return cls(
            str(record["machine_id"]),
            str(record["boot_id"]),
            str(record["pid_namespace"]),
            int(record["pid"]),
            int(record["start_ticks"]),
            int(record["session_id"]),
            str(record.get("autogroup", "")),
        )


def identify(pid: int) -> ProcessIdentity:
    """Return the identity of a live process; raises ProcessLookupError when there is none."""
    return ProcessIdentity.from_record(procfs.identity_fields(pid))


def same_boot(identity: ProcessIdentity) -> bool:
    """Return whether the process ran under the kernel that runs us now."""
    return identity.machine_id == procfs.machine_id() and identity.boot_id == procfs.boot_id()


def liveness(identity: ProcessIdentity) -> Liveness:
    if identity.machine_id != procfs.machine_id():
        return Liveness.UNKNOWN
    if identity.boot_id != procfs.boot_id():
        return Liveness.DEAD
    if identity.pid_namespace != procfs.pid_namespace():
        return Liveness.UNKNOWN
    stat = procfs.read_stat(identity.pid)
    if stat is None or not stat.alive or stat.start_ticks != identity.start_ticks:
        return Liveness.DEAD
    return Liveness.ALIVE


def where(identity: ProcessIdentity) -> str:
    """Return in words why the process's liveness cannot be determined from here."""
    if identity.machine_id != procfs.machine_id():
        return f"recorded on another machine (machine-id {identity.machine_id})"
    return f"recorded in another pid namespace ({identity.pid_namespace}, here {procfs.pid_namespace()})"
