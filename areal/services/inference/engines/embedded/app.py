"""The engine's routes, and the process groups from which it receives weights.

If there is an admin key, all routes except the probes require it: only the data proxy calls them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from areal.dataclasses import dataclass, field
from areal.errors import ArealError, Conflict, UsageFault
from areal.services.http.auth import Access
from areal.services.http.errors import ApiError, bad_field, bad_request
from areal.services.http.messages import AnyResponse, Request, Response, read_body, read_object
from areal.services.http.service import Service, json_response
from areal.services.inference.engines.embedded.loading import LoadedModel
from areal.services.inference.engines.embedded.requests import (
    Stream,
    Streams,
    answer_stream,
    answer_whole,
    find_adapter,
    make_sequences,
    read_grammar,
    read_images,
    read_prompt,
    read_prompts,
    read_sampling,
)
from areal.services.weight_transfer.memory import TransferProgress
from areal.wire import bodies

if TYPE_CHECKING:
    import torch

    from areal.services.weight_transfer.group import BroadcastGroup
    from areal.services.weight_transfer.memory import Image

T = TypeVar("T")
Body = dict[str, object]
Control = Callable[[LoadedModel], Awaitable[Body]]
Command = Callable[[LoadedModel, Any], Awaitable[Body]]
_SETTLE_S = 1.0  # for clients to read the last tokens before a pause is confirmed
_FORGET_S = 600.0  # after which staged weights are freed that no update has installed
_GROUP_TIMEOUT_S = 300.0
_STORE_TIMEOUT_S = 30.0
_MAX_IMAGES = 2


class EngineRoutes:
    """The engine's routes. Before ``serve_with`` sets a loaded model, calls that need it are answered 503."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._loaded: LoadedModel | None = None
        self._requests: dict[str, Stream] = {}
        self._swapping = asyncio.Lock()
        self._groups = WeightGroups()
        self._forgetting: asyncio.TimerHandle | None = None

    def serve_with(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def details(self) -> dict[str, object]:
        """Return the fields of probes for the data proxy, once a model is loaded."""
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
            "images": self._loaded.images is not None,
            "no_images": self._loaded.no_images,
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
        commands: dict[str, tuple[type[Any], Command]] = {
            "/load_weights": (bodies.LoadWeights, self._load_weights),
            "/stage_weights": (bodies.StageWeights, self._stage_weights),
            "/weight_group/join": (bodies.JoinGroup, self._join_group),
            "/load_adapter": (bodies.LoadAdapter, self._load_adapter),
            "/unload_adapter": (bodies.UnloadAdapter, self._unload_adapter),
            "/set_version": (bodies.SetVersion, self._set_version),
        }
        for path, control in controls.items():
            service.route("POST", path, partial(self._answer_control, control), Access.ADMIN)
        for path, command in commands.items():
            service.route("POST", path, partial(self._answer_command, *command), Access.ADMIN)
        service.route("POST", "/abort", self._abort, Access.ADMIN)
        service.route("POST", "/weight_group/leave", self._leave_group, Access.ADMIN)
        service.route("GET", "/get_version", partial(self._answer_control, self._get_version), Access.ADMIN)
        service.route("GET", "/stats", partial(self._answer_control, self._stats), Access.ADMIN)

    async def _answer_control(self, control: Control, request: Request) -> Response:
        return json_response(await control(self._model()))

    async def _answer_command(self, body: type[Any], command: Command, request: Request) -> Response:
        return json_response(await command(self._model(), await read_body(request, body)))

    def _load(self, index: int) -> float:
        return self._loaded.engine.load[index] if self._loaded else 0

    async def _generate(self, request: Request) -> AnyResponse:
        loaded = self._model()
        body = await read_body(request, bodies.GenerateTokens)
        prompts = read_prompts(body.input_ids, loaded)
        prompt_tokens = sum(map(len, prompts))
        sampling = read_sampling(body.sampling, loaded.engine.vocab_size)
        adapter = find_adapter(body.adapter, loaded)
        matcher = await read_grammar(body.response_format, sampling, loaded)
        if body.seeds is not None and len(body.seeds) != len(prompts):
            raise bad_field("seeds", f"must be {len(prompts)} whole numbers, one for each prompt")
        pixels = await read_images(body.image_data, prompts, loaded)
        request_id = body.request_id or request.id
        if request_id in self._requests:  # nothing is awaited until the request is added
            raise ApiError(
                409, f"request {request_id} is running already", code="duplicate_request", param="request_id"
            )
        whole = not body.stream
        sequences = make_sequences(prompts, sampling, loaded, adapter, matcher, body.seeds, pixels)
        stream = self._streams.open(sequences, whole=whole, interval=body.stream_interval)
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
        """Score a prompt: ``input_ids``, ``top_logprobs``, ``adapter?`` -> ``logprobs`` and ``top_logprobs`` of all
        tokens except the first."""
        loaded, body = self._model(), await read_body(request, bodies.ScoreTokens)
        prompt, adapter = read_prompt(body.input_ids, loaded), find_adapter(body.adapter, loaded)
        logprobs, tops = await asyncio.wrap_future(loaded.engine.score(prompt, body.top_logprobs, adapter))
        self._tokens.labels("prompt").inc(len(prompt))
        return json_response({"logprobs": logprobs, "top_logprobs": tops})

    async def _abort(self, request: Request) -> Response:
        """Abort a request. Idempotent: a request that has ended or is unknown is not an error."""
        loaded, request_id = self._model(), (await read_object(request)).get("request_id")
        stream = self._requests.get(str(request_id))
        if stream is not None:
            await asyncio.wrap_future(loaded.engine.abort(stream.sequences))
        return json_response({"aborted": stream is not None})

    async def _pause(self, loaded: LoadedModel) -> Body:
        """Pause, and return when all tokens of these weights are written. If the caller disconnects meanwhile, the
        pause is undone."""
        was_paused = loaded.engine.paused
        try:
            await asyncio.wrap_future(loaded.engine.pause())
            await self._streams.settle(_SETTLE_S)
        except asyncio.CancelledError:
            if not was_paused:
                loaded.engine.resume()
            raise
        return {"status": "ok", "paused": True, "version": loaded.engine.version}

    async def _resume(self, loaded: LoadedModel) -> Body:
        await asyncio.wrap_future(loaded.engine.resume())
        return {"status": "ok", "paused": False, "version": loaded.engine.version}

    async def _set_version(self, loaded: LoadedModel, wanted: bodies.SetVersion) -> Body:
        await asyncio.wrap_future(loaded.engine.set_version(wanted.version))
        return {"status": "ok", "version": loaded.engine.version}

    async def _get_version(self, loaded: LoadedModel) -> Body:
        return {"version": loaded.engine.version}

    async def _stats(self, loaded: LoadedModel) -> Body:
        stats = await asyncio.wrap_future(loaded.engine.stats())
        body = dataclasses.asdict(stats)
        return {"model": loaded.description, **body.pop("counters"), **body}

    async def _load_weights(self, loaded: LoadedModel, body: bodies.LoadWeights) -> Body:
        """Load weights from a folder, or those that were staged."""
        if body.staged:
            return await self._swap(loaded, partial(loaded.engine.load_staged, _given(body.version, "version")))
        folder = Path(_given(body.path, "path"))
        return await self._swap(loaded, partial(loaded.engine.load_weights, folder, body.version))

    async def _stage_weights(self, loaded: LoadedModel, body: bodies.StageWeights) -> Body:
        """Stage weights from a folder, or those that the group's trainer broadcasts now."""
        if body.group is not None:
            # Tensors are staged as they arrive. Refused weights are received completely, to keep the group usable.
            loaded.engine.drop_staged()  # frees memory for these
            with _group_errors():
                path, arrival, received = await self._groups.receiving(body.group, body.layout)
            staging = self._swap(loaded, partial(loaded.engine.stage_weights, path, body.version, arrival))
            answer, end = await asyncio.gather(staging, received, return_exceptions=True)
            with _group_errors():
                if isinstance(end, BaseException):
                    raise end
            if isinstance(answer, BaseException):
                raise answer
        else:
            folder = Path(_given(body.path, "path"))
            answer = await self._swap(loaded, partial(loaded.engine.stage_weights, folder, body.version))
        self._forget_later(loaded)
        return answer

    async def _forget_weights(self, loaded: LoadedModel) -> Body:
        async with self._swapping:
            loaded.engine.forget_weights()
        return {"status": "ok"}

    def _forget_later(self, loaded: LoadedModel) -> None:
        """Free staged weights after ``_FORGET_S``: the trainer may be gone."""

        def forget() -> None:
            if self._swapping.locked():
                self._forget_later(loaded)
            else:
                loaded.engine.forget_weights()

        if self._forgetting is not None:
            self._forgetting.cancel()
        self._forgetting = asyncio.get_running_loop().call_later(_FORGET_S, forget)

    async def _swap(self, loaded: LoadedModel, swap: Callable[[], object]) -> Body:
        """Swap weights. Frees the replaced ones after the answer, because generation waits for it."""
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

    async def _join_group(self, loaded: LoadedModel, body: bodies.JoinGroup) -> Body:
        with _group_errors():
            await self._groups.join(body, loaded.engine.device)
        return {"status": "ok"}

    async def _leave_group(self, request: Request) -> Response:
        self._groups.leave((await read_body(request, bodies.LeaveGroup)).name)
        return json_response({"status": "ok"})

    async def _load_adapter(self, loaded: LoadedModel, body: bodies.LoadAdapter) -> Body:
        """Load or replace an adapter. Running requests keep the adapter with which they began."""
        try:
            adapter = await asyncio.to_thread(loaded.engine.read_adapter, body.name, Path(body.path))
        except ArealError as error:
            raise bad_request(f"the adapter was not loaded: {error}", param="path") from error
        loaded.adapters[adapter.name] = adapter
        return {"status": "ok", "adapters": sorted(loaded.adapters)}

    async def _unload_adapter(self, loaded: LoadedModel, body: bodies.UnloadAdapter) -> Body:
        if loaded.adapters.pop(body.name, None) is None:
            raise bad_request(f"adapter {body.name!r} is not loaded here", param="name")
        return {"status": "ok", "adapters": sorted(loaded.adapters)}

    async def _release_memory(self, loaded: LoadedModel) -> Body:
        async with self._swapping:
            try:
                await asyncio.wrap_future(loaded.engine.release_memory())
            except ArealError as error:
                raise ApiError(507, f"the memory was not released: {error}", code="no_room") from error
        return {"status": "ok", "memory_released": True}

    async def _restore_memory(self, loaded: LoadedModel) -> Body:
        async with self._swapping:
            await asyncio.wrap_future(loaded.engine.restore_memory())
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


def _given(value: T | None, field: str) -> T:
    if value is None:
        raise bad_field(field, "is required", code="missing_field")
    return value


@dataclass
class _Member:
    group: BroadcastGroup | None  # None once it was left
    images: list[Image] = field(default_factory=list)  # the newest last
    arrival: TransferProgress | None = None  # of the newest image


class WeightGroups:
    """Weights that a trainer broadcasts. They arrive in an anonymous file in memory, and are loaded from it like any
    other weights, or used in place; then two files alternate. The files disappear with the process.

    A separate thread waits for the group's members. Leaving a group, or cancelling a call on it, ends this wait, so
    that the next group does not wait for the previous one.

    Freeing a group takes as long as an operation that hangs in it, so neither the loop's thread nor a thread that is
    waited for may drop the last reference. Only ``_Member.group`` and ``_receive`` refer to it, no error does, and both
    drop it in a separate thread.
    """

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._forming: dict[str, threading.Event] = {}  # cancels a group that forms
        self._thread = _one_thread()

    async def join(self, place: bodies.JoinGroup, device: torch.device) -> None:
        """Join a group. Raises ArealError if it does not form."""
        name = place.name
        self.leave(name)
        given_up = self._forming[name] = threading.Event()
        try:
            group = await self._run(_form, place, device, given_up)
        except BaseException:
            self._leave_forming(name, given_up)
            raise
        if self._forming.get(name) is not given_up:
            raise ArealError("the process group was left while it formed")
        del self._forming[name]
        self._members[name] = _Member(group)

    async def receiving(self, name: str, layout: object) -> tuple[Path, TransferProgress, asyncio.Future[None]]:
        """Start to receive a broadcast. Returns its file, its progress, and a future that is done at its end, or raises
        ArealError if the group breaks. Raises Conflict, UsageFault."""
        member = self._members.get(name)
        if member is None:
            raise Conflict(f"this engine has not joined the group {name!r}")
        image, arrival = await self._run(_image_for, member, layout)
        member.arrival = arrival
        received = asyncio.ensure_future(self._run(_receive, member, image.body, arrival.reach))
        received.add_done_callback(partial(self._ended, name, member, arrival))
        return image.path, arrival, received

    def _ended(self, name: str, member: _Member, arrival: TransferProgress, received: asyncio.Future[None]) -> None:
        """Leave the group after a broadcast that ended early. Otherwise the rest of its data would be read as the next
        broadcast."""
        if not arrival.is_whole:
            failure = None if received.cancelled() else received.exception()
            arrival.fail("no request asks for them any more" if failure is None else str(failure))
            if self._members.get(name) is member:
                self.leave(name)

    def leave(self, name: str) -> None:
        if name in self._forming:
            self._leave_forming(name, self._forming[name])
        member = self._members.pop(name, None)
        if member is not None:
            if member.arrival is not None and not member.arrival.is_whole:
                member.arrival.fail("the process group was left")
                self._abandon_thread()
            held, member.group = [member.group], None
            if held[0] is not None:
                held[0].leave()
            _drop(held)
            for image in member.images:
                image.remove()

    def _leave_forming(self, name: str, given_up: threading.Event) -> None:
        given_up.set()
        if self._forming.get(name) is given_up:
            del self._forming[name]
            self._abandon_thread()

    def _abandon_thread(self) -> None:
        """Replace the thread, because a call in the old one may wait for minutes."""
        self._thread.shutdown(wait=False)
        self._thread = _one_thread()

    def close(self) -> None:
        for name in list(self._members):
            self.leave(name)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Any, *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, function, *arguments)
        except (RuntimeError, ValueError, OSError) as error:
            raise ArealError(f"the process group failed: {error}") from error


def _form(place: bodies.JoinGroup, device: torch.device, given_up: threading.Event) -> Any:
    from areal.services.weight_transfer.group import BroadcastGroup, open_store

    store = open_store(place.host, place.port, place.world_size, _STORE_TIMEOUT_S, listen=False)
    return BroadcastGroup(store, place.rank, place.world_size, _GROUP_TIMEOUT_S, device, given_up)


def _receive(member: _Member, body: torch.Tensor, reached: Callable[[int], None]) -> None:
    """Receive a broadcast into ``body``. Raises ArealError."""
    held = [member.group]
    try:
        if held[0] is None:
            raise RuntimeError("it was left")
        held[0].broadcast(body, reached)
        return
    except (RuntimeError, ValueError, OSError) as error:
        why = str(error)
    _drop(held)
    raise ArealError(f"the process group failed: {why}")


def _drop(held: list[BroadcastGroup | None]) -> None:
    """Free the group in a thread, since that may hang."""
    threading.Thread(target=held.clear, name="free-group", daemon=True).start()


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-group")


def _image_for(member: _Member, given: object) -> tuple[Image, TransferProgress]:
    """Return an image that the engine does not compute with. If it leases both images, the older one is left to it, and
    a new one is created."""
    from areal.services.weight_transfer.memory import Image, ends, read_layout

    layout = read_layout(given)
    for image in member.images:
        if image.layout == layout and image.try_lock():
            image.unlock()  # its reader waits for each tensor
            member.images.remove(image)
            break
    else:
        if len(member.images) == _MAX_IMAGES:
            member.images.pop(0).remove()
        image = Image(layout)
    member.images.append(image)
    return image, TransferProgress(ends(layout))
