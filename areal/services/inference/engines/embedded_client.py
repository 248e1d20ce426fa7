"""The client of the embedded engine: ``/generate`` with a whole answer or NDJSON, and its controls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal.http.client import HttpClient
from areal.services.inference.engines import base, transport

_NO_RELEASE = "this engine cannot release its memory"
_NO_GROUP = "this engine joins no process group"
_NO_STAGING = "this engine stages no weights"


class EmbeddedClient(transport.EngineClient):
    """The client of the embedded engine. ``state`` detects ``response_format``, which depends on its packages."""

    group_form = "plain"

    def __init__(self, http: HttpClient, url: str, headers: Mapping[str, str]) -> None:
        capabilities = base.Capabilities(
            many_prompts=True, free_seeds=True, prompt_logprobs=True, whole_answers=True, swaps_between_steps=True
        )
        super().__init__(http, url, headers, capabilities)

    def _request(self, call: base.EngineCall) -> transport.GenerateRequest:
        sampling = transport.sampling_fields(call)
        body: dict[str, object] = {"sampling": sampling, "stream": call.stream, "request_id": call.request_id}
        body["input_ids"] = call.prompt if len(call.prompts) == 1 else call.prompts
        if call.images:
            body["image_data"] = call.images
        if call.seeds is not None:
            body["seeds"] = call.seeds
        if call.adapter is not None:
            body["adapter"] = call.adapter
        if call.stream_interval > 1:
            body["stream_interval"] = call.stream_interval
        if call.response_format is not None:
            body["response_format"] = call.response_format
        return "/generate", body, transport.JsonLines(_read)

    async def score(self, prompt: Sequence[int], top: int, adapter: str | None = None) -> base.PromptLogprobs:
        body = {"input_ids": list(prompt), "top_logprobs": top, **({} if adapter is None else {"adapter": adapter})}
        reported = await self._command(
            "/score", body, if_missing="this engine scores no prompts", timeout_s=transport.LOAD_S
        )
        tops = tuple(tuple((int(token), value) for token, value in each) for each in reported["top_logprobs"])
        return base.PromptLogprobs(tuple(reported["logprobs"]), tops)

    async def abort(self, request_id: str) -> None:
        await self._control("/abort", {"request_id": request_id})

    async def state(self) -> base.EngineState:
        status, data = await self._get("/ready")
        if status != 200:
            stage = data.get("stage") or data.get("reason") or "no answer"
            return base.EngineState(not_ready=f"the engine is not ready: {stage}")
        if data.get("memory_released"):
            return base.EngineState(not_ready="the engine's memory is released")
        self.capabilities.response_format = data.get("structured") is True
        self.capabilities.no_response_format = str(data.get("no_grammars") or "")
        self.capabilities.images = data.get("images") is True
        self.capabilities.no_images = str(data.get("no_images") or "")
        return base.EngineState(
            not_ready=None,
            adapters=tuple(data.get("adapters") or ()),
            version=transport.typed(data, "version", int),
            max_model_len=transport.typed(data, "max_model_len", int),
            root=transport.typed(data, "model_path", str),
            paused=transport.typed(data, "paused", bool),
            generated=transport.typed(data, "generated", int),
        )

    async def pause(self) -> None:
        await self._command("/pause_generation", if_missing="this engine has no pause")

    async def resume(self) -> None:
        await self._command("/continue_generation", if_missing="this engine has no pause")

    async def set_version(self, version: int) -> None:
        await self._command("/set_version", {"version": version}, if_missing="this engine keeps no version")

    async def version(self) -> int | None:
        status, answer = await self._get("/get_version")
        if status != 200:
            raise base.EngineUnavailable(f"the engine answered {status or 'nothing'} to GET /get_version")
        return transport.typed(answer, "version", int)

    async def load_weights(self, folder: str, version: int) -> None:
        body = {"path": folder, "version": version}
        await self._command(
            "/load_weights", body, if_missing="this engine loads no weights", timeout_s=transport.LOAD_S
        )

    async def stage_weights(self, source: str | base.Broadcast, version: int) -> None:
        body = {**transport.weight_source(source), "version": version}
        await self._command("/stage_weights", body, if_missing=_NO_STAGING, timeout_s=transport.LOAD_S)

    async def load_staged(self, version: int) -> None:
        await self._command("/load_weights", {"staged": True, "version": version}, if_missing=_NO_STAGING)

    async def forget_weights(self) -> None:
        await self._command("/forget_weights", if_missing=_NO_STAGING)

    async def join_group(self, name: str, place: Mapping[str, object]) -> None:
        await self._command(
            "/weight_group/join", {**place, "name": name}, if_missing=_NO_GROUP, timeout_s=transport.LOAD_S
        )

    async def leave_group(self, name: str) -> None:
        await self._command("/weight_group/leave", {"name": name}, if_missing=_NO_GROUP)

    async def release_memory(self) -> None:
        await self._command("/release_memory_occupation", if_missing=_NO_RELEASE, timeout_s=transport.LOAD_S)

    async def restore_memory(self) -> None:
        await self._command("/resume_memory_occupation", if_missing=_NO_RELEASE, timeout_s=transport.LOAD_S)


def _read(data: dict[str, Any]) -> Iterable[base.EngineDelta]:
    if "choices" not in data:
        return (read_delta(data),)
    since = float(data.get("after_first_s", 0.0))
    return [read_delta(choice, since) for choice in data["choices"]]


def read_delta(data: dict[str, Any], after_first_s: float = 0.0) -> base.EngineDelta:
    """Return the delta in one line of the stream. Raises EngineFailed for an error line."""
    if "error" in data:
        error = data["error"]
        raise base.EngineFailed(str(error.get("message", error)) if isinstance(error, dict) else str(error))
    top = data.get("top_logprobs")
    finish = data.get("finish_reason")
    return base.EngineDelta(
        index=data["index"],
        token_ids=tuple(data["token_ids"]),
        logprobs=tuple(data["logprobs"]),
        versions=tuple(data["versions"]),
        top_logprobs=None if top is None else tuple(tuple((int(t), lp) for t, lp in entry) for entry in top),
        finish_reason=None if finish is None else base.FinishReason(finish),
        stop_token_id=data.get("stop_token_id"),
        after_first_s=after_first_s,
    )
