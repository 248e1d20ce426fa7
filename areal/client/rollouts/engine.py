"""What a workflow samples from: the inference service, for one episode.

Interruption: a weight update holds generation still and lets it go on, inside the service. Where an engine gave an
answer up instead (``abort``), what it had sampled is kept and the rest is asked for, each token with the
log-probability and version it was sampled with.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from areal.api.io_struct import ModelRequest, ModelResponse
from areal.client.errors import CallerError, ServiceError
from areal.client.inference import AsyncInferenceClient
from areal.client.rollouts.gathering import MOST_CHOICES, Gathering
from areal.client.rollouts.sampling import answer_budget, derived_seed, sampling_fields
from areal.client.sessions import AsyncGroup

if TYPE_CHECKING:
    from areal.api.config.generation import GenerationHyperparameters

_MOST_SEGMENTS = 32
_AFTER_ABORT_S = 0.2


@dataclass
class _Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    text: str = ""
    stop_reason: str = "abort"

    def extend(self, choice: dict[str, Any]) -> None:
        """Raises ServiceError."""
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
            temperature=0.0 if req.gconfig.greedy else req.gconfig.temperature,
            latency=seconds,
            text=self.text,
            tokenizer=req.tokenizer,
        )


@dataclass
class Head:
    """The version that an episode's first sample was asked for at; None before. Shared by the members of a group."""

    version: int | None = None


class GroupSessions:
    """Sessions for the members of a group, all started by whoever needs one first: they may share a replica, and so
    the prompt's place in its cache."""

    def __init__(self, client: AsyncInferenceClient, task_id: str, size: int) -> None:
        self._client = client
        self._task_id = task_id
        self._size = size
        self._lock = asyncio.Lock()
        self._group: AsyncGroup | None = None

    async def of(self, member: int) -> AsyncGroup:
        async with self._lock:
            if self._group is None:
                self._group = await self._client.start_group(self._task_id, self._size)
        return replace(self._group, sessions=(self._group.sessions[member],))


@dataclass
class EpisodeEngine:
    """An ``InferenceEngine``. ``member`` is the place in the group; ``seeded``: sampling depends on nothing but the
    episode's name."""

    client: AsyncInferenceClient
    gathering: Gathering
    task_id: str
    version: Callable[[], int]
    timeout_s: float
    context: int | None = None  # tokens that the model has room for
    seeded: bool = False
    member: int = 0
    sessions: GroupSessions | None = None
    head: Head = field(default_factory=Head)
    _calls: int = 0

    @property
    def base_url(self) -> str:
        return self.client.base_url

    @property
    def model(self) -> str | None:
        return self.client.model

    def get_version(self) -> int:
        return self.version()

    def _begun(self) -> None:
        if self.head.version is None:
            self.head.version = self.version()

    def for_group(self, size: int) -> list[EpisodeEngine]:
        """One for each episode of a group."""
        sessions = GroupSessions(self.client, self._session_task, size)
        return [replace(self, member=member, sessions=sessions, _calls=0) for member in range(size)]

    async def start_sessions(self, count: int = 1) -> AsyncGroup:
        self._begun()
        sessions, self.sessions = self.sessions, None
        if sessions is not None and count == 1:
            return await sessions.of(self.member)
        return await self.client.start_group(self._session_task, count)

    @property
    def _session_task(self) -> str:
        return self.task_id[:256]

    def samples_together(self, gconfig: GenerationHyperparameters, count: int) -> bool:
        """Whether ``agenerate_group`` may sample so many: not where each has a seed of its own."""
        return count <= MOST_CHOICES and not self.seeded and gconfig.seed is None

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        return (await self.agenerate_group(req, 1))[0]

    async def agenerate_group(self, req: ModelRequest, count: int) -> list[ModelResponse]:
        """``count`` samples of one prompt, by one call: most of what a short answer costs is its call."""
        if req.image_data:
            raise CallerError("image_data is not supported: prompts are token ids", param="image_data")
        self._begun()
        started = time.monotonic()
        budget, fields = answer_budget(req.gconfig, len(req.input_ids), self.context), self._fields(req)
        answers = [_Answer() for _ in range(count)]
        for choice in await self._choices(req, [], budget, fields | {"n": count}):
            answers[choice["index"]].extend(choice)
        await self._complete([each for each in answers if each.stop_reason == "abort"], req, budget, fields)
        seconds = time.monotonic() - started
        return [each.response(req, seconds) for each in answers]

    async def _complete(
        self, answers: Sequence[_Answer], req: ModelRequest, budget: int, fields: dict[str, Any]
    ) -> None:
        """What the engine gave up goes on."""
        if not answers:
            return
        try:
            async with asyncio.TaskGroup() as group:
                for number, answer in enumerate(answers):
                    group.create_task(self._rest(answer, req, budget, fields), name=f"rest-{self.task_id}-{number}")
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _rest(self, answer: _Answer, req: ModelRequest, budget: int, fields: dict[str, Any]) -> None:
        for _ in range(_MOST_SEGMENTS - 1):
            if len(answer.tokens) >= budget:
                answer.stop_reason = "length"
            if answer.stop_reason != "abort":
                return
            await asyncio.sleep(_AFTER_ABORT_S)
            answer.extend((await self._choices(req, answer.tokens, budget, fields))[0])
        if answer.stop_reason == "abort":
            raise ServiceError(f"the engine gave the answer up {_MOST_SEGMENTS} times", code="aborted")

    def _fields(self, req: ModelRequest) -> dict[str, Any]:
        self._calls += 1
        seed = req.gconfig.seed
        if self.seeded or seed is not None:
            seed = derived_seed(seed if seed is not None else "", self.task_id, self.member, self._calls)
        return sampling_fields(req.gconfig, seed)

    async def _choices(
        self, req: ModelRequest, so_far: list[int], budget: int, fields: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Not recorded by the service: the answer itself has all that a training row needs."""
        return await self.gathering.complete(
            [*req.input_ids, *so_far],
            max_tokens=budget - len(so_far),
            return_token_ids=True,
            store=False,
            timeout_s=self.timeout_s,
            **fields,
        )
