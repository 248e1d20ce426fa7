"""Stands before a real engine and keeps the minutes of what it says, as ``witness_engine`` does of itself.

Started as ``python witness_relay.py --port N --engine URL --log FILE``; prints its port on the first line. What the
engine sampled is in the log before it is passed on. ``/script``, ``/release`` and ``/progress`` are as there: a call
that is held is held here, while the engine goes on with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web


@dataclass
class Relay:
    engine: str
    log: int
    http: aiohttp.ClientSession
    hold_after: int | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)
    counts: dict[str, int] = field(default_factory=dict)

    def write(self, **line: Any) -> None:
        os.write(self.log, json.dumps(line).encode() + b"\n")

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = body["request_id"]
        self.write(call=name, input_ids=body["input_ids"], n=body["sampling"].get("n", 1))
        self.counts[name] = 0
        async with self.http.post(f"{self.engine}/generate", json=body, timeout=aiohttp.ClientTimeout()) as reply:
            out = web.StreamResponse(status=reply.status, headers={"Content-Type": reply.headers["Content-Type"]})
            await out.prepare(request)
            if not body.get("stream"):
                whole = await reply.read()
                for place, choice in enumerate(json.loads(whole).get("choices", ())):
                    for line in _token_by_token({"index": place, **choice}):
                        await self._take(name, line)
                await out.write(whole)
                return out
            async for text in reply.content:
                for line in _token_by_token(json.loads(text)):
                    await self._take(name, line)
                    await out.write(json.dumps(line).encode() + b"\n")
        return out

    async def _take(self, name: str, line: dict[str, Any]) -> None:
        if self.hold_after is not None and self.counts[name] >= self.hold_after:
            await self.released.wait()
        self._note(name, line)

    def _note(self, name: str, line: dict[str, Any]) -> None:
        for token, logprob, version in zip(*(line.get(each, ()) for each in _EACH), strict=True):
            self.write(of=name, index=line["index"], token=token, logprob=float(logprob), version=version)
            self.counts[name] += 1

    async def pass_on(self, request: web.Request) -> web.Response:
        """Everything else, as it is."""
        url, data = f"{self.engine}{request.path}", await request.read()
        headers = {"Content-Type": "application/json"}
        try:
            async with self.http.request(request.method, url, data=data, headers=headers) as reply:
                return web.Response(status=reply.status, body=await reply.read(), content_type="application/json")
        except aiohttp.ClientError as error:
            return web.json_response({"error": {"message": str(error)}}, status=503)

    async def script(self, request: web.Request) -> web.Response:
        self.hold_after = (await request.json()).get("hold_after")
        self.released.clear()
        self.counts.clear()
        return web.json_response({})

    async def release(self, request: web.Request) -> web.Response:
        self.released.set()
        return web.json_response({})

    async def progress(self, request: web.Request) -> web.Response:
        return web.json_response({"most": max(self.counts.values(), default=-1)})


_EACH = ("token_ids", "logprobs", "versions")


def _token_by_token(line: dict[str, Any]) -> list[dict[str, Any]]:
    """What the engine sent in one line, in a line for each token, so that a call can be held after any."""
    count = len(line.get("token_ids", ()))
    if count < 2:
        return [line]
    lines = [{**line, **{name: [line[name][place]] for name in _EACH}} for place in range(count)]
    for early in lines[:-1]:
        early |= {"finish_reason": None, "stop_token_id": None}
    return lines


async def serve(args: argparse.Namespace) -> None:
    log = os.open(args.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    async with aiohttp.ClientSession() as http:
        relay = Relay(args.engine, log, http)
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/generate", relay.generate)
        app.router.add_post("/script", relay.script)
        app.router.add_post("/release", relay.release)
        app.router.add_get("/progress", relay.progress)
        app.router.add_route("*", "/{path:.*}", relay.pass_on)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", args.port).start()
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--log", required=True)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
