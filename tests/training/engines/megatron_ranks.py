"""What the ranks of ``megatron`` layouts do, started by torchrun, on CPUs: outputs, a gradient, updates, checkpoints.

``python megatron_ranks.py OUT LAYOUT=MODEL ...``; the first rank writes ``OUT/LAYOUT.pt``.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from areal.api.cli_args import MicroBatchSpec, OptimizerConfig
from areal.api.engine_api import CheckpointUnreadable, NonFinite
from areal.resources.backend import parse_backend
from areal.training.__main__ import run_and_exit
from areal.training.batches import select
from areal.training.checkpoints import Checkpoints
from areal.training.engines import open_engine
from areal.training.ranks import Ranks, join_ranks
from tests.training.engines.models import batch, config, sft, tokens

GRADIENT = OptimizerConfig(type="sgd", lr=1.0, weight_decay=0.0, gradient_clipping=0.0, warmup_steps_proportion=0.0)
"""After an update the weights have changed by their gradient."""
FEW = MicroBatchSpec(max_tokens_per_mb=40)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_tensors()}


def seen(layout: str, model: Path, ranks: Ranks, out: Path, others: list[str]) -> dict[str, Any]:
    """``others``: layouts whose checkpoints, of the same model, are there."""
    whole = batch()
    share = [[0, 1, 2], [3, 4, 5, 6, 7]][ranks.data_rank] if ranks.data_size == 2 else list(range(8))
    mine = select(whole, share)

    def engine(path: Path = model, **changes: Any) -> Any:
        return open_engine(config(path, **{"mb_spec": FEW, "backend": layout} | changes), ranks, total_steps=4)

    probed = engine(optimizer=GRADIENT)
    before = weights(probed)
    found: dict[str, Any] = {"weights": before, "eval": probed.eval_batch(mine, sft, tokens)}
    found["next"] = probed.next_token_logprobs(torch.tensor([3, 1, 4, 1, 5]))
    logprobs = probed.forward(mine, lambda outputs, micro: outputs.logprobs)
    found["logprobs"] = dict(zip(share, logprobs, strict=True))
    if ranks.data_size == 2:
        found["logprobs"] = {row: each for part in ranks.data_gather(found["logprobs"]) for row, each in part.items()}
    update = probed.train_batch(mine, sft, tokens)
    found |= {"loss": update.loss, "norm": update.grad_norm}
    found["gradient"] = {name: before[name] - tensor for name, tensor in weights(probed).items()}

    probed.save_checkpoint(out / f"sgd-{file_name(layout)}")
    engine(optimizer=GRADIENT).load_checkpoint(out / f"sgd-{file_name(layout)}")

    trained = engine()
    found["losses"] = [trained.train_batch(mine, sft, tokens).loss for _ in range(2)]
    trained.version = 7
    name = file_name(layout)
    with Checkpoints(out / name).writing(2, ranks) as (folder, state):
        trained.save_checkpoint(folder / "actor")
        state["step"] = 2
    drawn = torch.rand(2)
    trained.save_model(out / f"model-{name}")
    found["trained"] = weights(trained)
    found["third"] = trained.train_batch(mine, sft, tokens).loss
    found["fourth"] = trained.eval_batch(mine, sft, tokens)
    kept = weights(trained)
    try:
        trained.train_batch(mine, lambda outputs, micro: sft(outputs, micro) * torch.nan, tokens)
    except NonFinite:
        found["refused"] = all(torch.equal(tensor, kept[name]) for name, tensor in weights(trained).items())
    resumed = engine()
    resumed.load_checkpoint(out / name / "step_2" / "actor")
    found["resumed"] = (resumed.steps, resumed.version, torch.equal(torch.rand(2), drawn))
    found["resumed third"] = resumed.train_batch(mine, sft, tokens).loss
    found["resumed fourth"] = resumed.eval_batch(mine, sft, tokens)
    found["others' third"] = {}
    for other in others:
        try:
            resumed.load_checkpoint(out / file_name(other) / "step_2" / "actor")
        except CheckpointUnreadable as error:
            found["others' third"][other] = error.message
            continue
        third = resumed.train_batch(mine, sft, tokens).loss
        found["others' third"][other] = third, resumed.eval_batch(mine, sft, tokens)
    return found


def file_name(layout: str) -> str:
    return layout.partition(":")[2].translate(str.maketrans("(|:)", "____"))


def main() -> int:
    import tests.training.engines.megatron_on_cpu  # noqa: F401, I001 - first
    from megatron.core import parallel_state

    out, before = Path(sys.argv[1]), dict[str, list[str]]()
    with join_ranks(timeout_s=120) as ranks:
        for word in sys.argv[2:]:
            layout, _, model = word.partition("=")
            laid_out = replace(ranks, layout=parse_backend(layout).parts[0])
            found = seen(layout, Path(model), laid_out, out, before.setdefault(model, []))
            before[model].append(layout)
            if ranks.is_first:
                torch.save(found, out / f"{file_name(layout)}.pt")
            parallel_state.destroy_model_parallel()
    return 0


if __name__ == "__main__":
    run_and_exit(main)
