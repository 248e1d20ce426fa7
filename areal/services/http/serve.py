"""The serve loop of every service process: bind, become ready, drain on SIGTERM, exit 0.

On SIGTERM or SIGINT, readiness turns 503, the listener closes, idle connections close, and running requests may finish
within the grace period of the stop order, or within ``drain_timeout_s`` without one. A second signal ends them at once.
The exit status is 0 in both cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from areal.errors import ArealError
from areal.http import tracing
from areal.resources.addresses import base_url
from areal.services.http.auth import refuse_open_bind
from areal.services.http.process import (
    ServeOptions,
    bind,
    collect_rarely,
    drain_limit_s,
    exit_on_failure,
    read_config,
    serve_options,
)
from areal.services.http.server import HttpServer
from areal.services.http.service import Service
from areal.wire.processes import ServeConfig

C = TypeVar("C", bound=ServeConfig)
_log = logging.getLogger(__name__)


async def serve(service: Service, options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT."""
    tracing.start(service.component, own_code=service.component == "worker")
    stop, now = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (now if stop.is_set() else stop).set())
    sock = bind(options.host, options.port, reuse_port=options.reuse_port)
    service.address = base_url(options.host, sock.getsockname()[1])
    async with service.lifespan():
        server = HttpServer(service.answer)
        await server.listen(sock)
        try:
            host, port = sock.getsockname()[:2]
            _log.info("%s listens on %s port %d", service.component, host, port)
            await stop.wait()
            _log.info("%s drains %d requests", service.component, service.lifetime.in_flight)
            service.lifetime.drain()
            if not await _ends_within(drain_limit_s(options.drain_timeout_s), server.close(), now):
                _log.warning("%s stops now, %d requests unfinished", service.component, service.lifetime.in_flight)
        finally:
            await server.cancel()


def run_service(build: Callable[[], AbstractAsyncContextManager[Service]], options: ServeOptions) -> None:
    """Build a service inside its event loop and serve it until it is asked to stop."""

    async def main() -> None:
        async with build() as service:
            collect_rarely()
            await serve(service, options)

    run_loop(main, options.log_level)


def serve_main(
    cls: type[C],
    prog: str,
    build: Callable[[C, ServeOptions], AbstractAsyncContextManager[Service]],
    *,
    reuse_port: bool = False,
) -> int:
    """Run the main function of a service process with a configuration of type ``cls``. Return the exit status."""

    def main() -> None:
        config = read_config(cls, prog)
        options = serve_options(config, reuse_port=reuse_port)
        run_service(lambda: build(config, options), options)

    return exit_on_failure(main)


def run_loop(main: Callable[[], Coroutine[Any, Any, None]], log_level: str) -> None:
    """Run a process' main coroutine, on uvloop if that is installed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # the usual soft limit of 1,024 sockets suffices for only 500 relayed calls
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
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
    return uvloop.new_event_loop


async def _ends_within(limit_s: float, work: Coroutine[Any, Any, None], interrupted: asyncio.Event) -> bool:
    """Return whether ``work`` ended within ``limit_s`` and before ``interrupted``; otherwise cancel it."""
    tasks = {asyncio.create_task(work, name="drain"), asyncio.create_task(interrupted.wait(), name="second-signal")}
    done, _ = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return bool(done) and not interrupted.is_set()


_START_S = 30.0
_STOP_S = 10.0


@contextlib.contextmanager
def serve_in_thread(service: Service, host: str, port: int = 0) -> Iterator[str]:
    """Serve in a thread of another program, such as a trainer, while the block runs. Yields the service's address. Port
    0 takes a free one. Raises UsageFault for an address that requires a key."""
    refuse_open_bind(host, service.authenticator.key)
    sock = bind(host, port, reuse_port=False)
    bound = sock.getsockname()[1]
    service.address = base_url(host, bound)
    started: Future[Callable[[], object]] = Future()  # how to stop it

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        async with service.lifespan():
            server = HttpServer(service.answer)
            await server.listen(sock)
            started.set_result(lambda: loop.call_soon_threadsafe(stop.set))
            await stop.wait()
            await server.cancel()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:  # the boundary of the thread: the caller that waits for the start raises it
            if not started.done():
                started.set_exception(error)
            raise

    thread = threading.Thread(target=run, name=service.component, daemon=True)
    thread.start()
    try:
        stop = started.result(_START_S)
    except Exception as error:
        raise ArealError(f"the {service.component} did not start on {host}:{bound}: {error!r}") from error
    try:
        yield service.address
    finally:
        with contextlib.suppress(RuntimeError):  # the loop ended by itself
            stop()
        thread.join(_STOP_S)
