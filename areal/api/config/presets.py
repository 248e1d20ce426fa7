"""Algorithms by name: what ``actor.preset`` sets where the configuration does not say otherwise.

Each is its paper's: how rewards are normalised, which ratio is clipped where, and which mean the loss is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GROUP = {"mean_level": "group", "std_level": "group"}
_MEAN_ONLY = {"mean_level": "group", "std_level": None}
_POLICY_GRADIENT = {
    "recompute_logprob": True,  # of the policy that is updated, once: no ratio and no clip
    "ppo_n_minibatches": 1,
    "loss_agg_mode": "seq-mean-token-sum",
    "kl_ctl": 0.0,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # arXiv 2402.03300: with a ref, its KL term in the loss
    "grpo": {
        "reward_norm": _GROUP,
        "loss_agg_mode": "seq-mean-token-mean",
        "eps_clip": 0.2,
        "kl_ctl": 0.0,
        "kl_loss_coef": 0.04,
        "kl_loss_type": "k3",
    },
    # arXiv 2503.20783
    "dr_grpo": {
        "reward_norm": _MEAN_ONLY,
        "loss_agg_mode": "seq-mean-token-sum-norm",
        "eps_clip": 0.2,
        "kl_ctl": 0.0,
    },
    # arXiv 2402.14740
    "rloo": {**_POLICY_GRADIENT, "reward_norm": {**_MEAN_ONLY, "mean_leave1out": True}},
    # Williams, 1992, with the mean reward as its baseline
    "reinforce": {**_POLICY_GRADIENT, "reward_norm": {"mean_level": "batch", "std_level": None}},
    # arXiv 2503.14476
    "dapo": {
        "reward_norm": _GROUP,
        "loss_agg_mode": "token-mean",
        "eps_clip": 0.2,
        "eps_clip_higher": 0.28,
        "dynamic_sampling": True,
        "overlong_reward_penalty": True,
        "kl_ctl": 0.0,
    },
    # arXiv 2507.18071
    "gspo": {
        "reward_norm": _GROUP,
        "importance_sampling_level": "sequence",
        "loss_agg_mode": "seq-mean-token-mean",
        "eps_clip": 3e-4,
        "eps_clip_higher": 4e-4,
        "kl_ctl": 0.0,
    },
    # arXiv 2506.13585: only bounded above; the bound is ScaleRL's (arXiv 2510.13786)
    "cispo": {
        "use_cispo_loss": True,
        "reward_norm": _GROUP,
        "loss_agg_mode": "token-mean",
        "eps_clip": 1.0,
        "eps_clip_higher": 4.0,
        "kl_ctl": 0.0,
    },
    # arXiv 2511.20347
    "sapo": {
        "use_sapo_loss": True,
        "sapo_tau_pos": 1.0,
        "sapo_tau_neg": 1.05,
        "reward_norm": _GROUP,
        "loss_agg_mode": "seq-mean-token-mean",
        "kl_ctl": 0.0,
    },
}
