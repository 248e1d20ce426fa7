"""How answers are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

from areal.api.config.marks import ADAPTER, Absent
from areal.api.config.numbers import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, Range, check_numbers

NO_TOP_K = 100_000_000


@dataclass
class GenerationHyperparameters:
    """``max_new_tokens`` bounds an answer, ``max_tokens`` prompt and answer together. ``n_samples`` is the size of a
    group: how many episodes each prompt gets. ``greedy`` takes the likeliest token, whatever the temperature."""

    n_samples: Annotated[int, COUNT] = 1
    max_new_tokens: Annotated[int, COUNT] = 16384
    min_new_tokens: Annotated[int, NOT_NEGATIVE] = 0
    max_tokens: Annotated[int, COUNT] = 32768
    greedy: bool = False
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    top_k: int = NO_TOP_K
    min_p: Annotated[float, SHARE] = 0.0
    temperature: Annotated[float, NOT_NEGATIVE] = 1.0
    stop_token_ids: list[int] = field(default_factory=list)
    stop: list[str] | None = None
    frequency_penalty: Annotated[float, Range(-2, 2)] = 0.0
    presence_penalty: Annotated[float, Range(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, POSITIVE] = 1.0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None  # each sample of a group has a seed of its own, derived from it
    lora_name: Annotated[str, ADAPTER] = ""
    use_beam_search: Annotated[bool, Absent("policies are sampled")] = False
    drop_incomplete_group: bool = False

    def __post_init__(self) -> None:
        check_numbers(self)
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be from 0 to max_new_tokens ({self.max_new_tokens}), not {self.min_new_tokens}"
            )

    def new(self, **changes: Any) -> Self:
        """A copy with these fields changed."""
        return replace(self, **changes)

    def new_with_stop_and_pad_token_ids(self, tokenizer: Any) -> Self:
        """A copy that also stops at the tokenizer's end and padding tokens, but for ``ignore_eos``."""
        if self.ignore_eos:
            return self.new()
        ends = [token for token in (tokenizer.eos_token_id, tokenizer.pad_token_id) if token is not None]
        return replace(self, stop_token_ids=sorted({*self.stop_token_ids, *ends}))
