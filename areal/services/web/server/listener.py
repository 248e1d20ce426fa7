"""The server: a listening socket, its connections, their deadlines, and how it goes."""

from __future__ import annotations

import asyncio
import socket

from areal.services.web.server.connection import Application, HttpConnection
from areal.services.web.server.limits import ServerLimits
from areal.services.web.tasks import until_beat

_BACKLOG = 4096
_JUST_ACCEPTED_S = 0.25


class HttpServer:
    """Made inside a running loop. ``listen``, then ``close``, which lets finish what runs, or ``cancel``."""

    def __init__(self, application: Application, limits: ServerLimits | None = None) -> None:
        self.application = application
        self.limits = limits or ServerLimits()
        self.loop = asyncio.get_running_loop()
        self.connections: set[HttpConnection] = set()
        self.draining = False
        self._listener: asyncio.AbstractServer | None = None
        self._empty = asyncio.Event()
        self._sweeps: asyncio.TimerHandle | None = None

    async def listen(self, sock: socket.socket) -> None:
        self._listener = await self.loop.create_server(lambda: HttpConnection(self), sock=sock, backlog=_BACKLOG)
        self._sweeps = self.loop.call_later(until_beat(self.limits.sweep_s), self._sweep)

    def _sweep(self) -> None:
        """One timer for all connections: ten thousand idle ones cost a millisecond each time."""
        now = self.loop.time()
        for connection in list(self.connections):
            connection.sweep(now)
        self._sweeps = self.loop.call_later(until_beat(self.limits.sweep_s), self._sweep)

    def forget(self, connection: HttpConnection) -> None:
        self.connections.discard(connection)
        if self.draining and not self.connections:
            self._empty.set()

    async def close(self) -> None:
        """Stop listening, give connections that were just accepted a moment to speak, and return when what they asked
        is answered. From now on every answer is its connection's last."""
        if self._listener is not None:
            self._listener.close()
        self.draining = True
        await asyncio.sleep(_JUST_ACCEPTED_S)
        for connection in list(self.connections):
            connection.close_if_idle()
        if self.connections:
            await self._empty.wait()

    async def cancel(self) -> None:
        """Break off whatever still runs, and return when it has ended."""
        if self._listener is not None:
            self._listener.close()
        tasks = [task for connection in list(self.connections) if (task := connection.cancel()) is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._sweeps is not None:
            self._sweeps.cancel()
