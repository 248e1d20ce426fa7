"""The stand-ins answer as the real servers did (``python -m tests.engines.capture`` records them)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal.http.client import HttpClient
from tests.engines.capture import EXCHANGES, compare, differences, form, replies
from tests.services.inference.engines.conformance.engines import REPOSITORY, start
from tests.services.inference.engines.conformance.models import Models
from tests.services.inference.engines.conformance.standins.sglang import Sglang
from tests.services.inference.engines.conformance.standins.vllm import Vllm

REPLIES = sorted((REPOSITORY / "tests/engines/replies").glob("*.json"))


@pytest.mark.parametrize("recorded", REPLIES, ids=[path.stem for path in REPLIES])
async def test_stand_in_replies_are_subset_of_recorded_ones(
    recorded: Path, models: Callable[[bool], Models], log: Path, http: HttpClient
) -> None:
    engine, folder = recorded.stem.split("-")[0], models(False).folders[0]
    adapter = models(False).adapters["pirate"]
    process = start(f"{engine}-standin", folder, log)
    try:
        await process.wait_ready(http)
        found = await asyncio.to_thread(replies, engine, process.url, str(folder), str(adapter))
    finally:
        process.stop()
    differing = compare(json.loads(recorded.read_text()), found, whole=False)
    assert not differing, "\n".join(differing)


@pytest.mark.parametrize("engine", sorted(EXCHANGES))
def test_stand_in_has_only_recorded_routes(engine: str) -> None:
    core: Any = SimpleNamespace(folder="m")
    app = (Vllm(core, tied_fault=False) if engine == "vllm" else Sglang(core)).app()
    routes = {f"{route.method} {route.resource and route.resource.canonical}" for route in app.router.routes()}
    recorded = {name for path in REPLIES if path.stem.startswith(engine) for name in json.loads(path.read_text())}
    asked = {route.partition("?")[0] for name, route, _ in EXCHANGES[engine] if name in recorded}
    assert {route for route in routes if not route.startswith("HEAD ")} <= asked


def test_differences_name_field_and_change() -> None:
    old, new = form({"a": 1, "b": [{"c": "x"}], "d": None, "e": 1}), form({"a": "1", "b": [{"c": 2}], "d": 3, "f": 1})
    assert list(differences(old, new, "x", whole=True)) == [
        "x.f: is new (number)",
        "x.e: is gone",
        "x.a: was number, is text",
        "x.b[0].c: was text, is number",
    ]
    assert "x.e: is gone" not in list(differences(old, new, "x", whole=False))
