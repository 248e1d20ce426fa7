"""Models that are registered by hand: data proxies that already run, put behind this gateway under a model's name.

With a ``url`` the data proxies are told first that they serve that external API too, by default all that are healthy.
All or nothing. Every data proxy is asked first whether it serves that model, or can reach that API; a registration that
fails after that leaves the router with what it had before.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any

from areal.services.inference.gateway.external_registration import ExternalModel, ExternalRegistration
from areal.services.inference.gateway.router_client import RouterClient
from areal.services.inference.router.registry import worker_base_url
from areal.services.web.access import Access
from areal.services.web.body import read_object
from areal.services.web.client import CallFailed, HttpClient
from areal.services.web.errors import ApiError, bad_request
from areal.services.web.server import Request, Response
from areal.services.web.service import Service, json_response

_BODY_BYTES = 1024 * 1024
_PROBE_TIMEOUT_S = 10.0


class Registration:
    def __init__(self, http: HttpClient, router: RouterClient, headers: Mapping[str, str]) -> None:
        self._http = http
        self._router = router
        self._headers = dict(headers)
        self._external = ExternalRegistration(http, headers)
        self._lock = asyncio.Lock()

    def add_to(self, service: Service) -> None:
        service.route("POST", "/register_model", self.register, Access.ADMIN)
        service.route("POST", "/deregister_model", self.deregister, Access.ADMIN)

    async def register(self, request: Request) -> Response:
        data = await read_object(request, _BODY_BYTES)
        model = _name(data)
        external = ExternalModel.of(model, data)
        if external is None and data.get("api_key") is not None:
            raise bad_request("api_key belongs to a url, and there is none", param="api_key")
        async with self._lock:
            addrs = await self._everyone() if external is not None and _is_absent(data) else _addresses(data)
            before = await self._registered(model)
            if external is not None:
                await self._external.register(external, addrs)
            try:
                await asyncio.gather(*(self._check(addr, model) for addr in addrs))
                await self._put(model, addrs, external=external is not None)
            except BaseException:
                take_back = self._restore(model, before, addrs if external is not None else [])
                await asyncio.shield(asyncio.create_task(take_back, name="take-back-registration"))
                raise
        return json_response({"status": "ok", "model": model, "data_proxy_addrs": addrs})

    async def deregister(self, request: Request) -> Response:
        """``untold``: data proxies of an external model that may still serve it, for they do not answer."""
        model = _name(await read_object(request, _BODY_BYTES))
        async with self._lock:
            known = await self._registered(model)
            await self._router.post("/remove_model", {"model": model})
            untold: list[str] = []
            if known is not None and known["external"]:
                untold = await self._external.forget(model, [worker["worker_addr"] for worker in known["workers"]])
        return json_response({"status": "ok", "model": model, **({"untold": untold} if untold else {})})

    async def _everyone(self) -> list[str]:
        """Raises 503 where there is no healthy data proxy."""
        workers = (await self._router.get("/workers"))["workers"]
        addrs = list(dict.fromkeys(worker["worker_addr"] for worker in workers if worker["healthy"]))
        if not addrs:
            raise ApiError(503, "there is no healthy data proxy", code="no_worker_available", param="data_proxy_addrs")
        return addrs

    async def _check(self, addr: str, model: str) -> None:
        """Raises ApiError when there is no data proxy ready for ``model`` at ``addr``."""
        try:
            answer = await self._http.fetch("GET", addr, "/ready", headers=self._headers, timeout_s=_PROBE_TIMEOUT_S)
        except (CallFailed, TimeoutError) as error:
            raise ApiError(502, f"no data proxy answers at {addr}: {error!r}", code="data_proxy_unavailable") from error
        said = answer.object()
        if said.get("component") != "data-proxy":
            raise ApiError(409, f"what answers at {addr} is no data proxy", code="not_a_data_proxy")
        served = said.get("models") or [said.get("model")]
        if model not in served:
            message = f"the data proxy at {addr} serves {', '.join(map(repr, served))}, not {model!r}"
            raise ApiError(409, message, code="model_mismatch", param="model")
        if answer.status != 200:
            message = f"the data proxy at {addr} is not ready: {said.get('reason')}"
            raise ApiError(503, message, code="data_proxy_not_ready")

    async def _registered(self, model: str) -> dict[str, Any] | None:
        """What the router has under this name, as what would register it again."""
        models = {entry["name"]: entry for entry in (await self._router.get("/models"))["models"]}
        if (entry := models.get(model)) is None:
            return None
        workers = [{"worker_id": worker["id"], "worker_addr": worker["addr"]} for worker in entry["workers"]]
        about = {"expected": entry["expected"], "external": entry["external"]}
        return {"model": model, "workers": workers, **about}

    async def _put(self, model: str, addrs: list[str], *, external: bool) -> None:
        known = await self._registered(model)
        ids = {worker["worker_addr"]: worker["worker_id"] for worker in known["workers"]} if known else {}
        workers = [{"worker_id": ids.get(addr, _worker_id(model, addr)), "worker_addr": addr} for addr in addrs]
        body = {"model": model, "workers": workers, "external": external}
        said = await self._router.post("/register_model", body)
        if lost := [worker["worker_addr"] for worker in said["workers"] if not worker["healthy"]]:
            message = f"the router does not reach the data proxy at {', '.join(lost)}"
            raise ApiError(502, message, code="data_proxy_unavailable")

    async def _restore(self, model: str, before: dict[str, Any] | None, told: list[str]) -> None:
        """``told``: data proxies that were told of an external model. Where the model was registered before, its API
        is the new one from now on: nobody but them knew the old one's key."""
        if before is None:
            await self._external.forget(model, told)
        if before is not None:
            await self._router.post("/register_model", before)
        elif await self._registered(model) is not None:
            await self._router.post("/remove_model", {"model": model})


def _name(data: Mapping[str, Any]) -> str:
    model = data.get("model")
    if not isinstance(model, str) or not model:
        raise bad_request("model is required: the name under which callers know it", param="model")
    return model


def _is_absent(data: Mapping[str, Any]) -> bool:
    return data.get("data_proxy_addrs") in (None, [])


def _addresses(data: Mapping[str, Any]) -> list[str]:
    given = data.get("data_proxy_addrs")
    if not isinstance(given, list) or not given or not all(isinstance(item, str) for item in given):
        raise bad_request("data_proxy_addrs must be a list of addresses, not empty", param="data_proxy_addrs")
    try:
        return list(dict.fromkeys(map(worker_base_url, given)))
    except ValueError as error:
        raise bad_request(str(error), param="data_proxy_addrs") from error


def _worker_id(model: str, addr: str) -> str:
    """The same for the same pair, and nobody else's: an id taken from another model would replace its worker."""
    return "manual-" + hashlib.blake2b(f"{model}\0{addr}".encode(), digest_size=8).hexdigest()
