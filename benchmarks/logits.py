"""Memory of a training step: logits of all tokens against a chunked head and loss.

    python benchmarks/logits.py [--tokens 512] [--ranks 2] [--quick] [--write]

A model of 0.5B parameters (Qwen2.5's shape, random weights) with a vocabulary of 151,936, float32, FSDP over two ranks,
activation checkpointing, SGD. The same update three times: on no token at all (``none``: weights, gradients and
activations, which every way needs), on every token with their logits in one piece (``all``), and with the chunked head
(``chunked``, as it is by default). Peaks are resident memory of a rank (VmHWM), the larger of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.reporting import header, publish, table

VOCABULARY, WIDTH = 151_936, 256
SHAPE = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
WAYS = ("none", "all", "chunked")


def step(model: Path, out: Path, tokens: int) -> int:
    """On one rank: the three updates, the first one twice (it allocates what stays); the first rank writes figures."""
    import torch

    from areal.api.cli_args import OptimizerConfig, TrainEngineConfig
    from areal.training.algorithms.losses import masked_mean, sft_loss
    from areal.training.engines.fsdp import FSDPEngine
    from areal.training.ranks import join_ranks

    torch.manual_seed(0)
    config = TrainEngineConfig(
        path=str(model),
        dtype="float32",
        init_from_scratch=True,
        gradient_checkpointing=True,
        optimizer=OptimizerConfig(type="sgd", lr=0.0, weight_decay=0.0),
    )
    config.mb_spec.max_tokens_per_mb = tokens
    with join_ranks() as ranks:
        engine, found = FSDPEngine(config, ranks), {}
        ids = torch.randint(VOCABULARY, (tokens // WIDTH, WIDTH), generator=torch.Generator().manual_seed(ranks.rank))
        there, head = torch.ones_like(ids, dtype=torch.bool), engine._head
        for way in ("none", *WAYS):
            engine._head = None if way == "all" else head
            mask = there & (torch.arange(WIDTH) > 0) & (way != "none")
            rows = {"input_ids": ids, "attention_mask": there, "loss_mask": mask}
            Path("/proc/self/clear_refs").write_text("5")
            before = time.monotonic()
            update = engine.train_batch(
                rows,
                lambda outputs, micro: masked_mean(sft_loss(outputs.logprobs, micro["loss_mask"]), micro["loss_mask"]),
                lambda micro: micro["attention_mask"].sum(),
            )
            peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
            found[way] = {
                "peak_mib": ranks.all_max(int(peak.split()[1]) // 1024),
                "seconds": round(time.monotonic() - before, 1),
                "loss": update.loss,
                "grad_norm": update.grad_norm,
            }
        if ranks.is_first:
            out.write_text(json.dumps(found))
    return 0


def measure(tokens: int, ranks: int, shape: dict[str, Any]) -> dict[str, Any]:
    from transformers import Qwen2Config

    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(vocab_size=VOCABULARY, architectures=["Qwen2ForCausalLM"], **shape).save_pretrained(folder)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--log-dir=/dev/null"]
        words = [
            str(Path(__file__).resolve()),
            "--step",
            folder,
            str(Path(folder, "out.json")),
            "--tokens",
            str(tokens),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, *torchrun, *words], env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"the ranks ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(Path(folder, "out.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512, help="of each rank")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="two layers")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--step", nargs=2, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        from areal.training.__main__ import run_and_exit

        run_and_exit(lambda: step(given.step[0], given.step[1], given.tokens))
    shape = SHAPE | ({"num_hidden_layers": 2} if given.quick else {})
    steps = measure(given.tokens, given.ranks, shape)
    logits = given.tokens * VOCABULARY * 4 / 2**20
    found = header("logits", **{name: version(name) for name in ("torch", "transformers")})
    found |= {"tokens": given.tokens, "ranks": given.ranks, "layers": shape["num_hidden_layers"]}
    found |= {"logits_mib": round(logits), "steps": steps}
    rows = []
    for way in WAYS:
        each = steps[way]
        each["extra_mib"] = each["peak_mib"] - steps["none"]["peak_mib"]
        each["extra_share"] = round(each["extra_mib"] / logits, 2)
        loss = f"{each['loss']:.6f}" if way != "none" else ""
        rows.append([way, each["peak_mib"], each["extra_mib"], each["extra_share"], each["seconds"], loss])
    columns = ["logits", "peak of a rank, MiB", "above none, MiB", "of the logits' size", "seconds", "loss"]
    about = (
        f"{given.tokens} tokens a rank, all trained on, {given.ranks} ranks, {shape['num_hidden_layers']} layers, "
        f"vocabulary {VOCABULARY:,}: logits in float32 are {logits:.0f} MiB a rank."
    )
    publish(found, f"{about}\n\n{table(columns, rows)}", given.write)


if __name__ == "__main__":
    main()
