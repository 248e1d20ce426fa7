"""Inference engines: the contract (``base``), areal's own engine (``embedded``), and the client for each engine. Engine
ports are never exposed; only the data proxy of the same replica calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal.http.client import HttpClient
    from areal.services.inference.engines.base import TokenEngine


def open_engine(kind: str, http: HttpClient, url: str, headers: dict[str, str]) -> TokenEngine:
    """Return the client of one engine process. Raises ValueError for an unknown kind."""
    if kind == "embedded":
        from areal.services.inference.engines.embedded_client import EmbeddedClient

        return EmbeddedClient(http, url, headers)
    if kind == "vllm":
        from areal.services.inference.engines.vllm import VllmClient

        return VllmClient(http, url, headers)
    if kind == "sglang":
        from areal.services.inference.engines.sglang import SglangClient

        return SglangClient(http, url, headers)
    raise ValueError(f"no token engine {kind!r}")
