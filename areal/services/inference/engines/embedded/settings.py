"""What the engine process is told at its start."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from areal.errors import UsageFault
from areal.hub import model_folder

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Settings:
    """``None`` and ``auto`` are resolved once the model and the machine are known (``loading``)."""

    model_path: Path
    dtype: str = "auto"
    device: str = "auto"
    max_batch_size: int = 64
    max_model_len: int | None = None  # positions; the model's own when None
    prefill_tokens: int = 2048
    kv_memory_gib: float | None = None
    threads: int | None = None
    lora: tuple[tuple[str, Path], ...] = ()  # adapters, name and folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", required=True, help="folder with config.json and safetensors, or a hub's id")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of weights and KV cache (auto: the model's)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 (auto: cuda when there is one)")
    parser.add_argument("--max-batch-size", type=int, default=64, help="sequences computed together")
    parser.add_argument("--max-model-len", type=int, help="tokens of prompt and answer together (the model's)")
    parser.add_argument("--prefill-tokens", type=int, default=2048, help="prompt tokens of one step")
    parser.add_argument("--kv-memory-gib", type=float, help="bound of the KV cache (a share of free memory)")
    parser.add_argument("--lora", nargs="+", default=[], metavar="NAME=FOLDER", help="LoRA adapters, in PEFT's format")
    parser.add_argument("--threads", type=int, help="CPU threads of one operation (OMP_NUM_THREADS, or half the CPUs)")


def settings(args: argparse.Namespace) -> Settings:
    for name in ("max_batch_size", "max_model_len", "prefill_tokens", "kv_memory_gib", "threads"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UsageFault(f"--{name.replace('_', '-')} must be above 0, not {value}")
    return Settings(
        model_path=model_folder(args.model_path),
        dtype=args.dtype,
        device=args.device,
        max_batch_size=args.max_batch_size,
        max_model_len=args.max_model_len,
        prefill_tokens=args.prefill_tokens,
        kv_memory_gib=args.kv_memory_gib,
        threads=args.threads,
        lora=tuple(map(_adapter, args.lora)),
    )


def _adapter(text: str) -> tuple[str, Path]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise UsageFault(f"--lora {text!r} must be NAME=FOLDER")
    return name, model_folder(folder)


def default_threads() -> int:
    """One engine beside others on a machine: half of what it may use, and no more than memory bandwidth feeds."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else max(1, min(16, len(os.sched_getaffinity(0)) // 2))
