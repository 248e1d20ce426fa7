"""Each preset against its paper: the gradient of an update, from rewards and log probabilities, written out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api.cli_args import PRESETS, PPOActorConfig
from areal.api.config.fields import build
from areal.training.algorithms.actor import ActorLoss
from areal.training.algorithms.advantages import AuxiliaryOutputs, prepare
from areal.training.algorithms.losses import token_logprobs, token_outputs
from areal.wire.fields import Faults

LONGEST = 8
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
LENGTHS = (3, 5, 1, 8, 2, 4)  # of answers to prompts of one token
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])


def case() -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Logits, sampled rows whose ratios are about 0.7 to 1.4, and a reference's log probabilities."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, LONGEST + 1, 11, generator=generator)
    ids = torch.randint(0, 11, (6, LONGEST + 1), generator=generator)
    mask = torch.tensor([[0] + [1] * n + [0] * (LONGEST - n) for n in LENGTHS])
    logp = token_logprobs(logits, ids)
    sampled = logp + 0.15 * torch.randn(logp.shape, generator=generator)
    reference = logp + 0.3 * torch.randn(logp.shape, generator=generator)
    columns = {"input_ids": ids, "loss_mask": mask, "versions": mask, "logprobs": sampled * mask, "rewards": REWARDS}
    return logits, {**columns, "attention_mask": mask, "turn_ids": mask - 1}, reference


def config_of(preset: str, **more: Any) -> PPOActorConfig:
    faults = Faults()
    config = build(PPOActorConfig, {"preset": preset, "max_new_tokens": LONGEST, **more}, faults)
    assert config is not None, faults.found
    return config


Answers = list[tuple[Tensor, Tensor, Tensor, float]]
"""Of each answer log pi, log pi_old, log pi_ref [T] and the reward, groups of three."""


def z_scores(rewards: list[float]) -> list[float]:
    group, found = [rewards[:3], rewards[3:]], []
    for each in group:
        mean = sum(each) / 3
        std = math.sqrt(sum((reward - mean) ** 2 for reward in each) / 2)
        found += [(reward - mean) / (std + 1e-5) for reward in each]
    return found


def centred(rewards: list[float]) -> list[float]:
    return [reward - sum(rewards[g : g + 3]) / 3 for g in (0, 3) for reward in rewards[g : g + 3]]


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def grpo(answers: Answers) -> Tensor:
    terms = []
    for (logp, old, ref, _), advantage in zip(answers, z_scores([each[3] for each in answers]), strict=True):
        kl = torch.exp(ref - logp) - (ref - logp) - 1
        terms.append((clipped(torch.exp(logp - old), advantage, 0.2, 0.2) - 0.04 * kl).mean())
    return torch.stack(terms).mean()


def dr_grpo(answers: Answers) -> Tensor:
    advantages = centred([each[3] for each in answers])
    terms = [
        clipped(torch.exp(logp - old), a, 0.2, 0.2).sum() / LONGEST
        for (logp, old, _, _), a in zip(answers, advantages, strict=True)
    ]
    return torch.stack(terms).mean()


def rloo(answers: Answers) -> Tensor:
    rewards = [each[3] for each in answers]
    others = [(sum(rewards[g : g + 3]) - reward) / 2 for g in (0, 3) for reward in rewards[g : g + 3]]
    return torch.stack([(r - b) * each[0].sum() for each, r, b in zip(answers, rewards, others, strict=True)]).mean()


def reinforce(answers: Answers) -> Tensor:
    baseline = sum(each[3] for each in answers) / len(answers)
    return torch.stack([(reward - baseline) * logp.sum() for logp, _, _, reward in answers]).mean()


def dapo(answers: Answers) -> Tensor:
    soft = max(1, LONGEST // 5)  # the last tokens, which cost
    punished = [each[3] - min(1.0, max(0.0, (len(each[0]) - (LONGEST - soft)) / soft)) for each in answers]
    terms = [
        clipped(torch.exp(logp - old), a, 0.2, 0.28)
        for (logp, old, _, _), a in zip(answers, z_scores(punished), strict=True)
    ]
    return torch.cat(terms).mean()


def gspo(answers: Answers) -> Tensor:
    terms = []
    for (logp, old, _, _), advantage in zip(answers, z_scores([each[3] for each in answers]), strict=True):
        ratio = torch.exp((logp - old).sum() / len(logp))
        terms.append(clipped(ratio, advantage, 3e-4, 4e-4))
    return torch.stack(terms).mean()


def cispo(answers: Answers) -> Tensor:
    terms = [
        torch.exp(logp - old).clamp(max=5.0).detach() * a * logp
        for (logp, old, _, _), a in zip(answers, z_scores([each[3] for each in answers]), strict=True)
    ]
    return torch.cat(terms).mean()


def sapo(answers: Answers) -> Tensor:
    terms = []
    for (logp, old, _, _), advantage in zip(answers, z_scores([each[3] for each in answers]), strict=True):
        tau = 1.0 if advantage > 0 else 1.05
        terms.append((torch.sigmoid(tau * (torch.exp(logp - old) - 1)) * 4 / tau * advantage).mean())
    return torch.stack(terms).mean()


PAPERS: dict[str, Callable[[Answers], Tensor]] = {
    each.__name__: each for each in (grpo, dr_grpo, rloo, reinforce, dapo, gspo, cispo, sapo)
}


def test_every_preset_is_listed_with_its_paper() -> None:
    assert set(PAPERS) == set(PRESETS)


@pytest.mark.parametrize("preset", PAPERS)
def test_preset_gradient_matches_its_paper(preset: str) -> None:
    logits, batch, reference = case()
    leaf = logits.clone().requires_grad_()
    logp = token_logprobs(leaf, batch["input_ids"])
    rows = [slice(1, 1 + n) for n in LENGTHS]
    answers = [
        (logp[b, own], batch["logprobs"][b, own], reference[b, own], REWARDS[b].item()) for b, own in enumerate(rows)
    ]
    torch.autograd.backward(-PAPERS[preset](answers))
    config = config_of(preset)
    if config.recompute_logprob:
        batch["proximal"] = token_logprobs(logits, batch["input_ids"])
    micro = prepare(batch, GROUPS, config, AuxiliaryOutputs(reference))
    got = logits.clone().requires_grad_()
    torch.autograd.backward(ActorLoss(config)(token_outputs(got, micro), micro))
    assert leaf.grad is not None and got.grad is not None
    assert leaf.grad.abs().max() > 1e-4
    torch.testing.assert_close(got.grad, leaf.grad, rtol=1e-4, atol=1e-6)


def test_explicit_settings_override_preset() -> None:
    config = config_of("gspo", eps_clip=0.2, reward_norm={"std_level": None})
    assert (config.preset, config.eps_clip, config.eps_clip_higher) == ("gspo", 0.2, 4e-4)
    assert config.reward_norm is not None
    assert (config.reward_norm.mean_level, config.reward_norm.std_level) == ("group", None)


def test_preset_is_refused_outside_configuration() -> None:
    with pytest.raises(TypeError, match="preset"):
        PPOActorConfig(preset="gspo")  # type: ignore[call-arg]
