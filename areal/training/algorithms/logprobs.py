"""Log probabilities and entropies of given tokens, token aligned, without a float32 copy of all logits at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK_VALUES = 1 << 26  # logits handled at once: 256 MiB of float32


def token_logprobs(logits: Tensor, input_ids: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """``logits`` [B, T, V], ``input_ids`` [B, T] -> float32 [B, T]; column 0 is 0.

    ``temperatures`` [B, T], above 0: what each token was sampled at, so that both sides speak of one distribution;
    None: 1.
    """
    batch, length, vocabulary = logits.shape
    rows = _rows(vocabulary)
    scored = torch.split(logits[:, :-1].reshape(-1, vocabulary), rows)
    targets = torch.split(input_ids[:, 1:].reshape(-1), rows)
    parts = zip(scored, targets, _divisors(temperatures, rows, len(scored)), strict=True)
    flat = torch.cat([_of_targets(*part) for part in parts])
    return torch.nn.functional.pad(flat.view(batch, length - 1), (1, 0))


def token_entropies(logits: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Entropy in nats of the distribution that token t was drawn from: [B, T, V] -> float32 [B, T]; column 0 is 0."""
    batch, length, vocabulary = logits.shape
    rows = _rows(vocabulary)
    scored = torch.split(logits[:, :-1].reshape(-1, vocabulary), rows)
    parts = zip(scored, _divisors(temperatures, rows, len(scored)), strict=True)
    flat = torch.cat([_entropy(*part) for part in parts])
    return torch.nn.functional.pad(flat.view(batch, length - 1), (1, 0))


def _divisors(temperatures: Tensor | None, rows: int, count: int) -> Sequence[Tensor | None]:
    """Of each part of the logits, [rows, 1]."""
    return [None] * count if temperatures is None else torch.split(temperatures[:, 1:].reshape(-1, 1), rows)


def _rows(vocabulary: int) -> int:
    return max(1, _CHUNK_VALUES // vocabulary)


def _of_targets(logits: Tensor, targets: Tensor, divisors: Tensor | None) -> Tensor:
    if logits.requires_grad and logits.dtype != torch.float32:
        # The float32 copy is made again in the backward pass rather than kept for every chunk.
        kept: Tensor = checkpoint(_gathered, logits, targets, divisors, use_reentrant=False)
        return kept
    return _gathered(logits, targets, divisors)


def _gathered(logits: Tensor, targets: Tensor, divisors: Tensor | None) -> Tensor:
    return -torch.nn.functional.cross_entropy(_scaled(logits, divisors), targets, reduction="none")


def _scaled(logits: Tensor, divisors: Tensor | None) -> Tensor:
    return logits.float() if divisors is None else logits.float() / divisors


def _entropy(logits: Tensor, divisors: Tensor | None) -> Tensor:
    logp = torch.log_softmax(_scaled(logits, divisors), dim=-1)
    return -(logp.exp() * logp).sum(-1)
