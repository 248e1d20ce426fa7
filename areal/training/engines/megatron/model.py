"""Megatron's process groups, and its decoder with this rank's layers, heads and experts and Hugging Face's weights.

The groups are global in ``megatron.core.parallel_state`` and shared by the engines of a run.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal.errors import NotFound, UsageFault
from areal.installation import install_command
from areal.resources.backend import Part
from areal.training.engines.huggingface import dtype_by_name
from areal.training.engines.megatron.names import Architecture, Weight, join, shard, weights
from areal.training.ranks import Ranks

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"local_experts\.(\d+)\.")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_SEED = 1  # for dropout


def check(model: Architecture, part: Part) -> None:
    """Raise UsageFault if ``part`` does not divide ``model`` evenly."""
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
        raise UsageFault(f"{part}: the model has no experts to distribute", hint="leave e out of the backend")
    for rest, what in uneven:
        if rest:
            raise UsageFault(f"{part}: megatron cannot share {what} evenly")


def join_groups(ranks: Ranks, part: Part) -> Any:
    """Return this rank's groups, created by the first engine of a run. Raises UsageFault without megatron-core or a
    GPU, and for a layout that differs from the first engine's."""
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
    sizes = _sizes(part)
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
        raise UsageFault(f"{part}: another megatron model of this run has a different layout; all must have the same")
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def _sizes(part: Part) -> dict[str, int]:
    return {
        "tensor_model_parallel_size": part.tensor,
        "pipeline_model_parallel_size": part.pipeline,
        "context_parallel_size": part.context,
        "expert_model_parallel_size": part.expert,
        "expert_tensor_parallel_size": part.expert_tensor,
    }


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


def padded_vocabulary(model: Architecture, part: Part) -> int:
    return -(-model.vocabulary // part.tensor) * part.tensor


def build(model: Architecture, part: Part, config: TrainEngineConfig, groups: Any) -> Any:
    """Return this rank's part of the decoder, on its device. The parameters are not initialized."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from areal.training.engines.megatron.modules import Decoder, RMSNorm

    settings = transformer_config(model, part, config)
    stage, layers = groups.pp.rank(), model.layers // part.pipeline
    specs = [_layer(model, number) for number in range(stage * layers, (stage + 1) * layers)]
    scaled = model.rope.get("rope_type") == "llama3"
    built = Decoder(
        config=settings,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm),
        vocab_size=padded_vocabulary(model, part),
        max_sequence_length=0,  # only for learned positions
        pre_process=stage == 0,
        post_process=stage == part.pipeline - 1,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope",
        rotary_base=model.rope["rope_theta"],
        rope_scaling=scaled,
        rope_scaling_factor=_rope_factor(model.rope) if scaled else 8.0,
        pg_collection=groups,
    )
    return built.cuda()


def _rope_factor(rope: Mapping[str, Any]) -> float:
    for name, value in _LLAMA3.items():
        if rope[name] != value:
            raise UsageFault(f"megatron scales positions with {name} {value:g}, and the model has {rope[name]}")
    return float(rope["factor"])


def transformer_config(model: Architecture, part: Part, config: TrainEngineConfig) -> Any:
    from megatron.core.transformer import TransformerConfig

    dtype = dtype_by_name(config.dtype)
    given: dict[str, object] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_query_groups": model.groups,
        "kv_channels": model.head_size,
        "ffn_hidden_size": model.feed_forward,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": model.qkv_bias,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.epsilon,
        "qk_layernorm": model.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0 if config.disable_dropout else model.dropout,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        **_sizes(part),
        "sequence_parallel": part.tensor > 1,
        "variable_seq_lengths": True,  # micro-batches have shapes of their own
        "moe_token_dispatcher_type": "alltoall",  # the only one that supports variable shapes
        "use_cpu_initialization": True,
        "perform_initialization": False,
        "gradient_accumulation_fusion": False,  # Apex's
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
    }
    if config.gradient_checkpointing:
        given |= {
            "recompute_granularity": "full",
            "recompute_method": config.megatron.recompute_method,
            "recompute_num_layers": config.megatron.recompute_num_layers,
        }
    if model.is_sparse:
        given |= {
            "num_moe_experts": model.experts,
            "moe_layer_freq": [int(each) for each in model.sparse],
            "moe_router_topk": model.experts_a_token,
            "moe_ffn_hidden_size": model.expert_feed_forward,
            "moe_router_pre_softmax": not model.normalize_experts,
            "moe_router_load_balancing_type": "none",  # the trainer has no auxiliary loss
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
        }
    return TransformerConfig(**given)


def _layer(model: Architecture, number: int) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from areal.training.engines.megatron.modules import Attention, ExpertRouter, RMSNorm

    experts = model.experts if model.sparse and model.sparse[number] else None
    spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=model.qk_norm, normalization="RMSNorm")
    parts, attention = spec.submodules, spec.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention.core_attention = Attention
    if experts is not None:
        parts.mlp.submodules.router = ExpertRouter
    if model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def local_names(model: Architecture, part: Part, groups: Any) -> Callable[[str], str]:
    """Map this rank's name of a parameter to its name in the whole model."""
    first_layer = groups.pp.rank() * (model.layers // part.pipeline)
    first_expert = groups.ep.rank() * (model.experts // part.expert)

    def of_whole(name: str) -> str:
        name = _LAYER.sub(lambda found: f"decoder.layers.{int(found[1]) + first_layer}.", name)
        return _EXPERT.sub(lambda found: f"local_experts.{int(found[1]) + first_expert}.", name)

    return of_whole


def parameters(built: nn.Module, model: Architecture, part: Part, groups: Any) -> dict[str, Tensor]:
    """Return this rank's parameters by their names in the whole model."""
    of_whole = local_names(model, part, groups)
    return {of_whole(name): parameter for name, parameter in built.named_parameters()}


def tensor_group(weight: Weight, groups: Any) -> Any:
    return groups.tp if weight.expert is None else groups.expt_tp


@torch.no_grad()
def load(mine: Mapping[str, Tensor], model: Architecture, groups: Any, read: Callable[[str], Tensor]) -> None:
    """Set the parameters ``mine`` from the Hugging Face model's tensors, by name from ``read``."""
    by_name = {weight.name: weight for weight in weights(model)}
    if model.tied:
        with suppress(NotFound):
            if not torch.equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
                raise UsageFault(
                    "config.json says tie_word_embeddings, and the folder has another lm_head.weight",
                    hint="tie_word_embeddings: false in config.json, or delete the tensor",
                )
    for name, parameter in mine.items():
        weight = by_name[name]
        whole = join(weight, [read(hf_name) for hf_name in weight.hf_names])
        group = tensor_group(weight, groups)
        parameter.tensor_model_parallel = weight.shard_dim is not None  # type: ignore[attr-defined]  # for norms
        parameter.copy_(shard(weight, whole, group.rank(), group.size()))


def reader(path: Path, about: Any, stack: ExitStack, *, from_scratch: bool) -> Callable[[str], Tensor]:
    """Read tensors of the model folder ``path``, or of a new model, by name. Raises NotFound."""
    from safetensors import safe_open

    if from_scratch:
        from transformers import AutoModelForCausalLM

        # Every rank makes the same model, because torch's seed is the same.
        path = Path(stack.enter_context(TemporaryDirectory(prefix="areal-model-")))
        model = AutoModelForCausalLM.from_config(about, dtype=torch.float32, trust_remote_code=False)  # type: ignore[no-untyped-call]
        model.save_pretrained(path)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise NotFound(
            f"the model folder {path} has no weights (*.safetensors)", hint="init_from_scratch: true makes new ones"
        )
    opened = [stack.enter_context(safe_open(file, "pt")) for file in files]
    places = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - no mapping

    def read(name: str) -> Tensor:
        if name not in places:
            raise NotFound(f"the weights in {path} lack {name}")
        return places[name].get_tensor(name)

    return read
