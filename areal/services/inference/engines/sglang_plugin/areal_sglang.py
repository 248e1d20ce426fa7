"""``python -m areal_sglang ARGS`` is ``python -m sglang.launch_server ARGS --api-key $AREAL_ENGINE_KEY``.

A key on the command line could be read by every user of the node. Imports SGLang's environment only.
"""

import os
import runpy
import sys

if __name__ == "__main__":  # its processes import this file again
    sys.argv += ["--api-key", os.environ.pop("AREAL_ENGINE_KEY")]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
