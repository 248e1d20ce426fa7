"""A slow client pauses every engine connection of its stream, and none afterwards; impossible deltas fail the call."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.inference.data_proxy.generation import ChoiceUpdate, GenerationCall, StreamWriter, validate_delta
from areal.services.inference.engines.base import EngineDelta, EngineFailed, FinishReason


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


def test_caller_that_lags_behind_holds_back_each_connection_also_one_that_comes_later() -> None:
    out, first, late = Out(), Flow(), Flow()
    writer = stream_of(out)
    writer.add_flow(first)
    writer.write(update("a"))
    out.source.pause()
    writer.add_flow(late)
    assert first.held and late.held
    out.source.resume()
    assert not first.held and not late.held


def test_opening_is_numbered_before_what_comes_with_it() -> None:
    out, numbers = Out(), itertools.count()
    serializer = SimpleNamespace(
        opening=lambda: b"%d open " % next(numbers),
        update=lambda update: b"%d %b " % (next(numbers), update.text.encode()),
    )
    writer = stream_of(out, serializer=serializer)
    writer.write(update("a"))
    writer.write(update("b"))
    assert b"".join(out.written) == b"0 open 1 a 2 b "


def test_connections_are_let_go_at_the_end() -> None:
    out, source = Out(), Flow()
    writer = stream_of(out)
    writer.add_flow(source)
    writer.write(update("a"))
    writer.close()
    writer.pause()
    assert out.source is None and not source.held


def test_last_choices_end_waits_for_the_record() -> None:
    out = Out()
    writer = stream_of(out, choices=2)
    writer.write(update("a"))
    writer.write(update("b", FinishReason.STOP))
    writer.write(update("c", FinishReason.LENGTH))
    assert out.written == [b"open a", b"b"] and writer.held == b"c"


def test_answer_of_one_step_says_its_opening_only_before_the_record() -> None:
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
def test_what_can_be_true_passes(tokens: list[Any], choices: int) -> None:
    for index in range(choices):
        validate_delta(delta(tokens, index), choices)


@given(TOKENS, st.sampled_from([math.nan, math.inf, -math.inf]), st.integers(0))
def test_logprob_that_is_no_number_is_the_engines_failure(tokens: list[Any], logprob: float, place: int) -> None:
    tokens.insert(place % (len(tokens) + 1), (1, logprob, 0))
    with pytest.raises(EngineFailed, match="log-probability"):
        validate_delta(delta(tokens), 1)


@pytest.mark.parametrize("token", [-1, 2**31, 7.5, "7", None, True])
def test_token_that_is_none_is_the_engines_failure(token: Any) -> None:
    with pytest.raises(EngineFailed, match="token"):
        validate_delta(delta([(token, -0.5, 0)]), 1)


@pytest.mark.parametrize("index", [-1, 2])
def test_choice_that_nobody_asked_for_is_the_engines_failure(index: int) -> None:
    with pytest.raises(EngineFailed, match="choice"):
        validate_delta(delta([], index), 2)


@pytest.mark.parametrize("short", ["logprobs", "versions"])
def test_lists_out_of_step_are_the_engines_failure(short: str) -> None:
    fields: dict[str, Any] = {"token_ids": (1,), "logprobs": (-0.5,), "versions": (0,), short: ()}
    with pytest.raises(EngineFailed, match="sent 1 tokens"):
        validate_delta(EngineDelta(0, **fields), 1)


@pytest.mark.parametrize("logprobs", [("no",), (None,), None])
def test_logprobs_of_another_kind_are_the_engines_failure(logprobs: Any) -> None:
    with pytest.raises(EngineFailed, match="makes no sense"):
        validate_delta(EngineDelta(0, (1,), logprobs, (0,)), 1)
