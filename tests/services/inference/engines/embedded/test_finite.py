"""One value that is no number is found anywhere, in any dtype."""

from __future__ import annotations

import pytest
import torch

from areal.services.inference.engines.embedded.model_folder import is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 517, 1023])
def test_is_finite_with_one_bad_value_is_false(dtype: torch.dtype, value: float, at: int) -> None:
    tensor = torch.full((1024,), 6e4, dtype=dtype)  # the sum of these overflows half precision
    assert is_finite(tensor)
    tensor[at] = value
    assert not is_finite(tensor.view(32, 32))


def test_is_finite_of_whole_numbers_and_of_nothing_is_true() -> None:
    assert is_finite(torch.arange(5))
    assert is_finite(torch.empty(0))
