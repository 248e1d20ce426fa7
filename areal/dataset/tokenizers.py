"""Tokenizers and chat templates of model folders, through ``transformers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from areal.errors import NotFound, UsageFault
from areal.hub import TOKENIZER_FILES, model_folder


@lru_cache(maxsize=8)
def load_hf_tokenizer(model_name_or_path: str, fast_tokenizer: bool = True, padding_side: str | None = None) -> Any:
    """Load a tokenizer. Without a padding token, its end token becomes that. Raises NotFound, UsageFault."""
    from transformers import AutoTokenizer

    model_name_or_path = _folder(model_name_or_path)
    more = {"padding_side": padding_side} if padding_side is not None else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model_name_or_path, use_fast=fast_tokenizer, trust_remote_code=False, **more
        )
    except (ValueError, OSError) as error:  # for a missing tokenizer, transformers names packages to install
        if "trust_remote_code" in str(error):
            raise UsageFault(
                f"the tokenizer in {model_name_or_path} is code of the model's own, which is not run",
                hint="tokenizer_path: a folder whose tokenizer transformers knows",
            ) from error
        raise NotFound(
            f"no tokenizer can be read from {model_name_or_path}", hint="tokenizer_path: a folder that has one"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id
    return tokenizer


def load_hf_processor_and_tokenizer(
    model_name_or_path: str, fast_tokenizer: bool = True, padding_side: str | None = None
) -> tuple[Any | None, Any]:
    """Load the processor and the tokenizer of a model. The processor is None for a text-only model."""
    from transformers import AutoProcessor

    tokenizer = load_hf_tokenizer(model_name_or_path, fast_tokenizer, padding_side)
    try:
        processor = AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
            _folder(model_name_or_path), trust_remote_code=False
        )
    except (ValueError, OSError):  # the model has no processor
        return None, tokenizer
    return (processor if hasattr(processor, "image_processor") else None), tokenizer


def templated(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **how: Any) -> list[int]:
    """The token ids of a conversation by the tokenizer's chat template. Raises UsageFault if the tokenizer has no
    template, ValueError for malformed or non-text messages and for a conversation that the template refuses."""
    _check_messages(messages)
    if not getattr(tokenizer, "chat_template", None):
        raise UsageFault(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '')} has no chat template",
            hint="take the tokenizer of a chat model (tokenizer_path), or give rows a prompt instead of messages",
        )
    from jinja2 import TemplateError

    plain = _plain(tokenizer)
    try:
        if plain is None:
            found = tokenizer.apply_chat_template(list(messages), tokenize=True, return_dict=False, **how)
            return [int(token) for token in found]
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, **how)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the tokenizer's chat template refuses the conversation: {error}") from error
    return plain.encode(text, add_special_tokens=False).ids


def texts(tokenizer: Any, answers: Sequence[Sequence[int]]) -> list[str]:
    """The text of each list of token ids without special tokens, equal to that of ``tokenizer.decode``."""
    plain = _plain(tokenizer)
    if plain is None or tokenizer.clean_up_tokenization_spaces:
        return [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    # One by one: decode_batch wakes a thread pool, which costs more than it saves.
    return [plain.decode(answer, skip_special_tokens=True) for answer in answers]


def _plain(tokenizer: Any) -> Any | None:
    """The Rust tokenizer behind the one of transformers, several times faster; None if their results would differ."""
    found = getattr(tokenizer, "backend_tokenizer", None) if getattr(tokenizer, "is_fast", False) else None
    if found is None or found.truncation or found.padding or getattr(tokenizer, "split_special_tokens", False):
        return None
    return found


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f"messages must be a list of at least one message, not {messages!r:.60}")
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            raise ValueError(f"a message is a map with a role and a content, not {message!r:.60}")
        parts = message.get("content")
        kinds = {part.get("type") for part in parts if isinstance(part, Mapping)} if isinstance(parts, list) else set()
        if kinds - {"text"}:
            raise ValueError(f"a message has {', '.join(sorted(map(str, kinds - {'text'})))}: only text is supported")


def _folder(path: str) -> str:
    """The local folder of a model. Raises NotFound for a missing local path, which must not be taken for a hub id."""
    if not path:
        raise UsageFault("no tokenizer is given", hint="actor.path=FOLDER, or tokenizer_path=FOLDER")
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
        raise NotFound(f"there is no model folder {path}")
    return str(model_folder(path, TOKENIZER_FILES))
