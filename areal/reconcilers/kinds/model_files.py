"""The folders of a Model: weights and tokenizers that its processes read, and the journals that they write.

A Hugging Face id's revision is resolved once: the commit is recorded in the object's status (``commits``, by
``id@revision``), and every later start has that commit again. Another ``path`` or ``revision`` is resolved again.
Missing ids are reported before a plan's first effect; files are downloaded when the first process needs them.

Recorded trajectories outlive the processes. They are deleted with the Model, but for finished trajectories that nobody
has exported: hours of rollouts are not thrown away by a ``delete``. A Model of the same name serves them again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from areal.errors import ArealError
from areal.hub import MAIN, TOKENIZER_FILES, Hub, Told, is_id
from areal.reconcilers.launch import secret_of, source_file
from areal.resources.kinds import Ref, check_name
from areal.resources.nodes import Diagnostic
from areal.resources.paths import looks_local, resolve_model_path
from areal.resources.resource import Resource
from areal.resources.specs import ModelSpec
from areal.state.home import Home
from areal.state.objects import ObjectStore
from areal.state.records import StoredObject

_DISPOSAL = "areal.services.inference.recorder.storage"
_DEADLINE_S = 60.0


def data_folder(home: Home, model: str) -> Path:
    return home.data / check_name(model)


def router_file(home: Home, service: Ref) -> Path:
    """What was declared to the routers of a service, and where its router is."""
    return home.object_folder(service) / "routes.json"


def left_behind(home: Home, models: Iterable[str]) -> list[Path]:
    """Folders of Models that are none of ``models``."""
    try:
        found = sorted(path for path in home.data.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    known = set(models)
    return [path for path in found if path.name not in known]


def dispose_of_data(home: Home, ref: Ref) -> str | None:
    """Remove what nobody could want, in a process of the recording's own: only that reads journals. What has to be said
    about the rest, or None where there is none."""
    folder = data_folder(home, ref.name)
    if not folder.exists():
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-m", _DISPOSAL, str(folder)],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            stdin=subprocess.DEVNULL,
            check=True,
        )
        remains = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return f"{ref}: {folder} is kept: {lines[-1] if lines else 'no reason given'}"
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        return f"{ref}: {folder} is kept: what is recorded in it could not be read: {error}"
    return _sentence(str(ref), folder, remains)


def _sentence(ref: str, folder: Path, remains: dict[str, object]) -> str | None:
    reasons = []
    finished = remains["finished"]
    if finished:
        plural = "trajectory was" if finished == 1 else "trajectories were"
        reasons.append(f"{finished} finished {plural} never exported")
    if remains["unreadable"]:
        reasons.append(f"unreadable journals: {_listed(remains['unreadable'])}")
    if remains["served"]:
        reasons.append(f"journals in use: {_listed(remains['served'])}")
    if not reasons:
        return None
    return f"{ref}: {folder} is kept: {'; '.join(reasons)}. A Model of this name serves it again; remove it by hand"


def _listed(names: object) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list) else str(names)


# -- weights and tokenizers

COMMITS = "commits"
_PARALLEL = 8


@dataclass(frozen=True)
class HubModel:
    """An id of a Model, and the revision that it is wanted at. ``only``: the files of it."""

    id: str
    revision: str
    only: tuple[str, ...] | None = None

    @property
    def key(self) -> str:
        return f"{self.id}@{self.revision}"


def hub_models(stored: StoredObject, spec: ModelSpec) -> Iterator[HubModel]:
    """The ids among a Model's paths: weights, tokenizer, adapters. An engine that runs already has its weights: only
    the tokenizer is needed."""
    if spec.external is not None:
        return
    attached = spec.engine_url is not None
    paths = {spec.path: spec.revision or MAIN} if spec.path and not (attached and spec.tokenizer_path) else {}
    for path in (spec.tokenizer_path, *spec.lora.values()):
        if path:
            paths.setdefault(path, MAIN)
    for path, revision in paths.items():
        if not looks_local(path) and is_id(path) and resolve_model_path(path, source_file(stored)) is None:
            yield HubModel(path, revision, TOKENIZER_FILES if attached else None)


def commits_of(stored: StoredObject, spec: ModelSpec) -> dict[str, str]:
    """The recorded commit of each id."""
    known = stored.status.get(COMMITS, {})
    return {model.id: known[model.key] for model in hub_models(stored, spec) if model.key in known}


def hub_of(stored: StoredObject, spec: ModelSpec) -> Hub:
    """With the Model's own settings: HF_TOKEN, HF_HOME, HF_ENDPOINT, ... of ``env`` and ``envFrom``."""
    names = [name for name in spec.env_from if name.startswith(("HF_", "HUGGING"))]
    secrets = {name: secret_of(spec.env_from[name], stored) for name in names}
    return Hub.of({**spec.env, **secrets})


def require_models(models: Mapping[str, tuple[StoredObject, ModelSpec]], told: Callable[[str, str], None]) -> None:
    """Raises NotFound or ArealError for the first of the ids that neither the cache nor the hub has. ``told``: the
    object's ref, and what is done for it."""
    wanted = [
        (ref, hub_of(stored, spec), model)
        for ref, (stored, spec) in models.items()
        for model in hub_models(stored, spec)
        if model.key not in stored.status.get(COMMITS, {})
    ]
    if not wanted:
        return

    def require(item: tuple[str, Hub, HubModel]) -> None:
        ref, hub, model = item
        told(ref, f"looking for {model.id}")
        try:
            hub.commit(model.id, model.revision)
        except ArealError as error:
            raise type(error)(f"{ref}: {error.message}", hint=error.hint) from error

    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="hub") as pool:
        list(pool.map(require, wanted))


@dataclass
class ModelFiles:
    """Of one execution: each id is downloaded once, however many processes need it."""

    store: ObjectStore
    waited_s: float = 0.0  # for downloads
    _locks: dict[str, threading.Lock] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def folders(
        self, stored: StoredObject, spec: ModelSpec, told: Callable[[str, int, int | None], None]
    ) -> dict[str, str]:
        """The folder of each id of a Model, its commits recorded. ``told``: the id, bytes done, of how many. Raises
        NotFound, ArealError."""
        found: dict[str, Path] = {}
        hub = hub_of(stored, spec)
        for model in hub_models(stored, spec):
            with self._lock:
                lock = self._locks.setdefault(f"{hub.cache}:{model.key}", threading.Lock())
            with lock:
                found[model.id] = self._folder(stored, hub, model, partial(told, model.id))
        return {name: str(folder) for name, folder in found.items()}

    def _folder(self, stored: StoredObject, hub: Hub, model: HubModel, told: Told) -> Path:
        now = self.store.get(stored.ref) or stored
        known = now.status.get(COMMITS, {}).get(model.key)
        folder = hub.cached(model.id, known) if known else None
        if folder is None:
            began = time.monotonic()
            folder = hub.snapshot(model.id, known or model.revision, only=model.only, told=told)
            self.waited_s += time.monotonic() - began
        if known != folder.name:
            with self._lock:
                now = self.store.get(stored.ref) or stored
                commits = {**now.status.get(COMMITS, {}), model.key: folder.name}
                self.store.put_statuses({stored.ref: {**now.status, COMMITS: commits}})
        return folder


def missing_folders(resource: Resource) -> list[Diagnostic]:
    problems = []
    for name in ("path", "tokenizerPath"):
        path = resource.spec.get(name)
        if not isinstance(path, str) or resolve_model_path(path, resource.source.file) is not None:
            continue
        if looks_local(path) or not is_id(path):
            message = f"model folder {path!r} does not exist (looked in the working directory and beside the manifest)"
            problems.append(Diagnostic(resource.pos_of((name,)), resource.text_of((name,)), message))
    return problems
