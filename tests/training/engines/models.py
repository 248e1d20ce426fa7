"""Tiny models and batches, the same in every process that asks with the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from areal.api.cli_args import MicroBatchSpec, OptimizerConfig, PPOActorConfig, TrainEngineConfig
from areal.api.engine_api import TokenOutputs
from areal.training.algorithms.actor import ActorLoss
from areal.training.algorithms.losses import masked_mean, sft_loss
from areal.training.batches import Batch
from areal.training.engines.fsdp import FSDPEngine

VOCABULARY = 32


def save_model(folder: Path, *, kind: str = "llama", tied: bool = False, seed: int = 0) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **({"head_dim": 8} if kind == "qwen3" else {}),
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def config(path: Path, **changes: Any) -> TrainEngineConfig:
    given: dict[str, Any] = {
        "path": str(path),
        "dtype": "float32",
        "optimizer": OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0),
        "mb_spec": MicroBatchSpec(),
    }
    return TrainEngineConfig(**(given | changes))


def batch(count: int = 8, seed: int = 0) -> Batch:
    """Rows of 4 to 16 tokens; the first token of each is no target."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (count, 16), generator=generator)
    sizes = torch.randint(4, 17, (count, 1), generator=generator)
    mask = torch.arange(16) < sizes
    return {"input_ids": ids * mask, "attention_mask": mask, "loss_mask": mask & (torch.arange(16) > 0)}


def sft(outputs: TokenOutputs, micro: Batch) -> torch.Tensor:
    return masked_mean(sft_loss(outputs.logprobs, micro["loss_mask"]), micro["loss_mask"])


def tokens(micro: Batch) -> torch.Tensor:
    return micro["loss_mask"].sum()


AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
STILL = OptimizerConfig(lr=0.0, weight_decay=0.0, gradient_clipping=1e9)
"""Updates that leave the weights as they are: their gradients are all of the same model."""


def policy_batch() -> Batch:
    """Rows of an update of a policy, of which the second is left out."""
    rows, generator = batch(), torch.Generator().manual_seed(1)
    shape = rows["input_ids"].shape
    rows["loss_mask"][1] = False
    return rows | {
        "versions": torch.where(rows["loss_mask"], 0, -1),
        "logprobs": torch.randn(shape, generator=generator) * 0.1 - 3.4,
        "advantages": torch.randn(shape, generator=generator),
    }


def policy_gradient(engine: FSDPEngine, rows: Batch, mode: Any) -> dict[str, torch.Tensor]:
    """Of every parameter, whole, after an update on this rank's ``rows``."""
    loss = ActorLoss(PPOActorConfig(loss_agg_mode=mode, loss_scale_factor=7))
    engine.train_batch(rows, loss, loss.weight)
    found = {name: parameter.grad for name, parameter in engine.model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def save_family(folder: Path, family: str, *, tied: bool = False) -> Path:
    """A tiny model of each that has a name map; sizes are all different, so that none is taken for another."""
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    if family != "Qwen2":
        shape["head_dim"] = 16
    if family == "Qwen3Moe":
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    torch.manual_seed(0)
    about = getattr(transformers, f"{family}Config")(**shape)
    model = getattr(transformers, f"{family}ForCausalLM")(about)
    for name, parameter in model.named_parameters():  # norms and biases are made equal: nothing would tell them apart
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(folder)
    return folder
