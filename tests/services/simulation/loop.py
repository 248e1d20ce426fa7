"""Service processes in one process, with time and network of their own.

``SimulatedLoop`` has a clock that jumps to the next timer, and connects services that are named ``http://NAME:PORT`` by
memory instead of sockets. Everything above (HTTP, services, SQLite, files) is real. Each task and callback belongs to a
``SimulatedProcess``; a killed one runs no further instruction, and its locks are free, as after SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import selectors
import sqlite3
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from areal.services.http.server import HttpConnection, HttpServer
from areal.services.http.service import Service

_LATENCY_S = 0.001
_COMMIT_S = 0.002
_HELD_S = 0.05
_process: contextvars.ContextVar[SimulatedProcess | None] = contextvars.ContextVar("process", default=None)


class _Selector(selectors.DefaultSelector):
    """Never waits: an idle loop's clock jumps to its next timer."""

    loop: SimulatedLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        found: list[Any] = super().select(0)
        if not found and timeout != 0:
            assert timeout is not None, "nothing is left that could ever happen"
            self.loop.now += timeout
        return found


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 1000.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)
        self.listeners: dict[tuple[str, int], tuple[SimulatedProcess, HttpServer]] = {}
        self.cut: set[frozenset[str]] = set()  # pairs of names between which nothing arrives

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """As ``time.sleep``, which blocks the whole loop."""
        self.now += seconds

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        process = _owner(context)
        guarded = (callback, *args) if process is None else (process.run_or_hold, callback, *args)
        return super().call_soon(*guarded, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        process = _owner(context)
        guarded = (callback, *args) if process is None else (process.run_or_drop, callback, *args)
        return super().call_at(when, *guarded, context=context)

    def create_task(self, work: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:  # type: ignore[override]
        task = super().create_task(work, name=name, context=context)
        if (process := _owner(context)) is not None:
            process.tasks.add(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the caller's
            done.set_exception(error)
        return done

    async def create_connection(self, factory: Any, host: str, port: int, **_: Any) -> Any:  # type: ignore[override]
        own = _process.get()
        assert own is not None
        while frozenset((own.name, host)) in self.cut:  # noqa: ASYNC110 - in simulated time
            await asyncio.sleep(_HELD_S)
        await asyncio.sleep(_LATENCY_S)
        found = self.listeners.get((host, port))
        if found is None:
            raise ConnectionRefusedError(f"{host}:{port}")
        process, server = found
        ours, theirs = MemoryTransport(self, own), MemoryTransport(self, process)
        ours.peer, theirs.peer = theirs, ours
        theirs.context.run(theirs.attach, HttpConnection(server))
        protocol = factory()
        ours.attach(protocol)
        return ours, protocol

    def run_for(self, seconds: float) -> None:
        self.run_until_complete(asyncio.sleep(seconds))


def _owner(context: contextvars.Context | None) -> SimulatedProcess | None:
    return _process.get() if context is None else context.get(_process)


class MemoryTransport(asyncio.Transport):
    """One end of a connection. What it writes arrives at its ``peer`` in order."""

    peer: MemoryTransport

    def __init__(self, loop: SimulatedLoop, process: SimulatedProcess) -> None:
        super().__init__()
        self._loop = loop
        self.process = process
        self.context = process.context.copy()
        self._inbox: deque[bytes | Exception | None] = deque()  # None: the end
        self._closing = self._lost = self._reading_paused = self._pumping = False
        process.transports.add(self)

    def attach(self, protocol: Any) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    def receive(self, item: bytes | Exception | None) -> None:
        self._inbox.append(item)
        self._pump_later(_LATENCY_S)

    def _pump_later(self, seconds: float) -> None:
        if not self._pumping:
            self._pumping = True
            self._loop.call_later(seconds, self._pump, context=self.context)

    def _pump(self) -> None:
        self._pumping = False
        if self._lost or not self._inbox or (self._reading_paused and isinstance(self._inbox[0], bytes)):
            return
        if self._is_cut:
            self._pump_later(_HELD_S)
            return
        item = self._inbox.popleft()
        if isinstance(item, bytes):
            self._protocol.data_received(item)
        elif item is None:
            self._protocol.eof_received()
            self.close()
        else:
            self._lose(item)
        if self._inbox:
            self._pump_later(0.0)

    @property
    def _is_cut(self) -> bool:
        return frozenset((self.process.name, self.peer.process.name)) in self._loop.cut

    def _lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = self._closing = True
            self.process.transports.discard(self)
            self._protocol.connection_lost(error)

    def write(self, data: Any) -> None:
        if not self._closing:
            self.peer.receive(bytes(data))

    def write_eof(self) -> None:
        self.peer.receive(None)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.peer.receive(None)
            self._loop.call_soon(self._lose, None, context=self.context)

    def abort(self) -> None:
        if not self._lost:
            self._closing = True
            if self._is_cut:
                self.peer._inbox.clear()  # it is not sent again
            self.peer.receive(ConnectionResetError("the peer is gone"))
            self._loop.call_soon(self._lose, None, context=self.context)

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._reading_paused = True

    def resume_reading(self) -> None:
        self._reading_paused = False
        self._pump_later(0.0)

    def get_write_buffer_size(self) -> int:
        return 0


Build = Callable[[], AbstractAsyncContextManager[Service]]


class SimulatedProcess:
    """A process at ``http://NAME:80``. It serves what ``build`` returns, if anything."""

    def __init__(self, loop: SimulatedLoop, name: str, build: Build | None = None, environment: Any = None) -> None:
        self.loop, self.name = loop, name
        self.url = f"http://{name}:80"
        self.killed = self.ended = False
        self.transports: set[MemoryTransport] = set()
        self.store: Any = None
        self.databases: list[sqlite3.Connection] = []
        self.locks: set[int] = set()
        self._held: list[tuple[Callable[..., Any], tuple[Any, ...], contextvars.Context]] = []
        self.tasks: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self.context = contextvars.copy_context()
        self.context.run(_process.set, self)
        self._stop = asyncio.Event()
        if build is not None:
            started: asyncio.Future[None] = loop.create_future()
            os.environ.update(environment or {})
            self.main = self.spawn(self._serve(build, started))
            loop.run_until_complete(asyncio.wait([started, self.main], return_when=asyncio.FIRST_COMPLETED))
            if self.main.done():
                self.main.result()

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        return self.loop.create_task(work, context=self.context.copy())

    def run_or_hold(self, callback: Callable[..., Any], *args: Any) -> None:
        if self.killed:
            self._held.append((callback, args, contextvars.copy_context()))
        else:
            callback(*args)

    def run_or_drop(self, callback: Callable[..., Any], *args: Any) -> None:
        if not self.killed:
            callback(*args)

    async def _serve(self, build: Build, started: asyncio.Future[None]) -> None:
        async with build() as service:
            service.address = self.url
            async with service.lifespan():
                server = HttpServer(service.answer)
                place = self.name, 80
                self.loop.listeners[place] = self, server
                self.service = service
                started.set_result(None)
                try:
                    await self._stop.wait()
                    service.lifetime.drain()
                    del self.loop.listeners[place]
                    async with asyncio.timeout(60.0):
                        await server.close()
                except TimeoutError:
                    pass
                finally:
                    await server.cancel()
        self.ended = True

    def stop(self) -> None:
        """As by SIGTERM."""
        self._stop.set()

    def kill(self) -> None:
        """As by SIGKILL."""
        if self.killed or self.ended:
            return
        self.killed = True
        self.loop.listeners.pop((self.name, 80), None)
        for transport in list(self.transports):
            transport.peer.receive(ConnectionResetError("the peer was killed"))
        for database in self.databases:
            database.close()  # without a commit
        for descriptor in self.locks:
            os.close(descriptor)
        self.locks.clear()

    def bury(self) -> None:
        """Let the tasks of a killed process end, when no other process lives any more."""
        for task in list(self.tasks):
            task.cancel()
        self.killed, held, self._held = False, self._held, []
        for callback, args, context in held:
            self.loop.call_soon(callback, *args, context=context)


def current_process() -> SimulatedProcess:
    process = _process.get()
    assert process is not None
    return process


class SimulatedCommits:
    """``CommitThread`` without a thread."""

    def __init__(self, db: sqlite3.Connection, name: str) -> None:
        self._db = db

    async def commit(self) -> None:
        await asyncio.sleep(_COMMIT_S)
        self._db.execute("COMMIT")

    def close(self) -> None:
        pass
