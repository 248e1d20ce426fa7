"""How a collection looks while it runs and when it is done."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from areal.cli.invocation import fancy
from areal.cli.output.table import field, render_table
from areal.cli.output.units import age
from areal.terminal import ESCAPE

if TYPE_CHECKING:
    from areal.collect.statistics import Tally

_BAR = 24
_EIGHTHS = " ▏▎▍▌▋▊▉"
_QUIET_S = 10.0  # between two lines off a terminal
_REDRAW = f"{ESCAPE}[1G{ESCAPE}[K"  # from the line's start
_WINDOW_S = 10.0  # rates are of the last so many seconds

_SPREADS = (
    ("reward", "reward"),
    ("turns", "turns"),
    ("prompt tokens", "prompt_tokens"),
    ("answer tokens", "answer_tokens"),
    ("episode seconds", "episode_seconds"),
)
_COLUMNS = (
    field("", "what"),
    *(field(name.upper(), name, right=True) for name in ("mean", "std", "min", "p50", "p90", "p99", "max")),
)


class ProgressLine:
    """One moving line on a terminal, a line every ten seconds elsewhere, nothing with -q."""

    def __init__(self, *, quiet: bool, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._moving = not quiet and fancy(self._stream)
        self._began = time.monotonic()
        self._said_at = self._began
        self._seen: list[tuple[float, int, int]] = []

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._moving:
            self._stream.write(_REDRAW)
            self._stream.flush()

    def __call__(self, tally: Tally) -> None:
        if self._quiet:
            return
        now = time.monotonic()
        if self._moving:
            text = self._text(tally, now)
            width = shutil.get_terminal_size().columns
            self._stream.write(f"{_REDRAW}{text[: width - 1]}")
        elif now - self._said_at >= _QUIET_S:
            self._said_at = now
            self._stream.write(self._text(tally, now) + "\n")
        self._stream.flush()

    def _text(self, tally: Tally, now: float) -> str:
        parts = [f"{tally.done}/{tally.planned}", bar(tally.done, tally.planned)] if self._moving else []
        parts = parts or [f"collected {tally.done} of {tally.planned}"]
        rewards = tally.rewards
        if rewards:
            parts.append(f"reward {sum(rewards) / len(rewards):.3f}")
        tokens_s, episodes_s = self._rates(tally, now)
        if tokens_s is not None:
            parts.append(f"{tokens_s:,.0f} tok/s")
        parts.append(f"{tally.running} running")
        if tally.failed:
            parts.append(f"{sum(tally.failed.values())} failed")
        left = tally.planned - tally.done - sum(tally.failed.values())
        parts.append(age(now - self._began))
        if episodes_s and left:
            parts.append(f"{age(left / episodes_s)} left")
        return "  ".join(parts)

    def _rates(self, tally: Tally, now: float) -> tuple[float | None, float | None]:
        """Tokens and episodes a second over the last moments."""
        fresh = tally.outcomes[tally.before :]
        tokens = self._seen[-1][1] if self._seen else 0
        counted = self._seen[-1][2] if self._seen else 0
        tokens += sum(each.generated_tokens for each in fresh[counted:])
        self._seen.append((now, tokens, len(fresh)))
        while len(self._seen) > 2 and self._seen[1][0] < now - _WINDOW_S:
            self._seen.pop(0)
        first = self._seen[0]
        seconds = now - first[0]
        if seconds < 1:
            return None, None
        return (tokens - first[1]) / seconds, (len(fresh) - first[2]) / seconds


def bar(done: int, total: int, width: int = _BAR) -> str:
    """``███▌    ``: eighths of a character."""
    eighths = width * 8 * done // total if total else 0
    full, rest = divmod(min(eighths, width * 8), 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width, "·")


def summary_page(document: Mapping[str, Any]) -> str:
    """For people; ``summary.json`` has the same numbers."""
    head = f"{document['done']} of {document['planned']} episodes of {document['model']} in {document['output']}"
    if document["done_before"]:
        head += f" ({document['done_before']} of them by earlier runs)"
    rows = [{"what": title, **document[name]} for title, name in _SPREADS if document[name] is not None]
    parts = [head, render_table(rows, _COLUMNS)] if rows else [head]
    return "\n\n".join([*parts, "\n".join(_facts(document))])


def _facts(document: Mapping[str, Any]) -> list[str]:
    facts = []
    if document["tokens_per_second"] and document["done"] > document["done_before"]:
        speed = f"{document['tokens_per_second']:,.0f} tokens/s, {document['episodes_per_second']:g} episodes/s"
        facts.append(f"speed      {speed}, {age(document['seconds'])}")
    groups = document["groups"]
    if groups is not None:
        all_equal = f"{groups['all_equal']} of {groups['prompts']} prompts have samples that are all rewarded alike"
        facts.append(
            f"groups     best of n {groups['best_of_n']:g}; {all_equal}, {groups['all_best']} of them the best"
        )
    if document["truncated"]:
        facts.append(f"truncated  {document['truncated']} answers were cut at the longest")
    if document["unrewarded"]:
        facts.append(f"unrewarded {document['unrewarded']}")
    if document["retries"]:
        facts.append(f"retries    {document['retries']}")
    if document["failures"]:
        kinds = ", ".join(f"{kind} {count}" for kind, count in document["failures"].items())
        facts.append(f"failed     {document['failed']}: {kinds}")
    return facts
