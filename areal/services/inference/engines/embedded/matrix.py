"""A weight matrix, kept in whatever form this machine multiplies fastest.

On a CPU, oneDNN multiplies up to twice as fast as torch's own product: one row then reads the weight at the speed of
memory. Its calls cost some ten microseconds more, so a small float32 matrix chooses by the number of rows. oneDNN may
want the weight reordered into blocks (bfloat16), and may want it as it is (float32 on the machines we met): then there
is one form, and it can lie in memory that is not ours. Elsewhere, and where oneDNN is absent or wrong, the plain form
serves.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Multiplications from which oneDNN is faster in float32 (measured on Zen 5: level at about this number, and from it on
# also for a single row).
_WORTH_A_CALL = 2**22


@dataclass(frozen=True)
class MatrixForms:
    """One weight in the forms that its matrix keeps; None for one that it does not. ``borrowed``: the plain one
    lies where another process computes with it too, and is not written."""

    plain: Tensor | None
    blocked: Tensor | None
    borrowed: bool = False


_NOTHING = MatrixForms(None, None)


class Matrix:
    """[out, in]; maps rows [n, in] to [n, out]. Holds nothing until the first ``assign``, and after ``release``."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._held = _NOTHING
        multiplies = device.type == "cpu" and blocks(dtype)
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
        """Take the weight's values. A plain form of our own is overwritten where it lies."""
        plain = None if self._held.borrowed else self._held.plain
        if self._keeps_plain:
            if plain is None:
                plain = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            plain.copy_(weight)
        self._held = MatrixForms(plain, self._blocked(weight))

    @torch.inference_mode()
    def forms(self, weight: Tensor, *, borrowed: bool = False) -> MatrixForms:
        """The weight's values beside those in use, for ``adopt``; by any thread. ``borrowed``: the weight is contiguous
        and does not change, so it need not be copied."""
        borrowed = borrowed and self._keeps_plain and weight.dtype == self._dtype and weight.device == self._device
        plain = weight if borrowed else None
        if self._keeps_plain and not borrowed:
            plain = weight.to(self._device, self._dtype, copy=True, memory_format=torch.contiguous_format)
        return MatrixForms(plain, self._blocked(weight), borrowed)

    def _blocked(self, weight: Tensor) -> Tensor | None:
        return _block(weight.to(self._dtype).contiguous()) if self.reorders else None

    def adopt(self, new: MatrixForms) -> MatrixForms:
        """Use these from now on; those that were in use."""
        old, self._held = self._held, new
        return old

    def values(self) -> Tensor:
        """The weight as a plain tensor."""
        if self._held.plain is not None:
            return self._held.plain
        assert self._held.blocked is not None
        return self._held.blocked.to_dense()

    def release(self) -> None:
        self._held = _NOTHING

    def project(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """rows @ weight.T + bias"""
        held = self._held
        if rows.shape[0] >= self._onednn_from:
            weight = held.plain if held.blocked is None else held.blocked
            return _ops()._linear_pointwise(rows, weight, bias, "none", [], "")  # type: ignore[no-any-return]
        assert held.plain is not None
        return F.linear(rows, held.plain, bias)

    def project_onto(self, residual: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """residual + rows @ weight.T + bias; ``residual`` may be overwritten."""
        held = self._held
        if rows.shape[0] >= self._onednn_from:
            weight = held.plain if held.blocked is None else held.blocked
            added: Tensor = _ops()._linear_pointwise.binary(rows, residual, weight, bias, "add")
            return added
        assert held.plain is not None
        residual = residual.addmm_(rows, held.plain.t())
        return residual if bias is None else residual.add_(bias)


@cache
def blocks(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there for ``dtype`` and multiplies as torch does."""
    library: Any = torch.backends.mkldnn
    if dtype not in (torch.float32, torch.bfloat16) or not library.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, rows, residual = (torch.randn(64, 64, generator=generator).to(dtype) for _ in range(3))
    try:
        if dtype == torch.bfloat16 and not _ops()._is_mkldnn_bf16_supported():
            return False
        blocked = weight if keeps_order(dtype) else _block(weight)
        product = _ops()._linear_pointwise(rows, blocked, None, "none", [], "")
        added = _ops()._linear_pointwise.binary(rows, residual, blocked, residual[0], "add")
    except (AttributeError, RuntimeError, TypeError):
        return False
    exact = rows.double() @ weight.double().t()
    wrong = torch.maximum((product - exact).abs().max(), (added - exact - residual - residual[0]).abs().max())
    return bool(wrong < (0.5 if dtype == torch.bfloat16 else 1e-3))  # sums of 64 products of normal numbers


@cache
def keeps_order(dtype: torch.dtype) -> bool:
    """Whether the blocks that oneDNN wants are the plain weight, byte for byte, and it takes that."""
    weight = torch.arange(256 * 256).view(256, 256).to(dtype)
    try:
        blocked = _block(weight)
        size, at = _ops()._nbytes(blocked), _ops().data_ptr(blocked)
        _ops()._linear_pointwise(weight[:2], weight, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    there = ctypes.string_at(at, size)
    return there == weight.view(torch.uint8).numpy().tobytes()


def _block(weight: Tensor) -> Tensor:
    blocked: Tensor = _ops()._reorder_linear_weight(weight, 1)
    return blocked


def _ops() -> Any:
    return torch.ops.mkldnn
