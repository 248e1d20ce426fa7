from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.services.inference.data_proxy.choice import Choice
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
