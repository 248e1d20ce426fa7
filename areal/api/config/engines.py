"""Settings of the train engines, ``actor.fsdp`` and ``actor.megatron``, under AReaL's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from areal.api.config.fields import COUNT, NoEffect, NotSupported, check_numbers


@dataclass
class FSDPWrapPolicy:
    transformer_layer_cls_to_wrap: list[str] | None = None


@dataclass
class FSDPEngineConfig:
    wrap_policy: Annotated[FSDPWrapPolicy | None, NoEffect("each decoder layer is sharded on its own")] = None
    offload_params: Annotated[bool, NotSupported("parameters stay on the device")] = False
    per_layer_optim_step: Annotated[bool, NotSupported("the optimizer's states stay on the device")] = False
    optim_step_prefetch_layers: Annotated[int, NoEffect("it is of per_layer_optim_step")] = 1
    shard_vision_across_sp: Annotated[bool, NotSupported("a vision-language model is trained on one rank")] = False
    memory_efficient_load: Annotated[bool, NoEffect("weights are always loaded shard by shard")] = False
    ulysses_sp_size: Annotated[int, NotSupported("rows are not split over GPUs: set mb_spec")] = 1


_NO_FP8 = "training in FP8 is not there: dtype is bfloat16 or float32"


@dataclass
class MegatronDDPConfig:
    """Megatron's distributed data parallel. ``overlap_grad_reduce``: reduce gradients during the backward pass."""

    overlap_grad_reduce: bool = False
    use_distributed_optimizer: Annotated[bool, NotSupported("data-parallel ranks share Adam's states")] = True
    grad_reduce_in_fp32: Annotated[bool, NoEffect("set grad_reduce_dtype")] = False
    overlap_param_gather: Annotated[bool, NotSupported("weights are gathered when the optimizer has stepped")] = False
    align_param_gather: Annotated[bool, NoEffect("it is of overlap_param_gather")] = False
    average_in_collective: Annotated[bool, NoEffect("the loss is a mean over all ranks already")] = False
    bucket_size: Annotated[int | None, NoEffect("Megatron's default applies")] = None
    check_for_nan_in_grad: Annotated[bool, NoEffect("a loss or gradient that is not finite always stops a run")] = False
    fp8_param_gather: Annotated[bool, NotSupported(_NO_FP8)] = False


_OWN_WEIGHTS = NoEffect("the engine converts weights itself")


@dataclass
class MegatronEngineConfig:
    """Settings of ``backend: megatron:...``. The ``recompute_`` fields configure ``gradient_checkpointing``:
    ``uniform`` recomputes groups of ``recompute_num_layers`` layers, ``block`` that number in each pipeline stage."""

    ddp: MegatronDDPConfig = field(default_factory=MegatronDDPConfig)
    recompute_granularity: Literal["full"] | None = None  # full is what gradient_checkpointing does
    recompute_method: Literal["uniform", "block"] = "uniform"
    recompute_num_layers: Annotated[int, COUNT] = 1
    virtual_pipeline_parallel_size: Annotated[int, NotSupported("stages are not interleaved")] = 1
    overlap_param_gather_with_optimizer_step: Annotated[bool, NotSupported("the optimizer steps by itself")] = False
    use_precision_aware_optimizer: Annotated[bool, NotSupported("moments are float32")] = False
    async_save: Annotated[bool, NotSupported("a checkpoint is whole before the next step begins")] = False
    bridge_type: Annotated[str, _OWN_WEIGHTS] = "mbridge"
    use_mbridge_save: Annotated[bool, _OWN_WEIGHTS] = False
    fp8_config: Annotated[Any, NotSupported(_NO_FP8)] = None
    wrap_with_ddp: Annotated[bool, NotSupported("gradients of data-parallel ranks are always reduced")] = True
    use_torch_fsdp2: Annotated[bool, NotSupported("actor.backend fsdp:dN is FSDP2")] = False
    use_custom_fsdp: Annotated[bool, NotSupported("actor.backend fsdp:dN is FSDP2")] = False
    use_deterministic_algorithms: bool = False  # torch's, where there is one; others warn
    use_checkpoint_opt_param_scheduler: Annotated[bool, NoEffect("a run resumes its own schedule")] = True
    distribute_saved_activations: Annotated[bool | None, NotSupported("each rank keeps its activations")] = None
    recompute_modules: Annotated[list[str] | None, NotSupported("recompute_granularity full is of whole layers")] = None
    main_grads_dtype: Annotated[str, NotSupported("set grad_reduce_dtype")] = "float32"
    main_params_dtype: Annotated[str, NotSupported("master weights are float32")] = "float32"
    exp_avg_dtype: Annotated[str, NotSupported("moments are float32")] = "float32"
    exp_avg_sq_dtype: Annotated[str, NotSupported("moments are float32")] = "float32"
    moe_router_dtype: Annotated[str | None, NotSupported("the router computes in float32")] = "fp32"
    moe_token_dispatcher_type: Annotated[str, NotSupported("tokens travel by alltoall")] = "alltoall"
    moe_enable_deepep: Annotated[bool, NotSupported("tokens travel by alltoall")] = False
    moe_permute_fusion: Annotated[bool, NoEffect("fused kernels need Transformer Engine")] = False
    moe_router_bias_update_rate: Annotated[float, NotSupported("the router has no bias that is balanced")] = 0.0
    cross_entropy_loss_fusion: Annotated[bool, NoEffect("logits are made in parts")] = False
    enable_chunked_logits: Annotated[bool, NoEffect("logits are made in parts")] = False
    lm_head_loss_chunk_size: Annotated[int, NoEffect("logits are made in parts")] = 0
    enable_fp32_lm_head: Annotated[bool, NoEffect("log-probabilities are float32")] = False
    moe_shared_expert_overlap: Annotated[bool, NoEffect("shared experts follow the routed ones")] = False

    def __post_init__(self) -> None:
        check_numbers(self)
