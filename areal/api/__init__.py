"""The interface of user code.

cli_args        configuration classes, load_expr_config
workflow_api    RolloutWorkflow, agents, what a trajectory is
env_api         Agent, Environment
reward_api      the signature of a reward, AsyncRewardWrapper
engine_api      InferenceEngine, TrainEngine
io_struct       ModelRequest, ModelResponse, FinetuneSpec, StepInfo, WeightUpdateMeta, ...
alloc_mode      AllocationMode
registry        names and ``module:attr``
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.api import workflow_context
    from areal.api.alloc_mode import AllocationMode, ModelAllocation
    from areal.api.engine_api import InferenceEngine, TrainEngine
    from areal.api.io_struct import FinetuneSpec, ModelRequest, ModelResponse, StepInfo, WeightUpdateMeta
    from areal.api.reward_api import AsyncRewardWrapper
    from areal.api.workflow_api import AgentWorkflow, RolloutWorkflow

__all__ = [
    "AgentWorkflow",
    "AllocationMode",
    "AsyncRewardWrapper",
    "FinetuneSpec",
    "InferenceEngine",
    "ModelAllocation",
    "ModelRequest",
    "ModelResponse",
    "RolloutWorkflow",
    "StepInfo",
    "TrainEngine",
    "WeightUpdateMeta",
    "workflow_context",
]
_HOMES = {
    "AgentWorkflow": "workflow_api",
    "AllocationMode": "alloc_mode",
    "AsyncRewardWrapper": "reward_api",
    "FinetuneSpec": "io_struct",
    "InferenceEngine": "engine_api",
    "ModelAllocation": "alloc_mode",
    "ModelRequest": "io_struct",
    "ModelResponse": "io_struct",
    "RolloutWorkflow": "workflow_api",
    "StepInfo": "io_struct",
    "TrainEngine": "engine_api",
    "WeightUpdateMeta": "io_struct",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "workflow_context":
        return importlib.import_module(f"{__name__}.{name}")
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
