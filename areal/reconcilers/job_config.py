"""What a job's configuration says before its driver reads it: how engines are laid out, and of which model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal.errors import InvalidManifest
from areal.reconcilers.desired import Wanted
from areal.reconcilers.driver_choice import read_config
from areal.resources.backend_grammar import Allocation, BackendError, Part, parse_backend
from areal.resources.engine_flags import areal_sets
from areal.resources.paths import looks_local

_OFFLINE = ("sft", "rw", "dpo")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_DEEPEST = 10


class JobConfig:
    """A job's configuration as it is written, with its overrides. Nothing is checked here that the driver checks."""

    def __init__(self, job: Wanted, tree: dict[str, Any], folder: Path) -> None:
        self._job = job
        self._tree = tree
        self._folder = folder

    @classmethod
    def of(cls, job: Wanted) -> JobConfig:
        """Raises UsageFault. One that is not found is left to the driver's start, which says where it looked."""
        given, folder = job.spec.get("config"), Path(job.spec.get("workingDir") or Path.cwd())
        if isinstance(given, str):
            bases = [folder, *([Path(job.source["file"]).parent] if job.source and job.source.get("file") else [])]
            file = next((base / given for base in bases if (base / given).is_file()), None)
            tree = read_config(file) if file is not None else {}
        else:
            tree = _copied(given or {})
        for text in job.spec.get("overrides") or ():
            _override(tree, str(text))
        return cls(job, tree, folder)

    def get(self, key: str, default: Any = None, depth: int = 0) -> Any:
        """The value of a dotted key; ``${another.key}`` is looked up."""
        node: Any = self._tree
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        while isinstance(node, str) and (match := _REFERENCE.search(node)) and depth < _DEEPEST:
            depth += 1
            inner = self.get(match[1], None, depth)
            if inner is None:
                return default
            node = inner if match[0] == node else node.replace(match[0], str(inner))
        return node

    def text(self, key: str) -> str:
        value = self.get(key)
        return value if isinstance(value, str) else ""

    def inference(self) -> Part | None:
        """How its own engines are laid out. Raises InvalidManifest."""
        online = isinstance(self.get("rollout"), Mapping) and self.get("trainer.type") not in _OFFLINE
        if not online or self.get("rollout.gateway_addr"):
            return None
        for key in ("rollout.backend", "allocation_mode"):
            if said := self.text(key):
                part = self._parsed(key, said).inference
                return part if part is None or part.engine != "external" else None
        return None

    def training(self) -> tuple[str, Part] | None:
        """Which key lays out the training engine, and how. Raises InvalidManifest."""
        for key in ("actor.backend", "model.backend", "allocation_mode"):
            said = self.text(key)
            part = self._parsed(key, said).training if said else None
            if part is not None:
                return key, part
        return None

    def _parsed(self, key: str, said: str) -> Allocation:
        try:
            return parse_backend(said)
        except BackendError as error:
            raise InvalidManifest(f"{self._job.ref}: {key} {said!r}: {error}") from error

    def absolute(self, path: str) -> str:
        """A folder of the driver's working folder; a name on a hub as it is."""
        local = self._folder / Path(path).expanduser()
        return str(local) if local.exists() or looks_local(path) else path

    def engine_arguments(self, engine: str) -> dict[str, Any]:
        """The configuration's section for the engine, without what says nothing and what areal sets itself."""
        section = self.get(engine)
        given = {**section} if isinstance(section, Mapping) else {}
        if engine == "embedded" and self.text("actor.dtype"):
            given.setdefault("dtype", self.text("actor.dtype"))
        return {
            str(name): value
            for name, value in given.items()
            if value not in (None, "", [], {}) and not areal_sets(engine, str(name))
        }


def _override(tree: dict[str, Any], text: str) -> None:
    """``key=value``, with or without ``+``. What is wrong with it the driver says."""
    import yaml

    key, sign, value = text.lstrip("+").partition("=")
    *way, last = key.split(".")
    node = tree
    for part in way:
        below = node.setdefault(part, {})
        if not isinstance(below, dict):
            return
        node = below
    if sign and not key.startswith("~"):
        with suppress(yaml.YAMLError):
            node[last] = yaml.safe_load(value)


def _copied(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {str(key): _copied(value) for key, value in tree.items()}
    return [_copied(item) for item in tree] if isinstance(tree, list) else tree
