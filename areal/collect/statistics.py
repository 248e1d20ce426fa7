"""What a run gave, in numbers. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.trajectories.record import Episode


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the summary needs of an episode. ``prompt_tokens`` are those of its longest interaction."""

    prompt: int
    reward: float | None
    turns: int
    prompt_tokens: int
    generated_tokens: int
    truncated: bool
    seconds: float


def outcome_of(episode: Episode) -> Outcome:
    rows = episode.interactions
    return Outcome(
        episode.prompt,
        episode.reward,
        len(rows),
        max((row.prompt_tokens for row in rows), default=0),
        sum(row.generated_tokens for row in rows),
        any(row.truncated for row in rows),
        episode.seconds,
    )


@dataclass
class Tally:
    """Grows while a run goes on. ``before``: how many of ``outcomes`` earlier runs have written."""

    planned: int
    outcomes: list[Outcome] = field(default_factory=list)
    before: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    retried: int = 0
    running: int = 0

    @property
    def done(self) -> int:
        return len(self.outcomes)

    @property
    def rewards(self) -> list[float]:
        return [each.reward for each in self.outcomes if each.reward is not None]


def summary(tally: Tally, seconds: float) -> dict[str, Any]:
    """As ``summary.json`` has it. Rates are of this run alone; tokens are generated ones."""
    outcomes = tally.outcomes
    fresh = sum(each.generated_tokens for each in outcomes[tally.before :])
    return {
        "planned": tally.planned,
        "done": tally.done,
        "done_before": tally.before,
        "failed": sum(tally.failed.values()),
        "missing": tally.planned - tally.done,
        "failures": dict(sorted(tally.failed.items())),
        "retries": tally.retried,
        "seconds": round(seconds, 3),
        "generated_tokens": sum(each.generated_tokens for each in outcomes),
        "tokens_per_second": round(fresh / seconds, 2) if seconds > 0 else None,
        "episodes_per_second": round((tally.done - tally.before) / seconds, 3) if seconds > 0 else None,
        "reward": spread(tally.rewards),
        "unrewarded": tally.done - len(tally.rewards),
        "groups": groups(outcomes),
        "turns": spread([each.turns for each in outcomes]),
        "prompt_tokens": spread([each.prompt_tokens for each in outcomes]),
        "answer_tokens": spread([each.generated_tokens for each in outcomes]),
        "episode_seconds": spread([each.seconds for each in outcomes]),
        "truncated": sum(each.truncated for each in outcomes),
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, standard deviation (of the whole, not of a sample) and quantiles; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in ordered) / len(ordered))
    return {
        "mean": round(mean, 6),
        "std": round(deviation, 6),
        "min": ordered[0],
        "p50": quantile(ordered, 0.5),
        "p90": quantile(ordered, 0.9),
        "p99": quantile(ordered, 0.99),
        "max": ordered[-1],
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least value that ``share`` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def groups(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """Prompts with several rewarded samples: in how many all samples agree, which teach a group-relative method
    nothing. None where there is no such prompt."""
    by_prompt: dict[int, list[float]] = {}
    for each in outcomes:
        if each.reward is not None:
            by_prompt.setdefault(each.prompt, []).append(each.reward)
    several = [rewards for rewards in by_prompt.values() if len(rewards) > 1]
    if not several:
        return None
    best = max(max(rewards) for rewards in several)
    agreeing = [rewards for rewards in several if min(rewards) == max(rewards)]
    return {
        "prompts": len(several),
        "all_best": sum(rewards[0] == best for rewards in agreeing),
        "all_equal": len(agreeing),
        "best_of_n": round(math.fsum(max(rewards) for rewards in several) / len(several), 6),
    }


def failed_for(failures: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(failures.items(), key=lambda item: -item[1]))
