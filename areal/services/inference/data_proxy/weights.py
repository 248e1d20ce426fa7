"""The inference side of weight updates: loads a trainer's weights into the data proxy's engine.

A weight-update pair uses a folder that both sides reach, or a process group. A file that the trainer wrote proves that
the folder is shared: the same path could be on another disk. Only folders below that root are loaded. Engines that
support it stage new weights while they generate (``/weights/prepare``) and pause only for the swap
(``/weights/update``). ``/weights/check`` compares an engine's output with a plain forward pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

import orjson

from areal.dataclasses import asdict, dataclass, field
from areal.files import lacks_room
from areal.http.client import CallFailed, HttpClient
from areal.services.http.auth import Access
from areal.services.http.errors import ApiError, bad_field, bad_request
from areal.services.http.messages import Request, Response, body_as, read_body
from areal.services.http.service import Service, json_response
from areal.services.http.tasks import IDLE_S, happens, until_beat
from areal.services.inference.data_proxy.control import (
    OWN_WEIGHTS,
    EngineControl,
    PublishedWeights,
    WeightTracker,
    engine_errors_as_api_errors,
)
from areal.services.inference.engines.base import (
    FLOAT32_TOLERANCE,
    Broadcast,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    EngineUnsupported,
    GroupMember,
    GroupReceiver,
    TokenEngine,
    WeightProbe,
    WeightStager,
    WeightVerifier,
    check_weights,
)
from areal.wire import bodies

_log = logging.getLogger(__name__)
_POLL_S = IDLE_S  # for weights that another data proxy has published; a change of the engine wakes the loader
_RETRY_S = 1.0
_JOIN_S = 1800.0  # enough for a transfer and an earlier one that still runs


@dataclass(eq=False)
class WeightSync:
    """Loads the published weights into the engine whenever it is behind."""

    _tracker: WeightTracker
    _engine: TokenEngine
    _control: EngineControl
    _http: HttpClient
    _headers: Mapping[str, str]
    _address: Callable[[], str | None]
    _model: str
    _taken_over: int | None = field(default=None, init=False)  # the engine's losses then

    async def run(self) -> None:
        while True:
            self._tracker.failed.clear()
            self._tracker.reload()
            losses = self._control.watch.losses
            if self._control.engine_is_available and self._taken_over != losses:
                with suppress(EngineError):
                    await self._control.take_over()
                    self._taken_over = losses
            record = self._tracker.behind
            failed = await self._catch_up(record) if record is not None and self._control.engine_is_available else ""
            before, self._tracker.obstacle = self._tracker.obstacle, failed
            if failed and failed != before:
                _log.warning("not serving: %s", self._tracker.reason)
            if failed:
                self._tracker.failed.clear()  # by the attempt itself, which is repeated after a pause
            await happens(self._tracker.failed, _RETRY_S if failed else until_beat(_POLL_S))

    async def _catch_up(self, record: PublishedWeights) -> str:
        """Load or request the published weights. Return the reason of a failure, "" without one."""
        if record.path is not None and await asyncio.to_thread(Path(record.path).is_dir):
            return await self._load(record, record.path)
        if record.gateway is not None:
            return await self._join(record, record.gateway)
        if record.pair == OWN_WEIGHTS:
            return f"They cannot be loaded again from {record.path}: the next update brings others"
        if self._tracker.is_invalid:
            own = f"`areal weight-update release --model {self._model}` those of the model"
            return f"it is not in {record.path} any more: the next update brings other weights, {own}"
        self._tracker.loaded(record.pair, record.version)  # the trainer has ended, and the folder that it left is gone
        message = "version %d of the pair %r is not in %s any more: the model serves its own weights"
        _log.warning(message, record.version, record.pair, record.path)
        return ""

    async def _load(self, record: PublishedWeights, path: str) -> str:
        async def load() -> None:
            if self._tracker.behind == record:  # otherwise an update was loaded meanwhile
                await self._engine.load_weights(path, record.version)
                await self._control.watch.confirm()  # ready means ready with this version, also in what the router gets
                self._tracker.reloaded(record.pair, record.version)

        try:
            await self._control.swap_weights(load)
        except EngineError as error:
            return str(error)
        _log.info("loaded version %d of the pair %r from %s", record.version, record.pair, path)
        return ""

    async def _join(self, record: PublishedWeights, gateway: str) -> str:
        body = orjson.dumps({"pair_name": record.pair, "worker_addr": self._address()})
        try:
            answer = await self._http.fetch(
                "POST", gateway, "/join", headers=self._headers, body=body, timeout_s=_JOIN_S
            )
        except (CallFailed, TimeoutError) as error:
            _log.debug("%s: %r", gateway, error)
            hint = f"start the trainer again, or `areal weight-update release --model {self._model}`"
            return f"the trainer's weight-update gateway at {gateway} does not answer: {hint}"
        if answer.status == 200:
            return ""
        with suppress(KeyError, TypeError, ValueError):
            return str(answer.object()["error"]["message"])
        return f"{gateway}/join answered {answer.status}"


_BODY_BYTES = 1024 * 1024
FOLDER_MODES = ("disk", "shm")
XCCL = "xccl"
_ALIVE_S = 2.0
_DEAD_LOOKS = 2  # in a row without an answer of the trainer's weight-update gateway


@dataclass(frozen=True)
class WeightPair:
    """A connected weight-update pair. ``losses``: the engine's losses when it was connected, since a process group is
    lost with its engine. ``gateway``: the trainer's weight-update gateway."""

    name: str
    mode: str
    root: Path
    losses: int
    gateway: str | None


class WeightRoutes:
    """The routes ``/weights/*`` of a data proxy."""

    def __init__(self, engine: TokenEngine, control: EngineControl, tracker: WeightTracker, http: HttpClient) -> None:
        self._engine = engine
        self._control = control
        self._tracker = tracker
        self._http = http
        self._process = uuid4().hex
        self._pairs: dict[str, WeightPair] = {}
        self._early: tuple[str, int, float] | None = None  # pair and version that ``prepare`` loaded, pause in ms
        self._uncommitted: tuple[str, int] | None = None  # pair and version that the engine may have, perhaps in part
        self._swapped = asyncio.Event()

    def add_to(self, service: Service) -> None:
        service.route("POST", "/weights/connect", self.connect, Access.ADMIN)
        service.route("POST", "/weights/prepare", self.prepare, Access.ADMIN)
        service.route("POST", "/weights/update", self.update, Access.ADMIN)
        service.route("POST", "/weights/replace", self.replace, Access.ADMIN)
        service.route("POST", "/weights/check", self.check, Access.ADMIN)
        service.route("POST", "/weights/commit", self.commit, Access.ADMIN)
        service.route("POST", "/weights/revert", self.revert, Access.ADMIN)
        service.route("POST", "/weights/release", self.release, Access.ADMIN)
        service.route("GET", "/weights/pairs", self.pairs, Access.ADMIN)
        service.route("POST", "/weights/disconnect", self.disconnect, Access.ADMIN)

    async def connect(self, request: Request) -> Response:
        body = await read_body(request, bodies.ConnectPair, _BODY_BYTES)
        root = Path() if body.mode == XCCL else await _shared_folder(body_as(bodies.FolderOffer, body.offer, "offer"))
        await self._require_alone(body.pair_name, body.gateway)
        pair = WeightPair(body.pair_name, body.mode, root, self._control.watch.losses, body.gateway)
        self._pairs[pair.name] = pair
        if body.mode == XCCL:
            try:
                group = body_as(bodies.GroupOffer, body.offer, "offer")
                with engine_errors_as_api_errors():  # without the lock: the other members may join much later
                    await self._group_member().join_group(pair.name, {**asdict(group), "rank": body.rank})
            except BaseException:
                self._pairs.pop(pair.name, None)
                raise
        return json_response({"status": "ok", "pair_name": pair.name})

    async def _require_alone(self, name: str, gateway: str | None) -> None:
        """Refuse a second trainer of the model: two would overwrite each other's weights. A trainer's weight-update
        gateway ends with the trainer, so only a live gateway blocks another trainer. Raises ApiError 409."""
        there, record = self._pairs.get(name), self._tracker.published
        known = {there.gateway if there is not None else None}
        known |= {record.gateway if record is not None and record.pair == name else None}
        for other in sorted(known - {None, gateway}, key=str):
            if other is not None and await self._is_alive(other):
                place = there.root.parent if there is not None and there.mode != XCCL else other
                message = f"another trainer already trains this model, at {place}: stop it first"
                raise ApiError(409, message, code="trained_already", param="pair_name")

    async def _is_alive(self, gateway: str) -> bool:
        try:
            await self._http.fetch("GET", gateway, "/health", timeout_s=_ALIVE_S)
        except (CallFailed, TimeoutError):
            return False
        return True

    async def prepare(self, request: Request) -> Response:
        """Make the engine read or receive the weights that ``update`` will swap in. An engine that cannot stage weights
        swaps a broadcast at once. With ``verify`` the engine only reports whether it would refuse the weights."""
        body = await read_body(request, bodies.WeightOrder, _BODY_BYTES)
        pair = await self._prepare(body)
        return json_response({"status": "ok", "pair_name": pair.name, "version": body.version})

    async def _prepare(self, body: bodies.WeightOrder) -> WeightPair:
        pair, source = self._pair(body.pair_name), self._source(body)
        self._early = None
        with engine_errors_as_api_errors():
            if isinstance(self._engine, WeightVerifier):
                await self._engine.verify_weights(source)
            if body.verify:
                pass
            elif isinstance(self._engine, WeightStager):
                await self._engine.stage_weights(source, body.version)
            elif isinstance(source, Broadcast) and isinstance(self._engine, GroupReceiver):
                receive = partial(self._engine.receive_weights, source.group, source.layout, body.version)
                self._early = pair.name, body.version, await self._swap(pair, body.version, receive)
        return pair

    async def update(self, request: Request) -> Response:
        """Swap the weights. ``paused_ms``: how long generation was paused."""
        body = await read_body(request, bodies.WeightOrder, _BODY_BYTES)
        about = {"pair_name": body.pair_name, "version": body.version, "paused_ms": await self._update(body)}
        return json_response({"status": "ok", **about})

    async def _update(self, body: bodies.WeightOrder) -> float:
        pair, source, version = self._pair(body.pair_name), self._source(body), body.version
        early, self._early = self._early, None
        if early is not None and early[:2] == (pair.name, version):
            return early[2]
        with engine_errors_as_api_errors():
            return await self._swap(pair, version, self._loading(source, version))

    async def replace(self, request: Request) -> Response:
        """Prepare, swap and commit, for a pair with no other worker. Raises 404 unless this weight-update gateway has
        connected the pair."""
        body = await read_body(request, bodies.WeightOrder, _BODY_BYTES)
        if self._pair(body.pair_name).gateway != body.gateway:
            raise _unknown(body.pair_name)
        await self._prepare(body)
        about = {"pair_name": body.pair_name, "version": body.version, "paused_ms": await self._update(body)}
        self._commit(body)
        return json_response({"status": "ok", **about, "incarnation": self._incarnation})

    def _loading(self, source: str | Broadcast, version: int) -> Callable[[], Awaitable[None]]:
        if isinstance(self._engine, WeightStager):
            return partial(self._engine.load_staged, version)
        if isinstance(source, Broadcast):
            raise ApiError(409, f"version {version} was not prepared here", code="not_prepared")
        return partial(self._engine.load_weights, source, version)

    async def _swap(self, pair: WeightPair, version: int, load: Callable[[], Awaitable[None]]) -> float:
        async def swap() -> None:
            before, self._uncommitted = self._uncommitted, (pair.name, version)
            self._swapped.set()
            try:
                await load()
            except (EngineRefused, EngineUnsupported):  # the old weights are unchanged
                self._uncommitted = before
                raise
            self._tracker.loaded(pair.name, version)

        return await self._control.swap_weights(swap)

    def _source(self, body: bodies.WeightOrder) -> str | Broadcast:
        pair = self._pair(body.pair_name)
        if pair.mode == XCCL:
            return Broadcast(pair.name, body.source.get("layout"))
        folder = Path(body_as(bodies.FolderSource, body.source, "source").path)
        if not folder.is_relative_to(pair.root) or ".." in folder.parts:
            raise bad_request(f"{folder} is not below {pair.root}, which the pair was connected with", param="source")
        return str(folder)

    async def check(self, request: Request) -> Response:
        """Compare the engine's logprobs with a plain forward pass; respond 502 if it computes with other weights. The
        check samples a token, so it is skipped while generation is paused, and ``largest_gap`` is null."""
        probe = _probe((await read_body(request, bodies.CheckWeights, _BODY_BYTES)).probe)
        if self._control.paused:
            return json_response({"status": "ok", "largest_gap": None})
        async with self._control.exclusively():
            gap = await check_weights(self._engine, probe)
        return json_response({"status": "ok", "largest_gap": gap})

    async def commit(self, request: Request) -> Response:
        """Publish a version that every worker of the pair has. Workers that start serve only this version."""
        body = await read_body(request, bodies.WeightOrder, _BODY_BYTES)
        self._commit(body)
        return json_response({"status": "ok", "pair_name": body.pair_name, "version": body.version})

    def _commit(self, body: bodies.WeightOrder) -> None:
        pair = self._pair(body.pair_name)
        # Shared memory ends with its trainer: its path is not published.
        path = body_as(bodies.FolderSource, body.source, "source").path if pair.mode == "disk" else None
        with self._keeping():
            self._tracker.commit(self._tracker.record(pair.name, body.version, path, body.gateway, body.writer))
        self._uncommitted = None

    async def revert(self, request: Request) -> Response:
        """Return to the published weights because a worker of the pair refused this version. A worker that has no part
        of the version (``reverted`` false) continues to serve; the others serve nothing until they have returned."""
        body = await read_body(request, bodies.WeightOrder, _BODY_BYTES)
        order = body.pair_name, body.version
        reverted = await self._revert(order)
        return json_response({"status": "ok", "pair_name": order[0], "version": order[1], "reverted": reverted})

    async def _revert(self, order: tuple[str, int]) -> bool:
        async with self._control.exclusively():  # waits for a running swap
            if self._uncommitted != order:
                return False
            self._uncommitted = None
            if self._tracker.has(*order):  # a worker that failed has returned by itself, or is about to
                self._tracker.invalidate()
            return True

    async def run(self) -> None:
        """Return to the published weights if a trainer died before it committed an update, so that the workers of a
        model do not continue with two versions. Requires a copy of the published weights."""
        while True:
            await self._swapped.wait()
            self._swapped.clear()
            looks = 0
            while (order := self._uncommitted) is not None and looks < _DEAD_LOOKS:
                await asyncio.sleep(_ALIVE_S)
                pair = self._pairs.get(order[0])
                is_dead = pair is not None and pair.gateway is not None and not await self._is_alive(pair.gateway)
                looks = looks + 1 if is_dead and order == self._uncommitted else 0
            path = self._tracker.published.path if self._tracker.published is not None else None
            if order is None or path is None or not await asyncio.to_thread(Path(path).is_dir):
                continue
            _log.warning("version %d of the pair %r was not committed, and its trainer is gone", order[1], order[0])
            with suppress(ApiError):
                await self._revert(order)

    async def pairs(self, request: Request) -> Response:
        """List the pairs that an update may use; a process group is lost with its engine. ``?look`` polls the engine
        first. ``gateways``: the weight-update gateway of each pair. ``group_form``: the form of the process groups that
        the engine joins, null if it joins none. ``incarnation`` changes when this process or the engine restarts."""
        if request.query_string == "look":
            await self._control.watch.confirm()
        losses = self._control.watch.losses
        known = [pair for pair in self._pairs.values() if pair.mode != XCCL or pair.losses == losses]
        gateways = {pair.name: pair.gateway for pair in known}
        form = self._engine.group_form if isinstance(self._engine, GroupMember) else None
        about = {"pairs": list(gateways), "gateways": gateways, "group_form": form, "incarnation": self._incarnation}
        return json_response(about)

    @property
    def _incarnation(self) -> str:
        return f"{self._process}-{self._control.watch.losses}"

    async def disconnect(self, request: Request) -> Response:
        """Remove a pair. Idempotent, also after a ``connect`` that failed halfway. A pair that another ``gateway``
        connected stays. ``left``: the trainer has ended and leaves these weights (null: none)."""
        body = await read_body(request, bodies.DisconnectPair, _BODY_BYTES)
        name, there = body.pair_name, self._pairs.get(body.pair_name)
        if there is not None and None not in (there.gateway, body.gateway) and there.gateway != body.gateway:
            return json_response({"status": "ok", "pair_name": name, "known": False})
        pair = self._pairs.pop(name, None)
        if body.left != "unknown":
            with self._keeping():
                self._tracker.end(name, body.left)
        if pair is not None:
            await self._forget(pair)
        return json_response({"status": "ok", "pair_name": name, "known": pair is not None})

    async def release(self, request: Request) -> Response:
        """Drop the published weights when no trainer will deliver them. Engines that start then serve their own
        weights; running engines keep theirs. 409 while the trainer is alive."""
        await request.read(_BODY_BYTES)
        self._tracker.reload()
        record = self._tracker.published
        if record is None:
            return json_response({"status": "ok", "released": None})
        if record.gateway is not None and await self._is_alive(record.gateway):
            message = f"the trainer that published is alive (its gateway {record.gateway} answers): stop it first"
            raise ApiError(409, message, code="trainer_alive")
        pair = self._pairs.pop(record.pair, None)
        with self._keeping():
            self._tracker.end(record.pair, None)
        if pair is not None:
            await self._forget(pair)
        return json_response({"status": "ok", "released": {"pair_name": record.pair, "version": record.version}})

    @contextlib.contextmanager
    def _keeping(self) -> Iterator[None]:
        """Convert a failure to write the record of the published weights to ApiError 507 or 500."""
        try:
            yield
        except OSError as error:
            self._tracker.not_kept, self._tracker.lacks_room = str(error), lacks_room(error)
            status, code = (507, "storage_full") if self._tracker.lacks_room else (500, "not_kept")
            raise ApiError(
                status, f"the record of the published weights cannot be written: {error}", code=code
            ) from error
        self._tracker.not_kept = ""

    async def _forget(self, pair: WeightPair) -> None:
        """Remove the pair's process group and staged weights from the engine, unless the engine is lost."""
        with engine_errors_as_api_errors(), contextlib.suppress(EngineUnavailable):
            if pair.mode == XCCL:
                await self._group_member().leave_group(pair.name)
            if isinstance(self._engine, WeightStager):
                await self._engine.forget_weights()

    def _group_member(self) -> GroupMember:
        if not isinstance(self._engine, GroupMember):
            message = f"this engine takes weights by {', '.join(FOLDER_MODES)}, not by xccl"
            raise ApiError(400, message, code="unsupported_by_engine", param="mode")
        return self._engine

    def _pair(self, name: str) -> WeightPair:
        if name not in self._pairs:
            raise _unknown(name)
        return self._pairs[name]


def _unknown(name: str) -> ApiError:
    return ApiError(404, f"pair {name!r} is not connected here", code="pair_not_found", param="pair_name")


async def _shared_folder(offer: bodies.FolderOffer) -> Path:
    """Return the folder of the offer. Raises 409 unless it contains the file that the training side wrote."""
    root = Path(offer.root)
    try:
        found = await asyncio.to_thread((root / offer.mark).read_text)
        if found == offer.word:
            return root
        seen = "another file"
    except (OSError, UnicodeDecodeError):
        seen = "the trainer's file is not there"
    raise ApiError(
        409, f"{root} is another folder here than on the training side: {seen}", code="not_shared", param="offer"
    )


def _probe(data: bodies.ProbeOfWeights) -> WeightProbe:
    try:
        expected = {int(token): float(logprob) for token, logprob in data["expected"].items()}
        input_ids = tuple(int(token) for token in data["input_ids"])
        return WeightProbe(input_ids, expected, float(data.get("tolerance", FLOAT32_TOLERANCE)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise bad_field("probe", f"is not one: {error}") from error
