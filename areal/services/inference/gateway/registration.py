"""Models that are registered by hand: data proxies that already run, put behind this gateway under a model's name.

All or nothing. Every data proxy is asked first whether it serves that model; a registration that fails after that
leaves the router with what it had before.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any

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
        self._lock = asyncio.Lock()

    def add_to(self, service: Service) -> None:
        service.route("POST", "/register_model", self.register, Access.ADMIN)
        service.route("POST", "/deregister_model", self.deregister, Access.ADMIN)

    async def register(self, request: Request) -> Response:
        data = await read_object(request, _BODY_BYTES)
        model, addrs = _name(data), _addresses(data)
        async with self._lock:
            await asyncio.gather(*(self._check(addr, model) for addr in addrs))
            before = await self._registered(model)
            try:
                await self._put(model, addrs)
            except BaseException:
                await asyncio.shield(asyncio.create_task(self._restore(model, before), name="take-back-registration"))
                raise
        return json_response({"status": "ok", "model": model, "data_proxy_addrs": addrs})

    async def deregister(self, request: Request) -> Response:
        model = _name(await read_object(request, _BODY_BYTES))
        async with self._lock:
            await self._router.post("/remove_model", {"model": model})
        return json_response({"status": "ok", "model": model})

    async def _check(self, addr: str, model: str) -> None:
        """Raises ApiError when there is no data proxy ready for ``model`` at ``addr``."""
        try:
            answer = await self._http.fetch("GET", addr, "/ready", headers=self._headers, timeout_s=_PROBE_TIMEOUT_S)
        except (CallFailed, TimeoutError) as error:
            raise ApiError(502, f"no data proxy answers at {addr}: {error!r}", code="data_proxy_unavailable") from error
        said = answer.object()
        if said.get("component") != "data-proxy":
            raise ApiError(409, f"what answers at {addr} is no data proxy", code="not_a_data_proxy")
        if said.get("model") != model:
            message = f"the data proxy at {addr} serves {said.get('model')!r}, not {model!r}"
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

    async def _put(self, model: str, addrs: list[str]) -> None:
        known = await self._registered(model)
        ids = {worker["worker_addr"]: worker["worker_id"] for worker in known["workers"]} if known else {}
        workers = [{"worker_id": ids.get(addr, _worker_id(model, addr)), "worker_addr": addr} for addr in addrs]
        said = await self._router.post("/register_model", {"model": model, "workers": workers})
        if lost := [worker["worker_addr"] for worker in said["workers"] if not worker["healthy"]]:
            message = f"the router does not reach the data proxy at {', '.join(lost)}"
            raise ApiError(502, message, code="data_proxy_unavailable")

    async def _restore(self, model: str, before: dict[str, Any] | None) -> None:
        if before is not None:
            await self._router.post("/register_model", before)
        elif await self._registered(model) is not None:
            await self._router.post("/remove_model", {"model": model})


def _name(data: Mapping[str, Any]) -> str:
    model = data.get("model")
    if not isinstance(model, str) or not model:
        raise bad_request("model is required: the name under which callers know it", param="model")
    return model


def _addresses(data: Mapping[str, Any]) -> list[str]:
    for name in ("url", "api_key"):
        if data.get(name) is not None:
            message = (
                f"{name} is not taken here: an external API is served by a data proxy of its own (--engine external)"
            )
            raise bad_request(message, param=name, code="unsupported_field")
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
