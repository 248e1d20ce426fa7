"""A job that is to begin is checked before a server starts for it: its configuration as its driver will read it, its
folders and its secrets. Each fault stands where the manifest, or the configuration's file, says it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from areal.errors import UsageFault
from areal.reconcilers.desired import Wanted
from areal.reconcilers.driver_choice import BUILT_IN, choose_driver, read_config
from areal.reconcilers.driver_source import config_class
from areal.reconcilers.job_checks import import_places
from areal.resources.diagnostics import Diagnostic, ManifestError, Pos
from areal.resources.importable import module_of
from areal.resources.kinds import Ref
from areal.resources.resource import Resource
from areal.resources.suggest import did_you_mean
from areal.resources.train_job import DRIVER
from areal.resources.tree import path_text

Job = tuple[Wanted, Resource]
_CONFIGS = {"grpo": "GRPOConfig", "ppo": "PPOConfig", "null": "PPOConfig"} | {
    "sft": "SFTConfig",
    "rw": "RWConfig",
    "dpo": "DPOConfig",
}
_LONGEST_S = 60.0


def job_faults(jobs: Iterable[Job], asking: Callable[[str], None] = lambda ref: None) -> dict[Ref, list[Diagnostic]]:
    """Every fault of every job that has some. ``asking`` is told of each job that takes a moment."""
    found: dict[Ref, list[Diagnostic]] = {}
    asked: list[tuple[Resource, dict[str, Any]]] = []
    for job, resource in jobs:
        faults = found[resource.ref] = [*_faults_around(job, resource)]
        if faults:
            continue
        try:
            request = _request(job)
        except ManifestError as error:  # of the configuration's file
            faults += error.diagnostics
        except UsageFault as error:  # there is no driver
            faults.append(_diagnostic(resource, ("config",), error.message, error.hint))
        else:
            if request is not None:
                asking(job.ref)
                asked.append((resource, request))
    for (resource, request), answer in zip(asked, _answers([request for _, request in asked]), strict=True):
        found[resource.ref] += [_placed(resource, request, fault) for fault in answer]
    return {ref: faults for ref, faults in found.items() if faults}


def _faults_around(job: Wanted, resource: Resource) -> Iterator[Diagnostic]:
    """Folders, files and secrets that are not there."""
    spec, folder = job.spec, _folder(job)
    if not folder.is_dir():
        yield _diagnostic(resource, ("workingDir",), f"there is no folder {str(folder)!r}")
    elif isinstance(spec.get("config"), str) and not (folder / spec["config"]).expanduser().is_file():
        file = folder / spec["config"]
        near = sorted(each.name for each in file.parent.iterdir() if each.is_file()) if file.parent.is_dir() else []
        message = f"there is no file {spec['config']!r}{did_you_mean(file.name, near)}"
        yield _diagnostic(resource, ("config",), message, f"looked in {folder} and beside the manifest")
    for name, source in (spec.get("envFrom") or {}).items():
        variable, secret = source.get("env"), source.get("file")
        if variable and not os.environ.get(variable):
            message = f"environment variable {variable} is not set"
            yield _diagnostic(resource, ("envFrom", name, "env"), message, f"export {variable}=... and apply again")
        if secret and not os.access(Path(secret).expanduser(), os.R_OK):
            yield _diagnostic(resource, ("envFrom", name, "file"), f"the secret's file {secret} cannot be read")


def _folder(job: Wanted) -> Path:
    return Path(str(job.spec.get("workingDir") or Path.cwd()))


def _request(job: Wanted) -> dict[str, Any] | None:
    """What is asked of ``areal.training.checking``; None where nobody can know what the driver reads. Raises
    UsageFault, ManifestError."""
    spec, given = job.spec, job.spec.get("config")
    file = str((_folder(job) / given).expanduser()) if isinstance(given, str) else ""
    content = read_config(Path(file)) if file else given or {}
    overrides = [str(each) for each in spec.get("overrides") or ()]
    driver = choose_driver(spec.get("driver"), content, overrides, file or job.ref)
    if re.fullmatch(DRIVER, driver) is None:
        raise UsageFault(f"{driver!r} is no driver", hint="module:function, or path/driver.py")
    dotted = driver.replace(":", ".")
    kind = next((kind for kind, known in BUILT_IN.items() if known.replace(":", ".") == dotted), None)
    config = _CONFIGS[kind] if kind is not None else _config_of(job, driver)
    if config is None:
        return None
    return {
        "config": config,
        "file": file,
        "text": None if file else json.dumps(content),
        "overrides": overrides,
        "folder": str(_folder(job)),
        "env": {**(spec.get("env") or {}), **dict.fromkeys(spec.get("envFrom") or (), "secret")},
        "built_in": kind is not None,
        "trains": kind != "null",
        "later": any(ref.startswith("TrainJob/") for ref in job.depends_on),
    }


def _config_of(job: Wanted, driver: str) -> str | None:
    """What a driver of the user's own reads, where its text says so."""
    name, colon, function = driver.partition(":")
    if name.endswith(".py"):
        file, rest = _folder(job) / Path(name).expanduser(), [function or "main"]
    else:
        module, function = (name, function) if colon else driver.rpartition(".")[::2]
        found = module_of(module, import_places(job))
        if isinstance(found, str):
            return None
        file, rest = found[0], [*found[1], function]
    try:
        return config_class(file.read_text(encoding="utf-8"), rest[0]) if len(rest) == 1 else None
    except (OSError, SyntaxError, ValueError):  # told elsewhere
        return None


def _answers(requests: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """One process for all. Where it cannot run (an extra is missing), the driver says what is wrong."""
    if not requests:
        return []
    nothing: list[list[dict[str, Any]]] = [[] for _ in requests]
    command = [sys.executable, "-P", "-m", "areal.training.checking"]
    try:
        done = subprocess.run(
            command, input=json.dumps(requests), capture_output=True, text=True, timeout=_LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return nothing
    return json.loads(done.stdout) if done.returncode == 0 else nothing


def _placed(resource: Resource, request: Mapping[str, Any], fault: Mapping[str, Any]) -> Diagnostic:
    path, message = tuple(fault["path"]), str(fault["message"])
    if fault["override"] is not None:
        at = ("overrides", request["overrides"].index(fault["override"]))
        return _diagnostic(resource, at, f"{path_text(path)}: {message}" if path else message)
    if request["file"]:
        line, column = fault["mark"] or (1, 1)
        return Diagnostic(Pos(request["file"], line, column), path_text(path), message)
    nested = (("trainer", kind, *path) for kind in BUILT_IN)  # as AReaL-lite has it
    places = [path, *nested] if path else [path]
    said = next((each for each in places if _is_said(resource.spec.get("config"), each)), path)
    return _diagnostic(resource, ("config", *said), message)


def _is_said(node: Any, path: tuple[Any, ...]) -> bool:
    for part in path:
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return True


def _diagnostic(resource: Resource, path: tuple[str | int, ...], message: str, hint: str | None = None) -> Diagnostic:
    return Diagnostic(resource.pos_of(path), resource.text_of(path), message, hint)
