"""One answer to one prompt, and one verifiable reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.workflow_api import RolloutWorkflow, Trajectory
from areal.workflow.prompts import prompt_ids, resolved_tokenizer, reward_keywords
from areal.workflow.rewards import rewarded_by
from areal.workflow.tensors import Row, rows

if TYPE_CHECKING:
    from areal.api.cli_args import GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine

T = TypeVar("T")

_SHORT = 1024


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
        self._reward = rewarded_by(reward_fn, reward_timeout)
        self._thinking = enable_thinking
        self._input_ids_of = get_input_ids_fn
        self._prompt_of = data_extract_prompt_fn

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Trajectory | None:
        asked = await self._asked(data)
        answer = await engine.agenerate(self._request(asked))
        prompt, (completion,) = await self._texts(asked, [answer])
        reward = await self._reward(prompt, completion, asked, answer.output_tokens, **reward_keywords(data))
        return rows([_row(answer, reward)])

    def can_group(self, engine: Any, size: int) -> bool:
        may = getattr(engine, "samples_together", None)
        return may is not None and bool(may(self.gconfig, size))

    async def arun_group(self, engine: Any, data: dict[str, Any], size: int) -> list[Row | Exception]:
        asked = await self._asked(data)
        answers: list[ModelResponse] = await engine.agenerate_group(self._request(asked), size)
        prompt, completions = await self._texts(asked, answers)
        keywords = reward_keywords(data)
        rewards = await self._reward.each(
            [
                ((prompt, completion, asked, answer.output_tokens), keywords)
                for answer, completion in zip(answers, completions, strict=True)
            ]
        )
        return [
            reward if isinstance(reward, Exception) else _row(answer, reward)
            for answer, reward in zip(answers, rewards, strict=True)
        ]

    def _request(self, asked: list[int]) -> ModelRequest:
        return ModelRequest(input_ids=asked, gconfig=self.gconfig, tokenizer=self.tokenizer)

    async def _asked(self, data: dict[str, Any]) -> list[int]:
        return await beside_the_loop(lambda: self._input_ids(data), _characters(data))

    async def _texts(self, asked: list[int], answers: Sequence[ModelResponse]) -> tuple[str, list[str]]:
        def decoded() -> tuple[str, list[str]]:
            decode = self.tokenizer.decode
            return decode(asked), [decode(each.output_tokens, skip_special_tokens=True) for each in answers]

        return await beside_the_loop(decoded, len(asked) + sum(each.output_len for each in answers))

    def _input_ids(self, data: dict[str, Any]) -> list[int]:
        if self._input_ids_of is not None:
            asked = self._prompt_of(data) if self._prompt_of is not None else data["messages"]
            return list(self._input_ids_of(asked, self.tokenizer, bool(self._thinking)))
        if self._prompt_of is not None:
            data = {"messages": self._prompt_of(data)}
        return prompt_ids(self.tokenizer, data, self._thinking)


def _row(answer: ModelResponse, reward: float) -> Row:
    before, after = answer.input_len, answer.output_len
    return Row(
        input_ids=answer.input_tokens + answer.output_tokens,
        loss_mask=[0] * before + [1] * after,
        logprobs=[0.0] * before + answer.output_logprobs,
        versions=[-1] * before + answer.output_versions,
        turn_ids=[-1] * before + [0] * after,
        reward=reward,
        truncated=answer.stop_reason == "length",
    )


def _characters(data: dict[str, Any]) -> int:
    """About how much there is to tokenise."""
    return sum(len(str(data[name])) for name in ("messages", "prompt") if name in data)


async def beside_the_loop(work: Callable[[], T], size: int) -> T:
    """``work()``, on another thread where it takes longer than getting there. ``size``: of a text, in characters or
    tokens."""
    return work() if size <= _SHORT else await asyncio.to_thread(work)
