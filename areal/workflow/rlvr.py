"""Workflow of one answer to one prompt with a verifiable reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.workflow_api import RolloutWorkflow, Trajectory
from areal.dataset.tokenizers import load_hf_tokenizer, texts
from areal.errors import UsageFault
from areal.loading import load_attr
from areal.rollout.rows import PromptCache, RewardFn, RowReward, refuse_images, stopping
from areal.rollout.tensors import RewardedResponse, response_rows

if TYPE_CHECKING:
    from areal.api.cli_args import GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine


T = TypeVar("T")

_INLINE_SIZE = 1024


class RLVRWorkflow(RolloutWorkflow):
    """Samples one response to ``messages`` (or ``prompt``, or ``input_ids``) of a row; the reward function gets the
    row's columns as keywords.

    ``reward_fn`` may be a list, whose rewards times ``reward_weights`` (default 1) are added up. Functions and
    ``tokenizer`` may be names (``module:function``, a model folder). ``gconfig.n_samples`` is the trainer's group size;
    an episode is one sample.
    """

    def __init__(
        self,
        reward_fn: RewardFn,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        enable_thinking: bool | None = None,
        reward_timeout: float = 15.0,
        get_input_ids_fn: Callable[..., list[int]] | str | None = None,
        data_extract_prompt_fn: Callable[[dict[str, object]], Any] | str | None = None,
        reward_weights: Sequence[float] | None = None,
    ) -> None:
        self.tokenizer = load_hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.gconfig = stopping(gconfig, self.tokenizer)
        self._reward = RowReward(reward_fn, reward_timeout, reward_weights)
        self._thinking = enable_thinking
        self._prompts = PromptCache(self.tokenizer, enable_thinking)
        self._input_ids_of = _function(get_input_ids_fn, "get_input_ids_fn")
        self._prompt_of = _function(data_extract_prompt_fn, "data_extract_prompt_fn")

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, object]) -> Trajectory | None:
        self._reward.check(data)
        request, prompt = await self._request(data)
        answer = await engine.agenerate(request)
        (completion,) = await self._texts([answer])
        reward = await self._reward(prompt, completion, request.input_ids, answer.output_tokens, data)
        return response_rows([RewardedResponse(answer, reward)])

    def can_group(self, engine: Any, size: int) -> bool:
        may = getattr(engine, "samples_together", None)
        return may is not None and bool(may(self.gconfig, size))

    async def arun_group(self, engine: Any, data: dict[str, object], size: int) -> list[RewardedResponse | Exception]:
        self._reward.check(data)
        request, prompt = await self._request(data)
        answers: list[ModelResponse] = await engine.agenerate_group(request, size)
        completions = await self._texts(answers)
        tokens = [answer.output_tokens for answer in answers]
        rewards = await self._reward.each(prompt, request.input_ids, list(zip(completions, tokens, strict=True)), data)
        return [
            reward if isinstance(reward, Exception) else RewardedResponse(answer, reward)
            for answer, reward in zip(answers, rewards, strict=True)
        ]

    async def _request(self, data: dict[str, object]) -> tuple[ModelRequest, str]:
        """Return the request for a row, and the text of its prompt."""
        refuse_images(data)
        characters = sum(len(str(data[name])) for name in ("messages", "tools", "prompt") if name in data)
        ids, prompt = await run_off_loop(lambda: self._prompt(data), characters)
        return ModelRequest(input_ids=ids, gconfig=self.gconfig, tokenizer=self.tokenizer), prompt

    async def _texts(self, answers: Sequence[ModelResponse]) -> list[str]:
        tokens = [each.output_tokens for each in answers]
        return await run_off_loop(lambda: texts(self.tokenizer, tokens), sum(map(len, tokens)))

    def _prompt(self, data: dict[str, Any]) -> tuple[list[int], str]:
        kwargs = data.get("chat_template_kwargs")
        if self._input_ids_of is not None:
            if kwargs:
                raise UsageFault("chat_template_kwargs of a row have no effect beside get_input_ids_fn")
            messages = self._prompt_of(data) if self._prompt_of is not None else data["messages"]
            ids = list(self._input_ids_of(messages, self.tokenizer, bool(self._thinking)))
            return ids, self.tokenizer.decode(ids)
        if self._prompt_of is not None:
            data = {"messages": self._prompt_of(data), "tools": data.get("tools"), "chat_template_kwargs": kwargs}
        return self._prompts.of(data)


def _function(given: Callable[..., Any] | str | None, kind: str) -> Callable[..., Any] | None:
    return load_attr(given, kind) if isinstance(given, str) else given


async def run_off_loop(work: Callable[[], T], size: int) -> T:
    """Call ``work``. It runs on another thread if ``size`` (characters or tokens) exceeds ``_INLINE_SIZE``; below it,
    switching threads costs more than the work."""
    return work() if size <= _INLINE_SIZE else await asyncio.to_thread(work)
