"""The example of docs/training.md: what it says is what it does."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import torch

import areal

DOCS = Path(areal.__file__).parents[1] / "docs" / "training.md"


def test_documented_loss_and_advantages_are_per_token() -> None:
    (code,) = re.findall(r"```python\n(# my_algorithm\.py\n.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    logprobs = torch.tensor([[-1.0, -1.0], [-2.0, -1.0]], requires_grad=True)
    given = SimpleNamespace(
        logprobs=logprobs,
        proximal=torch.tensor([[-2.0, -1.0], [-1.0, -1.0]]),
        advantages=torch.tensor([[1.0, 1.0], [-1.0, -1.0]]),
        rewards=torch.tensor([1.0, 0.0]),
        groups=torch.tensor([0, 0]),
        loss_mask=torch.ones(2, 2, dtype=torch.bool),
    )
    loss = names["asymmetric_clip"](given)  # type: ignore[operator]
    torch.testing.assert_close(loss.detach(), torch.tensor([[-1.4, -1.0], [torch.e**-1, 1.0]]))
    assert names["best_of_group"](given).tolist() == [[1, 1], [0, 0]]  # type: ignore[operator]
