"""The model routes of a data proxy with a token engine: read, tokenise, generate, answer.

Until the engine's first token a failure is a status code; after it, an event in the stream. An answer is recorded
before its last byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal.services.inference.data_proxy.adapters import adapter_of
from areal.services.inference.data_proxy.answering import Answering
from areal.services.inference.data_proxy.apis import Apis, Asked, Read
from areal.services.inference.data_proxy.asks import Ask
from areal.services.inference.data_proxy.choice import Choice
from areal.services.inference.data_proxy.counts import TokenCounts
from areal.services.inference.data_proxy.deadline import idle_s
from areal.services.inference.data_proxy.dialects.writer import named
from areal.services.inference.data_proxy.fields import Fields
from areal.services.inference.data_proxy.generation import Drive, Generator
from areal.services.inference.data_proxy.prepared import Clock, Prepared
from areal.services.inference.data_proxy.prompting import count_tokens, make_prompts
from areal.services.inference.data_proxy.reading import PROMPT_TAIL_TOKENS, Parsers
from areal.services.inference.data_proxy.samples import call_ids, samples_of, say_again, token_turns
from areal.services.inference.data_proxy.sampling_fields import check_logprobs
from areal.services.inference.data_proxy.shapes import Frame
from areal.services.inference.data_proxy.tokenizer import DECODE_US, CodecPool, TextCodec
from areal.services.inference.data_proxy.visits import Answer, Visit, Visits
from areal.services.inference.engines.base import Capabilities, EngineCall, Sampling
from areal.services.web.body import decode_object, read_body
from areal.services.web.errors import bad_request
from areal.services.web.server import AnyResponse, Request, Response
from areal.services.web.service import json_response

_MOST_AT_ONCE = 65_536  # tokens of an answer that is read in one go: some milliseconds
_SEVERAL_TOKENS = 16
_WATCHED_S = 10.0  # the engine is asked every second


@dataclass(frozen=True)
class ProxyLimits:
    """``max_model_len`` and ``adapters`` are asked at each call: the engine says them once it is up."""

    max_body_bytes: int
    request_timeout_s: float
    max_model_len: Callable[[], int | None]
    adapters: Callable[[], tuple[str, ...]] = tuple


def how_told(ask: Ask, choices: int, sampling: Sampling, idle_s: float) -> tuple[bool, int]:
    """``EngineCall.stream`` and ``stream_interval``. Where nobody reads along, an answer comes whole; but where our own
    reading may end it, where reading it at once would hold the event loop, or where less than the engine's own word
    (``EngineState.generated``) shows that it is stuck, it comes in events of several tokens."""
    if ask.answering.stream:
        return True, 1
    ends_early = bool(ask.answering.stops) or ask.reading.tools.one_call
    long = sampling.top_logprobs > 0 or choices * (sampling.max_new_tokens or _MOST_AT_ONCE + 1) > _MOST_AT_ONCE
    return ends_early or long or idle_s < _WATCHED_S, _SEVERAL_TOKENS


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
        self._answering = Answering(generator, self._record)
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
        return json_response({"input_tokens": await count_tokens(asked.ask, self._codec, self._pool, len(body))})

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
        with named(asked.names):
            if visit.keeps(ask.store) or ask.answering.tells_logprobs:
                check_logprobs(ask.sampling, ask.answering, self._capabilities)
        recorded = visit if visit.keeps(ask.store) else None
        with named(asked.names):
            prompts = await make_prompts(ask, self._codec, self._pool, recorded, size, self._limits.max_model_len())
            room = self._room(ask, prompts.longest)
        sampling = ask.sampling if ask.sampling.max_new_tokens == room else replace(ask.sampling, max_new_tokens=room)
        frame = self._frame(ask, prompts.ids, visit.answer_id(asked.id_prefix))
        if ask.prompt_logprobs is not None:
            frame = replace(frame, scores=await self._answering.scores(prompts.ids, ask.prompt_logprobs, ask.adapter))
        patience_s = idle_s(request, self._limits.request_timeout_s)
        prepared = Prepared(
            request=request,
            ask=ask,
            frame=frame,
            shape=asked.shape(frame),
            drives=self._drives(frame, ask, sampling, patience_s),
            idle_s=patience_s,
            clock=clock,
            visit=visit,
            prompt_text=prompts.text,
        )
        held = sum(map(len, prompts.ids)) + (room or 0) * len(frame.choices)
        self.tokens_in_flight += held
        try:
            answer = self._answering.stream if ask.answering.stream else self._answering.whole
            return await answer(prepared)
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
        out = prepared.open_stream()
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
        frame = Frame(answer_id, model, self._codec, answering, prompts, choices, echoed, created=at)
        return replace(frame, no_answer=ask.no_answer)

    def _tail(self, prompt: list[int]) -> str:
        return self._codec.decode(prompt[-PROMPT_TAIL_TOKENS:], skip_special=False)

    def _drives(self, frame: Frame, ask: Ask, sampling: Sampling, idle_s: float) -> tuple[Drive, ...]:
        how, count = ask.answering, len(frame.prompts)
        # A stop string ends its own prompt's work in the engine.
        together = count if self._capabilities.many_prompts and not how.stream and not how.stops else 1
        each = frame.per_prompt
        stream, interval = how_told(ask, len(frame.choices), sampling, idle_s)
        return tuple(
            Drive(
                EngineCall(
                    f"{frame.answer_id}-{first}",
                    frame.prompts[first : first + together],
                    sampling,
                    how.response_format,
                    ask.adapter,
                    stream=stream,
                    stream_interval=interval,
                ),
                frame.choices[first * each : (first + together) * each],
            )
            for first in range(0, count, together)
        )

    async def _record(self, prepared: Prepared) -> None:
        """The answer is complete: it is on disk before the caller has its last byte."""
        visit, frame = prepared.visit, prepared.frame
        clock = prepared.clock
        self._counts.answered(frame, clock.first - clock.started, clock.last - clock.first)
        if not visit.keeps(prepared.ask.store):
            return
        cost_us = DECODE_US * sum(len(choice.token_ids) for choice in frame.choices)
        samples = await self._pool.run(
            lambda: samples_of(frame, prepared.ask.sampling.temperature, visit.conversation, prepared.prompt_text),
            cost_us,
        )
        await visit.record(Answer(frame.answer_id, frame.model, frame.created, samples))
