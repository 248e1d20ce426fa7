"""A service on a thread of its own, beside a program that does something else: a trainer's endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from areal.errors import ArealError
from areal.resources.bind import base_url
from areal.services.web.keys import refuse_open_bind
from areal.services.web.options import bind
from areal.services.web.server import HttpServer
from areal.services.web.service import Service

_START_S = 30.0
_STOP_S = 10.0


@contextlib.contextmanager
def serving_beside(service: Service, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Its address while the block runs; port 0 takes a free one. Raises UsageFault for a bind that needs a key."""
    refuse_open_bind(host, service.gate.key)
    sock = bind(host, port, reuse_port=False)
    bound = sock.getsockname()[1]
    service.address = base_url(host, bound)
    started: threading.Event = threading.Event()
    failure: list[BaseException] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with service.living():
            server = HttpServer(service.answer)
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

    thread = threading.Thread(target=run, name=service.component, daemon=True)
    thread.start()
    if not started.wait(_START_S) or failure:
        why = failure[0] if failure else "timeout"
        raise ArealError(f"the {service.component} did not start on {host}:{bound}: {why}")
    try:
        yield service.address
    finally:
        with contextlib.suppress(RuntimeError):  # the loop ended by itself
            loop.call_soon_threadsafe(stop.set)
        thread.join(_STOP_S)
