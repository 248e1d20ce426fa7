"""An engine that keeps the minutes: a real process with the embedded engine's HTTP contract, and a log of what it did.

Started as ``python witness_engine.py --port N --tokenizer DIR --log FILE``; prints its port on the first line. What it
samples is unique to the call, whatever bytes that makes. Before a token leaves it is in the log, a line each (see
``witness.py``), and the log goes on where a killed predecessor left it.

``POST /script`` changes what it does next: ``hold_after`` tokens each call waits for ``POST /release``; ``at_least`` so
many tokens are sampled; ``line``: fields that replace those of each line that it sends, for an engine that lies;
``raw``: text sent instead of a line; ``ready``: what it says of itself. ``POST /script {}`` makes it honest again.
``GET /progress`` says how far the furthest call since then has come: -1 without any.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

END = "<|im_end|>"


@dataclass
class Script:
    hold_after: int | None = None
    at_least: int = 0
    line: dict[str, Any] | None = None
    raw: str | None = None
    ready: bool = True


@dataclass
class Engine:
    tokenizer: Tokenizer
    log: int
    script: Script = field(default_factory=Script)
    version: int = 0
    running: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        token = self.tokenizer.token_to_id(END)
        assert token is not None
        return token

    def write(self, **line: Any) -> None:
        os.write(self.log, json.dumps(line).encode() + b"\n")

    def answer(self, request_id: str, index: int, limit: int | None, ignore_eos: bool) -> tuple[list[int], str]:
        """Token ids and why they end there: six letters of the call's own, any tokens, special ones too, the end."""
        seed = blake2b(f"{request_id}/{index}".encode(), digest_size=8).hexdigest()
        dice = random.Random(seed)
        ids = self.tokenizer.encode(seed[:6], add_special_tokens=False).ids
        more, size = max(dice.randrange(5), self.script.at_least), self.tokenizer.get_vocab_size()
        ids += [dice.randrange(2) if dice.random() < 0.1 else dice.randrange(3, size) for _ in range(more)]
        if not ignore_eos:
            ids.append(self.end)
        return (ids, "stop") if not ignore_eos and (limit is None or len(ids) <= limit) else (ids[:limit], "length")


async def generate(engine: Engine, request: web.Request) -> web.StreamResponse:
    body = await request.json()
    name, sampling, script = body["request_id"], body["sampling"], engine.script
    engine.write(call=name, input_ids=body["input_ids"], n=sampling.get("n", 1))
    engine.counts[name] = 0
    limit, ignore_eos = sampling.get("max_new_tokens"), bool(sampling.get("ignore_eos"))
    answers = [engine.answer(name, index, limit, ignore_eos) for index in range(sampling.get("n", 1))]
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    for place in range(max(len(ids) for ids, _ in answers)):
        if script.hold_after is not None and place >= script.hold_after:
            await engine.released.wait()
        await engine.running.wait()
        lines = [
            _line(engine, name, index, *answer, place) for index, answer in enumerate(answers) if place < len(answer[0])
        ]
        for line in lines:
            text = script.raw if script.raw is not None else json.dumps({**line, **(script.line or {})})
            await response.write(text.encode() + b"\n")
        engine.counts[name] = place + 1
    return response


def _line(engine: Engine, name: str, index: int, ids: list[int], finish: str, place: int) -> dict[str, Any]:
    """One token, sampled now: it is in the log when this returns."""
    token, last = ids[place], place == len(ids) - 1
    logprob = -(blake2b(f"{name}/{index}/{place}".encode(), digest_size=2).digest()[0] + 1) / 64
    engine.write(of=name, index=index, token=token, logprob=logprob, version=engine.version)
    return {
        "index": index,
        "token_ids": [token],
        "logprobs": [logprob],
        "versions": [engine.version],
        "top_logprobs": None,
        "finish_reason": finish if last else None,
        "stop_token_id": token if last and finish == "stop" else None,
    }


def application(engine: Engine) -> web.Application:
    async def on_generate(request: web.Request) -> web.StreamResponse:
        return await generate(engine, request)

    async def on_script(request: web.Request) -> web.Response:
        engine.script = Script(**await request.json())
        engine.released.clear()
        engine.counts.clear()
        return web.json_response({})

    async def on_release(request: web.Request) -> web.Response:
        engine.released.set()
        return web.json_response({})

    async def on_progress(request: web.Request) -> web.Response:
        return web.json_response({"most": max(engine.counts.values(), default=-1)})

    async def on_pause(request: web.Request) -> web.Response:
        engine.running.clear()
        return web.json_response({"paused": True})

    async def on_continue(request: web.Request) -> web.Response:
        engine.running.set()
        return web.json_response({"paused": False})

    async def on_version(request: web.Request) -> web.Response:
        if request.method == "POST":
            engine.version = (await request.json())["version"]
            engine.write(weights=engine.version)
        return web.json_response({"version": engine.version})

    async def on_ready(request: web.Request) -> web.Response:
        body = {"status": "ready", "max_model_len": 100_000, "paused": not engine.running.is_set()}
        return web.json_response(body, status=200 if engine.script.ready else 503)

    async def on_abort(request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application(client_max_size=2**28)
    app.router.add_post("/generate", on_generate)
    app.router.add_post("/abort", on_abort)
    app.router.add_post("/script", on_script)
    app.router.add_post("/release", on_release)
    app.router.add_get("/progress", on_progress)
    app.router.add_post("/pause_generation", on_pause)
    app.router.add_post("/continue_generation", on_continue)
    app.router.add_get("/get_version", on_version)
    for path in ("/set_version", "/load_weights"):
        app.router.add_post(path, on_version)
    app.router.add_get("/ready", on_ready)
    return app


async def serve(args: argparse.Namespace) -> None:
    log = os.open(args.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    engine = Engine(Tokenizer.from_file(f"{args.tokenizer}/tokenizer.json"), log)
    engine.running.set()
    runner = web.AppRunner(application(engine), handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", args.port, reuse_address=True).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--log", required=True)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
