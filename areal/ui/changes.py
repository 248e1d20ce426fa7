"""What changed, as server-sent events: the cursors of the views that a page shows, compared once a second.

A page opens one stream and names its views. It gets all their cursors once, so that it sees a change between its read
and the opening of the stream, then only those that differ. Pages that show the same view share one look at the files.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from urllib.parse import parse_qsl

from areal.ui.views import Marks

PERIOD_S = 1.0
PING_S = 15.0  # after so long without an event, a comment keeps proxies from closing the stream

Look = Callable[[str, Mapping[str, str]], Marks]


class SharedMarks:
    """The cursors of each watched view, looked up at most once in a period whatever the number of pages."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._known: dict[str, tuple[float, Marks]] = {}
        self._lock = threading.Lock()

    def of(self, watch: str) -> Marks:
        """``watch``: a view with its query, ``job?name=x``. Cursors that cannot be read are one that says why."""
        with self._lock:
            now = time.monotonic()
            at, marks = self._known.get(watch, (-PERIOD_S, {}))
            if now - at < PERIOD_S / 2:
                return marks
            name, _, query = watch.partition("?")
            try:
                marks = self._look(name, dict(parse_qsl(query)))
            except Exception as error:  # noqa: BLE001 - the answer has begun, and cannot become an error
                marks = {"unreadable": str(error)}
            self._known = {key: entry for key, entry in self._known.items() if now - entry[0] < 10 * PERIOD_S}
            self._known[watch] = (now, marks)
            return marks


def events(
    watched: Sequence[str], shared: SharedMarks, ended: threading.Event, left: Callable[[], bool]
) -> Iterator[bytes]:
    """Yield the stream of one page: first all cursors, then what differs, and a comment when nothing did for a while.
    It ends with the server, or once the page has ``left``."""
    seen: dict[str, Marks] = {}
    sent_at = time.monotonic()
    while not ended.is_set() and not left():
        for watch in watched:
            marks, before = shared.of(watch), seen.get(watch)
            differing = changed(before, marks)
            if before is None or differing:
                seen[watch], sent_at = marks, time.monotonic()
                kind, data = "marks" if before is None else "changed", json.dumps({"watch": watch, "marks": differing})
                yield f"event: {kind}\ndata: {data}\n\n".encode()
        if time.monotonic() - sent_at >= PING_S:
            sent_at = time.monotonic()
            yield b": still here\n\n"
        ended.wait(PERIOD_S)


def changed(before: Marks | None, now: Marks) -> dict[str, int | str | None]:
    """Return the cursors that differ; None for one that is gone. Pure."""
    old = before or {}
    gone = {name: None for name in old if name not in now}
    return {name: cursor for name, cursor in now.items() if old.get(name) != cursor} | gone
