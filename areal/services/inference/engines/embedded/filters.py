"""Top-k, top-p (arXiv:1904.09751) and min-p (arXiv:2407.01082) on rows of scaled logits.

Each filter keeps the most likely tokens, so together they keep those from some logit upwards. That threshold is found
among a row's few largest logits wherever they suffice: sorting a vocabulary costs more than all the rest of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from areal.services.inference.engines.embedded.sampling import Sampling

_OUT = float("-inf")
_WIDTHS = (128, 2048)  # how many of the largest logits are tried before all


def keep_only(logits: Tensor, params: Sequence[Sampling]) -> Tensor:
    """``logits`` [n, vocab], -inf where row i's ``params[i]`` drop a token: top-k first, then top-p, then min-p.

    Each filter looks at what the one before left, renormalised. The most likely token always stays, and so do tokens
    equal to the last one that stays.
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
    """The least logit [n, 1] that top-k and top-p keep, and whether the ``width`` largest were enough to tell."""
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
    whole = (limits <= width) | (limits >= vocab)  # then the total is right
    enough = width == vocab or bool((whole & (open_ended | (count < width) | (limits == width))).all())
    return floors.masked_fill(open_ended, _OUT), enough
