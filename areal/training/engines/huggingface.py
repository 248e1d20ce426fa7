"""A Hugging Face model as it is trained: dtype, adapters, checkpointed activations, shards; and its optimizer."""

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

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from areal.errors import NotFound, UsageFault, did_you_mean
from areal.hub import model_folder
from areal.installation import install_command
from areal.training.batches import PackedRows
from areal.training.ranks import Ranks
from areal.training.run_folder import copy_missing

if TYPE_CHECKING:
    from areal.api.cli_args import OptimizerConfig, TrainEngineConfig


_log = logging.getLogger(__name__)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load_model(config: TrainEngineConfig, ranks: Ranks) -> nn.Module:
    """The model in the dtype of its master weights (``optimizer_dtype``), on the ranks' device, not sharded yet."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    path = _folder(config.path)
    loader = AutoModelForTokenClassification if config.is_critic else AutoModelForCausalLM
    about = _about(AutoConfig, path)
    if config.is_critic:
        about.num_labels = 1
    settings = _attention(config.attn_impl)
    dtype = dtype_by_name(config.optimizer_dtype)
    if config.init_from_scratch:
        model = loader.from_config(about, dtype=dtype, **settings)  # type: ignore[no-untyped-call]
    else:
        _check_weights(path)
        model = loader.from_pretrained(path, config=about, dtype=dtype, **settings)
    model.config.use_cache = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # names that transformers 5 has still, for us and for peft
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if config.use_lora:
            model = _with_adapters(model, config)
    prepared: nn.Module = model.to(ranks.device)
    return prepared


def set_training(model: nn.Module, config: TrainEngineConfig) -> None:
    """Training mode; with ``disable_dropout`` without anything random in it: the outputs are those of evaluation.

    Modules whose activations are checkpointed do so in training mode only. They stay in it, alone, not what they
    contain: dropout that they apply by themselves, or noise of a router, is a number among their attributes.
    """
    model.train(not config.disable_dropout)
    for module in model.modules() if config.disable_dropout else ():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            for name, value in vars(module).items():
                if isinstance(value, float) and ("drop" in name or "jitter" in name):
                    setattr(module, name, 0.0)


def shard_model(model: nn.Module, config: TrainEngineConfig, ranks: Ranks) -> nn.Module:
    """``model`` with its parameters spread over the ranks, one unit for each decoder layer: over tensor-parallel ranks,
    then over data-parallel ones. One rank has it whole. Raises UsageFault for a layout that the model cannot have."""
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
        from areal.training.engines.tensor_parallel import cut_tensors

        cut_tensors(model, meshes["tp"])
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


_STATE_BYTES = 16  # of a parameter: weight, gradient and two moments in float32


def copies_of_shards(ranks: Ranks, state: int, memory: int) -> int:
    """Hybrid sharding (HSDP): 1, or one copy of the model's state on each node, so that only gradients travel between
    nodes. That pays where the links within a node are the faster ones, and is done where a rank's part of ``state``
    bytes takes at most a third of its ``memory``."""
    within, rest = divmod(ranks.data_size, ranks.nodes)
    fits = not rest and state // ranks.layout.tensor <= within * memory // 3
    return ranks.nodes if fits else 1


def _memory(ranks: Ranks) -> int:
    """Bytes of this rank, the least of all ranks."""
    if ranks.device.type == "cuda":
        mine = torch.cuda.get_device_properties(ranks.device).total_memory
    else:
        mine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * ranks.nodes // ranks.size
    return -ranks.all_max(-mine)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks that repeat: the members of the longest list of modules."""
    stacks = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(stacks, key=len, default=[])


def _attention(asked: str) -> dict[str, Any]:
    """What the model is loaded with. Flash attention computes the same as the model's own choice, where it is not
    installed too. Raises UsageFault."""
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


# -- packed rows


PACKED = "areal_packed"


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **about: Any
) -> tuple[Tensor, None]:
    """Causal attention of transformers' ``sdpa``: queries, keys and values [B, heads, T, D] to [B, T, heads, D].
    With ``packed`` rows [1, heads, L, D] to [1, L, heads, D]: each row of the batch sees the tokens that are its own
    and those of its prompt, and a token that several rows share is that of any of them."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows: PackedRows | None = about.pop("packed", None)
    if rows is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **about)
        return plain
    places = rows.places.flatten()
    query, key, value = (
        each[0].index_select(1, places).view(each.shape[1], *rows.places.shape, -1).transpose(0, 1)
        for each in (query, key, value)
    )
    output, _ = sdpa_attention_forward(module, query, key, value, None, **about)
    return output.flatten(0, 1).index_select(0, rows.homes)[None], None


def prepare_packing(model: nn.Module) -> bool:
    """Whether rows of this model can be packed, which it is then set up for: where attention is full, positions can be
    told, and two rows that share their first token are computed as they are alone."""
    about: Any = model.config
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    told = "position_ids" in inspect.signature(inner.forward).parameters
    full = set(getattr(about, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    whole = full and not getattr(about, "sliding_window", None)
    if not (told and whole and about._attn_implementation == "sdpa"):
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
        except TypeError:  # its layers take no further arguments
            packed = None
    model.train(training)
    off = None if packed is None else (rows.unpacked(packed) - wanted).abs().max() / wanted.std().clamp(min=1e-12)
    if off is None or not float(off) < _ROUNDING * torch.finfo(wanted.dtype).eps ** 0.5:
        about._attn_implementation = "sdpa"
        return False
    return True


_ROUNDING = 2.0


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
    return adapted


def _folder(path: str) -> str:
    if not path:
        raise UsageFault("nothing says which model is trained", hint="actor.path=FOLDER, or a Hugging Face id")
    looks_local = path.startswith((".", "/", "~"))
    if looks_local and not Path(path).expanduser().is_dir():
        raise NotFound(f"there is no model folder {path}")
    return str(model_folder(path))


def _check_weights(path: str) -> None:
    folder = Path(path).expanduser()
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise NotFound(
            f"the model folder {path} has no weights (*.safetensors)",
            hint="init_from_scratch: true makes new ones",
        )


def _about(loader: Any, path: str) -> Any:
    try:
        return loader.from_pretrained(path)
    except (OSError, ValueError) as error:  # neither a model's folder nor one on the hub that can be had
        raise NotFound(f"{path} is no model: {str(error).splitlines()[0]}") from error


def dtype_by_name(name: str) -> torch.dtype:
    try:
        return DTYPES[name]
    except KeyError:
        raise UsageFault(f"unknown dtype {name!r}: it is one of {', '.join(DTYPES)}") from None


# -- optimizer


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
    betas, fused = (config.beta1, config.beta2), all(parameter.is_floating_point() for parameter in trained)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)


def clip_gradients(optimizer: torch.optim.Optimizer, most: float, group: dist.ProcessGroup | None = None) -> Tensor:
    """Scale the gradients to a norm of at most ``most``; the norm as it was, over all ranks, as a scalar tensor.

    One sum over the ranks of ``group``, the same number on all of them: what is whole on several ranks must be scaled
    alike, or it would drift apart.
    """
    trained = [each for part in optimizer.param_groups for each in part["params"] if each.grad is not None]
    parts: list[Tensor] = []
    copies: list[int] = []
    for each in trained:
        grad: Any = each.grad
        spread = isinstance(grad, DTensor)
        parts.append(grad.to_local() if spread else grad)
        sizes = zip(grad.device_mesh.shape, grad.placements, strict=True) if spread else ()
        copies.append(math.prod(size for size, placement in sizes if placement.is_replicate()))
    squares = torch.stack([norm.float() for norm in torch._foreach_norm(parts)]).square()
    total = (squares / torch.tensor(copies, device=squares.device)).sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    norm = total.sqrt()
    torch.nn.utils.clip_grads_with_norm_(trained, most if most > 0 else float("inf"), norm)
    return norm


# -- folders


def checkpoint_tensors(model: Any, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a Hugging Face checkpoint that transformers keeps as one weight of ``model``: the experts of a
    mixture are one parameter in memory, and a matrix each in a checkpoint, which is what other engines read."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 a checkpoint's names were the model's
        yield name, weight
        return
    parts = revert_weight_conversion(model, {name: weight})
    for saved, part in parts.items():
        yield saved, part if len(parts) == 1 else part.clone()  # parts share one storage: safetensors refuses that


def write_model(weights: dict[str, Tensor], configs: Sequence[Any], folder: Path, tokenizer: str = "") -> None:
    """A folder that ``from_pretrained`` reads, whole or absent: what ``folder`` held is replaced. ``configs``: what has
    a ``save_pretrained``. ``tokenizer``: a folder or an id of the hub whose tokenizer goes along. Raises OSError."""
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
        shutil.rmtree(partial, ignore_errors=True)  # what is half written may be what fills the disk
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
