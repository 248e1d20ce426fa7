"""The fields that a chat and a completion share: how to sample, when to stop, how to answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal.services.inference.data_proxy.constraints import CONSTRAINTS, read_constraint
from areal.services.inference.data_proxy.fields import Fields, unsupported
from areal.services.inference.data_proxy.tokenizer import TextCodec
from areal.services.inference.engines.base import GREEDY_BELOW, Capabilities, Sampling
from areal.services.web.errors import bad_request

MAX_CHOICES = 128
MAX_STOPS = 16

_SAMPLING_NAMES = {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"}


@dataclass(frozen=True)
class Answering:
    """How the answer is wanted. ``top_logprobs`` None: no logprobs; n: that many alternatives a token."""

    stream: bool
    include_usage: bool
    continuous_usage: bool  # in every chunk, as far as the answer has come
    stops: tuple[str, ...]
    top_logprobs: int | None
    skip_special_tokens: bool
    return_token_ids: bool
    response_format: Mapping[str, Any] | None

    @property
    def tells_logprobs(self) -> bool:
        return self.top_logprobs is not None or self.return_token_ids


_ANSWERING = frozenset(
    {"stream_options", "stop", "skip_special_tokens", "return_token_ids", "response_format", *CONSTRAINTS}
)
_SAMPLING = frozenset(
    {
        "stop_token_ids", "ignore_eos", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "n",
    }
)  # fmt: skip


def read_answering(fields: Fields, top_logprobs: int | None, capabilities: Capabilities) -> Answering:
    stream = fields.flag("stream")
    if fields.has_none(_ANSWERING):
        return Answering(stream, False, False, (), top_logprobs, True, False, None)
    include_usage, continuous_usage = _usage_options(fields, stream)
    return Answering(
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        stops=fields.texts("stop", MAX_STOPS),
        top_logprobs=top_logprobs,
        skip_special_tokens=fields.flag("skip_special_tokens", True),
        return_token_ids=fields.flag("return_token_ids"),
        response_format=_response_format(fields, capabilities),
    )


def _usage_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Whether a stream tells its usage at the end, and in every chunk: the second only with the first, as in vLLM."""
    options = Fields(fields.mapping("stream_options"))
    include, continuous = options.flag("include_usage"), options.flag("continuous_usage_stats")
    options.accept(("include_obfuscation",))
    if include and not stream:
        raise bad_request("stream_options needs stream: true", param="stream_options")
    if unknown := options.ignored():
        raise bad_request(f"unknown stream option {unknown[0]}", param=f"stream_options.{unknown[0]}")
    return include, include and continuous


def _response_format(fields: Fields, capabilities: Capabilities) -> Mapping[str, Any] | None:
    if (constraint := read_constraint(fields)) is not None:
        name, constrained = constraint
        if fields.given("response_format"):
            raise bad_request(f"{name} and response_format cannot both be followed", param=name)
        if not capabilities.response_format:
            raise unsupported(name, capabilities.no_response_format or "this engine has no grammars")
        return constrained
    wanted = fields.mapping("response_format")
    kind = wanted.get("type", "text")
    if kind == "text":
        return None
    if kind not in ("json_object", "json_schema"):
        raise bad_request("response_format.type must be text, json_object or json_schema", param="response_format")
    if not capabilities.response_format:
        raise unsupported("response_format", capabilities.no_response_format or f"this engine cannot force {kind}")
    if kind == "json_object" and wanted.get("schema") is not None:  # as Together, Fireworks and llama.cpp have it
        if not isinstance(wanted["schema"], Mapping):
            raise bad_request("response_format.schema must be an object", param="response_format.schema")
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted["schema"]}}
    return wanted


def read_sampling(
    fields: Fields, codec: TextCodec, answering: Answering, capabilities: Capabilities, max_tokens: int | None
) -> Sampling:
    """Raises 400 naming what is out of range, or what this engine has not got."""
    if fields.has_none(_SAMPLING) and not answering.stops and answering.top_logprobs is None:
        return Sampling(max_tokens, stop_token_ids=codec.sorted_end_ids)
    stop_ids = fields.token_ids("stop_token_ids", codec.vocab_size)
    ignore_eos = fields.flag("ignore_eos")
    sampling = Sampling(
        max_new_tokens=max_tokens,
        min_new_tokens=fields.whole("min_tokens", 0, 2**31 - 1) or 0,
        temperature=_temperature(fields, capabilities),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0),
        top_k=max(0, fields.whole("top_k", -1, 2**31 - 1) or 0),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        seed=fields.whole("seed", -(2**63), 2**63 - 1),
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0.01, 100.0),
        logit_bias=_logit_bias(fields, codec.vocab_size),
        stop_token_ids=tuple(sorted({*stop_ids, *_stop_tokens(answering.stops, codec, ignore_eos)})),
        ignore_eos=ignore_eos,
        n=fields.whole("n", 1, MAX_CHOICES) or 1,
        top_logprobs=answering.top_logprobs or 0,
    )
    for name in sampling.changed():
        if name not in capabilities.sampling_fields:
            field = _SAMPLING_NAMES.get(name, name)
            raise unsupported(field, "this engine does not have it")
    return sampling


def _temperature(fields: Fields, capabilities: Capabilities) -> float:
    """One so low that its inverse overflows logits is greedy, and recorded as such."""
    value = fields.number("temperature", 1.0, 0.0, 2.0)
    if value < GREEDY_BELOW:
        return 0.0
    if value < capabilities.lowest_temperature:
        lowest = capabilities.lowest_temperature
        raise unsupported("temperature", f"this engine samples at {lowest:g} at least, or greedily at 0")
    return value


def check_logprobs(sampling: Sampling, answering: Answering, capabilities: Capabilities) -> None:
    """Raises 400 naming the field with which this engine's logprobs would be of another distribution than the
    contract's (``engines.base``): for calls that are recorded, or are told logprobs."""
    grammar = answering.response_format is not None
    name = capabilities.logprobs.conflict(sampling, grammar=grammar)
    if name is not None:
        why = "with it, this engine's logprobs are not those of softmax(logits / temperature), which a trainer needs"
        raise unsupported(
            _SAMPLING_NAMES.get(name, name), f"{why}; leave it out, or ask with store: false and no logprobs"
        )


def _stop_tokens(stops: tuple[str, ...], codec: TextCodec, ignore_eos: bool) -> set[int]:
    """End tokens, and stop strings that are special tokens: those never show in the text."""
    special = {token_id for stop in stops if (token_id := codec.special_id(stop)) is not None}
    return special if ignore_eos else special | codec.end_ids


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in fields.mapping("logit_bias").items():
        if not key.isdecimal() or not key.isascii() or int(key) >= vocab_size:
            raise bad_request(f"logit_bias: {key!r} is not a token id", param="logit_bias")
        bias[int(key)] = Fields({key: value}).number(key, 0.0, -100.0, 100.0)
    return bias
