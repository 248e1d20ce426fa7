"""``python -m tests.services.inference.engines.conformance.standins vllm|sglang --model DIR [--lora NAME=DIR ...]``"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from tests.services.inference.engines.conformance.standins.core import Core, report, serve
from tests.services.inference.engines.conformance.standins.sglang import Sglang
from tests.services.inference.engines.conformance.standins.vllm import Vllm


async def run(args: argparse.Namespace) -> None:
    lora = {name: Path(folder) for name, _, folder in (text.partition("=") for text in args.lora)}
    modes = {"raw_logprobs": "raw", "processed_logprobs": "processed", None: "tempered"}
    report(modes[args.logprobs_mode])
    core = Core(args.model, asyncio.get_running_loop(), lora)
    app = (
        Sglang(core, refuses=args.refuses).app()
        if args.kind == "sglang"
        else Vllm(core, tied_fault=args.tied_fault).app()
    )
    if args.api_key:
        app.middlewares.append(keyed(args.api_key))
    await serve(app, args.port)


def keyed(key: str) -> Middleware:
    """Only ``/health`` is for everybody, as with the ``--api-key`` of both."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    return check


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["vllm", "sglang"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--lora", nargs="*", default=[])
    parser.add_argument("--logprobs-mode", help="vLLM's; SGLang's raw_logprobs is an environment variable of its own")
    parser.add_argument("--refuses", nargs="*", default=[], help="weight versions that are not taken from disk")
    parser.add_argument("--api-key")
    parser.add_argument("--tied-fault", action="store_true")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
