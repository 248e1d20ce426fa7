"""Answers as they are recorded, and recorded answers as they are said again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from areal.services.inference.data_proxy.choice import Choice, Update
from areal.services.inference.data_proxy.shapes import Frame, assistant_message
from areal.services.inference.data_proxy.tokenizer import TextCodec
from areal.services.inference.engines.base import EngineDelta, FinishReason
from areal.services.inference.recording.conversation import Conversation, text_mark
from areal.services.inference.recording.packing import token_array
from areal.services.inference.recording.values import TokenSample, TokenTurn, Turn


def samples_of(
    frame: Frame, temperature: float, conversation: Conversation | None, prompt_text: str | None
) -> list[TokenSample]:
    """``prompt_text`` is a chat's, from which the next turn goes on."""
    prompts = [token_array(prompt) for prompt in frame.prompts]
    each = frame.per_prompt
    return [
        _sample(frame, choice, prompts[choice.index // each], temperature, conversation, prompt_text)
        for choice in frame.choices
    ]


def _sample(
    frame: Frame,
    choice: Choice,
    prompt: array[int],
    temperature: float,
    conversation: Conversation | None,
    prompt_text: str | None,
) -> TokenSample:
    assert choice.finish_reason is not None
    text = None
    if prompt_text is not None:
        text = text_mark(prompt_text + _written_again(choice, frame.codec))
    return TokenSample(
        prompt_ids=prompt,
        output_ids=token_array(choice.token_ids),
        logprobs=choice.logprobs,
        versions=choice.versions,
        finish_reason=choice.finish_reason.value,
        temperature=temperature,
        after=conversation.after(assistant_message(choice.reply)) if conversation is not None else None,
        text=text,
        extra=_extra(choice),
    )


def _written_again(choice: Choice, codec: TextCodec) -> str:
    """The answer's text as a template will write it into the next prompt: what its caller was told, and the end of a
    turn. Special tokens that were sampled before that, its caller never saw."""
    raw, reply = codec.decode(choice.token_ids, skip_special=False), choice.reply
    if reply.calls or reply.reasoning or choice.stop is not None or raw == reply.content:
        return raw
    last = choice.token_ids[-1:]
    ended = bool(last) and last[0] in codec.end_ids
    return reply.content + (codec.decode(last, skip_special=False) if ended else "")


def _extra(choice: Choice) -> dict[str, Any]:
    """What a replay cannot find in the tokens."""
    extra: dict[str, Any] = {}
    if choice.stop_token_id is not None:
        extra["stop_token_id"] = choice.stop_token_id
    if choice.top_logprobs:
        extra["top_logprobs"] = choice.top_logprobs
    if choice.reply.calls:
        extra["call_ids"] = [call.id for call in choice.reply.calls]
    return extra


def token_turns(turns: Sequence[Turn]) -> list[TokenTurn]:
    return [turn for turn in turns if isinstance(turn, TokenTurn)]


def call_ids(turn: TokenTurn) -> Sequence[str]:
    ids: Sequence[str] = turn.extra.get("call_ids", ())
    return ids


def say_again(choice: Choice, turn: TokenTurn) -> Update:
    """The whole of a recorded choice as one update: its text is a function of its tokens."""
    tops = turn.extra.get("top_logprobs")
    delta = EngineDelta(
        index=choice.index,
        token_ids=tuple(turn.output_ids),
        logprobs=tuple(turn.logprobs),
        versions=tuple(turn.versions),
        top_logprobs=tuple(tuple((token, logprob) for token, logprob in top) for top in tops) if tops else None,
        finish_reason=FinishReason(turn.finish_reason),
        stop_token_id=turn.extra.get("stop_token_id"),
    )
    return choice.push(delta)
