"""The policy's loss over a micro-batch by the settings of a ``PPOActorConfig``, and its metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from areal.api.algorithm_api import LossFn, LossInputs
from areal.api.registry import load_attr
from areal.errors import UsageFault
from areal.training.algorithms.advantages import kl_estimate
from areal.training.algorithms.losses import Aggregation, PolicyObjective, policy_loss, token_entropies, token_logprobs
from areal.training.algorithms.preparation import Correction, Rejection, correction, interpolated_proximal
from areal.training.data.batches import Batch

if TYPE_CHECKING:
    from areal.api.cli_args import PPOActorConfig


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


def rejection(config: PPOActorConfig) -> Rejection | None:
    given = config.rejection_sampling
    if given is None:
        return None
    return Rejection(given.level, given.action, given.metric, given.agg, given.upper, given.lower)


@dataclass
class ActorLoss:
    """Called with (logits, micro-batch); sums up what it saw until ``taken``.

    ``version`` is that of the weights before the update. ``share``: the part of the update's weight that micro-batches
    have, where rows without a gradient were left out; the mean is over all. A micro-batch has ``logprobs`` (of the
    behavior policy), ``advantages``, ``loss_mask``, ``versions``, ``proximal`` where that was computed,
    ``token_temperatures`` where not all are 1, ``ref_logprobs`` where there is a reference, and ``second_moment_mask``
    where the configuration has an ``m2_threshold``. ``kl_factor`` multiplies ``kl_loss_coef``.
    """

    config: PPOActorConfig
    version: int = 0
    share: float = 1.0
    kl_factor: float = 1.0
    loss_fn: LossFn | None = None  # instead of the built-in objectives
    _names: list[str] = field(default_factory=list)
    _sums: Tensor | None = None  # of each name over tokens, and the tokens last

    def __post_init__(self) -> None:
        self._objective, self._rejection = objective(self.config), rejection(self.config)
        self._aggregation = aggregation(self.config)
        if self.loss_fn is None and self.config.loss_fn:
            self.loss_fn = load_attr(self.config.loss_fn, "actor.loss_fn")

    def __call__(self, logits: Tensor, micro: Batch) -> Tensor:
        config, mask = self.config, micro["loss_mask"].bool()
        logprobs = token_logprobs(logits, micro["input_ids"], micro.get("token_temperatures"))
        proximal = self._proximal(logprobs, micro)
        corrected = self._correction(proximal, micro, mask)
        weights = corrected.weights if config.use_decoupled_loss else corrected.kept.float()
        result = policy_loss(logprobs, proximal, micro["advantages"], mask, self._objective, weights)
        per_token = result.per_token
        if self.loss_fn is not None:
            per_token = self._own(self.loss_fn, logprobs, proximal, micro) * weights
        entropies = self._entropies(logits, micro)
        if config.entropy_coeff:
            per_token = per_token - config.entropy_coeff * entropies
        if config.kl_loss_coef and "ref_logprobs" in micro:
            kl = kl_estimate(logprobs, micro["ref_logprobs"], config.kl_loss_type)
            per_token = per_token + config.kl_loss_coef * self.kl_factor * kl
        # The mean is over all tokens of the mask, also those left out: the others must not count for more.
        loss = self._aggregation.mean(per_token, mask) * self.share
        approximation = {}
        if config.prox_logp_method == "metrics":
            guessed = interpolated_proximal(micro["logprobs"], logprobs, micro["versions"], self.version)
            approximation = {"prox_logp_error": (guessed - proximal).abs()}
        self._note(
            mask,
            **approximation,
            importance_weight=result.ratio,
            clip_ratio=result.clipped.float(),
            behave_imp_weight=corrected.weights,
            rejected_ratio=(mask & ~corrected.kept).float(),
            mismatch_kl=micro["logprobs"] - proximal,
            approx_kl=proximal - logprobs.detach(),
            entropy=entropies.detach(),
        )
        return loss

    def weight(self, micro: Batch) -> Tensor:
        """How much a micro-batch's mean counts."""
        return self._aggregation.weight(micro["loss_mask"].bool())

    def _own(self, loss_fn: LossFn, logprobs: Tensor, proximal: Tensor, micro: Batch) -> Tensor:
        mask = micro["loss_mask"].bool()
        given = LossInputs(logprobs, proximal, micro["logprobs"], micro["advantages"], mask, micro, self.config)
        per_token = loss_fn(given)
        if not isinstance(per_token, Tensor) or per_token.shape != mask.shape:
            found = list(per_token.shape) if isinstance(per_token, Tensor) else type(per_token).__name__
            raise UsageFault(f"the loss_fn gave {found}: it must be a loss for each token, {list(mask.shape)}")
        return torch.where(mask, per_token, torch.zeros_like(per_token))

    def _proximal(self, logprobs: Tensor, micro: Batch) -> Tensor:
        if "proximal" in micro:
            return micro["proximal"]
        if not self.config.use_decoupled_loss:
            return micro["logprobs"]
        if self.config.prox_logp_method == "loglinear":
            return interpolated_proximal(micro["logprobs"], logprobs, micro["versions"], self.version)
        return logprobs.detach()

    def _correction(self, proximal: Tensor, micro: Batch, mask: Tensor) -> Correction:
        behavior = micro["logprobs"]
        result = correction(proximal, behavior, mask, self._rejection)
        if self.config.m2_threshold is not None:
            kept = result.kept & micro["second_moment_mask"]
            result = Correction(result.weights * kept, kept)
        return result

    def _entropies(self, logits: Tensor, micro: Batch) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(self.config.entropy_coeff)):
            return token_entropies(logits, micro.get("token_temperatures"))

    @torch.no_grad()
    def _note(self, mask: Tensor, **per_token: Tensor) -> None:
        seen = torch.stack([*per_token.values(), torch.ones_like(mask, dtype=torch.float32)])
        sums = torch.where(mask, seen, 0.0).sum((1, 2)).double()
        self._sums = sums if self._sums is None else self._sums + sums
        self._names = list(per_token)

    def taken(self) -> tuple[list[str], Tensor]:
        """Names, and their sums over tokens with the number of tokens last; then begins anew."""
        assert self._sums is not None
        sums, self._sums = self._sums, None
        return self._names, sums


# -- rows with a gradient. A policy's loss is its advantages times something: a row whose advantages are all 0 (all
# answers of its group were right, or all wrong) is not computed. It still counts in the mean.


def rows_with_gradient(batch: Batch, config: PPOActorConfig, *, own_loss: bool = False) -> list[int]:
    """Never none: every rank takes part in every update. All of them where a loss has a part without
    advantages."""
    every = list(range(len(batch["advantages"])))
    beyond = config.entropy_coeff or config.loss_fn or (config.kl_loss_coef and "ref_logprobs" in batch)
    if beyond or own_loss:
        return every
    taught: list[int] = (batch["advantages"] * batch["loss_mask"]).any(1).nonzero()[:, 0].tolist()
    return taught or every[:1]
