"""A weight matrix, kept in whatever form this machine multiplies fastest.

On a CPU, oneDNN multiplies by a weight that it reordered once into blocks about twice as fast as by a plain one: one
row then reads the weight at the speed of memory. Its calls cost some ten microseconds more, so a small float32 matrix
keeps both forms and chooses by the number of rows. Elsewhere, and where oneDNN is absent or wrong, the plain form
serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Multiplications from which the blocked form is faster in float32 (measured on Zen 5: level at about this number).
_WORTH_A_CALL = 2**20


@dataclass(frozen=True)
class Forms:
    """One weight in the forms that its matrix keeps; None for one that it does not."""

    plain: Tensor | None
    blocked: Tensor | None


class Matrix:
    """[out, in]; maps rows [n, in] to [n, out]. Holds nothing until the first ``assign``, and after ``release``."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._plain: Tensor | None = None
        self._blocked: Tensor | None = None
        if not (device.type == "cpu" and blocks(dtype)):
            self._blocked_from = 2**62  # rows
        elif dtype == torch.float32:
            self._blocked_from = max(1, _WORTH_A_CALL // (shape[0] * shape[1]))
        else:
            self._blocked_from = 1
        self._shape, self._dtype, self._device = shape, dtype, device

    @torch.inference_mode()
    def assign(self, weight: Tensor) -> None:
        """Take the weight's values. A plain form is overwritten where it lies."""
        if self._blocked_from > 1:
            if self._plain is None:
                self._plain = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._plain.copy_(weight)
        if self._blocked_from < 2**62:
            self._blocked = _block(weight.to(self._dtype).contiguous())

    @torch.inference_mode()
    def forms(self, weight: Tensor) -> Forms:
        """The weight's values beside those in use, for ``adopt``; by any thread."""
        plain = weight.to(self._device, self._dtype, copy=True) if self._blocked_from > 1 else None
        blocked = _block(weight.to(self._dtype).contiguous()) if self._blocked_from < 2**62 else None
        return Forms(plain, blocked)

    def adopt(self, new: Forms) -> Forms:
        """Use these from now on; those that were in use."""
        old = Forms(self._plain, self._blocked)
        self._plain, self._blocked = new.plain, new.blocked
        return old

    def values(self) -> Tensor:
        """The weight as a plain tensor."""
        if self._plain is not None:
            return self._plain
        assert self._blocked is not None
        return self._blocked.to_dense()

    def release(self) -> None:
        self._plain = self._blocked = None

    def project(self, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """rows @ weight.T + bias"""
        if rows.shape[0] >= self._blocked_from:
            return _ops()._linear_pointwise(rows, self._blocked, bias, "none", [], "")  # type: ignore[no-any-return]
        assert self._plain is not None
        return F.linear(rows, self._plain, bias)

    def project_onto(self, residual: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
        """residual + rows @ weight.T + bias; ``residual`` may be overwritten."""
        if rows.shape[0] >= self._blocked_from:
            added: Tensor = _ops()._linear_pointwise.binary(rows, residual, self._blocked, bias, "add")
            return added
        assert self._plain is not None
        residual = residual.addmm_(rows, self._plain.t())
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
        blocked = _block(weight)
        product = _ops()._linear_pointwise(rows, blocked, None, "none", [], "")
        added = _ops()._linear_pointwise.binary(rows, residual, blocked, residual[0], "add")
    except (AttributeError, RuntimeError, TypeError):
        return False
    exact = rows.double() @ weight.double().t()
    wrong = torch.maximum((product - exact).abs().max(), (added - exact - residual - residual[0]).abs().max())
    return bool(wrong < (0.5 if dtype == torch.bfloat16 else 1e-3))  # sums of 64 products of normal numbers


def _block(weight: Tensor) -> Tensor:
    blocked: Tensor = _ops()._reorder_linear_weight(weight, 1)
    return blocked


def _ops() -> Any:
    return torch.ops.mkldnn
