"""Control of a service's workers (data proxies): pause, versions, memory, drain. With the admin key.

``worker`` is an id, or ``all``. A control that failed on some of them raises ServiceError and names each; what
succeeded on the others stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from areal.client.errors import ServiceError
from areal.client.transport import Call, Transport

ALL = "all"
_CONTROL_S = 200.0  # longer than the gateway's own deadline on its workers


class AsyncWorkers:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def list(self) -> list[dict[str, Any]]:
        """Each with id, address, state, health, requests and tokens in flight, version."""
        answer = await self._transport.call(Call("GET", "/workers", repeatable=True))
        return list(answer.json()["workers"])

    async def pause(self, worker: str = ALL) -> None:
        """Returns when no token of the present weights can be sampled any more. Running calls are kept."""
        await self._control("/pause_generation", worker)

    async def resume(self, worker: str = ALL) -> None:
        await self._control("/continue_generation", worker)

    async def release_memory(self, worker: str = ALL) -> None:
        await self._control("/release_memory_occupation", worker)

    async def resume_memory(self, worker: str = ALL) -> None:
        await self._control("/resume_memory_occupation", worker)

    async def set_version(self, version: int, worker: str = ALL, *, force: bool = False) -> None:
        """What the tokens sampled from now on are stamped with. It only grows, unless ``force`` sets it back."""
        await self._control("/set_version", worker, {"version": version, **({"force": True} if force else {})})

    async def get_version(self, worker: str = ALL) -> int | None:
        """The version of all of them; None where they differ."""
        path = f"/get_version/{quote(worker, safe='')}"
        answer = (await self._transport.call(Call("GET", path, timeout_s=_CONTROL_S, repeatable=True))).json()
        _check(path, answer)
        version = answer["version"]
        return int(version) if version is not None else None

    async def versions(self) -> dict[str, int]:
        """By the address of each worker that tells."""
        answer = (
            await self._transport.call(Call("GET", "/get_version/all", timeout_s=_CONTROL_S, repeatable=True))
        ).json()
        told = {each["worker_addr"]: each.get("version") for each in answer["results"]}
        return {address: version for address, version in told.items() if isinstance(version, int)}

    async def drain(self, worker: str = ALL) -> None:
        """No new calls for it; running ones finish."""
        await self._control("/drain", worker)

    async def undrain(self, worker: str = ALL) -> None:
        await self._control("/undrain", worker)

    async def register_model(self, model: str, data_proxy_addrs: Sequence[str]) -> None:
        """Data proxies that already run, behind this gateway under a name: all or nothing."""
        body = {"model": model, "data_proxy_addrs": list(data_proxy_addrs)}
        await self._transport.call(Call("POST", "/register_model", body, repeatable=True))

    async def deregister_model(self, model: str) -> None:
        await self._transport.call(Call("POST", "/deregister_model", {"model": model}))

    async def _control(self, path: str, worker: str, body: Mapping[str, Any] | None = None) -> None:
        path = f"{path}/{quote(worker, safe='')}"
        answer = await self._transport.call(Call("POST", path, body or {}, timeout_s=_CONTROL_S, repeatable=True))
        _check(path, answer.json())


def _check(path: str, answer: Mapping[str, Any]) -> None:
    failed = [result for result in answer.get("results", ()) if not result["ok"]]
    if failed:
        said = "; ".join(f"{each['worker_id']}: {each.get('error')}" for each in failed)
        raise ServiceError(f"{path} failed on {len(failed)} of {len(answer['results'])} workers: {said}", status=207)
