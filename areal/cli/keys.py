"""The admin key of a service of this home: the one that its processes read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.resources.kinds import Ref

if TYPE_CHECKING:
    from areal.state.home import Home


def service_key(home: Home, service: str) -> str:
    """Raises ArealError saying why there is none to be had."""
    from areal.reconcilers.admin_keys import key_path
    from areal.state.credentials import admin_key_path, read_key
    from areal.state.objects import ObjectStore

    found = ObjectStore(home).get(Ref("InferenceService", service))
    return read_key(key_path(home, found) if found is not None else admin_key_path(home, service))
