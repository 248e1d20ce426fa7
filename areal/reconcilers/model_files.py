"""The folders that a Model's processes read: a folder of this machine, or the snapshot of a Hugging Face id.

An id's revision is resolved once: the commit is recorded in the object's status (``commits``, by ``id@revision``), and
a process that is started later, by whichever command, has that commit again. Another ``path`` or ``revision`` is
resolved anew. Whether the ids of what a plan starts can be had at all is asked before its first effect; the files are
downloaded when the first process needs them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from areal.errors import ArealError
from areal.hub import MAIN, TOKENIZER_FILES, Hub, Told, is_id
from areal.reconcilers.launch import secret_of, source_file
from areal.resources.model import ModelSpec
from areal.resources.paths import looks_local, resolve_model_path
from areal.state.objects import ObjectStore
from areal.state.records import StoredObject

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
