"""The ``InferenceEngine`` that the workflow of one episode samples from.

Interruption: a weight update pauses and resumes generation inside the service. Where an engine aborts a response
instead, its partial tokens are kept and the rest is requested; each token keeps the log-probability and version it was
sampled with.

Short prompts that are requested within two milliseconds with the same options become one call, because the call is most
of the cost of a short response. A long response is requested alone: a batch would last as long as its longest response,
and the router balances replicas only by whole calls.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

import orjson

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.client.errors import CallerError, ServiceError
from areal.client.inference import AsyncGroup, AsyncInferenceClient
from areal.dataclasses import dataclass, field, replace
from areal.dataset.images import BadImage, from_base64, images_key
from areal.http import tracing
from areal.rollout.sessions import GroupSessions
from areal.wire.sampling import MAX_CHOICES, derived_seed

if TYPE_CHECKING:
    from areal.api.config.rollout import GenerationHyperparameters
    from areal.client.inference import Style
    from areal.client.trajectories import Trajectories


_BATCH_DELAY_S = 0.002
_SHORT_ANSWER = 32  # tokens
_SHORT_PROMPT = 512
_MAX_SEGMENTS = 32
_ABORT_PAUSE_S = 0.2
_ONLINE_WAIT_S = 30.0
_KNOWN_PAUSE_S = 0.1

Choices = list[dict[str, object]]


def prompts_per_call(waiting: int, choices: int, replicas: int) -> int:
    """Return the number of prompts per call, out of ``waiting`` with ``choices`` each: every replica gets its share."""
    share = -(-waiting // max(1, replicas))
    return max(1, min(share, MAX_CHOICES // choices))


def is_short(prompt_tokens: int, max_tokens: int) -> bool:
    return prompt_tokens <= _SHORT_PROMPT and max_tokens <= _SHORT_ANSWER


@dataclass(frozen=True)
class _PendingPrompt:
    prompt: Sequence[int]
    seed: int | None = None
    choices: asyncio.Future[Choices] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def resolve(self, choices: Choices) -> None:
        if not self.choices.done():
            self.choices.set_result(choices)

    def fail(self, error: Exception) -> None:
        if not self.choices.done():
            self.choices.set_exception(error)


class PromptBatcher:
    """Combines prompts into calls. ``replicas``: the number of the model's servers; 0 (unknown) disables it."""

    def __init__(self, client: AsyncInferenceClient, replicas: int = 0) -> None:
        self._client = client
        self._replicas = replicas
        self._waiting: dict[bytes, list[_PendingPrompt]] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def complete(
        self, prompt: Sequence[int], *, n: int = 1, max_tokens: int, default_seed: int | None = None, **fields: Any
    ) -> Choices:
        """Return the ``n`` choices of one prompt, with ``index`` from 0. Prompts of one call may have different
        ``default_seed``. Raises ClientError."""
        options = {**fields, "n": n, "max_tokens": max_tokens}
        pending = _PendingPrompt(prompt, default_seed)
        alone = "image_data" in fields or tracing.header_lines()  # one call, one trace
        if alone or not (self._replicas and is_short(len(prompt), max_tokens)):
            return await self._complete_one(pending, options)
        key = orjson.dumps(options, option=orjson.OPT_SORT_KEYS)
        if (others := self._waiting.get(key)) is not None:
            others.append(pending)
        else:
            self._waiting[key] = [pending]
            asyncio.get_running_loop().call_later(_BATCH_DELAY_S, self._flush, key, options)
        return await pending.choices

    async def _complete_one(self, pending: _PendingPrompt, options: dict[str, Any]) -> Choices:
        return (await self._client.complete(pending.prompt, default_seed=pending.seed, **options))["choices"]

    def _flush(self, key: bytes, options: dict[str, Any]) -> None:
        waiting = [pending for pending in self._waiting.pop(key) if not pending.choices.done()]
        size = prompts_per_call(len(waiting), options["n"], self._replicas)
        for first in range(0, len(waiting), size):
            batch = waiting[first : first + size]
            task = asyncio.create_task(self._call(batch, options), name=f"prompts-{len(batch)}")
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            for pending in batch:
                pending.choices.add_done_callback(partial(_cancel_if_unwanted, task, batch))

    async def _call(self, batch: Sequence[_PendingPrompt], options: dict[str, Any]) -> None:
        try:
            seeds = [pending.seed for pending in batch]
            prompts = [list(pending.prompt) for pending in batch]
            answer = await self._client.complete(prompts, default_seed=None if None in seeds else seeds, **options)
        except CallerError:  # one prompt is at fault: the others succeed alone
            await asyncio.gather(*(self._resolve_one(pending, options) for pending in batch))
        except Exception as error:  # noqa: BLE001 (every caller gets it)
            for pending in batch:
                pending.fail(error)
        else:
            each = options["n"]
            for number, pending in enumerate(batch):
                choices = answer["choices"][number * each : (number + 1) * each]
                for index, choice in enumerate(choices):
                    choice["index"] = index
                pending.resolve(choices)

    async def _resolve_one(self, pending: _PendingPrompt, options: dict[str, object]) -> None:
        try:
            pending.resolve(await self._complete_one(pending, options))
        except Exception as error:  # noqa: BLE001 (its caller gets it)
            pending.fail(error)

    async def close(self) -> None:
        """Cancel pending calls."""
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)


def _cancel_if_unwanted(task: asyncio.Task[None], batch: Sequence[_PendingPrompt], _: asyncio.Future[Choices]) -> None:
    if all(pending.choices.cancelled() for pending in batch):
        task.cancel()


def answer_budget(gconfig: GenerationHyperparameters, prompt_len: int, context: int | None = None) -> int:
    """Return the maximum number of tokens of the response. ``context``: the model's context length, if known. Raises
    CallerError if the prompt leaves no room."""
    if context is not None and gconfig.max_new_tokens >= context:
        _warn_of_context(gconfig.max_new_tokens, context)
    longest = min(gconfig.max_tokens, context or gconfig.max_tokens)
    budget = min(gconfig.max_new_tokens, longest - prompt_len)
    if budget < 1:
        message = f"a prompt of {prompt_len} tokens leaves no room for an answer in {longest}"
        raise CallerError(message, code="context_length_exceeded", param="max_tokens")
    return budget


@cache
def _warn_of_context(most: int, context: int) -> None:
    text = "gconfig.max_new_tokens is %d and the model's context %d tokens: a prompt and its answer end there"
    logging.getLogger(__name__).warning(text, most, context)


def _reseeded(fields: dict[str, object], part: int) -> dict[str, object]:
    """Return the fields of a request for the rest of an answer, with another seed than for its start."""
    return fields | {name: derived_seed(fields[name], part) for name in ("seed", "default_seed") if name in fields}


@dataclass
class PartialResponse:
    """A response that the engine may abort, so that the rest is requested again."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    stop_reason: str = "abort"

    def extend(self, choice: dict[str, Any]) -> None:
        """Append a choice. Raises ServiceError if it lacks token columns."""
        try:
            tokens, logprobs, versions = choice["token_ids"], choice["token_logprobs"], choice["versions"]
        except KeyError as error:
            message = f"the service answers without {error}: it is of another release than this client; restart it"
            raise ServiceError(message, code="other_release") from error
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += versions
        self.text += choice["text"]
        self.stop_reason = choice["finish_reason"]

    def response(self, req: ModelRequest, seconds: float) -> ModelResponse:
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=self.tokens,
            output_logprobs=self.logprobs,
            output_versions=self.versions,
            stop_reason=self.stop_reason,  # type: ignore[arg-type]
            temperature=0.0 if req.gconfig.is_greedy else req.gconfig.temperature,
            latency=seconds,
            text=self.text,
            tokenizer=req.tokenizer,
            images=images_key([_encoded(each) for each in req.image_data or ()]),
        )


def _encoded(image: bytes | str) -> bytes:
    """Return an image, which may be base64 text. Raises CallerError."""
    try:
        return from_base64(image, "image_data") if isinstance(image, str) else image
    except BadImage as error:
        raise CallerError(error.message, param="image_data") from error


@dataclass
class HeadVersion:
    """The version at an episode's first request, None before it. The members of a group share it."""

    version: int | None = None


@dataclass
class EpisodeEngine:
    """The ``InferenceEngine`` of an episode. ``member``: its number in the group. ``seed``: if set, sampling depends
    only on it and on ``place``, the episode's place in the order of the data. ``seed_field``: the seed's name in
    requests; engines use ``default_seed`` only if they sample as fast with a seed. ``context``: the model's context
    length in tokens. ``leases``: the ``number`` of the episode by the id of each lease that an episode of the
    controller holds."""

    client: AsyncInferenceClient
    batcher: PromptBatcher
    task_id: str
    version: Callable[[], int]
    timeout_s: float
    context: int | None = None
    seed: int | None = None
    seed_field: Literal["seed", "default_seed"] = "seed"
    place: str = ""
    member: int = 0
    sessions: GroupSessions[int] | None = None
    head: HeadVersion = field(default_factory=HeadVersion)
    number: int = 0
    leases: dict[str, int] = field(default_factory=dict)
    _calls: int = 0

    @property
    def base_url(self) -> str:
        return self.client.base_url

    @property
    def model(self) -> str | None:
        return self.client.model

    def get_version(self) -> int:
        return self.version()

    def _pin_version(self) -> None:
        if self.head.version is None:
            self.head.version = self.version()

    async def lend(self, *, discount: float, style: Style) -> Trajectories:
        """Wait for a complete trajectory of a user and lease it. A lease may expire before its trajectory is trained
        on. A trajectory that is offered again while an episode holds it only gets a new lease."""
        while True:
            for lease in await self.client.lend(1, _ONLINE_WAIT_S, "tokens", discount=discount, style=style):
                if lease.lease_id not in self.leases:
                    self.leases[lease.lease_id] = self.number
                    return lease.trajectories
                await asyncio.sleep(_KNOWN_PAUSE_S)

    def release(self) -> None:
        """Drop the episode's leases, so that their trajectories are offered again."""
        for lease in [lease for lease, number in self.leases.items() if number == self.number]:
            del self.leases[lease]

    def for_group(self, size: int) -> list[EpisodeEngine]:
        """Return one engine for each episode of a group."""
        seed = self._seeded(self.next_seed())
        sessions = GroupSessions(self.client, self._session_task, range(size), **seed)
        return [replace(self, member=member, sessions=sessions, _calls=0) for member in range(size)]

    async def start_sessions(self, count: int = 1) -> AsyncGroup:
        self._pin_version()
        sessions, self.sessions = self.sessions, None
        if sessions is not None and count == 1:
            session = await sessions.take(self.member)
            return AsyncGroup(self.client, session.group_id or "", (session,))
        return await self.client.start_group(self._session_task, count, **self._seeded(self.next_seed()))

    @property
    def _session_task(self) -> str:
        return self.task_id[:256]

    def samples_together(self, gconfig: GenerationHyperparameters, count: int) -> bool:
        """Return whether one call can sample ``count`` responses."""
        return count <= MAX_CHOICES

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        return (await self.agenerate_group(req, 1))[0]

    async def agenerate_group(self, req: ModelRequest, count: int) -> list[ModelResponse]:
        """Sample ``count`` responses to one prompt in one call."""
        self._pin_version()
        started = time.monotonic()
        budget, fields = answer_budget(req.gconfig, len(req.input_ids), self.context), self._fields(req)
        answers = [PartialResponse() for _ in range(count)]
        for choice in await self._choices(req, [], budget, fields | {"n": count}):
            answers[choice["index"]].extend(choice)
        await self._continue(answers, req, budget, fields)
        seconds = time.monotonic() - started
        return [each.response(req, seconds) for each in answers]

    async def _continue(
        self, answers: Sequence[PartialResponse], req: ModelRequest, budget: int, fields: dict[str, object]
    ) -> None:
        """Request the rest of aborted responses, each with another seed."""
        try:
            async with asyncio.TaskGroup() as group:
                for number, answer in enumerate(answers):
                    if answer.stop_reason != "abort":
                        continue
                    group.create_task(
                        self._continue_one(answer, req, budget, _reseeded(fields, number)),
                        name=f"continue-{self.task_id}-{number}",
                    )
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _continue_one(
        self, answer: PartialResponse, req: ModelRequest, budget: int, fields: dict[str, object]
    ) -> None:
        for _ in range(_MAX_SEGMENTS - 1):
            if len(answer.tokens) >= budget:
                answer.stop_reason = "length"
            if answer.stop_reason != "abort":
                return
            await asyncio.sleep(_ABORT_PAUSE_S)
            fields = _reseeded(fields, len(answer.tokens))
            answer.extend((await self._choices(req, answer.tokens, budget, fields))[0])
        if answer.stop_reason == "abort":
            raise ServiceError(f"the engine aborted the answer {_MAX_SEGMENTS} times", code="aborted")

    def _fields(self, req: ModelRequest) -> dict[str, object]:
        given, images = req.gconfig.seed, req.image_data or ()
        fields = req.gconfig.request_fields(None if given is None else self.next_seed(given))
        if given is None:
            fields |= self._seeded(self.next_seed())
        encoded = [each if isinstance(each, str) else base64.b64encode(each).decode() for each in images]
        return {"image_data": encoded, **fields} if encoded else fields

    def _seeded(self, seed: int | None) -> dict[str, Any]:
        return {} if seed is None else {self.seed_field: seed}

    def next_seed(self, given: int | None = None) -> int | None:
        """Return the seed of the episode's next call, derived from ``given`` or else ``seed``; None without either."""
        self._calls += 1
        base = self.seed if given is None else given
        return None if base is None else derived_seed(base, self.place, self.member, self._calls)

    async def _choices(
        self, req: ModelRequest, generated: list[int], budget: int, fields: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Request choices outside any session: the response itself has all columns of a training row."""
        room = budget - len(generated)
        if "min_tokens" in fields:
            fields = fields | {"min_tokens": min(max(req.gconfig.min_new_tokens - len(generated), 0), room)}
        return await self.batcher.complete(
            [*req.input_ids, *generated],
            max_tokens=room,
            return_token_ids=True,
            store=False,
            timeout_s=self.timeout_s,
            **fields,
        )
