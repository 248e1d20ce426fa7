"""``RLVRWorkflow`` for rows with images, for vision-language models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from areal.api.io_struct import ModelRequest
from areal.client.errors import CallerError
from areal.dataset.images import BadImage, row_images
from areal.dataset.vision import VisionProcessor, load_processor
from areal.rollout.rows import RewardFn, variables_of
from areal.workflow.rlvr import RLVRWorkflow

if TYPE_CHECKING:
    from areal.api.cli_args import GenerationHyperparameters


class VisionRLVRWorkflow(RLVRWorkflow):
    """Samples one response to ``messages`` and ``images`` of a row. A part ``{"type": "image"}`` of a message marks the
    position of an image; without such parts the images come before the text of the first user message. ``processor`` is
    a processor of transformers, a model folder or a hub id."""

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        processor: Any,
        enable_thinking: bool | None = None,
        reward_timeout: float = 15.0,
        reward_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(reward_fn, gconfig, tokenizer, enable_thinking, reward_timeout, reward_weights=reward_weights)
        self.processor = load_processor(processor) if isinstance(processor, str) else VisionProcessor(processor)

    async def _request(self, data: dict[str, object]) -> tuple[ModelRequest, str]:
        try:
            images, ids, prompt = await asyncio.to_thread(self._seen, data)
        except BadImage as error:
            raise CallerError(error.message, param="images") from error
        return ModelRequest(ids, self.gconfig, tokenizer=self.tokenizer, image_data=list(images)), prompt

    def _seen(self, data: dict[str, object]) -> tuple[tuple[bytes, ...], list[int], str]:
        images = row_images(data)
        variables = variables_of(self.tokenizer, data, self._thinking)
        ids = self.processor.prompt(data["messages"], images, data.get("tools"), **variables)
        return images, ids, self.tokenizer.decode(ids)
