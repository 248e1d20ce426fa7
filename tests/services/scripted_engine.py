"""A scripted engine: a real process that speaks the embedded engine's HTTP contract and answers as prescribed.

Started as ``python scripted_engine.py --port 0 --tokenizer DIR``; prints its port on the first line. ``POST /script``
changes what it does next:

    text       what it answers, as text            token_ids  the same as ids
    exact      true: the ids are all that it answers, without an end token
    replies    [[needle, text], ...]: instead, the text of the first needle in the prompt's last user turn
    delay_s    between two tokens                  flush      tokens a line
    gate       hold each answer after so many tokens until ``POST /release``
    fail       HTTP status for the next generations       die_after  exit after so many tokens
    cut_after  close the stream after so many tokens without a finish reason
    error_after  write an error line after so many tokens
    abort_after  the next answer is given up after so many tokens: finish reason ``abort``

``GET /calls`` lists the generations it got (bodies, tokens generated, and how each ended); ``GET /aborts`` the aborted
request ids.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer


@dataclass
class Script:
    text: str = "Hello there, friend!"
    token_ids: list[int] | None = None
    exact: bool = False
    replies: list[list[str]] = field(default_factory=list)
    delay_s: float = 0.0
    flush: int = 1
    gate: int | None = None
    fail: int | None = None
    fail_message: str = "scripted failure"
    die_after: int | None = None
    cut_after: int | None = None
    error_after: int | None = None
    abort_after: int | None = None
    version: int = 0
    ready: bool = True
    max_model_len: int = 4096


@dataclass
class Engine:
    tokenizer: Tokenizer
    script: Script = field(default_factory=Script)
    calls: list[dict[str, Any]] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def text(self, prompt: list[int]) -> str:
        if not self.script.replies:
            return self.script.text
        asked = self.tokenizer.decode(prompt, skip_special_tokens=False).rpartition("<|im_start|>user")[2]
        return next((text for needle, text in self.script.replies if needle in asked), self.script.text)

    def answer(self, prompt: list[int], sampling: dict[str, Any]) -> tuple[list[int], str, int | None]:
        """Token ids, finish reason and stop token: the script's answer, then the end token, within max_new_tokens."""
        script = self.script
        ids = list(script.token_ids or self.tokenizer.encode(self.text(prompt), add_special_tokens=False).ids)
        stops = sampling.get("stop_token_ids") or []
        end = self.tokenizer.token_to_id("<|im_end|>")
        if not script.exact and not sampling.get("ignore_eos"):
            assert end is not None
            ids.append(end)
        for position, token in enumerate(ids):
            if token in stops:
                ids = ids[: position + 1]
                break
        if script.abort_after is not None:
            ids, script.abort_after = ids[: script.abort_after], None
            return ids, "abort", None
        limit = sampling.get("max_new_tokens")
        if limit is not None and len(ids) > limit:
            return ids[:limit], "length", None
        return (ids, "stop", ids[-1]) if ids[-1] in [*stops, end] else (ids, "length", None)


def lines(engine: Engine, body: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What is sampled at each moment: a line of each prompt that has not ended."""
    prompts, sampling = body["input_ids"], body["sampling"]
    several = prompts if isinstance(prompts[0], list) else [prompts]
    piece = [_lines(engine, number, prompt, sampling) for number, prompt in enumerate(several)]
    return [[line for line in moment if line is not None] for moment in zip_longest(*piece)]


def _lines(engine: Engine, number: int, prompt: list[int], sampling: dict[str, Any]) -> list[dict[str, Any]]:
    ids, finish, stop_token = engine.answer(prompt, sampling)
    step = engine.script.flush
    out = []
    for start in range(0, len(ids), step):
        chunk = ids[start : start + step]
        last = start + step >= len(ids)
        top = sampling.get("top_logprobs")
        out.append(
            {
                "index": number * sampling.get("n", 1),
                "token_ids": chunk,
                "logprobs": [-0.25 - 0.5 * (token % 2) for token in chunk],
                "versions": [engine.script.version] * len(chunk),
                "top_logprobs": [[[token + rank, -0.5 - rank] for rank in range(top)] for token in chunk]
                if top
                else None,
                "finish_reason": finish if last else None,
                "stop_token_id": stop_token if last else None,
            }
        )
    return out


async def generate(engine: Engine, request: web.Request) -> web.StreamResponse:
    body = await request.json()
    record = {"body": body, "ended": "running", "headers": dict(request.headers), "tokens": 0, "generated": []}
    engine.calls.append(record)
    engine.note()
    script = engine.script
    if script.fail is not None:
        record["ended"] = "failed"
        return web.json_response({"error": {"message": script.fail_message}}, status=script.fail)
    whole = not body["stream"]
    choices: dict[int, dict[str, Any]] = {}
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    if not whole:
        await response.prepare(request)
    try:
        for moment in lines(engine, body):
            await before_line(engine, script, record)
            if record["ended"] == "cut":
                assert request.transport is not None
                request.transport.close()
                return response
            if record["ended"] == "error":
                error = {"error": {"message": "scripted error line"}}
                if whole:
                    return web.json_response(error, status=500)
                await response.write(json.dumps(error).encode() + b"\n")
                return response
            for line in moment:
                for choice in range(body["sampling"].get("n", 1)):
                    piece = {**line, "index": line["index"] + choice}
                    if whole:
                        keep(choices, piece)
                    else:
                        await response.write(json.dumps(piece).encode() + b"\n")
            record["tokens"] += len(moment[0]["token_ids"])
            record["generated"] += moment[0]["token_ids"]
            engine.note()
            await asyncio.sleep(script.delay_s)
        record["ended"] = "finished"
    except (asyncio.CancelledError, ConnectionResetError):
        record["ended"] = "cancelled"
        raise
    finally:
        engine.note()
    if whole:
        answer = [{**choice, "top_logprobs": choice["top_logprobs"] or None} for choice in choices.values()]
        return web.json_response({"choices": answer, "prompt_tokens": 1})
    return response


def keep(choices: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    """A whole answer's choice, and what is added to it."""
    index = piece["index"]
    before = choices.get(index, {**piece, "token_ids": [], "logprobs": [], "versions": [], "top_logprobs": []})
    runs = {name: before[name] + (piece[name] or []) for name in ("token_ids", "logprobs", "versions", "top_logprobs")}
    choices[index] = {**piece, **runs}


async def before_line(engine: Engine, script: Script, record: dict[str, Any]) -> None:
    tokens = record["tokens"]
    if script.die_after is not None and tokens >= script.die_after:
        os._exit(9)
    if script.gate is not None and tokens >= script.gate:
        await engine.released.wait()
    if script.cut_after is not None and tokens >= script.cut_after:
        record["ended"] = "cut"
    if script.error_after is not None and tokens >= script.error_after:
        record["ended"] = "error"


async def serve(args: argparse.Namespace) -> None:
    engine = Engine(Tokenizer.from_file(f"{args.tokenizer}/tokenizer.json"))

    async def on_generate(request: web.Request) -> web.StreamResponse:
        return await generate(engine, request)

    async def on_script(request: web.Request) -> web.Response:
        data = await request.json()
        if data.pop("reset", False):
            engine.script = Script()
            engine.calls.clear()
        for name, value in data.items():
            setattr(engine.script, name, value)
        engine.released.clear()
        return web.json_response({})

    async def on_release(request: web.Request) -> web.Response:
        engine.released.set()
        return web.json_response({})

    async def on_abort(request: web.Request) -> web.Response:
        engine.aborts.append((await request.json())["request_id"])
        engine.note()
        return web.json_response({})

    async def on_calls(request: web.Request) -> web.Response:
        """The calls; with ?until=NAME&count=N, once N of them have ended that way (any: exist)."""
        until, count = request.query.get("until"), int(request.query.get("count", 1))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(request.query.get("timeout", 20))):
                while until and sum(until in ("any", call["ended"]) for call in engine.calls) < count:
                    await engine.changed.wait()
        return web.json_response({"calls": engine.calls, "aborts": engine.aborts})

    async def on_ready(request: web.Request) -> web.Response:
        body = {"status": "ready", "max_model_len": engine.script.max_model_len, "version": engine.script.version}
        return web.json_response(body, status=200 if engine.script.ready else 503)

    async def on_version(request: web.Request) -> web.Response:
        return web.json_response({"version": engine.script.version})

    app = web.Application(client_max_size=2**28)
    app.router.add_post("/generate", on_generate)
    app.router.add_post("/abort", on_abort)
    app.router.add_post("/script", on_script)
    app.router.add_post("/release", on_release)
    app.router.add_get("/calls", on_calls)
    app.router.add_get("/ready", on_ready)
    app.router.add_get("/get_version", on_version)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", args.port).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokenizer", required=True)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
