"""Drawings and prompts for the model of the example `vision`, and what transformers computes for them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parents[1] / "examples" / "vision" / "model"


def drawing(colour: str, form: str = "PNG", size: tuple[int, int] = (32, 32)) -> bytes:
    """An encoded image of one square."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).rectangle((3, 3, size[0] // 2, size[1] // 2), fill=colour)
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def in_base64(image: bytes) -> str:
    return base64.b64encode(image).decode()


def question(text: str = "What color is the square?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@cache
def plain_model(folder: Path = MODEL) -> Any:
    """The model as transformers has it, float32 and in evaluation mode."""
    import torch
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def plain_logprobs(tokens: Sequence[int], images: Sequence[bytes], folder: Path = MODEL) -> Any:
    """[len(tokens) - 1, vocabulary]: log-probabilities of each token but the first by transformers' own forward pass,
    with pixels of its own processor. Placeholders after those of the images, which the model sampled, are tokens as any
    other: transformers itself refuses such a row."""
    import torch
    from PIL import Image
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    pictures = [Image.open(io.BytesIO(image)) for image in images]
    given = processor(text=["<image>" * len(pictures)], images=pictures, return_tensors="pt")
    inputs = {name: given[name] for name in ("pixel_values", "pixel_attention_mask")}
    model, ids = plain_model(folder), torch.tensor([list(tokens)])
    with torch.no_grad():
        vectors = torch.cat(list(model.get_image_features(**inputs).pooler_output)).flatten(0, -2)
        embeds = model.get_input_embeddings()(ids)
        places = (ids[0] == model.config.image_token_id).nonzero()[: len(vectors), 0]
        embeds[0, places] = vectors
        return model(inputs_embeds=embeds, use_cache=False).logits[0, :-1].log_softmax(-1)
