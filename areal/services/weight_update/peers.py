"""Calls to the workers of a pair: each with its deadline, each failure with the worker's own words."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson

from areal.services.web.client import CallFailed, HttpClient

CONTROL_S = 180.0  # a pause waits for a step of the engine, a folder for its disk
TRANSFER_S = 1800.0
_PARTING_S = 30.0
_PROBE_S = 5.0


class PeerFailed(Exception):
    """A worker refused, failed, or did not answer (then ``status`` is None); the message names it."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Peers:
    """``control_s``: seconds for a call that says no other deadline."""

    def __init__(self, http: HttpClient, headers: Mapping[str, str], control_s: float = CONTROL_S) -> None:
        self._http = http
        self._control_s = control_s
        self.parting_s = min(control_s, _PARTING_S)
        self._headers = {**headers, "Content-Type": "application/json"}

    async def post(
        self, url: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """The worker's answer. Raises PeerFailed."""
        return await self._ask("POST", url, path, orjson.dumps(body or {}), timeout_s)

    async def get(self, url: str, path: str, timeout_s: float | None = None) -> dict[str, Any]:
        return await self._ask("GET", url, path, b"", timeout_s)

    async def probe(self, url: str) -> tuple[int, dict[str, Any]]:
        """What /ready answers, whatever that is. Raises PeerFailed."""
        try:
            said = await self._http.fetch("GET", url, "/ready", headers=self._headers, timeout_s=_PROBE_S)
        except (CallFailed, TimeoutError) as error:
            raise PeerFailed(f"{url} does not answer: {str(error) or type(error).__name__}") from error
        return said.status, said.object()

    async def is_ready(self, url: str) -> bool:
        with suppress(PeerFailed):
            return (await self.probe(url))[0] == 200
        return False

    async def is_behind(self, url: str) -> bool:
        """Whether it would serve if it had what is published."""
        with suppress(PeerFailed):
            return (await self.probe(url))[1].get("awaits_version") is not None
        return False

    async def post_all(
        self, urls: Sequence[str], path: str, body: Mapping[str, Any], timeout_s: float | None = None
    ) -> dict[str, dict[str, Any]]:
        """Every worker's answer, by its address. All are asked and waited for; then raises PeerFailed naming each that
        failed."""
        answers = await asyncio.gather(*(self.post(url, path, body, timeout_s) for url in urls), return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        for failure in failures:
            if not isinstance(failure, PeerFailed):
                raise failure
        if failures:
            raise PeerFailed("; ".join(str(failure) for failure in failures))
        return {url: answer for url, answer in zip(urls, answers, strict=True) if isinstance(answer, dict)}

    async def _ask(self, method: str, url: str, path: str, body: bytes, timeout_s: float | None) -> dict[str, Any]:
        timeout_s = self._control_s if timeout_s is None else timeout_s
        try:
            said = await self._http.fetch(method, url, path, headers=self._headers, body=body, timeout_s=timeout_s)
        except (CallFailed, TimeoutError) as error:
            raise PeerFailed(f"{url}{path} does not answer: {str(error) or type(error).__name__}") from error
        data = said.object()
        if said.status // 100 != 2:
            raise PeerFailed(f"{url}{path} answered {said.status}: {_reason(data)}", said.status)
        return data


def _reason(data: Mapping[str, Any]) -> str:
    error = data.get("error")
    return str(error.get("message")) if isinstance(error, dict) else "no reason given"
