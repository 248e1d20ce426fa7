"""Scores of an evaluation with confidence intervals, and the difference of two evaluations. Pure functions.

Samples of one prompt are not independent, so every error is clustered by prompt: a score is a mean over prompts, of the
mean over the prompt's samples, and its standard error is that of the prompts' means. Two evaluations of the same
prompts are compared prompt by prompt (Miller 2024, "Adding Error Bars to Evals", arXiv:2411.00640).

A share, such as pass@k, has Wilson's interval with the sample size that gives the clustered standard error (Korn and
Graubard 1998): it stays within 0 and 1, and 20 passes of 20 are not certain. A mean has Student's interval, and so has
the difference of two samples (Welch), or of pairs, with its p-value.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist, fmean, variance
from typing import NamedTuple

from areal.dataclasses import dataclass
from areal.dataset.examples import prompt_digest
from areal.errors import Conflict
from areal.trajectories.record import Episode

_STEPS = 300  # the most terms of the continued fraction, which converges in about ten
_TINY = 1e-300


@dataclass(frozen=True)
class PromptScores:
    """The rewards of the finished samples of one prompt. ``key``: the digest of the prompt, and the number of equal
    prompts before it. ``number``: the position in the data set."""

    key: str
    number: int
    rewards: tuple[float, ...]

    def passes(self, threshold: float) -> int:
        return sum(reward >= threshold for reward in self.rewards)


@dataclass(frozen=True)
class Estimate:
    """A score over ``prompts`` prompts with its confidence interval. The bounds are NaN if there is only one prompt."""

    value: float
    low: float
    high: float
    prompts: int

    def document(self) -> dict[str, object]:
        low, high = (None if math.isnan(each) else round(each, 6) for each in (self.low, self.high))
        return {"value": round(self.value, 6), "low": low, "high": high, "prompts": self.prompts}

    def text(self) -> str:
        interval = "" if math.isnan(self.low) else f" ({self.low:.4f} to {self.high:.4f})"
        return f"{self.value:.4f}{interval}"


class PromptChange(NamedTuple):
    """A prompt whose mean reward differs from the baseline's."""

    number: int
    before: float
    after: float


@dataclass(frozen=True)
class Comparison:
    """Differences to a baseline, prompt by prompt; positive values are improvements."""

    reward: Estimate
    pass_at_1: Estimate
    changes: tuple[PromptChange, ...]

    @property
    def dropped(self) -> bool:
        """Whether a confidence interval is completely below zero."""
        return self.reward.high < 0 or self.pass_at_1.high < 0

    def document(self) -> dict[str, object]:
        return {
            "pass@1": self.pass_at_1.document(),
            "reward": self.reward.document(),
            "dropped": self.dropped,
            "changed": [each._asdict() for each in self.changes],
        }


def prompt_keys(digests: Mapping[int, str]) -> dict[int, str]:
    """Return the key of each example by its number, from the digests of the prompts. Equal prompts are numbered."""
    seen: Counter[str] = Counter()
    keys = {}
    for number, digest in sorted(digests.items()):
        keys[number] = f"{digest}.{seen[digest]}"
        seen[digest] += 1
    return keys


def scores_of(episodes: Iterable[Episode], prompt_field: str | None = None) -> list[PromptScores]:
    """Return the rewards by prompt, in the order of the data set. Episodes without a reward are left out."""
    rewards: dict[int, list[float]] = {}
    digests: dict[int, str] = {}
    for episode in episodes:
        if episode.reward is not None:
            rewards.setdefault(episode.prompt, []).append(episode.reward)
            digests[episode.prompt] = prompt_digest(episode.example, prompt_field)
    return [PromptScores(key, number, tuple(rewards[number])) for number, key in prompt_keys(digests).items()]


def pass_at(k: int, samples: int, passes: int) -> float:
    """Return the probability that at least one of ``k`` samples of a prompt, drawn without replacement, passes: the
    unbiased estimator of pass@k (Chen et al. 2021, arXiv:2107.03374, equation 1)."""
    return 1.0 - math.comb(samples - passes, k) / math.comb(samples, k)


def reward_estimate(scores: Sequence[PromptScores], confidence: float) -> Estimate:
    return mean_estimate([fmean(each.rewards) for each in scores], confidence)


def pass_estimate(scores: Sequence[PromptScores], k: int, threshold: float, confidence: float) -> Estimate | None:
    """Return pass@k over the prompts that have ``k`` samples; None if there is no such prompt."""
    shares = [pass_at(k, len(each.rewards), each.passes(threshold)) for each in scores if len(each.rewards) >= k]
    return share_estimate(shares, sum(len(each.rewards) for each in scores), confidence) if shares else None


def sample_counts(samples: int) -> list[int]:
    """Return the ``k`` of pass@k: powers of two up to the number of samples, and that number."""
    return sorted({*(2**power for power in range(samples.bit_length())), samples})


def estimates(scores: Sequence[PromptScores], samples: int, threshold: float, confidence: float) -> dict[str, Estimate]:
    """Return ``pass@k`` for each ``k`` for which a prompt has enough samples, and ``reward``; nothing without
    scores."""
    if not scores:
        return {}
    passes = {f"pass@{k}": pass_estimate(scores, k, threshold, confidence) for k in sample_counts(samples)}
    found = {name: estimate for name, estimate in passes.items() if estimate is not None}
    return {**found, "reward": reward_estimate(scores, confidence)}


def check_prompts(keys: Iterable[str], baseline: Sequence[PromptScores]) -> None:
    """Raise Conflict unless the prompts of one evaluation are a subset of those of the other."""
    here, there = set(keys), {each.key for each in baseline}
    if not there:
        raise Conflict("the baseline has no scored episode", hint="areal eval --resume tries its failed ones again")
    if not here & there or len(here & there) < min(len(here), len(there)):
        raise Conflict(
            f"the baseline has other prompts: {len(here & there)} of its {len(there)} are among the {len(here)} here",
            hint="evaluate both on the same data set",
        )


def compare(
    scores: Sequence[PromptScores], baseline: Sequence[PromptScores], threshold: float, confidence: float
) -> Comparison | None:
    """Return the differences over the prompts that have scores in both evaluations; None if there is none."""
    before = {each.key: each for each in baseline}
    pairs = [(before[each.key], each) for each in scores if each.key in before]
    if not pairs:
        return None
    rewards = [(fmean(old.rewards), fmean(new.rewards)) for old, new in pairs]
    passes = [new.passes(threshold) / len(new.rewards) - old.passes(threshold) / len(old.rewards) for old, new in pairs]
    return Comparison(
        mean_estimate([after - first for first, after in rewards], confidence),
        mean_estimate(passes, confidence),
        tuple(
            PromptChange(new.number, first, after)
            for (_, new), (first, after) in zip(pairs, rewards, strict=True)
            if first != after
        ),
    )


def mean_estimate(values: Sequence[float], confidence: float) -> Estimate:
    """Return the mean with Student's interval."""
    count, mean = len(values), fmean(values)
    if count < 2:
        return Estimate(mean, math.nan, math.nan, count)
    margin = student_quantile(0.5 + confidence / 2, count - 1) * math.sqrt(variance(values) / count)
    return Estimate(mean, mean - margin, mean + margin, count)


def ratio_estimate(totals: Sequence[float], weights: Sequence[float], confidence: float) -> Estimate:
    """Return the sum of ``totals`` / the sum of ``weights``, such as a loss per token of rows, with Student's interval
    clustered by row: its error is that of the linearized ratio (Cochran 1977, "Sampling Techniques", 6.3). Rows of
    weight 0 do not count; NaN if none is left."""
    known = [(total, weight) for total, weight in zip(totals, weights, strict=True) if weight > 0]
    if not known:
        return Estimate(math.nan, math.nan, math.nan, 0)
    weight = math.fsum(weight for _, weight in known)
    ratio = math.fsum(total for total, _ in known) / weight
    errors = mean_estimate([total - ratio * each for total, each in known], confidence)
    margin = (errors.high - errors.value) * len(known) / weight
    return Estimate(ratio, ratio - margin, ratio + margin, len(known))


def share_estimate(shares: Sequence[float], samples: int, confidence: float) -> Estimate:
    """Return the mean of shares between 0 and 1, of ``samples`` samples in all, with Wilson's interval."""
    count, mean = len(shares), fmean(shares)
    squared_error = variance(shares) / count if count > 1 else 0.0
    size = min(mean * (1 - mean) / squared_error, samples) if squared_error > 0 else count
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (mean + z * z / (2 * size)) / (1 + z * z / size)
    margin = z / (1 + z * z / size) * math.sqrt(mean * (1 - mean) / size + z * z / (4 * size * size))
    return Estimate(mean, max(0.0, centre - margin), min(1.0, centre + margin), count)


@dataclass(frozen=True)
class Difference:
    """The mean of ``b`` minus the mean of ``a``. Bounds and ``p`` are NaN if they cannot be computed: one side has a
    single value, or no value differs. ``method``: ``welch``, ``paired`` or ``none``."""

    value: float
    low: float
    high: float
    p: float
    method: str

    def document(self) -> dict[str, object]:
        numbers = {"difference": self.value, "low": self.low, "high": self.high, "p": self.p}
        return {name: None if math.isnan(each) else each for name, each in numbers.items()} | {"method": self.method}


def welch(a: Sequence[float], b: Sequence[float], confidence: float) -> Difference:
    """Compare two samples whose variances may differ (Welch 1947)."""
    value = fmean(b) - fmean(a)
    if min(len(a), len(b)) < 2:
        return Difference(value, math.nan, math.nan, math.nan, "none")
    parts = [variance(each) / len(each) for each in (a, b)]
    error = math.sqrt(sum(parts))
    weights = sum(part**2 / (len(each) - 1) for part, each in zip(parts, (a, b), strict=True))
    return _tested(value, error, sum(parts) ** 2 / weights if weights > 0 else math.inf, confidence, "welch")


def paired(a: Sequence[float], b: Sequence[float], confidence: float) -> Difference:
    """Compare pairs of values, such as two runs with the same seed."""
    changes = [after - before for before, after in zip(a, b, strict=True)]
    if len(changes) < 2:
        return Difference(fmean(changes), math.nan, math.nan, math.nan, "none")
    error = math.sqrt(variance(changes) / len(changes))
    return _tested(fmean(changes), error, len(changes) - 1, confidence, "paired")


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p-values of several tests, corrected for their number, however the tests depend on each other (Holm
    1979). A NaN is no test, and stays."""
    tested = sorted((p, place) for place, p in enumerate(ps) if not math.isnan(p))
    corrected, largest = [math.nan] * len(ps), 0.0
    for rank, (p, place) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        corrected[place] = largest
    return corrected


def _tested(value: float, error: float, freedom: float, confidence: float, method: str) -> Difference:
    if not error > 0 or not math.isfinite(freedom):
        return Difference(value, math.nan, math.nan, math.nan, method)
    margin = student_quantile(0.5 + confidence / 2, freedom) * error
    return Difference(value, value - margin, value + margin, student_tails(value / error, freedom), method)


def student_tails(t: float, freedom: float) -> float:
    """Return the two-sided tail probability of Student's t: that of a value at least as far from 0 as ``t``."""
    return _beta_share(freedom / (freedom + t * t), freedom / 2, 0.5)


def student_quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t for a probability of at least 0.5."""
    tails = 2 * (1 - probability)
    low, high = 0.0, 1.0
    while student_tails(high, freedom) > tails and high < 1e12:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tails(middle, freedom) > tails else (low, middle)
    return (low + high) / 2


def _beta_share(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function, by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_share(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    fraction, c, d = 1.0, 1.0, 0.0
    for step in range(_STEPS):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + term * d or _TINY)
        c = 1 + term / c or _TINY
        fraction *= c * d
        if abs(1 - c * d) < 1e-14:
            break
    return front * (fraction - 1) / a
