"""Tensor parallelism of Hugging Face's Llama, Qwen2 and Qwen3 by torch's ``parallelize_module``.

Attention heads and MLP columns are sharded over the ranks of a tensor mesh, the embedding and the head over the
vocabulary; between layers every rank has the whole hidden states. Norms are replicated DTensors, so that all parameters
have one mesh and one gradient norm. The norms of queries and keys see other heads on each rank, so their gradients are
summed over ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from areal.errors import UsageFault

ARCHITECTURES = ("llama", "qwen2", "qwen3")


class _Replicated(ParallelStyle):
    """The module computes the same on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
            return tuple(DTensor.from_local(each, mesh, [Replicate()], run_check=False) for each in inputs)

        def give(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, None, take, give)  # type: ignore[arg-type]


def apply_tensor_parallelism(model: Any, mesh: DeviceMesh) -> None:
    """Shard the model in place, before FSDP. Raises UsageFault for an unsupported model."""
    size, about = mesh.size(), model.config
    if about.model_type not in ARCHITECTURES:
        raise UsageFault(
            f"fsdp has no tensor parallelism for {about.model_type}: only for {', '.join(ARCHITECTURES)}",
            hint="a layout without t, for example fsdp:d4",
        )
    if hasattr(model, "get_base_model"):
        raise UsageFault(f"adapters (use_lora) are not cut over {size} tensor-parallel ranks", hint="use_lora: false")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (count := getattr(about, name)) % size:
            raise UsageFault(
                f"the model's {name} {count} cannot be cut over {size} tensor-parallel ranks",
                hint=f"t has to divide {count}",
            )
    layer: dict[str, ParallelStyle] = {
        "input_layernorm": _Replicated(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **{f"self_attn.{name}_norm": SequenceParallel(sequence_dim=2, use_local_output=True) for name in "qk"},
        "self_attn.o_proj": RowwiseParallel(),
        "post_attention_layernorm": _Replicated(),
        "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "mlp.down_proj": RowwiseParallel(),
    }
    if about.model_type != "qwen3":
        layer = {name: style for name, style in layer.items() if name[-6:] not in ("q_norm", "k_norm")}
    for each in model.model.layers:
        parallelize_module(each, mesh, layer)
    tied = getattr(model, "lm_head", None) is not None and model.lm_head.weight is model.model.embed_tokens.weight
    parallelize_module(
        model.model, mesh, {"embed_tokens": RowwiseParallel(input_layouts=Replicate()), "norm": _Replicated()}
    )
    if hasattr(model, "score"):
        parallelize_module(model, mesh, {"score": _Replicated()})
    elif tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    else:
        model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight, mesh, [Shard(0)]))
