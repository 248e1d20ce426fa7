"""Runs the engine jobs of one call and answers it, whole or as a stream.

Deltas are handled in the order in which the engine sends them, inside the event loop's callback that read them: stream
events are written without a task switch, and a slow client pauses the engine's connection. A choice that meets a stop
string ends at once; when every choice of a job has ended, or the client disconnects, the job is aborted in the engine.

The progress deadline covers the call as a whole. An answer is recorded before its last byte. Until the first token a
failure is a status code, after it an event in the stream.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from areal.services.http import headers as names
from areal.services.http.errors import ApiError
from areal.services.http.messages import Request, Response, StreamResponse
from areal.services.http.tasks import Watchdog
from areal.services.inference.data_proxy.choice import Choice, ChoiceUpdate
from areal.services.inference.data_proxy.control import PauseState, api_error
from areal.services.inference.data_proxy.fields import unsupported
from areal.services.inference.data_proxy.openai import GenerationRequest, ResponseState, Serializer
from areal.services.inference.data_proxy.sessions import CallRecorder
from areal.services.inference.engines.base import (
    Backpressure,
    EngineCall,
    EngineDelta,
    EngineError,
    EngineFailed,
    EngineUnsupported,
    OnFlow,
    PromptLogprobs,
    PromptScorer,
    TokenEngine,
)
from areal.services.inference.engines.transport import MISREAD, malformed_answer

OnUpdate = Callable[[ChoiceUpdate], None]

_CONCURRENT_SCORES = 8
_MAX_TIMEOUT_S = 1e7
_TOKEN_ID_END = 2**31  # token ids are recorded as 32 bits


def progress_timeout_s(request: Request, default: float) -> float:
    """Seconds without progress after which a call fails: the relay's header, which follows the live limits, or ours."""
    text = request.headers.get(names.PROGRESS_TIMEOUT)
    try:
        given = float(text) if text is not None else 0.0
    except ValueError:
        return default
    return given if 0 < given < _MAX_TIMEOUT_S else default


class ActivityTimer:
    """When the engine last gave any token to anyone, or reported more sampled tokens: a call that waits in its queue,
    or for an answer that comes whole, is not stuck."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def mark(self) -> None:
        self.last = time.perf_counter()

    def idle_s(self) -> float:
        return time.perf_counter() - self.last


@dataclass
class CallTimer:
    """Separates our time from the engine's. Seconds of ``time.perf_counter``; ``engine_since``: the engine has worked
    since then."""

    started: float
    engine_since: float = 0.0
    engine_s: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0

    def overhead_us(self) -> int:
        return int((time.perf_counter() - self.started - self.engine_s) * 1e6)


@dataclass(frozen=True)
class EngineJob:
    """One engine call and the choices that it samples, in the engine's order."""

    call: EngineCall
    choices: Sequence[Choice]


@dataclass
class GenerationCall:
    """A call that is ready to run."""

    request: Request
    generation: GenerationRequest
    state: ResponseState
    serializer: Serializer
    jobs: Sequence[EngineJob]
    timeout_s: float  # without progress
    timer: CallTimer
    recorder: CallRecorder
    prompt_text: str | None

    def headers(self) -> dict[str, str]:
        headers = {names.OVERHEAD: str(self.timer.overhead_us())}
        if self.generation.ignored:
            headers[names.IGNORED] = ", ".join(self.generation.ignored)
        return headers

    def open_stream(self, first: bytes = b"") -> StreamResponse:
        """``first``: the stream's first bytes. Raises ConnectionResetError when the client is gone."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **self.headers()}
        out = StreamResponse(headers=headers)
        out.begin(self.request, first)
        return out


Record = Callable[[GenerationCall], Awaitable[None]]
"""Called once an answer is complete; its error becomes the client's."""


class Generator:
    """Drives one engine."""

    def __init__(self, engine: TokenEngine, pause: PauseState) -> None:
        self._engine = engine
        self._pause = pause
        self._aborts: set[asyncio.Task[None]] = set()
        self.activity = ActivityTimer()

    async def respond(self, call: GenerationCall, record: Record) -> Response:
        await self._run(call, record, lambda update: None, lambda flow: None)
        return Response(body=call.serializer.whole(), content_type="application/json", headers=call.headers())

    async def stream(self, call: GenerationCall, record: Record) -> StreamResponse:
        writer = StreamWriter(call)
        try:
            await self._run(call, record, writer.write, writer.add_flow)
        finally:
            writer.close()
        assert writer.out is not None, "a generation that ends well has an update for each choice"
        await writer.out.write(writer.held + call.serializer.closing())
        return writer.out

    async def scores(self, prompts: Sequence[Sequence[int]], top: int, adapter: str | None) -> list[PromptLogprobs]:
        """Log-probabilities of each prompt's own tokens. Raises ApiError."""
        engine = self._engine
        assert isinstance(engine, PromptScorer), "its capabilities say so"
        slots = asyncio.Semaphore(_CONCURRENT_SCORES)

        async def score(prompt: Sequence[int]) -> PromptLogprobs:
            async with slots:
                return await engine.score(prompt, top, adapter)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(score(prompt), name="score") for prompt in prompts]
        except ExceptionGroup as failed:
            error = failed.exceptions[0]
            if isinstance(error, EngineUnsupported):
                why = f"together with logprobs it needs those of the prompt, and {error}"
                raise unsupported("echo", why) from error
            raise (api_error(error, retry=True) if isinstance(error, EngineError) else error) from None
        return [task.result() for task in tasks]

    async def _run(self, call: GenerationCall, record: Record, on_update: OnUpdate, on_flow: OnFlow) -> None:
        """Run the jobs to their end and record the answer. Raises ApiError, and what ``on_update`` raises."""
        timer = call.timer

        def excused() -> bool:
            """There was progress after all, the engine is paused, or the call is queued in a busy one."""
            idle_s = time.perf_counter() - timer.last_token
            if idle_s < call.timeout_s:
                watchdog.kick(idle_s)
                return True
            if self._pause.excuses(call.timeout_s):
                return True
            return not timer.first_token and self.activity.idle_s() < call.timeout_s

        try:
            async with Watchdog(lambda: call.timeout_s, excused=excused) as watchdog:
                timer.engine_since = time.perf_counter()
                if len(call.jobs) == 1:
                    consumer = DeltaConsumer(call.jobs[0], timer, self.activity, on_update)
                    await self._run_job(consumer, on_flow)
                else:
                    await self._run_jobs(call, on_update, on_flow)
                watchdog.kick()
                await record(call)
        except TimeoutError as error:
            raise ApiError(504, f"no progress in {call.timeout_s:g} s", code="progress_timeout") from error
        except EngineUnsupported:
            raise
        except EngineError as error:
            raise api_error(error, retry=True) from error

    async def _run_jobs(self, call: GenerationCall, on_update: OnUpdate, on_flow: OnFlow) -> None:
        consumers = [DeltaConsumer(job, call.timer, self.activity, on_update) for job in call.jobs]
        tasks = [
            asyncio.create_task(self._run_job(each, on_flow), name=f"generate-{each.job.call.request_id}")
            for each in consumers
        ]
        try:
            await asyncio.gather(*tasks)  # the first failure ends them all
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_job(self, consumer: DeltaConsumer, on_flow: OnFlow) -> None:
        job = consumer.job
        try:
            await self._engine.stream_to(job.call, consumer.consume, on_flow)
            if consumer.running:
                raise EngineFailed("the engine's stream ended before its choices did")
        except _AllEnded:
            pass
        finally:
            if consumer.ended_by_engine < len(job.choices):
                request_id = job.call.request_id
                task = asyncio.create_task(self._engine.abort(request_id), name=f"abort-{request_id}")
                self._aborts.add(task)
                task.add_done_callback(self._aborts.discard)


class _AllEnded(Exception):
    """Stop strings have ended every choice of a job: its remaining deltas are dropped."""


class DeltaConsumer:
    """Takes the deltas of one engine job. Each update goes to ``on_update``; the call's timer and the engine's activity
    timer are advanced."""

    def __init__(self, job: EngineJob, timer: CallTimer, activity: ActivityTimer, on_update: OnUpdate) -> None:
        self.job = job
        self._choices = job.choices
        self._timer = timer
        self._activity = activity
        self._on_update = on_update
        self.running = set(range(len(job.choices)))
        self.ended_by_engine = 0

    def consume(self, delta: EngineDelta) -> None:
        choices, finished = self._choices, delta.finish_reason is not None
        validate_delta(delta, len(choices))
        timer, now = self._timer, time.perf_counter()
        self._activity.last = now
        if finished:
            self.ended_by_engine += 1
        if delta.index not in self.running:
            return
        update = choices[delta.index].push(delta)
        timer.engine_s += now - timer.engine_since
        timer.last_token = now
        if not timer.first_token:
            timer.first_token = max(timer.engine_since, now - delta.after_first_s)
        if update.finish_reason is not None:
            self.running.discard(delta.index)
        self._on_update(update)
        timer.engine_since = time.perf_counter()
        if not self.running and self.ended_by_engine < len(choices):
            raise _AllEnded


class StreamWriter:
    """Writes a stream's updates as they come. ``held``: the last update's bytes, written once the answer is
    recorded."""

    def __init__(self, call: GenerationCall) -> None:
        self._call = call
        self._serialize = call.serializer.update
        self._running = len(call.state.choices)
        self._flows: list[Backpressure] = []
        self._paused = False  # the client reads too slowly
        self.out: StreamResponse | None = None
        self.held = b""

    def write(self, update: ChoiceUpdate) -> None:
        opening = b"" if self.out is not None else self._call.serializer.opening()  # first: events are numbered
        data = self._serialize(update)
        if update.finish_reason is not None:
            self._running -= 1
            if not self._running:
                self.held, data = data, b""
        if self.out is None:
            self.out = self._call.open_stream(opening + data)
            self.out.set_backpressure(self)
        elif data:
            self.out.write_nowait(data)

    def add_flow(self, flow: Backpressure) -> None:
        self._flows.append(flow)
        if self._paused:
            flow.pause()

    def pause(self) -> None:
        self._paused = True
        for flow in self._flows:
            flow.pause()

    def resume(self) -> None:
        self._paused = False
        for flow in self._flows:
            flow.resume()

    def close(self) -> None:
        """Stop pausing the engine's connections: they serve other calls now."""
        self._flows.clear()
        if self.out is not None:
            self.out.set_backpressure(None)


# Engine deltas become training data. An engine that drops a log-probability, counts choices that do not exist or sends
# NaN is broken, or a proxy before it is: its call fails and nothing of it is recorded, instead of poisoning a trainer.


def validate_delta(delta: EngineDelta, choices: int) -> None:
    """Raises EngineFailed for what no engine can have sampled in a call with this many choices."""
    tokens, logprobs = delta.token_ids, delta.logprobs
    try:
        if len(tokens) == 1 == len(logprobs) == len(delta.versions):  # most deltas
            token = tokens[0]
            sound = type(token) is int and 0 <= token < _TOKEN_ID_END and math.isfinite(logprobs[0])
            if sound and 0 <= delta.index < choices:
                return
        if not len(tokens) == len(logprobs) == len(delta.versions):
            found = f"{len(logprobs)} log-probabilities and {len(delta.versions)} versions"
            raise EngineFailed(f"the engine sent {len(tokens)} tokens with {found}")
        if not 0 <= delta.index < choices:
            raise EngineFailed(f"the engine answered choice {delta.index} of {choices}")
        if tokens and not (set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < _TOKEN_ID_END):
            wrong = next(token for token in tokens if type(token) is not int or not 0 <= token < _TOKEN_ID_END)
            raise EngineFailed(f"the engine sent the token {wrong!r}")
        if not all(map(math.isfinite, logprobs)):
            bad = next(logprob for logprob in logprobs if not math.isfinite(logprob))
            raise EngineFailed(f"the engine sent the log-probability {bad}")
    except MISREAD as error:
        raise malformed_answer(error) from error
