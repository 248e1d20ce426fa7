"""``/logs/KIND/NAME``: the newest lines of an object's processes in order of time, older ones on demand, and new ones.

Filters are applied here, so that a match far back is found: a request reads backwards until it has enough lines or has
read ``_MOST_BYTES``, and then says where to go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from heapq import merge
from typing import Any, NamedTuple

from areal.errors import NotFound, UsageFault
from areal.files import stamp
from areal.reconcilers.home_view import HomeView
from areal.runtime.backends import Backends
from areal.runtime.backends.base import LIVE, RunState
from areal.runtime.causes import starts
from areal.runtime.logs import Matches, Older, Place, PlacedLine, end_of, lines_after, lines_before
from areal.state.objects import ObjectStore
from areal.terminal import without_colours
from areal.ui.views import ViewContext

_LINES = 1000
_MOST_BYTES = 16 << 20  # of all processes, a request
_MOST_AFTER = 1 << 20  # of a process
_LEVELS = {"": ("info", "warning", "error"), "warning": ("warning", "error"), "error": ("error",)}
_START = "start"  # the place before the first line
Places = Mapping[str, Place | None]
_Lines = list[tuple[float, str, PlacedLine]]
_Page = tuple[_Lines, dict[str, str | None]]  # lines, and where to go on: ``older`` and ``cursor``


class _LogStream(NamedTuple):
    state: RunState
    paths: tuple[str, ...]

    @property
    def uid(self) -> str:
        return self.state.spec.uid

    @property
    def ended(self) -> bool:
        return self.state.phase not in LIVE


def read(view: ViewContext) -> dict[str, object]:
    streams, every = _streams(view)
    if view.query.get("previous"):
        lines, places = _previous(streams, _matches(view))
    elif after := view.query.get("after"):
        lines, places = _newer(streams, _matches(view), _parse(after))
    else:
        before = view.query.get("before")
        lines, places = _older(streams, _matches(view), _parse(before) if before else None)
    names = [stream.uid for stream in streams]
    return {
        "processes": [_process(stream.state) for stream in streams],
        "components": sorted({f"{state.spec.component}" for state in every}),
        "replicas": sorted({state.spec.replica for state in every}),
        **places,
        "lines": [_row(names.index(uid), line) for _, uid, line in lines],
    }


def marks(view: ViewContext) -> Mapping[str, int | str]:
    """Return the size of the newest file of each process."""
    if view.query.get("previous"):
        return {}
    sizes = {stream.uid: stamp(stream.paths[-1]) for stream in _streams(view)[0] if stream.paths}
    return {uid: f"{found[2]:x}.{found[0]:x}" for uid, found in sizes.items() if found is not None}


def _streams(view: ViewContext) -> tuple[list[_LogStream], list[RunState]]:
    """Return the processes that are asked for, and all of the object. Raises NotFound without any."""
    ref = view.ref()
    home = HomeView(view.home)
    ObjectStore(view.home).expect(ref)
    every = home.logged(ref)
    component, replica = view.query.get("component") or None, view.number("replica", -1, least=-1)
    chosen = home.logged(ref, component, None if replica < 0 else replica)
    if every and not chosen:
        has = ", ".join(dict.fromkeys(f"{state.spec.component}/{state.spec.replica}" for state in every))
        raise NotFound(f"{ref} has no such process", hint=f"it has: {has}")
    backend = Backends(view.home.root)
    return [_LogStream(state, tuple(backend.log_paths(state.spec.uid))) for state in chosen], every


def _matches(view: ViewContext) -> Matches:
    words = view.query.get("q", "").lower()
    levels = _LEVELS.get(view.query.get("level", ""))
    if levels is None:
        raise UsageFault(f"level={view.query['level'][:40]!r} is none of warning, error")
    if not words and len(levels) == len(_LEVELS[""]):
        return lambda line: True
    return lambda line: words in line.text.lower() and line.level in levels


def _older(streams: list[_LogStream], matches: Matches, before: Places | None) -> _Page:
    """Return the newest lines, or those before ``before``: the last ones of each process, of these the last."""
    ends = before if before is not None else {each.uid: end_of(each.paths, ended=each.ended) for each in streams}
    asked = [(stream, end) for stream in streams if (end := ends.get(stream.uid)) is not None]
    share = max(1 << 17, _MOST_BYTES // max(1, len(asked)))
    windows = {stream.uid: lines_before(stream.paths, end, _LINES, matches, most_bytes=share) for stream, end in asked}
    lines = _merged({uid: window.lines for uid, window in windows.items()})[-_LINES:]
    taken = Counter(uid for _, uid, _ in lines)
    older = {uid: _before(window, taken[uid]) for uid, window in windows.items()}
    found = {"older": _text(older) if any(older.values()) else None}
    return lines, found if before is not None else {**found, "cursor": _text(ends)}


def _before(window: Older, taken: int) -> Place | None:
    """Return where to go on before the last ``taken`` lines of a window."""
    if taken == len(window.lines):
        return window.start
    first_left = window.lines[len(window.lines) - taken - 1]
    return Place(first_left.place.inode, first_left.end)


def _newer(streams: list[_LogStream], matches: Matches, after: Places) -> _Page:
    windows = {
        stream.uid: lines_after(
            stream.paths, after.get(stream.uid), matches, most_bytes=_MOST_AFTER, ended=stream.ended
        )
        for stream in streams
    }
    lines = _merged({uid: window.lines for uid, window in windows.items()})
    return lines, {"cursor": _text({uid: window.end for uid, window in windows.items()})}


def _previous(streams: list[_LogStream], matches: Matches) -> _Page:
    """Return the lines of the start before the present one of each process."""
    lines: dict[str, list[PlacedLine]] = {}
    for stream in streams:
        groups = starts(stream.paths)
        texts = groups[-2] if len(groups) > 1 else []
        placed = [PlacedLine(0.0, without_colours(text)[:4000], Place(0, index)) for index, text in enumerate(texts)]
        lines[stream.uid] = [line for line in placed if matches(line)][-_LINES:]
    return _merged(lines), {"older": None}


def _merged(lines: Mapping[str, list[PlacedLine]]) -> _Lines:
    """Lines of all processes by time; those of one keep their order."""
    return list(merge(*([(line.at, uid, line) for line in each] for uid, each in lines.items()), key=lambda e: e[0]))


def _row(index: int, line: PlacedLine) -> list[Any]:
    return [index, line.at or None, line.level, line.text, str(line.place), *([line.cut] if line.cut else [])]


def _process(state: RunState) -> dict[str, object]:
    spec = state.spec
    return {
        "uid": spec.uid,
        "owner": spec.owner,
        "component": spec.component,
        "replica": spec.replica,
        "state": state.phase.value,
    }


def _text(places: Mapping[str, Place | None]) -> str:
    return ",".join(f"{uid}={place if place is not None else _START}" for uid, place in places.items())


def _parse(text: str) -> Places:
    places: dict[str, Place | None] = {}
    try:
        for part in text.split(",") if text else []:
            uid, _, place = part.rpartition("=")
            places[uid] = None if place == _START else Place.parse(place)
    except ValueError:
        raise UsageFault("the cursor of the logs is malformed", hint="reload the page") from None
    return places
