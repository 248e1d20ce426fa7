"""Vision-language models: prompts with images as token ids, pixels, and the embeddings that a decoder computes with.

The model's processor writes one placeholder token for each vector that the vision tower makes of an image. The first
placeholders of a sequence stand for its images. Later ones, which the model sampled, are tokens as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from areal.conversation import normalise
from areal.dataclasses import dataclass
from areal.dataset.images import BadImage, check_count, decoded
from areal.dataset.tokenizers import chat_of, load_hf_processor_and_tokenizer, template_variables
from areal.errors import ArealError, NotFound, UsageFault
from areal.installation import install_command

if TYPE_CHECKING:
    from torch import Tensor

VISION_MODELS = ("idefics3",)
"""Model types of transformers whose tokens have one-dimensional positions, and whose tower takes ``_PIXELS``."""
_PIXELS = ("pixel_values", "pixel_attention_mask")
_IMAGE, _PLACE = {"type": "image"}, "<image>"


@dataclass(frozen=True, eq=False)
class Pixels:
    """The tower's inputs for the images of one prompt. ``placeholders``: how many tokens ``token_id`` stand for them.
    Compared by identity, so that results can be cached by it."""

    tensors: Mapping[str, Tensor]
    placeholders: int
    token_id: int


class VisionProcessor:
    """A processor of transformers with the chat template of its tokenizer."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self.tokenizer = processor.tokenizer
        token = getattr(processor, "image_token", None)
        if not isinstance(token, str):
            raise UsageFault(f"the processor {type(processor).__name__} has no image_token: it is not supported")
        self.token = token
        self.token_id = int(self.tokenizer.convert_tokens_to_ids(token))

    def prompt(self, messages: object, images: Sequence[bytes], tools: object = None, **variables: Any) -> list[int]:
        """Token ids of a chat with images. The part ``{"type": "image"}``, or ``<image>`` in a text, is its place;
        without them, images come first in the first user message. Raises UsageFault, BadImage, ConversationError."""
        text = self._text(messages, len(images), tools, variables)
        return list(self._processed(text, images)["input_ids"][0].tolist())

    def pixels(self, images: Sequence[bytes]) -> Pixels:
        """Raise BadImage."""
        made = self._processed(self.token * len(images), images)
        tensors = {name: made[name] for name in _PIXELS if name in made}
        return Pixels(tensors, int((made["input_ids"] == self.token_id).sum()), self.token_id)

    def _processed(self, text: str, images: Sequence[bytes]) -> Any:
        check_count(len(images))
        pictures = [decoded(each, f"images[{number}]") for number, each in enumerate(images)]
        given = {"images": pictures} if pictures else {}
        try:
            return self._processor(text=[text], **given, add_special_tokens=False, return_tensors="pt")
        except (ValueError, TypeError, OSError) as error:
            raise BadImage(f"images cannot be processed: {error}") from error

    def _text(self, messages: object, count: int, tools: object, variables: Mapping[str, object]) -> str:
        made = with_places(messages, count, self.token)
        conversation = normalise(
            [{**each, "content": [part for part in each["content"] if part != _IMAGE]} for each in made], tools
        )
        chat = chat_of(self.tokenizer, bool(conversation.tools))
        given = {**template_variables(chat, variables), "add_generation_prompt": True}
        text = chat.template.text(made, list(conversation.tools) or None, given)
        for part in (part for each in made for part in each["content"] if "text" in part):
            if part["text"].strip() not in text:
                raise UsageFault(f"messages: the chat template does not show the text {part['text'][:40]!r}")
        if (written := text.count(self.token)) != count:
            raise UsageFault(f"messages: the chat template writes {self.token} {written} times for {count} images")
        return text


def with_places(messages: object, count: int, token: str) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts, one of them for each of ``count`` images. Raises
    UsageFault."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise UsageFault("messages must be a list with at least one message")
    made = [_with_parts(each, f"messages[{number}]", token) for number, each in enumerate(messages)]
    places = sum(part == _IMAGE for each in made for part in each["content"])
    if not places and count:
        first = next((each for each in made if each["role"] == "user"), None)
        if first is None:
            raise UsageFault("the row has images, but no user message to put them in")
        first["content"] = [_IMAGE] * count + first["content"]
    elif places != count:
        raise UsageFault(f"messages have {places} image parts, but the row has {count} images")
    return made


def _with_parts(message: Any, place: str, token: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UsageFault(f"{place} must be an object with a role and a content")
    content = message.get("content")
    given = _split(content) if isinstance(content, str) else content
    if not isinstance(given, Sequence):
        raise UsageFault(f"{place}.content must be a text or a list of parts")
    parts = []
    for part in given:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image":
            parts.append(_IMAGE)
            continue
        if kind != "text" or not isinstance(part.get("text"), str):
            raise UsageFault(f"{place}.content has a part of type {kind!r}: it takes image and text")
        if token in part["text"]:
            raise UsageFault(f"{place}.content has the text {token}, which only stands for an image")
        parts.append({"type": "text", "text": part["text"]})
    return {**message, "content": parts}


def _split(text: str) -> list[dict[str, str]]:
    """Return the parts of a text in which ``<image>`` is the place of an image, as data sets write it."""
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(_PLACE)):
        parts += [_IMAGE] * (number > 0)
        if piece or _PLACE not in text:
            parts.append({"type": "text", "text": piece})
    return parts


@lru_cache(maxsize=4)
def load_processor(path: str) -> VisionProcessor:
    """Return the processor of a model folder or hub id. Raises NotFound, and UsageFault where a package is missing."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UsageFault("images need the package pillow", hint=install_command("vision")) from error
    try:
        processor, _ = load_hf_processor_and_tokenizer(path)
    except ImportError as error:
        raise UsageFault(f"the processor of {path} needs a package: {error}") from error
    if processor is None:
        raise NotFound(f"{path} has no processor of images", hint="the folder of a vision-language model has one")
    return VisionProcessor(processor)


def check_fit(model: Any, processor: VisionProcessor) -> None:
    """Raise ArealError if the model makes another number of vectors of an image than the processor has placeholders
    for, or has another placeholder."""
    import io

    import torch
    from PIL import Image

    if (known := getattr(model.config, "image_token_id", None)) != processor.token_id:
        raise ArealError(f"the model's image_token_id is {known}, and the processor's {processor.token_id}")
    device = next(model.parameters()).device
    for shade in (0, 255):
        buffer = io.BytesIO()
        Image.new("RGB", (64, 48), (shade,) * 3).save(buffer, "PNG")
        pixels = processor.pixels([buffer.getvalue()])
        try:
            with torch.no_grad():
                image_features(model, [pixels], device)
        except RuntimeError as error:
            message = f"the processor writes {pixels.placeholders} tokens for an image, and the model does not: {error}"
            raise ArealError(message) from error


def image_features(model: Any, several: Sequence[Pixels], device: Any) -> list[Tensor]:
    """Return the tower's vectors [``placeholders``, hidden size] of each prompt's images, at once if of one size."""
    import torch

    shapes = {each.tensors[name].shape[2:] for each in several for name in each.tensors}
    groups = [list(several)] if len(shapes) <= len(_PIXELS) and several else [[each] for each in several]
    vectors: list[Tensor] = []
    for group in groups:
        inputs = {name: torch.cat([each.tensors[name] for each in group], 1).to(device) for name in group[0].tensors}
        found = model.get_image_features(**inputs)
        found = getattr(found, "pooler_output", found)  # before transformers 5 it is the tensor
        parts = [found] if isinstance(found, torch.Tensor) else list(found)
        flat = torch.cat([each.reshape(-1, each.shape[-1]) for each in parts])
        vectors += torch.split(flat, [each.placeholders for each in group])
    return vectors


def embeddings(model: Any, input_ids: Tensor, vectors: Sequence[Tensor | None], token_id: int) -> Tensor:
    """Return the decoder's inputs [B, T, hidden size] for ``input_ids`` [B, T], ``vectors`` at the placeholders."""
    import torch

    embedded: Tensor = model.get_input_embeddings()(input_ids)
    counts = torch.tensor([0 if each is None else len(each) for each in vectors], device=input_ids.device)
    is_placeholder = input_ids == token_id
    places = is_placeholder & (is_placeholder.cumsum(1) <= counts[:, None])
    given = [each for each in vectors if each is not None]
    if not given:
        return embedded
    return embedded.masked_scatter(places[..., None], torch.cat(given).to(embedded.dtype))
