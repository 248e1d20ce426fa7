"""The policy loss of a ``PPOActorConfig`` over a micro-batch, its metrics, and the correction for samples of an older
policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from areal.api.algorithm_api import LossFn, LossInputs
from areal.api.engine_api import TokenOutputs
from areal.dataclasses import dataclass, field
from areal.loading import load_function
from areal.training.algorithms.advantages import kl_estimate
from areal.training.algorithms.losses import (
    Aggregation,
    PolicyObjective,
    masked_mean,
    policy_loss,
    require_token_tensor,
)
from areal.training.batches import Batch

if TYPE_CHECKING:
    from areal.api.cli_args import PPOActorConfig, RejectionSamplingConfig

Metric = Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"]
_LOG_BOUND = 20.0


def aggregation(config: PPOActorConfig) -> Aggregation:
    scale = config.loss_scale_factor or config.max_new_tokens
    if config.loss_agg_mode == "seq-mean-token-sum-norm" and not scale:
        raise ValueError("loss_agg_mode seq-mean-token-sum-norm needs loss_scale_factor or max_new_tokens")
    return Aggregation(config.loss_agg_mode, scale or 1.0)


def objective(config: PPOActorConfig) -> PolicyObjective:
    kind: Literal["ppo", "cispo", "sapo"] = (
        "cispo" if config.use_cispo_loss else "sapo" if config.use_sapo_loss else "ppo"
    )
    return PolicyObjective(
        kind=kind,
        level=config.importance_sampling_level,
        clip=(config.eps_clip, config.eps_clip if config.eps_clip_higher is None else config.eps_clip_higher),
        dual_clip=config.c_clip,
        sapo_temperatures=(config.sapo_tau_pos, config.sapo_tau_neg),
    )


@dataclass
class ActorLoss:
    """A loss function of (outputs, micro-batch) that accumulates its metrics until ``pop_sums``.

    ``version``: that of the weights before the update. ``share``: the micro-batches' part of the update's weight, below
    1 if rows without a gradient were skipped. ``kl_factor`` multiplies ``kl_loss_coef``. A micro-batch has ``logprobs``
    (of the behavior policy), ``advantages``, ``loss_mask``, ``versions``, and, if they are used, ``proximal``,
    ``token_temperatures``, ``ref_logprobs`` and ``second_moment_mask``.
    """

    config: PPOActorConfig
    version: int = 0
    share: float = 1.0
    kl_factor: float = 1.0
    is_first_update: bool = True  # in the step, so that the policy is still the one before it
    loss_fn: LossFn | None = None  # replaces the built-in objectives
    _names: list[str] = field(default_factory=list)
    _sums: Tensor | None = None  # by name, over tokens; the last one is the number of tokens
    _mismatch: Tensor | None = None  # behavior minus current log-probabilities of the first update, and its tokens

    def __post_init__(self) -> None:
        self._objective = objective(self.config)
        self._aggregation = aggregation(self.config)
        if self.loss_fn is None and self.config.loss_fn:
            self.loss_fn = load_function(self.config.loss_fn, "actor.loss_fn")

    def __call__(self, outputs: TokenOutputs, micro: Batch) -> Tensor:
        config, mask = self.config, micro["loss_mask"].bool()
        logprobs, entropies = outputs.logprobs, outputs.entropies
        proximal = self._proximal(logprobs, micro)
        corrected = correction(proximal, micro["logprobs"], mask, config.rejection_sampling)
        if config.m2_threshold is not None:
            kept = corrected.kept & micro["second_moment_mask"]
            corrected = Correction(corrected.weights * kept, kept)
        weights = corrected.weights if config.use_decoupled_loss else corrected.kept.float()
        result = policy_loss(logprobs, proximal, micro["advantages"], mask, self._objective, weights)
        per_token = result.per_token
        if self.loss_fn is not None:
            per_token = self._custom_loss(self.loss_fn, logprobs, proximal, micro) * weights
        if config.entropy_coeff:
            per_token = per_token - config.entropy_coeff * entropies
        if config.kl_loss_coef and "ref_logprobs" in micro:
            kl = kl_estimate(logprobs, micro["ref_logprobs"], config.kl_loss_type)
            per_token = per_token + config.kl_loss_coef * self.kl_factor * kl
        # Rejected tokens stay in the denominator: the others must not count for more.
        loss = self._aggregation.mean(per_token, mask) * self.share
        measured = {}
        if config.prox_logp_method == "metrics":
            interpolated = interpolate_proximal(micro["logprobs"], logprobs, micro["versions"], self.version)
            measured["prox_logp_error"] = (interpolated - proximal).abs()
        if config.use_decoupled_loss or "proximal" in micro:
            measured["mismatch_kl"] = micro["logprobs"] - proximal
        elif self.is_first_update:  # the proximal policy is the behavior policy, so the current one is compared
            difference = torch.where(mask, micro["logprobs"] - logprobs.detach(), 0.0).sum()
            sums = torch.stack([difference, mask.sum()]).double()
            self._mismatch = sums if self._mismatch is None else self._mismatch + sums
        self._record(
            mask,
            **measured,
            importance_weight=result.ratio,
            clip_ratio=result.clipped.float(),
            behave_imp_weight=corrected.weights,
            rejected_ratio=(mask & ~corrected.kept).float(),
            approx_kl=proximal - logprobs.detach(),
            entropy=entropies.detach(),
        )
        return loss

    def weight(self, micro: Batch) -> Tensor:
        """Return the weight of a micro-batch's mean."""
        return self._aggregation.weight(micro["loss_mask"].bool())

    def _custom_loss(self, loss_fn: LossFn, logprobs: Tensor, proximal: Tensor, micro: Batch) -> Tensor:
        mask = micro["loss_mask"].bool()
        inputs = LossInputs(logprobs, proximal, micro["logprobs"], micro["advantages"], mask, micro, self.config)
        per_token = require_token_tensor("loss_fn", loss_fn(inputs), "a loss", mask)
        return torch.where(mask, per_token, torch.zeros_like(per_token))

    def _proximal(self, logprobs: Tensor, micro: Batch) -> Tensor:
        if "proximal" in micro:
            return micro["proximal"]
        if not self.config.use_decoupled_loss:
            return micro["logprobs"]
        if self.config.prox_logp_method == "loglinear":
            return interpolate_proximal(micro["logprobs"], logprobs, micro["versions"], self.version)
        return logprobs.detach()

    @torch.no_grad()
    def _record(self, mask: Tensor, **per_token: Tensor) -> None:
        values = torch.stack([*per_token.values(), torch.ones_like(mask, dtype=torch.float32)])
        sums = torch.where(mask, values, 0.0).sum((1, 2)).double()
        self._sums = sums if self._sums is None else self._sums + sums
        self._names = list(per_token)

    def pop_mismatch(self) -> Tensor | None:
        """Return the sum over the tokens of the first update, and their number [2], if ``pop_sums`` has no
        ``mismatch_kl``."""
        sums, self._mismatch = self._mismatch, None
        return sums

    def pop_sums(self) -> tuple[list[str], Tensor]:
        """Return the names and their sums over tokens, with the number of tokens last, and reset them."""
        assert self._sums is not None
        sums, self._sums = self._sums, None
        return self._names, sums


def rows_with_gradient(batch: Batch, config: PPOActorConfig, *, own_loss: bool = False) -> list[int]:
    """Return the rows with a gradient. A policy loss is proportional to the advantages, so a row whose advantages are
    all 0 (its group's responses were all right, or all wrong) is not computed; it still counts in the mean. At least
    one row, because every rank takes part in every update. All rows if the loss has a term without advantages."""
    every = list(range(len(batch["advantages"])))
    has_other_terms = config.entropy_coeff or config.loss_fn or (config.kl_loss_coef and "ref_logprobs" in batch)
    if has_other_terms or own_loss:
        return every
    chosen: list[int] = (batch["advantages"] * batch["loss_mask"]).any(1).nonzero()[:, 0].tolist()
    return chosen or every[:1]


@dataclass(frozen=True)
class Correction:
    """The correction for an older policy. ``weights`` [B, T], without gradient; ``kept`` [B, T]: the trained tokens."""

    weights: Tensor
    kept: Tensor


def correction(
    proximal: Tensor, behavior: Tensor, loss_mask: Tensor, rejection: RejectionSamplingConfig | None
) -> Correction:
    """Return the weights w = pi_proximal / pi_behavior of decoupled PPO's clipped objective (arXiv 2505.24298), for
    samples of an older policy. ``proximal`` and ``behavior``: log-probabilities [B, T]. Tokens with one that is not
    finite are masked. Tokens, or whole sequences, whose metric lies outside [lower, upper] are masked, or their weight
    is clamped.

    Level sequence: the metric and the weight of a sequence aggregate those of its tokens by ``agg``. The weight
    aggregates log ratios: ``mean`` is the geometric mean of the tokens' ratios, ``sum`` their product (the probability
    ratio of the whole sequence).
    """
    known = torch.isfinite(behavior) & torch.isfinite(proximal)
    kept = loss_mask.bool() & known
    log_ratio = torch.where(kept, proximal - behavior, torch.zeros_like(proximal)).detach()
    if rejection is None:
        return Correction(_exp(log_ratio) * kept, kept)
    measured = _metric(log_ratio, behavior, rejection.metric)
    log_weight = log_ratio
    if rejection.level == "sequence":
        log_weight = _aggregate(log_ratio, kept, rejection.agg)
        ratio = rejection.metric == "ratio"
        measured = _exp(log_weight) if ratio else _aggregate(measured, kept, rejection.agg)
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


def _metric(log_ratio: Tensor, behavior: Tensor, metric: Metric) -> Tensor:
    if metric == "ratio":
        return _exp(log_ratio)
    if metric == "kl_k1":
        return log_ratio
    if metric == "kl_k2":
        return log_ratio.square() / 2
    if metric == "kl_k3":
        bounded = log_ratio.clamp(-_LOG_BOUND, _LOG_BOUND)
        return torch.expm1(bounded) - bounded
    # binary_kl: the larger of both KL divergences between Bernoulli distributions "this token, or another".
    p, b = (logp.exp().clamp(1e-7, 1 - 1e-7) for logp in (behavior + log_ratio, behavior))
    b = torch.where(torch.isfinite(b), b, p)
    forward = p * (p / b).log() + (1 - p) * ((1 - p) / (1 - b)).log()
    backward = b * (b / p).log() + (1 - b) * ((1 - b) / (1 - p)).log()
    return torch.maximum(forward, backward)


def _aggregate(values: Tensor, kept: Tensor, aggregate: str) -> Tensor:
    """Return the aggregate of each row's kept tokens at all of its tokens: [B, T] -> [B, T]."""
    mean = aggregate == "mean"
    whole = masked_mean(values, kept, dim=1) if mean else (values * kept).sum(1, keepdim=True)
    return whole.expand_as(values)


def squared_log_ratios(proximal: Tensor, behavior: Tensor, loss_mask: Tensor) -> Tensor:
    """Return (log pi_behaviour - log pi_proximal)^2 of each token of the mask: [N]."""
    return (behavior - proximal).detach().double().square()[loss_mask.bool()]


def second_moment_bound(squares: Tensor, threshold: float) -> float:
    """Return the largest of ``squares`` [N] that M2PO (arXiv 2510.01161) keeps, or -1. It leaves out the largest until
    the mean of the others is below ``threshold``; equal squares are kept or left out together. ``squares`` are those of
    a whole batch over all ranks, so that the result does not depend on its division."""
    ordered = squares[torch.isfinite(squares)].sort().values
    if not len(ordered):
        return -1.0
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    last_of_equals = torch.cat([ordered[1:] > ordered[:-1], torch.ones_like(ordered[:1], dtype=torch.bool)])
    below = ordered[(means < threshold) & last_of_equals]  # the running mean of sorted values never falls
    return float(below[-1]) if len(below) else -1.0


def interpolate_proximal(behavior: Tensor, current: Tensor, versions: Tensor, version: int) -> Tensor:
    """Return the proximal log-probabilities without a forward pass (A-3PO, arXiv 2512.06547): interpolated between
    those of the behavior and the current policy. ``versions`` [B, T] sampled each token; ``version`` is trained.

    alpha = (v_proximal - v_behaviour) / (v - v_behaviour) with v_proximal = v - 1, within [0, 1].
    """
    age = (version - versions).clamp(min=0).to(behavior.dtype)
    alpha = ((age - 1) / age.clamp(min=1)).clamp(0.0, 1.0)
    return (1 - alpha) * behavior + alpha * current.detach()


def add_second_moment_mask(
    batch: Mapping[str, Tensor], threshold: float, gather: Callable[[Tensor], list[Tensor]] = lambda local: [local]
) -> dict[str, Tensor]:
    """Add ``second_moment_mask`` [B, T], the tokens that M2PO keeps. ``gather`` collects a tensor from all ranks."""
    squares = squared_log_ratios(batch["proximal"], batch["logprobs"], batch["loss_mask"])
    bound = second_moment_bound(torch.cat(gather(squares)), threshold)
    kept = torch.zeros_like(batch["loss_mask"], dtype=torch.bool)
    kept[batch["loss_mask"].bool()] = squares <= bound
    return {**batch, "second_moment_mask": kept}
