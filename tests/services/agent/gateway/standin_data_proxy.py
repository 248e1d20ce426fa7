"""A data proxy of an agent service whose agent does what a message says; it keeps its sessions in memory.

Messages: ``tools``, ``metadata``, ``fail``, ``lose``, ``wait`` (until POST /release), ``stream``, ``die``, ``many``;
any other is repeated word by word. Turns of a session come one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from areal.services.http.auth import Access, AdminKey
from areal.services.http.errors import ApiError
from areal.services.http.messages import AnyResponse, Request, Response, StreamResponse, read_body, read_object
from areal.services.http.process import ServeOptions
from areal.services.http.serve import run_service
from areal.services.http.service import Service, json_response
from areal.services.journal.keys import key_digest, new_tag
from areal.wire.agents import EVENTS, ExportSession, RewardSession, StartAgentSession, TurnRequest

Event = dict[str, Any]
SENTENCE = "You said: "


@dataclass
class Session:
    key: str
    metadata: Any
    inference: Any
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    history: list[Event] = field(default_factory=list)
    task: asyncio.Task[Any] | None = None

    def about(self) -> Event:
        return {"session_key": self.key, "state": "idle", "metadata": self.metadata, "turns": len(self.history) // 2}


class StandIn:
    def __init__(self) -> None:
        self.tag = new_tag()
        self.sessions: dict[str, Session] = {}
        self.released = asyncio.Event()
        self.waiting = 0
        self.refusals = 0

    def add_to(self, service: Service) -> None:
        def post(path: str, handler: Any) -> None:
            service.route("POST", path, handler, Access.ADMIN)

        post("/rl/start_session", self.start)
        post("/rl/find_key", self.find_key)
        post("/session/{key}/turn", self.turn)
        post("/session/{key}/close", self.close)
        post("/session/{key}/reward", self.reward)
        post("/session/{key}/export", self.export)
        post("/release", self.release)
        post("/refuse", self.refuse)
        service.route("DELETE", "/session/{key}/turn", self.cancel, Access.ADMIN)
        service.route("GET", "/session/{key}", self.show, Access.ADMIN)
        service.route("GET", "/sessions", self.list, Access.ADMIN)

    def session(self, request: Request) -> Session:
        session = self.sessions.get(request.match_info["key"])
        if session is None:
            raise ApiError(404, "no session has this key", code="session_not_found")
        return session

    async def start(self, request: Request) -> Response:
        body = await read_body(request, StartAgentSession)
        key = body.api_key or f"sk-{self.tag}-{secrets.token_urlsafe(32)}"
        self.sessions.setdefault(key, Session(key, dict(body.metadata), body.inference))
        sessions = [{"session_id": key, "session_api_key": key}]
        return json_response({"sessions": sessions, "journal": self.tag}, status=201)

    async def find_key(self, request: Request) -> Response:
        digest = (await read_object(request))["digest"]
        found = any(key_digest(key.encode()).hex() == digest for key in self.sessions)
        return json_response({"journal": self.tag if found else None})

    async def turn(self, request: Request) -> AnyResponse:
        session, turn = self.session(request), await read_body(request, TurnRequest)
        if self.refusals:
            self.refusals -= 1
            raise ApiError(503, "not now", code="not_begun")
        session.inference = turn.inference or session.inference
        out = StreamResponse(headers={"Content-Type": EVENTS})
        out.begin(request, _line({"type": "accepted", "run_id": turn.run_id}))
        async with session.lock:
            session.task = asyncio.current_task()
            text = ""
            try:
                async for event in self.events(session, turn):
                    text = event.get("summary", text)
                    await out.write(_line(event))
                if text:
                    said = [{"role": "user", "content": turn.message}, {"role": "assistant", "content": text}]
                    session.history += said
            except asyncio.CancelledError:
                if session.task is not None:
                    raise
                await out.write(_line({"type": "failed", "failure": "cancelled", "error": "the turn was cancelled"}))
            finally:
                session.task = None
        return out

    async def events(self, session: Session, turn: TurnRequest) -> AsyncGenerator[Event, None]:
        match turn.message:
            case "tools":
                for number, city in enumerate(("Rome", "Oslo")):
                    yield {"type": "tool_call", "id": f"c{number}", "name": "weather", "arguments": f'"{city}"'}
                for number in (1, 0):
                    yield {"type": "tool_result", "id": f"c{number}", "name": "weather", "result": f"sun {number}"}
                yield {"type": "delta", "text": "Sunny."}
                yield {"type": "complete", "summary": "Sunny.", "metadata": {}}
            case "metadata":
                told = {"metadata": turn.metadata, "inference": session.inference and vars(session.inference)}
                yield {"type": "complete", "summary": json.dumps(told), "metadata": {}}
            case "fail":
                yield {"type": "failed", "failure": "agent", "error": "ValueError: no"}
            case "lose":
                yield {"type": "delta", "text": "half"}
                yield {"type": "failed", "failure": "infra", "error": "the worker was lost"}
            case "die":
                yield {"type": "delta", "text": "half"}
                await asyncio.sleep(0.05)  # its delta is on the wire
                os._exit(1)
            case "wait":
                yield {"type": "delta", "text": "waiting"}
                self.waiting += 1
                try:
                    await self.released.wait()
                finally:
                    self.waiting -= 1
                yield {"type": "complete", "summary": "waiting", "metadata": {}}
            case "stream":
                yield {
                    "type": "response",
                    "status": 200,
                    "headers": {"Content-Type": "text/event-stream", "X-Own": "1"},
                }
                for part in (b"data: one\n\n", b"data: two\n\n"):
                    yield {"type": "data", "data": base64.b64encode(part).decode()}
                yield {"type": "complete", "summary": "one two", "metadata": {}}
            case "many":
                for _ in range(20_000):
                    yield {"type": "delta", "text": "x" * 1000}
                yield {"type": "complete", "summary": "x", "metadata": {}}
            case message:
                for word in f"{SENTENCE}{message}".split(" "):
                    yield {"type": "delta", "text": word if word == "You" else f" {word}"}
                yield {"type": "complete", "summary": f"{SENTENCE}{message}", "metadata": {}}

    async def cancel(self, request: Request) -> Response:
        session = self.session(request)
        task, session.task = session.task, None
        if task is not None:
            task.cancel()
        return json_response({"session_key": session.key, "cancelled": task is not None})

    async def close(self, request: Request) -> Response:
        session = self.session(request)
        del self.sessions[session.key]
        return json_response({"session_key": session.key, "closed": True})

    async def show(self, request: Request) -> Response:
        session = self.session(request)
        return json_response({**session.about(), "history": session.history})

    async def list(self, request: Request) -> Response:
        limit, after = int(request.query.get("limit", 100)), request.query.get("after", "")
        found = sorted(key for key in self.sessions if key > after)
        about = [self.sessions[key].about() for key in found[:limit]]
        return json_response({"sessions": about, "next": found[limit - 1] if len(found) > limit else None})

    async def reward(self, request: Request) -> Response:
        self.session(request)
        return json_response({"reward": (await read_body(request, RewardSession)).reward, "trajectory_ready": True})

    async def export(self, request: Request) -> Response:
        self.session(request)
        return json_response({"traj": {}, "style": (await read_body(request, ExportSession)).style})

    async def release(self, request: Request) -> Response:
        """Ends all waits."""
        self.released.set()
        self.released = asyncio.Event()
        return json_response({})

    async def refuse(self, request: Request) -> Response:
        """The next turns are not begun."""
        self.refusals = (await read_object(request))["count"]
        return json_response({})


def _line(event: Event) -> bytes:
    return orjson.dumps(event) + b"\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--admin-key-file", type=Path, required=True)
    key = AdminKey(parser.parse_args().admin_key_file.read_bytes())
    options = ServeOptions("127.0.0.1", 0, key, 5.0, "info")

    @contextlib.asynccontextmanager
    async def build() -> AsyncGenerator[Service, None]:
        standin = StandIn()

        def details() -> Event:
            return {"journals": [standin.tag], "sessions": len(standin.sessions), "waiting": standin.waiting}

        service = Service("data-proxy", key=key, loopback=True, details=details)
        standin.add_to(service)
        yield service

    run_service(build, options)


if __name__ == "__main__":
    main()
