"""LoRA adapters (arXiv:2106.09685) in PEFT's format, brought into the decoder's fused buffers.

A projection with an adapter gives ``x W' + s (x A') B'``. Where several projections are one buffer here (q, k and v;
gate and up), their A are stacked and their B stand side by side in a matrix of zeros: a buffer needs two products.
Sequences with different adapters and with none share a batch: each adapter's delta is added to its own rows.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.errors import ArealError
from areal.services.inference.engines.embedded.checkpoint import is_finite, open_checkpoint
from areal.services.inference.engines.embedded.model_config import (
    BufferSlice,
    Form,
    ModelConfig,
    buffer_shapes,
    buffer_slices,
)

_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
# What would change how the adapter is computed, at the value at which it does not.
_PLAIN: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
}
_serials = itertools.count(1)


@dataclass(frozen=True)
class LowRankDelta:
    """One buffer's delta: rows [n, in] to [n, out] by ``(rows @ down.T) @ up.T``; ``up`` holds the scale."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, eq=False)
class Adapter:
    """``lows`` by name of the decoder's buffer. ``serial`` tells it from another that had its name."""

    name: str
    lows: Mapping[str, LowRankDelta]
    serial: int = field(default_factory=lambda: next(_serials))


@dataclass(frozen=True)
class Deltas:
    """Which rows of a batch are changed by which adapter."""

    groups: tuple[tuple[Adapter, Tensor], ...]

    def add(self, buffer: str, rows: Tensor, out: Tensor) -> None:
        """Add to ``out`` [n, out], in place, what the adapters make of ``rows`` [n, in] for ``buffer``."""
        for adapter, indices in self.groups:
            low = adapter.lows.get(buffer)
            if low is not None:
                out.index_add_(0, indices, (rows[indices] @ low.down.t()) @ low.up.t())


def deltas_of(adapters: Sequence[Adapter | None], each: int, device: torch.device) -> Deltas | None:
    """For a batch of sequences with ``each`` rows a sequence; None when none has an adapter."""
    members: dict[Adapter, list[int]] = {}
    for place, adapter in enumerate(adapters):
        if adapter is not None:
            members.setdefault(adapter, []).extend(range(place * each, (place + 1) * each))
    if not members:
        return None
    return Deltas(tuple((adapter, torch.tensor(rows, device=device)) for adapter, rows in members.items()))


def read_adapter(name: str, folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Adapter:
    """Raises ArealError for a folder that is no adapter of this model, or of a kind that is not computed here."""
    scale = _scale(folder)
    projections = (piece for piece in buffer_slices(config) if piece.source.endswith("_proj.weight"))
    pieces = {piece.source.removesuffix(".weight"): piece for piece in projections}
    halves: dict[str, dict[str, Tensor]] = {}
    checkpoint = open_checkpoint(folder)
    with checkpoint.reader() as reader:
        for tensor_name in checkpoint.entries:
            match = _TENSOR.fullmatch(tensor_name)
            if match is None or match["module"] not in pieces:
                raise ArealError(f"{folder}: {tensor_name} is for no projection of this model's layers")
            tensor = reader.read(tensor_name)
            if not is_finite(tensor):
                raise ArealError(f"{folder}: {tensor_name} holds values that are not finite")
            halves.setdefault(match["module"], {})[match["part"]] = tensor.to(torch.float32)
    lows: dict[str, list[tuple[BufferSlice, Tensor, Tensor]]] = {}
    for module, parts in halves.items():
        piece = pieces[module]
        lows.setdefault(piece.target, []).append((piece, *_checked(folder, module, parts, piece)))
    shapes = buffer_shapes(config)
    fused = {target: _fused(parts, shapes[target], scale, config.head_dim) for target, parts in lows.items()}
    placed = {
        target: LowRankDelta(low.down.to(device, dtype), low.up.to(device, dtype)) for target, low in fused.items()
    }
    return Adapter(name, placed)


def _scale(folder: Path) -> float:
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        rank, alpha = config["r"], config["lora_alpha"]
        if config.get("peft_type", "LORA") != "LORA":
            raise ArealError(f"{folder}: an adapter of type {config['peft_type']} is not computed here, LORA is")
        for option, plain in _PLAIN.items():
            if config.get(option) not in (plain, None):
                raise ArealError(f"{folder}: {option} {config[option]!r} of adapter_config.json is not computed here")
        return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ArealError(f"{folder} is no LoRA adapter: adapter_config.json: {error!r}") from error


def _checked(folder: Path, module: str, parts: Mapping[str, Tensor], piece: BufferSlice) -> tuple[Tensor, Tensor]:
    if len(parts) != 2:
        raise ArealError(f"{folder}: {module} has lora_{'AB'['A' in parts]} missing")
    down, up = parts["A"], parts["B"]
    out, inner = piece.shape
    if down.dim() != 2 or up.dim() != 2 or down.shape[1] != inner or up.shape != (out, down.shape[0]):
        raise ArealError(
            f"{folder}: {module} has A {list(down.shape)} and B {list(up.shape)}; the model's is {list(piece.shape)}"
        )
    return down, up


def _fused(
    parts: list[tuple[BufferSlice, Tensor, Tensor]], shape: tuple[int, ...], scale: float, head_dim: int
) -> LowRankDelta:
    whole = torch.zeros(shape[0], sum(down.shape[0] for _, down, _ in parts))
    column = 0
    for piece, down, up in parts:
        if piece.form is Form.ROTARY:
            up = up.view(-1, 2, head_dim // 2, up.shape[1]).transpose(1, 2).reshape(up.shape)
        whole[piece.start : piece.stop, column : column + down.shape[0]] = up * scale
        column += down.shape[0]
    return LowRankDelta(torch.cat([down for _, down, _ in parts]), whole)
