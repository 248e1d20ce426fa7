"""The process groups of vLLM's worker, without vLLM."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from areal.services.inference.engines.vllm_plugin.areal_vllm import Worker


def test_lost_broadcast_does_not_leave_the_group_that_replaced_its_own() -> None:
    worker: Any = Worker()
    worker.rank = 0
    groups = worker._areal_weights.groups

    class Lost:
        def broadcast(self, pieces: Any, options: Any) -> Any:
            groups["pair"] = new  # the trainer connected again while this broadcast hung
            raise RuntimeError("the member is lost")

    new, lost = object(), Lost()
    groups.update(pair=lost, other=Lost())
    with pytest.raises(RuntimeError, match="the member is lost"):
        worker._areal_received("pair", [["w", [2], "F32"]], threading.Event())
    assert groups["pair"] is new
    with pytest.raises(RuntimeError, match="the member is lost"):
        worker._areal_received("other", [["w", [2], "F32"]], threading.Event())
    assert "other" not in groups and groups["pair"] is new
