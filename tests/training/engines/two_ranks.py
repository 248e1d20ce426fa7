"""What two ranks do, started by torchrun: an update, a checkpoint, gradients of a policy; the first rank writes it
down."""

import json
import sys
from pathlib import Path

import torch

from areal.api.cli_args import MicroBatchSpec
from areal.training.__main__ import run_and_exit
from areal.training.batches import lengths, select, split_rows
from areal.training.checkpoints import Checkpoints
from areal.training.engines.fsdp import FSDPEngine
from areal.training.ranks import join_ranks
from tests.training.engines.models import (
    AGGREGATIONS,
    STILL,
    batch,
    config,
    policy_batch,
    policy_gradient,
    sft,
    tokens,
)

model, out = (Path(argument) for argument in sys.argv[1:3])


def main() -> int:
    with join_ranks(timeout_s=60) as ranks:
        engine = FSDPEngine(config(model, mb_spec=MicroBatchSpec(max_tokens_per_mb=40)), ranks, total_steps=4)
        whole = batch()
        mine = select(whole, split_rows(lengths(whole), ranks.size)[ranks.rank])
        updates = [engine.train_batch(mine, sft, tokens) for _ in range(2)]
        loss = engine.eval_batch(mine, sft, tokens)
        with Checkpoints(out / "checkpoints").writing(2, ranks) as (folder, state):
            engine.save_checkpoint(folder / "actor")
            state["step"] = 2
        engine.save_model(out / "model")
        few_or_many = ([0, 1], [2, 3, 4, 5, 6, 7])[ranks.rank]
        gradients = {}
        for reduced in ("float32", "bfloat16"):
            spec = MicroBatchSpec(max_tokens_per_mb=20)
            still = FSDPEngine(config(model, mb_spec=spec, optimizer=STILL, grad_reduce_dtype=reduced), ranks)
            for mode in AGGREGATIONS if reduced == "float32" else AGGREGATIONS[:1]:
                gradients[mode, reduced] = policy_gradient(still, select(policy_batch(), few_or_many), mode)
        if ranks.is_first:
            torch.save(gradients, out / "gradients.pt")
            seen = {"norms": [u.grad_norm for u in updates], "losses": [u.loss for u in updates], "eval": loss}
            (out / "seen.json").write_text(json.dumps(seen))
    return 0


run_and_exit(main)
