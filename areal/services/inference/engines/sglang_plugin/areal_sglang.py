"""``python -m areal_sglang ARGS`` runs ``sglang serve ARGS``, or, if the installed SGLang lacks this command, ``python
-m sglang.launch_server ARGS``, which newer versions do not recommend. ``$AREAL_ENGINE_KEY``, if set, is ``--api-key``.

On the command line, every user of the node could read the key. The server's sockets are in the run's folder, because
they remain after its end, and are deleted with the folder. This module imports only packages of SGLang's environment.

SGLang serves random values for weights that a folder lacks, so one with fewer layers than its config.json is refused.
"""

import json
import os
import re
import runpy
import struct
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_LONGEST = 90  # bytes; a socket's path has 107
_LONGEST_HEADER = 100_000_000  # bytes, by safetensors
_LAYER = re.compile(r"\b(?:layers|h|blocks)\.(\d+)\.")


def has_command() -> bool:
    try:
        return find_spec("sglang.cli.serve") is not None
    except ModuleNotFoundError:
        return False


def missing_layers(folder: Path) -> str:
    """Return a message if the safetensors files of a model's folder have fewer layers than its config.json; else "",
    also for files of other forms, which SGLang checks itself."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        wanted = int(config.get("text_config", config)["num_hidden_layers"])
        layers: set[int] = set()
        for path in folder.glob("*.safetensors"):
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                names = json.loads(file.read(min(size, _LONGEST_HEADER)))
            layers.update(int(found[1]) for found in map(_LAYER.search, names) if found)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, struct.error):
        return ""
    if not layers or max(layers) + 1 >= wanted:
        return ""
    found = f"the weights of {max(layers) + 1} layers, and its config.json names {wanted}"
    return f"error: {folder} has {found}: save or download the model again"


if __name__ == "__main__":  # its processes import this file again
    if find_spec("sglang") is None:
        remedy = "pip install 'arealctl[sglang]' there, or name a Python that has it: env: {AREAL_ENGINE_PYTHON: PATH}"
        sys.exit(f"error: sglang is not installed in {sys.executable}: {remedy}")
    if "--model-path" in sys.argv and (fault := missing_layers(Path(sys.argv[sys.argv.index("--model-path") + 1]))):
        sys.exit(fault)
    if "AREAL_ENGINE_KEY" in os.environ:
        sys.argv += ["--api-key", os.environ.pop("AREAL_ENGINE_KEY")]
    if len(str(Path.cwd())) <= _LONGEST:
        tempfile.tempdir = str(Path.cwd())
    if has_command():
        sys.argv = ["sglang", "serve", *sys.argv[1:]]
        import_module("sglang.cli.main").main()
    else:
        runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
