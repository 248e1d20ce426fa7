"""A caller that lags behind its stream holds back every engine connection that feeds it, and none afterwards."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from areal.services.inference.data_proxy.answering import Said
from areal.services.inference.data_proxy.choice import Update
from areal.services.inference.data_proxy.prepared import Prepared
from areal.services.inference.engines.base import FinishReason


@dataclass
class Source:
    held: bool = False

    def pause(self) -> None:
        self.held = True

    def resume(self) -> None:
        self.held = False


@dataclass
class Out:
    """A stream whose caller lags behind when the test says so."""

    source: Any = None
    said: list[bytes] = field(default_factory=list)

    def hold_back(self, source: Any) -> None:
        self.source = source

    def feed(self, data: bytes) -> None:
        self.said.append(data)


def stream_of(out: Out, choices: int = 1) -> Said:
    shape = SimpleNamespace(opening=lambda: b"open ", update=lambda update: update.text.encode())
    frame = SimpleNamespace(choices=[None] * choices)

    def open_stream(first: bytes) -> Out:
        out.said.append(first)
        return out

    prepared = SimpleNamespace(shape=shape, frame=frame, open_stream=open_stream)
    return Said(cast(Prepared, prepared))


def update(text: str, finish: FinishReason | None = None) -> Update:
    return Update(0, text, 0, 1, finish)


def test_caller_that_lags_behind_holds_back_each_connection_also_one_that_comes_later() -> None:
    out, first, late = Out(), Source(), Source()
    said = stream_of(out)
    said.flowing(first)
    said.update(update("a"))
    out.source.pause()
    said.flowing(late)
    assert first.held and late.held
    out.source.resume()
    assert not first.held and not late.held


def test_opening_is_numbered_before_what_comes_with_it() -> None:
    out, numbers = Out(), itertools.count()
    said = stream_of(out)
    shape = SimpleNamespace(
        opening=lambda: b"%d open " % next(numbers),
        update=lambda update: b"%d %b " % (next(numbers), update.text.encode()),
    )
    said._prepared.shape = cast(Any, shape)
    said.update(update("a"))
    said.update(update("b"))
    assert b"".join(out.said) == b"0 open 1 a 2 b "


def test_connections_are_let_go_at_the_end() -> None:
    out, source = Out(), Source()
    said = stream_of(out)
    said.flowing(source)
    said.update(update("a"))
    said.let_go()
    said.pause()
    assert out.source is None and not source.held


def test_last_choices_end_waits_for_the_record() -> None:
    out = Out()
    said = stream_of(out, choices=2)
    said.update(update("a"))
    said.update(update("b", FinishReason.STOP))
    said.update(update("c", FinishReason.LENGTH))
    assert out.said == [b"open a", b"b"] and said.last == b"c"


def test_answer_of_one_step_says_its_opening_only_before_the_record() -> None:
    out = Out()
    said = stream_of(out)
    said.update(update("a", FinishReason.STOP))
    assert out.said == [b"open "] and said.last == b"a"
