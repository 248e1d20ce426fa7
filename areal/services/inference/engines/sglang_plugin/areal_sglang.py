"""``python -m areal_sglang ARGS`` runs ``sglang serve ARGS``, or, if the installed SGLang lacks this command, ``python
-m sglang.launch_server ARGS``, which newer versions do not recommend. If ``$AREAL_ENGINE_KEY`` is set, it is passed as
``--api-key``.

On the command line, every user of the node could read the key. The server's sockets are in the run's folder, because
they remain after its end, and are deleted with the folder. This module imports only packages of SGLang's environment.
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
