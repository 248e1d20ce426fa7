"""The weight matrices of linear layers, and the LoRA adapters that change their outputs.

On a CPU, oneDNN multiplies up to twice as fast as torch's own product, at the speed of memory for one row. Its calls
cost some ten microseconds more, so a small float32 matrix chooses by the number of rows. oneDNN may want the weight
reordered into blocks (bfloat16) or as it is (float32 on known machines): then the plain form is the only one, and can
be borrowed memory. On other devices, and where oneDNN is absent or wrong, the plain form is used.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.dataclasses import dataclass, field
from areal.errors import ArealError
from areal.files import parse_json
from areal.services.inference.engines.embedded.model_folder import (
    BufferSlice,
    Form,
    ModelConfig,
    buffer_shapes,
    buffer_slices,
    is_finite,
    open_checkpoint,
)

_ops: Any = torch.ops.mkldnn
# Multiplications from which oneDNN is faster in float32 (measured on Zen 5: level at about this number, and from it on
# also for a single row).
_WORTH_A_CALL = 2**22
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
# Options that change how an adapter is computed, with the only value that is supported.
_PLAIN: dict[str, object] = {
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
class MatrixForms:
    """A weight in the memory layouts that its matrix keeps; None for the others. ``borrowed``: other processes compute
    with the plain one's memory, so it must not be written."""

    plain: Tensor | None = None
    blocked: Tensor | None = None
    borrowed: bool = False


class Matrix:
    """A weight [out, in] that maps rows [n, in] to [n, out]. Empty before the first ``assign`` and after
    ``release``."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._held = MatrixForms()
        multiplies = device.type == "cpu" and onednn_supports(dtype)
        if not multiplies:
            self._onednn_from = 2**62  # rows from which oneDNN multiplies
        elif dtype == torch.float32:
            self._onednn_from = max(1, _WORTH_A_CALL // (shape[0] * shape[1]))
        else:
            self._onednn_from = 1
        self.reorders = multiplies and not keeps_order(dtype)
        self._keeps_plain = self._onednn_from > 1 or not self.reorders
        self._shape, self._dtype, self._device = shape, dtype, device

    @torch.inference_mode()
    def assign(self, weight: Tensor) -> None:
        """Copy the weight's values; in place, unless the plain form is borrowed."""
        plain = None if self._held.borrowed else self._held.plain
        if self._keeps_plain:
            if plain is None:
                plain = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            plain.copy_(weight)
        self._held = MatrixForms(plain, self._blocked(weight))

    @torch.inference_mode()
    def forms(self, weight: Tensor, *, borrowed: bool = False) -> MatrixForms:
        """Return the weight's forms for ``adopt``, besides those in use; in any thread. ``borrowed``: the weight is
        contiguous and does not change, so it need not be copied."""
        borrowed = borrowed and self._keeps_plain and weight.dtype == self._dtype and weight.device == self._device
        plain = weight if borrowed else None
        if self._keeps_plain and not borrowed:
            plain = weight.to(self._device, self._dtype, copy=True, memory_format=torch.contiguous_format)
        return MatrixForms(plain, self._blocked(weight), borrowed)

    def _blocked(self, weight: Tensor) -> Tensor | None:
        return _block(weight.to(self._dtype).contiguous()) if self.reorders else None

    def adopt(self, new: MatrixForms) -> MatrixForms:
        """Use these forms from now on. Returns the replaced ones."""
        old, self._held = self._held, new
        return old

    def values(self) -> Tensor:
        """Return the weight as a plain tensor."""
        if self._held.plain is not None:
            return self._held.plain
        assert self._held.blocked is not None
        return self._held.blocked.to_dense()

    def release(self) -> None:
        self._held = MatrixForms()

    def project(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return rows @ weight.T + bias."""
        held = self._held
        if rows.shape[0] >= self._onednn_from:
            weight = held.plain if held.blocked is None else held.blocked
            return _ops._linear_pointwise(rows, weight, bias, "none", [], "")
        assert held.plain is not None
        return F.linear(rows, held.plain, bias)

    def project_onto(self, residual: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return residual + rows @ weight.T + bias; may overwrite ``residual``."""
        held = self._held
        if rows.shape[0] >= self._onednn_from:
            weight = held.plain if held.blocked is None else held.blocked
            return _ops._linear_pointwise.binary(rows, residual, weight, bias, "add")
        assert held.plain is not None
        residual = residual.addmm_(rows, held.plain.t())
        return residual if bias is None else residual.add_(bias)


@cache
def onednn_supports(dtype: torch.dtype) -> bool:
    """Return whether oneDNN supports ``dtype`` and multiplies correctly."""
    library: Any = torch.backends.mkldnn
    if dtype not in (torch.float32, torch.bfloat16) or not library.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, rows, residual = (torch.randn(64, 64, generator=generator).to(dtype) for _ in range(3))
    try:
        if dtype == torch.bfloat16 and not _ops._is_mkldnn_bf16_supported():
            return False
        blocked = weight if keeps_order(dtype) else _block(weight)
        product = _ops._linear_pointwise(rows, blocked, None, "none", [], "")
        added = _ops._linear_pointwise.binary(rows, residual, blocked, residual[0], "add")
    except (AttributeError, RuntimeError, TypeError):
        return False
    exact = rows.double() @ weight.double().t()
    wrong = torch.maximum((product - exact).abs().max(), (added - exact - residual - residual[0]).abs().max())
    return bool(wrong < (0.5 if dtype == torch.bfloat16 else 1e-3))  # sums of 64 products of normal numbers


@cache
def keeps_order(dtype: torch.dtype) -> bool:
    """Return whether oneDNN's blocked form equals the plain weight byte for byte, and it accepts the plain one."""
    weight = torch.arange(256 * 256).view(256, 256).to(dtype)
    try:
        blocked = _block(weight)
        there = ctypes.string_at(_ops.data_ptr(blocked), _ops._nbytes(blocked))
        _ops._linear_pointwise(weight[:2], weight, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return there == weight.view(torch.uint8).numpy().tobytes()


def _block(weight: Tensor) -> Tensor:
    return _ops._reorder_linear_weight(weight, 1)


@dataclass(frozen=True)
class LowRankDelta:
    """What an adapter adds to one buffer's output: rows [n, in] to [n, out] by ``(rows @ down.T) @ up.T``, scale
    included."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter (arXiv:2106.09685): its deltas by the name of the decoder's buffer. ``serial`` distinguishes
    adapters of one name.

    An adapted projection computes x W' + s (x A') B'. If several projections share a buffer (q, k and v; gate and up),
    their A are stacked and their B are blocks of a zero matrix, so that a buffer needs two products. Sequences with
    different adapters or none share a batch: each delta is added to its own rows.
    """

    name: str
    lows: Mapping[str, LowRankDelta]
    serial: int = field(default_factory=lambda: next(_serials))


@dataclass(frozen=True)
class Deltas:
    """Each adapter of a batch with the rows that it changes."""

    groups: tuple[tuple[Adapter, Tensor], ...]

    def add(self, buffer: str, rows: Tensor, out: Tensor) -> None:
        """Add the adapters' output for ``buffer`` and ``rows`` [n, in] to ``out`` [n, out], in place."""
        for adapter, indices in self.groups:
            low = adapter.lows.get(buffer)
            if low is not None:
                out.index_add_(0, indices, (rows[indices] @ low.down.t()) @ low.up.t())


def deltas_of(adapters: Sequence[Adapter | None], each: int, device: torch.device) -> Deltas | None:
    """Return the deltas of a batch with ``each`` rows per sequence; None if no sequence has an adapter."""
    members: dict[Adapter, list[int]] = {}
    for place, adapter in enumerate(adapters):
        if adapter is not None:
            members.setdefault(adapter, []).extend(range(place * each, (place + 1) * each))
    if not members:
        return None
    return Deltas(tuple((adapter, torch.tensor(rows, device=device)) for adapter, rows in members.items()))


def read_adapter(name: str, folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Adapter:
    """Read a LoRA adapter in PEFT's format. Raises ArealError if the folder is not a plain LoRA adapter of this
    model."""
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
    groups: dict[str, list[tuple[BufferSlice, Tensor, Tensor]]] = {}
    for module, parts in halves.items():
        if len(parts) != 2:
            raise ArealError(f"{folder}: {module} has lora_{'AB'['A' in parts]} missing")
        piece, down, up = pieces[module], parts["A"], parts["B"]
        out, inner = piece.shape
        if down.dim() != 2 or up.dim() != 2 or down.shape[1] != inner or up.shape != (out, down.shape[0]):
            found = f"A {list(down.shape)} and B {list(up.shape)}"
            raise ArealError(f"{folder}: {module} has {found}; the model's is {list(piece.shape)}")
        groups.setdefault(piece.target, []).append((piece, down, up))
    lows, shapes = {}, buffer_shapes(config)
    for target, group in groups.items():
        down, up = _fused(group, shapes[target], scale, config.head_dim)
        lows[target] = LowRankDelta(down.to(device, dtype), up.to(device, dtype))
    return Adapter(name, lows)


def _scale(folder: Path) -> float:
    try:
        config = parse_json((folder / "adapter_config.json").read_text(encoding="utf-8"))
        rank, alpha = config["r"], config["lora_alpha"]
        if config.get("peft_type", "LORA") != "LORA":
            raise ArealError(f"{folder}: an adapter of type {config['peft_type']} is not supported, only LORA is")
        for option, plain in _PLAIN.items():
            if config.get(option) not in (plain, None):
                raise ArealError(f"{folder}: {option} {config[option]!r} of adapter_config.json is not supported")
        return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ArealError(f"{folder} is not a LoRA adapter: adapter_config.json: {error!r}") from error


def _fused(
    group: list[tuple[BufferSlice, Tensor, Tensor]], shape: tuple[int, ...], scale: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Return A and B of a buffer from those of its projections."""
    whole = torch.zeros(shape[0], sum(down.shape[0] for _, down, _ in group))
    column = 0
    for piece, down, up in group:
        if piece.form is Form.ROTARY:
            up = up.view(-1, 2, head_dim // 2, up.shape[1]).transpose(1, 2).reshape(up.shape)
        whole[piece.start : piece.stop, column : column + down.shape[0]] = up * scale
        column += down.shape[0]
    return torch.cat([down for _, down, _ in group]), whole
