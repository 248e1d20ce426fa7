"""The embedded engine against transformers' `generate` and continuous batching, all in one process, interleaved.

    python benchmarks/engine.py [--model tiny] [--model 0.5b] [--device cuda] [--rounds 7] [--threads 1] [--write]

Random weights; prompts of 22 tokens; every sequence is sampled at temperature 1 to a fixed length. The engine and
continuous batching return a logprob per token, the engine a weight version as well; `generate` returns ids only. Each
round runs every arm at every batch size, in an order that turns from round to round, so that a noisy machine disturbs
all alike; medians count. Beside tokens per second of wall time stand tokens per second of CPU time, which other
processes disturb less. For the large model a decode step at batch 1 has to read all weights once, so its limit is
memory bandwidth over bytes of weights; the bandwidth is measured in the same run by summing an array with as many
threads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.reporting import RESULTS

PROMPT_TOKENS = 22
ARMS = ("embedded", "generate", "continuous batching")
Prompts = list[list[int]]


@dataclass(frozen=True)
class Model:
    """A shape with random weights. ``tokens`` are generated for each sequence."""

    family: str
    dtype: str
    tokens: int
    batches: tuple[int, ...]
    shape: dict[str, Any]


MODELS = {
    "tiny": Model(
        family="Qwen3",
        dtype="float32",
        tokens=128,
        batches=(1, 8, 32),
        shape={
            "vocab_size": 473,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
    ),
    "0.5b": Model(
        family="Qwen2",
        dtype="bfloat16",
        tokens=24,
        batches=(1, 8, 32),
        shape={
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
    ),
}


def make_model(model: Model, folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{model.family}Config")(**model.shape)
    built = getattr(transformers, f"{model.family}ForCausalLM")(config).to(getattr(torch, model.dtype))
    built.save_pretrained(folder)


class Embedded:
    """The engine as the server runs it, without HTTP."""

    def __init__(self, folder: Path, model: Model, device: str) -> None:
        import torch

        from areal.services.inference.engines.embedded.loading import inspect_folder, load_model
        from areal.wire.processes import EmbeddedEngineConfig

        self._ended = threading.Event()
        self._open: list[Any] = []
        config = EmbeddedEngineConfig(
            model_path=str(folder),
            max_batch_size=max(model.batches),
            threads=torch.get_num_threads(),
            device=device,
        )
        loaded = load_model(inspect_folder(folder), config, {}, lambda *stage: None, self._progress, self._failed)
        self._engine, self._tokens = loaded.engine, model.tokens

    def run(self, prompts: Prompts) -> None:
        from areal.services.inference.engines.embedded.sampler import stream_key
        from areal.services.inference.engines.embedded.scheduler import TokenSequence
        from areal.wire.sampling import SamplingParams

        self._ended.clear()
        self._open = [
            TokenSequence(prompt, SamplingParams(), allowance=self._tokens, key=stream_key(index, 0))
            for index, prompt in enumerate(prompts)
        ]
        self._engine.submit(self._open)
        self._ended.wait()
        assert all(each.produced == len(each.logprobs) == self._tokens for each in self._open)

    def close(self) -> None:
        self._engine.close()

    def _progress(self, urgent: bool) -> None:
        if urgent and all(each.finish for each in self._open):
            self._ended.set()

    def _failed(self, error: BaseException) -> None:
        self._ended.set()


class Generate:
    """transformers' own loop over a batch of equal lengths, ends of text ignored."""

    def __init__(self, folder: Path, model: Model, device: str) -> None:
        self._model, self._tokens, self._device = _reference(folder, model, device), model.tokens, device

    def run(self, prompts: Prompts) -> None:
        import torch

        ids = torch.tensor(prompts, device=self._device)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=self._tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert output.shape == (len(prompts), PROMPT_TOKENS + self._tokens)

    def close(self) -> None: ...


class ContinuousBatching:
    """transformers' manager, started once, a cache of 512 blocks of 32 positions (the faster of the settings tried)."""

    def __init__(self, folder: Path, model: Model, device: str) -> None:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        library = transformers_library()
        self._tokens = model.tokens
        generation = library.GenerationConfig(do_sample=True, top_k=0, max_new_tokens=model.tokens, eos_token_id=-1)
        batching = ContinuousBatchingConfig(page_size=32, num_blocks=512, max_batch_tokens=512, return_logprobs=True)
        self._manager = _reference(folder, model, device).init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        self._manager.start()
        self._number = 0

    def run(self, prompts: Prompts) -> None:
        self._number += 1
        names = [f"{self._number}-{index}" for index in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self._manager.add_request(prompt, request_id=name, max_new_tokens=self._tokens)
        missing = set(names)
        while missing:
            output = self._manager.get_result(timeout=600)
            if output is not None and output.is_finished():
                assert len(output.generated_tokens) == len(output.logprobs) == self._tokens
                missing.remove(output.request_id)

    def close(self) -> None:
        self._manager.stop(block=True, timeout=30)


def transformers_library() -> Any:
    import transformers

    return transformers


def _reference(folder: Path, model: Model, device: str) -> Any:
    import torch

    dtype = getattr(torch, model.dtype)
    return (
        transformers_library()
        .AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        .eval()
        .to(device)
    )


def quiet() -> None:
    logging = transformers_library().utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def measure(
    model: Model, device: str, rounds: int, say: Callable[[str], None]
) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """(wall, CPU) seconds of each run, by arm and batch size."""
    import torch

    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        make_model(model, Path(name))
        makers: list[Any] = [Embedded, Generate, ContinuousBatching]
        arms = dict(zip(ARMS, (maker(Path(name), model, device) for maker in makers), strict=True))
    generator = torch.Generator().manual_seed(1)
    for number in range(rounds + 1):
        order = [(arm, batch) for batch in model.batches for arm in ARMS]
        order = order[number % len(order) :] + order[: number % len(order)]
        for arm, batch in order:
            shape = (batch, PROMPT_TOKENS)
            prompts = torch.randint(3, model.shape["vocab_size"], shape, generator=generator).tolist()
            wall, cpu = time.perf_counter(), time.process_time()
            arms[arm].run(prompts)
            spent = (time.perf_counter() - wall, time.process_time() - cpu)
            if number:  # the first round warms up
                found.setdefault((arm, batch), []).append(spent)
        say(f"round {number} of {rounds}")
    for arm in arms.values():
        arm.close()
    return found


def bandwidth(device: str) -> float:
    """Bytes a second of reading memory: the best of many sums over half a gigabyte, far beyond any cache."""
    import torch

    array = torch.ones(2**27, dtype=torch.float32, device=device)

    def once() -> float:
        started = time.perf_counter()
        array.sum().item()  # which waits for the device
        return array.nbytes / (time.perf_counter() - started)

    return max(once() for _ in range(12))


def weight_bytes(model: Model) -> int:
    """Read in one decode step: every weight once (a tied head is read as head; its embedding's rows are nothing)."""
    import math

    from areal.services.inference.engines.embedded.model_folder import buffer_shapes, parse

    config = parse({**model.shape, "model_type": model.family.lower()})
    width = {"float32": 4, "bfloat16": 2}[model.dtype]
    return width * sum(
        math.prod(shape) for name, shape in buffer_shapes(config).items() if config.tied or name != "embed"
    )


def document(name: str, device: str, rounds: int, threads: int, say: Callable[[str], None]) -> dict[str, Any]:
    import torch

    model = MODELS[name]
    torch.set_num_threads(threads)
    load_before, speed = os.getloadavg()[0], bandwidth(device)
    found = measure(model, device, rounds, say)
    limit = max(speed, bandwidth(device)) / weight_bytes(model)
    rows = []
    for (arm, batch), spent in sorted(found.items(), key=lambda item: (item[0][1], ARMS.index(item[0][0]))):
        tokens = batch * model.tokens
        rates = sorted(tokens / wall for wall, _ in spent)
        row = {
            "arm": arm,
            "batch": batch,
            "tokensPerSecond": round(statistics.median(rates), 2),
            "lowest": round(rates[0], 2),
            "highest": round(rates[-1], 2),
            "tokensPerCpuSecond": round(statistics.median(tokens / cpu for _, cpu in spent), 2),
        }
        if batch == 1:
            row["shareOfBandwidthLimit"] = round(statistics.median(rates) / limit, 3)
        rows.append(row)
    return {
        "model": name,
        "family": model.family,
        "dtype": model.dtype,
        "weightBytes": weight_bytes(model),
        "promptTokens": PROMPT_TOKENS,
        "newTokens": model.tokens,
        "threads": threads,
        "rounds": rounds,
        "bandwidthGBs": round(limit * weight_bytes(model) / 1e9, 1),
        "limitTokensPerSecond": round(limit, 1),
        "loadBefore": round(load_before, 2),
        "loadAfter": round(os.getloadavg()[0], 2),
        "rows": with_ratios(rows),
    }


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beside each other engine, how many times as fast the embedded one is."""
    ours = {row["batch"]: row for row in rows if row["arm"] == "embedded"}
    titles = {"embeddedIs": "tokensPerSecond", "embeddedIsByCpu": "tokensPerCpuSecond"}
    return [
        row
        if row["arm"] == "embedded"
        else row | {title: round(ours[row["batch"]][key] / row[key], 3) for title, key in titles.items()}
        for row in rows
    ]


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def device_name(device: str) -> str:
    import torch

    return cpu_name() if device == "cpu" else torch.cuda.get_device_name(device)


def header(device: str) -> dict[str, Any]:
    return {
        "benchmark": "engine",
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {
            "device": device_name(device),
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "safetensors")},
        },
    }


def table(found: dict[str, Any]) -> str:
    machine, versions = found["machine"], found["versions"]
    lines = [
        "# Embedded engine: tokens per second",
        "",
        f"{found['date']}, {machine['device']}, {machine['cores']} cores, Python {versions['python']}, "
        f"torch {versions['torch']}, transformers {versions['transformers']}.",
    ]
    for run in found["runs"]:
        lines += ["", *_run_table(run)]
    return "\n".join(lines) + "\n"


def _run_table(run: dict[str, Any]) -> list[str]:
    lines = [
        f"## {run['model']}: {run['family']}, {run['dtype']}, {run['weightBytes'] / 1e6:.1f} MB of weights, "
        f"{run['threads']} thread(s)",
        "",
        f"Median of {run['rounds']} interleaved rounds, {run['promptTokens']} prompt, {run['newTokens']} new tokens; "
        + f"load average {run['loadBefore']} before, {run['loadAfter']} after. Memory is read at {run['bandwidthGBs']} "
        + f"GB/s, which allows {run['limitTokensPerSecond']} tokens/s at batch 1.",
        "",
        "| batch | engine | tokens/s (lowest-highest) | embedded is | tokens/CPU-s | embedded is | of limit |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in run["rows"]:
        wall, cpu = (f"{row[key]:.2f}x" if key in row else "" for key in ("embeddedIs", "embeddedIsByCpu"))
        share = f"{row['shareOfBandwidthLimit']:.0%}" if "shareOfBandwidthLimit" in row else ""
        lines.append(
            f"| {row['batch']} | {row['arm']} | {row['tokensPerSecond']} ({row['lowest']}-{row['highest']}) | {wall} "
            f"| {row['tokensPerCpuSecond']} | {cpu} | {share} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="may be given twice (default: all)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, action="append", help="may be given twice (default: 1)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--write", action="store_true", help="keep benchmarks/results/engine.{json,md}, or engine_cuda")
    options = parser.parse_args()
    quiet()
    found = header(options.device)
    runs = [(model, threads) for model in options.model or MODELS for threads in options.threads or [1]]
    found["runs"] = [
        document(model, options.device, options.rounds, threads, lambda text: print(text, file=sys.stderr))
        for model, threads in runs
    ]
    print(table(found))
    if options.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        name = "engine" if options.device == "cpu" else f"engine_{options.device}"
        (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
        (RESULTS / f"{name}.md").write_text(table(found))
    slower = [
        row
        for run in found["runs"]
        for row in run["rows"]
        for own in run["rows"]
        if own["arm"] == "embedded" and own["batch"] == row["batch"] and own["tokensPerSecond"] < row["tokensPerSecond"]
    ]
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
