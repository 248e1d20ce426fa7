"""The weight endpoint of a trainer: a small server on a thread of its own, which tells what the trainer staged.

The trainer's own thread writes the weights, for all of its ranks take part in that; the endpoint only answers for what
is there already. So nothing here waits for training, and training never waits for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from areal.errors import ArealError
from areal.services.web.access import Access
from areal.services.web.body import read_object
from areal.services.web.errors import ApiError
from areal.services.web.keys import AdminKey, is_loopback, refuse_open_bind
from areal.services.web.options import bind
from areal.services.web.server import HttpServer, Request, Response
from areal.services.web.service import Service, json_response

_START_S = 30.0


class Outlet(Protocol):
    """What a trainer offers to a pair. Called on the endpoint's thread."""

    def offer(self) -> dict[str, Any]: ...

    def published(self, version: int) -> dict[str, Any]:
        """``{"source", "bytes"}`` of the staged version. Raises ApiError 409 when another one is staged."""
        ...


class WeightEndpoint:
    """``outlets`` by pair name: a trainer with several models has a pair for each."""

    def __init__(self, outlets: dict[str, Outlet], key: AdminKey | None, *, loopback: bool) -> None:
        self._outlets = outlets
        self._connected: set[str] = set()
        self.service = Service("weight-endpoint", key=key, loopback=loopback)
        self.service.route("POST", "/weights/connect", self.connect, Access.ADMIN)
        self.service.route("POST", "/weights/publish", self.publish, Access.ADMIN)
        self.service.route("POST", "/weights/disconnect", self.disconnect, Access.ADMIN)

    async def connect(self, request: Request) -> Response:
        name = (await read_object(request)).get("pair_name")
        outlet = self._outlet(name)
        self._connected.add(str(name))
        return json_response({"status": "ok", "pair_name": name, **outlet.offer()})

    async def publish(self, request: Request) -> Response:
        data = await read_object(request)
        version = data.get("version")
        if type(version) is not int:
            raise ApiError(400, "version must be a whole number", code="invalid_value", param="version")
        return json_response({"status": "ok", **self._outlet(data.get("pair_name")).published(version)})

    async def disconnect(self, request: Request) -> Response:
        name = (await read_object(request)).get("pair_name")
        known = name in self._connected
        self._connected.discard(str(name))
        return json_response({"status": "ok", "pair_name": name, "known": known})

    def _outlet(self, name: object) -> Outlet:
        outlet = self._outlets.get(name) if isinstance(name, str) else None
        if outlet is None:
            raise ApiError(404, f"this trainer has no pair {name!r}", code="pair_not_found", param="pair_name")
        return outlet


@contextlib.contextmanager
def serving(outlets: dict[str, Outlet], key: AdminKey | None, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """The endpoint's address while the block runs."""
    refuse_open_bind(host, key)
    sock = bind(host, port, reuse_port=False)
    bound = sock.getsockname()[1]
    started: threading.Event = threading.Event()
    failure: list[BaseException] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        endpoint = WeightEndpoint(outlets, key, loopback=is_loopback(host))
        async with endpoint.service.living():
            server = HttpServer(endpoint.service.answer)
            await server.listen(sock)
            started.set()
            await stop.wait()
            await server.cancel()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:  # the boundary of the thread: told to whoever waits for the start
            failure.append(error)
            raise
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=run, name="weight-endpoint", daemon=True)
    thread.start()
    if not started.wait(_START_S) or failure:
        raise ArealError(f"the weight endpoint did not start on {host}:{bound}: {failure[0] if failure else 'timeout'}")
    shown = f"[{host}]" if ":" in host else host
    try:
        yield f"http://{shown}:{bound}"
    finally:
        with contextlib.suppress(RuntimeError):  # the loop ended by itself
            loop.call_soon_threadsafe(stop.set)
        thread.join(10.0)
