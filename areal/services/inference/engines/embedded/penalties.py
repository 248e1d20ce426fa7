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
        self._early = [
            (row, sequence, sorted(sequence.stop_ids))
            for row, sequence in enumerate(sequences)
            if sequence.produced < sequence.sampling.min_new_tokens and sequence.stop_ids
        ]
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
        for row, sequence, stop_ids in self._early:
            if sequence.produced < sequence.sampling.min_new_tokens:
                changed[row, stop_ids] = float("-inf")
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
