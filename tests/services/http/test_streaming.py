from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from areal.services.http.service import EventCutter

EVENTS = st.lists(st.sampled_from([b"data: {}\n\n", b"data: a\ndata: b\n\n", b": note\n\n", b"data: x\r\n\r\n"]))


def test_half_an_event_is_held_until_it_is_whole() -> None:
    cutter = EventCutter()
    assert cutter.push(b'data: {"a"') == b""
    assert cutter.push(b": 1}\n") == b""
    assert cutter.push(b"\ndata: ") == b'data: {"a": 1}\n\n'
    assert cutter.rest() == b"data: "


@given(EVENTS, st.lists(st.integers(0, 100)), st.binary(max_size=5))
def test_whole_events_pass_however_they_are_cut_and_nothing_is_lost(
    events: list[bytes], places: list[int], tail: bytes
) -> None:
    tail = tail.replace(b"\n", b"").replace(b"\r", b"")
    stream = b"".join(events) + tail
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    cutter, passed = EventCutter(), b""
    for start, end in itertools.pairwise(edges):
        passed += cutter.push(stream[start:end])
        assert passed == b"" or passed.endswith((b"\n\n", b"\n\r\n"))
    assert passed == b"".join(events)
    assert cutter.rest() == tail


def test_event_longer_than_any_is_not_held_for_ever() -> None:
    cutter = EventCutter()
    huge = b"x" * (17 * 1024 * 1024)
    assert cutter.push(huge) == huge
