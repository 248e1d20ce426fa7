"""The admin key of a service: which file holds it, and how that file comes to be. Standard library only.

Processes read the key from a file. A key that the spec takes from the environment is therefore written to the
service's 0600 file under ``credentials/`` when a process is started by a command that has the variable; later
commands, and the shim that restarts a process, need the file alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from areal.errors import InvalidManifest
from areal.resources.addresses import key_fault
from areal.state.files import explain, write_atomic
from areal.state.home import Home, admin_key_path, ensure_admin_key
from areal.state.records import StoredObject

LOOPBACK = "127.0.0.1"


def key_path(home: Home, service: StoredObject) -> Path:
    """The file that holds the service's key; it need not exist yet."""
    declared = _declared(service).get("file")
    return Path(str(declared)).expanduser() if declared else admin_key_path(home, service.name)


def require_usable_key(home: Home, service: StoredObject) -> None:
    """Refuse a declared key that the service's processes would refuse, before any of them is started. Reads only.

    Raises InvalidManifest: there is no key, it is malformed, or too short for an address that other machines reach.
    """
    declared = _declared(service)
    if not declared:
        return  # generated
    host = str((service.spec.get("gateway") or {}).get("host") or LOOPBACK)
    path = key_path(home, service)
    value = os.environ.get(str(declared["env"]), "").strip() if declared.get("env") else ""
    secret = value.encode() if value else _declared_content(service, path)
    if fault := key_fault(secret, host):
        raise InvalidManifest(
            f"{service.ref}: the key of {_where(declared)} cannot be used: {fault}",
            hint="write a long random key (openssl rand -hex 32), or drop adminKeyFrom to have one generated",
        )


def ensure_key(home: Home, service: StoredObject) -> Path:
    """The service's key file, made if it has to be. Raises InvalidManifest when the declared source has no key."""
    declared = _declared(service)
    path = key_path(home, service)
    if not declared:
        return ensure_admin_key(home, service.name)
    value = os.environ.get(str(declared["env"]), "").strip() if declared.get("env") else ""
    if not value:
        _declared_content(service, path)
    elif not path.exists() or path.read_text().strip() != value:
        write_atomic(path, value + "\n")
    return path


def _declared_content(service: StoredObject, path: Path) -> bytes:
    """What the declared key file holds. Raises InvalidManifest where there is none."""
    declared = _declared(service)
    try:
        return path.read_bytes().strip()
    except FileNotFoundError as error:
        absent = "does not exist" if declared.get("file") else "is not set here"
        hint = "write the key there" if declared.get("file") else f"export {declared['env']}=... and run it again"
        message = f"{service.ref}: {_where(declared)} {absent}"
        raise InvalidManifest(message, hint=f"{hint}, or drop adminKeyFrom to have one generated") from error
    except OSError as error:
        raise explain(error, path, "read the key in") from error


def _where(declared: dict[str, Any]) -> str:
    source, value = next(iter(declared.items()))
    return f"spec.auth.adminKeyFrom.{source} {value}"


def _declared(service: StoredObject) -> dict[str, Any]:
    found = (service.spec.get("auth") or {}).get("adminKeyFrom")
    return {name: value for name, value in found.items() if value} if isinstance(found, dict) else {}
