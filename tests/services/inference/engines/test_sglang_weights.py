"""Which weights SGLang has after each answer to an update, and how it is polled meanwhile."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from areal.http.client import HttpClient
from areal.services.inference.engines import sglang
from areal.services.inference.engines.base import EngineCall, EngineError, EngineFailed, EngineRefused
from areal.services.inference.engines.sglang import SglangClient
from areal.wire.sampling import SamplingParams
from tests.services.scripted_api import ScriptedApi, scripted_api

OK = (200, {"success": True, "message": "Success"})
FROM_DISK = "POST /update_weights_from_disk"
BROADCAST = "POST /update_weights_from_distributed"
LAYOUT = [["w", [2, 2], "F32"]]
NOT_FLUSHED = "Weights were updated, but the cache was not flushed because requests are still running or queued."
ONE_TOKEN = {
    "meta_info": {
        "completion_tokens": 1,
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.7, 5, None]],
        "output_top_logprobs": [[[-0.7, 5, None], [-0.7, 6, None]]],
    }
}


def refusal(message: str) -> tuple[int, dict[str, Any]]:
    return 400, {"success": False, "message": message}


def checksum(text: str) -> tuple[int, dict[str, Any]]:
    return 200, {"success": True, "per_engine_checksum": text}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"w": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


@pytest.fixture
async def api(folder: Path) -> AsyncIterator[ScriptedApi]:
    async with scripted_api() as api:
        about = {"model_path": str(folder), "weight_version": "3"}
        api.replies |= {"GET /model_info": (200, about), "GET /ready": (200, {}), "GET /server_info": (200, {})}
        api.replies |= {"POST /generate": [ONE_TOKEN, "[DONE]"], "POST /weights_checker": checksum("old")}
        api.replies |= {f"POST /{name}": OK for name in ("pause_generation", "continue_generation", "flush_cache")}
        api.replies |= {f"POST /{name}_weight_update": OK for name in ("begin", "end")}
        api.replies |= {FROM_DISK: OK, BROADCAST: OK, "POST /update_weight_version": OK}
        yield api


@pytest.fixture
async def client(api: ScriptedApi) -> AsyncIterator[SglangClient]:
    http = HttpClient()
    yield SglangClient(http, api.url, {})
    http.close()


def asked(api: ScriptedApi) -> list[str]:
    return [route for route, _, _ in api.got]


def versions_set(api: ScriptedApi) -> list[str]:
    bodies = api.bodies("POST /update_weight_version")
    assert all(body["abort_all_requests"] is False for body in bodies)
    return [body["new_version"] for body in bodies]


@pytest.mark.parametrize(
    ("answer", "after", "flush", "expected"),
    [
        (OK, checksum("new"), OK, None),
        (refusal(NOT_FLUSHED), checksum("new"), OK, None),
        (refusal(NOT_FLUSHED), checksum("new"), (400, {}), EngineFailed),
        (refusal("Failed to get weights iterator"), checksum("old"), OK, EngineRefused),
        (refusal("Failed to update weights. Rolling back to original weights."), checksum("mixed"), OK, EngineFailed),
        (refusal("Failed to update weights. Rolling back to original weights."), (404, {}), OK, EngineFailed),
        ((200, {"success": False, "message": "of an older server"}), checksum("old"), OK, EngineRefused),
        ((500, {}), checksum("old"), OK, EngineFailed),
    ],
    ids=["taken", "flushed-later", "not-flushed", "old", "mixed", "untold", "status-200", "broken"],
)
async def test_disk_update_outcome_is_decided_by_checksum(
    client: SglangClient, api: ScriptedApi, folder: Path, answer: Any, after: Any, flush: Any, expected: Any
) -> None:
    async def updated() -> None:
        api.replies["POST /weights_checker"] = after

    api.replies |= {FROM_DISK: answer, "POST /flush_cache": flush}
    api.hooks[FROM_DISK] = updated
    if expected is None:
        await client.load_weights(str(folder), 4)
        assert versions_set(api) == ["unknown", "4"]
        assert ("POST /flush_cache" in asked(api)) == (answer != OK)
        return
    with pytest.raises(EngineError) as raised:
        await client.load_weights(str(folder), 4)
    assert type(raised.value) is expected
    assert versions_set(api) == (["unknown", "3"] if expected is EngineRefused else ["unknown", "unknown"])


async def test_pause_skips_verification_of_verified_weights(
    client: SglangClient, api: ScriptedApi, folder: Path
) -> None:
    for version in (4, 5):
        await client.verify_weights(str(folder))
        before = len(api.got)
        await client.load_weights(str(folder), version)
        assert "POST /weights_checker" not in asked(api)[before:]
    await client.load_weights(str(folder), 6)
    assert asked(api).count("POST /weights_checker") == 3, "each update has a checksum of its own"


async def test_broadcast_runs_inside_update_session(client: SglangClient, api: ScriptedApi) -> None:
    await client.receive_weights("pair", LAYOUT, 3)
    steps = [path for path in asked(api) if path.endswith(("_weight_update", "_distributed"))]
    assert steps == ["POST /begin_weight_update", BROADCAST, "POST /end_weight_update"]


async def test_missing_update_session_routes_are_probed_once(client: SglangClient, api: ScriptedApi) -> None:
    del api.replies["POST /begin_weight_update"], api.replies["POST /end_weight_update"]
    for version in (3, 3):
        await client.receive_weights("pair", LAYOUT, version)
    assert asked(api).count("POST /begin_weight_update") == 1 and "POST /end_weight_update" not in asked(api)
    assert asked(api).count(BROADCAST) == 2


async def test_failed_broadcast_ends_session_and_open_end_fails(client: SglangClient, api: ScriptedApi) -> None:
    api.replies[BROADCAST] = refusal("Failed to receive weights: connection closed by peer")
    with pytest.raises(EngineRefused, match="old ones serve on: Failed to receive"):
        await client.receive_weights("pair", LAYOUT, 4)
    assert asked(api)[-2:] == ["POST /end_weight_update", "POST /update_weight_version"]
    api.replies |= {BROADCAST: OK, "POST /end_weight_update": refusal("out of memory")}
    with pytest.raises(EngineFailed, match="did not finish"):
        await client.receive_weights("pair", LAYOUT, 3)


@pytest.mark.parametrize(("reports", "error"), [("4", None), ("3", EngineFailed)])
async def test_server_without_version_route_uses_update_version(
    client: SglangClient, api: ScriptedApi, folder: Path, reports: str, error: type[EngineError] | None
) -> None:
    del api.replies["POST /update_weight_version"]
    api.replies["GET /model_info"] = (200, {"model_path": str(folder), "weight_version": reports})
    with pytest.raises(error) if error is not None else contextlib.nullcontext():
        await client.load_weights(str(folder), 4)
    api.replies |= {FROM_DISK: refusal("Failed to get weights iterator")}
    with pytest.raises(EngineRefused, match="old ones serve on"):
        await client.load_weights(str(folder), 5)


async def test_memory_is_released_only_when_server_is_idle(
    client: SglangClient, api: ScriptedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang dies of a release while it has a request, also of one that it has just answered."""
    api.replies |= {"POST /flush_cache": (400, {}), "POST /release_memory_occupation": (200, {})}
    busy = 3

    async def flushed() -> None:
        nonlocal busy
        busy -= 1
        api.replies["POST /flush_cache"] = (400, {}) if busy else OK

    api.hooks["POST /flush_cache"] = flushed
    await client.release_memory()
    assert asked(api) == ["POST /flush_cache"] * 3 + ["POST /release_memory_occupation"]
    monkeypatch.setattr(sglang, "_IDLE_S", 0.05)
    busy = 10**6
    with pytest.raises(EngineRefused, match="still has requests"):
        await client.release_memory()
    assert asked(api).count("POST /release_memory_occupation") == 1


async def test_shapes_stay_known_after_folder_is_deleted(
    client: SglangClient, api: ScriptedApi, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    await client.load_weights(str(folder), 3)
    other = tmp_path_factory.mktemp("other")
    save_file({"w": torch.zeros(3, 2)}, other / "model.safetensors")
    (other / "config.json").write_text((folder / "config.json").read_text())
    api.replies["GET /model_info"] = (200, {"model_path": "/gone", "weight_version": "3"})
    with pytest.raises(EngineRefused, match=r"w is \[3, 2\], was \[2, 2\]"):
        await client.load_weights(str(other), 4)


async def test_poll_samples_tokens_at_first_and_after_an_update_only(
    client: SglangClient, api: ScriptedApi, folder: Path
) -> None:
    sampled = []
    for update in (False, False, True, False):
        if update:
            await client.load_weights(str(folder), 3)
        before = len(api.got)
        state = await client.state()
        assert (state.not_ready, state.paused) == (None, False)
        sampled.append(asked(api)[before:].count("POST /generate") > 0)
        assert "GET /health" not in asked(api)
    assert sampled == [True, False, True, False]


async def test_engine_not_generating_after_update_is_not_ready(
    client: SglangClient, api: ScriptedApi, folder: Path
) -> None:
    await client.state()
    await client.load_weights(str(folder), 3)
    api.replies["POST /generate"] = (500, {"error": {"message": "device-side assert"}})
    assert "device-side assert" in str((await client.state()).not_ready)
    api.replies["POST /generate"] = [ONE_TOKEN, "[DONE]"]
    assert (await client.state()).not_ready is None


@pytest.mark.parametrize(
    ("commanded", "health", "not_ready", "paused"),
    [(True, None, None, True), (False, 200, None, True), (False, 503, "SGLang is starting", None)],
    ids=["by-this-client", "by-another", "starting"],
)
async def test_503_from_ready_means_paused_or_starting(
    client: SglangClient, api: ScriptedApi, commanded: bool, health: int | None, not_ready: str | None, paused: bool
) -> None:
    api.replies |= {"GET /ready": (503, {}), "GET /health": (health or 500, {})}
    if commanded:
        await client.pause()
    state = await client.state()
    assert (state.not_ready, state.paused) == (not_ready, paused)
    assert "POST /generate" not in asked(api)  # it would wait for the end of the pause
    assert ("GET /health" in asked(api)) == (health is not None)


@pytest.mark.parametrize("prompt", [(1, 320), (-1, 2)])
async def test_out_of_vocabulary_id_is_not_sent(
    client: SglangClient, api: ScriptedApi, prompt: tuple[int, ...]
) -> None:
    client.capabilities.vocab_size = 320
    with pytest.raises(EngineRefused, match="outside the model's vocabulary of 320"):
        await client.stream_to(EngineCall("c", (prompt,), SamplingParams()), lambda delta: None, lambda flow: None)
    with pytest.raises(EngineRefused, match="outside"):
        await client.score(prompt, 1)
    assert not api.got


async def test_stop_tokens_ignored_by_server_are_refused(client: SglangClient, api: ScriptedApi) -> None:
    sampling = SamplingParams(stop_token_ids=(7,), ignore_eos=True)
    with pytest.raises(EngineRefused, match="stop_token_ids"):
        await client.stream_to(EngineCall("c", ((1,),), sampling), lambda delta: None, lambda flow: None)
    assert not api.got


async def test_older_server_is_called_on_its_routes(client: SglangClient, api: ScriptedApi) -> None:
    api.replies |= {"GET /get_model_info": api.replies.pop("GET /model_info")}
    api.replies |= {"GET /get_server_info": api.replies.pop("GET /server_info")}
    del api.replies["GET /ready"]
    for _ in range(2):
        state = await client.state()
        assert (state.not_ready, state.version, state.paused) == (None, 3, None)
    assert asked(api).count("GET /model_info") == 1
    await client.pause()
    assert (await client.state()).paused is True
