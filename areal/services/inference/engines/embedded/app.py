"""The engine process: its routes, HTTP from the start, the model loaded beside it, an end when either fails.

All routes but the probes need the admin key, where there is one: only the data proxy calls them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from areal.errors import ArealError, Conflict, UsageFault
from areal.services.http.auth import Access
from areal.services.http.errors import ApiError, bad_request
from areal.services.http.messages import AnyResponse, Request, Response, read_object
from areal.services.http.process import ServeOptions, report_stage
from areal.services.http.serve import serve
from areal.services.http.service import Service, json_response
from areal.services.inference.engines.embedded.loading import LoadedModel, ModelFolder, load_model
from areal.services.inference.engines.embedded.requests import (
    Stream,
    Streams,
    answer_stream,
    answer_whole,
    make_sequences,
    read_adapter,
    read_grammar,
    read_interval,
    read_prompts,
    read_sampling,
)
from areal.services.inference.engines.embedded.weight_groups import WeightGroups
from areal.wire.processes import EmbeddedEngineConfig

T = TypeVar("T")
Body = dict[str, Any]
Control = Callable[[LoadedModel], Awaitable[Body]]
Command = Callable[[LoadedModel, Body], Awaitable[Body]]
_SETTLE_S = 1.0
_FORGET_S = 600.0


class EngineRoutes:
    """Until ``serve_with`` gives it a loaded model, every call but the probes is answered 503."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._loaded: LoadedModel | None = None
        self._requests: dict[str, Stream] = {}
        self._swapping = asyncio.Lock()
        self._groups = WeightGroups()
        self._forgetting: asyncio.TimerHandle | None = None

    def serve_with(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def details(self) -> dict[str, Any]:
        """For probes: what a data proxy must know of a loaded model."""
        if self._loaded is None:
            return {}
        engine = self._loaded.engine
        return {
            "version": engine.version,
            "paused": engine.paused,
            "generated": engine.counters.generated_tokens,
            "max_model_len": engine.limits.max_length,
            "memory_released": engine.memory_released,
            "adapters": sorted(self._loaded.adapters),
            "structured": self._loaded.grammars is not None,
            "no_grammars": self._loaded.no_grammars,
        }

    def add_to(self, service: Service) -> None:
        metrics = service.metrics
        self._tokens = metrics.counter("areal_engine_tokens_total", "Tokens of ended requests.", ("kind",))
        for place, index in (("running", 0), ("waiting", 1)):
            gauge = metrics.gauge(f"areal_engine_{place}", f"Sequences {place} now.")
            gauge.set_function(partial(self._load, index))
        service.route("POST", "/generate", self._generate, Access.INFERENCE)
        service.route("POST", "/score", self._score, Access.INFERENCE)
        controls: dict[str, Control] = {
            "/pause": self._pause,
            "/pause_generation": self._pause,
            "/resume": self._resume,
            "/continue_generation": self._resume,
            "/forget_weights": self._forget_weights,
            "/release_memory_occupation": self._release_memory,
            "/resume_memory_occupation": self._restore_memory,
        }
        commands: dict[str, Command] = {
            "/abort": self._abort,
            "/load_weights": self._load_weights,
            "/stage_weights": self._stage_weights,
            "/weight_group/join": self._join_group,
            "/weight_group/receive": self._receive_weights,
            "/load_adapter": self._load_adapter,
            "/unload_adapter": self._unload_adapter,
            "/set_version": self._set_version,
        }
        for path, control in controls.items():
            service.route("POST", path, partial(self._answer_control, control), Access.ADMIN)
        for path, command in commands.items():
            service.route("POST", path, partial(self._answer_command, command), Access.ADMIN)
        service.route("POST", "/weight_group/leave", self._leave_group, Access.ADMIN)
        service.route("GET", "/get_version", partial(self._answer_control, self._get_version), Access.ADMIN)
        service.route("GET", "/stats", partial(self._answer_control, self._stats), Access.ADMIN)

    async def _answer_control(self, control: Control, request: Request) -> Response:
        return json_response(await control(self._model()))

    async def _answer_command(self, command: Command, request: Request) -> Response:
        return json_response(await command(self._model(), await read_object(request)))

    def _load(self, index: int) -> float:
        return self._loaded.engine.load[index] if self._loaded else 0

    async def _generate(self, request: Request) -> AnyResponse:
        loaded = self._model()
        body = await read_object(request)
        prompts = read_prompts(body.get("input_ids"), loaded)
        prompt_tokens = sum(map(len, prompts))
        sampling = read_sampling(body.get("sampling"), loaded.engine.vocab_size)
        adapter = read_adapter(body.get("adapter"), loaded)
        matcher = read_grammar(body.get("response_format"), sampling, loaded)
        request_id = str(body.get("request_id") or request.id)
        if request_id in self._requests:
            raise ApiError(
                409, f"request {request_id} is running already", code="duplicate_request", param="request_id"
            )
        whole, interval = not body.get("stream", False), read_interval(body.get("stream_interval"))
        sequences = make_sequences(prompts, sampling, loaded, adapter, matcher)
        stream = self._streams.open(sequences, whole=whole, interval=interval)
        self._requests[request_id] = stream
        try:
            try:
                loaded.engine.submit(stream.sequences, more_coming=whole and len(sequences) > 1)
            except ArealError as error:
                raise ApiError(503, error.message, code="engine_unavailable") from error
            if whole:
                return await answer_whole(stream, prompt_tokens)
            return await answer_stream(request, stream)
        finally:
            del self._requests[request_id]
            self._streams.close(stream)
            self._tokens.labels("prompt").inc(prompt_tokens)
            self._tokens.labels("generated").inc(sum(each.produced for each in stream.sequences))
            if any(each.finish is None for each in stream.sequences):
                with contextlib.suppress(ArealError):  # an engine that ended has nothing left to abort
                    loaded.engine.abort(stream.sequences)

    async def _score(self, request: Request) -> Response:
        """``input_ids`` of one prompt, ``top_logprobs``, ``adapter?`` -> ``logprobs`` of all tokens but the first, and
        ``top_logprobs`` of as many."""
        loaded, body = self._model(), await read_object(request)
        (prompt,) = read_prompts([body.get("input_ids")], loaded)
        sampling = read_sampling({"top_logprobs": body.get("top_logprobs")}, loaded.engine.vocab_size)
        adapter = read_adapter(body.get("adapter"), loaded)
        logprobs, tops = await _done(loaded.engine.score(prompt, sampling.top_logprobs, adapter))
        self._tokens.labels("prompt").inc(len(prompt))
        return json_response({"logprobs": logprobs, "top_logprobs": tops})

    async def _abort(self, loaded: LoadedModel, body: Body) -> Body:
        """Idempotent: a request that ended, or never was, has nothing to abort."""
        stream = self._requests.get(str(body.get("request_id")))
        if stream is not None:
            await _done(loaded.engine.abort(stream.sequences))
        return {"aborted": stream is not None}

    async def _pause(self, loaded: LoadedModel) -> Body:
        """Returns when no token of these weights can still appear. A caller that leaves meanwhile paused nothing."""
        was_paused = loaded.engine.paused
        try:
            await _done(loaded.engine.pause())
            await self._streams.settle(_SETTLE_S)
        except asyncio.CancelledError:
            if not was_paused:
                loaded.engine.resume()
            raise
        return {"status": "ok", "paused": True, "version": loaded.engine.version}

    async def _resume(self, loaded: LoadedModel) -> Body:
        await _done(loaded.engine.resume())
        return {"status": "ok", "paused": False, "version": loaded.engine.version}

    async def _set_version(self, loaded: LoadedModel, body: Body) -> Body:
        await _done(loaded.engine.set_version(_version(body)))
        return {"status": "ok", "version": loaded.engine.version}

    async def _get_version(self, loaded: LoadedModel) -> Body:
        return {"version": loaded.engine.version}

    async def _stats(self, loaded: LoadedModel) -> Body:
        stats = await _done(loaded.engine.stats())
        body = dataclasses.asdict(stats)
        return {"model": loaded.description, **body.pop("counters"), **body}

    # -- weights

    async def _load_weights(self, loaded: LoadedModel, body: Body) -> Body:
        """Those in a folder, or those that were staged."""
        if body.get("staged") is True:
            return await self._swap(loaded, partial(loaded.engine.load_staged, _version(body)))
        version = None if body.get("version") is None else _version(body)
        return await self._swap(loaded, partial(loaded.engine.load_weights, Path(_text(body, "path")), version))

    async def _stage_weights(self, loaded: LoadedModel, body: Body) -> Body:
        """Those in a folder, or those that the group's trainer broadcasts now."""
        version = _version(body)
        if "group" in body:
            answer = await self._stage_broadcast(loaded, _text(body, "group"), body.get("layout"), version)
        else:
            stage = partial(loaded.engine.stage_weights, Path(_text(body, "path")), version)
            answer = await self._swap(loaded, stage)
        self._forget_later(loaded)
        return answer

    async def _stage_broadcast(self, loaded: LoadedModel, group: str, layout: object, version: int) -> Body:
        """Each tensor as it comes. Weights that are refused are received to the end, so that the group continues."""
        loaded.engine.drop_staged()  # which may be where these could arrive
        with _group_errors():
            path, arrival, received = await self._groups.receiving(group, layout)
        staging = self._swap(loaded, partial(loaded.engine.stage_weights, path, version, arrival))
        answer, end = await asyncio.gather(staging, received, return_exceptions=True)
        with _group_errors():
            if isinstance(end, BaseException):
                raise end
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _forget_weights(self, loaded: LoadedModel) -> Body:
        async with self._swapping:
            loaded.engine.forget_weights()
        return {"status": "ok"}

    def _forget_later(self, loaded: LoadedModel) -> None:
        """A trainer that vanished must not hold our memory for ever."""

        def forget() -> None:
            if self._swapping.locked():
                self._forget_later(loaded)
            else:
                loaded.engine.forget_weights()

        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = asyncio.get_running_loop().call_later(_FORGET_S, forget)

    async def _swap(self, loaded: LoadedModel, swap: Callable[[], object]) -> Body:
        """The replaced weights are freed after the answer: generation waits for it."""
        async with self._swapping:
            try:
                replaced = [await asyncio.to_thread(swap)]
            except Conflict:
                raise
            except ArealError as error:
                raise bad_request(
                    f"the weights were not loaded, the old ones serve on: {error}", param="path"
                ) from error
        asyncio.get_running_loop().run_in_executor(None, replaced.clear)
        return {"status": "ok", "version": loaded.engine.version}

    async def _join_group(self, loaded: LoadedModel, body: Body) -> Body:
        with _group_errors():
            await self._groups.join(_text(body, "name"), body, loaded.engine.device)
        return {"status": "ok"}

    async def _receive_weights(self, loaded: LoadedModel, body: Body) -> Body:
        with _group_errors():
            folder = await self._groups.receive(_text(body, "name"), body.get("layout"))
        return await self._swap(loaded, partial(loaded.engine.load_weights, folder, _version(body)))

    async def _leave_group(self, request: Request) -> Response:
        self._groups.leave(_text(await read_object(request), "name"))
        return json_response({"status": "ok"})

    async def _load_adapter(self, loaded: LoadedModel, body: Body) -> Body:
        """Running requests keep the adapter that they began with."""
        name, path = _text(body, "name"), _text(body, "path")
        try:
            adapter = await asyncio.to_thread(loaded.engine.read_adapter, name, Path(path))
        except ArealError as error:
            raise bad_request(f"the adapter was not loaded: {error}", param="path") from error
        loaded.adapters[adapter.name] = adapter
        return {"status": "ok", "adapters": sorted(loaded.adapters)}

    async def _unload_adapter(self, loaded: LoadedModel, body: Body) -> Body:
        if loaded.adapters.pop(str(body.get("name")), None) is None:
            raise bad_request(f"adapter {body.get('name')!r} is not loaded here", param="name")
        return {"status": "ok", "adapters": sorted(loaded.adapters)}

    async def _release_memory(self, loaded: LoadedModel) -> Body:
        async with self._swapping:
            try:
                await _done(loaded.engine.release_memory())
            except ArealError as error:
                raise ApiError(507, f"the memory was not released: {error}", code="no_room") from error
        return {"status": "ok", "memory_released": True}

    async def _restore_memory(self, loaded: LoadedModel) -> Body:
        async with self._swapping:
            await _done(loaded.engine.restore_memory())
        return {"status": "ok", "memory_released": False}

    def _model(self) -> LoadedModel:
        if self._loaded is None:
            raise ApiError(503, "the model is not loaded yet", code="not_ready")
        return self._loaded


@contextlib.contextmanager
def _group_errors() -> Iterator[None]:
    try:
        yield
    except UsageFault as error:
        raise bad_request(error.message) from error
    except Conflict as error:
        raise ApiError(409, error.message, code="not_in_group") from error
    except ArealError as error:
        raise ApiError(502, error.message, code="group_broken") from error


def _text(body: Body, field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not value:
        raise bad_request(f"{field} must be a text", param=field)
    return value


def _version(body: Body) -> int:
    value = body.get("version")
    if type(value) is not int or value < 0:
        raise bad_request(f"version must be a whole number from 0, not {value!r}", param="version")
    return value


async def _done(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)


# -- process
#
# Loading runs in a thread of its own, so that probes see its stages. A load or a step that fails ends the process with
# exit status 1, for the supervisor to start it again: an engine that lives but cannot compute is worse than none.

logger = logging.getLogger(__name__)
SERVING = "serving"


class StartupStage:
    """The startup stage, for probes and the stage file. Set by the loading thread."""

    name = "starting"
    done: int | None = None
    total: int | None = None
    _reported = -1.0

    def report(self, name: str, done: int | None = None, total: int | None = None) -> None:
        share = done / total if done is not None and total else 0.0
        changed = name != self.name
        self.name, self.done, self.total = name, done, total
        if changed or share == 1.0 or share - self._reported >= 0.01:  # a file a hundredth, not one a tensor
            self._reported = share
            report_stage(name, done=done, total=total)

    def not_ready(self) -> str | None:
        return None if self.name == SERVING else self.name

    def details(self) -> dict[str, Any]:
        return {"stage": self.name, "done": self.done, "total": self.total}


async def run(
    folder: ModelFolder, config: EmbeddedEngineConfig, lora: Mapping[str, Path], serving: ServeOptions
) -> None:
    """Serve until told to stop. Raises ArealError when the model cannot be loaded or a step fails."""
    stage, streams = StartupStage(), Streams(asyncio.get_running_loop())
    failed: Future[None] = _uncancellable()
    loading = _in_thread(lambda: load_model(folder, config, lora, stage.report, streams.progress, failed.set_exception))
    routes = EngineRoutes(streams)
    service = Service(
        "engine",
        key=serving.key,
        loopback=serving.loopback,
        not_ready=stage.not_ready,
        details=lambda: {**stage.details(), "model_path": str(folder.path), **routes.details()},
    )
    routes.add_to(service)

    async def abort_paused(loaded: LoadedModel) -> None:
        """Requests frozen by a pause would block a drain for ever."""
        await service.lifetime.wait_draining()
        loaded.engine.abort_if_paused()

    async def living() -> None:
        loaded = await asyncio.wrap_future(loading)
        routes.serve_with(loaded)
        stage.report(SERVING)
        logger.info("serving: %s", loaded.description)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(abort_paused(loaded), name="abort-paused")
            await asyncio.wrap_future(failed)

    tasks = [asyncio.create_task(serve(service, serving), name="serve"), asyncio.create_task(living(), name="living")]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    if loading.done() and loading.exception() is None:
        loading.result().engine.close()
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            while isinstance(outcome, BaseExceptionGroup):
                outcome = outcome.exceptions[0]
            raise outcome if isinstance(outcome, ArealError) else ArealError(f"the engine failed: {outcome!r}")


def _in_thread(work: Callable[[], LoadedModel]) -> Future[LoadedModel]:
    """A daemon thread: a process told to stop does not wait for a load."""
    future: Future[LoadedModel] = _uncancellable()

    def body() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (the boundary of the thread: the loop raises it)
            future.set_exception(error)

    threading.Thread(target=body, name="load", daemon=True).start()
    return future


def _uncancellable() -> Future[Any]:
    """The thread that sets it must find it open, also when its waiter was cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
