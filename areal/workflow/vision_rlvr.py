"""AReaL's import path of prompts with images, which are not supported: engines and trainers know tokens only."""

from __future__ import annotations

from typing import Any, NoReturn

from areal.errors import UsageFault


class VisionRLVRWorkflow:
    """Refuses to be made, before anything is sampled without its images."""

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageFault(
            "VisionRLVRWorkflow is not supported: prompts are text, and images would not be seen",
            hint="areal.workflow.rlvr:RLVRWorkflow trains on text",
        )

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> NoReturn:
        raise AssertionError("there is no instance")
