"""The files of ``runs/<uid>/`` and how they are written: whole or not at all.

    intent.json   what was asked for (the caller, before anything runs)
    intent.copy.json  the same again: a run whose intent was damaged is still its owner's
    secret.json   environment values that must not be in it, 0600
    config.json   the configuration of a service process, which reads it at each start
    life.lock     flocked from before the shim exists until it is gone: its holder is the proof of life
    id.json       the shim's identity, written by itself before it starts anything
    child.json    the component: its pid and start ticks, or when it will be started again
    stop.json     how long a stop may take (the caller of stop)
    exit.json     how the run ended; written last
    node.json     of a run of a cluster: its node, address, GPUs and job, as its node program found them
    stage.json    what the component says it is doing (written by the component)
    log/          current.log and its predecessors; shim.log holds the shim's own failures

Imported by the shim: no ``dataclasses``, no ``typing``.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from areal.files import parse_json, read_bytes, replace_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

INTENT = "intent.json"
INTENT_COPY = "intent.copy.json"
SECRET = "secret.json"
CONFIG = "config.json"
LIFE_LOCK = "life.lock"
ID = "id.json"
CHILD = "child.json"
STOP = "stop.json"
EXIT = "exit.json"
STAGE = "stage.json"
NODE = "node.json"
LOG_FOLDER = "log"
CURRENT_LOG = "current.log"
SHIM_LOG = "shim.log"


def write_json(folder: str, name: str, value: object, *, durable: bool = True) -> None:
    """Replace ``folder/name`` in one step. ``durable`` writes survive a power cut; records that only describe a live
    process need not, since after a reboot the boot id shows that it is dead."""
    data = json.dumps(value, separators=(",", ":")).encode()
    replace_file(f"{folder}/{name}", data, mode=0o600, durable=durable)


def read_object(folder: str, name: str) -> dict[str, Any] | None:
    """Return the file's JSON object; None without a file. Raises ValueError for other content, OSError."""
    try:
        value = parse_json(read_bytes(f"{folder}/{name}"))
    except FileNotFoundError:
        return None
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{name} holds {type(value).__name__}, not an object")
    return value


def logged_at(folder: str) -> float | None:
    """Return when the run's log was last written, in seconds since the epoch; None if it has none."""
    try:
        return os.stat(f"{folder}/{LOG_FOLDER}/{CURRENT_LOG}").st_mtime
    except OSError:
        return None


def remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
