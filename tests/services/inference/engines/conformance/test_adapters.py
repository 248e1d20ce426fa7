"""LoRA adapters, chosen by each call."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from areal.services.inference.engines.base import EngineError, check_weights
from tests.services.inference.engines.conformance.conftest import Subject
from tests.services.inference.engines.conformance.models import TOLERANCE, gap, probe
from tests.services.inference.engines.conformance.test_generation import LONG, PROMPT, reported, tokens


@pytest.fixture(autouse=True)
def needed(engine: Subject) -> None:
    engine.needs("adapters")


async def check_side_by_side(engine: Subject, names: list[str | None]) -> None:
    for prompt in (PROMPT, LONG):
        answers = await asyncio.gather(
            *(engine.run(prompt, max_new_tokens=12, ignore_eos=True, adapter=name) for name in names)
        )
        for name, deltas in zip(names, answers, strict=True):
            model = engine.models.adapted[name] if name else engine.models.versions[0]
            assert gap(model, prompt, tokens(deltas), reported(deltas)) < TOLERANCE


async def test_each_call_uses_named_adapter(engine: Subject) -> None:
    await check_side_by_side(engine, ["pirate", "poet", "pirate"])
    await check_side_by_side(engine, [None])


async def test_base_model_calls_share_batch_with_adapters(engine: Subject, request: pytest.FixtureRequest) -> None:
    if engine.kind == "vllm":
        # Seen with 0.32 on a CPU: in a batch with adapters, rows that have none get some adapter's delta, several nats
        # off; every status is 200. Its GPU kernels were not looked at.
        request.applymarker(pytest.mark.xfail(strict=True, reason="vLLM on a CPU mixes adapters into rows without"))
    await check_side_by_side(engine, [None, "pirate", "poet", None, "pirate"])


async def control(engine: Subject, route: str, **body: str) -> int:
    data = orjson.dumps({"name": "guest", **body})
    return (await engine.http.fetch("POST", engine.process.url, route, timeout_s=60, body=data)).status


async def test_adapter_is_loaded_replaced_and_removed_at_runtime(engine: Subject) -> None:
    if engine.kind != "embedded":
        pytest.skip("only the embedded engine's routes are ours")
    for name in ("pirate", "poet"):
        assert await control(engine, "/load_adapter", path=str(engine.models.adapters[name])) == 200
        assert "guest" in (await engine.client.state()).adapters
        answer = await engine.run(PROMPT, max_new_tokens=2, ignore_eos=True, adapter="guest")
        assert gap(engine.models.adapted[name], PROMPT, tokens(answer), reported(answer)) < TOLERANCE
    assert await control(engine, "/load_adapter", path=str(engine.models.folders[0])) == 400  # has no adapter
    assert await control(engine, "/unload_adapter") == 200
    assert "guest" not in (await engine.client.state()).adapters
    with pytest.raises(EngineError):
        await engine.run(PROMPT, max_new_tokens=2, adapter="guest")
    await check_weights(engine.client, probe(engine.models.versions[0], PROMPT))
