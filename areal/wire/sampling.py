"""Sampling parameters: names, ranges and defaults, as the data proxy sends them and an engine takes them.

``parse_sampling`` validates a request's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from areal.dataclasses import dataclass, field, fields
from areal.errors import UsageFault

GREEDY_BELOW = 1e-5  # a lower temperature is greedy, recorded as 0: its inverse overflows logits
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 100
_SEED_BITS = 0x7FFFFFFF


def derived_seed(*parts: object) -> int:
    """A 31-bit seed from the parts that identify a sample: distinct for each, the same in every run."""
    return int.from_bytes(sha256(":".join(map(str, parts)).encode()).digest()[:4], "big") & _SEED_BITS


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request. ``temperature`` 0 is greedy; ``top_k`` 0 or -1, ``top_p`` 1, ``min_p`` 0 filter
    nothing.

    Filters apply after temperature, in the order top-k, top-p, min-p. Penalties and ``logit_bias`` come before it:
    presence and frequency look at generated tokens, repetition at prompt and output (arXiv:1909.05858)."""

    max_new_tokens: int | None = None  # None: as many as the context has room for
    min_new_tokens: int = 0  # until then no stop token can be sampled
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # the model's own end tokens do not stop; stop_token_ids still do
    n: int = 1
    top_logprobs: int = 0

    def changed(self) -> dict[str, Any]:
        """The fields that differ from the defaults; only these are sent."""
        values = self.__dict__
        return {name: values[name] for name, default in _DEFAULTS if values[name] != default}

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalizes(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


_DEFAULTS: tuple[tuple[str, Any], ...] = tuple(
    (item.name, getattr(SamplingParams(), item.name)) for item in fields(SamplingParams)
)
REAL_RANGES = {  # name: (lowest, highest)
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
WHOLE_RANGES = {
    "max_new_tokens": (1, 2**31 - 1),
    "min_new_tokens": (0, 2**31 - 1),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "n": (1, MAX_CHOICES),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
}
_OTHER = {"logit_bias", "stop_token_ids", "ignore_eos"}
assert REAL_RANGES.keys() | WHOLE_RANGES.keys() | _OTHER == {each.name for each in fields(SamplingParams)}


def parse_sampling(raw: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """Validate a client's parameters. An absent or null field has its default. Raises UsageFault for others."""
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if value is None:
            continue
        if name in REAL_RANGES:
            values[name] = _number(name, value, *REAL_RANGES[name])
        elif name in WHOLE_RANGES:
            values[name] = _integer(name, value, *WHOLE_RANGES[name])
        elif name == "ignore_eos":
            if not isinstance(value, bool):
                raise UsageFault(f"sampling.{name} must be true or false, not {value!r}")
            values[name] = value
        elif name == "stop_token_ids":
            if not isinstance(value, list):
                raise UsageFault(f"sampling.{name} must be a list, not {value!r}")
            values[name] = tuple(_token(name, each, vocab_size) for each in value)
        elif name == "logit_bias":
            values[name] = _bias(value, vocab_size)
        else:
            raise UsageFault(f"sampling.{name} is not a sampling parameter")
    if values.get("top_p") == 0.0:
        values["top_k"], values["top_p"] = 1, 1.0  # the smallest nucleus: the most likely token alone
    return SamplingParams(**values)


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageFault(f"sampling.{name} must be a number, not {value!r}")
    if not low <= value <= high:
        raise UsageFault(f"sampling.{name} must be between {low:g} and {high:g}, not {value!r}")
    return float(value)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageFault(f"sampling.{name} must be a whole number, not {value!r}")
    if not low <= value <= high:
        raise UsageFault(f"sampling.{name} must be between {low} and {high}, not {value}")
    return value


def _token(name: str, value: Any, vocab_size: int) -> int:
    return _integer(name, value, 0, vocab_size - 1)


def _bias(value: Any, vocab_size: int) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise UsageFault(f"sampling.logit_bias must map token ids to numbers, not {value!r}")
    bias: dict[int, float] = {}
    for key, number in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        bias[_token("logit_bias", token, vocab_size)] = _number("logit_bias", number, -100.0, 100.0)
    return bias
