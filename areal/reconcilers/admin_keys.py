"""The admin key of a service: which file holds it, and how that file comes to be. Standard library only.

Processes read the key from a file. A key that the spec takes from the environment is therefore written to the
service's 0600 file under ``credentials/`` when a process is started by a command that has the variable; later
commands, and the shim that restarts a process, need the file alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from areal.errors import ArealError
from areal.state.credentials import admin_key_path, ensure_admin_key
from areal.state.files import write_atomic
from areal.state.home import Home
from areal.state.records import StoredObject


def key_path(home: Home, service: StoredObject) -> Path:
    """The file that holds the service's key; it need not exist yet."""
    declared = _declared(service).get("file")
    return Path(str(declared)).expanduser() if declared else admin_key_path(home, service.name)


def ensure_key(home: Home, service: StoredObject) -> Path:
    """The service's key file, made if it has to be. Raises ArealError when the declared source has no key."""
    declared = _declared(service)
    path = key_path(home, service)
    if declared.get("file"):
        if not path.is_file():
            raise ArealError(
                f"{service.ref}: spec.auth.adminKeyFrom.file {declared['file']} does not exist",
                hint="write the key there, or drop adminKeyFrom to have one generated",
            )
        return path
    if not declared.get("env"):
        return ensure_admin_key(home, service.name)
    value = os.environ.get(str(declared["env"]), "").strip()
    if not value and not path.exists():
        raise ArealError(
            f"{service.ref}: spec.auth.adminKeyFrom.env {declared['env']} is not set here",
            hint=f"export {declared['env']}=... and run the command again",
        )
    if value and (not path.exists() or path.read_text().strip() != value):
        write_atomic(path, value + "\n")
    return path


def _declared(service: StoredObject) -> dict[str, Any]:
    found = (service.spec.get("auth") or {}).get("adminKeyFrom")
    return found if isinstance(found, dict) else {}
