"""The weight-update gateway's HTTP routes and its process (see ``areal.services.weight_update``)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from areal.dataclasses import dataclass
from areal.files import replace_file
from areal.http.client import HttpClient
from areal.resources.addresses import base_url
from areal.services.http.auth import Access
from areal.services.http.errors import bad_field, bad_request, unsupported
from areal.services.http.messages import Request, Response, body_as, read_body, read_object
from areal.services.http.process import ServeOptions
from areal.services.http.service import Service, json_response
from areal.services.weight_update.pairs import Mode, Pair, PairMetadata, Pairs, UpdateHistory, check_version
from areal.services.weight_update.updating import Updater, WorkerClient
from areal.wire import bodies
from areal.wire.processes import WEIGHT_HISTORY_FILE, WeightUpdateConfig

_BODY_BYTES = 4 * 1024 * 1024
_NOT_HONOURED = {
    "master_addr": "the trainer's endpoint says where its process group meets",
    "master_port": "the trainer's endpoint says where its process group meets",
    "save_path": "the trainer's endpoint says where it writes its weights",
    "lora_name": "adapters are loaded by the engines' own routes; a pair carries the whole model",
    "use_lora": "adapters are loaded by the engines' own routes; a pair carries the whole model",
    "colocate": "mode shm is for trainers and engines on one machine",
}  # fields that AReaL's clients send and that would change an update; null, false and "" are accepted


@dataclass(eq=False)
class WeightUpdateRoutes:
    _pairs: Pairs
    _updater: Updater
    _metadata: PairMetadata

    def add_to(self, service: Service) -> None:
        service.route("POST", "/connect", self.connect, Access.ADMIN)
        service.route("POST", "/update_weights", self.update_weights, Access.ADMIN)
        service.route("POST", "/force_sync", self.force_sync, Access.ADMIN)
        service.route("POST", "/join", self.join, Access.ADMIN)
        service.route("POST", "/disconnect", self.disconnect, Access.ADMIN)
        service.route("GET", "/pairs", self.pairs, Access.ADMIN)
        values, sets = "/weight_meta/{pair}/{key}", "/weight_meta/{pair}/set/{key}"
        service.route("PUT", sets, self.add_member, Access.ADMIN)
        service.route("GET", f"{sets}/size", self.set_size, Access.ADMIN)
        service.route("GET", values, self.value, Access.ADMIN)
        service.route("PUT", values, self.put_value, Access.ADMIN)
        service.route("DELETE", values, self.delete_value, Access.ADMIN)

    async def connect(self, request: Request) -> Response:
        pair = read_pair(await read_object(request, _BODY_BYTES))
        self._pairs.reserve(pair)
        try:
            async with pair.lock:
                await self._updater.connect(pair)
        except BaseException:
            self._pairs.forget(pair)
            raise
        return json_response({"status": "ok", **pair.to_json()})

    async def update_weights(self, request: Request) -> Response:
        body = await read_body(request, bodies.UpdateWeights, _BODY_BYTES)
        pair = self._pairs.get(body.pair_name)
        if body.version != pair.synced_version:
            check_version(pair, body.version)
        if body.inference_gateway_url is not None:
            if pair.inference_gateway is None:
                message = f"pair {pair.name!r} has fixed workers, and no gateway"
                raise bad_request(message, param="inference_gateway_url")
            pair.inference_gateway = body.inference_gateway_url.rstrip("/")
        async with pair.lock:
            if body.version == pair.synced_version and pair.last is not None:  # a sync has transferred it already
                done, pair.synced_version = pair.last, None
            else:  # checked again: another update may have run while this one waited
                check_version(pair, body.version)
                done = await self._updater.update(pair, body.version, body.published)
        return json_response({"status": "ok", **asdict(done)})

    async def force_sync(self, request: Request) -> Response:
        """Transfer the newest staged version now, even to workers that may already have it."""
        pair = self._pairs.get((await read_body(request, bodies.NamePair, _BODY_BYTES)).pair_name)
        async with pair.lock:
            done = await self._updater.sync(pair)
        return json_response({"status": "ok", **asdict(done)})

    async def join(self, request: Request) -> Response:
        """Give a newly started inference worker the version that the others serve."""
        body = await read_body(request, bodies.JoinPair, _BODY_BYTES)
        pair, worker = self._pairs.get(body.pair_name), body.worker_addr.rstrip("/")
        pair.joining_workers.add(worker)
        try:
            async with pair.lock:
                await self._updater.join(pair, worker)
        finally:
            pair.joining_workers.discard(worker)
        return json_response({"status": "ok", "pair_name": pair.name, "version": pair.version})

    async def disconnect(self, request: Request) -> Response:
        body = await read_body(request, bodies.EndPair, _BODY_BYTES)
        pair = self._pairs.get(body.pair_name)
        async with pair.lock:
            unreachable = await self._updater.disconnect(pair, left=body.left)
        self._pairs.forget(pair)
        self._metadata.forget(pair.name)
        return json_response({"status": "ok", "pair_name": pair.name, "unreachable": unreachable})

    async def pairs(self, request: Request) -> Response:
        pairs = self._pairs.all()
        present = await asyncio.gather(*map(self._updater.present, pairs))
        return json_response({"pairs": [pair.to_json(there) for pair, there in zip(pairs, present, strict=True)]})

    async def value(self, request: Request) -> Response:
        return json_response({"value": self._metadata.get(*_place(request))})

    async def put_value(self, request: Request) -> Response:
        data = await read_object(request, _BODY_BYTES)
        if "value" not in data:
            raise bad_field("value", "is required", code="missing_field")
        self._metadata.put(*_place(request), data["value"])
        return json_response({"status": "ok"})

    async def delete_value(self, request: Request) -> Response:
        return json_response({"status": "ok", "deleted": self._metadata.delete(*_place(request))})

    async def add_member(self, request: Request) -> Response:
        member = (await read_object(request, _BODY_BYTES)).get("value")
        if not isinstance(member, str):
            raise bad_field("value", "must be a text")
        return json_response({"status": "ok", "size": self._metadata.add(*_place(request), member)})

    async def set_size(self, request: Request) -> Response:
        return json_response({"size": self._metadata.size(*_place(request))})


def _place(request: Request) -> tuple[str, str]:
    return request.match_info["pair"], request.match_info["key"]


def read_pair(data: Mapping[str, object]) -> Pair:
    """Parse the body of ``/connect``. Raises 400 naming the field."""
    for field, why in _NOT_HONOURED.items():
        if data.get(field) not in (None, False, ""):
            raise unsupported(field, why)
    body = body_as(bodies.ConnectTrainer, data)
    gateway = body.inference_gateway_url
    if gateway is None and body.inference_worker_urls is None:
        message = "inference_worker_urls or inference_gateway_url is required"
        raise bad_request(message, param="inference_worker_urls", code="missing_field")
    if gateway is not None and body.model is None:
        raise bad_field("model", "is required beside inference_gateway_url", code="missing_field")
    train = _without_slash(body.train_worker_urls)
    inference = _without_slash(body.inference_worker_urls or ()) if gateway is None else ()
    if both := set(train) & set(inference):
        raise bad_request(f"{sorted(both)[0]} is on both sides", param="inference_worker_urls")
    mode = Mode.XCCL if body.mode == "awex" else Mode(body.mode)
    return Pair(body.pair_name, mode, train, inference, gateway and gateway.rstrip("/"), body.model)


def _without_slash(urls: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(url.rstrip("/") for url in urls))


@contextlib.asynccontextmanager
async def weight_update_gateway(config: WeightUpdateConfig, options: ServeOptions) -> AsyncIterator[Service]:
    service = Service("weight-update", key=options.key, loopback=options.loopback)
    file = config.discovery_file
    async with HttpClient() as http:
        client = WorkerClient(http, options.headers)
        history = UpdateHistory(Path(file).with_name(WEIGHT_HISTORY_FILE) if file else None)
        updater = Updater(client, lambda: service.address, config.writer, history)
        WeightUpdateRoutes(Pairs(), updater, PairMetadata()).add_to(service)
        with _discovery_file(Path(file), config) if file else contextlib.nullcontext():
            yield service


@contextlib.contextmanager
def _discovery_file(path: Path, config: WeightUpdateConfig) -> Iterator[None]:
    """Write the file by which ``areal weight-update`` finds this gateway. Remove it at exit, unless another gateway has
    replaced it."""
    about = {
        "url": base_url(config.host, config.port),
        "pid": os.getpid(),
        "admin_key_file": str(Path(config.admin_key_file).absolute()) if config.admin_key_file else None,
    }
    text = json.dumps(about)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            if path.read_text() == text:
                path.unlink()
