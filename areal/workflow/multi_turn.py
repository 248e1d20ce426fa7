"""An answer that is tried again until it is right: each further turn costs a discount of the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.workflow_api import RolloutWorkflow, Trajectory
from areal.dataset.tokenizers import templated
from areal.errors import ArealError
from areal.workflow.prompts import chat_ids, resolved_tokenizer
from areal.workflow.rewards import RewardFn, row_reward
from areal.workflow.tensors import row

if TYPE_CHECKING:
    from areal.api.cli_args import GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine

TRY_AGAIN = (
    "Your answer is either wrong or not parsable to the reward function. You may misunderstand the original question. "
    "Please carefully read the original question, check the previous errors, and try to answer it again."
)
_FULL = "context_length_exceeded"  # what an engine's error says, of the model's context or of ``gconfig.max_tokens``


@dataclass
class _Row:
    """One row that grows turn by turn: tokens of earlier turns are never made again from text."""

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    truncated: bool = False
    temperature: float = 1.0

    def ask(self, tokens: list[int]) -> None:
        self._extend(tokens, 0, [0.0] * len(tokens), [-1] * len(tokens), -1)

    def answered(self, answer: ModelResponse, turn: int) -> None:
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
    """Up to ``max_turns`` answers; the reward of the last one counts, times ``turn_discount`` for each turn before
    it. An episode whose context is full ends with the answer that it has."""

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
        self.tokenizer = resolved_tokenizer(tokenizer)
        self.gconfig = gconfig.new(n_samples=1).new_with_stop_and_pad_token_ids(self.tokenizer)
        self._reward = row_reward(reward_fn, reward_timeout, reward_weights)
        self._max_turns = max_turns
        self._discount = turn_discount
        self._thinking = enable_thinking
        self._feedback = feedback

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        self._reward.check(data)
        so_far, messages = _Row(), [dict(message) for message in data["messages"]]
        asked = question = await asyncio.to_thread(chat_ids, self.tokenizer, messages, self._thinking)
        scale, reward = 1.0, 0.0
        for turn in range(self._max_turns):
            try:
                answer = await engine.agenerate(
                    ModelRequest(
                        input_ids=[*so_far.input_ids, *question], gconfig=self.gconfig, tokenizer=self.tokenizer
                    )
                )
            except ArealError as error:
                if turn and getattr(error, "code", None) == _FULL:
                    break
                raise
            so_far.ask(question)
            so_far.answered(answer, turn)
            reward = scale * await self._rewarded(asked, answer, data)
            if reward > 0 or turn == self._max_turns - 1:
                break
            question = await asyncio.to_thread(self._next_question, answer)
            scale *= self._discount
        return row(**vars(so_far), reward=reward)

    async def _rewarded(self, asked: list[int], answer: ModelResponse, data: dict[str, Any]) -> float:
        prompt = self.tokenizer.decode(asked)
        completion = self.tokenizer.decode(answer.output_tokens, skip_special_tokens=True)
        return await self._reward(prompt, completion, asked, answer.output_tokens, data)

    def _next_question(self, answer: ModelResponse) -> list[int]:
        """The tokens between the end of an answer and the next one: what the template puts there, found as the
        difference of a conversation with and without the feedback, so that no earlier turn is tokenised again."""
        turn: list[dict[str, Any]] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        before = self._ids(turn)
        after = chat_ids(self.tokenizer, [*turn, {"role": "user", "content": self._feedback}], self._thinking)
        shared = next((at for at, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
        ends = [at for at in range(shared) if before[at] == self.tokenizer.eos_token_id]
        if not ends:
            return after[shared:]
        ended = answer.output_tokens[-1:] == [self.tokenizer.eos_token_id]
        return before[ends[-1] + ended : shared] + after[shared:]

    def _ids(self, messages: list[dict[str, Any]]) -> list[int]:
        return templated(self.tokenizer, messages)
