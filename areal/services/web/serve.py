"""The serve loop every service process runs: bind, say ready, drain on SIGTERM, exit 0.

SIGTERM or SIGINT: readiness turns 503, the listener closes, idle connections close, and running requests finish
within ``drain_timeout_s``. A second signal ends them at once. The exit status is 0 in both cases: the process did
what it was told.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from areal.resources.bind import base_url
from areal.services.web.options import ServeOptions, bind
from areal.services.web.server import HttpServer
from areal.services.web.service import Service

_log = logging.getLogger(__name__)


async def serve(service: Service, options: ServeOptions) -> None:
    """Run until told to stop."""
    stop, now = asyncio.Event(), asyncio.Event()
    _on_signals(stop, now)
    sock = bind(options.host, options.port, reuse_port=options.reuse_port)
    service.address = base_url(options.host, sock.getsockname()[1])
    async with service.living():
        server = HttpServer(service.answer)
        await server.listen(sock)
        try:
            host, port = sock.getsockname()[:2]
            _log.info("%s listens on %s port %d", service.component, host, port)
            await stop.wait()
            _log.info("%s drains %d requests", service.component, service.lifetime.in_flight)
            service.lifetime.drain()
            if not await _within(options.drain_timeout_s, server.close(), now):
                _log.warning("%s stops now, %d requests unfinished", service.component, service.lifetime.in_flight)
        finally:
            await server.cancel()


def run_service(main: Callable[[], Coroutine[Any, Any, None]], log_level: str) -> None:
    """Run a component's main coroutine, on uvloop where it is installed."""
    _raise_file_limit()
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if os.environ.get("AREAL_EVENT_LOOP") == "asyncio":
        return None
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _raise_file_limit() -> None:
    """As many sockets as the system allows us: the usual soft limit of 1,024 is five hundred relayed calls."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _on_signals(stop: asyncio.Event, now: asyncio.Event) -> None:
    def signalled() -> None:
        (now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)


async def _within(limit_s: float, work: Coroutine[Any, Any, None], interrupted: asyncio.Event) -> bool:
    """Do ``work``; False when ``interrupted`` came first, or the time was over, and cut it short."""
    tasks = {asyncio.create_task(work, name="drain"), asyncio.create_task(interrupted.wait(), name="second-signal")}
    done, _ = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return bool(done) and not interrupted.is_set()
