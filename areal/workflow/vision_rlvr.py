"""AReaL's import path of the workflow for prompts with images, which engines and trainers do not support."""

from __future__ import annotations

from typing import Any, NoReturn

from areal.errors import UsageFault


class VisionRLVRWorkflow:
    """Raises UsageFault when constructed, so that no prompt is sampled without its images."""

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageFault(
            "VisionRLVRWorkflow is not supported: prompts are text, and images would not be seen",
            hint="areal.workflow.rlvr:RLVRWorkflow trains on text",
        )

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> NoReturn:
        raise AssertionError("there is no instance")
