"""Requests to generate: their fields and answers.

With ``stream``, POST /generate answers with NDJSON: one line for each sequence with new tokens, of which a running
sequence has at least ``stream_interval``. Otherwise it answers with one object with all ``choices``, and the seconds
since the first token (``after_first_s``). The last token of a sequence that stopped is the end token, with its logprob
and version, because trainers need it; ``stop_token_id`` repeats it for callers that remove it from the text. If the
engine ends before its sequences, the answer is an error, never a short text: status 503, or a line with the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from areal.dataclasses import dataclass
from areal.dataset.images import from_base64
from areal.errors import FieldError, UsageFault
from areal.services.http.errors import ApiError, bad_field, bad_request, unsupported
from areal.services.http.messages import AnyResponse, Request, Response, StreamingResponse
from areal.services.http.service import json_response
from areal.services.inference.engines.embedded.grammar import Matcher
from areal.services.inference.engines.embedded.linear import Adapter
from areal.services.inference.engines.embedded.loading import LoadedModel
from areal.services.inference.engines.embedded.sampler import stream_key
from areal.services.inference.engines.embedded.scheduler import Finish, TokenSequence, TopLogprobs
from areal.wire.sampling import SamplingParams, parse_sampling

if TYPE_CHECKING:
    from areal.dataset.vision import Pixels

# Both are longer than a data proxy's window, so that the window adds no delay.
FLUSH_S = 0.05  # too short for a reader to see; the other engines' ``Pace`` has the same
_BATCH_FLUSH_S = 0.025  # with a ``stream_interval``: the text may end such a stream, and later tokens are wasted


@dataclass(frozen=True)
class Delta:
    """The new tokens of one sequence. ``finish_reason`` is set on its last delta only."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    top_logprobs: list[TopLogprobs] | None
    finish_reason: Finish | None
    stop_token_id: int | None


class Stream:
    """One request's sequences, and how much of each was sent. The event loop uses it; for whole answers the engine's
    thread also calls ``is_due``.

    ``whole``: the consumer wants everything at the end. ``interval``: the number of new tokens that a running sequence
    collects. ``flush_s``: the seconds between two deltas. ``first_at``: ``time.monotonic`` at the first token.
    """

    def __init__(self, sequences: list[TokenSequence], *, whole: bool, interval: int = 1) -> None:
        self.sequences = sequences
        self.whole = whole
        self.first_at: float | None = None
        self.flush_s = FLUSH_S if interval == 1 else _BATCH_FLUSH_S
        self._interval = interval
        self._live = list(sequences)
        self._sent = {id(sequence): 0 for sequence in sequences}
        self._news = asyncio.Event()
        self.settled = asyncio.Event()  # the consumer has written all deltas that it took

    @property
    def ended(self) -> bool:
        """Whether every sequence's last delta was taken."""
        return not self._live

    def is_due(self) -> bool:
        """Return whether the stream has a first or a last token to send."""
        if self.first_at is None and any(each.produced for each in self._live):
            self.first_at = time.monotonic()
        if self.whole:
            return all(each.finish for each in self._live)
        return any(each.finish or (each.produced and not self._sent[id(each)]) for each in self._live)

    def has_news(self, interval: int | None = None) -> bool:
        """Return whether the consumer should be woken; ``interval`` overrides the stream's."""
        if self.whole:
            return self.is_due()
        least = self._interval if interval is None else interval
        return any(each.finish or each.produced >= self._sent[id(each)] + least for each in self._live)

    def wake(self) -> None:
        self.settled.clear()
        self._news.set()

    async def next(self) -> list[Delta]:
        """Wait to be woken. Returns the deltas since the last call."""
        self.settled.set()
        await self._news.wait()
        self._news.clear()
        return [delta for sequence in list(self._live) if (delta := self._take(sequence)) is not None]

    def _take(self, sequence: TokenSequence) -> Delta | None:
        finish = sequence.finish  # read before the count: a finished sequence grows no more
        start, stop = self._sent[id(sequence)], sequence.produced
        if start == stop and finish is None:
            return None
        self._sent[id(sequence)] = stop
        if finish is not None:
            self._live.remove(sequence)
        return Delta(
            index=sequence.index,
            token_ids=sequence.output[start:stop],
            logprobs=sequence.logprobs[start:stop],
            versions=sequence.versions[start:stop],
            top_logprobs=sequence.top[start:stop] if sequence.sampling.top_logprobs else None,
            finish_reason=finish,
            stop_token_id=sequence.stop_token if finish is not None else None,
        )


class Streams:
    """All open streams, which connect the engine's thread with the event loop. Any thread may call ``progress``;
    everything else is for the event loop.

    A step may append a token to each of many sequences every millisecond, and waking the loop and the clients each time
    would cost more than the step. The loop is woken at once when a sequence began or ended, otherwise at most every
    ``flush_s`` of a stream. Without open streams it is not woken until a sequence ends.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open: tuple[Stream, ...] = ()  # replaced and never changed: the engine's thread reads it
        self._urgent = False  # ``_flush_due`` is scheduled
        self._armed = False  # the flush timer runs or is about to
        self._timer: asyncio.TimerHandle | None = None
        self._flushed_at = 0.0

    def open(self, sequences: list[TokenSequence], *, whole: bool, interval: int = 1) -> Stream:
        stream = Stream(sequences, whole=whole, interval=interval)
        self._open = (*self._open, stream)
        if self._armed:  # perhaps without a timer, if there was no stream to flush
            self._arm()
        return stream

    def close(self, stream: Stream) -> None:
        self._open = tuple(each for each in self._open if each is not stream)
        stream.settled.set()

    def progress(self, urgent: bool) -> None:
        # A race costs one call too many, never one too few: each flag is cleared before the sequences are read.
        if urgent and not self._urgent and any(not each.whole or each.is_due() for each in self._open):
            self._urgent = True
            self._loop.call_soon_threadsafe(self._flush_due)
        elif not urgent and not self._armed:
            self._armed = True
            self._loop.call_soon_threadsafe(self._arm)

    def _arm(self) -> None:
        """Start the flush timer. Without a stream to flush there is none, but the flag stays set, so that no step wakes
        the loop."""
        read = [stream.flush_s for stream in self._open if not stream.whole]
        if self._timer is not None or not read:
            return
        left_s = self._flushed_at + min(read) - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._flush)
        else:
            self._flush()

    async def settle(self, deadline_s: float) -> None:
        """Flush all streams, and wait up to ``deadline_s`` until they are written."""
        self._wake_streams(interval=1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                for stream in self._open:
                    await stream.settled.wait()

    def _flush_due(self) -> None:
        self._urgent = False
        for stream in self._open:
            if stream.is_due():
                stream.wake()

    def _flush(self) -> None:
        self._timer, self._armed, self._flushed_at = None, False, self._loop.time()
        self._wake_streams()

    def _wake_streams(self, interval: int | None = None) -> None:
        for stream in self._open:
            if stream.has_news(interval):
                stream.wake()


def read_prompts(raw: Any, loaded: LoadedModel) -> list[list[int]]:
    """Return the token ids of a request's prompts. Raises 400 for an invalid prompt, or one without room for another
    token."""
    several = isinstance(raw, list) and bool(raw) and isinstance(raw[0], list)
    return [read_prompt(each, loaded) for each in raw] if several else [read_prompt(raw, loaded)]


def read_prompt(raw: Any, loaded: LoadedModel) -> list[int]:
    if not isinstance(raw, list) or not raw:
        raise bad_field("input_ids", "must be a list of at least one token id")
    vocab_size, most = loaded.engine.vocab_size, loaded.engine.limits.max_length
    if len(raw) >= most:
        message = f"the prompt has {len(raw)} tokens; this model has room for {most} of prompt and answer together"
        raise bad_request(message, param="input_ids", code="context_length_exceeded")
    if set(map(type, raw)) != {int} or min(raw) < 0 or max(raw) >= vocab_size:
        wrong = next(token for token in raw if type(token) is not int or not 0 <= token < vocab_size)
        raise bad_field("input_ids", f"holds {wrong!r}, which is no token id below {vocab_size}")
    return raw


def read_sampling(raw: Mapping[str, object], vocab_size: int) -> SamplingParams:
    try:
        return parse_sampling(raw, vocab_size)
    except FieldError as error:
        raise bad_field(error.field, error.problem) from error


def find_adapter(name: str | None, loaded: LoadedModel) -> Adapter | None:
    adapter = loaded.adapters.get(name) if name is not None else None
    if adapter is None and name is not None:
        raise bad_field("adapter", f"{name!r} is not loaded here", code="adapter_not_found")
    return adapter


async def read_grammar(
    raw: Mapping[str, object] | None, sampling: SamplingParams, loaded: LoadedModel
) -> Matcher | None:
    """Return the matcher of a ``response_format``, built in a thread: a large one takes seconds. Raises 400."""
    if raw is None:
        return None
    name = "response_format"
    if loaded.grammars is None:
        raise unsupported(name, str(loaded.no_grammars))
    for field in ("ignore_eos", "min_new_tokens"):
        if getattr(sampling, field):
            raise bad_request(
                f"{name} cannot be used with {field}: the grammar decides when the answer ends", param=field
            )
    try:
        return await asyncio.to_thread(loaded.grammars.matcher, raw)
    except UsageFault as fault:
        raise bad_request(fault.message, param=name) from fault


async def read_images(raw: Sequence[str], prompts: Sequence[Sequence[int]], loaded: LoadedModel) -> Pixels | None:
    """Return the images of ``image_data`` (base64), which the placeholders of the only prompt stand for. Raises 400."""
    if not raw:
        return None
    name = "image_data"
    if loaded.images is None:
        raise unsupported(name, loaded.no_images)
    if len(prompts) != 1:
        raise bad_field(name, f"goes with one prompt, not {len(prompts)}")
    images = loaded.images
    try:
        data = [from_base64(each, f"images[{number}]") for number, each in enumerate(raw)]
        pixels = await asyncio.to_thread(images.pixels, data)
    except UsageFault as fault:
        raise bad_field(name, f"has no such images: {fault.message}") from fault
    if (count := prompts[0].count(pixels.token_id)) < pixels.placeholders:
        raise bad_field(name, f"stands for {pixels.placeholders} tokens {pixels.token_id}, and the prompt has {count}")
    return pixels


def make_sequences(
    prompts: list[list[int]],
    sampling: SamplingParams,
    loaded: LoadedModel,
    adapter: Adapter | None = None,
    matcher: Matcher | None = None,
    seeds: Sequence[int] | None = None,
    pixels: Pixels | None = None,
) -> list[TokenSequence]:
    """Return the request's n choices of each prompt. Their random numbers are the same as if each prompt were alone.
    ``seeds``: one for each prompt, in place of the sampling parameters' one."""
    longest, most = loaded.engine.limits.max_length, sampling.max_new_tokens
    stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else loaded.end_tokens)
    sequences: list[TokenSequence] = []
    for number, prompt in enumerate(prompts):
        room = longest - len(prompt)
        given = sampling.seed if seeds is None else seeds[number]
        seed = secrets.randbits(64) if given is None else given
        sequences += [
            TokenSequence(
                prompt,
                sampling,
                allowance=room if most is None else min(most, room),
                stop_ids=stop_ids,
                index=len(sequences) + choice,
                key=stream_key(seed, choice),
                adapter=adapter,
                matcher=matcher.fork() if matcher else None,
                pixels=pixels,
            )
            for choice in range(sampling.n)
        ]
    return sequences


async def answer_whole(stream: Stream, prompt_tokens: int) -> Response:
    choices: list[Delta] = []
    while not stream.ended:
        choices += await stream.next()
    if (failure := _failure(choices, stream)) is not None:
        raise failure
    choices.sort(key=lambda choice: choice.index)
    body: dict[str, object] = {"choices": choices, "prompt_tokens": prompt_tokens}
    if stream.first_at is not None:
        body["after_first_s"] = time.monotonic() - stream.first_at
    return json_response(body)


async def answer_stream(request: Request, stream: Stream) -> AnyResponse:
    response = StreamingResponse(headers={"Content-Type": "application/x-ndjson"})
    with contextlib.suppress(ConnectionResetError):  # the caller has disconnected
        response.begin(request)
        while not stream.ended:
            deltas = await stream.next()
            if (failure := _failure(deltas, stream)) is not None:
                await response.write(_line(failure.body(request.id)))
                break
            if deltas:
                await response.write(b"".join(_line(delta) for delta in deltas))
    return response


def _line(data: Delta | dict[str, object]) -> bytes:
    return orjson.dumps(data, option=orjson.OPT_APPEND_NEWLINE)


def _failure(deltas: Iterable[Delta], stream: Stream) -> ApiError | None:
    """Return the error of an answer that ended early. A dead end is not retryable: another worker would reach it
    too."""
    ended = {delta.finish_reason for delta in deltas}
    if Finish.LOST in ended:
        return ApiError(503, "the engine stopped before the answer was complete", code="engine_stopped")
    if Finish.DEAD_END in ended:
        message = next(each.fault for each in stream.sequences if each.finish is Finish.DEAD_END)
        return ApiError(422, message, code="constraint_dead_end", param="response_format")
    return None
