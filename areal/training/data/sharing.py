"""Groups of rows over ranks and over minibatches: whole groups, nearly equal tokens, nobody with nothing."""

from __future__ import annotations

from collections.abc import Sequence

from areal.training.data.packing import partition


def shared_groups(lengths: Sequence[int], groups: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows of each rank, ascending. Raises ValueError where there are fewer groups than ranks."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    if len(members) < ranks:
        raise ValueError(f"{len(members)} groups are too few for {ranks} ranks: each needs one")
    ordered = list(members.values())
    parts = partition([sum(lengths[row] for row in rows) for rows in ordered], ranks)
    while any(not part for part in parts):  # few groups of very different sizes
        parts.sort(key=len)
        parts[0].append(parts[-1].pop())
    return [sorted(row for number in part for row in ordered[number]) for part in parts]


def minibatches(lengths: Sequence[int], count: int) -> list[list[int]]:
    """At most ``count`` sets of rows with nearly equal tokens, none empty."""
    return [part for part in partition(lengths, min(count, len(lengths))) if part]
