"""The model routes of a data proxy with a token engine: read, tokenise, generate, answer.

Until the engine's first token a failure is a status code; after it, an event in the stream. An answer is recorded
before its last byte.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal.services.inference.data_proxy.adapters import adapter_of
from areal.services.inference.data_proxy.apis import Apis, Asked, Read
from areal.services.inference.data_proxy.asks import Ask
from areal.services.inference.data_proxy.choice import Choice, Update
from areal.services.inference.data_proxy.counts import TokenCounts
from areal.services.inference.data_proxy.deadline import idle_s
from areal.services.inference.data_proxy.dialects.writer import named
from areal.services.inference.data_proxy.fields import Fields
from areal.services.inference.data_proxy.generation import Drive, Generator
from areal.services.inference.data_proxy.prompting import make_prompts
from areal.services.inference.data_proxy.reading import PROMPT_TAIL_TOKENS, Parsers
from areal.services.inference.data_proxy.samples import call_ids, samples_of, say_again, token_turns
from areal.services.inference.data_proxy.shapes import Frame, Shape
from areal.services.inference.data_proxy.tokenizer import DECODE_US, CodecPool, TextCodec
from areal.services.inference.data_proxy.visits import Answer, Visit, Visits
from areal.services.inference.engines.base import (
    Capabilities,
    EngineCall,
    EngineError,
    EngineRefused,
    EngineUnavailable,
)
from areal.services.web import headers as names
from areal.services.web.body import decode_object, read_body
from areal.services.web.errors import ApiError, bad_request
from areal.services.web.server import AnyResponse, Request, Response, StreamResponse
from areal.services.web.service import json_response
from areal.services.web.watchdog import Watchdog


@dataclass(frozen=True)
class ProxyLimits:
    """``max_model_len`` and ``adapters`` are asked at each call: the engine says them once it is up."""

    max_body_bytes: int
    request_timeout_s: float
    max_model_len: Callable[[], int | None]
    adapters: Callable[[], tuple[str, ...]] = tuple


@dataclass
class Clock:
    """Whose time it is: ours, or the engine's."""

    started: float
    engine_s: float = 0.0
    first: float = 0.0  # when the first token was here
    last: float = 0.0

    def said(self, now: float, engine_s: float) -> None:
        self.engine_s += engine_s
        self.first = self.first or now
        self.last = now

    def overhead_us(self) -> int:
        return int((time.perf_counter() - self.started - self.engine_s) * 1e6)


@dataclass(frozen=True)
class Prepared:
    """A request that is ready to run."""

    request: Request
    ask: Ask
    frame: Frame
    shape: Shape
    drives: tuple[Drive, ...]
    idle_s: float
    clock: Clock
    visit: Visit
    prompt_text: str | None

    def headers(self) -> dict[str, str]:
        headers = {names.OVERHEAD: str(self.clock.overhead_us())}
        if self.ask.ignored:
            headers[names.IGNORED] = ", ".join(self.ask.ignored)
        return headers


class ModelCalls:
    def __init__(
        self,
        model: str,
        codec: TextCodec,
        pool: CodecPool,
        generator: Generator,
        capabilities: Capabilities,
        limits: ProxyLimits,
        counts: TokenCounts,
        parsers: Parsers,
        visits: Visits,
    ) -> None:
        self._model = model
        self._codec = codec
        self._pool = pool
        self._generator = generator
        self._capabilities = capabilities
        self._limits = limits
        self._counts = counts
        self._apis = Apis(codec, capabilities, parsers)
        self._visits = visits
        self.tokens_in_flight = 0

    async def chat(self, request: Request) -> AnyResponse:
        return await self._answer(request, self._apis.chat)

    async def completion(self, request: Request) -> AnyResponse:
        return await self._answer(request, self._apis.completion)

    async def messages(self, request: Request) -> AnyResponse:
        return await self._answer(request, self._apis.messages)

    async def responses(self, request: Request) -> AnyResponse:
        return await self._answer(request, self._apis.responses)

    async def count_tokens(self, request: Request) -> AnyResponse:
        """How long a prompt would be, and no answer."""
        self._visits.caller(request.headers)
        body = await read_body(request, self._limits.max_body_bytes)
        asked = self._read(decode_object(body), self._apis.tokens_of_messages)
        prompts = await make_prompts(asked.ask, self._codec, self._pool, None, len(body))
        return json_response({"input_tokens": prompts.longest})

    def _read(self, data: dict[str, Any], read: Read) -> Asked:
        fields = Fields(data)
        adapter = adapter_of(fields.text("model"), self._model, self._limits.adapters())
        asked = read(fields)
        return asked if adapter is None else replace(asked, ask=replace(asked.ask, adapter=adapter))

    async def _answer(self, request: Request, read: Read) -> AnyResponse:
        caller = self._visits.caller(request.headers)
        body = await read_body(request, self._limits.max_body_bytes)
        clock = Clock(time.perf_counter())
        asked = self._read(decode_object(body), read)
        async with self._visits.enter(caller, request.headers, body) as visit:
            if visit.replayed is not None:
                return await self._replay(request, asked, visit, clock)
            return await self._generate(request, asked, visit, clock, len(body))

    async def _generate(self, request: Request, asked: Asked, visit: Visit, clock: Clock, size: int) -> AnyResponse:
        ask = asked.ask
        prompts = await make_prompts(ask, self._codec, self._pool, visit if visit.keeps(ask.store) else None, size)
        with named(asked.names):
            room = self._room(ask, prompts.longest)
        ask = replace(ask, sampling=replace(ask.sampling, max_new_tokens=room))
        frame = self._frame(ask, prompts.ids, visit.answer_id(asked.id_prefix))
        prepared = Prepared(
            request=request,
            ask=ask,
            frame=frame,
            shape=asked.shape(frame),
            drives=self._drives(frame, ask),
            idle_s=idle_s(request, self._limits.request_timeout_s),
            clock=clock,
            visit=visit,
            prompt_text=prompts.text,
        )
        held = sum(map(len, prompts.ids)) + (ask.sampling.max_new_tokens or 0) * len(frame.choices)
        self.tokens_in_flight += held
        try:
            return await (self._stream(prepared) if ask.answering.stream else self._whole(prepared))
        finally:
            self.tokens_in_flight -= held

    async def _replay(self, request: Request, asked: Asked, visit: Visit, clock: Clock) -> AnyResponse:
        """The answer that was recorded, said as this request wants it, which is as the first one did."""
        ask, turns = asked.ask, token_turns(visit.replayed or ())
        prompts = [list(turn.prompt_ids) for turn in turns[:: ask.sampling.n]]
        ids = [call_ids(turn) for turn in turns]
        frame = self._frame(ask, prompts, turns[0].answer_id, created=turns[0].created, call_ids=ids)
        shape = asked.shape(frame)
        updates = [say_again(choice, turn) for choice, turn in zip(frame.choices, turns, strict=True)]
        prepared = Prepared(request, ask, frame, shape, (), 0.0, clock, visit, None)
        if not ask.answering.stream:
            return Response(body=shape.whole(), content_type="application/json", headers=prepared.headers())
        out = await _open_stream(prepared)
        await out.write(shape.opening() + b"".join(map(shape.update, updates)) + shape.closing())
        return out

    def _room(self, ask: Ask, prompt_tokens: int) -> int | None:
        """How many tokens the answer may have. Raises 400 when the context has no room for what is asked."""
        if prompt_tokens == 0:
            raise bad_request("the prompt has no tokens", param="prompt")
        wanted, limit = ask.sampling.max_new_tokens, self._limits.max_model_len()
        if limit is None:
            return wanted or ask.default_max_tokens
        if prompt_tokens + (wanted or 1) > limit:
            asked = f"{prompt_tokens} in the prompt" + (f" and {wanted} in the answer" if wanted else "")
            message = f"this model's context is {limit} tokens; you asked for {asked}"
            raise bad_request(message, param="messages", code="context_length_exceeded")
        return wanted or min(ask.default_max_tokens or limit, limit - prompt_tokens)

    def _frame(
        self,
        ask: Ask,
        prompts: Sequence[list[int]],
        answer_id: str,
        *,
        created: int | None = None,
        call_ids: Sequence[Sequence[str]] | None = None,
    ) -> Frame:
        answering = ask.answering
        skip, shown = answering.skip_special_tokens, ask.reading.markers
        tails = [self._tail(prompt) if ask.reading.reasoning else "" for prompt in prompts]
        choices = [
            Choice(
                index,
                self._codec.stream(skip_special=skip, shown=shown),
                answering.stops,
                ask.reading.reader(tails[index // ask.sampling.n], call_ids[index] if call_ids else ()),
            )
            for index in range(len(prompts) * ask.sampling.n)
        ]
        echoed = [self._codec.decode(prompt) for prompt in prompts] if ask.echo else ()
        at = int(time.time()) if created is None else created
        model = f"{self._model}:{ask.adapter}" if ask.adapter else self._model
        return Frame(answer_id, model, self._codec, answering, prompts, choices, echoed, at)

    def _tail(self, prompt: list[int]) -> str:
        return self._codec.decode(prompt[-PROMPT_TAIL_TOKENS:], skip_special=False)

    def _drives(self, frame: Frame, ask: Ask) -> tuple[Drive, ...]:
        each = frame.per_prompt
        return tuple(
            Drive(
                EngineCall(
                    f"{frame.answer_id}-{index}", prompt, ask.sampling, ask.answering.response_format, ask.adapter
                ),
                frame.choices[index * each : (index + 1) * each],
            )
            for index, prompt in enumerate(frame.prompts)
        )

    async def _whole(self, prepared: Prepared) -> Response:
        async with self._running(prepared) as updates:
            async for _ in updates:
                pass
        body = prepared.shape.whole()
        return Response(body=body, content_type="application/json", headers=prepared.headers())

    async def _stream(self, prepared: Prepared) -> AnyResponse:
        out: StreamResponse | None = None
        shape = prepared.shape
        async with self._running(prepared) as updates:
            async for update in updates:
                opening = b""
                if out is None:
                    out, opening = await _open_stream(prepared), shape.opening()
                said = opening + shape.update(update)
                if said:
                    await out.write(said)
        assert out is not None, "a generation that ends well has an update for each choice"
        await out.write(shape.closing())
        return out

    @contextlib.asynccontextmanager
    async def _running(self, prepared: Prepared) -> AsyncIterator[AsyncIterator[Update]]:
        """The updates, under the deadline on progress; engine failures as what the caller is told."""
        begun = False

        def excused() -> bool:
            """The engine is paused, or the call is queued in a busy one."""
            if self._generator.suspension.excuses(prepared.idle_s):
                return True
            return not begun and self._generator.pulse.silent_s() < prepared.idle_s

        watchdog = Watchdog(lambda: prepared.idle_s, excused=excused)

        async def watched(updates: AsyncIterator[Update]) -> AsyncIterator[Update]:
            nonlocal begun
            running = len(prepared.frame.choices)
            waiting_since = time.perf_counter()
            async for update in updates:
                now = time.perf_counter()
                prepared.clock.said(now, now - waiting_since)
                begun = True
                watchdog.kick()
                if update.finish_reason is not None:
                    running -= 1
                    if not running:
                        await self._record(prepared)
                        watchdog.kick()
                yield update
                waiting_since = time.perf_counter()

        with _engine_errors(prepared):
            async with watchdog, contextlib.aclosing(self._generator.updates(prepared.drives)) as updates:
                yield watched(updates)

    async def _record(self, prepared: Prepared) -> None:
        """The answer is complete: it is on disk before the caller has its last byte."""
        visit, frame = prepared.visit, prepared.frame
        clock = prepared.clock
        self._counts.answered(frame, clock.first - clock.started, clock.last - clock.first)
        if not visit.keeps(prepared.ask.store):
            return
        cost_us = DECODE_US * sum(len(choice.token_ids) for choice in frame.choices)
        samples = await self._pool.run(lambda: samples_of(frame, visit.conversation, prepared.prompt_text), cost_us)
        await visit.record(Answer(frame.answer_id, frame.model, frame.created, samples))


async def _open_stream(prepared: Prepared) -> StreamResponse:
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **prepared.headers()}
    out = StreamResponse(headers=headers)
    await out.prepare(prepared.request)
    return out


@contextlib.contextmanager
def _engine_errors(prepared: Prepared) -> Iterator[None]:
    """What went wrong in the engine, as the caller is told it."""
    try:
        yield
    except EngineUnavailable as error:
        raise ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": "1"}) from error
    except EngineRefused as error:
        raise ApiError(400, str(error), code=error.code or "engine_refused") from error
    except EngineError as error:
        raise ApiError(502, str(error), code="engine_failed") from error
    except TimeoutError as error:
        raise ApiError(504, f"no progress in {prepared.idle_s:g} s", code="progress_timeout") from error
