"""Two results of one benchmark, figure by figure; and results that are older than the code they measure.

A figure is a number at a dotted path of a result's JSON. A member of a list is named by its own words and sizes
(``rows.areal get.ratio``), a list of numbers is a sample: its median counts, its range is its spread. A figure is worse
when it moved in the wrong direction by more than the largest of: the benchmark's least spread, the spread of the old
result, the spread of the new one. Pure but for ``commits_since``, which asks git.
"""

from __future__ import annotations

import fnmatch
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

Better = Literal["lower", "higher"]
_AS_FAST = 1.25
_SIZES = (
    "batch",
    "concurrency",
    "connections",
    "objects",
    "relays",
    "replicas",
    "sessions",
    "share",
    "size",
    "threads",
    "workers",
)


@dataclass(frozen=True)
class Benchmark:
    """``measures``: paths of the repository whose change makes the result old. ``figures``: patterns of paths that are
    compared, and which direction is better. ``interval``: names of a middle, a low and a high value beside a figure.
    ``ratios``: every figure is a ratio within one run; others cannot be compared between two machines. ``command``: the
    script's name and its arguments, where they are not ``name`` alone."""

    name: str
    measures: tuple[str, ...]
    figures: Mapping[str, Better] = field(default_factory=dict)
    interval: tuple[str, str, str] | None = None
    least_spread: float = 0.1
    ratios: bool = False
    command: tuple[str, ...] = ()

    @property
    def script(self) -> str:
        return f"benchmarks/{(self.command or (self.name,))[0]}.py"


@dataclass(frozen=True)
class Figure:
    """``spread``: how far from the value, relative to it, the measured range reaches."""

    path: str
    value: float
    spread: float
    better: Better


@dataclass(frozen=True)
class Change:
    """``before`` or ``after`` is None where only one of the results has the figure. ``by``: relative, positive is
    worse."""

    path: str
    before: float | None
    after: float | None
    by: float = 0.0
    allowed: float = 0.0
    comparable: bool = True  # False: of two machines

    @property
    def worse(self) -> bool:
        return self.comparable and self.by > self.allowed


def figures_of(benchmark: Benchmark, result: Mapping[str, Any]) -> dict[str, Figure]:
    found = {}
    for path, value, spread in _leaves(result, "", 0.0, benchmark.interval):
        better = _direction(benchmark, result, path)
        if better is not None:
            found[path] = Figure(path, value, spread, better)
    return found


def _direction(benchmark: Benchmark, result: Mapping[str, Any], path: str) -> Better | None:
    verdicts: Sequence[Mapping[str, Any]] = result.get("verdicts", ())
    for verdict in verdicts:  # these say for themselves what is wanted
        if path == f"verdicts.{_label(verdict)}.measured":
            return "lower" if str(verdict["wanted"]).startswith(("under", "at most")) else "higher"
    return next((better for pattern, better in benchmark.figures.items() if fnmatch.fnmatchcase(path, pattern)), None)


def _leaves(
    node: Any, path: str, spread: float, interval: tuple[str, str, str] | None
) -> Iterator[tuple[str, float, float]]:
    """(path, value, relative spread) of every number below ``node``."""
    if isinstance(node, Mapping):
        if interval is not None and all(isinstance(node.get(name), int | float) for name in interval):
            middle, low, high = (float(node[name]) for name in interval)
            spread = max(middle - low, high - middle) / middle if middle else 0.0
        for name, value in node.items():
            yield from _leaves(value, f"{path}.{name}" if path else str(name), spread, interval)
    elif isinstance(node, list):
        numbers = [float(item) for item in node if isinstance(item, int | float) and not isinstance(item, bool)]
        if numbers and len(numbers) == len(node):
            middle = statistics.median(numbers)
            yield path, middle, (max(numbers) - min(numbers)) / abs(middle) if middle else 0.0
            return
        for item in node:
            if isinstance(item, Mapping):
                yield from _leaves(item, f"{path}.{_label(item)}", spread, interval)
    elif isinstance(node, int | float) and not isinstance(node, bool):
        yield path, float(node), spread


def _label(item: Mapping[str, Any]) -> str:
    """What names a member of a list: its texts, and its sizes."""
    words = [value for name, value in item.items() if isinstance(value, str) and name != "wanted"]
    sizes = [f"{name}={item[name]}" for name in _SIZES if isinstance(item.get(name), int | float)]
    return " ".join([*words, *sizes])


def compare(benchmark: Benchmark, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every figure of either result, in order. Absolute figures of two machines are shown and not judged."""
    before, after = figures_of(benchmark, old), figures_of(benchmark, new)
    comparable = benchmark.ratios or _same_machine(old.get("machine"), new.get("machine"))
    changes = []
    for path in dict.fromkeys([*before, *after]):
        was, now = before.get(path), after.get(path)
        if was is None or now is None:
            changes.append(Change(path, was.value if was else None, now.value if now else None))
            continue
        up = (now.value - was.value) / abs(was.value) if was.value else float(now.value != 0)
        allowed = max(benchmark.least_spread, was.spread, now.spread)
        changes.append(Change(path, was.value, now.value, up if was.better == "lower" else -up, allowed, comparable))
    return changes


def _same_machine(old: Any, new: Any) -> bool:
    """Of one processor, and as fast on the day: shared machines of one name have differed by 2.4 times."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return True
    before, after = old.get("python_ms"), new.get("python_ms")
    as_fast = before is None or after is None or max(before, after) <= _AS_FAST * min(before, after)
    return bool(old.get("cpu") == new.get("cpu") and as_fast)


def commits_since(repository: Path, paths: Sequence[str], date: str) -> list[str]:
    """Commits to ``paths`` that were written after ``date`` (as in a result), newest first, and "uncommitted changes"
    where there are some. By the author's date, which a rebase keeps. Raises CalledProcessError."""
    after = datetime.fromisoformat(date).timestamp()
    lines = _git(repository, "log", "--no-merges", "--format=%at %h %s", "--", *paths)
    found = [line.partition(" ")[2] for line in lines if int(line.partition(" ")[0]) > after]
    return ["uncommitted changes", *found] if _git(repository, "status", "--porcelain", "--", *paths) else found


def _git(repository: Path, *words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=repository, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()
