"""Prepares a Hugging Face model for training: dtype, adapters, activation checkpointing, sharding, optimizer."""

from __future__ import annotations

import errno
import inspect
import logging
import math
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
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

from areal.dataset.vision import VISION_MODELS
from areal.errors import NotFound, UsageFault, did_you_mean
from areal.hub import model_folder
from areal.installation import install_command
from areal.training.batches import PackedRows
from areal.training.engines.vision import freeze_tower
from areal.training.ranks import Ranks
from areal.training.run_folder import copy_missing

if TYPE_CHECKING:
    from areal.api.cli_args import OptimizerConfig, TrainEngineConfig


_log = logging.getLogger(__name__)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_STATE_BYTES = 16  # per parameter: weight, gradient and two moments in float32
PACKED = "areal_packed"
_ROUNDING = 2.0
_SAVED_AS: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()
"""By model: the names in a checkpoint of parameters that are saved as they are. Each step asks for all of them."""
ARCHITECTURES = ("llama", "qwen2", "qwen3")


def load_model(config: TrainEngineConfig, ranks: Ranks) -> nn.Module:
    """Load the unsharded model in the dtype of its master weights (``optimizer_dtype``) onto the rank's device."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    path = _model_path(config.path)
    about = _load_config(AutoConfig, path)
    loader: Any = AutoModelForTokenClassification if config.is_critic else AutoModelForCausalLM
    if about.model_type in VISION_MODELS and not config.is_critic:
        if config.use_lora:
            raise UsageFault(f"use_lora: adapters of vision-language models ({about.model_type}) are not supported")
        loader = transformers.AutoModelForImageTextToText
    if type(about) not in loader._model_mapping:
        raise UsageFault(
            f"{path} cannot be trained: transformers has no {loader.__name__} of the model type {about.model_type}",
            hint=f"vision-language models are trained by fsdp, as policies: {', '.join(VISION_MODELS)}",
        )
    if config.is_critic:
        about.num_labels = 1
        if getattr(about, "classifier_dropout", None) is None:  # else transformers puts dropout of 0.1 before the head
            about.classifier_dropout = 0.0
    settings = _attention_arguments(config.attn_impl)
    dtype = dtype_by_name(config.optimizer_dtype)
    if config.init_from_scratch:
        with torch.random.fork_rng():  # the actor's initial reference is made from the same random numbers
            torch.manual_seed(torch.initial_seed())
            model = loader.from_config(about, dtype=dtype, trust_remote_code=False, **settings)
    else:
        folder = Path(path).expanduser()
        if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
            raise NotFound(
                f"the model folder {path} has no weights (*.safetensors)", hint="init_from_scratch: true makes new ones"
            )
        loaded: Any = loader.from_pretrained(
            path, config=about, dtype=dtype, output_loading_info=True, trust_remote_code=False, **settings
        )
        model, read = loaded
        # transformers initializes missing weights at random. Only a critic's head may be new.
        base = f"{model.base_model_prefix}."
        for name in sorted(read["missing_keys"]):
            if not config.is_critic or name.startswith(base):
                raise NotFound(f"the weights in {path} lack {name}")
    if config.freeze_vision_tower:
        freeze_tower(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5 deprecates names that peft still uses
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.use_lora:
            model = _with_adapters(model, config)
    return model.to(ranks.device)


def set_training(model: nn.Module, config: TrainEngineConfig) -> None:
    """Set training mode; with ``disable_dropout`` the outputs are those of evaluation mode.

    Modules checkpoint their activations in training mode only, so these modules stay in it, without their children.
    Dropout or router noise that they apply themselves is a float attribute, which is set to 0.
    """
    model.train(not config.disable_dropout)
    for module in model.modules() if config.disable_dropout else ():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in vars(module).items():
                if isinstance(value, float) and ("drop" in name or "jitter" in name):
                    setattr(module, name, 0.0)


def shard_model(model: nn.Module, config: TrainEngineConfig, ranks: Ranks) -> nn.Module:
    """Shard the parameters over tensor-parallel, then data-parallel ranks, one FSDP unit for each decoder layer. A
    single rank keeps the whole model. Raises UsageFault for an unsupported layout."""
    layout = ranks.layout
    if layout.pipeline * layout.context * layout.expert > 1:
        raise UsageFault(f"fsdp has data and tensor parallelism only, and the layout is {layout}", hint="megatron")
    if ranks.group is None:
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    parameters = sum(parameter.numel() for parameter in model.parameters())
    copies = copies_of_shards(ranks, parameters * (_STATE_BYTES if config.optimizer else 4), _memory(ranks))
    sizes = (copies, ranks.data_size // copies, layout.tensor)
    meshes = init_device_mesh(ranks.device.type, sizes, mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    if layout.tensor > 1:
        apply_tensor_parallelism(model, meshes["tp"])
    mesh = meshes["dp_replicate", "dp_shard"] if copies > 1 else meshes["dp_shard"]
    policy = MixedPrecisionPolicy(
        param_dtype=dtype_by_name(config.dtype),
        reduce_dtype=dtype_by_name(config.grad_reduce_dtype),
        cast_forward_inputs=False,
    )
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def copies_of_shards(ranks: Ranks, state: int, memory: int) -> int:
    """Return the number of replicas for hybrid sharding (HSDP): 1, or one on each node, so that only gradients are sent
    between nodes, where links are slower. Each node has one if a rank's part of ``state`` bytes then takes at most a
    third of its ``memory``."""
    within, rest = divmod(ranks.data_size, ranks.nodes)
    fits = not rest and state // ranks.layout.tensor <= within * memory // 3
    return ranks.nodes if fits else 1


def _memory(ranks: Ranks) -> int:
    """Return the memory of a rank in bytes, the minimum over all ranks."""
    if ranks.device.type == "cuda":
        local = torch.cuda.get_device_properties(ranks.device).total_memory
    else:
        local = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * ranks.nodes // ranks.size
    return -ranks.all_max(-local)


def base_model(model: nn.Module) -> nn.Module:
    """Return the Hugging Face model without LoRA adapters."""
    get_base: Any = getattr(model, "get_base_model", None)
    return model if get_base is None else get_base()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the members of the longest ``nn.ModuleList``."""
    stacks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(stacks, key=len, default=[])


def _attention_arguments(asked: str) -> dict[str, object]:
    """Return the ``attn_implementation`` argument. Without flash-attn installed the model's default is used: its
    results are the same. Raises UsageFault for an unknown name."""
    from transformers import AttentionInterface
    from transformers.utils import is_flash_attn_2_available  # type: ignore[attr-defined]

    if not asked:
        return {}
    if asked == "flash_attention_2" and not is_flash_attn_2_available():
        _log.warning("attn_impl: flash_attention_2 is not installed here: the model's own choice is taken")
        return {}
    known = ["eager", *AttentionInterface().keys()]  # type: ignore[no-untyped-call]
    if asked not in known and "/" not in asked:  # a name with a slash is a kernel of the hub
        raise UsageFault(f"attn_impl {asked!r} is unknown{did_you_mean(asked, known)}", hint=", ".join(known))
    return {"attn_implementation": asked}


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **about: Any
) -> tuple[Tensor, None]:
    """Compute causal attention by transformers' ``sdpa``: queries, keys and values [B, heads, T, D] to [B, T, heads,
    D]. With ``packed`` rows [N, heads, W, D] to [N, W, heads, D]: each row of the batch attends to its prompt and its
    own tokens. Without a mask the output of a shared token, the same in all of its rows, is taken from one."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows: PackedRows | None = about.pop("packed", None)
    if rows is None or rows.mask is not None:
        mask = mask if rows is None else rows.mask
        return sdpa_attention_forward(module, query, key, value, mask, **about)
    places = rows.places.flatten()
    query, key, value = (
        each[0].index_select(1, places).view(each.shape[1], *rows.places.shape, -1).transpose(0, 1)
        for each in (query, key, value)
    )
    output, _ = sdpa_attention_forward(module, query, key, value, None, **about)
    return output.flatten(0, 1).index_select(0, rows.homes)[None], None


def prepare_packing(model: nn.Module) -> bool:
    """Set up the model for packed rows, and return whether it supports them: it needs full attention, ``position_ids``,
    and equal logits for two rows with a shared first token, packed and alone."""
    about: Any = model.config
    takes_positions = "position_ids" in inspect.signature(base_model(model).forward).parameters
    full = set(getattr(about, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    full = full and not getattr(about, "sliding_window", None)
    if not (takes_positions and full and about._attn_implementation == "sdpa"):
        return False
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)
    device = next(model.parameters()).device
    alone = torch.tensor([[0, 1, 1], [0, 0, 1]], device=device)
    rows = PackedRows(
        input_ids=torch.tensor([[0, 1, 1, 0, 1]]),
        positions=torch.tensor([[0, 1, 2, 1, 2]]),
        places=torch.tensor([[0, 1, 2], [0, 3, 4]]),
        homes=torch.tensor([0, 1, 2, 4, 5]),
    ).to(device)
    training = model.training
    model.eval()
    with torch.no_grad():
        wanted = model(input_ids=alone, use_cache=False).logits
        about._attn_implementation = PACKED
        try:
            packed = model(input_ids=rows.input_ids, position_ids=rows.positions, packed=rows, use_cache=False).logits
        except TypeError:  # its layers accept no further arguments
            packed = None
    model.train(training)
    error = None if packed is None else (rows.unpacked(packed) - wanted).abs().max() / wanted.std().clamp(min=1e-12)
    if error is None or not float(error) < _ROUNDING * torch.finfo(wanted.dtype).eps ** 0.5:
        about._attn_implementation = "sdpa"
        return False
    return True


def _with_adapters(model: nn.Module, config: TrainEngineConfig) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise UsageFault("LoRA needs the package peft", hint=install_command("train")) from error
    named = list(config.target_modules)
    adapters = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules="all-linear" if named == ["all-linear"] else named or LORA_TARGETS,
        lora_dropout=0.0,
        bias="none",
        task_type="TOKEN_CLS" if config.is_critic else "CAUSAL_LM",
    )
    if config.gradient_checkpointing:
        model.enable_input_require_grads()  # type: ignore[operator]
    try:
        adapted: nn.Module = get_peft_model(model, adapters)
    except ValueError as error:
        raise UsageFault(f"target_modules {named} do not fit {type(model).__name__}: {error}") from error
    tied = getattr(model.config, "tie_word_embeddings", False)
    for name, module in adapted.named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        if isinstance(module.base_layer, nn.Embedding) or (tied and name.endswith(".lm_head")):
            what = "embeddings" if isinstance(module.base_layer, nn.Embedding) else "a head that is the embeddings, too"
            raise UsageFault(
                f"target_modules {named}: adapters of {what} are not supported", hint="all-linear is every other layer"
            )
    return adapted


def _model_path(path: str) -> str:
    if not path:
        raise UsageFault("no model is configured for training", hint="actor.path=FOLDER, or a Hugging Face id")
    looks_local = path.startswith((".", "/", "~"))
    if looks_local and not Path(path).expanduser().is_dir():
        raise NotFound(f"there is no model folder {path}")
    return str(model_folder(path))


def _load_config(loader: Any, path: str) -> Any:
    try:
        return loader.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError) as error:  # neither a local model nor one that the hub serves
        raise NotFound(f"{path} is not a model folder: {str(error).splitlines()[0]}") from error


def dtype_by_name(name: str) -> torch.dtype:
    try:
        return DTYPES[name]
    except KeyError:
        raise UsageFault(f"unknown dtype {name!r}: it is one of {', '.join(DTYPES)}") from None


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of the trained parameters. Vectors (norms, biases) have no weight decay. Raises
    UsageFault."""
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
    betas, fused = (config.beta1, config.beta2), all(parameter.is_floating_point() for parameter in trained)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float, group: dist.ProcessGroup | None = None) -> Tensor:
    """Scale the gradients to a norm of at most ``max_norm`` (0: no limit). Returns the unclipped norm over all ranks,
    as a scalar tensor that is identical on every rank: replicated parameters would diverge otherwise."""
    trained = [each for part in optimizer.param_groups for each in part["params"] if each.grad is not None]
    parts: list[Tensor] = []
    copies: list[int] = []
    for each in trained:
        grad: Any = each.grad
        sharded = isinstance(grad, DTensor)
        parts.append(grad.to_local() if sharded else grad)
        sizes = zip(grad.device_mesh.shape, grad.placements, strict=True) if sharded else ()
        copies.append(math.prod(size for size, placement in sizes if placement.is_replicate()))
    squares = torch.stack([norm.float() for norm in torch._foreach_norm(parts)]).square()
    total = (squares / torch.tensor(copies, device=squares.device)).sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    torch.nn.utils.clip_grads_with_norm_(trained, max_norm if max_norm > 0 else float("inf"), norm)
    return norm


def checkpoint_tensors(model: Any, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a Hugging Face checkpoint for one parameter of ``model``: transformers 5 merges the experts
    of a mixture into one parameter, and checkpoints, which other engines read, have one matrix for each."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 parameters and checkpoint tensors are the same
        yield name, weight
        return
    names = _SAVED_AS.setdefault(model, {})
    if name in names:
        yield names[name], weight
        return
    parts = revert_weight_conversion(model, {name: weight})
    for saved, part in parts.items():
        if part is weight:
            names[name] = saved
        yield saved, part if len(parts) == 1 else part.clone()  # safetensors rejects tensors that share storage


def write_model(weights: dict[str, Tensor], configs: Sequence[Any], folder: Path, tokenizer: str) -> None:
    """Replace ``folder`` atomically by one for ``from_pretrained``. ``configs`` have a ``save_pretrained``. The
    tokenizer of the folder or hub id ``tokenizer`` is copied. Raises OSError."""
    partial = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _write_weights(weights, partial / "model.safetensors")
        for config in configs:
            config.save_pretrained(partial)
        if tokenizer:
            copy_missing(tokenizer, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # a partial folder may be what fills the disk
        raise
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _write_weights(weights: dict[str, Tensor], file: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(weights, file, {"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(file)) from error


class _Replicated(ParallelStyle):
    """The module computes the same on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def take(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
            return tuple(DTensor.from_local(each, mesh, [Replicate()], run_check=False) for each in inputs)

        def give(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, None, take, give)  # type: ignore[arg-type]


def apply_tensor_parallelism(model: Any, mesh: DeviceMesh) -> None:
    """Shard the model in place, before FSDP. Raises UsageFault for an unsupported model.

    Attention heads and MLP columns are sharded over the ranks of ``mesh``, the embedding and the head over the
    vocabulary; between layers every rank has the whole hidden states. Norms are replicated DTensors, so that all
    parameters have one mesh and one gradient norm. The norms of queries and keys see other heads on each rank, so their
    gradients are summed.
    """
    size, about = mesh.size(), model.config
    if about.model_type not in ARCHITECTURES:
        raise UsageFault(
            f"fsdp has no tensor parallelism for {about.model_type}: only for {', '.join(ARCHITECTURES)}",
            hint="a layout without t, for example fsdp:d4",
        )
    if hasattr(model, "get_base_model"):
        raise UsageFault(
            f"adapters (use_lora) cannot be sharded over {size} tensor-parallel ranks", hint="use_lora: false"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (count := getattr(about, name)) % size:
            raise UsageFault(
                f"the model's {name} {count} cannot be divided over {size} tensor-parallel ranks",
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
