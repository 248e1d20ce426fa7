"""Which metrics of a job are drawn together, for the terminal, pictures and pages; and a curve's range. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from fnmatch import fnmatchcase

MAIN = (
    *("reward/mean", "eval/reward/mean", "accuracy", "eval/accuracy", "loss", "eval/loss", "grad_norm"),
    *("approx_kl", "ref_kl", "entropy"),
    *("length/mean", "length/truncated", "groups/without_spread", "staleness/max", "tokens_per_second", "time/step"),
)
"""The metrics shown by default; a run writes about ten of them."""

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward/*", "eval/reward/*", "rollout/reward", "rollout/reward/*")),
    ("accuracy", ("accuracy", "eval/accuracy", "eval/accuracy/*")),
    ("loss", ("loss", "eval/loss", "eval/loss/*")),
    ("perplexity", ("perplexity", "eval/perplexity", "eval/perplexity/*")),
    ("pass@k", ("eval/pass@*",)),
    ("critic/loss", ("critic/loss",)),
    ("gradient norm", ("grad_norm", "critic/grad_norm")),
    ("KL", ("approx_kl", "ref_kl", "mismatch_kl")),
    ("entropy", ("entropy", "trained_entropy")),
    ("importance weight", ("importance_weight", "behave_imp_weight")),
    ("share", ("clip_ratio", "rejected_ratio", "trained_share", "length/truncated", "groups/without_spread")),
    ("tokens", ("length/mean", "length/max", "length/prompt")),
    ("staleness", ("staleness/*",)),
    ("rollouts", tuple(f"rollouts/{name}" for name in ("rejected", "failed", "dropped", "retried"))),
    ("rollouts now", tuple(f"rollouts/{name}" for name in ("running", "pending", "ready"))),
    ("prompts", ("prompts/*",)),
    ("weight update (ms)", ("weights/*ms",)),
)
"""Groups of metrics, most important first. Each metric without a group follows as its own group; times are last."""
TIMES = "time (s)"
WAITS = {
    "time/rollout": "rollouts",
    "time/prepare": "preparing",
    "time/train": "training",
    "time/weights": "weight updates",
    "time/eval": "evaluation",
    "time/save": "saving",
    "time/checkpoint": "checkpoints",
}
"""What a step's time goes to: metric -> its name."""
_SUMMARIES = ("avg", "min", "max")
_FEW, _OUTSIDE = 0.02, 1.0


def group_of(metric: str) -> tuple[int, str]:
    """Return the group of a metric: its place and its title."""
    for place, (title, patterns) in enumerate(GROUPS):
        if any(fnmatchcase(metric, pattern) for pattern in patterns):
            return place, title
    if metric.startswith(("time/", "timeperf/")):
        return len(GROUPS) + 1, TIMES
    name, _, summary = metric.rpartition("/")
    return len(GROUPS), name if name and summary in _SUMMARIES else metric


def drawn_range(values: Iterable[float]) -> tuple[float, float]:
    """Return the range without the few values (two in a hundred at each end) that lie farther outside of all others
    than those are apart: one spike does not flatten a curve. (0, 0) without values."""
    known = sorted(values)
    if not known:
        return 0.0, 0.0
    few = math.ceil(len(known) * _FEW) if len(known) >= 8 else 0
    low, high = known[few], known[-1 - few]
    if low == high:
        return known[0], known[-1]
    room = (high - low) * _OUTSIDE
    return known[bisect_left(known, low - room)], known[bisect_right(known, high + room) - 1]
