"""What ranks of a tensor-parallel layout do, started by torchrun: an update's gradients, two updates, a checkpoint and
a saved model; the first rank writes it down."""

import sys
from pathlib import Path
from typing import Any

import torch

from areal.api.cli_args import MicroBatchSpec
from areal.resources.backend import parse_backend
from areal.training.__main__ import run_and_exit
from areal.training.batches import lengths, select, split_rows
from areal.training.checkpoints import Checkpoints
from areal.training.engines.fsdp import FSDPEngine
from areal.training.ranks import join_ranks
from tests.training.engines.models import STILL, batch, config, policy_batch, policy_gradient, sft, tokens

model, out = (Path(argument) for argument in sys.argv[1:3])
layout = parse_backend(sys.argv[3], single=True).parts[0]


def main() -> int:
    with join_ranks(layout, timeout_s=60) as ranks:

        def mine(whole):
            return select(whole, split_rows(lengths(whole), ranks.data_size)[ranks.data_rank])

        critic = FSDPEngine(config(model, is_critic=True), ranks)
        found: dict[str, Any] = {"values": critic.forward(mine(batch()), lambda outputs, micro: outputs.values)}
        score = {name: tensor.clone() for name, tensor in critic.named_tensors()}["score.weight"]
        still = FSDPEngine(config(model, optimizer=STILL), ranks)
        found["gradients"] = policy_gradient(still, mine(policy_batch()), "token-mean")
        found["entropies"] = still.forward(batch(), lambda outputs, micro: outputs.entropies)
        found["next"] = still.next_token_logprobs(torch.tensor([3, 1, 4]))
        engine = FSDPEngine(config(model, mb_spec=MicroBatchSpec(max_tokens_per_mb=40)), ranks, total_steps=4)
        updates = [engine.train_batch(mine(batch()), sft, tokens) for _ in range(2)]
        found["updates"] = [(update.loss, update.grad_norm) for update in updates]
        with Checkpoints(out / "checkpoints").writing(2, ranks) as (folder, state):
            engine.save_checkpoint(folder / "actor")
            state["step"] = 2
        engine.save_model(out / "model")
        found["eval"] = engine.eval_batch(mine(batch(seed=1)), sft, tokens)
        others = FSDPEngine(config(model), ranks, total_steps=4)
        others.load_checkpoint(out / "checkpoints" / "step_2" / "actor")
        found["resumed"] = others.eval_batch(mine(batch(seed=1)), sft, tokens)
        if ranks.is_first:
            torch.save({**found, "score": score, "files": len(list(out.rglob("__*")))}, out / "found.pt")
    return 0


run_and_exit(main)
