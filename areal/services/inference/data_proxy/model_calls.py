"""The model routes of a data proxy with a token engine: parse, tokenize, generate, record, respond."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from areal.dataclasses import dataclass, field, replace
from areal.services.dialects import assistant_message
from areal.services.http.errors import ApiError, bad_field, bad_request
from areal.services.http.messages import AnyResponse, Request, Response, decode_object
from areal.services.http.service import SECONDS, TOKEN_SECONDS, Handler, Metrics, json_response
from areal.services.inference.data_proxy.control import EngineControl
from areal.services.inference.data_proxy.fields import Fields, check_logprobs, dialect_field_names
from areal.services.inference.data_proxy.generation import (
    CallTimer,
    Choice,
    ChoiceUpdate,
    EngineJob,
    GenerationCall,
    Generator,
    ResponseState,
    Serializer,
    progress_timeout_s,
)
from areal.services.inference.data_proxy.openai import (
    PROMPT_TAIL_TOKENS,
    GenerationRequest,
    Parsers,
    read_chat,
    read_completion,
)
from areal.services.inference.data_proxy.serializers import (
    ChatSerializer,
    ChatTranslation,
    CompletionSerializer,
    DialectSerializer,
)
from areal.services.inference.data_proxy.sessions import CallRecorder, CallRecorders
from areal.services.inference.data_proxy.tokenizer import DECODE_US, ENCODE_US, RENDER_US, CodecPool, TextCodec, TooLong
from areal.services.inference.engines.base import Capabilities, EngineCall, EngineDelta, FinishReason, PromptLogprobs
from areal.services.inference.recorder.records import (
    ConversationDigest,
    ReplayData,
    TokenSample,
    TokenTurn,
    token_array,
)
from areal.wire.processes import DataProxyConfig
from areal.wire.sampling import SamplingParams


def samples_of(
    state: ResponseState, temperature: float, conversation: ConversationDigest | None, place: int | None
) -> list[TokenSample]:
    """Return the records of a finished response, one for each choice. ``place``: the number of a chat's messages."""
    each, samples = state.per_prompt, []
    for choice in state.choices:
        assert choice.finish_reason is not None
        reply, extra = choice.reply, ReplayData()
        if choice.stop_token_id is not None:
            extra["stop_token_id"] = choice.stop_token_id
        if choice.top_logprobs:
            extra["top_logprobs"] = choice.top_logprobs
        if reply.calls:
            extra["call_ids"] = [call.id for call in reply.calls]
        if state.scores and choice.index % each == 0:
            scores = state.scores[choice.index // each]
            extra["scores"] = (scores.logprobs, scores.top_logprobs)
        samples.append(
            TokenSample(
                prompt_ids=state.prompts[choice.index // each],
                output_ids=token_array(choice.token_ids),
                logprobs=choice.logprobs,
                versions=choice.versions,
                finish_reason=choice.finish_reason,
                temperature=temperature,
                after=conversation.after(assistant_message(reply)) if conversation is not None else None,
                place=place,
                extra=extra,
            )
        )
    return samples


def replay_turn(choice: Choice, turn: TokenTurn) -> ChoiceUpdate:
    """Push a recorded turn into its choice as one update. The text is decoded from the recorded tokens."""
    tops = turn.extra.get("top_logprobs")
    delta = EngineDelta(
        index=choice.index,
        token_ids=tuple(turn.output_ids),
        logprobs=tuple(turn.logprobs),
        versions=tuple(turn.versions),
        top_logprobs=tuple(tuple((token, logprob) for token, logprob in top) for top in tops) if tops else None,
        finish_reason=FinishReason(turn.finish_reason),
        stop_token_id=turn.extra.get("stop_token_id"),
    )
    return choice.push(delta)


DEFAULT_MODEL = "default"  # agents may use this name for their session's model
_MAX_WHOLE_TOKENS = 65_536  # the longest response that is decoded in one step, which takes a few milliseconds
_BATCHED_TOKENS = 16
_ENGINE_POLL_S = 10.0  # the shortest deadline that surely spans several engine polls, within 5 s and then every second
_TOKEN_CHARS = 3  # approximate length of a token's text


def adapter_of(name: str | None, model: str, adapters: Collection[str]) -> str | None:
    """Return the LoRA adapter that a request's ``model`` names, as ``adapter`` or ``model:adapter``. None: the request
    names the model itself. Raises 404 for any other name."""
    if name is None or name == model:
        return None
    adapter = name.removeprefix(f"{model}:")
    if adapter in adapters:
        return adapter
    if name == DEFAULT_MODEL:
        return None
    known = f"; its adapters are {', '.join(sorted(adapters))}" if adapters else ""
    message = f"the model {name!r} does not exist; here is {model!r}{known}"
    raise ApiError(404, message, code="model_not_found", param="model")


def engine_streaming(
    generation: GenerationRequest, choices: int, sampling: SamplingParams, timeout_s: float
) -> tuple[bool, int]:
    """Return ``EngineCall.stream`` and ``stream_interval``. A streaming client needs an event for each token. Otherwise
    the engine sends the response whole, unless a stop string or tool call may end it early, decoding it at once would
    block the event loop, or the deadline is too short for engine polls to show progress (``EngineState.generated``): it
    then sends events of several tokens."""
    if generation.options.stream:
        return True, 1
    ends_early = bool(generation.options.stops) or generation.parsing.tools.one_call
    most = choices * (sampling.max_new_tokens or _MAX_WHOLE_TOKENS + 1)
    is_long = sampling.top_logprobs > 0 or most > _MAX_WHOLE_TOKENS
    return ends_early or is_long or timeout_s < _ENGINE_POLL_S, _BATCHED_TOKENS


class TokenMetrics:
    """Counters of finished responses."""

    def __init__(self, metrics: Metrics) -> None:
        self._prompt = metrics.counter("areal_prompt_tokens_total", "Tokens of prompts answered.")
        self._generated = metrics.counter("areal_generated_tokens_total", "Tokens generated in finished answers.")
        choices = metrics.counter("areal_choices_total", "Finished choices.", ("finish_reason",))
        self._choices = {reason: choices.labels(reason.value) for reason in FinishReason}
        self._first = metrics.histogram(
            "areal_time_to_first_token_seconds", "From a request read to its first token.", SECONDS, ()
        )
        self._each = metrics.histogram(
            "areal_time_per_output_token_seconds", "Between two tokens: an answer's mean.", TOKEN_SECONDS, ()
        )

    def count(self, state: ResponseState, timer: CallTimer) -> None:
        """Count a response whose choices have all ended."""
        lengths = [len(choice.token_ids) for choice in state.choices]
        self._first.observe(timer.first_token - timer.started)
        longest = max(lengths)
        if longest > 1:
            self._each.observe((timer.last_token - timer.first_token) / (longest - 1))
        self._prompt.inc(sum(map(len, state.prompts)))
        self._generated.inc(sum(lengths))
        for choice in state.choices:
            assert choice.finish_reason is not None
            self._choices[choice.finish_reason].inc()


@dataclass(frozen=True)
class ParsedRequest:
    """A parsed request. ``names`` maps fields of a chat body to their names in the request's API, where they differ."""

    generation: GenerationRequest
    serializer: Callable[[ResponseState], Serializer]
    id_prefix: str
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def error_names(self) -> Mapping[str, str]:
        """Return ``names`` with the caller's field for what constrains the response."""
        name, by = "response_format", self.generation.options.constrained_by
        return self.names if by == name else {**self.names, name: by}


Parse = Callable[[Fields], ParsedRequest]
"""Parses a request body. Raises 400 naming the field."""


@dataclass(eq=False)
class ModelCalls:
    """The handlers of the model routes. The state of the engine is read at each call: it reports its limits and
    adapters only once it is up."""

    _config: DataProxyConfig
    _codec: TextCodec
    _parsers: Parsers
    _generator: Generator
    _capabilities: Capabilities
    _recorders: CallRecorders
    _metrics: TokenMetrics
    _control: EngineControl
    tokens_in_flight: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._pool = CodecPool(self._config.tokenizer_threads)

    @property
    def max_model_len(self) -> int | None:
        """The smaller of the data proxy's and the engine's context length: a call that the engine would truncate is
        refused here."""
        limits = [length for length in (self._config.max_model_len, self._control.watch.state.max_model_len) if length]
        return min(limits, default=self._codec.max_positions)

    def handlers(self) -> dict[str, Handler]:
        parsers: dict[str, Parse] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": lambda fields: ParsedRequest(
                read_completion(fields, self._codec, self._capabilities), CompletionSerializer, "cmpl-"
            ),
            "/v1/responses": self._response,
            "/v1/messages": self._message,
        }
        answers: dict[str, Handler] = {path: partial(self._answer, parse=parse) for path, parse in parsers.items()}
        return {**answers, "/v1/messages/count_tokens": self._count_tokens}

    async def _count_tokens(self, request: Request) -> AnyResponse:
        """Respond with the length of a prompt in tokens; nothing is generated."""
        self._control.check_serving()
        self._recorders.authenticate(request)
        body = await request.read(self._config.max_body_bytes)

        parsed = self._parse(decode_object(body), partial(self._message, counting=True))
        prompt = parsed.generation.chat
        assert prompt is not None
        text = await self._pool.run(prompt.text, len(body) * RENDER_US)
        # A long chat is counted in pieces, which gives a few too many.
        count = await self._pool.run(lambda: self._codec.count(text), len(text) * ENCODE_US)
        return json_response({"input_tokens": count})

    async def _prompts(
        self, generation: GenerationRequest, recorder: CallRecorder | None, size: int, limit: int | None
    ) -> Sequence[array[int]]:
        """Return the token ids of each prompt. ``recorder`` None: no recorded turn is continued. ``size``: bytes of the
        request. ``limit``: the context length in tokens. Raises ApiError 400 when the template rejects the chat, or a
        prompt exceeds the limit."""
        chat, prompts = generation.chat, generation.prompts
        try:
            if chat is None:
                return await self._pool.run(lambda: [token_array(each(limit)) for each in prompts], size * ENCODE_US)
            known = await recorder.match_prefix(generation.messages) if recorder is not None else None
            render_us = size * RENDER_US
            if known is not None:
                count, text = known.decoded
                new = len(known.tokens) - count
                encode_us = max(0, size - len(text) - _TOKEN_CHARS * new) * ENCODE_US
                cost_us = render_us + encode_us + new * DECODE_US
                if (prompt := await self._pool.run(lambda: chat.continued(known, limit), cost_us)) is not None:
                    return [prompt]
            return [await self._pool.run(lambda: chat.token_ids(limit), render_us + size * ENCODE_US)]
        except TooLong:
            message = f"this model's context is {limit} tokens; you asked for more in the prompt"
            raise _context_exceeded(generation, message) from None

    def _parse(self, data: dict[str, object], parse: Parse) -> ParsedRequest:
        fields = Fields(data)
        adapter = adapter_of(fields.text("model"), self._config.model, self._control.watch.state.adapters)
        parsed = parse(fields)
        return parsed if adapter is None else replace(parsed, generation=replace(parsed.generation, adapter=adapter))

    def _read_chat(self, fields: Fields) -> GenerationRequest:
        return read_chat(fields, self._codec, self._capabilities, self._parsers)

    def _chat(self, fields: Fields) -> ParsedRequest:
        generation = self._read_chat(fields)
        serializer = partial(ChatSerializer, custom=generation.parsing.tools.custom)
        return ParsedRequest(generation, serializer, "chatcmpl-")

    def _response(self, fields: Fields) -> ParsedRequest:
        from areal.services.inference.data_proxy import responses  # imported when the dialect is used

        return self._translated(responses.translate(fields, self._template_uses), "resp_")

    def _message(self, fields: Fields, *, counting: bool = False) -> ParsedRequest:
        from areal.services.inference.data_proxy import anthropic

        return self._translated(anthropic.translate(fields, self._template_uses, counting=counting), "msg_")

    def _template_uses(self, variable: str) -> bool:
        return self._codec.chat is not None and self._codec.chat.template.uses(variable)

    def _translated(self, translation: ChatTranslation, id_prefix: str) -> ParsedRequest:
        with dialect_field_names(translation.names):
            generation = self._read_chat(Fields(translation.chat))

        def serializer(state: ResponseState) -> Serializer:
            return DialectSerializer(state, translation.writer(state.answer_id, state.model, state.created))

        generation = replace(generation, ignored=translation.ignored)
        return ParsedRequest(generation, serializer, id_prefix, translation.names)

    async def _answer(self, request: Request, parse: Parse) -> AnyResponse:
        self._control.check_serving()
        caller = self._recorders.authenticate(request)
        body = await request.read(self._config.max_body_bytes)
        timer = CallTimer(time.perf_counter())
        parsed = self._parse(decode_object(body), parse)

        async def answer(recorder: CallRecorder) -> AnyResponse:
            if recorder.replayed is not None:
                return await self._replay(request, parsed, recorder, timer)
            if not (names := parsed.error_names):
                return await self._generate(request, parsed, recorder, timer, len(body))
            with dialect_field_names(names):
                return await self._generate(request, parsed, recorder, timer, len(body))

        return await self._recorders.run(caller, request.headers, body, answer)

    async def _generate(
        self, request: Request, parsed: ParsedRequest, recorder: CallRecorder, timer: CallTimer, size: int
    ) -> AnyResponse:
        generation, limit = parsed.generation, self.max_model_len
        is_recorded = recorder.records(generation.store)
        if is_recorded or generation.options.tells_logprobs:
            check_logprobs(generation.sampling, generation.options, self._capabilities)
        prompts = await self._prompts(generation, recorder if is_recorded else None, size, limit)
        lengths = [len(prompt) for prompt in prompts]
        room = _room(generation, max(lengths), limit)
        if room is not None and generation.sampling.min_new_tokens > room:
            least = generation.sampling.min_new_tokens
            raise bad_field("min_tokens", f"is {least}, but the answer can have at most {room} tokens")
        sampling = generation.sampling
        if sampling.max_new_tokens != room:
            sampling = replace(sampling, max_new_tokens=room)
        state = self._state(generation, prompts, recorder.answer_id(parsed.id_prefix), int(time.time()))
        if (scored := generation.scored) is not None:
            state.scores = await self._generator.scores(prompts, scored, generation.adapter)
        timeout_s, seeds = progress_timeout_s(request, self._config.request_timeout), None
        if sampling.seed is None:
            seeds = generation.default_seeds or recorder.seeds(prompts)
        call = GenerationCall(
            request=request,
            generation=generation,
            state=state,
            serializer=parsed.serializer(state),
            jobs=self._jobs(state, generation, sampling, timeout_s, seeds),
            timeout_s=timeout_s,
            timer=timer,
            recorder=recorder,
        )
        held = sum(lengths) + (room or 0) * len(state.choices)
        self.tokens_in_flight += held
        try:
            run = self._generator.stream if generation.options.stream else self._generator.respond
            return await run(call, self._record)
        finally:
            self.tokens_in_flight -= held

    async def _replay(
        self, request: Request, parsed: ParsedRequest, recorder: CallRecorder, timer: CallTimer
    ) -> AnyResponse:
        """Send the recorded response, serialized as this request specifies. Its body equals the first request's."""
        generation = parsed.generation
        turns = [turn for turn in recorder.replayed or () if isinstance(turn, TokenTurn)]
        prompts = [turn.prompt_ids for turn in turns[:: generation.sampling.n]]
        call_ids = [turn.extra.get("call_ids", ()) for turn in turns]
        state = self._state(generation, prompts, turns[0].answer_id, turns[0].created, call_ids)
        state.scores = [PromptLogprobs(*turn.extra["scores"]) for turn in turns if "scores" in turn.extra]
        serializer = parsed.serializer(state)
        updates = [replay_turn(choice, turn) for choice, turn in zip(state.choices, turns, strict=True)]
        call = GenerationCall(request, generation, state, serializer, (), 0.0, timer, recorder)
        if not generation.options.stream:
            return Response(body=serializer.whole(), content_type="application/json", headers=call.headers())
        out = call.open_stream()
        await out.write(serializer.opening() + b"".join(map(serializer.update, updates)) + serializer.closing())
        return out

    def _state(
        self,
        generation: GenerationRequest,
        prompts: Sequence[array[int]],
        answer_id: str,
        created: int,
        call_ids: Sequence[Sequence[str]] | None = None,
    ) -> ResponseState:
        codec, options, parsing, n = self._codec, generation.options, generation.parsing, generation.sampling.n
        skip, shown, has_reasoning = options.skip_special_tokens, parsing.markers, parsing.reasoning is not None
        choices = []
        for index in range(len(prompts) * n):
            tail = prompts[index // n][-PROMPT_TAIL_TOKENS:] if has_reasoning else ()
            reader = parsing.new_reader(
                codec.decode(tail, skip_special=False) if tail else "", call_ids[index] if call_ids else ()
            )
            choices.append(Choice(index, codec.stream(skip_special=skip, shown=shown), options.stops, reader))
        return ResponseState(
            answer_id=answer_id,
            model=f"{self._config.model}:{generation.adapter}" if generation.adapter else self._config.model,
            codec=codec,
            options=options,
            prompts=prompts,
            choices=choices,
            echoed=[
                codec.decode(prompt, skip_special=False) if text is None else text
                for text, prompt in zip(generation.echo, prompts, strict=False)
            ],
            created=created,
            prompt_logprobs=generation.prompt_logprobs,
            no_answer=generation.no_answer,
        )

    def _jobs(
        self,
        state: ResponseState,
        generation: GenerationRequest,
        sampling: SamplingParams,
        timeout_s: float,
        seeds: Sequence[int] | None,
    ) -> list[EngineJob]:
        options, count, each = state.options, len(state.prompts), state.per_prompt
        # With stop strings each prompt is a job of its own, which the stop strings can abort in the engine.
        together = count if self._capabilities.many_prompts and not options.stream and not options.stops else 1
        stream, interval = engine_streaming(generation, len(state.choices), sampling, timeout_s)
        return [
            EngineJob(
                EngineCall(
                    f"{state.answer_id}-{first}",
                    state.prompts[first : first + together],
                    sampling if seeds is None or together > 1 else replace(sampling, seed=seeds[first]),
                    options.response_format,
                    generation.adapter,
                    stream=stream,
                    stream_interval=interval,
                    seeds=None if seeds is None or together == 1 else seeds[first : first + together],
                    images=generation.images,
                ),
                state.choices[first * each : (first + together) * each],
            )
            for first in range(0, count, together)
        ]

    async def _record(self, call: GenerationCall) -> None:
        """Store a complete response on disk, before its last byte is sent."""
        recorder, state, generation = call.recorder, call.state, call.generation
        place = len(generation.messages) if generation.chat is not None else None
        self._metrics.count(state, call.timer)
        if not recorder.records(generation.store):
            return
        samples = samples_of(state, generation.sampling.temperature, recorder.conversation, place)
        await recorder.record(state.answer_id, state.model, state.created, samples)


def _context_exceeded(generation: GenerationRequest, message: str) -> ApiError:
    param = "prompt" if generation.chat is None else "messages"
    return bad_request(message, param=param, code="context_length_exceeded")


def _room(generation: GenerationRequest, prompt_tokens: int, limit: int | None) -> int | None:
    """Return the token limit of the response. Raises 400 for an empty prompt, or a request that exceeds the context."""
    if prompt_tokens == 0:
        raise bad_request("the prompt has no tokens", param="prompt")
    wanted = generation.sampling.max_new_tokens
    if limit is None:
        return wanted or generation.default_max_tokens
    if prompt_tokens + (wanted or 1) > limit:
        asked = f"{prompt_tokens} in the prompt" + (f" and {wanted} in the answer" if wanted else "")
        message = f"this model's context is {limit} tokens; you asked for {asked}"
        raise _context_exceeded(generation, message)
    return wanted or min(generation.default_max_tokens or limit, limit - prompt_tokens)
