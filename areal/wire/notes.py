"""Events that a process adds to those of its object: what happened while no command ran.

The supervisor of a run names the file and the object to its component by two variables. The lines are those of
``areal.state.events``. Imported by the shim: no ``dataclasses``, no ``typing``, no ``pathlib``.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress

from areal.files import append_line, parse_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

EVENTS_VARIABLE = "AREAL_EVENTS_FILE"
OWNER_VARIABLE = "AREAL_OWNER"  # Model/qwen
SERVES = "Serves"  # the weights of a trainer


def note(environ: Mapping[str, str], type: str, reason: str, message: str, actor: str) -> None:
    """Append an event; nothing for a process of no object, and where the file cannot be written."""
    file, ref, now = environ.get(EVENTS_VARIABLE), environ.get(OWNER_VARIABLE), time.time()
    if not file or not ref:
        return
    about = {"ref": ref, "type": type, "reason": reason, "message": message, "actor": actor}
    event = {**about, "at": now, "count": 1, "first_at": now}
    merged = (lambda last: _merged(last, event)) if reason == SERVES else None
    with suppress(OSError):  # such as the folder of an object that was deleted meanwhile
        append_line(file, _line(event), merged)


def _merged(last: bytes, event: Mapping[str, object]) -> bytes | None:
    """Return the event with the count of ``last``, if that is the same one of an earlier version: a training run has
    one for each of its steps and replicas."""
    try:
        before = parse_json(last)
        if any(before[name] != event[name] for name in ("ref", "type", "reason", "actor")):
            return None
        return _line({**event, "count": before["count"] + 1, "first_at": before["first_at"]})
    except (ValueError, TypeError, LookupError):
        return None


def _line(event: Mapping[str, object]) -> bytes:
    return json.dumps(event).encode() + b"\n"
