"""Pure functions from logits to log-probabilities, and from losses of tokens to one number.

A loss is the mean over one micro-batch, and comes with the weight of that mean. The engine normalizes over all
micro-batches and ranks, so the result does not depend on how a batch is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal.api.engine_api import TokenOutputs
from areal.dataclasses import dataclass
from areal.errors import UsageFault

_CHUNK_VALUES = 1 << 26  # logits handled at once: 256 MiB of float32
AggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
_LOG_BOUND = 30.0  # keeps ratios finite, and their squares in the gradient norm


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean of ``values`` over ``mask``; 0 for an empty mask. With ``dim``, that dimension has size 1."""
    active = mask.to(values.dtype)
    chosen = torch.where(mask.bool(), values, torch.zeros_like(values))
    if dim is None:
        return chosen.sum() / active.sum().clamp(min=1)
    return chosen.sum(dim, keepdim=True) / active.sum(dim, keepdim=True).clamp(min=1)


def require_token_tensor(name: str, value: object, kind: str, mask: Tensor) -> Tensor:
    """Return the result of a user's function ``name``, one ``kind`` for each token of ``mask`` [B, T]. Raises
    UsageFault."""
    if not isinstance(value, Tensor) or value.shape != mask.shape:
        found = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UsageFault(f"the {name} gave {found}: it must be {kind} for each token, {list(mask.shape)}")
    return value


def sequence_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of ``values`` over each row's mask: [B, T] -> [B]."""
    return torch.where(mask.bool(), values, torch.zeros_like(values)).sum(1)


def token_logprobs(logits: Tensor, input_ids: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Return the log-probabilities of given tokens, without a float32 copy of all logits: ``logits`` [B, T, V],
    ``input_ids`` [B, T] -> float32 [B, T]; column 0 is 0.

    ``temperatures`` [B, T], above 0: the sampling temperature of each token, so that the log-probabilities are of the
    distribution that it was sampled from; None means 1.
    """
    return _by_chunks(_target_logprobs, logits, temperatures, input_ids[:, 1:].reshape(-1))


def token_entropies(logits: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """Return the entropy in nats of the distribution of token t: [B, T, V] -> float32 [B, T]; column 0 is 0."""
    return _by_chunks(_entropy, logits, temperatures)


def _by_chunks(score: Callable[..., Tensor], logits: Tensor, temperatures: Tensor | None, *targets: Tensor) -> Tensor:
    """Return [B, T] of ``score(logits, *targets, divisors)``, called with chunks of rows; ``targets`` are flat,
    ``divisors`` are the temperatures [rows, 1]."""
    batch, length, vocabulary = logits.shape
    rows = max(1, _CHUNK_VALUES // vocabulary)
    scored = torch.split(logits[:, :-1].reshape(-1, vocabulary), rows)
    given = (torch.split(each, rows) for each in targets)
    divisors: Sequence[Tensor | None] = [None] * len(scored)
    if temperatures is not None:
        divisors = torch.split(temperatures[:, 1:].reshape(-1, 1), rows)
    parts = zip(scored, *given, divisors, strict=True)
    flat = torch.cat([score(*part) for part in parts])
    return torch.nn.functional.pad(flat.view(batch, length - 1), (1, 0))


def _target_logprobs(logits: Tensor, targets: Tensor, divisors: Tensor | None) -> Tensor:
    if logits.requires_grad and logits.dtype != torch.float32:
        # The float32 copy is recomputed in the backward pass instead of kept for every chunk.
        return checkpoint(_cross_entropy, logits, targets, divisors, use_reentrant=False)
    return _cross_entropy(logits, targets, divisors)


def _cross_entropy(logits: Tensor, targets: Tensor, divisors: Tensor | None) -> Tensor:
    return -torch.nn.functional.cross_entropy(_scaled(logits, divisors), targets, reduction="none")


def _scaled(logits: Tensor, divisors: Tensor | None) -> Tensor:
    return logits.float() if divisors is None else logits.float() / divisors


def _entropy(logits: Tensor, divisors: Tensor | None) -> Tensor:
    logp = torch.log_softmax(_scaled(logits, divisors), dim=-1)
    return -(logp.exp() * logp).sum(-1)


def token_outputs(logits: Tensor, micro: Mapping[str, Tensor]) -> TokenOutputs:
    """Return the outputs of all tokens of ``micro`` from logits [b, t, V], the reference for engines."""
    temperatures = micro.get("token_temperatures")
    mask = micro["loss_mask" if "loss_mask" in micro else "attention_mask"].bool()
    every = token_logprobs(logits, micro["input_ids"], temperatures), token_entropies(logits, temperatures)
    return TokenOutputs.of_policy(*(torch.where(mask, each, 0.0) for each in every))


def sft_loss(logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Return the negative log-likelihood of each token of the mask: [B, T], to be averaged over the mask."""
    return torch.where(loss_mask.bool(), -logprobs, torch.zeros_like(logprobs))


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, clip: float | None) -> Tensor:
    """Return the squared error of a critic, its step from ``old_values`` bounded by ``clip`` (arXiv 1707.06347, section
    6): [B, T], to be averaged over the mask."""
    error = (values - returns).square()
    if clip is not None:
        bounded = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (bounded - returns).square())
    return torch.where(loss_mask.bool(), error / 2, torch.zeros_like(error))


@dataclass(frozen=True)
class PairLoss:
    """A loss of preferences. ``per_pair`` [N], to be averaged. ``margins`` [N]: chosen minus rejected, above 0 if the
    preference is right."""

    per_pair: Tensor
    margins: Tensor


def reward_model_loss(scores: Tensor) -> PairLoss:
    """Return the Bradley-Terry loss. ``scores`` [2N]: of each answer's last token, chosen and rejected in turn."""
    margins = scores[0::2] - scores[1::2]
    return PairLoss(-torch.nn.functional.logsigmoid(margins), margins.detach())


def dpo_loss(
    logprobs: Tensor,
    reference: Tensor,
    loss_mask: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    kind: Literal["sigmoid", "ipo"] = "sigmoid",
) -> PairLoss:
    """Return the loss of direct preference optimization (arXiv 2305.18290). ``logprobs`` and ``reference`` [2N, T]:
    those of chosen and rejected answers in turn. ``label_smoothing``: the assumed share of wrong labels (conservative
    DPO). ``ipo``: the squared distance of the mean log ratios' difference from 1 / (2 beta) (arXiv 2310.12036)."""
    gained = sequence_sums(logprobs - reference, loss_mask)
    if kind == "ipo":
        gained = gained / loss_mask.sum(1).clamp(min=1)
        gap = gained[0::2] - gained[1::2]
        return PairLoss((gap - 1 / (2 * beta)).square(), gap.detach())
    margins = beta * (gained[0::2] - gained[1::2])
    right, wrong = torch.nn.functional.logsigmoid(margins), torch.nn.functional.logsigmoid(-margins)
    return PairLoss(-(1 - label_smoothing) * right - label_smoothing * wrong, margins.detach())


@dataclass(frozen=True)
class Aggregation:
    """``mode``, by verl's names:

    token-mean               sum over all tokens / tokens                               (DAPO, arXiv 2503.14476)
    seq-mean-token-mean      mean over sequences of the mean over their tokens          (GRPO, arXiv 2402.03300)
    seq-mean-token-sum       mean over sequences of the sum over their tokens           (REINFORCE, RLOO)
    seq-mean-token-sum-norm  the same / ``scale``, a constant                           (Dr.GRPO, arXiv 2503.20783)

    Sequences with an empty mask do not count.
    """

    mode: AggMode = "token-mean"
    scale: float = 1.0

    def mean(self, per_token: Tensor, mask: Tensor) -> Tensor:
        """Return the mean of ``per_token`` over ``mask`` [B, T], a scalar; 0 for an empty mask."""
        if self.mode == "token-mean":
            return masked_mean(per_token, mask)
        if self.mode == "seq-mean-token-mean":
            of_sequences = masked_mean(per_token, mask, dim=1)[:, 0]
        else:
            of_sequences = sequence_sums(per_token, mask)
        mean = masked_mean(of_sequences, mask.any(1))
        return mean / self.scale if self.mode == "seq-mean-token-sum-norm" else mean

    def weight(self, mask: Tensor) -> Tensor:
        """Return the number of tokens, or sequences, that ``mean`` averages: a scalar."""
        return mask.sum() if self.mode == "token-mean" else mask.any(1).sum()


@dataclass(frozen=True)
class PolicyObjective:
    """The clipped objective of a policy. ``clip`` is (below, above) 1. ``dual_clip`` bounds the loss of a negative
    advantage (arXiv 1912.09729).

    kind: ``ppo`` (arXiv 1707.06347), ``cispo`` (arXiv 2506.13585), ``sapo`` (arXiv 2511.20347). level: one ratio for
    each token or each sequence (GSPO, arXiv 2507.18071).
    """

    kind: Literal["ppo", "cispo", "sapo"] = "ppo"
    level: Literal["token", "sequence"] = "token"
    clip: tuple[float, float] = (0.2, 0.2)
    dual_clip: float | None = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)  # of positive and of negative advantages

    def __post_init__(self) -> None:
        if min(self.clip) < 0:
            raise ValueError(f"clip must not be negative, got {self.clip}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, got {self.dual_clip}")


@dataclass(frozen=True)
class PolicyLoss:
    """A loss of a policy. ``per_token`` [B, T], to be averaged over the loss mask; ``clipped`` [B, T]."""

    per_token: Tensor
    ratio: Tensor
    clipped: Tensor


def policy_loss(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    objective: PolicyObjective,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """Return the policy loss and the clipped tokens. The ratio u = pi_theta / pi_proximal is clipped; in standard PPO
    the proximal policy is the behavior policy. All tensors are [B, T], aligned by token. Only ``logprobs`` has a
    gradient. ``weights``: the constant correction w = pi_proximal / pi_behavior, 0 for masked tokens; None means 1."""
    active = loss_mask.bool()
    log_ratio = torch.where(active, logprobs - proximal, torch.zeros_like(logprobs))
    if objective.level == "sequence":
        # The ratio is the sequence's geometric mean; gradients flow to its tokens in proportion (GSPO, eq. 7).
        log_ratio = masked_mean(log_ratio, active, dim=1).expand_as(log_ratio)
        advantages = masked_mean(advantages, active, dim=1).expand_as(advantages)
    ratio = bounded_exp(log_ratio)
    loss, clipped = _OBJECTIVES[objective.kind](ratio, logprobs, advantages, objective)
    if weights is not None:
        loss = loss * weights
    loss = torch.where(active, loss, torch.zeros_like(loss))
    return PolicyLoss(loss, ratio.detach(), (clipped & active).detach())


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp with a bounded value. Beyond the bound the gradient is that at the bound instead of 0, so that a token
    that is far too likely is still pushed back."""
    value = log_ratio.detach().clamp(-_LOG_BOUND, _LOG_BOUND).exp()
    return value * (1 + (log_ratio - log_ratio.detach()))


def _ppo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, objective: PolicyObjective) -> tuple[Tensor, Tensor]:
    low, high = objective.clip
    free, bounded = -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if objective.dual_clip is not None:
        ceiling = -objective.dual_clip * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(over, ceiling, loss), clipped | over
    return loss, clipped


def _cispo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, objective: PolicyObjective) -> tuple[Tensor, Tensor]:
    low, high = objective.clip
    bounded = ratio.clamp(1 - low, 1 + high).detach()
    return -bounded * advantages * logprobs, bounded != ratio


def _sapo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, objective: PolicyObjective) -> tuple[Tensor, Tensor]:
    positive, negative = objective.sapo_temperatures
    tau = torch.where(advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return -gate * advantages, torch.zeros_like(ratio, dtype=torch.bool)


_OBJECTIVES = {"ppo": _ppo, "cispo": _cispo, "sapo": _sapo}
