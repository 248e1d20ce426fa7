"""Reads request fields: each field is used, refused by name, or reported as ignored.

``null`` counts as absent. Fields that no reader took are unknown to the API; they and the known fields without effect
are named in the header ``x-areal-ignored``. No field is dropped silently.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson

from areal.dataclasses import dataclass
from areal.errors import with_names
from areal.services.http.errors import ApiError, bad_field, bad_request, unsupported
from areal.services.http.messages import ignored_names
from areal.services.inference.data_proxy.tokenizer import TextCodec
from areal.services.inference.engines.base import SAMPLING_FIELDS, Capabilities
from areal.wire.sampling import GREEDY_BELOW, MAX_STOPS, REAL_RANGES, WHOLE_RANGES, SamplingParams

OPENAI_NO_EFFECT = (
    "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
)  # fmt: skip
_T = TypeVar("_T")


class Fields:
    """The fields of one request body, removed as they are read."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._left = {name: value for name, value in data.items() if value is not None}
        self._left_out: list[str] = []

    def take(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def given(self, name: str) -> bool:
        return name in self._left

    @property
    def is_empty(self) -> bool:
        return not self._left and not self._left_out

    def has_none(self, names: frozenset[str]) -> bool:
        """Return whether none of ``names`` is given. Most calls have few fields, and reading each field costs time."""
        return names.isdisjoint(self._left)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self._within(name, (int, float), "a number", low, high)
        return default if value is None else float(value)

    def whole(self, name: str, low: int, high: int) -> int | None:
        return self._within(name, (int,), "a whole number", low, high) if name in self._left else None

    def _within(self, name: str, kinds: tuple[type, ...], called: str, low: float, high: float) -> Any:
        value = self._left.pop(name, None)
        if value is not None and (type(value) not in kinds or not math.isfinite(value)):
            raise bad_field(name, f"must be {called}")
        if value is not None and not low <= value <= high:
            raise bad_field(name, f"must be between {low:.12g} and {high:.12g}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        return self._of_kind(name, bool, "true or false") if name in self._left else default

    def text(self, name: str) -> str | None:
        return self._of_kind(name, str, "a string") if name in self._left else None

    def mapping(self, name: str) -> dict[str, Any]:
        return self._of_kind(name, dict, "an object") if name in self._left else {}

    def items(self, name: str) -> list[Any]:
        return self._of_kind(name, list, "a list") if name in self._left else []

    def _of_kind(self, name: str, kind: type[_T], called: str) -> _T:
        value = self._left.pop(name)
        if not isinstance(value, kind):
            raise bad_field(name, f"must be {called}")
        return value

    def texts(self, name: str, at_most: int) -> tuple[str, ...]:
        """Take one string or a list of strings; empty strings are refused."""
        value = self.take(name) or []
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
            raise bad_field(name, "must be a string or a list of strings, not empty ones")
        if len(items) > at_most:
            raise bad_field(name, f"may hold at most {at_most} strings")
        return tuple(items)

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        value = self.take(name, [])
        if not is_token_ids(value, vocab_size):
            raise bad_field(name, f"must be a list of token ids below {vocab_size}")
        return tuple(value)

    def accept(self, names: Iterable[str]) -> None:
        """Take known fields that do not change the response."""
        for name in names:
            self.take(name)

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Refuse known fields that cannot be honored. Raises 400 for the first one whose value requests something."""
        if reasons.keys().isdisjoint(self._left):
            return
        for name, why in reasons.items():
            if not _is_empty(self.take(name)):
                raise unsupported(name, why)

    def leave_out(self, defaults: Mapping[str, Collection[Any]]) -> None:
        """Take known fields without effect here. Report a field as ignored unless its value is one of its
        ``defaults``."""
        for name, values in defaults.items():
            value = self.take(name)
            if not _is_empty(value) and value not in values:
                self.name_left_out(name)

    def name_left_out(self, name: str) -> None:
        """Report a part of the body that has no effect here as ignored."""
        self._left_out.append(name)

    def ignored(self) -> tuple[str, ...]:
        """Return the names of the fields that were left out or that no reader took, encoded for a header."""
        if self.is_empty:
            return ()
        return ignored_names({*self._left, *self._left_out})


def _is_empty(value: object) -> bool:
    """Return whether a field's value requests nothing, such as null, false or an empty list."""
    return value is None or value is False or value in ("", [], {})


def left_out_tool(fields: Fields, tool: object, known: Collection[str]) -> bool:
    """Return whether a tool's type is not in ``known``, and report such a tool as ignored. These are tools that a
    provider runs itself, or has trained its own models to use."""
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if not isinstance(kind, str) or kind in known:
        return False
    fields.name_left_out(f"tools.{kind}")
    return True


def is_token_ids(value: object, vocab_size: int) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < vocab_size for item in value)


_FIRST_STEP = re.compile(r"[^.\[]*")  # of a field's path


@contextmanager
def dialect_field_names(names: Mapping[str, str], *, foreign: bool = False) -> Iterator[None]:
    """Rename fields of the chat body in errors to the dialect's fields. Indexes and subfields are left out, since the
    dialect may number its items differently. ``foreign``: the message is another API's; it is kept and prefixed with
    the field's name."""

    def named(field: str) -> str:
        return names.get(_FIRST_STEP.match(field)[0], field)  # type: ignore[index]  # it matches every text

    try:
        yield
    except ApiError as error:
        if error.param is None or (known := named(error.param)) == error.param:
            raise
        message = f"{known}: {error.message}" if foreign else with_names(error.message, named)
        raise ApiError(error.status, message, code=error.code, param=known, headers=error.headers) from error


# vLLM's and SGLang's own fields that change a response. Constraints (``structured_outputs`` and ``guided_*`` of vLLM,
# ``json_schema``, ``regex`` and ``ebnf`` of SGLang) are enforced by the engine's grammar; the rest is refused by name.
# https://docs.vllm.ai/en/latest/features/structured_outputs.html
# https://docs.sglang.ai/advanced_features/structured_outputs.html

_KINDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
_IN_STRUCTURED_OUTPUTS = ("json", "regex", "choice", "grammar", "json_object")
_REFUSED = {
    "structural_tag": "there are no structural tags",
    "guided_whitespace_pattern": "white space is the grammar's",
    "bad_words": "logit_bias keeps tokens out of an answer",
    "allowed_token_ids": "structured_outputs limits what an answer may be",
    "stop_regex": "stop takes plain strings",
    "include_stop_str_in_output": "an answer ends before its stop string",
    "truncate_prompt_tokens": "a prompt that does not fit is refused whole",
    "chat_template": "the model's own chat template renders every chat",
    "use_beam_search": "answers are sampled",
    "thinking_token_budget": "max_tokens limits an answer with its reasoning",
    "repetition_detection": "an answer ends at its stop strings or its limit",
    "documents": "write them into messages",
    "prompt_embeds": "prompts are texts or token ids",
    "lora_path": "an adapter is a model of its own: name it as model",
    "custom_logit_processor": "requests carry no code",
    "logits_processors": "requests carry no code",
}
CONSTRAINTS = frozenset((*_KINDS, *_REFUSED, "structured_outputs"))


def read_constraint(fields: Fields) -> tuple[str, Mapping[str, object]] | None:
    """Return the name of the field that constrains the response, and the constraint (``EngineCall.response_format``),
    or None if no field does. Raises 400 naming the field."""
    if fields.has_none(CONSTRAINTS):
        return None
    fields.refuse(_REFUSED)
    given = [(name, _KINDS[name], fields.take(name)) for name in _KINDS if fields.given(name)]
    options = Fields(fields.mapping("structured_outputs"))
    for kind in _IN_STRUCTURED_OUTPUTS:
        if options.given(kind):
            given.append((f"structured_outputs.{kind}", kind, options.take(kind)))
    if unknown := options.ignored():
        name = f"structured_outputs.{unknown[0]}"
        raise unsupported(name, "this constraint is not supported")
    wanted = [(name, kind, value) for name, kind, value in given if value is not False]
    if not wanted:
        return None
    if len(wanted) > 1:
        names = [name for name, _, _ in wanted]
        raise bad_request(f"only one of {', '.join(names)} can be used", param=names[1])
    [(name, kind, value)] = wanted
    return name, _constraint(name, kind, value)


def _constraint(name: str, kind: str, value: object) -> Mapping[str, object]:
    match kind:
        case "json":
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": _schema(name, value)}}
        case "json_object":
            if value is not True:
                raise bad_field(name, "must be true or false")
            return {"type": "json_object"}
        case "choice":
            if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
                raise bad_field(name, "must be a list of texts, none of them empty")
            return {"type": "choice", "choice": value}
    if not isinstance(value, str) or not value:
        raise bad_field(name, "must be a text, not an empty one")
    return {"type": kind, kind: value}


def _schema(name: str, value: object) -> Mapping[str, object]:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise bad_field(name, f"is not valid JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise bad_field(name, "must be a JSON schema")
    return value


# The fields that chats and completions share: sampling, stopping, the form of the response.


_SAMPLING_NAMES = {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"}


@dataclass(frozen=True)
class ResponseOptions:
    """The form of the response. ``top_logprobs`` None: no logprobs; n: that many alternatives per token.
    ``constrained_by`` is the caller's field that ``response_format`` was read from."""

    stream: bool
    include_usage: bool
    continuous_usage: bool  # usage so far in every chunk
    stops: tuple[str, ...]
    top_logprobs: int | None
    skip_special_tokens: bool
    return_token_ids: bool
    response_format: Mapping[str, Any] | None
    constrained_by: str = "response_format"

    @property
    def tells_logprobs(self) -> bool:
        return self.top_logprobs is not None or self.return_token_ids


_RESPONSE_FIELDS = frozenset(
    {"stream_options", "stop", "skip_special_tokens", "return_token_ids", "response_format", *CONSTRAINTS}
)
_SAMPLING_FIELDS = frozenset(
    {*REAL_RANGES, "stop_token_ids", "ignore_eos", "min_tokens", "top_k", "seed", "logit_bias", "n"}
)


def read_response_options(fields: Fields, top_logprobs: int | None, capabilities: Capabilities) -> ResponseOptions:
    stream = fields.flag("stream")
    if fields.has_none(_RESPONSE_FIELDS):
        return ResponseOptions(stream, False, False, (), top_logprobs, True, False, None)
    include_usage, continuous_usage = _usage_options(fields, stream)
    constrained_by, response_format = _response_format(fields, capabilities)
    return ResponseOptions(
        stream=stream,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        stops=fields.texts("stop", MAX_STOPS),
        top_logprobs=top_logprobs,
        skip_special_tokens=fields.flag("skip_special_tokens", True),
        return_token_ids=fields.flag("return_token_ids"),
        response_format=response_format,
        constrained_by=constrained_by,
    )


def _usage_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Return whether a stream ends with its usage, and whether every chunk contains the usage so far. As in vLLM, the
    second requires the first."""
    options = Fields(fields.mapping("stream_options"))
    include, continuous = options.flag("include_usage"), options.flag("continuous_usage_stats")
    options.accept(("include_obfuscation",))
    if include and not stream:
        raise bad_field("stream_options", "needs stream: true")
    for unknown in options.ignored():
        fields.name_left_out(f"stream_options.{unknown}")
    return include, include and continuous


def _response_format(fields: Fields, capabilities: Capabilities) -> tuple[str, Mapping[str, object] | None]:
    """Return the name of the field that constrains the response, and the constraint, None for plain text."""
    name = "response_format"
    if (constraint := read_constraint(fields)) is not None:
        name, _ = constraint
        if fields.given("response_format"):
            raise bad_field(name, "and response_format cannot both be used")
        if not capabilities.response_format:
            raise unsupported(name, capabilities.no_response_format or "this engine has no grammars")
        return constraint
    wanted = fields.mapping(name)
    kind = wanted.get("type", None if wanted else "text")
    if kind == "text":
        return name, None
    if kind not in ("json_object", "json_schema"):
        raise bad_field(name, "must be of type text, json_object or json_schema")
    if not capabilities.response_format:
        raise unsupported(name, capabilities.no_response_format or f"this engine cannot force {kind}")
    if kind == "json_object" and wanted.get("schema") is not None:  # the form of Together, Fireworks and llama.cpp
        if not isinstance(wanted["schema"], Mapping):
            raise bad_field("response_format.schema", "must be an object")
        return name, {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted["schema"]}}
    return name, wanted


def read_sampling(
    fields: Fields, codec: TextCodec, options: ResponseOptions, capabilities: Capabilities, max_tokens: int | None
) -> SamplingParams:
    """Read the sampling fields. Raises 400 naming a field that is out of range, or that this engine lacks."""
    if fields.has_none(_SAMPLING_FIELDS) and not options.stops and options.top_logprobs is None:
        return SamplingParams(max_tokens, stop_token_ids=codec.sorted_end_ids)
    stop_ids = fields.token_ids("stop_token_ids", codec.vocab_size)
    ignore_eos = fields.flag("ignore_eos")
    # Stop strings that are special tokens never appear in the text: they are stop tokens.
    stop_tokens = {token_id for stop in options.stops if (token_id := codec.special_id(stop)) is not None}
    if not ignore_eos:
        stop_tokens |= codec.end_ids
    given: dict[str, Any] = {
        name: fields.number(name, 0.0, *bounds) for name, bounds in REAL_RANGES.items() if fields.given(name)
    }
    if "temperature" in given:
        given["temperature"] = _temperature(given["temperature"], capabilities)
    for name in ("min_new_tokens", "top_k", "seed", "n"):
        value = fields.whole(_SAMPLING_NAMES.get(name, name), *WHOLE_RANGES[name])
        if value is not None:
            given[name] = value
    if given.get("top_k") == -1:
        given["top_k"] = 0
    sampling = SamplingParams(
        max_new_tokens=max_tokens,
        logit_bias=_logit_bias(fields, codec.vocab_size),
        stop_token_ids=tuple(sorted({*stop_ids, *stop_tokens})),
        ignore_eos=ignore_eos,
        top_logprobs=options.top_logprobs or 0,
        **given,
    )
    if capabilities.sampling_fields < SAMPLING_FIELDS:
        for name in sampling.changed():
            if name not in capabilities.sampling_fields:
                raise unsupported(_SAMPLING_NAMES.get(name, name), "this engine does not have it")
    return sampling


def _temperature(value: float, capabilities: Capabilities) -> float:
    """Return the temperature, or 0 (greedy) for one so low that dividing by it would overflow the logits."""
    if value < GREEDY_BELOW:
        return 0.0
    if value < capabilities.lowest_temperature:
        lowest = capabilities.lowest_temperature
        raise unsupported("temperature", f"this engine samples at {lowest:g} at least, or greedily at 0")
    return value


def check_logprobs(sampling: SamplingParams, options: ResponseOptions, capabilities: Capabilities) -> None:
    """Raise 400 naming the field that makes this engine's logprobs deviate from the contract (``engines.base``). For
    calls that are recorded or that return logprobs."""
    grammar = options.response_format is not None
    name = capabilities.logprobs.conflict(sampling, grammar=grammar)
    if name is not None:
        why = "with it, this engine's logprobs are not those of softmax(logits / temperature), which a trainer needs"
        raise unsupported(
            _SAMPLING_NAMES.get(name, name),
            f"{why}; leave it out, or send store: false without logprobs and return_token_ids",
        )


_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")


def _logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in fields.mapping("logit_bias").items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= vocab_size:
            raise bad_request(f"logit_bias: {key!r} is not a token id", param="logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise bad_field("logit_bias", f"of token {key} must be a number between -100 and 100")
        bias[int(key)] = float(value)
    return bias
