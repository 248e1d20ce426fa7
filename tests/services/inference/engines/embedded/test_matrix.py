"""Whatever form a matrix is kept in, it multiplies as its weight does, also after a second assignment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areal.services.inference.engines.embedded import linear
from areal.services.inference.engines.embedded.linear import Matrix

CPU = torch.device("cpu")


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("shape", [(48, 32), (1024, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_project_of_any_form_equals_product(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, int], rows: int, blocked: bool
) -> None:
    if not blocked:
        monkeypatch.setattr(linear, "blocks", lambda dtype: False)
    held = Matrix(shape, dtype, CPU)
    for seed in (1, 2):
        torch.manual_seed(seed)
        weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
        inputs, residual = torch.randn(rows, shape[1]).to(dtype), torch.randn(rows, shape[0]).to(dtype)
        held.assign(weight)
        exact = inputs.double() @ weight.double().t()
        room: dict[str, Any] = {"rtol": 0.02, "atol": 1.0} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
        torch.testing.assert_close(held.project(inputs).double(), exact, **room)
        torch.testing.assert_close(held.project(inputs, bias).double(), exact + bias.double(), **room)
        expected = exact + residual.double() + bias.double()
        torch.testing.assert_close(held.project_onto(residual.clone(), inputs, bias).double(), expected, **room)
        expected = exact + residual.double()
        torch.testing.assert_close(held.project_onto(residual, inputs).double(), expected, **room)


def test_assign_of_other_dtype_and_stride_keeps_own() -> None:
    held = Matrix((64, 48), torch.float32, CPU)
    weight = torch.randn(48, 64).bfloat16()
    held.assign(weight.t())
    inputs = torch.randn(3, 48)
    torch.testing.assert_close(held.project(inputs), inputs @ weight.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not linear.keeps_order(torch.float32), reason="oneDNN wants float32 reordered on this machine")
def test_forms_of_a_lent_weight_lie_where_it_lies_and_an_assignment_leaves_it_alone() -> None:
    held, weight, other = Matrix((64, 48), torch.float32, CPU), torch.randn(64, 48), torch.randn(64, 48)
    held.adopt(held.forms(weight, borrowed=True))
    assert held.values().data_ptr() == weight.data_ptr()
    before, inputs = weight.clone(), torch.randn(300, 48)
    torch.testing.assert_close(held.project(inputs), inputs @ weight.t(), rtol=1e-4, atol=1e-4)
    held.assign(other)
    torch.testing.assert_close(held.project(inputs), inputs @ other.t(), rtol=1e-4, atol=1e-4)
    assert torch.equal(weight, before)
