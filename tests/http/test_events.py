"""Server-sent events: by the rules of WHATWG, however the bytes are split."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from areal.http.events import LONGEST_EVENT, EventReader, ServerEvent

LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """A stream, and the data and name of each event that has data."""
    text, wanted, end = draw(st.sampled_from(["", "\ufeff"])), [], draw(ENDS)
    for _ in range(draw(st.integers(0, 5))):
        lines = draw(st.lists(LINE, max_size=3))
        name, comment, space = draw(LINE), draw(LINE), draw(st.sampled_from(["", " "]))
        for line in [f":{comment}", f"event:{space}{name}", *(f"data: {line}" for line in lines), "retry: 1", ""]:
            text += line + end
        if lines and lines != [""]:
            wanted.append(("\n".join(lines).encode(), (name if space else name.removeprefix(" ")).encode()))
    return text.encode(), wanted


def parts_of(stream: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


def read(parts: list[bytes]) -> list[ServerEvent]:
    reader = EventReader()
    events = [event for part in parts for event in reader.feed(part)]
    last = reader.end()
    return events + ([last] if last is not None else [])


@given(streams(), st.lists(st.integers(0, 1000), max_size=20))
@example((b"data: a\r\r\ndata: b\r\n\r\n", [(b"a", b""), (b"b", b"")]), [8, 9])
@example((b"data: a\n\ndata: b\n\n", [(b"a", b""), (b"b", b"")]), [9])
def test_events_are_independent_of_chunking(stream: tuple[bytes, list[tuple[bytes, bytes]]], places: list[int]) -> None:
    text, wanted = stream
    for parts in (parts_of(text, places), [text[place : place + 1] for place in range(len(text))]):
        events = read(parts)
        assert [(event.data, event.name) for event in events if event.data] == wanted
        assert b"".join(event.raw for event in events) == text


@given(st.binary(max_size=60), st.lists(st.integers(0, 100), max_size=10))
def test_any_bytes_are_kept_and_read_independent_of_chunking(text: bytes, places: list[int]) -> None:
    events = read(parts_of(text, places))
    assert b"".join(event.raw for event in events) == text
    assert [event.data for event in events if event.data] == [event.data for event in read([text]) if event.data]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (b"data\n\n", []),
        (b"data: \n\n", []),
        (b"data:a\ndata: b\ndata:  c\n\n", [b"a\nb\n c"]),
        (b": keep-alive\n\ndata: a\n\n", [b"a"]),
        (b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n", [b"a"]),
        (b"dataset: a\nid: 1\n\n", []),
        (b"data: a\ndata\n\n", [b"a\n"]),
        (b"data: cut", [b"cut"]),
    ],
)
def test_event_data_follows_sse_rules(text: bytes, wanted: list[bytes]) -> None:
    assert [event.data for event in read([text]) if event.data] == wanted


def test_endless_event_is_refused_at_limit() -> None:
    reader = EventReader()
    with pytest.raises(ValueError, match="larger than"):
        for _ in range(20):
            assert reader.feed(b"x" * (LONGEST_EVENT // 16)) == []
