"""Control of workers through the gateway: pause, memory, versions and published weights, of one data proxy or of all.

The router says who the workers are; each is asked directly, all at once, and each has its own result. 207 when some
failed. What succeeded on the others stands: the caller sees who is who, and decides. A body that no worker would take
is refused before any is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal.services.inference.gateway.router_client import RouterClient
from areal.services.inference.versions import check_grows, read_version
from areal.services.web.access import Access
from areal.services.web.body import decode_object, read_body
from areal.services.web.client import CallFailed, HttpClient
from areal.services.web.errors import ApiError
from areal.services.web.server import AnyResponse, Request, Response
from areal.services.web.service import Handler, Service, json_response

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
class Result:
    """What one worker answered. ``status`` 0: nothing at all."""

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


class WorkerControl:
    def __init__(self, http: HttpClient, router: RouterClient, headers: Mapping[str, str]) -> None:
        self._http = http
        self._router = router
        self._headers = dict(headers)

    def add_to(self, service: Service) -> None:
        for path in _POSTS:
            service.route("POST", f"{path}/{{worker_id}}", self._fan_out("POST", path), Access.ADMIN)
        service.route("POST", "/set_version/{worker_id}", self.set_version, Access.ADMIN)
        service.route("GET", "/get_version/{worker_id}", self._fan_out("GET", "/get_version"), Access.ADMIN)

    def _fan_out(self, method: str, path: str) -> Handler:
        async def handle(request: Request) -> AnyResponse:
            body = await read_body(request, _BODY_BYTES)
            if body:
                decode_object(body)
            workers = await self._workers(request.match_info["worker_id"])
            return _answer(path, await self._ask_all(method, path, workers, body))

        return handle

    async def set_version(self, request: Request) -> Response:
        """Refused as a whole where a worker has a newer one."""
        body = await read_body(request, _BODY_BYTES)
        version, force = read_version(decode_object(body))
        workers = await self._workers(request.match_info["worker_id"])
        if not force:
            for result in await self._ask_all("GET", "/get_version", workers, b""):
                served = result.answer.get("version")
                check_grows(version, served, force=False, where=f"worker {result.worker_id}")
        return _answer("/set_version", await self._ask_all("POST", "/set_version", workers, body))

    async def _ask_all(self, method: str, path: str, workers: list[tuple[str, str]], body: bytes) -> list[Result]:
        return list(await asyncio.gather(*(self._ask(method, path, worker, body) for worker in workers)))

    async def _workers(self, worker_id: str) -> list[tuple[str, str]]:
        """Id and address of those meant; a data proxy that serves several models is one worker. Raises 404."""
        known = (await self._router.get("/workers"))["workers"]
        if worker_id == EVERY_WORKER:
            return [(name, addr) for addr, name in {w["worker_addr"]: w["worker_id"] for w in known}.items()]
        for worker in known:
            if worker["worker_id"] == worker_id:
                return [(worker_id, worker["worker_addr"])]
        raise ApiError(404, f"no worker {worker_id!r}", code="worker_not_found", param="worker_id")

    async def _ask(self, method: str, path: str, worker: tuple[str, str], body: bytes) -> Result:
        worker_id, addr = worker
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            said = await self._http.fetch(method, addr, path, headers=headers, body=body, timeout_s=_DEADLINE_S)
        except (CallFailed, TimeoutError) as error:
            return Result(worker_id, addr, 0, {}, f"the worker does not answer: {error!r}")
        data = said.object()
        return Result(worker_id, addr, said.status, data, None if said.status == 200 else _reason(said.status, data))


def _answer(path: str, results: list[Result]) -> Response:
    answer: dict[str, Any] = {"results": [result.to_json() for result in results]}
    if path.endswith("_version"):
        answer["version"] = _common_version(results)
    return json_response(answer, status=200 if all(result.ok for result in results) else 207)


def _common_version(results: list[Result]) -> int | None:
    """The version of all of them; None where they differ, or one did not tell."""
    versions = {result.answer.get("version") for result in results}
    version = versions.pop() if len(versions) == 1 else None
    return version if isinstance(version, int) else None


def _reason(status: int, data: Mapping[str, Any]) -> str:
    error = data.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or f"the worker answered {status}")
