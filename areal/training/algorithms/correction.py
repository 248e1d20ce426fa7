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
    """Tokens, or whole sequences, whose ``metric`` lies outside [lower, upper] are masked, or their weight is clamped.

    ``level`` sequence: each sequence has one metric, its tokens' by ``aggregate``, and one weight, which all of its
    tokens have. The weight aggregates log ratios: ``mean`` is the geometric mean of the tokens' ratios, ``sum`` their
    product (the probability ratio of the whole sequence), ``max`` the largest.
    """

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
    if rejection is None:
        return Correction(_exp(log_ratio) * kept, kept)
    measured = _metric(log_ratio, behaviour, rejection.metric)
    log_weight = log_ratio
    if rejection.level == "sequence":
        log_weight = _of_sequence(log_ratio, kept, rejection.aggregate)
        ratio = rejection.metric == "ratio"
        measured = _exp(log_weight) if ratio else _of_sequence(measured, kept, rejection.aggregate)
    weights = _exp(log_weight)
    if rejection.action == "clamp":
        return Correction(weights.clamp(min=rejection.lower, max=rejection.upper) * kept, kept)
    if rejection.upper is not None:
        kept = kept & (measured <= rejection.upper)
    if rejection.lower is not None:
        kept = kept & (measured >= rejection.lower)
    return Correction(weights * kept, kept)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_LOG_BOUND, _LOG_BOUND).exp()


def _metric(log_ratio: Tensor, behaviour: Tensor, metric: Metric) -> Tensor:
    if metric == "ratio":
        return _exp(log_ratio)
    if metric == "kl_k1":
        return log_ratio
    if metric == "kl_k2":
        return log_ratio.square() / 2
    if metric == "kl_k3":
        bounded = log_ratio.clamp(-_LOG_BOUND, _LOG_BOUND)
        return torch.expm1(bounded) - bounded
    return _binary_kl(behaviour + log_ratio, behaviour)


def _binary_kl(proximal: Tensor, behaviour: Tensor) -> Tensor:
    """The larger of both KL divergences between the coins "this token, or another"."""
    p, b = (logp.exp().clamp(1e-7, 1 - 1e-7) for logp in (proximal, behaviour))
    b = torch.where(torch.isfinite(b), b, p)
    forward = p * (p / b).log() + (1 - p) * ((1 - p) / (1 - b)).log()
    backward = b * (b / p).log() + (1 - b) * ((1 - b) / (1 - p)).log()
    return torch.maximum(forward, backward)


def _of_sequence(values: Tensor, kept: Tensor, aggregate: Literal["mean", "sum", "max"]) -> Tensor:
    """[B, T] -> [B, T]: each row has its kept tokens' aggregate everywhere."""
    if aggregate == "mean":
        whole = masked_mean(values, kept, dim=1)
    elif aggregate == "sum":
        whole = (values * kept).sum(1, keepdim=True)
    else:
        whole = values.masked_fill(~kept, -torch.inf).amax(1, keepdim=True)
    return whole.expand_as(values)


def squared_log_ratios(proximal: Tensor, behaviour: Tensor, loss_mask: Tensor) -> Tensor:
    """(log pi_behaviour - log pi_proximal)^2 of each token of the mask: [N]."""
    return (behaviour - proximal).detach().double().square()[loss_mask.bool()]


def second_moment_bound(squares: Tensor, threshold: float) -> float:
    """M2PO (arXiv 2510.01161) leaves out the largest of ``squares`` [N] until the mean of the others is below
    ``threshold``: the largest that is kept, -1 where none is. Equal squares are kept or left out together. ``squares``
    are those of a whole batch, of all micro-batches and ranks, so that how it is cut changes nothing."""
    ordered = squares[torch.isfinite(squares)].sort().values
    if not len(ordered):
        return -1.0
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    last_of_equals = torch.cat([ordered[1:] > ordered[:-1], torch.ones_like(ordered[:1], dtype=torch.bool)])
    below = ordered[(means < threshold) & last_of_equals]  # the running mean of sorted values never falls
    return float(below[-1]) if len(below) else -1.0


def interpolated_proximal(behaviour: Tensor, current: Tensor, versions: Tensor, version: int) -> Tensor:
    """A-3PO (arXiv 2512.06547): the proximal log probabilities without a forward pass, between those of the behaviour
    and the current policy. ``versions`` [B, T] sampled each token, ``version`` is being optimised.

    alpha = (v_proximal - v_behaviour) / (v - v_behaviour) with v_proximal = v - 1, within [0, 1].
    """
    age = (version - versions).clamp(min=0).to(behaviour.dtype)
    alpha = ((age - 1) / age.clamp(min=1)).clamp(0.0, 1.0)
    return (1 - alpha) * behaviour + alpha * current.detach()
