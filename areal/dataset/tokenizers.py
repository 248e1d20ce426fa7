"""Tokenizers and chat templates of model folders, through ``transformers``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from areal.conversation import RESERVED, Chat, ConversationError, Template, normalise
from areal.errors import NotFound, UsageFault
from areal.files import parse_json
from areal.hub import TOKENIZER_FILES, model_folder

NO_TEMPLATE = (
    "take the tokenizer of a chat model (tokenizer_path), or write a chat_template.jinja into the model's folder: "
    "{{ messages[-1]['content'] }} is the text of a question alone, for a base model"
)


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
                f"the tokenizer in {model_name_or_path} needs code from the model folder, which is not run",
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


def chat_of(tokenizer: Any, with_tools: bool = False) -> Chat:
    """Return the tokenizer with its chat template, compiled once; some have another one for chats with tools. Raises
    UsageFault if there is none, or it is not valid."""
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, Mapping):
        source = (source.get("tool_use") if with_tools else None) or source.get("default")
    if not source:
        raise UsageFault(
            f"the tokenizer {getattr(tokenizer, 'name_or_path', '')} has no chat template",
            hint=f"{NO_TEMPLATE}; fine-tuning also takes texts, in the columns prompt and answer",
        )
    chats = _CHATS.setdefault(tokenizer, {})
    if source not in chats:
        chats[source] = _chat(tokenizer, source)
    return chats[source]


_CHATS: weakref.WeakKeyDictionary[Any, dict[str, Chat]] = weakref.WeakKeyDictionary()


def template_variables(chat: Chat, given: Mapping[str, object] | None) -> dict[str, object]:
    """Return ``chat_template_kwargs`` of a row; null is absent. Raises ConversationError for what has no effect."""
    found = {name: value for name, value in (given or {}).items() if value is not None}
    for name in found:
        if name in (*RESERVED, "add_generation_prompt"):
            raise ConversationError(f"chat_template_kwargs.{name}", "cannot be set: the text of a row has its own")
        if not chat.template.uses(name):
            raise ConversationError(f"chat_template_kwargs.{name}", "has no effect: the chat template does not read it")
    return found


def prompt_tokens(tokenizer: Any, messages: object, tools: object = None, **variables: Any) -> list[int]:
    """Return the tokens of the prompt of a chat. Raises UsageFault, and ConversationError naming message and field."""
    conversation = normalise(messages, tools)
    last = len(conversation.messages) - 1
    if conversation.messages[last]["role"] == "assistant":
        raise ConversationError(f"messages[{last}].role", "is 'assistant': a prompt ends with the message to answer")
    return chat_of(tokenizer, bool(conversation.tools)).prompt(conversation, **variables)


def _chat(tokenizer: Any, source: str) -> Chat:
    from jinja2 import TemplateSyntaxError

    try:
        template = Template(source, getattr(tokenizer, "special_tokens_map", {}))
    except TemplateSyntaxError as error:
        name = getattr(tokenizer, "name_or_path", "")
        message = f"the chat template of {name} is not valid: line {error.lineno}: {error.message}"
        raise UsageFault(message) from error
    # Neither way refers to the tokenizer of transformers itself: ``_CHATS`` does not keep it. A slow one must be alive.
    fast = _plain(tokenizer)
    own: Callable[[], Any] = weakref.ref(tokenizer)

    def encode(text: str) -> Sequence[int]:
        encoded = (own() if fast is None else fast).encode(text, add_special_tokens=False)
        return list(encoded if fast is None else encoded.ids)

    def decode(ids: Sequence[int]) -> str:
        if fast is not None:
            return str(fast.decode(list(ids), skip_special_tokens=False))
        return str(own().decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    added = getattr(tokenizer, "added_tokens_decoder", {})
    return Chat(template, encode, decode, _eos_ids(tokenizer), frozenset(added))


def _eos_ids(tokenizer: Any) -> frozenset[int]:
    """Return the end tokens of the tokenizer and of the model's configurations beside it."""
    found = {getattr(tokenizer, "eos_token_id", None)}
    folder = Path(str(getattr(tokenizer, "name_or_path", "") or "."))
    for name in ("generation_config.json", "config.json"):
        if folder.is_absolute() and (folder / name).is_file():
            given = parse_json((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            found |= set(given if isinstance(given, list) else [given])
    return frozenset(token for token in found if token is not None)


def texts(tokenizer: Any, answers: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each list of token ids without special tokens, equal to that of ``tokenizer.decode``."""
    plain = _plain(tokenizer)
    if plain is None or tokenizer.clean_up_tokenization_spaces:
        return [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    # One by one: decode_batch wakes a thread pool, which costs more than it saves.
    return [plain.decode(answer, skip_special_tokens=True) for answer in answers]


def _plain(tokenizer: Any) -> Any | None:
    """Return the Rust tokenizer behind the one of transformers, which is faster; None if their results would differ."""
    found = getattr(tokenizer, "backend_tokenizer", None) if getattr(tokenizer, "is_fast", False) else None
    if found is None or found.truncation or found.padding or getattr(tokenizer, "split_special_tokens", False):
        return None
    return found


def _folder(path: str) -> str:
    """Return the local folder of a model. Raises NotFound for a missing path, which is no hub id."""
    if not path:
        raise UsageFault("no tokenizer is given", hint="actor.path=FOLDER, or tokenizer_path=FOLDER")
    if path.startswith((".", "/", "~")) and not Path(path).expanduser().exists():
        raise NotFound(f"there is no model folder {path}")
    return str(model_folder(path, TOKENIZER_FILES))
