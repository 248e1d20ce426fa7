"""Workflow that samples further answers until one is correct."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.workflow_api import RolloutWorkflow, Trajectory
from areal.conversation import Branch, Chat, Conversation, normalise
from areal.dataclasses import dataclass, field
from areal.dataset.tokenizers import chat_of, load_hf_tokenizer
from areal.errors import ArealError
from areal.rollout.rows import RewardFn, RowReward, refuse_images, stopping, variables_of
from areal.rollout.tensors import concat_padded_tensors, row

if TYPE_CHECKING:
    from areal.api.cli_args import GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine


TRY_AGAIN = (
    "Your answer is either wrong or not parsable to the reward function. You may misunderstand the original question. "
    "Please carefully read the original question, check the previous errors, and try to answer it again."
)
_CONTEXT_FULL = "context_length_exceeded"  # the code of an engine's error, also for ``gconfig.max_tokens``


@dataclass
class _RowBuilder:
    """One row that grows turn by turn. Earlier turns are never tokenized again."""

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    truncated: bool = False
    temperature: float = 1.0

    def add_prompt(self, tokens: list[int]) -> None:
        self._extend(tokens, 0, [0.0] * len(tokens), [-1] * len(tokens), -1)

    def add_answer(self, answer: ModelResponse, turn: int) -> None:
        self._extend(answer.output_tokens, 1, answer.output_logprobs, answer.output_versions, turn)
        self.truncated = answer.stop_reason == "length"
        self.temperature = answer.temperature

    def _extend(self, tokens: list[int], mask: int, logprobs: list[float], versions: list[int], turn: int) -> None:
        self.input_ids += tokens
        self.loss_mask += [mask] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions
        self.turn_ids += [turn] * len(tokens)


class MultiTurnWorkflow(RolloutWorkflow):
    """Samples up to ``max_turns`` responses, with ``feedback`` after each wrong one. The reward is that of the last
    response, multiplied by ``turn_discount`` for each earlier turn. A full context ends the episode with its last
    response. An episode is one row if the chat template continues the sampled tokens, and otherwise several rows with
    the same reward."""

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_turns: int = 3,
        turn_discount: float = 0.9,
        enable_thinking: bool | None = None,
        feedback: str = TRY_AGAIN,
        reward_timeout: float = 15.0,
        reward_weights: Sequence[float] | None = None,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {max_turns}")
        self.tokenizer = load_hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.gconfig = stopping(gconfig, self.tokenizer)
        self._reward = RowReward(reward_fn, reward_timeout, reward_weights)
        self._max_turns = max_turns
        self._discount = turn_discount
        self._thinking = enable_thinking
        self._feedback = feedback

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, object]) -> Trajectory | None:
        self._reward.check(data)
        refuse_images(data)
        held = normalise(data["messages"], data.get("tools"))
        chat = chat_of(self.tokenizer, bool(held.tools))
        variables = variables_of(self.tokenizer, data, self._thinking)
        prompt = question = await asyncio.to_thread(chat.prompt, held, **variables)
        rows, scale, reward = [_RowBuilder()], 1.0, 0.0
        for turn in range(self._max_turns):
            tokens = [*rows[-1].input_ids, *question]
            try:
                answer = await engine.agenerate(
                    ModelRequest(input_ids=tokens, gconfig=self.gconfig, tokenizer=self.tokenizer)
                )
            except ArealError as error:
                if turn and getattr(error, "code", None) == _CONTEXT_FULL:
                    break
                raise
            rows[-1].add_prompt(question)
            rows[-1].add_answer(answer, turn)
            completion = self.tokenizer.decode(answer.output_tokens, skip_special_tokens=True)
            reward = scale * await self._reward(
                self.tokenizer.decode(prompt), completion, prompt, answer.output_tokens, data
            )
            if reward > 0 or turn == self._max_turns - 1:
                break
            held, question = await asyncio.to_thread(self._next, chat, held, rows, answer, variables)
            scale *= self._discount
        return _sample_of([row(**vars(each), reward=reward) for each in rows if each.input_ids])

    def _next(
        self,
        chat: Chat,
        held: Conversation,
        rows: list[_RowBuilder],
        answer: ModelResponse,
        variables: Mapping[str, Any],
    ) -> tuple[Conversation, list[int]]:
        """Return the conversation with a response and the feedback to it, and the tokens that they add to the row. If
        the template renders an earlier response differently, a new row begins with the whole prompt."""
        response = chat.message(held, answer.output_tokens, **variables)
        after = held.then(response, {"role": "user", "content": self._feedback})
        found = chat.continuation(rows[-1].input_ids, held, after, **variables)
        if isinstance(found, Branch):
            rows.append(_RowBuilder())
            return after, chat.prompt(after, **variables)
        return after, found


def _sample_of(rows: list[Trajectory]) -> Trajectory:
    """Return the rows of one episode, each with the reward of the last one."""
    if len(rows) == 1:
        return rows[0]
    found = concat_padded_tensors(rows)
    found["original_rewards"][:-1] = 0
    return {**found, "sample_ids": found["turn_ids"].new_zeros(len(rows))}
