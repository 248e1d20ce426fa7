"""Implementations that other packages bring, by name: backends of ``spec.scheduler.type``, and train engines.

Each is a factory, ``"module:function"``, which is imported when it is first used. A package registers its own as an
entry point of the registry's group, or by ``register``:

    [project.entry-points."areal.backends"]
    ray = "areal_ray.backend:open_backend"
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

_NAME = re.compile(r"[a-z]([-_a-z0-9]*[a-z0-9])?")


class PluginRegistry:
    """Factories by name: those built in, those registered by this process, entry points of ``group``."""

    def __init__(self, group: str, built_in: dict[str, str]) -> None:
        self.group = group
        self.factories = dict(built_in)

    def register(self, name: str, factory: str) -> None:
        """``name``: lower-case letters, digits, dashes and underscores. ``factory``: ``"module:function"``. A later
        registration of a name replaces an earlier one. Raises ValueError."""
        module, _, function = factory.partition(":")
        if not _NAME.fullmatch(name) or not module or not function:
            raise ValueError(f"not the name and the factory of a plugin: {name!r}, {factory!r}")
        self.factories[name] = factory

    def __contains__(self, name: str) -> bool:
        return self._factory(name) is not None

    def make(self, name: str, *args: Any) -> Any:
        """Call the factory of ``name`` with ``args``. Raises KeyError where nothing has the name."""
        factory = self._factory(name)
        if factory is None:
            raise KeyError(name)
        module, _, function = factory.partition(":")
        return getattr(import_module(module), function)(*args)

    def _factory(self, name: str) -> str | None:
        if name in self.factories:
            return self.factories[name]
        from importlib.metadata import entry_points  # slow to import: only for a name that is not built in

        return next((point.value for point in entry_points(group=self.group, name=name)), None)


BACKENDS = PluginRegistry("areal.backends", {"local": "areal.runtime.backends.local:LocalBackend"})
"""``factory(home_root, lease_dir, crash) -> areal.runtime.backends.base.Backend``; see ``areal.runtime.backends``."""

TRAIN_ENGINES = PluginRegistry("areal.train_engines", {"fsdp": "areal.training.engines.fsdp:FSDPEngine"})
"""``factory(config, ranks, total_steps) -> areal.api.engine_api.TrainEngine``; see ``areal.training.engines``."""
