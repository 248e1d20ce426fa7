"""Workflows with a verifiable reward: one response to a prompt, or several turns until a response is correct.

A row of a data set is converted to the prompt's token ids, sampled responses, rewards, and training rows. The reward
function is loaded before the first episode, because a missing function would fail every episode.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from areal.api import stats
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import RolloutWorkflow, Trajectory
from areal.api.workflow_context import stat_scope
from areal.conversation import Branch, Chat, Conversation, normalise
from areal.dataclasses import dataclass, field
from areal.dataset.tokenizers import chat_of, load_hf_tokenizer, prompt_tokens, template_variables, texts
from areal.errors import ArealError, UsageFault
from areal.http import tracing
from areal.loading import load_attr
from areal.reward.functions import Parameters
from areal.rollout.tensors import RewardedResponse, concat_padded_tensors, response_rows, row

if TYPE_CHECKING:
    from areal.api.cli_args import GenerationHyperparameters
    from areal.api.engine_api import InferenceEngine


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


def _stopping(gconfig: GenerationHyperparameters, tokenizer: Any) -> GenerationHyperparameters:
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

    def of(self, data: Mapping[str, Any]) -> tuple[list[int], str]:
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
        self.call = parameters.call
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
        """Call before sampling. Raises UsageFault for a row that lacks a column that a function requires."""
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
        self, prompt: str, prompt_ids: list[int], answers: list[tuple[str, list[int]]], row: Mapping[str, Any]
    ) -> list[float | Exception]:
        """Return the reward of each response (text, token ids) to one prompt, or the first error of its functions."""
        jobs = [
            (function, [function.call((prompt, text, prompt_ids, ids), row) for text, ids in answers])
            for function in self._functions
        ]
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
        self.gconfig = _stopping(gconfig, self.tokenizer)
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
        self.gconfig = _stopping(gconfig, self.tokenizer)
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
