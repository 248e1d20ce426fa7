from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.services.inference.data_proxy.generation import Choice, StopScanner
from areal.services.inference.data_proxy.tokenizer import TextCodec, load_codec
from areal.services.inference.engines.base import EngineDelta, FinishReason
from tests.services.tokenizer_folder import write_tokenizer


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return load_codec(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def deltas(ids: list[int], step: int, finish: FinishReason, stop_token: int | None = None) -> list[EngineDelta]:
    out = []
    for start in range(0, len(ids), step):
        part = tuple(ids[start : start + step])
        last = start + step >= len(ids)
        out.append(
            EngineDelta(
                0,
                part,
                tuple(-float(token) for token in part),
                tuple(range(start, start + len(part))),
                finish_reason=finish if last else None,
                stop_token_id=stop_token if last else None,
            )
        )
    return out


def grow(choice: Choice, parts: list[EngineDelta]) -> str:
    text = ""
    for part in parts:
        text += choice.push(part).text
        if choice.finish_reason is not None:
            break
    assert text == choice.text
    assert len(choice.token_ids) == len(choice.logprobs) == len(choice.versions)
    return text


@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_stop_string_ends_the_choice_and_keeps_the_tokens_up_to_it(codec: TextCodec, step: int) -> None:
    ids = codec.encode("Hello there, STOP friend", add_special_tokens=False)
    until = codec.encode("Hello there, STOP", add_special_tokens=False)
    choice = Choice(0, codec.stream(), ["STOP"])
    assert grow(choice, deltas(ids, step, FinishReason.LENGTH)) == "Hello there, "
    assert choice.finish_reason is FinishReason.STOP
    assert choice.token_ids == until
    assert choice.versions == list(range(len(until)))


def test_stop_token_that_is_plain_text_is_kept_as_token_and_not_as_text(codec: TextCodec) -> None:
    ids = codec.encode("ab", add_special_tokens=False)
    choice = Choice(0, codec.stream(), [])
    assert grow(choice, deltas(ids, 1, FinishReason.STOP, stop_token=ids[-1])) == "a"
    assert choice.token_ids == ids


def test_text_held_for_a_stop_string_comes_out_at_the_end(codec: TextCodec) -> None:
    choice = Choice(0, codec.stream(), ["friends"])
    ids = codec.encode("Hello friend", add_special_tokens=False)
    assert grow(choice, deltas(ids, 1, FinishReason.LENGTH)) == "Hello friend"
    assert choice.finish_reason is FinishReason.LENGTH


def test_broken_character_at_the_end_comes_out_as_a_replacement(codec: TextCodec) -> None:
    ids = codec.encode("世", add_special_tokens=False)[:-1]
    choice = Choice(0, codec.stream(), [])
    assert grow(choice, deltas(ids, 1, FinishReason.LENGTH)) == "\ufffd"


def test_stop_string_met_only_by_the_flush_still_stops(codec: TextCodec) -> None:
    ids = codec.encode("世", add_special_tokens=False)[:-1]
    choice = Choice(0, codec.stream(), ["\ufffd"])
    assert grow(choice, deltas(ids, 1, FinishReason.LENGTH)) == ""
    assert choice.finish_reason is FinishReason.STOP


@settings(max_examples=100, deadline=None)
@given(
    text=st.text("abc é世#", max_size=20),
    stops=st.lists(st.text("abc#", min_size=1, max_size=3), max_size=2),
    step=st.integers(1, 6),
)
def test_choice_is_the_same_however_the_engine_flushes(
    codec: TextCodec, text: str, stops: list[str], step: int
) -> None:
    ids = codec.encode(text + "!", add_special_tokens=False)
    one, other = (Choice(0, codec.stream(), stops) for _ in range(2))
    assert grow(one, deltas(ids, 1, FinishReason.LENGTH)) == grow(other, deltas(ids, step, FinishReason.LENGTH))
    assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)


ALPHABET = "ab\n#"
texts = st.text(ALPHABET, max_size=30)
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


def scan(stop_strings: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What was emitted at each step, and the stop string met."""
    scanner, emitted = StopScanner(stop_strings), []
    for piece in pieces:
        text, stop = scanner.push(piece)
        emitted.append(text)
        if stop is not None:
            return emitted, stop
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
        emitted, stop = scanner.push(char)
        said += emitted
        if stop is not None:
            return
        held = text[len(said) : position + 1]
        assert held == "" or any(stop.startswith(held) for stop in stop_strings)
