"""Which LoRA adapter a call's ``model`` names: ``adapter``, or ``model:adapter``."""

from __future__ import annotations

from collections.abc import Collection

from areal.services.web.errors import ApiError

DEFAULT = "default"  # what agents call the model that their session is of, whatever its name


def adapter_of(name: str | None, model: str, adapters: Collection[str]) -> str | None:
    """None where the model itself is named, or nothing. Raises 404 for what is neither."""
    if name is None or name == model:
        return None
    adapter = name.removeprefix(f"{model}:")
    if adapter in adapters:
        return adapter
    if name == DEFAULT:
        return None
    known = f"; its adapters are {', '.join(sorted(adapters))}" if adapters else ""
    message = f"the model {name!r} does not exist; here is {model!r}{known}"
    raise ApiError(404, message, code="model_not_found", param="model")
