"""AdamW with its schedule, and the gradient's norm over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from areal.errors import UsageFault
from areal.training.schedules import learning_rate_factor

if TYPE_CHECKING:
    from areal.api.cli_args import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Vectors (norms, biases) are not decayed."""
    if config.type not in ("adam", "adamw", "sgd"):
        raise UsageFault(f"unknown optimizer {config.type!r}: it is one of adam, adamw, sgd")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.type == "sgd":
        return torch.optim.SGD(groups, lr=config.lr)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=_can_be_fused(trained))


def set_learning_rate(optimizer: torch.optim.Optimizer, config: OptimizerConfig, step: int, total_steps: int) -> float:
    """For the update number ``step``, from 0."""
    factor = learning_rate_factor(
        step,
        total_steps=total_steps,
        warmup_proportion=config.warmup_steps_proportion,
        shape=config.lr_scheduler_type,
        min_ratio=config.min_lr_ratio,
    )
    for group in optimizer.param_groups:
        group["lr"] = config.lr * factor
    return config.lr * factor


def clipped_norm(optimizer: torch.optim.Optimizer, most: float) -> Tensor:
    """Scale the gradients to a norm of at most ``most``; the norm as it was, over all ranks, as a scalar tensor."""
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(trained, most if most > 0 else float("inf"))
    full = getattr(norm, "full_tensor", None)
    whole: Tensor = full() if full is not None else norm
    return whole


def _can_be_fused(parameters: list[nn.Parameter]) -> bool:
    return all(parameter.is_floating_point() for parameter in parameters)
