"""areal: kubectl for LLM reinforcement learning, with no cluster and no daemon underneath.

The names below are the SDK's, imported when they are first asked for: the command line pays for none of them.
"""

from __future__ import annotations

import sys

from areal import interrupt
from areal.lazy import lazy

interrupt.install()
TYPE_CHECKING = False  # typing's own costs an import
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from areal.api import workflow_context
    from areal.api.cli_args import load_expr_config
    from areal.api.workflow_api import RolloutWorkflow
    from areal.client import AsyncInferenceClient, InferenceClient, RolloutController, RolloutControllerV2
    from areal.dataset import get_custom_dataset
    from areal.training.trainers.offline import DPOTrainer, RWTrainer, SFTTrainer
    from areal.training.trainers.ppo import PPOTrainer

__version__ = "0.1.0"
__all__ = [
    "AsyncInferenceClient",
    "DPOTrainer",
    "InferenceClient",
    "PPOTrainer",
    "RWTrainer",
    "RolloutController",
    "RolloutControllerV2",
    "RolloutWorkflow",
    "SFTTrainer",
    "__version__",
    "get_custom_dataset",
    "load_expr_config",
    "workflow_context",
]
_HOMES = {
    **dict.fromkeys(
        ("AsyncInferenceClient", "InferenceClient", "RolloutController", "RolloutControllerV2"), "areal.client"
    ),
    "RolloutWorkflow": "areal.api.workflow_api",
    "get_custom_dataset": "areal.dataset",
    "load_expr_config": "areal.api.cli_args",
    "workflow_context": "areal.api.workflow_context",
    "DPOTrainer": "areal.training.trainers.offline",
    "PPOTrainer": "areal.training.trainers.ppo",
    "RWTrainer": "areal.training.trainers.offline",
    "SFTTrainer": "areal.training.trainers.offline",
}


class _Compatibility:
    """Modules of AReaL that have no file here."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        from areal.compat import FINDER

        return FINDER.find_spec(name)


sys.meta_path.append(_Compatibility)  # the last: asked for what no file has
__getattr__ = lazy(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
