"""The API for user code.

cli_args        configuration classes, load_expr_config
workflow_api    RolloutWorkflow, agents, environments, the columns of a trajectory
agent           the contract of agents of an agent service
algorithm_api   the contracts of losses and advantages
reward_api      the signature of a reward, AsyncRewardWrapper
engine_api      InferenceEngine, TrainEngine
io_struct       ModelRequest, ModelResponse, FinetuneSpec, StepInfo, WeightUpdateMeta, ...
alloc_mode      AllocationMode
stats           metrics of user code
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.lazy import lazy

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
    "alloc_mode": ("AllocationMode", "ModelAllocation"),
    "engine_api": ("InferenceEngine", "TrainEngine"),
    "io_struct": ("FinetuneSpec", "ModelRequest", "ModelResponse", "StepInfo", "WeightUpdateMeta"),
    "reward_api": ("AsyncRewardWrapper",),
    "workflow_api": ("AgentWorkflow", "RolloutWorkflow"),
    "workflow_context": ("workflow_context",),
}
__getattr__ = lazy(__name__, {name: f"{__name__}.{home}" for home, names in _HOMES.items() for name in names})
