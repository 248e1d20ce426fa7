"""The engine's routes. All but the probes need the admin key, where there is one: only the data proxy calls them.

POST /generate answers NDJSON when ``stream`` is set, one line for each sequence that has something new. The last token
of a sequence that stopped is the end token itself, with its logprob and version, and is named in ``stop_token_id``: a
trainer needs it, a text does not. Where the engine ends before its sequences do, the answer is an error, never a short
text: status 503, or in a stream a line with the error object.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson
from aiohttp import web

from areal.errors import ArealError, Conflict, UsageFault
from areal.services.inference.engines.embedded.loading import Loaded
from areal.services.inference.engines.embedded.sampling import Sampling, parse, stream_key
from areal.services.inference.engines.embedded.sequence import Finish, Sequence
from areal.services.inference.engines.embedded.streams import Delta, Stream, Streams
from areal.services.web.access import Access
from areal.services.web.body import read_object
from areal.services.web.errors import ApiError, bad_request
from areal.services.web.service import REQUEST_ID, Handler, Service, json_response

T = TypeVar("T")
_SETTLE_S = 1.0


class EngineRoutes:
    """Until ``serve_with`` gives it a loaded model, every call but the probes is answered 503."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._loaded: Loaded | None = None
        self._requests: dict[str, Stream] = {}
        self._swapping = asyncio.Lock()

    def serve_with(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def details(self) -> dict[str, Any]:
        """For probes: what a data proxy must know of a loaded model."""
        if self._loaded is None:
            return {}
        engine = self._loaded.engine
        return {"version": engine.version, "paused": engine.paused, "max_model_len": engine.limits.max_length}

    def add_to(self, service: Service) -> None:
        metrics = service.metrics
        self._tokens = metrics.counter("areal_engine_tokens_total", "Tokens of ended requests.", ("kind",))
        for place, index in (("running", 0), ("waiting", 1)):
            gauge = metrics.gauge(f"areal_engine_{place}", f"Sequences {place} now.")
            gauge.set_function(partial(self._load, index))
        service.route("POST", "/generate", self._generate, Access.CALLER)
        posts: dict[str, Handler] = {
            "/abort": self._abort,
            "/pause": self._pause,
            "/pause_generation": self._pause,
            "/resume": self._resume,
            "/continue_generation": self._resume,
            "/load_weights": self._load_weights,
            "/set_version": self._set_version,
        }
        for path, handler in posts.items():
            service.route("POST", path, handler, Access.ADMIN)
        service.route("GET", "/get_version", self._get_version, Access.ADMIN)
        service.route("GET", "/stats", self._stats, Access.ADMIN)

    def _load(self, index: int) -> float:
        return self._loaded.engine.load[index] if self._loaded else 0

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        loaded = self._model()
        body = await read_object(request)
        prompt = _prompt(body.get("input_ids"), loaded)
        sampling = _sampling(body.get("sampling"), loaded.engine.vocab_size)
        request_id = str(body.get("request_id") or request[REQUEST_ID])
        if request_id in self._requests:
            raise ApiError(
                409, f"request {request_id} is running already", code="duplicate_request", param="request_id"
            )
        whole = not body.get("stream", False)
        stream = self._streams.open(_sequences(prompt, sampling, loaded), whole=whole)
        self._requests[request_id] = stream
        try:
            _submit(loaded, stream)
            if whole:
                return await _answer_whole(stream, len(prompt))
            return await _answer_stream(request, stream)
        finally:
            del self._requests[request_id]
            self._streams.close(stream)
            self._tokens.labels("prompt").inc(len(prompt))
            self._tokens.labels("generated").inc(sum(each.produced for each in stream.sequences))
            if any(each.finish is None for each in stream.sequences):
                with contextlib.suppress(ArealError):  # an engine that ended has nothing left to abort
                    loaded.engine.abort(stream.sequences)

    async def _abort(self, request: web.Request) -> web.Response:
        """Idempotent: a request that ended, or never was, has nothing to abort."""
        loaded, body = self._model(), await read_object(request)
        stream = self._requests.get(str(body.get("request_id")))
        if stream is not None:
            await _done(loaded.engine.abort(stream.sequences))
        return json_response({"aborted": stream is not None})

    async def _pause(self, request: web.Request) -> web.Response:
        """Returns when no token of these weights can still appear. A caller that leaves meanwhile paused nothing."""
        loaded = self._model()
        was_paused = loaded.engine.paused
        try:
            await _done(loaded.engine.pause())
            await self._streams.settle(_SETTLE_S)
        except asyncio.CancelledError:
            if not was_paused:
                loaded.engine.resume()
            raise
        return json_response({"status": "ok", "paused": True, "version": loaded.engine.version})

    async def _resume(self, request: web.Request) -> web.Response:
        loaded = self._model()
        await _done(loaded.engine.resume())
        return json_response({"status": "ok", "paused": False, "version": loaded.engine.version})

    async def _load_weights(self, request: web.Request) -> web.Response:
        loaded, body = self._model(), await read_object(request)
        path, version = body.get("path"), body.get("version")
        if not isinstance(path, str) or not path:
            raise bad_request("path must name a folder of safetensors files", param="path")
        if version is not None:
            version = _version(version)
        async with self._swapping:
            try:
                await asyncio.to_thread(loaded.engine.load_weights, Path(path), version)
            except Conflict:
                raise
            except ArealError as error:
                raise bad_request(
                    f"the weights were not loaded, the old ones serve on: {error}", param="path"
                ) from error
        return json_response({"status": "ok", "version": loaded.engine.version})

    async def _set_version(self, request: web.Request) -> web.Response:
        loaded, body = self._model(), await read_object(request)
        await _done(loaded.engine.set_version(_version(body.get("version"))))
        return json_response({"status": "ok", "version": loaded.engine.version})

    async def _get_version(self, request: web.Request) -> web.Response:
        return json_response({"version": self._model().engine.version})

    async def _stats(self, request: web.Request) -> web.Response:
        loaded = self._model()
        stats = await _done(loaded.engine.stats())
        body = dataclasses.asdict(stats)
        return json_response({"model": loaded.description, **body.pop("counters"), **body})

    def _model(self) -> Loaded:
        if self._loaded is None:
            raise ApiError(503, "the model is not loaded yet", code="not_ready")
        return self._loaded


def _prompt(raw: Any, loaded: Loaded) -> list[int]:
    if not isinstance(raw, list) or not raw:
        raise bad_request("input_ids must be a list of at least one token id", param="input_ids")
    vocab_size, most = loaded.engine.vocab_size, loaded.engine.limits.max_length
    if len(raw) >= most:
        message = f"the prompt has {len(raw)} tokens; this model has room for {most} of prompt and answer together"
        raise bad_request(message, param="input_ids", code="context_length_exceeded")
    if set(map(type, raw)) != {int} or min(raw) < 0 or max(raw) >= vocab_size:
        wrong = next(token for token in raw if type(token) is not int or not 0 <= token < vocab_size)
        raise bad_request(f"input_ids holds {wrong!r}, which is no token id below {vocab_size}", param="input_ids")
    return raw


def _sampling(raw: Any, vocab_size: int) -> Sampling:
    if raw is not None and not isinstance(raw, dict):
        raise bad_request("sampling must be an object", param="sampling")
    try:
        return parse(raw or {}, vocab_size)
    except UsageFault as fault:
        raise bad_request(fault.message, param=fault.message.split(" ")[0]) from fault


def _sequences(prompt: list[int], sampling: Sampling, loaded: Loaded) -> list[Sequence]:
    """The request's n choices, each with its own random numbers."""
    room = loaded.engine.limits.max_length - len(prompt)
    allowance = room if sampling.max_new_tokens is None else min(sampling.max_new_tokens, room)
    stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else loaded.end_tokens)
    seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
    return [
        Sequence(prompt, sampling, allowance=allowance, stop_ids=stop_ids, index=index, key=stream_key(seed, index))
        for index in range(sampling.n)
    ]


def _submit(loaded: Loaded, stream: Stream) -> None:
    try:
        loaded.engine.submit(stream.sequences)
    except ArealError as error:
        raise ApiError(503, error.message, code="engine_unavailable") from error


async def _answer_whole(stream: Stream, prompt_tokens: int) -> web.Response:
    choices: list[Delta] = []
    while not stream.ended:
        choices += await stream.next()
    if any(choice.finish_reason is Finish.LOST for choice in choices):
        raise _lost()
    choices.sort(key=lambda choice: choice.index)
    return json_response({"choices": [_fields(choice) for choice in choices], "prompt_tokens": prompt_tokens})


async def _answer_stream(request: web.Request, stream: Stream) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    while not stream.ended:
        deltas = await stream.next()
        if any(delta.finish_reason is Finish.LOST for delta in deltas):
            await response.write(orjson.dumps(_lost().body(request[REQUEST_ID]), option=orjson.OPT_APPEND_NEWLINE))
            break
        lines = [orjson.dumps(_fields(delta), option=orjson.OPT_APPEND_NEWLINE) for delta in deltas]
        if lines:
            await response.write(b"".join(lines))
    await response.write_eof()
    return response


def _lost() -> ApiError:
    return ApiError(503, "the engine stopped before the answer was complete", code="engine_stopped")


def _fields(delta: Delta) -> dict[str, Any]:
    return {
        "index": delta.index,
        "token_ids": delta.token_ids,
        "logprobs": delta.logprobs,
        "versions": delta.versions,
        "top_logprobs": delta.top_logprobs,
        "finish_reason": delta.finish_reason,
        "stop_token_id": delta.stop_token_id,
    }


def _version(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise bad_request(f"version must be a whole number from 0, not {value!r}", param="version")
    return value


async def _done(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)
