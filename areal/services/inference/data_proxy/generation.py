"""Runs the engine jobs of one call and sends the response, whole or as a stream.

A choice is built from the engine's deltas: tokens are decoded, the text is cut at stop strings and parsed. A choice
keeps every sampled token up to and including the one that ended it, so that tokens, log-probabilities and versions stay
aligned; its text leaves out stop strings, special tokens, and all text after the end.

Deltas are handled in the order in which the engine sends them, inside the event loop callback that read them: stream
events are written without a task switch, and a slow client pauses the engine's connection. A choice that meets a stop
string ends at once; when every choice of a job has ended, or the client disconnects, the job is aborted in the engine.

One progress deadline covers the whole call. A response is recorded before its last byte is sent. A failure before the
first token is an HTTP status, a later one an event in the stream.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from areal.dataclasses import dataclass
from areal.http import headers as names
from areal.http import tracing
from areal.services.dialects import Content, Piece, Reply, joined
from areal.services.http.errors import ApiError, unsupported
from areal.services.http.messages import FlowControl, Request, Response, StreamingResponse
from areal.services.http.tasks import Watchdog
from areal.services.inference.data_proxy.control import api_error
from areal.services.inference.data_proxy.engine_watch import PauseState
from areal.services.inference.data_proxy.fields import ResponseOptions
from areal.services.inference.data_proxy.openai import GenerationRequest
from areal.services.inference.data_proxy.parsers.reader import PLAIN, ResponseReader, first_marker, possible_start
from areal.services.inference.data_proxy.sessions import CallRecorder
from areal.services.inference.data_proxy.tokenizer import TextCodec, TextStream
from areal.services.inference.engines.base import (
    EngineCall,
    EngineDelta,
    EngineError,
    EngineFailed,
    EngineUnsupported,
    FinishReason,
    OnFlow,
    PromptLogprobs,
    PromptScorer,
    TokenEngine,
    TopLogprobs,
)
from areal.services.inference.engines.transport import MISREAD, malformed_answer


class StopScanner:
    """Finds the first stop string in the text of a choice. Text that may begin a stop string is held back until later
    text decides, so that no part of a stop string is emitted. The result does not depend on how tokens split the text:
    the stop string that *ends* first wins, and the longest if several end together."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be emitted now and the stop string that was found. Text after a stop string is
        dropped."""
        if not self._stops:
            return text, None
        text = self._held + text
        met = first_marker(text, 0, self._stops)
        if met is not None:
            self._held = ""
            return text[: met[0]], met[1]
        emitted = len(text) - possible_start(text, 0, self._stops)
        self._held = text[emitted:]
        return text[:emitted], None

    def flush(self) -> str:
        """Return the held text at the end of the response: it was not a stop string."""
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)  # not frozen: there is one for each step of each stream, and freezing doubles its cost
class ChoiceUpdate:
    """One delta's contribution to choice ``index``: text, and the choice's tokens from ``start`` to ``end``.
    ``pieces``: the content, reasoning and calls that became certain."""

    index: int
    text: str
    start: int
    end: int
    finish_reason: FinishReason | None = None
    pieces: tuple[Piece, ...] = ()


class Choice:
    """One choice of a response while it is generated. ``index``: its position in the whole response; an engine job
    numbers its own choices. ``stop``: the stop string that ended it. ``stop_token_id``: the token that ended it, which
    is not part of its text. ``reply``: its text as content, reasoning and calls."""

    def __init__(
        self, index: int, stream: TextStream, stops: Sequence[str], reader: ResponseReader | None = None
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self._stream = stream
        self._scanner = StopScanner(stops)
        self._reader = reader or PLAIN
        self._token_by_token = bool(stops) or not self._reader.plain
        self._text: list[str] = []
        self._pieces: list[Piece] = []
        self._reasoning_tokens = 0
        self.stop: str | None = None
        self.stop_token_id: int | None = None
        self.reply = Reply()

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning_tokens(self) -> int:
        return self._reasoning_tokens if self.reply.reasoning else 0

    def push(self, delta: EngineDelta) -> ChoiceUpdate:
        """Append a delta. Raises AssertionError for a choice that has ended: the caller drops later deltas."""
        assert self.finish_reason is None
        start, tokens, finish = len(self.token_ids), delta.token_ids, delta.finish_reason
        hidden = delta.stop_token_id is not None and tokens[-1:] == (delta.stop_token_id,)
        visible = tokens[:-1] if hidden else tokens
        if not self._token_by_token:  # all text is content, and no text ends the choice
            self.token_ids += tokens
            self.logprobs += delta.logprobs
            self.versions += delta.versions
            if delta.all_versions is not None:
                self.versions = list(delta.all_versions)
            if delta.top_logprobs is not None:
                self.top_logprobs += delta.top_logprobs
            if finish is not None and not start:
                text = self._stream.whole(visible)
            else:
                text = self._stream.push(visible) + (self._stream.flush() if finish is not None else "")
            self._text.append(text)
            if finish is not None:
                self.finish_reason = finish
                self.stop_token_id = delta.stop_token_id if hidden else None
                self.reply.content = self.text
            return ChoiceUpdate(self.index, text, start, len(self.token_ids), finish, (Content(text),) if text else ())
        text, taken = self._read(visible)
        if taken is not None:
            finish = FinishReason.STOP
        elif finish is not None:
            text += self._scan(self._stream.flush())
            if self.stop is None:
                text += self._parse(self._scanner.flush())
            else:
                finish = FinishReason.STOP
        count = len(tokens) if taken is None else taken
        self.token_ids += tokens[:count]
        self.logprobs += delta.logprobs[:count]
        self.versions += delta.versions[:count]
        if delta.all_versions is not None:
            self.versions = list(delta.all_versions[: len(self.token_ids)])
        if delta.top_logprobs is not None:
            self.top_logprobs += delta.top_logprobs[:count]
        self.finish_reason = finish
        self._text.append(text)
        if finish is not None:
            self.stop_token_id = delta.stop_token_id if hidden and taken is None else None
            self._pieces.extend(self._reader.flush())
        pieces = joined(self._pieces)
        self._pieces.clear()
        self.reply.add(pieces)
        return ChoiceUpdate(self.index, text, start, len(self.token_ids), finish, pieces)

    def _read(self, token_ids: tuple[int, ...]) -> tuple[str, int | None]:
        """Return the text to emit, and the number of tokens to keep if a stop string or the one allowed call ended the
        choice."""
        text = ""
        for position, token_id in enumerate(token_ids):
            text += self._scan(self._stream.push((token_id,)))
            self._reasoning_tokens += self._reader.reasoning_open
            if self.stop is not None or self._reader.done:
                return text, position + 1
        return text, None

    def _scan(self, text: str) -> str:
        text, self.stop = self._scanner.push(text)
        return self._parse(text)

    def _parse(self, text: str) -> str:
        self._pieces.extend(self._reader.push(text))
        return text


@dataclass
class ResponseState:
    """One response while it is generated, and the values that each of its chunks repeats."""

    answer_id: str
    model: str
    codec: TextCodec
    options: ResponseOptions
    prompts: Sequence[array[int]]
    choices: Sequence[Choice]
    echoed: Sequence[str]  # the prompt texts, if the response repeats them
    created: int
    scores: Sequence[PromptLogprobs] = ()  # of each prompt, if requested
    prompt_logprobs: int | None = None  # how many alternatives to each prompt token are returned by token id
    no_answer: bool = False  # only the prompt is returned

    @property
    def per_prompt(self) -> int:
        return len(self.choices) // len(self.prompts)


class Serializer(Protocol):
    """Writes one response in an API's format."""

    def opening(self) -> bytes:
        """Return the chunks before any token."""

    def update(self, update: ChoiceUpdate) -> bytes:
        """Return the chunks of one update; empty while its text is not certain."""

    def closing(self) -> bytes: ...

    def whole(self) -> bytes: ...


OnUpdate = Callable[[ChoiceUpdate], None]

_CONCURRENT_SCORES = 8
_MAX_TIMEOUT_S = 1e7
_TOKEN_ID_END = 2**31  # token ids are recorded as 32 bits


def progress_timeout_s(request: Request, default: float) -> float:
    """Return the seconds without progress after which a call fails: from the relay's header, which reflects changed
    limits, otherwise ``default``."""
    text = request.headers.get(names.PROGRESS_TIMEOUT)
    try:
        given = float(text) if text is not None else 0.0
    except ValueError:
        return default
    return given if 0 < given < _MAX_TIMEOUT_S else default


class ActivityTimer:
    """The time of the engine's last progress: a token of any call, or a report of more sampled tokens. While it is
    recent, a call that waits in the engine's queue or for a whole response is not stuck."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def mark(self) -> None:
        self.last = time.perf_counter()


@dataclass
class CallTimer:
    """Separates the data proxy's time from the engine's, in seconds of ``time.perf_counter``. ``engine_since``: the
    start of the engine's current work; ``engine_s``: the duration of its finished work."""

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
    """A model call that is ready to run."""

    request: Request
    generation: GenerationRequest
    state: ResponseState
    serializer: Serializer
    jobs: Sequence[EngineJob]
    timeout_s: float  # without progress
    timer: CallTimer
    recorder: CallRecorder

    def headers(self) -> dict[str, str]:
        headers = {names.OVERHEAD: str(self.timer.overhead_us())}
        if self.generation.ignored:
            headers[names.IGNORED] = ", ".join(self.generation.ignored)
        return headers

    def open_stream(self, first: bytes = b"") -> StreamingResponse:
        """Send the headers and the bytes ``first``. Raises ConnectionResetError when the client has disconnected."""
        headers = {**names.EVENT_STREAM, **self.headers()}
        out = StreamingResponse(headers=headers)
        out.begin(self.request, first)
        return out


Record = Callable[[GenerationCall], Awaitable[None]]
"""Called once a response is complete; its error is sent to the client."""


def _ignore(event: object) -> None:
    pass


class Generator:
    """Runs model calls on one engine."""

    def __init__(self, engine: TokenEngine, pause: PauseState) -> None:
        self._engine = engine
        self._pause = pause
        self._aborts: set[asyncio.Task[None]] = set()
        self.activity = ActivityTimer()

    async def respond(self, call: GenerationCall, record: Record) -> Response:
        await self._run(call, record, _ignore, _ignore)
        return Response(body=call.serializer.whole(), content_type="application/json", headers=call.headers())

    async def stream(self, call: GenerationCall, record: Record) -> StreamingResponse:
        writer = StreamWriter(call)
        try:
            await self._run(call, record, writer.write, writer.add_flow)
        finally:
            writer.close()
        assert writer.out is not None, "a generation that ends well has an update for each choice"
        await writer.out.write(writer.held + call.serializer.closing())
        return writer.out

    async def scores(self, prompts: Sequence[Sequence[int]], top: int, adapter: str | None) -> list[PromptLogprobs]:
        """Return the log-probabilities of each prompt's tokens, with ``top`` alternatives each. Raises ApiError."""
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
        """Run the jobs to their end and record the response. Raises ApiError, EngineUnsupported, and the errors of
        ``on_update``."""
        timer = call.timer

        def suspended() -> bool:
            """Return whether the call may go on: there was progress, the engine is paused, or the call is queued in a
            busy engine."""
            idle_s = time.perf_counter() - timer.last_token
            if idle_s < call.timeout_s:
                watchdog.kick(idle_s)
                return True
            if self._pause.covers(call.timeout_s):
                return True
            return not timer.first_token and time.perf_counter() - self.activity.last < call.timeout_s

        with tracing.span(f"chat {call.state.model}", kind="client") as span:
            try:
                async with Watchdog(lambda: call.timeout_s, suspended=suspended) as watchdog:
                    timer.engine_since = time.perf_counter()
                    if len(call.jobs) == 1:
                        await self._run_job(DeltaConsumer(call.jobs[0], timer, self.activity, on_update), on_flow)
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
            finally:
                if span.is_recorded:
                    span.set(_described(call))

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


def _described(call: GenerationCall) -> tracing.Attributes:
    """Return the attributes of a call's span, by OpenTelemetry's conventions for generative AI, without prompts and
    responses."""
    state, generation = call.state, call.generation
    sampling, timer = generation.sampling, call.timer
    versions = [version for choice in state.choices for version in choice.versions]
    finish = [choice.finish_reason.value for choice in state.choices if choice.finish_reason is not None]
    return {
        "gen_ai.operation.name": "text_completion" if generation.chat is None else "chat",
        "gen_ai.provider.name": "areal",
        "gen_ai.request.model": state.model,
        "gen_ai.response.model": state.model,
        "gen_ai.response.id": state.answer_id,
        "gen_ai.request.choice.count": len(state.choices),
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.usage.input_tokens": sum(map(len, state.prompts)),
        "gen_ai.usage.output_tokens": sum(len(choice.token_ids) for choice in state.choices),
        "gen_ai.response.finish_reasons": finish or None,
        "areal.weight_version": max(versions, default=None),
        "areal.weight_version.oldest": min(versions, default=None),
        "areal.time_to_first_token_s": timer.first_token - timer.started if timer.first_token else None,
    }


class _AllEnded(Exception):
    """Every choice of a job has ended, some before the engine ended them. The remaining deltas are dropped."""


class DeltaConsumer:
    """Consumes the deltas of one engine job: passes each update to ``on_update``, and advances the call's timer and the
    engine's activity timer."""

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
    """Writes the updates of a stream as they arrive. ``held``: the last update's bytes, which are sent once the
    response is recorded."""

    def __init__(self, call: GenerationCall) -> None:
        self._call = call
        self._serialize = call.serializer.update
        self._running = len(call.state.choices)
        self._flows: list[FlowControl] = []
        self._paused = False  # the client reads too slowly
        self.out: StreamingResponse | None = None
        self.held = b""

    def write(self, update: ChoiceUpdate) -> None:
        opening = (
            b"" if self.out is not None else self._call.serializer.opening()
        )  # before the update: events are numbered
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

    def add_flow(self, flow: FlowControl) -> None:
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


def validate_delta(delta: EngineDelta, choices: int) -> None:
    """Raise EngineFailed for a delta that no engine can have sampled in a call with this many choices.

    Deltas become training data. A delta with a missing or NaN log-probability, or for a choice that does not exist,
    comes from a broken engine or from a broken proxy in front of it. The call fails and is not recorded.
    """
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
