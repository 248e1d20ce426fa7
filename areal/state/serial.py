"""The store's serial: how often what is asked for has changed. A plan made at another serial is stale.

It is bumped before the change that it stands for, both under the store's lock: a crash between the two makes a plan
stale for nothing, which costs a second look; the other order would let a stale plan pass.
"""

from __future__ import annotations

import time
from pathlib import Path

from areal.state.files import Unreadable, read_raw, write_atomic
from areal.state.home import Home


def serial_path(home: Home) -> Path:
    return home.objects / "serial"


def read_serial(home: Home) -> int:
    """0 for a store that never changed. Raises Unreadable."""
    path = serial_path(home)
    try:
        return int(read_raw(path))
    except FileNotFoundError:
        return 0
    except ValueError:
        raise Unreadable(path, "it does not hold a number", damaged=True) from None


def bump_serial(home: Home) -> int:
    """One more, and what it is now. Needs the store's lock. A damaged serial goes on from the clock: a number that no
    plan can have been made at."""
    try:
        following = read_serial(home) + 1
    except Unreadable as error:
        if not error.damaged:
            raise
        following = int(time.time())
    write_atomic(serial_path(home), f"{following}\n")
    return following
