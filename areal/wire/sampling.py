"""Sampling parameters: names, ranges and defaults, as the data proxy sends them and an engine takes them.

``parse_sampling`` validates a request's parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Any

from areal.dataclasses import dataclass, field, fields, replace
from areal.errors import FieldError
from areal.wire.fields import Range, Valid, read_fields

GREEDY_BELOW = 1e-5  # a lower temperature is greedy, recorded as 0: its inverse overflows logits
MAX_CHOICES = 128
MAX_IMAGES = 16  # of one prompt
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 100
_SEED_BITS = 0x7FFFFFFF


def derived_seed(*parts: object) -> int:
    """Return a 31-bit seed from the parts that identify a sample: distinct for each, the same in every run."""
    return int.from_bytes(sha256(":".join(map(str, parts)).encode()).digest()[:4], "big") & _SEED_BITS


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
_RANGES = {name: Range(*ends) for name, ends in (REAL_RANGES | WHOLE_RANGES).items()}
_BIAS = Valid("must have numbers from -100 to 100", lambda bias: all(-100 <= each <= 100 for each in bias.values()))


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request. ``temperature`` 0 is greedy; ``top_k`` 0 or -1, ``top_p`` 1, ``min_p`` 0 filter
    nothing.

    Filters apply after temperature, in the order top-k, top-p, min-p. Penalties and ``logit_bias`` come before it:
    presence and frequency look at generated tokens, repetition at prompt and output (arXiv:1909.05858)."""

    max_new_tokens: Annotated[int, _RANGES["max_new_tokens"]] | None = None  # None: as many as there is room for
    min_new_tokens: Annotated[int, _RANGES["min_new_tokens"]] = 0  # until then no stop token can be sampled
    temperature: Annotated[float, _RANGES["temperature"]] = 1.0
    top_p: Annotated[float, _RANGES["top_p"]] = 1.0
    top_k: Annotated[int, _RANGES["top_k"]] = 0
    min_p: Annotated[float, _RANGES["min_p"]] = 0.0
    seed: Annotated[int, _RANGES["seed"]] | None = None
    presence_penalty: Annotated[float, _RANGES["presence_penalty"]] = 0.0
    frequency_penalty: Annotated[float, _RANGES["frequency_penalty"]] = 0.0
    repetition_penalty: Annotated[float, _RANGES["repetition_penalty"]] = 1.0
    logit_bias: Annotated[Mapping[int, float], _BIAS] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # the model's own end tokens do not stop; stop_token_ids still do
    n: Annotated[int, _RANGES["n"]] = 1
    top_logprobs: Annotated[int, _RANGES["top_logprobs"]] = 0

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults; only these are sent."""
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


def parse_sampling(raw: Mapping[str, object], vocab_size: int) -> SamplingParams:
    """Validate a client's parameters. An absent or null field has its default. Raises FieldError for others."""
    given = {name: value for name, value in raw.items() if value is not None}
    params = read_fields(SamplingParams, given, "sampling")
    for name in ("stop_token_ids", "logit_bias"):
        for token in getattr(params, name):
            if type(token) is not int or not 0 <= token < vocab_size:
                raise FieldError(f"sampling.{name}", f"must have token ids below {vocab_size}, not {token!r}")
    return replace(params, top_k=1, top_p=1.0) if params.top_p == 0.0 else params  # the most likely token alone
