"""Where a model's ``path`` leads: a folder, or a Hugging Face id that only the engine can resolve."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def looks_local(path: str) -> bool:
    """Whether ``path`` can only mean a folder; ``org/name`` may be either."""
    return path.startswith(("/", "./", "../", "~")) or path in (".", "..") or path.count("/") > 1


def resolve_model_path(path: str, source_file: str | None = None) -> str | None:
    """The absolute folder that ``path`` names: from the working directory, else from beside its manifest.

    None when there is no such folder: a Hugging Face id, or a mistake when ``looks_local``.
    """
    found = _found(path, source_file)
    return str(found.resolve()) if found is not None and found.is_dir() else None


def with_absolute_paths(kind: str, spec: Mapping[str, Any], source_file: str | None = None) -> dict[str, Any]:
    """``spec`` with every path of a file or folder made absolute, once, when it is written: no later command's working
    directory can then change what it names. A path that names nothing here stays as it was written.

    From the working directory (a job's configuration: from the job's), else from beside its manifest, or one folder
    above it.
    """

    def absolute(value: Any, first: str | None = None) -> Any:
        found = _found(value, source_file, first) if isinstance(value, str) and value else None
        return os.path.abspath(found) if found is not None else value  # noqa: PTH100 - links stay links

    def made(value: Any, fields: tuple[str, ...]) -> Any:
        if not fields:
            return absolute(value)
        if not isinstance(value, Mapping):
            return value
        name, rest = fields[0], fields[1:]
        keys = list(value) if name == "*" else [name]
        return {**value, **{key: made(value[key], rest) for key in keys if key in value}}

    result = dict(spec)
    for fields in _PATHS.get(kind, ()):
        result = made(result, fields)
    if kind == "TrainJob" and isinstance(result.get("config"), str):
        result["config"] = absolute(result["config"], result.get("workingDir"))
    return result


_PATHS = {
    "InferenceService": (("auth", "adminKeyFrom", "file"),),
    "Model": (
        ("path",),
        ("tokenizerPath",),
        ("chatTemplate",),
        ("lora", "*"),
        ("envFrom", "*", "file"),
        ("external", "apiKeyFrom", "file"),
        ("engineApiKeyFrom", "file"),
    ),
    "AgentService": (("auth", "adminKeyFrom", "file"), ("envFrom", "*", "file")),
    "TrainJob": (("workingDir",), ("envFrom", "*", "file")),
}


def _found(path: str, source_file: str | None, first: str | None = None) -> Path | None:
    bases = [Path.cwd()] if first is None else [Path(first)]
    if source_file:
        bases += Path(source_file).absolute().parents[:2]
    try:
        return next((found for base in bases if (found := base / _expanded(path)).exists()), None)
    except OSError:  # too long for a name: it is none
        return None


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # a user that this machine does not have
        return Path(path)
