from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.inference.data_proxy.stops import StopScanner

ALPHABET = "ab\n#"
texts = st.text(ALPHABET, max_size=30)
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


def scan(stop_strings: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What was emitted at each step, and the stop string met."""
    scanner, emitted = StopScanner(stop_strings), []
    for piece in pieces:
        scanned = scanner.push(piece)
        emitted.append(scanned.text)
        if scanned.stop is not None:
            return emitted, scanned.stop
    return [*emitted, scanner.flush()], None


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize(
    ("stop", "text", "emitted"),
    [
        (["###"], "hello###world", "hello"),
        (["###"], "hello##world", "hello##world"),
        (["###"], "hello##", "hello##"),
        (["b", "abc"], "xabc", "xa"),
        (["abc", "bc"], "xabc", "x"),
        (["\n\n"], "one\n\ntwo", "one"),
        ([], "anything", "anything"),
        (["世界"], "你好世界", "你好"),
    ],
)
def test_stop_string_cuts_the_text_before_it(stop: list[str], text: str, emitted: str) -> None:
    assert "".join(scan(stop, [text])[0]) == emitted
    assert "".join(scan(stop, list(text))[0]) == emitted


@given(stops, texts, st.lists(st.integers(0, 40)))
def test_outcome_does_not_depend_on_how_the_text_is_cut(stop_strings: list[str], text: str, places: list[int]) -> None:
    whole, met = scan(stop_strings, [text])
    pieces, met_in_pieces = scan(stop_strings, cut(text, places))
    assert ("".join(pieces), met_in_pieces) == ("".join(whole), met)


@given(stops, texts)
def test_nothing_emitted_is_ever_part_of_a_stop_string_that_completes(stop_strings: list[str], text: str) -> None:
    emitted, met = scan(stop_strings, list(text))
    said = "".join(emitted)
    assert text.startswith(said)
    assert not any(stop in said for stop in stop_strings)
    if met is None:
        assert said == text
    else:
        assert text[len(said) :].startswith(met)


@given(stops, texts)
def test_text_is_held_back_no_longer_than_it_must(stop_strings: list[str], text: str) -> None:
    scanner, said = StopScanner(stop_strings), ""
    for position, char in enumerate(text):
        scanned = scanner.push(char)
        said += scanned.text
        if scanned.stop is not None:
            return
        held = text[len(said) : position + 1]
        assert held == "" or any(stop.startswith(held) for stop in stop_strings)
