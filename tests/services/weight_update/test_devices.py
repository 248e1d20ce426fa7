"""Which backend carries weights, by the devices of the members."""

from __future__ import annotations

import pytest

from areal.services.weight_transfer.group import nccl_carries


@pytest.mark.parametrize(
    ("devices", "nccl"),
    [
        (["cuda:a", "cuda:b"], True),
        (["cuda:a", "cuda:a"], False),
        (["cuda:a", "cpu"], False),
        (["cuda", "cuda:a"], False),
        (["cpu", "cpu"], False),
    ],
)
def test_nccl_is_used_only_between_different_gpus(devices: list[str], nccl: bool) -> None:
    assert nccl_carries(devices) is nccl
