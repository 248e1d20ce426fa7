"""From logits to one token per row, with the logprob that a plain forward pass gives it.

A ``SamplerBatch`` holds the parameters of a fixed list of sequences as tensors, so that a step over an unchanged batch
does no work per sequence in Python. Reported logprobs are those of ``log_softmax(logits / temperature)`` at the
sequence's temperature (1 for a greedy one): penalties, grammars and filters shape the choice, never the logprobs.

Randomness: one uniform number per token, a hash of the sequence's key and the token's absolute position (SplitMix64,
doi:10.1145/2714064.2660195), mapped to a token by the inverse of the cumulative distribution. So a sequence's numbers
depend neither on its batch nor on preemption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from areal.dataclasses import dataclass
from areal.services.inference.engines.embedded.grammar import keep_allowed
from areal.services.inference.engines.embedded.scheduler import TokenSequence, TopLogprobs
from areal.wire.sampling import SamplingParams

_OUT = float("-inf")
_WIDTHS = (128, 2048)  # numbers of largest logits that are tried before all
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LOWER = 2**64 - 1


class Penalties:
    """Penalties and biases of a batch. Only rows with penalties are computed. Counts are views of the batch's tensors,
    stored on the sequence (``counts``, ``seen``: [vocab]), so that its next batch continues from them."""

    def __init__(self, sequences: Sequence[TokenSequence], vocab_size: int, device: torch.device) -> None:
        biases = [
            (row, token, bias)
            for row, sequence in enumerate(sequences)
            for token, bias in sequence.sampling.logit_bias.items()
        ]
        self._bias_rows, self._bias_tokens = _pairs([(row, token) for row, token, _ in biases], device)
        self._bias = torch.tensor([bias for _, _, bias in biases], dtype=torch.float32, device=device)
        self._early = _EarlyStops(sequences, device)
        rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.penalizes]
        self._rows = torch.tensor(rows, dtype=torch.int64, device=device)
        if not rows:
            return
        held = [sequences[row] for row in rows]
        self._counts = torch.stack([_counts(each, vocab_size, device) for each in held])
        self._seen = torch.stack([_seen(each, vocab_size, device) for each in held])
        for index, sequence in enumerate(held):
            sequence.counts, sequence.seen = self._counts[index], self._seen[index]
        self._presence = _column([each.sampling.presence_penalty for each in held], device)
        self._frequency = _column([each.sampling.frequency_penalty for each in held], device)
        self._repetition = _column([each.sampling.repetition_penalty for each in held], device)
        self._range = torch.arange(len(rows), device=device)

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], vocab_size: int, device: torch.device) -> Penalties | None:
        """Return the penalties of a batch; None when no sequence needs any."""
        asked = any(
            each.sampling.penalizes or each.sampling.logit_bias or each.produced < each.sampling.min_new_tokens
            for each in sequences
        )
        return cls(sequences, vocab_size, device) if asked else None

    def apply(self, logits: Tensor) -> Tensor:
        """Return a changed copy of ``logits`` [n, vocab]."""
        changed = logits.clone()
        if len(self._bias):
            changed[self._bias_rows, self._bias_tokens] += self._bias
        if len(self._rows):
            own = changed[self._rows]
            divided = torch.where(own > 0, own / self._repetition, own * self._repetition)
            own = torch.where(self._seen, divided, own)
            changed[self._rows] = own - self._frequency * self._counts - self._presence * (self._counts > 0)
        self._early.apply(changed)
        return changed

    def observe(self, tokens: Tensor) -> None:
        """Count the chosen tokens [n]."""
        if len(self._rows):
            chosen = tokens[self._rows]
            self._counts[self._range, chosen] += 1
            self._seen[self._range, chosen] = True


class _EarlyStops:
    """Masks the stop tokens of rows below ``min_new_tokens``, in one write. ``apply`` is for the next token."""

    def __init__(self, sequences: Sequence[TokenSequence], device: torch.device) -> None:
        self._device = device
        stopping = {row: each for row, each in enumerate(sequences) if each.stop_ids}
        short = {row: each.sampling.min_new_tokens - each.produced for row, each in stopping.items()}
        self._left = {row: left for row, left in short.items() if left > 0}
        self._stops = {row: sorted(stopping[row].stop_ids) for row in self._left}
        self._arrange()

    def _arrange(self) -> None:
        self._rows, self._tokens = _pairs(
            [(row, token) for row in self._left for token in self._stops[row]], self._device
        )
        self._due = min(self._left.values(), default=0)  # tokens until the next row is long enough

    def apply(self, logits: Tensor) -> None:
        if not self._left:
            return
        logits[self._rows, self._tokens] = float("-inf")
        self._due -= 1
        if self._due == 0:
            least = min(self._left.values())
            self._left = {row: left - least for row, left in self._left.items() if left > least}
            self._arrange()


def _pairs(pairs: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, ...]:
    """Return rows and tokens as indices of logits."""
    return torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2).unbind(1)


def _counts(sequence: TokenSequence, vocab_size: int, device: torch.device) -> Tensor:
    if sequence.counts is not None:
        return sequence.counts
    generated = torch.tensor(sequence.output, dtype=torch.int64, device=device)
    return torch.bincount(generated, minlength=vocab_size).to(torch.float32)


def _seen(sequence: TokenSequence, vocab_size: int, device: torch.device) -> Tensor:
    if sequence.seen is not None:
        return sequence.seen
    seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    seen[torch.tensor(sequence.prompt + sequence.output, dtype=torch.int64, device=device)] = True
    return seen


def _column(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)


def keep_only(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return ``logits`` [n, vocab] with -inf at the tokens that row i's ``params[i]`` drop: by top-k, then top-p
    (arXiv:1904.09751), then min-p (arXiv:2407.01082).

    Each filter sees the renormalized rest of the one before, and keeps the most likely tokens, so together they keep
    all logits from some threshold on. It is searched among a row's few largest logits first, because sorting a
    vocabulary costs more than the rest of a step. The most likely token always stays, and so do tokens as likely as the
    last that stays.
    """
    vocab, device = logits.shape[1], logits.device
    floors = torch.full((len(params), 1), _OUT, device=device)
    if any(each.top_k > 0 or each.top_p < 1.0 for each in params):
        limits = torch.tensor([each.top_k if each.top_k > 0 else vocab for each in params], device=device)
        nuclei = torch.tensor([each.top_p for each in params], device=device)
        for width in (*(each for each in _WIDTHS if each < vocab), vocab):
            floors, enough = _floors(logits, limits.unsqueeze(1), nuclei.unsqueeze(1), width)
            if enough:
                break
    if any(each.min_p > 0.0 for each in params):
        shares = [math.log(each.min_p) if each.min_p > 0.0 else _OUT for each in params]
        least = logits.amax(dim=-1, keepdim=True) + torch.tensor(shares, device=device).unsqueeze(1)
        floors = torch.maximum(floors, least)
    return logits.masked_fill(logits < floors, _OUT)


def _floors(logits: Tensor, limits: Tensor, nuclei: Tensor, width: int) -> tuple[Tensor, bool]:
    """Return the lowest logit [n, 1] that top-k and top-p keep, and whether ``width`` logits suffice."""
    vocab = logits.shape[1]
    ordered = logits.topk(width, dim=-1).values
    in_top = torch.arange(width, device=logits.device) < limits
    of_top = ordered.masked_fill(~in_top, _OUT).logsumexp(dim=-1, keepdim=True)
    total = torch.where(limits < vocab, of_top, logits.logsumexp(dim=-1, keepdim=True))
    probabilities = (ordered - total).exp()
    # A token stays while those before it have not reached the nucleus.
    reached = probabilities.cumsum(dim=-1)
    stays = in_top & ((reached - probabilities < nuclei) | (nuclei >= 1.0))
    count = stays.sum(dim=-1, keepdim=True)
    floors = ordered.gather(1, (count - 1).clamp_(min=0))
    open_ended = (limits >= vocab) & (nuclei >= 1.0)
    whole = (limits <= width) | (limits >= vocab)  # rows whose ``total`` is exact
    enough = width == vocab or bool((whole & (open_ended | (count < width) | (limits == width))).all())
    return floors.masked_fill(open_ended, _OUT), enough


@dataclass(frozen=True)
class Sampled:
    """Per row: the token [n] int64, its logprob [n] float32, and the most likely tokens if some row requests them."""

    tokens: Tensor
    logprobs: Tensor
    top: list[TopLogprobs] | None


class SamplerBatch:
    """Samples a token for each of ``sequences``, which are in the order of the logits' rows."""

    def __init__(self, sequences: Sequence[TokenSequence], vocab_size: int, device: torch.device) -> None:
        params = [sequence.sampling for sequence in sequences]
        kinds = {id(each): each for each in params}.values()  # sequences of a request share theirs
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

    def of_rows(self, rows: Sequence[int]) -> SamplerBatch | None:
        """Return the batch of these rows, in this order; None if it must be built again."""
        if not self._is_simple:
            return None
        batch = copy(self)
        batch.sequences = tuple(self.sequences[row] for row in rows)
        if self._most_top:
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
        """Sample from ``logits`` [n, vocab] float32, which are not changed."""
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
        # The next number of each row, [n, 1] float32 in [0, 1) with 24 bits.
        bits = _mix(self._keys + self._next * _GAMMA)
        self._next += np.uint64(1)
        uniform = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        tokens = invert(probabilities, torch.from_numpy(uniform).unsqueeze(1).to(self._device))
        return tokens if self._is_greedy is None else torch.where(self._is_greedy, shaped.argmax(dim=-1), tokens)

    def _alternatives(self, logprobs: Tensor) -> list[TopLogprobs]:
        values, ids = logprobs.topk(min(self._most_top, logprobs.shape[1]), dim=-1)
        return [
            list(zip(row_ids[:count], row_values[:count], strict=True))
            for count, row_ids, row_values in zip(self._top, ids.tolist(), values.tolist(), strict=True)
        ]


def invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds ``uniform`` [n, 1]; never one of probability 0."""
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Rounding may raise the threshold to the total, which no token exceeds.
    threshold = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(1)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the finalizer of SplitMix64, a bijection of 64-bit numbers. Unsigned arithmetic wraps."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(_FACTORS[0])
    value = (value ^ (value >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return value ^ (value >> np.uint64(31))


def mix(value: int) -> int:
    """Return ``_mix`` of the number's lower 64 bits, without an array: a request of n choices takes n of them."""
    value &= _LOWER
    value = (value ^ value >> 30) * _FACTORS[0] & _LOWER
    value = (value ^ value >> 27) * _FACTORS[1] & _LOWER
    return value ^ value >> 31


def stream_key(seed: int, index: int) -> int:
    """Return the key of a sequence's random numbers, by its request's seed and the index of the choice."""
    return mix(mix(seed + int(_GAMMA)) + index)
