"""A vLLM or an SGLang that samples 64 tokens, 1 ms each, and answers in the form that the real one was recorded in.

    python -m benchmarks.relaying.recorded_engine vllm|sglang [--no-spans]

Prints its port. The forms are those of ``tests/engines/replies``, all fields included. ``--no-spans``: an older server,
which reports no spans of weight versions and sends an event for each token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

REPLIES = Path(__file__).resolve().parents[2] / "tests" / "engines" / "replies"
TOKENS, TOKEN_S, TOKEN = 64, 0.001, 260
RECORDED = {"vllm": "vllm-0.32.0.json", "sglang": "sglang-0.5.23.json"}


def filled(form: Any) -> Any:
    """A value of a recorded form."""
    if isinstance(form, dict):
        return {name.replace("TOKEN", str(TOKEN)): filled(value) for name, value in form.items()}
    if isinstance(form, list):
        return [filled(each) for each in form]
    return {"number": 1, "text": "x", "bool": True, "null": None}[form]


class RecordedEngine:
    def __init__(self, engine: str, *, spans: bool) -> None:
        self._recorded = json.loads((REPLIES / RECORDED[engine]).read_text())
        self._spans = spans

    def app(self) -> web.Application:
        app = web.Application()
        routes: dict[str, Any] = {
            "/health": {},
            "/ready": {},
            "/is_paused": {"is_paused": False},
            "/v1/loads": {"loads": []},
        }
        routes |= {"/weight_info": {"weight_version": "3"}, "/server_info": {"stream_interval": 1}}
        routes |= {"/model_info": {"model_path": "/nowhere", "weight_version": "3"}}
        routes |= {"/v1/models": {"data": [{"id": "m", "root": "/nowhere", "max_model_len": 32768}]}}
        for path, answer in routes.items():
            app.router.add_get(path, _always(json.dumps(answer)))
        app.router.add_get("/metrics", _always('vllm:generation_tokens_total{e="0"} 1.0\n'))
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/generate", self._complete)
        if self._spans:
            app.router.add_post("/inference/v1/generate", self._complete)
        return app

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling = body.get("sampling_params", body)
        total = sampling.get("max_tokens", sampling.get("max_new_tokens", TOKENS))
        likeliest = max(1, body.get("top_logprobs_num", sampling.get("logprobs", 0)))
        if not body["stream"]:
            await asyncio.sleep(TOKEN_S * total)
            return web.json_response(self._answer(request.path, 0, total, total, likeliest, streamed=False))
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for first, count in events(total, sampling.get("stream_interval", 1)):
            await asyncio.sleep(TOKEN_S * count)
            event = self._answer(request.path, first, count, total, likeliest, streamed=True)
            await out.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await out.write(b"data: [DONE]\n\n")
        return out

    def _answer(self, path: str, first: int, count: int, total: int, likeliest: int, *, streamed: bool) -> Any:
        top = range(TOKEN, TOKEN + likeliest)
        logprobs: Any
        about: dict[str, Any]
        seen = first + count
        ended = seen == total
        spans = [{"version": "3", "start": 0, "end": total}] if ended and self._spans else None
        if path == "/generate":
            recorded = (
                self._recorded["stream"]["last" if ended else "first"] if streamed else self._recorded["whole"]["body"]
            )
            answer = filled(recorded)  # each event repeats the whole answer so far
            ids, logprobs = [TOKEN] * seen, [[-0.5, TOKEN, None]] * seen
            about = {"completion_tokens": seen, "weight_version": "3", "output_token_logprobs": logprobs}
            about["output_top_logprobs"] = [[[-0.5, each, None] for each in top]] * seen
            about |= {"weight_versions": spans, "e2e_latency": TOKEN_S * seen}
            about["finish_reason"] = {"type": "length", "length": seen} if ended else None
            return answer | {"output_ids": ids, "text": "x" * seen, "meta_info": answer["meta_info"] | about}
        ids, finish = [TOKEN] * count, "length" if ended else None
        if path == "/v1/completions":
            answer = filled(self._recorded["stream"]["last" if ended else "first"])
            logprobs = {"text_offset": [0] * count, "token_logprobs": [-0.5] * count}
            logprobs |= {
                "tokens": [f"token_id:{TOKEN}"] * count,
                "top_logprobs": [{f"token_id:{each}": -0.5 for each in top}] * count,
            }
        else:
            name = "spans at the end of a stream"
            answer = filled(
                self._recorded[name]["last" if ended else "first"] if streamed else self._recorded["whole"]["body"]
            )
            tops = [{"token_id": each, "logprob": -0.5, "rank": 1} for each in top]
            logprobs = {"content": [{**tops[0], "top_logprobs": tops}] * count}
        about = {"index": 0, "token_ids": ids, "logprobs": logprobs, "finish_reason": finish, "weight_versions": spans}
        return answer | {"choices": [answer["choices"][0] | about]}


def _always(text: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text)

    return answer


def events(total: int, interval: int) -> Iterator[tuple[int, int]]:
    """First token and number of tokens of each event: the first one has one token."""
    yield 0, 1
    for first in range(1, total, interval):
        yield first, min(interval, total - first)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=sorted(RECORDED))
    parser.add_argument("--no-spans", action="store_true")
    options = parser.parse_args()
    runner = web.AppRunner(RecordedEngine(options.engine, spans=not options.no_spans).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
