"""An update that leaves an engine's weights unknown: no token is sampled, and so none recorded with a wrong version,
until the engine has loaded the published weights again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.services.inference.running_service import in_thread, later
from tests.services.processes import Answer, Process, Processes, Stream, wait_ready, wait_until
from tests.services.scripted_api import ScriptedApi, scripted_api

OK: tuple[int, dict[str, Any]] = (200, {})
DONE = (200, {"results": ["None"]})
BROKEN = (500, {"error": {"message": "died after it had applied them"}})
RPC, FROM_DISK = "POST /collective_rpc", "POST /update_weights_from_disk"
PAUSE = {"vllm": "POST /pause", "sglang": "POST /pause_generation"}
RESUME = {"vllm": "POST /resume", "sglang": "POST /continue_generation"}
LOAD = {"vllm": RPC, "sglang": FROM_DISK}
GENERATE = {"vllm": "POST /v1/completions", "sglang": "POST /generate"}


@dataclass
class Engine:
    """A scripted server of ``kind``, which keeps its pause, its version label, and the version of what it computes
    with. ``breaks``: a load applies the weights and answers 500; ``gate``: loads wait for it."""

    kind: str
    api: ScriptedApi
    paused: bool = False
    label: str = "default"
    folders: list[str] = field(default_factory=list)
    breaks: bool = False
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    resumed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        api, kind = self.api, self.kind
        models = {"data": [{"id": "tiny", "root": "/models/tiny", "max_model_len": 4096}]}
        api.replies |= {"GET /v1/models": (200, models), "GET /health": OK, "GET /server_info": OK}
        api.replies |= {PAUSE[kind]: OK, RESUME[kind]: OK, "POST /update_weight_version": OK, LOAD[kind]: DONE}
        api.hooks |= {PAUSE[kind]: self._pause, RESUME[kind]: self._resume, LOAD[kind]: self._load}
        api.hooks["POST /update_weight_version"] = self._set_label
        self.generates(self.event(5, ends=True))
        self._tell()

    def _tell(self) -> None:
        about = {"weight_version": self.label, "model_path": "/models/tiny"}
        self.api.replies |= {"GET /model_info": (200, about), "GET /weight_info": (200, about)}
        self.api.replies |= {"GET /is_paused": (200, {"is_paused": self.paused})}
        self.api.replies["GET /ready"] = (503 if self.paused else 200, {})

    async def _pause(self) -> None:
        self.paused = True
        self.resumed.clear()
        self._tell()

    async def _resume(self) -> None:
        self.paused = False
        self.resumed.set()
        self._tell()

    async def _set_label(self) -> None:
        self.label = self.api.bodies("POST /update_weight_version")[-1]["new_version"]
        self._tell()

    async def _load(self) -> None:
        body = self.api.bodies(LOAD[self.kind])[-1]
        method, order = body.get("method"), body.get("kwargs", body)
        if method in ("areal_stage", "areal_state"):
            self.folders.append(order.get("path", self.folders[-1] if self.folders else ""))
            self.api.replies[LOAD[self.kind]] = DONE
            return
        assert self.paused
        if "path" in order or "model_path" in order:
            self.folders.append(order.get("path") or order["model_path"])
        if self.breaks:
            self.breaks = False
            self.api.replies[LOAD[self.kind]] = BROKEN
            return
        await self.gate.wait()
        self.api.replies[LOAD[self.kind]] = DONE

    def event(self, token: int, *, ends: bool = False) -> dict[str, Any]:
        if self.kind == "vllm":
            tops = [{f"token_id:{token}": -0.7, "token_id:6": -0.7}]
            logprobs = {"tokens": [], "token_logprobs": [-0.7], "top_logprobs": tops}
            finish = {"finish_reason": "length" if ends else None}
            return {"choices": [{"index": 0, "text": "", "token_ids": [token], "logprobs": logprobs, **finish}]}
        about = {
            "completion_tokens": 2 if token == 9 else 1,  # SGLang counts those of the events before
            "finish_reason": {"type": "length"} if ends else None,
            "output_token_logprobs": [[-0.7, token, None]],
            "output_top_logprobs": [[[-0.7, token, None], [-0.7, 6, None]]],
            "weight_version": self.label,
        }
        return {"text": "", "meta_info": about}

    def generates(self, *items: Any) -> None:
        self.api.replies[GENERATE[self.kind]] = [*items, "[DONE]"]


@pytest.fixture(params=["vllm", pytest.param("sglang", marks=pytest.mark.extended)])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    async with scripted_api() as api:
        yield Engine(request.param, api)


@dataclass
class Proxy:
    process: Process
    key: str
    folder: Path

    async def post(self, path: str, **body: Any) -> Answer:
        return await in_thread(self.process.call, "POST", path, body, key=self.key)

    async def ready(self) -> Answer:
        return await in_thread(self.process.call, "GET", "/ready")

    async def step(self, name: str, version: int) -> Answer:
        path = self.folder / f"v{version}"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text("{}")
        (path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
        return await self.post(f"/weights/{name}", pair_name="actor", version=version, source={"path": str(path)})

    async def update(self, version: int) -> Answer:
        assert (prepared := await self.step("prepare", version)).status == 200, prepared.body
        return await self.step("update", version)

    async def connect(self, **about: Any) -> None:
        (self.folder / "mark").write_text("word")
        offer = {"root": str(self.folder), "mark": "mark", "word": "word"}
        assert (await self.post("/weights/connect", pair_name="actor", mode="disk", offer=offer, **about)).status == 200


async def start_proxy(processes: Processes, engine: Engine, tokenizer: Path, folder: Path) -> Proxy:
    about = ("--model", "tiny", "--engine", engine.kind, "--engine-url", engine.api.url)
    kept = ("--state-dir", str(folder / "state"), "--tokenizer-path", str(tokenizer), "--model-path", str(tokenizer))
    process = await in_thread(processes.service, "data_proxy", *about, *kept)
    await in_thread(wait_ready, process)
    (folder / "weights").mkdir(exist_ok=True)
    return Proxy(process, processes.key, folder / "weights")


async def publish(engine: Engine, proxy: Proxy) -> None:
    """Publish version 1, which the engine has then."""
    await proxy.connect()
    engine.gate.set()
    assert (await proxy.update(1)).status == 200
    assert (await proxy.step("commit", 1)).status == 200


async def kill_in_an_update(engine: Engine, proxy: Proxy) -> None:
    """Kill the data proxy while the engine loads version 2."""
    engine.gate.clear()
    update = asyncio.create_task(proxy.update(2), name="update")
    await in_thread(wait_until, lambda: engine.label == "unknown", what="it is in the middle")
    proxy.process.kill()
    with pytest.raises(OSError):
        await update


async def test_running_call_waits_for_published_weights(
    engine: Engine, processes: Processes, tokenizer: Path, tmp_path: Path
) -> None:
    proxy = await start_proxy(processes, engine, tokenizer, tmp_path)
    await publish(engine, proxy)
    begun = asyncio.Event()

    async def begin() -> None:
        begun.set()
        await asyncio.sleep(0)

    async def after_a_pause() -> None:
        if not last:
            await failed.wait()
        await engine.resumed.wait()  # as a real engine, it samples nothing while it is paused
        last.update(engine.event(9, ends=True))

    last: dict[str, Any] = {}
    failed = asyncio.Event()
    engine.generates(engine.event(5), begin, after_a_pause, last)
    call = {"model": "tiny", "prompt": "Hello", "max_tokens": 2, "return_token_ids": True}
    events = later(lambda: list(Stream(proxy.process.port, "/v1/completions", call, processes.key).events()))
    await asyncio.wait_for(begun.wait(), 20)
    engine.gate.clear()
    engine.breaks = True
    assert (await proxy.update(2)).status == 502
    failed.set()
    assert engine.paused and engine.label == "unknown" and not events.done()
    refused = await proxy.post("/v1/completions", **call)
    assert (refused.status, refused.json()["error"]["code"]) == (503, "weights_behind")
    assert refused.headers["retry-after"] == "1"
    resume = asyncio.create_task(proxy.post("/continue_generation"), name="resume")
    assert (await proxy.ready()).status == 503
    assert engine.paused

    engine.gate.set()
    assert (await resume).status == 200
    versions = await in_thread(_versions, events)
    assert versions == [1, 1] and engine.label == "1"
    assert engine.folders[-1].endswith("v1")
    engine.generates(engine.event(5, ends=True))
    await in_thread(wait_ready, proxy.process)


async def test_client_pause_survives_failed_update_until_resume(
    engine: Engine, processes: Processes, tokenizer: Path, tmp_path: Path
) -> None:
    proxy = await start_proxy(processes, engine, tokenizer, tmp_path)
    await publish(engine, proxy)
    assert (await proxy.post("/pause_generation")).status == 200
    engine.breaks = True
    assert (await proxy.update(2)).status == 502
    await in_thread(wait_ready, proxy.process)  # it has version 1 again
    assert engine.paused and engine.label == "1"
    assert (await proxy.post("/continue_generation")).json()["paused"] is False
    assert not engine.paused


async def test_successor_of_killed_proxy_loads_published_weights(
    engine: Engine, processes: Processes, tokenizer: Path, tmp_path: Path
) -> None:
    proxy = await start_proxy(processes, engine, tokenizer, tmp_path)
    await publish(engine, proxy)
    await kill_in_an_update(engine, proxy)
    assert engine.paused
    engine.gate.set()
    await start_proxy(processes, engine, tokenizer, tmp_path)
    await asyncio.wait_for(engine.resumed.wait(), 20)
    assert engine.label == "1" and engine.folders[-1].endswith("v1")


async def test_missing_published_weights_block_serving_with_reason(
    engine: Engine, processes: Processes, tokenizer: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    shutil.copytree(tokenizer, own)
    (own / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    proxy = await start_proxy(processes, engine, own, tmp_path)
    await publish(engine, proxy)
    shutil.rmtree(proxy.folder / "v1")
    engine.breaks = True
    assert (await proxy.update(2)).status == 502
    says = "`areal weight-update release --model tiny`"
    await in_thread(wait_until, lambda: says in str(proxy.process.call("GET", "/ready").body), what="it says why")
    assert (await proxy.ready()).status == 503 and engine.paused

    assert (await proxy.post("/weights/release")).status == 200
    await in_thread(wait_ready, proxy.process)
    await asyncio.wait_for(engine.resumed.wait(), 20)
    assert engine.label == "0" and engine.folders[-1] == str(own)


async def test_successor_resumes_engine_after_engine_ended_update(
    engine: Engine, processes: Processes, tokenizer: Path, tmp_path: Path
) -> None:
    proxy = await start_proxy(processes, engine, tokenizer, tmp_path)
    await publish(engine, proxy)
    await kill_in_an_update(engine, proxy)
    if engine.kind == "sglang":  # sets the label of the request's body itself
        bodies = engine.api.bodies(FROM_DISK)
        engine.label = bodies[-1]["weight_version"]
        engine._tell()
    engine.gate.set()
    await start_proxy(processes, engine, tokenizer, tmp_path)
    await asyncio.wait_for(engine.resumed.wait(), 20)
    assert engine.label == "1" and engine.folders[-1].endswith("v1")


def _versions(events: Future[list[Any]]) -> list[int]:
    listed = events.result(30)
    assert listed[-1] == "[DONE]", listed
    return [version for event in listed[:-1] for choice in event["choices"] for version in choice.get("versions", ())]


async def test_successor_resumes_engine_paused_by_killed_proxy(
    engine: Engine, processes: Processes, tokenizer: Path, tmp_path: Path
) -> None:
    proxy = await start_proxy(processes, engine, tokenizer, tmp_path)
    await publish(engine, proxy)
    assert not list((tmp_path / "state").glob("pausing-*"))
    paused = asyncio.Event()

    async def pause_for_ever() -> None:
        await engine._pause()
        paused.set()
        await asyncio.Event().wait()

    engine.api.hooks[PAUSE[engine.kind]] = pause_for_ever
    update = asyncio.create_task(proxy.update(2), name="update")
    await asyncio.wait_for(paused.wait(), 20)
    assert engine.label == "1"
    proxy.process.kill()
    with pytest.raises(OSError):
        await update
    await start_proxy(processes, engine, tokenizer, tmp_path)
    await asyncio.wait_for(engine.resumed.wait(), 20)
    await in_thread(wait_until, lambda: not list((tmp_path / "state").glob("pausing-*")), what="the mark is gone")


async def test_pause_of_a_client_outlives_the_data_proxy(
    engine: Engine, processes: Processes, tokenizer: Path, tmp_path: Path
) -> None:
    proxy = await start_proxy(processes, engine, tokenizer, tmp_path)
    await publish(engine, proxy)
    assert (await proxy.post("/pause_generation")).status == 200
    assert not list((tmp_path / "state").glob("pausing-*"))
    proxy.process.kill()
    again = await start_proxy(processes, engine, tokenizer, tmp_path)
    assert (await again.step("pairs", 1)).status == 405
    assert engine.paused and not engine.resumed.is_set()
    assert (await again.post("/continue_generation")).status == 200 and not engine.paused


async def test_update_is_undone_when_trainer_dies_before_commit(
    engine: Engine, processes: Processes, tokenizer: Path, tmp_path: Path
) -> None:
    proxy = await start_proxy(processes, engine, tokenizer, tmp_path)
    trainer = await asyncio.start_server(answer_ok, "127.0.0.1", 0)
    gateway = "http://{}:{}".format(*trainer.sockets[0].getsockname())
    await proxy.connect(gateway=gateway)
    engine.gate.set()
    for step in ("prepare", "update", "commit"):
        assert (await proxy.step(step, 1)).status == 200
    assert (await proxy.update(2)).status == 200 and engine.label == "2"
    trainer.close()
    await in_thread(wait_until, lambda: engine.label == "1", what="version 1 is loaded again")
    await in_thread(wait_ready, proxy.process)
    assert (await proxy.ready()).json()["version"] == 1 and not engine.paused


async def answer_ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
    writer.close()
