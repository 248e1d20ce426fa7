"""One sampled continuation of one prompt, as the scheduler, the sampler and the HTTP side see it.

The engine's thread appends to ``output``, ``logprobs`` and ``versions`` (equal lengths, one entry a token) and raises
``produced`` last; any other thread may read the first ``produced`` entries at any time.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from areal.services.inference.engines.embedded.grammar import Matcher
    from areal.services.inference.engines.embedded.lora import Adapter
    from areal.services.inference.engines.embedded.sampling import Sampling

TopLogprobs = list[tuple[int, float]]


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # whoever asked for it wanted no more
    LOST = "lost"  # the engine ended first: no answer, though there may be tokens


class Sequence:
    """``row`` is its place in the KV cache while it is admitted, ``cached`` how many positions of it are computed."""

    __slots__ = (
        "adapter",
        "allowance",
        "arrival",
        "cached",
        "counts",
        "finish",
        "index",
        "key",
        "logprobs",
        "matcher",
        "output",
        "produced",
        "prompt",
        "row",
        "sampling",
        "seen",
        "stop_ids",
        "stop_token",
        "top",
        "versions",
    )

    def __init__(
        self,
        prompt: list[int],
        sampling: Sampling,
        *,
        allowance: int,
        stop_ids: frozenset[int] = frozenset(),
        index: int = 0,
        key: int = 0,
        adapter: Adapter | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.allowance = allowance  # tokens it may generate
        self.stop_ids = stop_ids
        self.index = index  # which of the request's n choices
        self.key = key  # of its random numbers (sampling.stream_key)
        self.adapter = adapter
        self.matcher = matcher  # of its grammar, and at the newest token's place in it
        self.row: int | None = None
        self.cached = 0
        self.arrival = 0  # order of arrival, given by the scheduler
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top: list[TopLogprobs] = []
        self.produced = 0
        self.finish: Finish | None = None
        self.stop_token: int | None = None
        self.counts: Tensor | None = None  # [vocabulary] times generated; kept while penalties need it
        self.seen: Tensor | None = None  # [vocabulary] in prompt or output

    @property
    def kind(self) -> int:
        """Sequences of different kinds have different keys and values for the same tokens."""
        return self.adapter.serial if self.adapter else 0

    @property
    def length(self) -> int:
        """Tokens known: prompt and output. The newest one is not in the cache yet."""
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Positions ``start:stop`` of prompt and output together."""
        count = len(self.prompt)
        if stop <= count:
            return self.prompt[start:stop]
        return self.prompt[start:] + self.output[max(0, start - count) : stop - count]
