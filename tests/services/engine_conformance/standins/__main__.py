"""``python -m tests.services.engine_conformance.standins vllm|sglang --model DIR [--lora NAME=DIR ...]``"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from tests.services.engine_conformance.standins.core import Core, report, serve
from tests.services.engine_conformance.standins.sglang import Sglang
from tests.services.engine_conformance.standins.vllm import Vllm


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
    await serve(app, args.port)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["vllm", "sglang"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--lora", nargs="*", default=[])
    parser.add_argument("--logprobs-mode", help="vLLM's; SGLang's raw_logprobs is an environment variable of its own")
    parser.add_argument("--refuses", nargs="*", default=[], help="weight versions that are not taken from disk")
    parser.add_argument("--tied-fault", action="store_true")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
