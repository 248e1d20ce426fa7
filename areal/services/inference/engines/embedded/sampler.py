"""From logits to one token a row, with the logprob that a plain forward pass gives it.

A ``Batch`` holds the parameters of a fixed list of sequences as tensors, so that a step over an unchanged batch makes
no per-sequence work in Python. Reported logprobs are those of ``log_softmax(logits / temperature)`` at the sequence's
own temperature (1 for a greedy one): penalties, grammars and filters shape what is chosen, never what is reported.

Randomness: one uniform number per token, a hash of the sequence's key and of the token's absolute position (SplitMix64,
doi:10.1145/2714064.2660195), turned into a token by the inverse of the cumulative distribution. So a sequence's
numbers depend neither on its company, nor on the steps it shared, nor on being computed again after it lost its row.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal.services.inference.engines.embedded.filters import keep_only
from areal.services.inference.engines.embedded.grammar import keep_allowed
from areal.services.inference.engines.embedded.penalties import Penalties
from areal.services.inference.engines.embedded.sequence import Sequence, TopLogprobs

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Sampled:
    """Per row: the token [n] int64, its logprob [n] float32, and the alternatives where some row asks for them."""

    tokens: Tensor
    logprobs: Tensor
    top: list[TopLogprobs] | None


class Batch:
    """``sequences`` in the order of the rows of the logits that ``sample`` is given."""

    def __init__(self, sequences: Seq[Sequence], vocab_size: int, device: torch.device) -> None:
        params = [sequence.sampling for sequence in sequences]
        kinds = {id(each): each for each in params}.values()  # those of one request share theirs
        self.sequences = tuple(sequences)
        self._device = device
        self._greedy = all(each.greedy for each in kinds)
        self._top = [each.top_logprobs for each in params]
        self._most_top = max(self._top)
        self._penalties = Penalties.of(sequences, vocab_size, device)
        self._matchers = [(row, each.matcher) for row, each in enumerate(sequences) if each.matcher is not None]
        filtered = {id(each) for each in kinds if each.filters and not each.greedy}
        self._filtered = [row for row, each in enumerate(params) if id(each) in filtered] if filtered else []
        self._filters = [params[row] for row in self._filtered]
        self._is_simple = not (self._penalties or self._matchers or self._filtered)
        self._tempered = any(not each.greedy and each.temperature != 1.0 for each in kinds)
        if self._greedy:
            return
        self._keys: NDArray[np.uint64] = np.array([sequence.key for sequence in sequences], dtype=np.uint64)
        self._next: NDArray[np.uint64] = np.array([sequence.length for sequence in sequences], dtype=np.uint64)
        inverse = {id(each): 1.0 if each.greedy else 1.0 / each.temperature for each in kinds}
        self._inverse_temperatures = torch.tensor([inverse[id(each)] for each in params], device=device).unsqueeze(1)
        self._is_greedy = (
            torch.tensor([each.greedy for each in params], device=device)
            if any(each.greedy for each in kinds)
            else None
        )

    def of_rows(self, rows: Seq[int]) -> Batch | None:
        """The batch of these rows of it, in this order; None where it would have to be made anew."""
        if not self._is_simple:
            return None
        batch = copy(self)
        batch.sequences = tuple(self.sequences[row] for row in rows)
        batch._top = [self._top[row] for row in rows]
        batch._most_top = max(batch._top)
        if self._greedy:
            return batch
        taken = np.array(rows)
        batch._keys, batch._next = self._keys[taken], self._next[taken]
        index = torch.from_numpy(taken).to(self._device)
        batch._inverse_temperatures = self._inverse_temperatures[index]
        batch._is_greedy = None if self._is_greedy is None else self._is_greedy[index]
        return batch

    @torch.inference_mode()
    def sample(self, logits: Tensor) -> Sampled:
        """``logits`` [n, vocab] float32, not changed."""
        logprobs = torch.log_softmax(logits * self._inverse_temperatures if self._tempered else logits, dim=-1)
        shaped = logits if self._penalties is None else self._penalties.apply(logits)
        if self._matchers:
            shaped = keep_allowed(shaped, self._matchers)
        tokens = shaped.argmax(dim=-1) if self._greedy else self._draw(shaped, logprobs)
        if self._penalties is not None:
            self._penalties.observe(tokens)
        chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return Sampled(tokens, chosen, self._alternatives(logprobs) if self._most_top else None)

    def _draw(self, shaped: Tensor, logprobs: Tensor) -> Tensor:
        if self._is_simple:
            probabilities = logprobs.exp()
        else:
            scaled = shaped * self._inverse_temperatures
            if self._filtered:
                scaled[self._filtered] = keep_only(scaled[self._filtered], self._filters)
            probabilities = torch.softmax(scaled, dim=-1)
        tokens = invert(probabilities, self._uniform())
        return tokens if self._is_greedy is None else torch.where(self._is_greedy, shaped.argmax(dim=-1), tokens)

    def _uniform(self) -> Tensor:
        """The next number of each row, [n, 1] float32 in [0, 1) with 24 bits."""
        bits = _mix(self._keys + self._next * _GAMMA)
        self._next += np.uint64(1)
        uniform = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        return torch.from_numpy(uniform).unsqueeze(1).to(self._device)

    def _alternatives(self, logprobs: Tensor) -> list[TopLogprobs]:
        values, ids = logprobs.topk(min(self._most_top, logprobs.shape[1]), dim=-1)
        return [
            list(zip(row_ids[:count], row_values[:count], strict=True))
            for count, row_ids, row_values in zip(self._top, ids.tolist(), values.tolist(), strict=True)
        ]


def invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds ``uniform`` [n, 1]; one of probability 0 never is."""
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding may lift the threshold to the total, which nothing exceeds.
    threshold = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``sampling.mix`` on arrays; unsigned arithmetic wraps."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
