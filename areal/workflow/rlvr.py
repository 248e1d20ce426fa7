"""One answer to one prompt, and one verifiable reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.registry import load_attr
from areal.api.workflow_api import RolloutWorkflow, Trajectory
from areal.dataset.tokenizers import texts
from areal.workflow.prompts import Prompts, resolved_tokenizer
from areal.workflow.rewards import RewardFn, row_reward
from areal.workflow.tensors import Answered, answered

if TYPE_CHECKING:
    from areal.api.cli_args import GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine

T = TypeVar("T")

_SHORT = 1024


class RLVRWorkflow(RolloutWorkflow):
    """``data`` has ``messages`` (or ``prompt``, or ``input_ids``); the reward gets its columns as keywords.

    ``reward_fn`` may be a list, whose rewards times ``reward_weights`` (1 each) are added up. Functions and
    ``tokenizer`` may be names (``module:function``, a model's folder). ``n_samples`` of ``gconfig`` is the trainer's
    group size: an episode is one sample.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool | None = None,
        reward_timeout: float = 15.0,
        get_input_ids_fn: Callable[..., list[int]] | str | None = None,
        data_extract_prompt_fn: Callable[[dict[str, Any]], Any] | str | None = None,
        reward_weights: Sequence[float] | None = None,
    ) -> None:
        self.tokenizer = resolved_tokenizer(tokenizer)
        self.gconfig = gconfig.new(n_samples=1).new_with_stop_and_pad_token_ids(self.tokenizer)
        self._reward = row_reward(reward_fn, reward_timeout, reward_weights)
        self._thinking = enable_thinking
        self._prompts = Prompts(self.tokenizer, enable_thinking)
        self._input_ids_of = _function(get_input_ids_fn, "get_input_ids_fn")
        self._prompt_of = _function(data_extract_prompt_fn, "data_extract_prompt_fn")

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        self._reward.check(data)
        asked, prompt = await self._asked(data)
        answer = await engine.agenerate(self._request(asked))
        (completion,) = await self._texts([answer])
        reward = await self._reward(prompt, completion, asked, answer.output_tokens, data)
        return answered([Answered(answer, reward)])

    def can_group(self, engine: Any, size: int) -> bool:
        may = getattr(engine, "samples_together", None)
        return may is not None and bool(may(self.gconfig, size))

    async def arun_group(self, engine: Any, data: dict[str, Any], size: int) -> list[Answered | Exception]:
        self._reward.check(data)
        asked, prompt = await self._asked(data)
        answers: list[ModelResponse] = await engine.agenerate_group(self._request(asked), size)
        completions = await self._texts(answers)
        tokens = [answer.output_tokens for answer in answers]
        rewards = await self._reward.each(prompt, asked, list(zip(completions, tokens, strict=True)), data)
        return [
            reward if isinstance(reward, Exception) else Answered(answer, reward)
            for answer, reward in zip(answers, rewards, strict=True)
        ]

    def _request(self, asked: list[int]) -> ModelRequest:
        return ModelRequest(input_ids=asked, gconfig=self.gconfig, tokenizer=self.tokenizer)

    async def _asked(self, data: dict[str, Any]) -> tuple[list[int], str]:
        """The prompt's token ids, and their text."""
        return await beside_the_loop(lambda: self._prompt(data), _characters(data))

    async def _texts(self, answers: Sequence[ModelResponse]) -> list[str]:
        tokens = [each.output_tokens for each in answers]
        return await beside_the_loop(lambda: texts(self.tokenizer, tokens), sum(map(len, tokens)))

    def _prompt(self, data: dict[str, Any]) -> tuple[list[int], str]:
        if self._input_ids_of is not None:
            asked = self._prompt_of(data) if self._prompt_of is not None else data["messages"]
            ids = list(self._input_ids_of(asked, self.tokenizer, bool(self._thinking)))
            return ids, self.tokenizer.decode(ids)
        if self._prompt_of is not None:
            data = {"messages": self._prompt_of(data)}
        return self._prompts.of(data)


def _function(given: Callable[..., Any] | str | None, kind: str) -> Callable[..., Any] | None:
    return load_attr(given, kind) if isinstance(given, str) else given


def _characters(data: dict[str, Any]) -> int:
    """About how much there is to tokenise."""
    return sum(len(str(data[name])) for name in ("messages", "prompt") if name in data)


async def beside_the_loop(work: Callable[[], T], size: int) -> T:
    """``work()``, on another thread where it takes longer than getting there. ``size``: of a text, in characters or
    tokens."""
    return work() if size <= _SHORT else await asyncio.to_thread(work)
