"""``/set_version``, as the gateway and a data proxy both read it: the version of the weights that sample next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.services.http.errors import ApiError, bad_request


def read_version(data: Mapping[str, Any]) -> tuple[int, bool]:
    """The version, and whether it may be below the one before. Raises 400."""
    version, force = data.get("version"), data.get("force", False)
    if type(version) is not int or not 0 <= version < 2**63:
        raise bad_request(f"version must be a whole number from 0, not {version!r}", param="version")
    if not isinstance(force, bool):
        raise bad_request("force must be true or false", param="force")
    return version, force


def check_grows(version: int, served: int | None, *, force: bool, where: str = "the engine") -> None:
    """Raises 409."""
    if served is not None and version < served and not force:
        message = f"{where} is at version {served}, above {version}: a version only grows, but with force: true"
        raise ApiError(409, message, code="version_not_growing", param="version")
