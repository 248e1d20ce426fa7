"""Groups of samples as the page has them: the facts of each sample, and samples side by side with their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from areal.reconcilers.home_view import fields_document
from areal.trajectories.document import shown_episode
from areal.trajectories.steps import GroupSummary, SampleSummary, read_sample
from areal.trajectories.view import TokenDecoder

_SIDE_BY_SIDE = 16  # samples of a group with their tokens
_TOKENS = 60_000  # of all samples side by side


def group_row(group: GroupSummary) -> dict[str, object]:
    return {
        "group": group.name,
        "mean": group.mean,
        "spread": group.spread,
        "withoutSpread": group.is_without_spread,
        "samples": [sample_row(each) for each in group.samples],
    }


def sample_row(sample: SampleSummary) -> dict[str, object]:
    return {name: each for name, each in fields_document(sample).items() if name not in ("line", "group")}


def side_by_side(path: Path, samples: Sequence[SampleSummary], decoder: TokenDecoder | None) -> dict[str, object]:
    """``episodes``: samples of a file with their tokens, as many as fit; ``leftOut``: how many do not."""
    shown: list[dict[str, object]] = []
    tokens = 0
    for each in samples[:_SIDE_BY_SIDE]:
        if shown and tokens + each.tokens > _TOKENS:
            break
        tokens += each.tokens
        shown.append({**sample_row(each), "shown": shown_episode(read_sample(path, each.line), decoder)})
    return {"episodes": shown, "leftOut": len(samples) - len(shown)}
