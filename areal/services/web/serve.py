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

from aiohttp import web

from areal.services.web.options import ServeOptions, bind
from areal.services.web.service import Service

_log = logging.getLogger(__name__)
_KEEP_ALIVE_S = 120.0  # longer than POOL_IDLE_S of our clients
_BACKLOG = 4096
_JUST_ACCEPTED_S = 0.25


async def serve(service: Service, options: ServeOptions) -> None:
    """Run until told to stop."""
    stop, now = asyncio.Event(), asyncio.Event()
    _on_signals(stop, now)
    sock = bind(options.host, options.port, reuse_port=options.reuse_port)
    runner = web.AppRunner(
        service.app,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=_KEEP_ALIVE_S,
        shutdown_timeout=options.drain_timeout_s,
    )
    await runner.setup()
    site = web.SockSite(runner, sock, backlog=_BACKLOG)
    await site.start()
    host, port = sock.getsockname()[:2]
    _log.info("%s listens on %s port %d", service.component, host, port)
    await stop.wait()
    _log.info("%s drains %d requests", service.component, service.lifetime.in_flight)
    service.lifetime.drain()
    if not await _unless(_drain(site, runner), now):
        _log.warning("%s stops now, %d requests unfinished", service.component, service.lifetime.in_flight)


async def _drain(site: web.SockSite, runner: web.AppRunner) -> None:
    """Close the listener, give connections that were just accepted a moment to speak, then finish what runs.

    The moment is needed: a connection that is told to close before it has said anything drops what comes and
    lingers until the drain's deadline.
    """
    await site.stop()
    await asyncio.sleep(_JUST_ACCEPTED_S)
    await runner.cleanup()


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


async def _unless(work: Coroutine[Any, Any, None], interrupted: asyncio.Event) -> bool:
    """Do ``work``; False when ``interrupted`` came first and cut it short."""
    tasks = {asyncio.create_task(work, name="drain"), asyncio.create_task(interrupted.wait(), name="second-signal")}
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return not interrupted.is_set()
