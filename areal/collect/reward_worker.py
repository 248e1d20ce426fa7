"""One process that computes rewards: ``python -m areal.collect.reward_worker module:function``.

A line of JSON in, the fields; a line out: ``{"reward": 1.0}`` or ``{"error": "..."}``. The first line out says whether
the function could be loaded, and what it takes. What user code prints goes to stderr.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from areal.collect.loading import call_with, load_named
from areal.errors import ArealError

_LOOK_S = 0.5


def main() -> int:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    threading.Thread(target=_leave_with, args=(os.getppid(),), name="parent-watch", daemon=True).start()
    try:
        function = load_named(sys.argv[1], "--reward")
    except ArealError as error:
        _say(out, {"error": error.message, "hint": error.hint})
        return 2
    _say(out, {"ready": True, "takes": named_parameters(function)})
    for line in sys.stdin:
        _say(out, scored(function, json.loads(line)))
    return 0


def _leave_with(parent: int) -> None:
    """A reward that never ends would outlive a collector that was killed: nobody would read what it says."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


def named_parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin
        return []


def scored(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        reward = float(call_with(function, given=given))
    except Exception as error:  # noqa: BLE001 - the boundary to user code: its failure is data
        return {"error": f"{type(error).__name__}: {error}"}
    return {"reward": reward} if math.isfinite(reward) else {"error": f"the reward is {reward}, which is not finite"}


def _say(out: TextIO, document: dict[str, Any]) -> None:
    out.write(json.dumps(document) + "\n")
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
