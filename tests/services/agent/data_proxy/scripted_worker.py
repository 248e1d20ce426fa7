"""A worker whose agent does what the message says, and which tells what it was asked.

``wait`` (until POST /release), ``tools``, ``fail``, ``odd``, ``die``, ``nonsense``, ``cut``, ``stream``, ``quiet``,
``large``, ``delta``, ``flood``, ``model`` (one call of the session's model); any other message is answered with itself
and the number of messages in the history. GET /calls has every turn: what it was given, and how it ended.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import orjson

from areal.http.client import HttpClient
from areal.services.http.auth import Access, AdminKey
from areal.services.http.messages import AnyResponse, Request, Response, StreamingResponse, read_object
from areal.services.http.process import ServeOptions
from areal.services.http.serve import run_service
from areal.services.http.service import Service, json_response
from areal.wire.agents import EVENTS

Event = dict[str, Any]


class ScriptedWorker:
    def __init__(self) -> None:
        self.calls: list[Event] = []
        self.closed: list[str] = []
        self.released = asyncio.Event()
        self.changed = asyncio.Event()

    def add_to(self, service: Service) -> None:
        service.route("POST", "/run", self.run, Access.ADMIN)
        service.route("POST", "/session/{key}/close", self.close, Access.ADMIN)
        service.route("POST", "/release", self.release, Access.ADMIN)
        service.route("GET", "/calls", self.reported, Access.ADMIN)

    def note(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def run(self, request: Request) -> AnyResponse:
        call = {**await read_object(request), "ended": "running"}
        self.calls.append(call)
        self.note()
        out = StreamingResponse(headers={"Content-Type": EVENTS})
        out.begin(request)
        try:
            async for event in self.events(call):
                await out.write(event if isinstance(event, bytes) else orjson.dumps(event) + b"\n")
            call["ended"] = "finished"
        except (asyncio.CancelledError, ConnectionResetError):
            call["ended"] = "cancelled"
            raise
        finally:
            self.note()
        return out

    async def events(self, call: Event) -> AsyncGenerator[Event | bytes, None]:
        message = call["message"]
        match message.split()[0]:
            case "wait":
                yield {"type": "delta", "text": "begun"}
                await self.released.wait()
            case "tools":
                for name in ("a", "b"):
                    yield {"type": "tool_call", "id": f"call-{name}", "name": name, "arguments": f'{{"of": "{name}"}}'}
                for name in ("b", "a"):
                    yield {"type": "tool_result", "id": f"call-{name}", "name": name, "result": f"result {name}"}
                yield {"type": "delta", "text": "more"}
                yield {"type": "tool_call", "id": "call-c", "name": "c", "arguments": "{}", "content": "more"}
                yield {"type": "delta", "text": "done"}
            case "fail":
                yield {"type": "failed", "failure": "agent", "error": "ValueError: no"}
                return
            case "odd":
                yield {"type": "failed", "failure": "bad luck", "error": "none"}
                return
            case "die":
                yield {"type": "delta", "text": "half"}
                await asyncio.sleep(0.05)  # it is on the wire
                os._exit(9)
            case "nonsense":
                yield b'{"type": "complete", "summary": 3}\n'
                return
            case "cut":
                yield b'{"type": "delta", "te'
                return
            case "stream" | "speak":
                if message.startswith("speak"):
                    yield {"type": "delta", "text": "before"}
                    yield {"type": "tool_call", "id": "call-s", "name": "s", "arguments": "{}"}
                    yield {"type": "tool_result", "id": "call-s", "name": "s", "result": "r"}
                yield {"type": "response", "status": 200, "headers": {"Content-Type": "text/plain"}}
                yield {"type": "data", "data": base64.b64encode(b"own").decode()}
                if len(message.split()) > 1:
                    data = base64.b64encode(b"x" * 1000).decode()
                    for _ in range(int(message.split()[1])):
                        yield {"type": "data", "data": data}
                yield {"type": "complete", "summary": "", "metadata": {}}
                return
            case "quiet":
                call_event = {"type": "tool_call", "id": "call-q", "name": "q", "arguments": "{}"}
                yield {"type": "delta", "text": "more"}
                yield {**call_event, "content": "more"}
                yield {"type": "tool_result", "id": "call-q", "name": "q", "result": "r"}
                yield {"type": "complete", "summary": "", "metadata": {}}
                return
            case "large":
                yield {
                    "type": "tool_call",
                    "id": "call",
                    "name": "a",
                    "arguments": '"' + "x" * int(message.split()[1]) + '"',
                }
            case "delta":
                yield {"type": "delta", "text": "x" * int(message.split()[1])}
            case "flood":
                for _ in range(int(message.split()[1])):
                    yield {"type": "delta", "text": "x" * 1000}
                if message.endswith("wait"):
                    await self.released.wait()
            case "model":
                access = call["metadata"]["areal_inference"]
                status = await self.ask_model(access)
                if status != 200:
                    yield {"type": "failed", "failure": "agent", "error": f"the model answered {status}"}
                    return
        yield {"type": "complete", "summary": f"{message} {len(call['history'])}", "metadata": {"of": message}}

    async def ask_model(self, access: Event) -> int:
        body = orjson.dumps({"messages": [{"role": "user", "content": "hello"}], "model": access["model"]})
        headers = {"Authorization": f"Bearer {access['api_key']}", "Content-Type": "application/json"}
        async with HttpClient() as http:
            path = "/v1/chat/completions"
            reply = await http.fetch("POST", access["base_url"], path, headers=headers, body=body, timeout_s=20)
        return reply.status

    async def close(self, request: Request) -> Response:
        self.closed.append(request.match_info["key"])
        self.note()
        return json_response({"status": "ok"})

    async def release(self, request: Request) -> Response:
        """Ends what waits now."""
        self.released.set()
        self.released = asyncio.Event()
        return json_response({})

    async def reported(self, request: Request) -> Response:
        """With ?until=NAME&count=N once so many turns have ended that way (any: began; closed: sessions)."""
        until, count = request.query.get("until"), int(request.query.get("count", 1))

        def there() -> int:
            return (
                len(self.closed) if until == "closed" else sum(until in ("any", call["ended"]) for call in self.calls)
            )

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                while until and there() < count:
                    await self.changed.wait()
        return json_response({"calls": self.calls, "closed": self.closed})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--admin-key-file", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    key = AdminKey(args.admin_key_file.read_bytes())

    @contextlib.asynccontextmanager
    async def build() -> AsyncGenerator[Service, None]:
        service = Service("worker", key=key, loopback=True)
        ScriptedWorker().add_to(service)
        yield service

    run_service(build, ServeOptions("127.0.0.1", args.port, key, 1.0, "info"))


if __name__ == "__main__":
    main()
