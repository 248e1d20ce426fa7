"""The admin key of a service of this home: from where its spec says, else the generated one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from areal.errors import ArealError
from areal.resources.kinds import Ref

if TYPE_CHECKING:
    from areal.state.home import Home


def service_key(home: Home, service: str) -> str:
    """Raises ArealError saying why there is none to be had."""
    from areal.state.credentials import admin_key_path, read_key
    from areal.state.objects import ObjectStore

    found = ObjectStore(home).get(Ref("InferenceService", service))
    declared = ((found.spec.get("auth") or {}).get("adminKeyFrom") or {}) if found is not None else {}
    variable = declared.get("env")
    if variable:
        if not os.environ.get(variable):
            raise ArealError(
                f"the key of {service} is in the environment variable {variable}, which is not set here",
                hint=f"set {variable}, or give --api-key-file",
            )
        return os.environ[variable].strip()
    return read_key(Path(declared["file"]) if declared.get("file") else admin_key_path(home, service))
