"""Token counters of engines, read off their Prometheus pages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

_TIMEOUT_S = 1.0
_NAMES = ("areal_engine_generated_tokens_total", "vllm:generation_tokens_total", "sglang:generation_tokens_total")
_SAMPLE = re.compile(
    rf"^(?:{'|'.join(re.escape(name) for name in _NAMES)})(?:\{{[^}}]*\}})?\s+(?P<value>[0-9.eE+-]+)", re.MULTILINE
)


def generated_tokens(urls: Mapping[str, str]) -> dict[str, float]:
    """By key of ``urls``: tokens generated since the engine started. Who does not answer is left out."""
    if not urls:
        return {}
    with ThreadPoolExecutor(min(16, len(urls)), thread_name_prefix="counter") as pool:
        found = pool.map(_ask, urls.values())
        return {key: count for key, count in zip(urls, found, strict=True) if count is not None}


def _ask(url: str) -> float | None:
    from areal.runtime.probes import Unreachable, http_get

    try:
        answer = http_get(f"{url}/metrics", timeout_s=_TIMEOUT_S)
    except Unreachable:
        return None
    return parse(answer.body.decode("utf-8", "replace")) if answer.status == 200 else None


def parse(page: str) -> float | None:
    """The sum over all series of the first counter that is known; None when none is there."""
    values = [float(match["value"]) for match in _SAMPLE.finditer(page)]
    return sum(values) if values else None
