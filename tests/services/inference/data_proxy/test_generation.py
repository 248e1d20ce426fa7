"""Choices grow by deltas; a slow client pauses every engine connection of its stream, and none afterwards; impossible
deltas fail the call."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.services.inference.data_proxy.generation import (
    Choice,
    ChoiceUpdate,
    GenerationCall,
    StopScanner,
    StreamWriter,
    validate_delta,
)
from areal.services.inference.data_proxy.tokenizer import TextCodec, load_codec
from areal.services.inference.engines.base import EngineDelta, EngineFailed, FinishReason
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
def test_stop_string_ends_choice_and_keeps_its_tokens(codec: TextCodec, step: int) -> None:
    ids = codec.encode("Hello there, STOP friend", add_special_tokens=False)
    until = codec.encode("Hello there, STOP", add_special_tokens=False)
    choice = Choice(0, codec.stream(), ["STOP"])
    assert grow(choice, deltas(ids, step, FinishReason.LENGTH)) == "Hello there, "
    assert choice.finish_reason is FinishReason.STOP
    assert choice.token_ids == until
    assert choice.versions == list(range(len(until)))


def test_plain_stop_token_is_kept_as_token_only(codec: TextCodec) -> None:
    ids = codec.encode("ab", add_special_tokens=False)
    choice = Choice(0, codec.stream(), [])
    assert grow(choice, deltas(ids, 1, FinishReason.STOP, stop_token=ids[-1])) == "a"
    assert choice.token_ids == ids


def test_text_held_for_stop_string_is_flushed_at_end(codec: TextCodec) -> None:
    choice = Choice(0, codec.stream(), ["friends"])
    ids = codec.encode("Hello friend", add_special_tokens=False)
    assert grow(choice, deltas(ids, 1, FinishReason.LENGTH)) == "Hello friend"
    assert choice.finish_reason is FinishReason.LENGTH


def test_incomplete_character_at_end_becomes_replacement(codec: TextCodec) -> None:
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
def test_choice_is_independent_of_engine_flushes(codec: TextCodec, text: str, stops: list[str], step: int) -> None:
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
def test_stop_string_truncates_text(stop: list[str], text: str, emitted: str) -> None:
    assert "".join(scan(stop, [text])[0]) == emitted
    assert "".join(scan(stop, list(text))[0]) == emitted


@given(stops, texts, st.lists(st.integers(0, 40)))
def test_stop_outcome_is_independent_of_chunking(stop_strings: list[str], text: str, places: list[int]) -> None:
    whole, met = scan(stop_strings, [text])
    pieces, met_in_pieces = scan(stop_strings, cut(text, places))
    assert ("".join(pieces), met_in_pieces) == ("".join(whole), met)


@given(stops, texts)
def test_emitted_text_never_contains_part_of_stop_string(stop_strings: list[str], text: str) -> None:
    emitted, met = scan(stop_strings, list(text))
    emitted_text = "".join(emitted)
    assert text.startswith(emitted_text)
    assert not any(stop in emitted_text for stop in stop_strings)
    if met is None:
        assert emitted_text == text
    else:
        assert text[len(emitted_text) :].startswith(met)


@given(stops, texts)
def test_text_is_held_only_as_long_as_needed(stop_strings: list[str], text: str) -> None:
    scanner, emitted_text = StopScanner(stop_strings), ""
    for position, char in enumerate(text):
        emitted, stop = scanner.push(char)
        emitted_text += emitted
        if stop is not None:
            return
        held = text[len(emitted_text) : position + 1]
        assert held == "" or any(stop.startswith(held) for stop in stop_strings)


# Streams.


@dataclass
class Flow:
    held: bool = False

    def pause(self) -> None:
        self.held = True

    def resume(self) -> None:
        self.held = False


@dataclass
class Out:
    """A stream whose caller lags behind when the test says so."""

    source: Any = None
    written: list[bytes] = field(default_factory=list)

    def set_backpressure(self, source: Any) -> None:
        self.source = source

    def write_nowait(self, data: bytes) -> None:
        self.written.append(data)


def stream_of(out: Out, choices: int = 1, serializer: SimpleNamespace | None = None) -> StreamWriter:
    serializer = serializer or SimpleNamespace(opening=lambda: b"open ", update=lambda update: update.text.encode())
    state = SimpleNamespace(choices=[None] * choices)

    def open_stream(first: bytes) -> Out:
        out.written.append(first)
        return out

    call = SimpleNamespace(serializer=serializer, state=state, open_stream=open_stream)
    return StreamWriter(cast(GenerationCall, call))


def update(text: str, finish: FinishReason | None = None) -> ChoiceUpdate:
    return ChoiceUpdate(0, text, 0, 1, finish)


def test_slow_caller_holds_every_connection() -> None:
    out, first, late = Out(), Flow(), Flow()
    writer = stream_of(out)
    writer.add_flow(first)
    writer.write(update("a"))
    out.source.pause()
    writer.add_flow(late)
    assert first.held and late.held
    out.source.resume()
    assert not first.held and not late.held


def test_opening_is_numbered_before_first_event() -> None:
    out, numbers = Out(), itertools.count()
    serializer = SimpleNamespace(
        opening=lambda: b"%d open " % next(numbers),
        update=lambda update: b"%d %b " % (next(numbers), update.text.encode()),
    )
    writer = stream_of(out, serializer=serializer)
    writer.write(update("a"))
    writer.write(update("b"))
    assert b"".join(out.written) == b"0 open 1 a 2 b "


def test_connections_are_closed_at_the_end() -> None:
    out, source = Out(), Flow()
    writer = stream_of(out)
    writer.add_flow(source)
    writer.write(update("a"))
    writer.close()
    writer.pause()
    assert out.source is None and not source.held


def test_end_of_last_choice_waits_for_record() -> None:
    out = Out()
    writer = stream_of(out, choices=2)
    writer.write(update("a"))
    writer.write(update("b", FinishReason.STOP))
    writer.write(update("c", FinishReason.LENGTH))
    assert out.written == [b"open a", b"b"] and writer.held == b"c"


def test_one_step_answer_sends_only_opening_before_record() -> None:
    out = Out()
    writer = stream_of(out)
    writer.write(update("a", FinishReason.STOP))
    assert out.written == [b"open "] and writer.held == b"a"


# Sound deltas pass; any other is the engine's failure.

TOKENS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e30, 1.0), st.integers(-1, 2**40)), max_size=8)


def delta(tokens: list[Any], index: int = 0) -> EngineDelta:
    ids, logprobs, versions = zip(*tokens, strict=True) if tokens else ((), (), ())
    return EngineDelta(index, ids, logprobs, versions)


@given(TOKENS, st.integers(1, 4))
def test_valid_deltas_pass(tokens: list[Any], choices: int) -> None:
    for index in range(choices):
        validate_delta(delta(tokens, index), choices)


@given(TOKENS, st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0))
def test_non_number_logprob_is_engine_failure(tokens: list[Any], logprob: float, place: int) -> None:
    tokens.insert(place % (len(tokens) + 1), (1, logprob, 0))
    with pytest.raises(EngineFailed, match="log-probability"):
        validate_delta(delta(tokens), 1)


@pytest.mark.parametrize("token", [-1, 2**31, 7.5, "7", None, True])
def test_invalid_token_is_engine_failure(token: Any) -> None:
    with pytest.raises(EngineFailed, match="token"):
        validate_delta(delta([(token, -0.5, 0)]), 1)


@pytest.mark.parametrize("index", [-1, 2])
def test_unrequested_choice_is_an_engine_failure(index: int) -> None:
    with pytest.raises(EngineFailed, match="choice"):
        validate_delta(delta([], index), 2)


@pytest.mark.parametrize("short", ["logprobs", "versions"])
def test_mismatched_delta_lists_are_engine_failure(short: str) -> None:
    fields: dict[str, Any] = {"token_ids": (1,), "logprobs": (-0.5,), "versions": (0,), short: ()}
    with pytest.raises(EngineFailed, match="sent 1 tokens"):
        validate_delta(EngineDelta(0, **fields), 1)


@pytest.mark.parametrize("logprobs", [("no",), (None,), None])
def test_malformed_logprobs_are_engine_failure(logprobs: Any) -> None:
    with pytest.raises(EngineFailed, match="is malformed"):
        validate_delta(EngineDelta(0, (1,), logprobs, (0,)), 1)
