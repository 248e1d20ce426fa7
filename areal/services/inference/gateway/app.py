"""The gateway's routes and its relay process. Model calls are relayed, and models are listed from the routing table.
Admins control workers and register models; other admin routes are forwarded to the router."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import orjson

from areal.dataclasses import dataclass, field, replace
from areal.http.client import CallFailed, HttpClient, HttpReply
from areal.services.http.auth import Access, presented_key
from areal.services.http.errors import ApiError, bad_field
from areal.services.http.messages import (
    AnyResponse,
    Request,
    Response,
    decode_object,
    read_body,
    refuse_idempotency_key,
)
from areal.services.http.process import ServeOptions
from areal.services.http.service import Handler, Service, json_response, to_response
from areal.services.http.tasks import uninterrupted
from areal.services.inference.gateway.exports import ExportRoutes
from areal.services.inference.gateway.relay import Relay, RelayMetrics
from areal.services.inference.gateway.routing import LiveTable, RouterClient
from areal.services.inference.gateway.sessions import JournalClient, SessionKeys, SessionRoutes, gateway_parts
from areal.wire.bodies import ModelWorker, NameModel, PublishModel, RegisterExternal, RegisterModel, SetVersion
from areal.wire.fields import write_fields
from areal.wire.processes import GatewayConfig
from areal.wire.routing import ModelEntry

MODEL_CALLS = ("/chat/completions", "/completions", "/responses", "/messages", "/messages/count_tokens")
PREFIXES = ("/v1", "")  # some clients append /v1 to the base URL, others do not


@dataclass(eq=False)
class GatewayRoutes:
    _table: LiveTable
    _relay: Relay
    _router: RouterClient
    _keys: SessionKeys
    _journals: JournalClient

    def add_to(self, service: Service) -> None:
        for prefix in PREFIXES:
            for path in MODEL_CALLS:
                service.route("POST", f"{prefix}{path}", self._model_call(f"/v1{path}"), Access.SESSION)
            service.route("GET", f"{prefix}/models", self.models, Access.SESSION)
            service.route("GET", f"{prefix}/models/{{name...}}", self.model, Access.SESSION)
        service.route("GET", "/workers", self._router.forwards("GET", "/workers"), Access.ADMIN)
        service.route("GET", "/http_sd", self._router.lists_targets(service, "gateway"), Access.METRICS)
        service.route("POST", "/http_sd", self._router.forwards("POST", "/http_sd"), Access.ADMIN)
        for verb in ("drain", "undrain"):
            service.route("POST", f"/{verb}/{{worker_id}}", self._router.forwards_worker(f"/{verb}"), Access.ADMIN)

    def _model_call(self, path: str) -> Handler:
        async def handle(request: Request) -> AnyResponse:
            tag = await self._keys.journal_of(request)
            answer = await self._relay.forward(request, path, tag)
            if answer.status == 401 and tag is not None:
                self._keys.forget(presented_key(request.headers))  # its session has moved or ended
            return answer

        return handle

    async def models(self, request: Request) -> Response:
        if (refusal := await self._refusal(request)) is not None:
            return refusal
        self._table.require_whole()
        models = self._table.published()
        data = [entry for model in models for entry in _openai_models(model)]
        return json_response({"object": "list", "data": data, "models": [entry["id"] for entry in data]})

    async def _refusal(self, request: Request) -> Response | None:
        """Return the data proxy's refusal of a session's key that is not live, None for any other key. Raises 401."""
        tag = await self._keys.journal_of(request)
        if tag is None:
            return None
        reply = await self._journals.call(tag, "GET", "/v1/models", self._journals.for_caller(request))
        return to_response(reply) if reply.status != 200 else None

    async def model(self, request: Request) -> Response:
        if (refusal := await self._refusal(request)) is not None:
            return refusal
        name = request.match_info["name"]
        for model in self._table.published():
            for entry in _openai_models(model):
                if entry["id"] == name:
                    return json_response(entry)
        self._table.require_whole()
        self._table.require_replicas(name)
        raise ApiError(404, f"the model {name!r} does not exist", code="model_not_found", param="model")


def _openai_models(model: ModelEntry) -> list[dict[str, object]]:
    """Return the entries of a model and its adapters, with OpenAI's fields, and vLLM's if workers report them."""
    entry: dict[str, object] = {"id": model.name, "object": "model", "created": model.created, "owned_by": "areal"}
    reported = {"root": model.root, "max_model_len": model.max_model_len}
    entry |= {name: value for name, value in reported.items() if value is not None}
    adapters = [{**entry, "id": f"{model.name}:{adapter}", "parent": model.name} for adapter in model.adapters]
    return [entry, *adapters]


# Control of workers: pause, memory, versions and published weights, of one data proxy or of all. The router lists the
# data proxies; they are called directly and concurrently, each with its own result. The status is 207 if some failed:
# the effect on the others stays. A malformed body is refused before any worker is called.

_BODY_BYTES = 64 * 1024
_DEADLINE_S = 180.0  # longer than the data proxy's own on its engine
_POSTS = (
    "/pause_generation",
    "/continue_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/weights/release",
)
EVERY_WORKER = "all"


@dataclass(frozen=True)
class WorkerResult:
    """One worker's answer. ``status`` is 0 if the worker did not answer."""

    worker_id: str
    worker_addr: str
    status: int
    answer: Mapping[str, Any]
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.status == 200

    def to_json(self) -> dict[str, Any]:
        about = {"worker_id": self.worker_id, "worker_addr": self.worker_addr, "status": self.status, "ok": self.ok}
        version = {"version": self.answer["version"]} if "version" in self.answer else {}
        return {**about, **version, **({} if self.ok else {"error": self.error})}


@dataclass(eq=False)
class WorkerControl:
    _http: HttpClient
    _router: RouterClient
    _headers: Mapping[str, str]

    def add_to(self, service: Service) -> None:
        for path in _POSTS:
            service.route("POST", f"{path}/{{worker_id}}", self._fan_out("POST", path), Access.ADMIN)
        service.route("POST", "/set_version/{worker_id}", self.set_version, Access.ADMIN)
        service.route("GET", "/get_version/{worker_id}", self._fan_out("GET", "/get_version"), Access.ADMIN)

    def _fan_out(self, method: str, path: str) -> Handler:
        async def handle(request: Request) -> AnyResponse:
            body = await request.read(_BODY_BYTES)
            if body:
                decode_object(body)
            workers = await self._workers(request.match_info["worker_id"])
            return _answer(path, await self._call_all(method, path, workers, body))

        return handle

    async def set_version(self, request: Request) -> Response:
        """Set the version at the workers. Without ``force``, refuse if any worker has a newer version."""
        wanted = await read_body(request, SetVersion, _BODY_BYTES)
        if wanted.force:
            refuse_idempotency_key(request, "a late repetition with force would set the version back again")
        workers = await self._workers(request.match_info["worker_id"])
        if not wanted.force:
            for result in await self._call_all("GET", "/get_version", workers, b""):
                if conflict := wanted.conflict(result.answer.get("version"), f"worker {result.worker_id}"):
                    raise ApiError(409, conflict, code="version_not_growing", param="version")
        return _answer("/set_version", await self._call_all("POST", "/set_version", workers, orjson.dumps(wanted)))

    async def _call_all(
        self, method: str, path: str, workers: list[tuple[str, str]], body: bytes
    ) -> list[WorkerResult]:
        return list(await asyncio.gather(*(self._call(method, path, worker, body) for worker in workers)))

    async def _workers(self, worker_id: str) -> list[tuple[str, str]]:
        """Return the named workers' ids and addresses. A data proxy with several models is one worker. Raises 404."""
        known = (await self._router.get("/workers"))["workers"]
        if worker_id == EVERY_WORKER:
            names = {worker["worker_addr"]: worker["worker_id"] for worker in reversed(known)}  # its first id wins
            return [(name, addr) for addr, name in names.items()]
        for worker in known:
            if worker["worker_id"] == worker_id:
                return [(worker_id, worker["worker_addr"])]
        raise ApiError(404, f"no worker {worker_id!r}", code="worker_not_found", param="worker_id")

    async def _call(self, method: str, path: str, worker: tuple[str, str], body: bytes) -> WorkerResult:
        worker_id, addr = worker
        try:
            reply = await self._http.fetch(method, addr, path, headers=self._headers, body=body, timeout_s=_DEADLINE_S)
        except (CallFailed, TimeoutError) as error:
            return WorkerResult(worker_id, addr, 0, {}, f"the worker does not answer: {error!r}")
        refusal = None
        if reply.status != 200:
            refusal = str(reply.error().get("message") or f"the worker answered {reply.status}")
        return WorkerResult(worker_id, addr, reply.status, reply.object(), refusal)


def _answer(path: str, results: list[WorkerResult]) -> Response:
    answer: dict[str, Any] = {"results": [result.to_json() for result in results]}
    if path.endswith("_version"):
        versions = {result.answer.get("version") for result in results}
        version = versions.pop() if len(versions) == 1 else None
        answer["version"] = version if isinstance(version, int) else None  # null unless all workers have the same
    return json_response(answer, status=200 if all(result.ok for result in results) else 207)


# Manual registration of models: running data proxies are put behind this gateway under a model's name.
#
# With a ``url``, the data proxies (by default all healthy ones) first register that external API. A registration is all
# or nothing: each data proxy is first asked whether it serves the model or can reach the API, and a registration that
# fails later is rolled back.

_REGISTRATION_BYTES = 1024 * 1024
_PROBE_TIMEOUT_S = 10.0
_TIMEOUT_S = 30.0  # more than the data proxy's 10 s for the external API


@dataclass(eq=False)
class Registration:
    _http: HttpClient
    _router: RouterClient
    _headers: Mapping[str, str]
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def add_to(self, service: Service) -> None:
        service.route("POST", "/register_model", self.register, Access.ADMIN)
        service.route("POST", "/deregister_model", self.deregister, Access.ADMIN)

    async def register(self, request: Request) -> Response:
        body = await read_body(request, PublishModel, _REGISTRATION_BYTES)
        model, external = body.model, body.external
        if external is None and body.api_key is not None:
            raise bad_field("api_key", "needs url")
        if external is None and not body.addrs:
            raise bad_field("data_proxy_addrs", "must be a list of addresses, not empty")
        async with self._lock:
            addrs = body.addrs or await self._healthy()
            before = await self._registered(model)
            if external is not None:
                await self._register_external(external, addrs)
            try:
                await asyncio.gather(*(self._check(addr, model) for addr in addrs))
                await self._put(model, addrs, external=external is not None)
            except BaseException:
                restore = self._restore(model, before, addrs if external is not None else [])
                await uninterrupted(restore, "restore-registration")
                raise
        return json_response({"status": "ok", "model": model, "data_proxy_addrs": addrs})

    async def deregister(self, request: Request) -> Response:
        """Remove a model. ``untold``: data proxies that did not answer and may still serve the external model."""
        model = (await read_body(request, NameModel, _REGISTRATION_BYTES)).model
        async with self._lock:
            known = await self._registered(model)
            await self._router.post("/remove_model", {"model": model})
            untold: list[str] = []
            if known is not None and known.external:
                untold = await self._forget_external(model, [worker.worker_addr for worker in known.workers])
        return json_response({"status": "ok", "model": model, **({"untold": untold} if untold else {})})

    async def _healthy(self) -> list[str]:
        """Return the addresses of the healthy data proxies. Raises 503 if there are none."""
        workers = (await self._router.get("/workers"))["workers"]
        addrs = list(dict.fromkeys(worker["worker_addr"] for worker in workers if worker["healthy"]))
        if not addrs:
            raise ApiError(503, "there is no healthy data proxy", code="no_worker_available", param="data_proxy_addrs")
        return addrs

    async def _register_external(self, external: RegisterExternal, addrs: Sequence[str]) -> None:
        """Register the API at each data proxy, after a dry run at all of them. Raises ApiError after a rollback."""
        await self._post_to_each(addrs, replace(external, dry_run=True))
        try:
            await self._post_to_each(addrs, external)
        except BaseException:
            forget = self._forget_external(str(external.name), addrs)
            await uninterrupted(forget, "forget-external-model")
            raise

    async def _forget_external(self, name: str, addrs: Sequence[str]) -> list[str]:
        """Deregister the model at the data proxies. Return the addresses of those that failed or did not answer."""

        async def deregister_at(addr: str) -> bool:
            try:
                return (await self._post(addr, "/deregister_model", {"name": name})).status in (200, 404)
            except ApiError:
                return False

        done_at = await asyncio.gather(*map(deregister_at, addrs))
        return [addr for addr, done in zip(addrs, done_at, strict=True) if not done]

    async def _post_to_each(self, addrs: Sequence[str], body: RegisterExternal) -> None:
        answers = await asyncio.gather(*(self._post(addr, "/register_model", body) for addr in addrs))
        for addr, answer in zip(addrs, answers, strict=True):
            if answer.status != 200:
                refusal, status = answer.error(), answer.status if 400 <= answer.status < 500 else 502
                message = (
                    f"the data proxy at {addr} refuses the registration: {refusal.get('message') or answer.status}"
                )
                code = refusal.get("code") or "data_proxy_refused"
                raise ApiError(status, message, code=code, param=refusal.get("param"))

    async def _post(self, addr: str, path: str, body: object) -> HttpReply:
        return await self._fetch("POST", addr, path, _TIMEOUT_S, orjson.dumps(body))

    async def _fetch(self, method: str, addr: str, path: str, timeout_s: float, body: bytes = b"") -> HttpReply:
        try:
            return await self._http.fetch(method, addr, path, headers=self._headers, body=body, timeout_s=timeout_s)
        except (CallFailed, TimeoutError) as error:
            raise ApiError(502, f"no data proxy answers at {addr}: {error!r}", code="data_proxy_unavailable") from error

    async def _check(self, addr: str, model: str) -> None:
        """Raise ApiError unless ``addr`` is a data proxy that is ready for ``model``."""
        answer = await self._fetch("GET", addr, "/ready", _PROBE_TIMEOUT_S)
        about = answer.object()
        if about.get("component") != "data-proxy":
            raise ApiError(409, f"the server at {addr} is not a data proxy", code="not_a_data_proxy")
        served = about.get("models") or [about.get("model")]
        if model not in served:
            message = f"the data proxy at {addr} serves {', '.join(map(repr, served))}, not {model!r}"
            raise ApiError(409, message, code="model_mismatch", param="model")
        if answer.status != 200:
            message = f"the data proxy at {addr} is not ready: {about.get('reason')}"
            raise ApiError(503, message, code="data_proxy_not_ready")

    async def _registered(self, model: str) -> RegisterModel | None:
        """Return the registered model as the body that would register it again, or None."""
        models = {entry["name"]: entry for entry in (await self._router.get("/models"))["models"]}
        if (entry := models.get(model)) is None:
            return None
        workers = tuple(ModelWorker(worker_id=each["id"], worker_addr=each["addr"]) for each in entry["workers"])
        return RegisterModel(model=model, workers=workers, expected=entry["expected"], external=entry["external"])

    async def _put(self, model: str, addrs: list[str], *, external: bool) -> None:
        known = await self._registered(model)
        ids = {worker.worker_addr: worker.worker_id for worker in known.workers} if known else {}
        for addr in addrs:  # an id of another model would replace that model's worker
            ids.setdefault(addr, "manual-" + hashlib.blake2b(f"{model}\0{addr}".encode(), digest_size=8).hexdigest())
        workers = tuple(ModelWorker(worker_id=ids[addr], worker_addr=addr) for addr in addrs)
        body = RegisterModel(model=model, workers=workers, external=external)
        reply = await self._router.post("/register_model", write_fields(body))
        if lost := [worker["worker_addr"] for worker in reply["workers"] if not worker["healthy"]]:
            message = f"the router does not reach the data proxy at {', '.join(lost)}"
            raise ApiError(502, message, code="data_proxy_unavailable")

    async def _restore(self, model: str, before: RegisterModel | None, addrs: list[str]) -> None:
        """Roll back a registration. ``addrs``: data proxies that registered an external model. A model that was
        registered before keeps the new API, since only the data proxies had the key of the old one."""
        if before is not None:
            await self._router.post("/register_model", write_fields(before))
            return
        await self._forget_external(model, addrs)
        if await self._registered(model) is not None:
            await self._router.post("/remove_model", {"model": model})


@contextlib.asynccontextmanager
async def gateway(config: GatewayConfig, options: ServeOptions) -> AsyncIterator[Service]:
    """Build the service of one relay process."""
    async with HttpClient() as http:
        parts = gateway_parts(config, options, http, "Model requests waiting for a worker.")
        service, table, router, keys = parts.service, parts.table, parts.router, parts.keys
        relay = Relay(table, parts.follower, parts.admission, http, RelayMetrics(service.metrics))
        GatewayRoutes(table, relay, router, keys, parts.journals).add_to(service)
        SessionRoutes(table, relay, router, parts.journals, keys).add_to(service)
        ExportRoutes(parts.journals).add_to(service)
        WorkerControl(http, router, options.headers).add_to(service)
        Registration(http, router, options.headers).add_to(service)
        yield service
