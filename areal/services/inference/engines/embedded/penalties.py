"""What changes logits before a token is chosen: biases, penalties on what was said, stop tokens that are not due yet.

Only the rows that ask for it are touched. Counts live on the sequence (``counts``, ``seen``: [vocab] views of rows of
the batch's tensors), so that a batch of other company goes on from them without counting again.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from areal.services.inference.engines.embedded.sequence import Sequence


class Penalties:
    def __init__(self, sequences: Seq[Sequence], vocab_size: int, device: torch.device) -> None:
        self._biases = _Biases(sequences, device)
        self._early = _Early(sequences, device)
        rows = [row for row, sequence in enumerate(sequences) if sequence.sampling.penalises]
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
    def of(cls, sequences: Seq[Sequence], vocab_size: int, device: torch.device) -> Penalties | None:
        """None when no sequence asks for anything here."""
        asked = any(
            each.sampling.penalises or each.sampling.logit_bias or each.produced < each.sampling.min_new_tokens
            for each in sequences
        )
        return cls(sequences, vocab_size, device) if asked else None

    def apply(self, logits: Tensor) -> Tensor:
        """A changed copy of ``logits`` [n, vocab]."""
        changed = logits.clone()
        self._biases.apply(changed)
        if len(self._rows):
            changed[self._rows] = self._penalised(changed[self._rows])
        self._early.apply(changed)
        return changed

    def observe(self, tokens: Tensor) -> None:
        """Count the chosen tokens [n]."""
        if len(self._rows):
            chosen = tokens[self._rows]
            self._counts[self._range, chosen] += 1
            self._seen[self._range, chosen] = True

    def _penalised(self, logits: Tensor) -> Tensor:
        divided = torch.where(logits > 0, logits / self._repetition, logits * self._repetition)
        logits = torch.where(self._seen, divided, logits)
        return logits - self._frequency * self._counts - self._presence * (self._counts > 0)


class _Biases:
    """``logit_bias`` of all rows as one scatter."""

    def __init__(self, sequences: Seq[Sequence], device: torch.device) -> None:
        triples = [
            (row, token, bias)
            for row, sequence in enumerate(sequences)
            for token, bias in sequence.sampling.logit_bias.items()
        ]
        self._rows = torch.tensor([row for row, _, _ in triples], dtype=torch.int64, device=device)
        self._tokens = torch.tensor([token for _, token, _ in triples], dtype=torch.int64, device=device)
        self._values = torch.tensor([bias for _, _, bias in triples], dtype=torch.float32, device=device)

    def apply(self, logits: Tensor) -> None:
        if len(self._rows):
            logits[self._rows, self._tokens] += self._values


class _Early:
    """The stop tokens of rows that are too short to end, as one write. Each ``apply`` is for a token more of every
    row."""

    def __init__(self, sequences: Seq[Sequence], device: torch.device) -> None:
        self._device = device
        stopping = {row: each for row, each in enumerate(sequences) if each.stop_ids}
        short = {row: each.sampling.min_new_tokens - each.produced for row, each in stopping.items()}
        self._left = {row: left for row, left in short.items() if left > 0}
        self._stops = {row: sorted(stopping[row].stop_ids) for row in self._left}
        self._arrange()

    def _arrange(self) -> None:
        pairs = [(row, token) for row in self._left for token in self._stops[row]]
        self._rows, self._tokens = torch.tensor(pairs, dtype=torch.int64, device=self._device).view(-1, 2).unbind(1)
        self._due = min(self._left.values(), default=0)  # tokens until a row is long enough

    def apply(self, logits: Tensor) -> None:
        if not self._left:
            return
        logits[self._rows, self._tokens] = float("-inf")
        self._due -= 1
        if self._due == 0:
            least = min(self._left.values())
            self._left = {row: left - least for row, left in self._left.items() if left > least}
            self._arrange()


def _counts(sequence: Sequence, vocab_size: int, device: torch.device) -> Tensor:
    if sequence.counts is not None:
        return sequence.counts
    said = torch.tensor(sequence.output, dtype=torch.int64, device=device)
    return torch.bincount(said, minlength=vocab_size).to(torch.float32)


def _seen(sequence: Sequence, vocab_size: int, device: torch.device) -> Tensor:
    if sequence.seen is not None:
        return sequence.seen
    seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    seen[torch.tensor(sequence.prompt + sequence.output, dtype=torch.int64, device=device)] = True
    return seen


def _column(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)
