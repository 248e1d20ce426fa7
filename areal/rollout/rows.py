"""Rows of a data set in workflows: the prompt's token ids, and the reward of its responses. The reward function is
loaded before the first episode, because a missing function would fail every episode."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from areal.api import stats
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_context import stat_scope
from areal.dataset.tokenizers import chat_of, prompt_tokens, template_variables
from areal.errors import UsageFault
from areal.http import tracing
from areal.loading import load_attr
from areal.reward.functions import Parameters

if TYPE_CHECKING:
    from areal.api.cli_args import GenerationHyperparameters


def prompt_ids(tokenizer: Any, data: Mapping[str, Any], thinking: bool | None = None) -> list[int]:
    """Return the token ids of ``input_ids``, of ``messages`` and ``tools`` (with the chat template), or of ``prompt``
    (plain text). Raises UsageFault."""
    if data.get("input_ids") is not None:
        return [int(token) for token in data["input_ids"]]
    if data.get("messages") is not None:
        return prompt_tokens(tokenizer, data["messages"], data.get("tools"), **variables_of(tokenizer, data, thinking))
    if isinstance(data.get("prompt"), str):
        return list(tokenizer.encode(data["prompt"]))
    raise UsageFault(f"a row needs messages, prompt or input_ids; this one has {', '.join(data) or 'nothing'}")


def refuse_images(data: Mapping[str, object]) -> None:
    """Raise UsageFault for a row with images, because a text workflow would not send them to the model."""
    if data.get("images") or data.get("image"):
        raise UsageFault(
            "the row has images, and this workflow samples from text",
            hint="workflow: areal.workflow.vision_rlvr:VisionRLVRWorkflow",
        )


def variables_of(tokenizer: Any, data: Mapping[str, Any], thinking: bool | None) -> dict[str, object]:
    """Return the chat template's variables: those of the row, and ``thinking``. None: the template's default."""
    given = {} if thinking is None else {"enable_thinking": thinking}
    chat = chat_of(tokenizer, bool(data.get("tools")))
    return {**given, **template_variables(chat, data.get("chat_template_kwargs"))}


def stopping(gconfig: GenerationHyperparameters, tokenizer: Any) -> GenerationHyperparameters:
    """Return a copy for one sample that also stops at the tokens that end a turn in the tokenizer's chat template."""
    gconfig = gconfig.new(n_samples=1).new_with_stop_and_pad_token_ids(tokenizer)
    if gconfig.ignore_eos or not getattr(tokenizer, "chat_template", None):
        return gconfig
    return gconfig.new(stop_token_ids=sorted({*gconfig.stop_token_ids, *chat_of(tokenizer).end_ids}))


class PromptCache:
    """Token ids and text of prompts, cached across epochs up to ``max_tokens`` tokens."""

    def __init__(self, tokenizer: Any, thinking: bool | None = None, max_tokens: int = 1 << 20) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._max_tokens = max_tokens
        self._size = 0
        self._cache: dict[str, tuple[tuple[int, ...], str]] = {}
        self._lock = threading.Lock()  # long prompts are tokenized on other threads

    def of(self, data: Mapping[str, object]) -> tuple[list[int], str]:
        """Return the token ids as ``prompt_ids`` does, and their text."""
        key = self._key(data)
        if key is not None and (known := self._cache.get(key)) is not None:
            return list(known[0]), known[1]
        ids = prompt_ids(self._tokenizer, data, self._thinking)
        text = self._tokenizer.decode(ids)
        if key is not None:
            self._remember(key, tuple(ids), text)
        return ids, text

    def _key(self, data: Mapping[str, object]) -> str | None:
        """Return the cache key of a row; None if it has token ids, or columns that are not JSON."""
        if data.get("input_ids") is not None:
            return None
        if data.get("messages") is None:
            return str(data.get("prompt"))
        template = chat_of(self._tokenizer, bool(data.get("tools"))).template
        variables = variables_of(self._tokenizer, data, self._thinking)
        return template.key(data["messages"], data.get("tools"), **variables)

    def _remember(self, key: str, ids: tuple[int, ...], text: str) -> None:
        with self._lock:
            if key in self._cache:
                return
            self._cache[key] = ids, text
            self._size += len(ids)
            while self._size > self._max_tokens:
                evicted, _ = self._cache.pop(next(iter(self._cache)))
                self._size -= len(evicted)


RewardFn: TypeAlias = "Callable[..., Any] | str | Sequence[Callable[..., Any] | str]"


class _RewardCaller:
    """A reward function; ``call`` selects the columns of a row that it takes."""

    def __init__(self, reward_fn: Callable[..., Any] | str, timeout_s: float) -> None:
        found = load_attr(reward_fn, "reward") if isinstance(reward_fn, str) else reward_fn
        try:
            self.wrapper = AsyncRewardWrapper(found, timeout_seconds=timeout_s)
        except ValueError as error:
            raise UsageFault(f"reward {reward_fn!r}: {error}") from error
        parameters = Parameters.of(found)
        parameters.check_types()
        self.call, self.calls = parameters.call, parameters.calls
        if isinstance(reward_fn, str):
            self.name = reward_fn.replace(":", ".").rpartition(".")[2]
        else:
            self.name = str(getattr(reward_fn, "__name__", type(reward_fn).__name__))


class RowReward:
    """Rewards responses to rows of a data set. ``reward_fn`` (or its name) gets prompt, completion, their token ids,
    and the columns of the row that it takes. The result is the sum of all functions' rewards times their weights
    (default 1); the mean of each is a metric under the function's name. Raises UsageFault for a function that does not
    exist or cannot be called, and for weights that do not match."""

    def __init__(self, reward_fn: RewardFn, timeout_s: float = 15.0, weights: Sequence[float] | None = None) -> None:
        is_several = isinstance(reward_fn, list | tuple)
        given: Sequence[Any] = reward_fn if is_several else [reward_fn]  # type: ignore[assignment]
        self._weights = [1.0] * len(given) if weights is None else [float(weight) for weight in weights]
        if not given or len(self._weights) != len(given):
            raise UsageFault(f"reward_weights has {len(self._weights)} numbers, and reward_fn {len(given)} functions")
        if not all(math.isfinite(weight) for weight in self._weights):
            raise UsageFault(f"reward_weights must be finite numbers, not {self._weights}")
        self._functions = [_RewardCaller(each, timeout_s) for each in given]
        names = [each.name for each in self._functions]
        if len(set(names)) < len(names):
            raise UsageFault(
                f"reward_fn has several functions of the same name, which metrics cannot distinguish: {names}"
            )
        self._names = names if is_several or weights is not None else []

    def check(self, row: Mapping[str, object]) -> None:
        """Check a row before sampling. Raises UsageFault if it lacks a column that a function requires."""
        for function in self._functions:
            function.call(("", "", [], []), row)

    async def __call__(
        self, prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], row: Mapping[str, object]
    ) -> float:
        calls = [(each, *each.call((prompt, completion, prompt_ids, completion_ids), row)) for each in self._functions]
        with tracing.span("reward") as span:
            reward = self._sum(await asyncio.gather(*(each.wrapper(*args, **kwargs) for each, args, kwargs in calls)))
            span.set({"areal.reward": reward})
        return reward

    async def each(
        self, prompt: str, prompt_ids: list[int], answers: list[tuple[str, list[int]]], row: Mapping[str, object]
    ) -> list[float | Exception]:
        """Return the reward of each response (text, token ids) to one prompt, or the first error of its functions."""
        owns = [(prompt, text, prompt_ids, ids) for text, ids in answers]
        jobs = [(function, function.calls(owns, row)) for function in self._functions]
        with tracing.span("reward", {"areal.samples": len(answers)}):
            found = await asyncio.gather(*(function.wrapper.each(calls) for function, calls in jobs))
        result: list[float | Exception] = []
        for values in zip(*found, strict=True):
            errors = [value for value in values if isinstance(value, Exception)]
            result.append(errors[0] if errors else self._sum([v for v in values if not isinstance(v, Exception)]))
        return result

    def _sum(self, values: Sequence[float]) -> float:
        if self._names:
            numbers = {f"reward/{name}": value for name, value in zip(self._names, values, strict=True)}
            stats.get(stat_scope()).scalar(**numbers)
        return sum(weight * value for weight, value in zip(self._weights, values, strict=True))
