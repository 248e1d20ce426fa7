"""Log probabilities and entropies of given tokens, token aligned, without a float32 copy of all logits at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK_VALUES = 1 << 26  # logits handled at once: 256 MiB of float32


def token_logprobs(logits: Tensor, input_ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """``logits`` [B, T, V], ``input_ids`` [B, T] -> float32 [B, T]; column 0 is 0.

    ``temperature`` is the sampler's, so that both sides speak of one distribution.
    """
    batch, length, vocabulary = logits.shape
    scored = logits[:, :-1].reshape(-1, vocabulary)
    targets = input_ids[:, 1:].reshape(-1)
    flat = torch.cat([_of_targets(part, ids, temperature) for part, ids in _chunks(scored, targets)])
    return torch.nn.functional.pad(flat.view(batch, length - 1), (1, 0))


def token_entropies(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of the distribution that token t was drawn from: [B, T, V] -> float32 [B, T]; column 0 is 0."""
    batch, length, vocabulary = logits.shape
    scored = logits[:, :-1].reshape(-1, vocabulary)
    flat = torch.cat([_entropy(part, temperature) for part in torch.split(scored, _rows(vocabulary))])
    return torch.nn.functional.pad(flat.view(batch, length - 1), (1, 0))


def _chunks(scored: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    rows = _rows(scored.shape[-1])
    return list(zip(torch.split(scored, rows), torch.split(targets, rows), strict=True))


def _rows(vocabulary: int) -> int:
    return max(1, _CHUNK_VALUES // vocabulary)


def _of_targets(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    if logits.requires_grad and logits.dtype != torch.float32:
        # The float32 copy is made again in the backward pass rather than kept for every chunk.
        kept: Tensor = checkpoint(_gathered, logits, targets, temperature, use_reentrant=False)
        return kept
    return _gathered(logits, targets, temperature)


def _gathered(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    return -torch.nn.functional.cross_entropy(scaled, targets, reduction="none")


def _entropy(logits: Tensor, temperature: float) -> Tensor:
    logp = torch.log_softmax(logits.float() / temperature, dim=-1)
    return -(logp.exp() * logp).sum(-1)
