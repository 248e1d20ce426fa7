"""Images in training: the inputs of a vision-language model's decoder for the rows of a micro-batch.

The column ``images`` [B] of a batch has the number of each row's images, 0 for none. The rows of one prompt share them,
and the vision tower computes them once per micro-batch. Pixels are computed again for each micro-batch, because the
pixels of a step take a hundred times the memory of its images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from areal.dataset.vision import VISION_MODELS, check_fit, embeddings, image_features, load_processor
from areal.errors import UsageFault


def is_vision_model(model: Any) -> bool:
    return model.config.model_type in VISION_MODELS


def freeze_tower(model: Any) -> None:
    """Freeze the vision tower, so that only the connector and the decoder are trained. Raises UsageFault for a model
    without a vision tower."""
    tower = getattr(getattr(model, "model", None), "vision_model", None)
    if not isinstance(tower, nn.Module):
        raise UsageFault(f"freeze_vision_tower: {type(model).__name__} has no vision tower")
    tower.requires_grad_(False)


class TrainedImages:
    """The images of the following batches of an engine."""

    def __init__(self, model: nn.Module, path: str) -> None:
        """Raise ArealError for a processor that does not fit the model."""
        self._processor = load_processor(path)
        check_fit(model, self._processor)
        self._images: Mapping[int, Sequence[bytes]] = {}

    def see(self, images: Mapping[int, Sequence[bytes]], batch: Mapping[str, Tensor]) -> None:
        """Set the images of the following batches. Raises UsageFault for a prompt in ``batch`` with placeholders
        alone."""
        self._images = images
        keys = batch.get("images")
        in_prompt = batch["attention_mask"].bool() & ~batch["loss_mask"].bool()
        blind = ((batch["input_ids"] == self._processor.token_id) & in_prompt).any(1)
        if keys is not None:
            blind &= keys == 0
        if bool(blind.any()):
            raise UsageFault(
                f"row {int(blind.nonzero()[0])} of the batch has placeholders of images in its prompt, and no images",
                hint="areal.workflow.vision_rlvr:VisionRLVRWorkflow passes the images of a row on",
            )

    def check(self, batch: Mapping[str, Tensor]) -> None:
        """Refuse a batch of prompts with images if its column ``images`` is missing: it would be trained as text."""
        assert "images" in batch or not self._images, "the column images of the batch is lost"

    def embedded(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the input embeddings [B, T, hidden size], with a gradient."""
        ids = batch["input_ids"]
        keys = batch["images"].tolist()
        numbers = {key: place for place, key in enumerate(key for key in dict.fromkeys(keys) if key)}
        pixels = [self._processor.pixels(self._images[key]) for key in numbers]
        vectors = image_features(model, pixels, ids.device)
        rows = [vectors[numbers[key]] if key else None for key in keys]
        return embeddings(model, ids, rows, self._processor.token_id)
