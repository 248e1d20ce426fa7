"""Token counters of engines: our own engine's statistics, other engines' Prometheus pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal.runtime.backends.base import RunState
    from areal.state.home import Home

_TIMEOUT_S = 1.0
_NAMES = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
_SAMPLE = re.compile(
    rf"^(?:{'|'.join(re.escape(name) for name in _NAMES)})(?:\{{[^}}]*\}})?\s+(?P<value>[0-9.eE+-]+)", re.MULTILINE
)


def generated_tokens(home: Home, engines: Mapping[str, RunState]) -> dict[str, float]:
    """By uid: tokens generated since the engine started. An engine that does not tell is left out."""
    if not engines:
        return {}
    keys = _keys(home, engines.values())
    with ThreadPoolExecutor(min(16, len(engines)), thread_name_prefix="counter") as pool:
        found = pool.map(lambda state: _ask(str(state.spec.url), keys.get(state.spec.owner)), engines.values())
        return {uid: count for uid, count in zip(engines, found, strict=True) if count is not None}


def _keys(home: Home, states: Iterable[RunState]) -> dict[str, str]:
    """The admin key of each owner's service, where it can be read."""
    from areal.cli.keys import service_key
    from areal.cli.view import service_of
    from areal.errors import ArealError
    from areal.resources.kinds import parse_ref
    from areal.state.objects import ObjectStore

    found: dict[str, str] = {}
    for owner in {state.spec.owner for state in states}:
        model = ObjectStore(home).get(parse_ref(owner))
        service = service_of(model) if model is not None else None
        if service is None:
            continue
        try:
            found[owner] = service_key(home, service)
        except ArealError:
            continue  # then its counters stay closed to us; CPU and memory are shown all the same
    return found


def _ask(url: str, key: str | None) -> float | None:
    from areal.client.admin import AdminClient

    client = AdminClient(url, key, timeout_s=_TIMEOUT_S)
    try:
        status, document = client.get("/stats")
        if status == 200 and isinstance(document, dict) and "generated_tokens" in document:
            return float(document["generated_tokens"])
        status, page = client.get("/metrics")
    except OSError:
        return None
    return parse(page) if status == 200 and isinstance(page, str) else None


def parse(page: str) -> float | None:
    """The sum over all series of the first counter that is known; None when none is there."""
    values = [float(match["value"]) for match in _SAMPLE.finditer(page)]
    return sum(values) if values else None
