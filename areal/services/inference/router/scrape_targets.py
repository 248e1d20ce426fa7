"""What Prometheus is to scrape, as its HTTP service discovery reads it: a list of ``{"targets", "labels"}``.

The router knows the data proxies and their engines at each moment, also after a rolling update gave them other ports.
Trainers register themselves, for a time that they renew. The label ``job`` tells the components apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from areal.services.inference.router.registry import Worker

LONGEST_TTL_S = 3600.0
_MOST = 1000
TARGET = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_LABEL = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]{0,63}")
_LONGEST_VALUE = 200

Target = dict[str, Any]


def target(url: str, job: str, **labels: str | None) -> Target:
    """``url``: of a service that answers /metrics."""
    known = {name: value for name, value in labels.items() if value}
    return {"targets": [urlsplit(url).netloc.rpartition("@")[2]], "labels": {"job": f"areal-{job}", **known}}


def targets_of(workers: Iterable[Worker]) -> list[Target]:
    """Each data proxy and each engine once, also where they serve several models."""
    found: dict[str, Target] = {}
    for worker in workers:
        about = {"model": worker.model, "worker_id": worker.id}
        found.setdefault(worker.addr, target(worker.addr, "data-proxy", **about))
        if (engine := worker.report.engine_url) is not None:
            found.setdefault(engine, target(engine, "engine", **about))
    return list(found.values())


@dataclass
class RegisteredTargets:
    """Those that registered themselves. Times are monotonic seconds."""

    _until: dict[str, tuple[Mapping[str, str], float]] = field(default_factory=dict)

    def register(self, data: Mapping[str, Any], now: float) -> None:
        """``{"target", "labels", "ttl_seconds"}``; 0 seconds remove it. Raises ValueError."""
        name, labels, ttl_s = data.get("target"), data.get("labels") or {}, data.get("ttl_seconds", 60)
        if not isinstance(name, str) or (match := TARGET.fullmatch(name)) is None or int(match[2]) > 65535:
            raise ValueError("target must be host:port")
        if not isinstance(labels, dict) or not all(_is_label(*each) for each in labels.items()):
            raise ValueError("labels must be an object of texts, each named as Prometheus names labels")
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not 0 <= ttl_s <= LONGEST_TTL_S:
            raise ValueError(f"ttl_seconds must be between 0 and {LONGEST_TTL_S:g}")
        self._until = {each: kept for each, kept in self._until.items() if kept[1] > now}
        self._until.pop(name, None)
        if ttl_s:
            if len(self._until) >= _MOST:
                raise ValueError(f"{_MOST} targets are registered already")
            self._until[name] = dict(labels), now + ttl_s

    def all(self, now: float) -> list[Target]:
        return [
            {"targets": [name], "labels": dict(labels)} for name, (labels, until) in self._until.items() if until > now
        ]


def _is_label(name: object, value: object) -> bool:
    is_name = isinstance(name, str) and _LABEL.fullmatch(name) is not None
    return is_name and isinstance(value, str) and len(value) <= _LONGEST_VALUE
