"""Megatron's distributed optimizer: each data-parallel rank reduces a share of the gradients and keeps its moments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from areal.errors import UsageFault
from areal.training.engines import configured_settings
from areal.training.engines.huggingface import dtype_by_name

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig


def has_moments(config: TrainEngineConfig) -> bool:
    """Return whether the optimizer is Adam, whose moments data-parallel ranks share."""
    return config.optimizer is not None and config.optimizer.type != "sgd"


def ddp_config(config: TrainEngineConfig) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.grad_reduce_dtype == "float32",
        overlap_grad_reduce=config.megatron.ddp.overlap_grad_reduce,
        use_distributed_optimizer=has_moments(config),
    )


def wrap(built: Any, config: TrainEngineConfig, groups: Any) -> tuple[Any, Any]:
    """Return the model in DistributedDataParallel, and its optimizer. Raises UsageFault."""
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

    given = config.optimizer
    assert given is not None
    if given.type not in ("adam", "adamw", "sgd"):
        raise UsageFault(f"unknown optimizer {given.type!r}: it is one of adam, adamw, sgd")
    dtype, is_adam = dtype_by_name(config.dtype), has_moments(config)
    model = DistributedDataParallel(built.config, ddp_config(config), built, pg_collection=groups)
    model.broadcast_params()
    settings = OptimizerConfig(
        optimizer="adam" if is_adam else "sgd",
        lr=given.lr,
        weight_decay=given.weight_decay,
        adam_beta1=given.beta1,
        adam_beta2=given.beta2,
        adam_eps=given.eps,
        sgd_momentum=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        clip_grad=given.gradient_clipping,
        use_distributed_optimizer=is_adam,
    )
    overrides = get_standard_config_overrides(settings)  # vectors are not decayed
    optimizer = get_megatron_optimizer(settings, [model], overrides)
    for part in sub_optimizers(optimizer) if is_adam else ():
        _make_moments(part)
    built.config.no_sync_func = model.no_sync
    built.config.finalize_model_grads_func = finalize_model_grads
    return model, optimizer


def sub_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers of the dense parameters and of the experts."""
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in every if not part.is_stub_optimizer]


def _make_moments(part: Any) -> None:
    """Initialize the moments before the first step, for checkpoints that are saved or loaded before it."""
    part.init_state_fn(part.optimizer)
    if not isinstance(part.optimizer, torch.optim.AdamW):
        return
    for state in part.optimizer.state.values():
        state["step"] = torch.tensor(0.0)
    put = part._set_main_param_and_optimizer_states

    def put_but_step(parameter: Any, tensors: dict[str, object]) -> None:
        # megatron-core 0.16 does not read torch's step from a checkpoint, but expects it here.
        put(parameter, {**part._get_main_param_and_optimizer_states(parameter), **tensors})

    part._set_main_param_and_optimizer_states = put_but_step


def load_states(optimizer: Any, state: Any) -> None:
    """Load into initialized moments. megatron-core loads one step tensor for all parameters, and each would increment
    it."""
    with configured_settings([part.optimizer for part in sub_optimizers(optimizer)]):
        optimizer.load_state_dict(state)
    for part in sub_optimizers(optimizer):
        for each in part.optimizer.state.values():
            if "step" in each:
                each["step"] = each["step"].clone()


@torch.no_grad()
def clip_gradients(optimizer: Any, max_norm: float, norm: float) -> None:
    """Scale gradients of norm ``norm`` to at most ``max_norm`` (0: no limit)."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    for part in sub_optimizers(optimizer) if max_norm > 0 else ():
        clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm, norm)
