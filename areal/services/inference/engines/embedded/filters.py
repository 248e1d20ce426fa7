"""Top-k, top-p (arXiv:1904.09751) and min-p (arXiv:2407.01082) on rows of scaled logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from areal.services.inference.engines.embedded.sampling import Sampling

_OUT = float("-inf")


def keep_only(logits: Tensor, params: Sequence[Sampling]) -> Tensor:
    """``logits`` [n, vocab], -inf where row i's ``params[i]`` drop a token: top-k first, then top-p, then min-p.

    Each filter looks at what the one before left, renormalised. The most likely token always stays.
    """
    vocab = logits.shape[1]
    ordered, ids = logits.sort(dim=-1, descending=True)
    device = logits.device
    limits = torch.tensor([each.top_k if each.top_k > 0 else vocab for each in params], device=device)
    ordered.masked_fill_(torch.arange(vocab, device=device) >= limits[:, None], _OUT)
    if any(each.top_p < 1.0 for each in params):
        nucleus = torch.tensor([each.top_p for each in params], device=device)
        probabilities = ordered.softmax(dim=-1)
        # A token stays while those before it have not reached the nucleus.
        before = probabilities.cumsum(dim=-1) - probabilities
        ordered.masked_fill_((before >= nucleus[:, None]) & (nucleus < 1.0)[:, None], _OUT)
    if any(each.min_p > 0.0 for each in params):
        floors = torch.tensor([each.min_p for each in params], device=device)
        relative = (ordered - ordered[:, :1]).exp()
        ordered.masked_fill_(relative < floors[:, None], _OUT)
    return torch.empty_like(ordered).scatter_(1, ids, ordered)
