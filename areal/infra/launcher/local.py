"""``python -m areal.infra.launcher.local DRIVER.py --config FILE key=value ...``, AReaL's command to start a run. It
executes ``areal train run --driver DRIVER.py`` with the same arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from areal.installation import module_argv


def main(argv: Sequence[str] | None = None) -> NoReturn:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("-"):
        sys.stderr.write("error: no driver\nhint: python -m areal.infra.launcher.local driver.py --config FILE\n")
        sys.exit(2)
    driver, *rest = words
    sys.stdout.flush()
    os.execv(sys.executable, module_argv("areal.cli.main", "train", "run", "--driver", driver, *rest))


if __name__ == "__main__":
    main()
