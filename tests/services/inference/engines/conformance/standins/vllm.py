"""vLLM's routes as its server answers them (0.32, development mode): ``/inference/v1/generate``, ``/v1/completions``
with token ids, one event a choice, pause by ``keep``, ``/weight_info``, ``/collective_rpc`` with our worker extension.

``tied_fault``: what the real one does when it reloads weights by its own method on a CPU: it says that all is well, and
goes on with the old head.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web
from safetensors.torch import save_file

from areal.errors import ArealError
from areal.services.inference.engines.embedded.runner import DecoderRunner
from areal.services.inference.engines.vllm_plugin import areal_vllm
from tests.services.inference.engines.conformance.standins.core import Core, Refused, done

_FLOOR = -9999.0  # of log-probabilities; also -inf becomes it
_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
_SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "logit_bias", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids"),
)


class StandinWorker(areal_vllm.Worker):
    """What of vLLM's worker our extension uses; the extension is the real one."""

    rank = 0

    def __init__(self, core: Core, *, tied_fault: bool) -> None:
        self._core = core
        self._tied_fault = tied_fault
        model = SimpleNamespace(modules=tuple)
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        alone = SimpleNamespace(world_size=1)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(model=str(core.folder)), parallel_config=alone)

    def reload_weights(self, weights_path: str | None = None, weights_iterator: Any = None) -> None:
        runner: Any = self._core.engine._runner
        assert isinstance(runner, DecoderRunner)
        old_head = runner._decoder._head.values().clone()
        with tempfile.TemporaryDirectory() as folder:
            if weights_iterator is not None:
                held = {name: tensor.clone() for name, tensor in weights_iterator}
                save_file(held, Path(folder) / "model.safetensors")
            self._core.engine.load_weights(Path(weights_path or folder), None)
        if self._tied_fault:
            runner._decoder._head.assign(old_head)


class Vllm:
    def __init__(self, core: Core, *, tied_fault: bool) -> None:
        self._core = core
        self._worker = StandinWorker(core, tied_fault=tied_fault)
        self._running = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        gets = {
            "/health": self._health,
            "/v1/models": self._models,
            "/is_paused": self._is_paused,
            "/weight_info": self._weight_info,
            "/metrics": self._metrics,
        }
        posts = {
            "/v1/completions": self._completions,
            "/inference/v1/generate": self._generate,
            "/pause": self._pause,
            "/resume": self._resume,
            "/update_weight_version": self._set_version,
            "/collective_rpc": self._rpc,
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
        }
        app.router.add_routes([web.get(path, handler) for path, handler in gets.items()])
        app.router.add_routes([web.post(path, handler) for path, handler in posts.items()])
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        base, length = str(self._core.folder), self._core.engine.limits.max_length
        entries = [{"id": base, "object": "model", "root": base, "parent": None, "max_model_len": length}]
        for name in self._core.loaded.adapters:
            entries.append({"id": name, "object": "model", "root": name, "parent": base, "max_model_len": None})
        return web.json_response({"object": "list", "data": entries})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._core.engine.paused})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._core.label})

    async def _metrics(self, request: web.Request) -> web.Response:
        lines = [f'vllm:num_requests_running{{engine="0"}} {self._running}.0', 'vllm:num_requests_waiting{e="0"} 0.0']
        counted = self._core.engine.counters.generated_tokens
        lines.append(f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {float(counted)}')
        return web.Response(text="\n".join(lines) + "\n")

    def _adapter(self, body: dict[str, Any]) -> str | None:
        return None if body["model"] == str(self._core.folder) else body["model"]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "prompt_logprobs" in body:
            return await self._scored(body)
        assert body["stream"] and body["return_token_ids"] and body["return_tokens_as_token_ids"]
        sampling = {_NAMES.get(name, name): body[name] for name in _SAMPLING if name in body}
        if sampling["temperature"] == 0 and body.get("n", 1) > 1:
            return _error(400, "n must be 1 when using greedy sampling")
        top, adapter = body["logprobs"], self._adapter(body)
        deltas = self._core.deltas(
            body["prompt"], {**sampling, "top_logprobs": top}, adapter, body.get("response_format")
        )
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._running += 1
        try:
            async for delta in deltas:
                if not out.prepared:
                    await out.prepare(request)
                choice = _choice(delta, top)
                event = {"id": f"cmpl-{body['request_id']}", "object": "text_completion", "choices": [choice]}
                await out.write(_event(event))
            await out.write(b"data: [DONE]\n\n")
        except Refused as refused:
            if not refused.of_tokens:
                return _error(refused.status, str(refused))
            await out.prepare(request)  # the real one finds a bad token when it has answered 200
            error = {"error": {"message": str(refused), "type": "BadRequestError", "param": None, "code": 400}}
            await out.write(_event(error) + b"data: [DONE]\n\n")
        finally:
            await deltas.aclose()
            self._running -= 1
        return out

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """An answer once, or in events of ``stream_interval`` tokens, the first one at once. Its end has the spans."""
        body = await request.json()
        given, labels = body["sampling_params"], dict[int, list[str]]()
        assert given["detokenize"] is False
        sampling = {_NAMES.get(name, name): given[name] for name in _SAMPLING if name in given}
        adapter = self._adapter(body)
        top, waiting = given["logprobs"], dict[int, dict[str, Any]]()
        wanted = _response_format(given.get("structured_outputs"))
        deltas = self._core.deltas(body["token_ids"], {**sampling, "top_logprobs": top}, adapter, wanted)
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self._running += 1
        try:
            async for delta in deltas:
                sampled = labels.setdefault(delta.index, [])
                sampled += [self._core.label] * len(delta.token_ids)
                choice = waiting.setdefault(delta.index, _nothing(delta.index))
                add_tokens(choice, delta, top, sampled)
                count = len(choice["token_ids"])
                is_due = count == len(sampled) or count >= given.get("stream_interval", 1) if body["stream"] else False
                if body["stream"] and (is_due or delta.finish_reason is not None):
                    if not out.prepared:
                        await out.prepare(request)
                    await out.write(_event({"request_id": body["request_id"], "choices": [choice]}))
                    waiting[delta.index] = _nothing(delta.index)
            if not body["stream"]:
                choices = [waiting[index] for index in sorted(waiting)]
                return web.json_response({"request_id": body["request_id"], "choices": choices})
            await out.write(b"data: [DONE]\n\n")
        except Refused as refused:
            return _error(refused.status, str(refused))
        finally:
            await deltas.aclose()
            self._running -= 1
        return out

    async def _scored(self, body: dict[str, Any]) -> web.Response:
        """An entry for each token of the prompt, by token id: its own, and the likeliest; null for the first."""
        if body.get("stream"):
            return _error(400, "`prompt_logprobs` are not available when `stream=True`.")
        prompt, adapter = body["prompt"], self._adapter(body)
        values, tops = await self._core.scores(prompt, body["prompt_logprobs"], adapter)
        reported: list[Any] = [None]
        for token, value, top in zip(prompt[1:], values, tops, strict=True):
            ranked = {token: value, **dict(top)}
            reported.append({str(each): {"logprob": ranked[each], "rank": 1, "decoded_token": "x"} for each in ranked})
        choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length", "prompt_logprobs": reported}
        return web.json_response({"id": "cmpl-1", "object": "text_completion", "choices": [choice]})

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "keep"
        await done(self._core.engine.pause())
        await self._core.settle()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        await done(self._core.engine.resume())
        return web.json_response({"status": "resumed"})

    async def _set_version(self, request: web.Request) -> web.Response:
        self._core.label = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        method = getattr(self._worker, body["method"], None)
        if method is None:
            return _error(500, f"Call to collective_rpc method failed: no attribute {body['method']}")
        result = await asyncio.to_thread(method, **body["kwargs"])
        return web.json_response({"results": [result]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["lora_name"]
        if name in self._core.loaded.adapters and not body.get("load_inplace"):
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        try:
            adapter = self._core.engine.read_adapter(name, Path(body["lora_path"]))
        except ArealError as error:
            return _error(404, str(error))
        self._core.loaded.adapters[name] = adapter
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self._core.loaded.adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _sleep(self, request: web.Request) -> web.Response:
        await done(self._core.engine.release_memory())
        return web.json_response({"status": "sleeping", "level": 1})

    async def _wake_up(self, request: web.Request) -> web.Response:
        await done(self._core.engine.restore_memory())
        return web.json_response({"status": "awake", "tags": None})


def _error(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": status}}
    return web.json_response(body, status=status)


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _nothing(index: int) -> dict[str, Any]:
    return {"index": index, "token_ids": [], "logprobs": {"content": []}, "weight_versions": None}


def _response_format(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """``structured_outputs`` as the embedded engine takes it."""
    if wanted is None:
        return None
    if "json" in wanted:
        return {"type": "json_schema", "json_schema": {"schema": wanted["json"]}}
    ((kind, value),) = wanted.items()
    return {"type": kind, kind: value}


def add_tokens(choice: dict[str, Any], delta: Any, top: int, labels: list[str]) -> None:
    """``labels``: those of all tokens of the choice. The sampled token takes the place of an alternative."""
    for position, token in enumerate(delta.token_ids):
        entries = {token: delta.logprobs[position], **dict(delta.top_logprobs[position] if top else ())}
        listed = list(entries.items())[: max(top, 1)]
        tops = [{"token_id": each, "logprob": max(value, _FLOOR), "rank": 1} for each, value in listed]
        about = {"token_id": token, "logprob": max(delta.logprobs[position], _FLOOR), "rank": 1, "top_logprobs": tops}
        choice["logprobs"]["content"].append(about)
        choice["token_ids"].append(token)
    choice |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_token_id}
    if delta.finish_reason is not None:
        ends = [place for place in range(1, len(labels) + 1) if labels[place - 1 : place] != labels[place : place + 1]]
        spans = zip([0, *ends], ends, strict=False)
        choice["weight_versions"] = [{"version": labels[start], "start": start, "end": end} for start, end in spans]


def _choice(delta: Any, top: int) -> dict[str, Any]:
    """The sampled token is among its alternatives even where it is none of the likeliest."""
    tops = []
    for position, token in enumerate(delta.token_ids):
        entries = dict(delta.top_logprobs[position]) if top else {}
        entries[token] = delta.logprobs[position]
        tops.append({f"token_id:{each}": max(value, _FLOOR) for each, value in entries.items()})
    return {
        "index": delta.index,
        "text": "",
        "logprobs": {
            "token_logprobs": [max(value, _FLOOR) for value in delta.logprobs],
            "tokens": [],
            "top_logprobs": tops,
        },
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_token_id,
        "token_ids": delta.token_ids,
    }
