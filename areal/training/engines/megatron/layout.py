"""Megatron's process groups, which are global in ``megatron.core.parallel_state`` and shared by the engines of a
run."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist

from areal.errors import UsageFault
from areal.installation import install_command
from areal.resources.backend import Part
from areal.training.engines.megatron.names import Architecture
from areal.training.ranks import Ranks

_SEED = 1  # of dropout


def check(model: Architecture, part: Part) -> None:
    """Raises UsageFault where ``part`` does not divide ``model`` evenly."""
    experts, parallel = part.expert, part.data * part.context * part.tensor
    uneven = [
        (model.heads % part.tensor, f"{model.heads} attention heads over t{part.tensor}"),
        (model.groups % part.tensor, f"{model.groups} key and value heads over t{part.tensor}"),
        (model.feed_forward % part.tensor, f"a feed-forward width of {model.feed_forward} over t{part.tensor}"),
        (model.layers % part.pipeline, f"{model.layers} layers over p{part.pipeline}"),
    ]
    if model.is_sparse:
        tensor = part.expert_tensor
        uneven += [
            (model.experts % experts, f"{model.experts} experts over e{experts}"),
            (parallel % (experts * tensor), f"{parallel} ranks of a stage over e{experts} of t{tensor}"),
            (model.expert_feed_forward % tensor, f"an expert's width of {model.expert_feed_forward} over t{tensor}"),
        ]
    elif experts > 1:
        raise UsageFault(f"{part}: the model has no experts to share out", hint="leave e out of the backend")
    for rest, what in uneven:
        if rest:
            raise UsageFault(f"{part}: megatron cannot share {what} evenly")


def join_groups(ranks: Ranks, part: Part) -> Any:
    """This rank's groups, created by the first engine of a run. Raises UsageFault without megatron-core or a GPU, and
    for a layout that differs from the first engine's."""
    state = _parallel_state()
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise UsageFault(
            f"megatron computes on GPUs, and torch finds none: {error}", hint="backend=fsdp:d1 runs on CPUs too"
        ) from error
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("nccl" if ranks.device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    sizes = {
        "tensor_model_parallel_size": part.tensor,
        "pipeline_model_parallel_size": part.pipeline,
        "context_parallel_size": part.context,
        "expert_model_parallel_size": part.expert,
        "expert_tensor_parallel_size": part.expert_tensor,
    }
    if not state.model_parallel_is_initialized():
        state.initialize_model_parallel(**sizes)
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(_SEED)
    actual = (
        state.get_tensor_model_parallel_world_size(),
        state.get_pipeline_model_parallel_world_size(),
        state.get_context_parallel_world_size(),
        state.get_expert_model_parallel_world_size(),
        state.get_expert_tensor_parallel_world_size(),
    )
    if actual != tuple(sizes.values()):
        raise UsageFault(f"{part}: another megatron model of this run is cut differently: all share one layout")
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def _parallel_state() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Apex and Transformer Engine, which are not needed
        try:
            from megatron.core import parallel_state
        except ImportError as error:
            raise UsageFault(
                "the megatron engine needs the package megatron-core", hint=install_command("megatron")
            ) from error
    logging.getLogger("megatron").setLevel(logging.WARNING)
    return parallel_state
