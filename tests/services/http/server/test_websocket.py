"""A WebSocket's signs of life, and what it does with a caller that is gone."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from wsproto.connection import Connection, ConnectionType
from wsproto.events import CloseConnection, Ping, Pong, TextMessage

from areal.services.http.messages import BodyBudget, ServerConnection
from areal.services.http.websocket import WebSocket


class Transport:
    """The connection as a WebSocket sees it, and the caller's view of what was written."""

    def __init__(self) -> None:
        self.writable = True
        self.lost = self.reset = False
        self.held: list[bool] = []
        self.budget = BodyBudget(2**20)
        self.caller = Connection(ConnectionType.CLIENT)

    def write_raw(self, data: bytes) -> None:
        if self.lost:
            raise ConnectionResetError
        self.caller.receive_data(data)

    def has_left(self, *, aborted: bool = False) -> bool:
        return aborted and self.reset

    def abort(self) -> None:
        self.lost = True

    def hold_input(self, hold: bool) -> None:
        self.held.append(hold)

    def events(self) -> list[Any]:
        return list(self.caller.events())


@pytest.fixture
def transport() -> Transport:
    return Transport()


@pytest.fixture
async def socket(transport: Transport) -> WebSocket:
    return WebSocket(cast(ServerConnection, transport), 1000)


async def test_silent_caller_is_pinged_once_then_closed(transport: Transport, socket: WebSocket) -> None:
    now = asyncio.get_running_loop().time()
    assert not socket.is_gone(now + 20) and transport.events() == []
    assert not socket.is_gone(now + 40) and [type(event) for event in transport.events()] == [Ping]
    assert not socket.is_gone(now + 60) and transport.events() == []
    socket.received(transport.caller.send(Ping().response()))
    assert not socket.is_gone(now + 20)
    assert socket.is_gone(asyncio.get_running_loop().time() + 80)


async def test_input_is_held_until_a_receiver_reads(transport: Transport, socket: WebSocket) -> None:
    for number in range(16):
        socket.received(transport.caller.send(TextMessage(data=str(number))))
    assert transport.held[-1] is True
    assert [await socket.receive() for _ in range(16)] == [str(number) for number in range(16)]
    assert transport.held[-1] is False


async def test_going_away_drops_input_but_sends_answers(transport: Transport, socket: WebSocket) -> None:
    socket.received(transport.caller.send(TextMessage(data="waiting")))
    socket.go_away()
    socket.received(transport.caller.send(TextMessage(data="late")))
    assert await socket.receive() is None and socket.leaving
    await socket.send("answer")
    socket.close(1001, "bye")
    [text, closed] = transport.events()
    assert (text.data, closed) == ("answer", CloseConnection(code=1001, reason="bye"))
    with pytest.raises(ConnectionResetError):
        await socket.send("more")


async def test_disconnected_caller_breaks_nothing(transport: Transport, socket: WebSocket) -> None:
    transport.lost = True
    socket.received(transport.caller.send(Ping()))
    assert not socket.is_gone(asyncio.get_running_loop().time() + 40)
    socket.close()
    assert await socket.receive() is None


async def test_many_small_frames_do_not_hold_up_others(transport: Transport, socket: WebSocket) -> None:
    pong = transport.caller.send(Pong())
    socket.received(pong * 5000 + transport.caller.send(TextMessage(data="last")))
    assert transport.held[-1] is True
    turns = 0
    while transport.held[-1]:
        turns += 1
        await asyncio.sleep(0)
    assert turns > 5 and await socket.receive() == "last"


async def test_input_that_is_not_parsed_ends_with_the_connection(transport: Transport, socket: WebSocket) -> None:
    socket.received(transport.caller.send(Pong()) * 5000 + transport.caller.send(TextMessage(data="last")))
    socket.lost()
    await asyncio.sleep(0.01)
    assert await socket.receive() is None and not socket._unparsed


async def test_input_of_caller_that_aborts_is_not_parsed_to_its_end(transport: Transport, socket: WebSocket) -> None:
    transport.reset = True
    socket.received(transport.caller.send(Pong()) * 5000 + transport.caller.send(TextMessage(data="last")))
    await asyncio.sleep(0.01)
    assert transport.lost
    socket.lost()  # as the event loop reports an aborted transport
    assert await socket.receive() is None and not socket._unparsed
