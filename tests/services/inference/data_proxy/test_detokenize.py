from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

from areal.services.inference.data_proxy.detokenize import TextStream, WindowStream
from areal.services.inference.data_proxy.tokenizer import TextCodec, load_codec
from tests.services.tokenizer_folder import CORPUS, write_tokenizer

TEXT = "Hello 世界 👩‍👩‍👧 naïve \n  two spaces"


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return load_codec(str(write_tokenizer(tmp_path_factory.mktemp("byte-level"))))


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """The Llama-2 kind: spaces as U+2581, unknown characters as byte tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    data = json.loads(tokenizer.to_str())
    for added in data["added_tokens"]:  # in the real ones byte tokens are not special; the trainer knows no such kind
        added["special"] = not added["content"].startswith("<0x")
    return Tokenizer.from_str(json.dumps(data))


def whole(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids))
    return text


def run(stream: TextStream, ids: list[int], step: int = 1) -> list[str]:
    pieces = [stream.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    return [*pieces, stream.flush()]


@pytest.mark.parametrize("step", [1, 2, 7])
def test_byte_level_stream_never_emits_a_broken_character(codec: TextCodec, step: int) -> None:
    pieces = run(codec.stream(), codec.encode(TEXT, add_special_tokens=False), step)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 330), max_size=40), skip=st.booleans())
def test_byte_level_stream_of_any_tokens_is_what_decoding_them_at_once_gives(
    codec: TextCodec, ids: list[int], skip: bool
) -> None:
    known = [token_id for token_id in ids if token_id < 300 or codec.bytes_of(token_id)]
    assert "".join(run(codec.stream(skip_special=skip), known)) == codec.decode(known, skip_special=skip)
    assert codec.stream(skip_special=skip).whole(known) == codec.decode(known, skip_special=skip)


def test_byte_level_stream_skips_special_tokens_and_shows_them_when_asked(codec: TextCodec) -> None:
    ids = codec.encode("hi<|im_end|>", add_special_tokens=False)
    assert "".join(run(codec.stream(), ids)) == "hi"
    assert "".join(run(codec.stream(skip_special=False), ids)) == "hi<|im_end|>"


def test_token_beyond_the_vocabulary_is_no_text(codec: TextCodec) -> None:
    assert "".join(run(codec.stream(), [10**6])) == ""


@pytest.mark.parametrize("text", ["Hello there", "Hello  世界 and 👩‍👧!", "0123 quick"])
@pytest.mark.parametrize("step", [1, 3])
def test_window_stream_of_a_sentencepiece_tokenizer_keeps_spaces_and_characters(
    sentencepiece: Tokenizer, text: str, step: int
) -> None:
    ids = sentencepiece.encode(text).ids
    pieces = run(WindowStream(lambda part: whole(sentencepiece, part)), ids, step)
    assert "".join(pieces) == whole(sentencepiece, ids) == text
    assert WindowStream(lambda part: whole(sentencepiece, part)).whole(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_window_stream_of_garbage_bytes_does_not_hold_them_for_ever(sentencepiece: Tokenizer) -> None:
    lone = sentencepiece.token_to_id("<0xE4>")
    stream = WindowStream(lambda part: whole(sentencepiece, part))
    said = "".join(stream.push([lone]) for _ in range(40))
    assert len(said) >= 24


def test_token_texts_and_bytes_are_exact(codec: TextCodec, sentencepiece: Tokenizer) -> None:
    ids = codec.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(codec.bytes_of, ids)).decode() == TEXT
    pieces = TextCodec(sentencepiece, template=None, end_ids=(), max_positions=None)
    ids = pieces.encode("Hello 世", add_special_tokens=False)
    assert b"".join(map(pieces.bytes_of, ids)).decode() == " Hello 世"
