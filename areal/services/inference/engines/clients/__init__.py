"""Clients by which a data proxy drives an engine process over loopback HTTP. ``open_engine`` knows them by name."""

from __future__ import annotations

from areal.services.inference.engines.base import TokenEngine
from areal.services.web.client import HttpClient

TOKEN_ENGINES = ("embedded", "vllm", "sglang")


def open_engine(kind: str, http: HttpClient, url: str, headers: dict[str, str]) -> TokenEngine:
    """The client of one engine process. Raises ValueError for a kind that is none."""
    if kind == "embedded":
        from areal.services.inference.engines.clients.embedded import EmbeddedClient

        return EmbeddedClient(http, url, headers)
    if kind == "vllm":
        from areal.services.inference.engines.clients.vllm import VllmClient

        return VllmClient(http, url, headers)
    if kind == "sglang":
        from areal.services.inference.engines.clients.sglang import SglangClient

        return SglangClient(http, url, headers)
    raise ValueError(f"no token engine {kind!r}")
