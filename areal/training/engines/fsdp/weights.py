"""An engine's weights as the names and tensors of a Hugging Face checkpoint: for saving, and for the inference side."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from areal.training.engines.fsdp.engine import FSDPEngine
from areal.training.model_folder import copy_missing


def whole_weights(engine: FSDPEngine, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor), gathered one by one on every rank; adapters are merged into what they adapt, and a tied
    head is not repeated. ``dtype``: cast to it. The tensors must not be kept past the next one where memory is dear."""
    model = _base(engine.model)
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    merged = _merged_adapters(engine.model) if engine.config.use_lora else {}
    for name, tensor in model.state_dict().items():
        plain = name.replace(".base_layer.", ".")
        if ".lora_" in name or (tied and plain == "lm_head.weight"):
            continue
        full = getattr(tensor, "full_tensor", None)
        whole: Tensor = full() if full is not None else tensor
        if plain in merged:
            whole = whole + merged[plain].to(whole.dtype)
        yield plain, whole.detach().to(dtype) if dtype is not None else whole.detach()


def save_model(engine: FSDPEngine, folder: Path, tokenizer: str = "") -> None:
    """A Hugging Face folder that ``from_pretrained`` reads, whole or absent. Every rank calls it; the first writes.
    ``tokenizer`` is a folder, or a name on the hub. Raises OSError, on the first rank."""
    weights = {name: tensor.cpu().contiguous() for name, tensor in whole_weights(engine, _saved_dtype(engine))}
    if not engine.ranks.is_first:
        return
    aside = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        _write(engine, weights, aside, tokenizer)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)  # what is half written may be what fills the disk
        raise
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def _write(engine: FSDPEngine, weights: dict[str, Tensor], aside: Path, tokenizer: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    aside.mkdir(parents=True)
    model = _base(engine.model)
    try:
        save_file(weights, aside / "model.safetensors", {"format": "pt"})
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(aside)) from error
    model.config.save_pretrained(aside)
    if (generation := getattr(model, "generation_config", None)) is not None:
        generation.save_pretrained(aside)
    if tokenizer:
        copy_missing(tokenizer, aside)


def _saved_dtype(engine: FSDPEngine) -> torch.dtype:
    from areal.training.engines.fsdp.model import compute_dtype

    return compute_dtype(engine.config)


def _base(model: nn.Module) -> Any:
    """The Hugging Face model under the adapters."""
    peeled = getattr(model, "get_base_model", None)
    return peeled() if peeled is not None else model


def _merged_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Weight name -> B A * scale, for every adapted layer."""
    deltas: dict[str, Tensor] = {}
    for name, module in _base(model).named_modules():
        get_delta = getattr(module, "get_delta_weight", None)
        if get_delta is not None:
            for adapter in module.active_adapters:
                delta = get_delta(adapter).detach()
                full = getattr(delta, "full_tensor", None)
                deltas[f"{name}.weight"] = full() if full is not None else delta
    return deltas
