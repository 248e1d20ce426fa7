"""Correcting for samples of an older policy: weights of the proximal over the behaviour policy, and what to leave out.

w = pi_proximal / pi_behaviour multiplies the clipped objective of decoupled PPO (arXiv 2505.24298). Where it explodes
the token is left out, or the weight is clamped. The denominator of the loss stays what it was before anything was left
out: else the kept tokens would count for more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from areal.training.algorithms.sequences import masked_mean

Metric = Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"]
_LOG_BOUND = 20.0


@dataclass(frozen=True)
class Rejection:
    """Tokens, or whole sequences, whose ``metric`` lies outside [lower, upper] are masked or have their weight
    clamped. A sequence's metric is its tokens' by ``aggregate``; for ``ratio`` the mean is a geometric one."""

    level: Literal["token", "sequence"] = "token"
    action: Literal["mask", "clamp"] = "mask"
    metric: Metric = "ratio"
    aggregate: Literal["mean", "sum", "max"] = "mean"
    upper: float | None = 5.0
    lower: float | None = None


@dataclass(frozen=True)
class Correction:
    """``weights`` [B, T], without gradient; ``kept`` [B, T]: what is still trained on."""

    weights: Tensor
    kept: Tensor


def correction(proximal: Tensor, behaviour: Tensor, loss_mask: Tensor, rejection: Rejection | None) -> Correction:
    """``proximal`` and ``behaviour`` log probabilities [B, T]. A token whose behaviour log probability is not finite
    cannot be corrected for and is left out."""
    known = torch.isfinite(behaviour) & torch.isfinite(proximal)
    kept = loss_mask.bool() & known
    log_ratio = torch.where(kept, proximal - behaviour, torch.zeros_like(proximal)).detach()
    weights = log_ratio.clamp(-_LOG_BOUND, _LOG_BOUND).exp()
    if rejection is None:
        return Correction(weights * kept, kept)
    inside, clamped = _judged(log_ratio, behaviour, weights, kept, rejection)
    if rejection.action == "clamp":
        return Correction(clamped * kept, kept)
    kept = kept & inside
    return Correction(weights * kept, kept)


def _judged(
    log_ratio: Tensor, behaviour: Tensor, weights: Tensor, kept: Tensor, how: Rejection
) -> tuple[Tensor, Tensor]:
    measured = _metric(log_ratio, behaviour, how.metric)
    if how.level == "sequence":
        measured = _of_sequence(measured, log_ratio, kept, how)
    inside = torch.ones_like(kept)
    if how.upper is not None:
        inside = inside & (measured <= how.upper)
    if how.lower is not None:
        inside = inside & (measured >= how.lower)
    bounded = how.upper is not None or how.lower is not None
    return inside, weights.clamp(min=how.lower, max=how.upper) if bounded else weights


def _metric(log_ratio: Tensor, behaviour: Tensor, metric: Metric) -> Tensor:
    bounded = log_ratio.clamp(-_LOG_BOUND, _LOG_BOUND)
    if metric == "ratio":
        return bounded.exp()
    if metric == "kl_k1":
        return log_ratio
    if metric == "kl_k2":
        return log_ratio.square() / 2
    if metric == "kl_k3":
        return torch.expm1(bounded) - bounded
    return _binary_kl(behaviour + log_ratio, behaviour)


def _binary_kl(proximal: Tensor, behaviour: Tensor) -> Tensor:
    """The larger of both KL divergences between the coins "this token, or another"."""
    p, b = (logp.exp().clamp(1e-7, 1 - 1e-7) for logp in (proximal, behaviour))
    b = torch.where(torch.isfinite(b), b, p)
    forward = p * (p / b).log() + (1 - p) * ((1 - p) / (1 - b)).log()
    backward = b * (b / p).log() + (1 - b) * ((1 - b) / (1 - p)).log()
    return torch.maximum(forward, backward)


def _of_sequence(measured: Tensor, log_ratio: Tensor, kept: Tensor, how: Rejection) -> Tensor:
    source = log_ratio if how.metric == "ratio" and how.aggregate != "max" else measured
    if how.aggregate == "mean":
        whole = masked_mean(source, kept, dim=1)
    elif how.aggregate == "sum":
        whole = (source * kept).sum(1, keepdim=True)
    else:
        whole = source.masked_fill(~kept, -torch.inf).amax(1, keepdim=True)
    if how.metric == "ratio" and how.aggregate != "max":
        whole = whole.clamp(-_LOG_BOUND, _LOG_BOUND).exp()
    return whole.expand_as(measured)


def second_moment_mask(proximal: Tensor, behaviour: Tensor, loss_mask: Tensor, threshold: float) -> Tensor:
    """M2PO (arXiv 2510.01161): leave out the tokens with the largest (log pi_b - log pi_p)^2 until the mean of the
    others is below ``threshold``. [B, T] of bool."""
    active = loss_mask.bool()
    squares = (behaviour - proximal).detach().square()
    ordered, order = squares[active].sort()
    if not len(ordered):
        return active
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    below = torch.zeros_like(order, dtype=torch.bool)
    below[order] = means < threshold  # the running mean of sorted values never falls
    kept = torch.zeros_like(active)
    kept[active] = below
    return kept


def interpolated_proximal(behaviour: Tensor, current: Tensor, versions: Tensor, version: int) -> Tensor:
    """A-3PO (arXiv 2512.06547): the proximal log probabilities without a forward pass, between those of the behaviour
    and the current policy. ``versions`` [B, T] sampled each token, ``version`` is being optimised.

    alpha = (v_proximal - v_behaviour) / (v - v_behaviour) with v_proximal = v - 1, within [0, 1].
    """
    age = (version - versions).clamp(min=0).to(behaviour.dtype)
    alpha = ((age - 1) / age.clamp(min=1)).clamp(0.0, 1.0)
    return (1 - alpha) * behaviour + alpha * current.detach()
