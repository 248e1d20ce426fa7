"""One request to generate: what it asks for, and how it is answered.

POST /generate answers NDJSON when ``stream`` is set, one line for each sequence that has something new, or with
``stream_interval`` so many new tokens; else one object with all ``choices``, and how many seconds before its end the
first token was there (``after_first_s``). The last token of a sequence that stopped is the end token itself, with its
logprob and version, and is named in ``stop_token_id``: a trainer needs it, a text does not. Where the engine ends
before its sequences do, the answer is an error, never a short text: status 503, or in a stream a line with the error
object.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import Any

import orjson

from areal.errors import UsageFault
from areal.services.inference.engines.embedded.grammar import Matcher
from areal.services.inference.engines.embedded.loading import Loaded
from areal.services.inference.engines.embedded.lora import Adapter
from areal.services.inference.engines.embedded.sampling import Sampling, parse, stream_key
from areal.services.inference.engines.embedded.sequence import Finish, Sequence
from areal.services.inference.engines.embedded.streams import Delta, Stream
from areal.services.web.errors import ApiError, bad_request
from areal.services.web.server import AnyResponse, Request, Response, StreamResponse
from areal.services.web.service import json_response


def read_prompts(raw: Any, loaded: Loaded) -> list[list[int]]:
    """The token ids of a request, or of each of its prompts. Raises 400 for what is no prompt, or has no room for a
    single token more."""
    several = isinstance(raw, list) and bool(raw) and isinstance(raw[0], list)
    return [_read_prompt(each, loaded) for each in raw] if several else [_read_prompt(raw, loaded)]


def _read_prompt(raw: Any, loaded: Loaded) -> list[int]:
    if not isinstance(raw, list) or not raw:
        raise bad_request("input_ids must be a list of at least one token id", param="input_ids")
    vocab_size, most = loaded.engine.vocab_size, loaded.engine.limits.max_length
    if len(raw) >= most:
        message = f"the prompt has {len(raw)} tokens; this model has room for {most} of prompt and answer together"
        raise bad_request(message, param="input_ids", code="context_length_exceeded")
    if set(map(type, raw)) != {int} or min(raw) < 0 or max(raw) >= vocab_size:
        wrong = next(token for token in raw if type(token) is not int or not 0 <= token < vocab_size)
        raise bad_request(f"input_ids holds {wrong!r}, which is no token id below {vocab_size}", param="input_ids")
    return raw


def read_sampling(raw: Any, vocab_size: int) -> Sampling:
    if raw is not None and not isinstance(raw, dict):
        raise bad_request("sampling must be an object", param="sampling")
    try:
        return parse(raw or {}, vocab_size)
    except UsageFault as fault:
        raise bad_request(fault.message, param=fault.message.split(" ")[0]) from fault


def read_adapter(raw: Any, loaded: Loaded) -> Adapter | None:
    if raw is None:
        return None
    adapter = loaded.adapters.get(raw) if isinstance(raw, str) else None
    if adapter is None:
        raise bad_request(f"adapter {raw!r} is not loaded here", param="adapter", code="adapter_not_found")
    return adapter


def read_grammar(raw: Any, sampling: Sampling, loaded: Loaded) -> Matcher | None:
    """The matcher of a ``response_format`` in OpenAI's form."""
    if raw is None:
        return None
    name = "response_format"
    if not isinstance(raw, dict):
        raise bad_request(f"{name} must be an object", param=name)
    if loaded.grammars is None:
        raise bad_request(f"{name} is not supported: {loaded.no_grammars}", param=name, code="unsupported_parameter")
    for field in ("ignore_eos", "min_new_tokens"):
        if getattr(sampling, field):
            raise bad_request(f"{name} does not go with {field}: the grammar says when the answer ends", param=field)
    try:
        return loaded.grammars.matcher(raw)
    except UsageFault as fault:
        raise bad_request(fault.message, param=name) from fault


def read_interval(raw: Any) -> int:
    """``stream_interval``: how many new tokens a line of a stream waits for."""
    if raw is None:
        return 1
    if type(raw) is not int or raw < 1:
        raise bad_request("stream_interval must be a whole number from 1", param="stream_interval")
    return raw


def make_sequences(
    prompts: list[list[int]],
    sampling: Sampling,
    loaded: Loaded,
    adapter: Adapter | None = None,
    matcher: Matcher | None = None,
) -> list[Sequence]:
    """The request's n choices of each prompt, each with its own random numbers: those that it had if its prompt were
    the only one."""
    longest, most = loaded.engine.limits.max_length, sampling.max_new_tokens
    stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else loaded.end_tokens)
    sequences: list[Sequence] = []
    for prompt in prompts:
        room = longest - len(prompt)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        sequences += [
            Sequence(
                prompt,
                sampling,
                allowance=room if most is None else min(most, room),
                stop_ids=stop_ids,
                index=len(sequences) + choice,
                key=stream_key(seed, choice),
                adapter=adapter,
                matcher=matcher.twin() if matcher else None,
            )
            for choice in range(sampling.n)
        ]
    return sequences


async def answer_whole(stream: Stream, prompt_tokens: int) -> Response:
    choices: list[Delta] = []
    while not stream.ended:
        choices += await stream.next()
    if any(choice.finish_reason is Finish.LOST for choice in choices):
        raise _lost()
    choices.sort(key=lambda choice: choice.index)
    body: dict[str, Any] = {"choices": [_fields(choice) for choice in choices], "prompt_tokens": prompt_tokens}
    if stream.first_at is not None:
        body["after_first_s"] = time.monotonic() - stream.first_at
    return json_response(body)


async def answer_stream(request: Request, stream: Stream) -> AnyResponse:
    response = StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    with contextlib.suppress(ConnectionResetError):  # the caller left, and there is nobody to tell
        await response.prepare(request)
        while not stream.ended:
            deltas = await stream.next()
            if any(delta.finish_reason is Finish.LOST for delta in deltas):
                await response.write(_line(_lost().body(request.id)))
                break
            if deltas:
                await response.write(b"".join(_line(_fields(delta)) for delta in deltas))
    return response


def _line(data: dict[str, Any]) -> bytes:
    return orjson.dumps(data, option=orjson.OPT_APPEND_NEWLINE)


def _lost() -> ApiError:
    return ApiError(503, "the engine stopped before the answer was complete", code="engine_stopped")


def _fields(delta: Delta) -> dict[str, Any]:
    return {
        "index": delta.index,
        "token_ids": delta.token_ids,
        "logprobs": delta.logprobs,
        "versions": delta.versions,
        "top_logprobs": delta.top_logprobs,
        "finish_reason": delta.finish_reason,
        "stop_token_id": delta.stop_token_id,
    }
