from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import areal.state

HEAVY = ("pydantic", "yaml", "aiohttp", "torch", "http.client", "asyncio", "click")


def test_state_imports_only_standard_library_and_light_modules() -> None:
    names = sorted(path.stem for path in Path(areal.state.__file__).parent.glob("*.py") if path.stem != "__init__")
    code = f"""
import importlib, sys
before = set(sys.modules)
for name in {names!r}:
    importlib.import_module("areal.state." + name)
loaded = set(sys.modules) - before
print([name for name in {HEAVY!r} if name in sys.modules])
print(sorted({{name.partition(".")[0] for name in loaded}} - set(sys.stdlib_module_names)))
loaded -= {{"areal.wire", "areal.wire.notes"}}  # the notes of processes are lines of the events
floors = {{name.split(".")[1] for name in loaded if name.startswith("areal.")}}
print(sorted(floors - {{"state", "resources", "dataclasses", "errors", "files", "interrupt", "lazy"}}))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "[]\n['areal']\n[]\n"
