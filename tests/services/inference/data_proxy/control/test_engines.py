"""What each engine's own control routes are sent, and a data proxy's controls before a scripted one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from areal.http.client import HttpClient
from areal.services.inference.engines import open_engine
from areal.services.inference.engines.base import (
    UNKNOWN_VERSION,
    EngineError,
    EngineFailed,
    EngineRefused,
    EngineUnavailable,
    EngineUnsupported,
    TokenEngine,
    WeightStager,
)
from tests.services.inference.running_service import in_thread
from tests.services.processes import Answer, Process, Processes, wait_ready, wait_until
from tests.services.scripted_api import ScriptedApi, scripted_api

MODELS = (200, {"data": [{"id": "tiny", "root": "/models/tiny", "max_model_len": 4096}]})
OK: tuple[int, dict[str, Any]] = (200, {})
SAMPLED = {  # what each is asked before it is ready: how it reports log probabilities
    "POST /v1/completions": {
        "choices": [
            {
                "index": 0,
                "text": "",
                "token_ids": [5],
                "logprobs": {
                    "tokens": [],
                    "token_logprobs": [-0.7],
                    "top_logprobs": [{"token_id:5": -0.7, "token_id:6": -0.7}],
                },
                "finish_reason": "length",
            }
        ]
    },
    "POST /generate": {
        "text": "",
        "output_ids": [5],
        "meta_info": {
            "completion_tokens": 1,
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.7, 5, None]],
            "output_top_logprobs": [[[-0.7, 5, None], [-0.7, 6, None]]],
            "weight_version": "7",
        },
    },
}


@pytest.fixture
async def http() -> AsyncIterator[HttpClient]:
    client = HttpClient()
    yield client
    client.close()


@pytest.fixture
async def api() -> AsyncIterator[ScriptedApi]:
    async with scripted_api() as api:
        api.replies |= {"GET /health": OK, "GET /v1/models": MODELS, "GET /is_paused": (200, {"is_paused": False})}
        api.replies |= {route: [event, "[DONE]"] for route, event in SAMPLED.items()}
        yield api


def client(kind: str, http: HttpClient, api: ScriptedApi) -> TokenEngine:
    return open_engine(kind, http, api.url, {})


CONTROLS = ["pause", "resume", "release_memory", "restore_memory"]
ROUTES = {
    "vllm": ["/pause", "/resume", "/sleep", "/wake_up"],
    "sglang": [
        "/pause_generation",
        "/continue_generation",
        "/release_memory_occupation",
        "/resume_memory_occupation",
    ],
}


@pytest.mark.parametrize("kind", ROUTES)
async def test_controls_use_the_engines_documented_routes(http: HttpClient, api: ScriptedApi, kind: str) -> None:
    engine = client(kind, http, api)
    api.replies["POST /flush_cache"] = OK
    for control, route in zip(CONTROLS, ROUTES[kind], strict=True):
        with pytest.raises(EngineUnsupported):  # an engine without the route says so
            await getattr(engine, control)()
        api.replies[f"POST {route}"] = (500, {"error": {"message": "out of luck"}})
        with pytest.raises(EngineFailed, match="out of luck"):
            await getattr(engine, control)()
        api.replies[f"POST {route}"] = OK
        await getattr(engine, control)()
    posted = [route.removeprefix("POST ") for route, _, _ in api.got if route.startswith("POST")]
    posted = [route for route in posted if route != "/flush_cache"]  # before SGLang's memory is released
    assert posted == [route for route in ROUTES[kind] for _ in range(3)]


async def test_sglang_pause_retracts_and_version_aborts_nothing(http: HttpClient, api: ScriptedApi) -> None:
    engine = client("sglang", http, api)
    api.replies |= {"POST /pause_generation": OK, "POST /update_weight_version": OK}
    api.replies["GET /get_model_info"] = (200, {"weight_version": "7", "model_path": "/models/tiny"})
    await engine.pause()
    await engine.set_version(7)
    assert api.bodies("POST /pause_generation") == [{"mode": "retract"}]
    assert api.bodies("POST /update_weight_version") == [{"new_version": "7", "abort_all_requests": False}]
    assert await engine.version() == 7 and (await engine.state()).root == "/models/tiny"


async def test_vllm_keeps_the_version_until_the_engine_is_gone(http: HttpClient, api: ScriptedApi) -> None:
    engine = client("vllm", http, api)
    assert await engine.version() is None
    await engine.set_version(4)
    state = await engine.state()
    assert (state.version, state.root, state.paused) == (4, "/models/tiny", False)


@pytest.mark.parametrize(("kind", "route"), [("embedded", "/get_version"), ("sglang", "/get_model_info")])
async def test_version_of_silent_engine_is_unknown(http: HttpClient, api: ScriptedApi, kind: str, route: str) -> None:
    """It is not "none was set", which would let a lower version in."""
    engine = client(kind, http, api)
    api.replies[f"GET {route}"] = (500, {})
    with pytest.raises(EngineUnavailable, match="500"):
        await engine.version()
    api.replies[f"GET {route}"] = (200, {"version": 3, "weight_version": "3"})
    assert await engine.version() == 3


@pytest.mark.parametrize(
    ("results", "error", "version"),
    [(["no", "no"], EngineRefused, 0), (["None", "no"], EngineFailed, UNKNOWN_VERSION)],
)
async def test_load_fails_when_some_vllm_workers_refuse(
    http: HttpClient, api: ScriptedApi, results: list[str], error: type[EngineError], version: int
) -> None:
    """After a refusal by all of them the old weights serve on; after one by some the model is mixed."""
    api.replies["POST /collective_rpc"] = (200, {"results": results})
    engine = client("vllm", http, api)
    for load in (engine.load_weights("/weights", 1), cast(WeightStager, engine).load_staged(1)):
        with pytest.raises(error):
            await load
    assert await engine.version() == version


async def proxy_before(processes: Processes, api: ScriptedApi, tokenizer: Path) -> Process:
    flags = ("--model", "tiny", "--engine", "vllm", "--engine-url", api.url, "--tokenizer-path", str(tokenizer))
    process = await in_thread(processes.service, "data_proxy", *flags)
    await in_thread(wait_ready, process)
    return process


async def test_failed_pause_is_undone_and_released_memory_blocks_calls(
    processes: Processes, api: ScriptedApi, tokenizer: Path
) -> None:
    proxy = await proxy_before(processes, api, tokenizer)

    async def post(path: str, body: object = None) -> Answer:
        return await in_thread(proxy.call, "POST", path, body or {}, key=processes.key)

    assert (await post("/pause_generation")).json()["error"]["code"] == "unsupported_by_engine"
    api.replies |= {"POST /pause": (500, {"error": {"message": "half way"}}), "POST /resume": OK}
    api.got.clear()
    assert (await post("/pause_generation")).status == 502
    assert "POST /resume" in [route for route, _, _ in api.got]
    assert (await in_thread(proxy.call, "GET", "/ready")).json()["paused"] is False

    api.replies |= {"POST /sleep": OK, "POST /wake_up": OK}
    assert (await post("/release_memory_occupation")).status == 200
    assert (await in_thread(proxy.call, "GET", "/ready")).status == 503
    refused = await post("/v1/completions", {"prompt": "Hello"})
    assert (refused.status, refused.json()["error"]["code"]) == (503, "memory_released")
    assert (await post("/resume_memory_occupation")).status == 200
    assert (await in_thread(proxy.call, "GET", "/ready")).status == 200
    assert (await post("/set_version", {"version": 5})).json()["version"] == 5
    assert (await in_thread(proxy.call, "GET", "/ready")).json()["version"] == 5


async def test_failed_resume_is_retried(processes: Processes, api: ScriptedApi, tokenizer: Path) -> None:
    """No client would resume an engine whose pause was answered with an error."""
    proxy = await proxy_before(processes, api, tokenizer)
    broken = (500, {"error": {"message": "half way"}})
    api.replies |= {"POST /pause": broken, "POST /resume": broken}
    assert (await in_thread(proxy.call, "POST", "/pause_generation", {}, key=processes.key)).status == 502
    assert (await in_thread(proxy.call, "GET", "/ready")).json()["paused"] is True
    resumed = asyncio.Event()
    api.hooks["POST /resume"] = _set(resumed)
    api.replies |= {"POST /pause": OK, "POST /resume": OK}
    await asyncio.wait_for(resumed.wait(), 20)

    def is_paused() -> bool:
        return bool(proxy.call("GET", "/ready").json()["paused"])

    await in_thread(wait_until, lambda: not is_paused())
    # A pause that a client asked for stays.
    api.replies["GET /is_paused"] = (200, {"is_paused": True})
    assert (await in_thread(proxy.call, "POST", "/pause_generation", {}, key=processes.key)).status == 200
    api.got.clear()
    await asyncio.sleep(1.5)
    assert await in_thread(is_paused) and "POST /resume" not in [route for route, _, _ in api.got]


async def test_external_model_has_no_controls(processes: Processes, api: ScriptedApi) -> None:
    api.replies["GET /v1/models"] = OK
    flags = ("--model", "ours", "--engine", "external", "--engine-url", f"{api.url}/v1")
    proxy = await in_thread(processes.service, "data_proxy", *flags)
    for method, path in (("POST", "/pause_generation"), ("POST", "/set_version"), ("GET", "/get_version")):
        answer = await in_thread(proxy.call, method, path, {}, key=processes.key)
        assert (answer.status, answer.json()["error"]["code"]) == (400, "unsupported_by_engine")


async def test_pause_is_undone_when_caller_disconnects(processes: Processes, api: ScriptedApi, tokenizer: Path) -> None:
    proxy = await proxy_before(processes, api, tokenizer)
    pausing, resumed = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        pausing.set()
        await asyncio.Event().wait()

    api.hooks |= {"POST /pause": hang, "POST /resume": _set(resumed)}
    api.replies |= {"POST /pause": OK, "POST /resume": OK}
    caller, key = HttpClient(), {"Authorization": f"Bearer {processes.key}"}
    with contextlib.closing(caller):
        pause = caller.fetch("POST", proxy.url, "/pause_generation", timeout_s=20.0, headers=key, body=b"{}")
        call = asyncio.create_task(pause, name="pause")
        await asyncio.wait_for(pausing.wait(), 20)
        call.cancel()
        await asyncio.wait_for(resumed.wait(), 20)
    with pytest.raises(asyncio.CancelledError):
        await call


def _set(event: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def hook() -> None:
        event.set()

    return hook
