"""SGLang's routes as 0.5.23 answers them: native ``/generate`` (each event repeats the whole answer so far), its pause,
weight, adapter and memory routes. It refuses unknown sampling parameters, of which ``seed`` is one."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import save_file
from torch.distributed import distributed_c10d as c10d

from areal.errors import ArealError
from tests.services.inference.engines.conformance.standins.core import Core, Refused, done

_SAMPLING = {
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "logit_bias", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids", "stream_interval"),
    *("regex", "ebnf"),
}


class Sglang:
    """``refuses``: weight versions that it does not take from a folder, whatever is in it."""

    def __init__(self, core: Core, refuses: Collection[str] = ()) -> None:
        self._core = core
        self._refuses = refuses
        self._session = False
        self._running: dict[str, bool] = {}  # by rid; True once it is to be aborted
        self._groups: dict[str, Any] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        gets = {
            "/health": self._health,
            "/ready": self._ready,
            "/server_info": self._server_info,
            "/model_info": self._model_info,
            "/v1/models": self._models,
            "/v1/loads": self._load,
        }
        posts = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._resume,
            "/update_weight_version": self._set_version,
            "/update_weights_from_disk": self._load_weights,
            "/init_weights_update_group": self._join_group,
            "/update_weights_from_distributed": self._receive,
            "/destroy_weights_update_group": self._leave_group,
            "/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._restore,
            "/begin_weight_update": self._begin,
            "/end_weight_update": self._end,
            "/weights_checker": self._check_weights,
            "/flush_cache": self._flush,
        }
        app.router.add_routes([web.get(path, handler) for path, handler in gets.items()])
        app.router.add_routes([web.post(path, handler) for path, handler in posts.items()])
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"context_length": None, "stream_interval": 1, "version": "0.5.23"})

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self._core.engine.paused else 200)

    async def _begin(self, request: web.Request) -> web.Response:
        if self._session:
            return _failed("a weight-update session is already open; call end_weight_update() first")
        self._session = True
        return web.json_response({"success": True, "message": "Success"})

    async def _end(self, request: web.Request) -> web.Response:
        if not self._session:
            return _failed("no weight-update session is open; call begin_weight_update() first")
        self._session = False
        return web.json_response({"success": True, "message": "Success"})

    async def _check_weights(self, request: web.Request) -> web.Response:
        assert (await request.json())["action"] == "checksum"
        runner: Any = self._core.engine._runner
        digest = hashlib.sha256()
        for _, tensor in runner._decoder.large_buffers():
            digest.update(tensor.contiguous().numpy().tobytes())
        checksum = digest.hexdigest()
        return web.json_response({"success": True, "message": "Success.", "per_engine_checksum": checksum})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": str(self._core.folder), "weight_version": self._core.label})

    async def _models(self, request: web.Request) -> web.Response:
        base = str(self._core.folder)
        length = self._core.engine.limits.max_length
        entries: list[dict[str, Any]] = [
            {"id": base, "object": "model", "root": base, "parent": None, "max_model_len": length}
        ]
        entries += [
            {"id": name, "object": "model", "root": name, "parent": base} for name in self._core.loaded.adapters
        ]
        return web.json_response({"object": "list", "data": entries})

    async def _load(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": len(self._running), "num_waiting_reqs": 0}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["logprob_start_len"] == 0:
            return await self._scored(body)
        assert body["return_logprob"] and body["logprob_start_len"] == -1
        sampling = dict(body["sampling_params"])
        schema, top = sampling.pop("json_schema", None), body["top_logprobs_num"]
        sampling.pop("skip_special_tokens", None)
        if unknown := sampling.keys() - _SAMPLING:
            return web.json_response({"error": f"unknown field `{min(unknown)}`, expected one of ..."}, status=400)
        interval = sampling.pop("stream_interval", 1)
        wanted = {"type": "json_schema", "json_schema": {"schema": json.loads(schema)}} if schema else None
        events = self._core.deltas(body["input_ids"], {**sampling, "top_logprobs": top}, body.get("lora_path"), wanted)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        so_far: dict[int, dict[str, Any]] = {}
        whole: dict[int, dict[str, Any]] = {}
        began = time.monotonic()
        self._running[body["rid"]] = False
        try:
            async for delta in events:
                if not out.prepared and body["stream"]:
                    await out.prepare(request)
                about = so_far.setdefault(delta.index, {"logprobs": [], "tops": [], "versions": [], "sent": 0})
                about["versions"] += [self._core.label] * len(delta.token_ids)
                pairs = zip(delta.logprobs, delta.token_ids, strict=True)
                about["logprobs"] += [[logprob, token, None] for logprob, token in pairs]
                about["tops"] += [[[value, token, None] for token, value in each] for each in delta.top_logprobs or ()]
                aborted = self._running[body["rid"]]
                event = _event(body["rid"], delta, about, len(body["input_ids"]), self._core.label, aborted)
                if event["meta_info"]["finish_reason"]:
                    event["meta_info"]["e2e_latency"] = time.monotonic() - began
                if not body["stream"]:
                    whole[delta.index] = event
                    continue
                if sampling.get("n", 1) > 1:
                    event["index"] = delta.index
                unsent, finish = len(about["logprobs"]) - about["sent"], event["meta_info"]["finish_reason"]
                if about["sent"] and unsent < interval and not finish:
                    continue
                about["sent"] += unsent
                await out.write(b"data: " + orjson.dumps(event) + b"\n\n")
                if aborted:
                    break
            if not body["stream"]:
                answers = [whole[index] for index in sorted(whole)]
                return _reply(answers if len(answers) > 1 else answers[0])
            await out.write(b"data: [DONE]\n\n")
        except Refused as refused:
            error = {"error": {"message": str(refused), "code": 400}}
            if not body["stream"]:
                return web.json_response(error, status=400)
            await out.prepare(request)  # the real one has answered 200 by then
            await out.write(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
        finally:
            await events.aclose()
            del self._running[body["rid"]]
        return out

    async def _scored(self, body: dict[str, Any]) -> web.Response:
        assert body["return_logprob"] and not body["stream"] and body["sampling_params"]["temperature"] == 1
        prompt, top = body["input_ids"], body["top_logprobs_num"]
        values, tops = await self._core.scores(prompt, top, body.get("lora_path"))
        about: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": 1, "output_token_logprobs": []}
        about["input_token_logprobs"] = [
            [value, token, None] for value, token in zip([None, *values], prompt, strict=True)
        ]
        if top:
            about["input_top_logprobs"] = [None, *([[value, token, None] for token, value in each] for each in tops)]
        return _reply({"text": "x", "meta_info": about})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = (await request.json())["rid"]
        if rid in self._running:
            self._running[rid] = True
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        assert (await request.json())["mode"] == "retract"
        await done(self._core.engine.pause())
        await self._core.settle()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _resume(self, request: web.Request) -> web.Response:
        await done(self._core.engine.resume())
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _set_version(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["abort_all_requests"] is False
        self._core.label = str(body["new_version"])
        return web.json_response({"success": True, "new_version": self._core.label})

    async def _load_weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["flush_cache"] is True and body["abort_all_requests"] is False
        if Path(body["model_path"]).name.removeprefix("v") in self._refuses:
            return _failed("out of memory", num_paused_requests=0)
        try:
            self._core.engine.load_weights(Path(body["model_path"]), None)
        except ArealError as error:
            return _failed(str(error), num_paused_requests=0)
        self._core.label = body["weight_version"] or self._core.label
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _join_group(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["group_name"]
        if name in self._groups:
            return web.json_response({"success": False, "message": f"group {name} is there already"}, status=400)
        self._groups[name] = await asyncio.to_thread(_custom_group, body)
        return web.json_response({"success": True, "message": "Succeeded to initialize custom process group."})

    async def _receive(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["flush_cache"] is True and body["abort_all_requests"] is False
        if not self._session:
            return _failed("update_weights_from_distributed must run between begin_weight_update() and ...")
        if body["group_name"] not in self._groups:
            return _failed(f"Failed to receive weights: Group {body['group_name']} not in []. ...")
        try:
            await asyncio.to_thread(self._load_broadcast, body)
        except (ArealError, RuntimeError) as error:
            return _failed(f"Failed to update parameter online: {error}. The full weights ... are partially updated.")
        self._core.label = body["weight_version"] or self._core.label
        return web.json_response({"success": True, "message": "Succeeded to update parameter online."})

    def _load_broadcast(self, body: dict[str, Any]) -> None:
        shapes = zip(body["names"], body["dtypes"], body["shapes"], strict=True)
        held = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in shapes}
        group = self._groups[body["group_name"]]
        works = [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in held.values()]
        for work in works:
            work.wait()
        if not held:
            return
        with tempfile.TemporaryDirectory() as folder:
            save_file(held, Path(folder) / "model.safetensors")
            self._core.engine.load_weights(Path(folder), None)

    async def _leave_group(self, request: web.Request) -> web.Response:
        group = self._groups.pop((await request.json())["group_name"], None)
        if group is None:
            return _failed("The group to be destroyed does not exist.")
        dist.destroy_process_group(group)
        return web.json_response({"success": True, "message": "Succeeded to destroy custom process group."})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, adapters = body["lora_name"], self._core.loaded.adapters
        if name in adapters:
            return web.json_response({"success": False, "error_message": f"{name} is loaded already"}, status=400)
        try:
            adapters[name] = self._core.engine.read_adapter(name, Path(body["lora_path"]))
        except ArealError as error:
            return web.json_response({"success": False, "error_message": str(error)}, status=400)
        return web.json_response({"success": True, "loaded_adapters": list(adapters)})

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self._core.loaded.adapters.pop(name, None) is None:
            return web.json_response({"success": False, "error_message": f"{name} is not loaded"}, status=400)
        return web.json_response({"success": True, "loaded_adapters": list(self._core.loaded.adapters)})

    async def _flush(self, request: web.Request) -> web.Response:
        return web.Response(status=400 if self._running else 200, text="Flushes.")

    async def _release(self, request: web.Request) -> web.Response:
        await done(self._core.engine.release_memory())
        return web.Response()

    async def _restore(self, request: web.Request) -> web.Response:
        await done(self._core.engine.restore_memory())
        return web.Response()


def _reply(answer: Any) -> web.Response:
    """As orjson writes it, also events: log-probabilities that are not finite are null."""
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


def _failed(message: str, **more: int) -> web.Response:
    return web.json_response({"success": False, "message": message, **more}, status=400)


def _custom_group(body: dict[str, Any]) -> Any:
    """As torch makes a group, behind the name of this one: the way that is documented for those who join it."""
    helpers: Any = c10d
    rank, timeout = body["rank_offset"], datetime.timedelta(seconds=60)
    place = f"tcp://{body['master_address']}:{body['master_port']}"
    store, rank, size = next(helpers.rendezvous(place, rank, body["world_size"], timeout=timeout))
    store.set_timeout(timeout)
    store, backend = helpers.PrefixStore(body["group_name"], store), helpers.Backend(body["backend"])
    group, _ = helpers._new_process_group_helper(
        size, rank, [], backend, store, group_name=body["group_name"], backend_options=None, timeout=timeout
    )
    helpers._world.pg_group_ranks[group] = {member: member for member in range(size)}
    return group


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for number, version in enumerate(versions):
        if not spans or spans[-1]["version"] != version:
            spans.append({"version": version, "start": number, "end": number})
        spans[-1]["end"] = number + 1
    return spans


def _event(
    rid: str, delta: Any, about: dict[str, Any], prompt_tokens: int, label: str, aborted: bool
) -> dict[str, Any]:
    finish: dict[str, Any] | None = None
    if aborted:
        finish = {"type": "abort", "message": "aborted by request"}
    elif delta.finish_reason == "length":
        finish = {"type": "length", "length": len(about["logprobs"])}
    elif delta.finish_reason == "stop":
        finish = {"type": "stop", "matched": delta.stop_token_id}
    return {
        "text": "",
        "output_ids": [entry[1] for entry in about["logprobs"]],
        "meta_info": {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(about["logprobs"]),
            "weight_version": label,
            "output_token_logprobs": about["logprobs"],
            "output_top_logprobs": about["tops"],
            **({} if finish is None else {"weight_versions": _spans(about["versions"])}),
        },
    }
