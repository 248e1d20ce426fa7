"""A safetensors file in memory: what is written is read, through a mapping of before as well."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal.services.weight_transfer.memory import Image, header_of, layout_of, views


def made(value: int) -> dict[str, torch.Tensor]:
    """Numbers of several widths, some of which begin anywhere."""
    return {
        "flags": torch.tensor([value > 0] * 3),
        "wide": torch.full((2, 3), float(value)),
        "narrow": torch.full((5,), float(value), dtype=torch.bfloat16),
        "nothing": torch.empty(0, 4),
        "steps": torch.tensor(value),
    }


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_views_reflect_writes_at_any_alignment(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    image = Image(layout_of(made(0).items()), path)
    with path.open("rb") as file:
        header = header_of(file)
        seen = views(header, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    for value in (1, 2):
        for name, tensor in made(value).items():
            if tensor.numel():
                image.write(name, tensor)
        on_file = load_file(path)
        for name, tensor in made(value).items():
            assert torch.equal(seen[name], tensor)
            assert torch.equal(on_file[name], tensor)
    image.remove()
