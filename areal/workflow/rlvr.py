"""One answer to one prompt, and one verifiable reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from areal.api.io_struct import ModelRequest
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow, Trajectory
from areal.workflow.prompts import prompt_ids, resolved_tokenizer, reward_keywords
from areal.workflow.tensors import row

if TYPE_CHECKING:
    from areal.api.cli_args import GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine


class RLVRWorkflow(RolloutWorkflow):
    """``data`` has ``messages`` (or ``prompt``, or ``input_ids``); all of it goes to the reward as keywords.

    ``reward_fn`` and ``tokenizer`` may be names (``module:function``, a model's folder). ``n_samples`` of ``gconfig``
    is the trainer's group size: an episode is one sample.
    """

    def __init__(
        self,
        reward_fn: Callable[..., Any] | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool | None = None,
        reward_timeout: float = 15.0,
        get_input_ids_fn: Callable[..., list[int]] | None = None,
        data_extract_prompt_fn: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self.tokenizer = resolved_tokenizer(tokenizer)
        self.gconfig = gconfig.new(n_samples=1).new_with_stop_and_pad_token_ids(self.tokenizer)
        self._reward = AsyncRewardWrapper(reward_fn, timeout_seconds=reward_timeout)
        self._thinking = enable_thinking
        self._input_ids_of = get_input_ids_fn
        self._prompt_of = data_extract_prompt_fn

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        asked = await asyncio.to_thread(self._input_ids, data)
        answer = await engine.agenerate(ModelRequest(input_ids=asked, gconfig=self.gconfig, tokenizer=self.tokenizer))
        prompt, completion = await asyncio.to_thread(self._texts, asked, answer.output_tokens)
        reward = await self._reward(prompt, completion, asked, answer.output_tokens, **reward_keywords(data))
        before, after = answer.input_len, answer.output_len
        return row(
            input_ids=answer.input_tokens + answer.output_tokens,
            loss_mask=[0] * before + [1] * after,
            logprobs=[0.0] * before + answer.output_logprobs,
            versions=[-1] * before + answer.output_versions,
            turn_ids=[-1] * before + [0] * after,
            reward=reward,
            truncated=answer.stop_reason == "length",
        )

    def _input_ids(self, data: dict[str, Any]) -> list[int]:
        if self._input_ids_of is not None:
            asked = self._prompt_of(data) if self._prompt_of is not None else data["messages"]
            return list(self._input_ids_of(asked, self.tokenizer, bool(self._thinking)))
        if self._prompt_of is not None:
            data = {"messages": self._prompt_of(data)}
        return prompt_ids(self.tokenizer, data, self._thinking)

    def _texts(self, asked: list[int], answered: list[int]) -> tuple[str, str]:
        return self.tokenizer.decode(asked), self.tokenizer.decode(answered, skip_special_tokens=True)
