"""An external API put behind this gateway: data proxies that already run are told of it, all of them or none."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from areal.services.web.client import CallFailed, Fetched, HttpClient
from areal.services.web.errors import ApiError

_TIMEOUT_S = 30.0  # the data proxy itself asks the API within 10
_OPTIONS = ("url", "api_key", "api", "allow_private")


@dataclass(frozen=True)
class ExternalModel:
    """``told`` is what the data proxies are told: what is wrong with it they say."""

    name: str
    told: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, name: str, data: Mapping[str, Any]) -> ExternalModel | None:
        """None for a registration that names no URL. ``provider_model``: the model's name over there."""
        if data.get("url") is None or data.get("url") == "":
            return None
        options = {option: data[option] for option in _OPTIONS if data.get(option) is not None}
        return cls(name, {**options, "name": name, "model": data.get("provider_model") or name})


class ExternalRegistration:
    def __init__(self, http: HttpClient, headers: Mapping[str, str]) -> None:
        self._http = http
        self._headers = {**headers, "Content-Type": "application/json"}

    async def register(self, model: ExternalModel, addrs: Sequence[str]) -> None:
        """Each data proxy tries it before any of them takes it. Raises ApiError; none has it then that had it not."""
        await self._all(addrs, {**model.told, "dry_run": True})
        try:
            await self._all(addrs, model.told)
        except BaseException:
            await asyncio.shield(asyncio.create_task(self.forget(model.name, addrs), name="take-back-external-model"))
            raise

    async def forget(self, name: str, addrs: Sequence[str]) -> list[str]:
        """Tell the data proxies that they serve it no longer; those that could not be told."""

        async def tell(addr: str) -> bool:
            try:
                return (await self._post(addr, "/deregister_model", {"name": name})).status in (200, 404)
            except ApiError:
                return False

        told = await asyncio.gather(*map(tell, addrs))
        return [addr for addr, done in zip(addrs, told, strict=True) if not done]

    async def _all(self, addrs: Sequence[str], body: Mapping[str, Any]) -> None:
        answers = await asyncio.gather(*(self._post(addr, "/register_model", body) for addr in addrs))
        for addr, answer in zip(addrs, answers, strict=True):
            if answer.status != 200:
                raise _refused(addr, answer)

    async def _post(self, addr: str, path: str, body: Mapping[str, Any]) -> Fetched:
        try:
            return await self._http.fetch(
                "POST", addr, path, headers=self._headers, body=orjson.dumps(body), timeout_s=_TIMEOUT_S
            )
        except (CallFailed, TimeoutError) as error:
            raise ApiError(502, f"no data proxy answers at {addr}: {error!r}", code="data_proxy_unavailable") from error


def _refused(addr: str, answer: Fetched) -> ApiError:
    error = answer.object().get("error")
    said = error if isinstance(error, dict) else {}
    message = f"the data proxy at {addr} does not take it: {said.get('message') or answer.status}"
    status = answer.status if 400 <= answer.status < 500 else 502
    return ApiError(status, message, code=said.get("code") or "data_proxy_refused", param=said.get("param"))
