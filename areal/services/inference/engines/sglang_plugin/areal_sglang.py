"""``python -m areal_sglang ARGS`` is ``sglang serve ARGS``, or, where the installed SGLang has no such command,
``python -m sglang.launch_server ARGS``, which newer ones do not recommend; with ``--api-key $AREAL_ENGINE_KEY`` if set.

A key on the command line could be read by every user of the node. Its sockets, which outlive it, are in the run's
folder, which goes with the run. Imports SGLang's environment only.
"""

import os
import runpy
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_LONGEST = 90  # bytes; a socket's path has 107


def has_command() -> bool:
    try:
        return find_spec("sglang.cli.serve") is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":  # its processes import this file again
    if "AREAL_ENGINE_KEY" in os.environ:
        sys.argv += ["--api-key", os.environ.pop("AREAL_ENGINE_KEY")]
    if len(str(Path.cwd())) <= _LONGEST:
        tempfile.tempdir = str(Path.cwd())
    if has_command():
        sys.argv = ["sglang", "serve", *sys.argv[1:]]
        import_module("sglang.cli.main").main()
    else:
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
