"""Runs a module with a clock that may be moved: ``python warped.py OFFSET_FILE MODULE ARGUMENTS``.

``time.time`` is the wall clock plus the seconds in the file, which may change at any time. Monotonic clocks go on: that
is what a step of a system's clock is.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

_wall = time.time


def main() -> None:
    file = Path(sys.argv[1])
    time.time = lambda: _wall() + float(file.read_text() or 0)
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
