"""The collector of a serving process, in a process of its own: it is a setting of the whole interpreter."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, weakref
from areal.services.http.process import collect_rarely
collect_rarely()
assert gc.get_freeze_count() > 1000 and gc.get_threshold()[0] >= 10_000

class Node: pass

def cycle():
    node = Node()
    node.self = node
    return weakref.ref(node)

gone = cycle()
kept = [[] for _ in range(2 * gc.get_threshold()[0])]
assert gone() is None, "cycles are still found"
print("ok")
"""


def test_cycles_are_collected_rarely_and_what_was_imported_never() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout == "ok\n", ran.stderr
