"""The weight endpoint of a trainer: a small server on a thread of its own, which tells what the trainer staged.

The trainer's own thread writes the weights, for all of its ranks take part in that; the endpoint only answers for what
is there already. So nothing here waits for training, and training never waits for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from areal.resources.bind import is_loopback
from areal.services.web.access import Access
from areal.services.web.beside import serving_beside
from areal.services.web.body import read_object
from areal.services.web.errors import ApiError
from areal.services.web.keys import AdminKey
from areal.services.web.server import Request, Response
from areal.services.web.service import Service, json_response

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


class Outlet(Protocol):
    """How a trainer's weights get out, by one of the modes. Called on the endpoint's threads but for ``write``."""

    def offer(self, name: str, size: int, group_form: str) -> dict[str, Any]:
        """What workers of the pair ``name`` need to reach us; ``size`` counts them and the trainer."""
        ...

    def join(self) -> None:
        """Returns when all workers are connected."""
        ...

    def leave(self) -> None:
        """Idempotent."""
        ...

    def write(self, version: int, weights: Iterable[tuple[str, Tensor]], probe: dict[str, Any] | None) -> None:
        """Begin to stage them; on the trainer's thread. They stay what they are until ``settle``."""
        ...

    def settle(self) -> None:
        """Return when they are staged whole; on the trainer's thread. Raises what went wrong."""
        ...

    def published(self, version: int) -> dict[str, Any]:
        """``{"source", "bytes", "probe"?}`` of the staged version. Raises ApiError 409 when another one is staged."""
        ...

    def send(self, version: int) -> None:
        """To workers that wait for it; nothing to do where they read it themselves. Raises RuntimeError where one is
        lost."""
        ...

    @property
    def staged_version(self) -> int | None:
        """The newest; None before the first."""
        ...

    def staged_file(self, version: int) -> Path | None:
        """The safetensors file that is staged as ``version``; None where that is another one."""
        ...

    def remove(self) -> None:
        """What was staged goes."""
        ...


class WeightEndpoint:
    """``outlets`` by pair name: a trainer with several models has a pair for each."""

    def __init__(self, outlets: dict[str, Outlet], key: AdminKey | None, *, loopback: bool) -> None:
        self._outlets = outlets
        self._connected: set[str] = set()
        self.service = Service("weight-endpoint", key=key, loopback=loopback)
        self.service.route("POST", "/weights/connect", self.connect, Access.ADMIN)
        self.service.route("POST", "/weights/join", self.join, Access.ADMIN)
        self.service.route("POST", "/weights/manifest", self.manifest, Access.ADMIN)
        self.service.route("POST", "/weights/staged", self.staged, Access.ADMIN)
        self.service.route("POST", "/weights/publish", self.publish, Access.ADMIN)
        self.service.route("POST", "/weights/disconnect", self.disconnect, Access.ADMIN)

    async def connect(self, request: Request) -> Response:
        data = await read_object(request)
        name, size = data.get("pair_name"), data.get("world_size")
        if type(size) is not int or size < 2:
            raise ApiError(400, "world_size must count the trainer and its workers", code="invalid_value")
        form = data.get("group_form")
        offer = await asyncio.to_thread(self._outlet(name).offer, str(name), size, str(form))
        self._connected.add(str(name))
        return json_response({"status": "ok", "pair_name": name, **offer})

    async def join(self, request: Request) -> Response:
        name = (await read_object(request)).get("pair_name")
        with _lost_workers():
            await asyncio.to_thread(self._outlet(name).join)
        return json_response({"status": "ok", "pair_name": name})

    async def staged(self, request: Request) -> Response:
        """The newest version that ``publish`` could send, which nobody may have asked for yet."""
        name = (await read_object(request)).get("pair_name")
        return json_response({"status": "ok", "version": self._outlet(name).staged_version})

    async def manifest(self, request: Request) -> Response:
        """What ``publish`` will send."""
        outlet, version = self._order(await read_object(request))
        return json_response({"status": "ok", **outlet.published(version)})

    async def publish(self, request: Request) -> Response:
        outlet, version = self._order(await read_object(request))
        with _lost_workers():
            await asyncio.to_thread(outlet.send, version)
        return json_response({"status": "ok", **outlet.published(version)})

    async def disconnect(self, request: Request) -> Response:
        name = (await read_object(request)).get("pair_name")
        known = name in self._connected
        self._connected.discard(str(name))
        if known:
            await asyncio.to_thread(self._outlet(name).leave)
        return json_response({"status": "ok", "pair_name": name, "known": known})

    def _order(self, data: dict[str, Any]) -> tuple[Outlet, int]:
        version = data.get("version")
        if type(version) is not int:
            raise ApiError(400, "version must be a whole number", code="invalid_value", param="version")
        return self._outlet(data.get("pair_name")), version

    def _outlet(self, name: object) -> Outlet:
        outlet = self._outlets.get(name) if isinstance(name, str) else None
        if outlet is None:
            raise ApiError(404, f"this trainer has no pair {name!r}", code="pair_not_found", param="pair_name")
        return outlet


@contextlib.contextmanager
def _lost_workers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ApiError(502, f"the process group broke: {error}", code="group_broken") from error


def serving(
    outlets: dict[str, Outlet], key: AdminKey | None, host: str = "127.0.0.1", port: int = 0
) -> contextlib.AbstractContextManager[str]:
    """The endpoint's address while the block runs."""
    return serving_beside(WeightEndpoint(outlets, key, loopback=is_loopback(host)).service, host, port)
