"""From a row of a data set to the token ids of its prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal.dataset.tokenizers import templated
from areal.errors import UsageFault


def resolved_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer, or the one in a model's folder."""
    if not isinstance(tokenizer, str):
        return tokenizer
    from areal.dataset.tokenizers import load_hf_tokenizer

    return load_hf_tokenizer(tokenizer)


def prompt_ids(tokenizer: Any, data: Mapping[str, Any], thinking: bool | None = None) -> list[int]:
    """Of ``input_ids``, ``messages`` (by the chat template) or ``prompt`` (a text as it is). Raises UsageFault."""
    if data.get("input_ids") is not None:
        return [int(token) for token in data["input_ids"]]
    if data.get("messages") is not None:
        return chat_ids(tokenizer, data["messages"], thinking)
    if isinstance(data.get("prompt"), str):
        return list(tokenizer.encode(data["prompt"]))
    raise UsageFault(f"a row needs messages, prompt or input_ids; this one has {', '.join(data) or 'nothing'}")


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], thinking: bool | None = None) -> list[int]:
    """The prompt of a chat, up to where the assistant begins. ``thinking`` None: as the template has it."""
    variables = {} if thinking is None else {"enable_thinking": thinking}
    return templated(tokenizer, messages, add_generation_prompt=True, **variables)


_OWN_ARGUMENTS = ("prompt", "completions", "prompt_ids", "completion_ids")


def reward_keywords(data: Mapping[str, Any]) -> dict[str, Any]:
    """Of a row, what does not stand for one of the reward's own arguments."""
    return {name: value for name, value in data.items() if name not in _OWN_ARGUMENTS}
