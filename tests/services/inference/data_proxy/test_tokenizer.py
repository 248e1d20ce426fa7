from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from areal.errors import UsageFault
from areal.services.inference.data_proxy.tokenizer import (
    Abandoned,
    CodecPool,
    TextCodec,
    TextStream,
    TooLong,
    WindowStream,
    _abandoned,
    check_wanted,
    encoded_in_pieces,
    load_codec,
)
from tests.services.tokenizer_folder import CORPUS, write_tokenizer

USER = [{"role": "user", "content": "hi"}]


def test_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match=r"tokenizer\.json"):
        load_codec(str(tmp_path))


def test_folder_with_a_broken_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageFault, match=r"tokenizer\.json"):
        load_codec(str(tmp_path))


def test_folder_with_a_broken_configuration_is_refused_by_name(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageFault, match=r"config\.json"):
        load_codec(str(tmp_path))


def test_end_tokens_are_merged_from_all_configurations(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0, "max_position_embeddings": 77}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    codec = load_codec(str(tmp_path))
    assert codec.end_ids == {0, 1, 2}
    assert codec.max_positions == 77


def test_template_flag_overrides_file_and_folder(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    given = tmp_path / "mine.jinja"
    given.write_text("from the flag")
    rendered = []
    for flag in (None, str(given)):
        chat = load_codec(str(tmp_path), flag).chat
        assert chat is not None
        rendered.append(chat.template.text(USER, None, {}))
    assert rendered == ["from the file", "from the flag"]


def test_default_template_is_chosen_among_named_ones(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    chat = load_codec(str(tmp_path)).chat
    assert chat is not None and chat.template.text(USER, None, {}) == "plain"


def test_invalid_template_is_refused_with_line(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("ok\n{% if %}")
    with pytest.raises(UsageFault, match="line 2"):
        load_codec(str(tmp_path))


def test_missing_template_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match="nowhere"):
        load_codec(str(write_tokenizer(tmp_path)), str(tmp_path / "nowhere"))


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_codec(str(folder))


def test_oversized_text_is_refused_before_full_encoding(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []
    whole = codec._tokenizer

    class Counting:
        def encode_batch(self, texts: list[str], **options: Any) -> object:
            encoded.extend(map(len, texts))
            return whole.encode_batch(texts, **options)

    monkeypatch.setattr(codec, "_tokenizer", Counting())
    with pytest.raises(TooLong):
        codec.encode("word " * 4_000_000, add_special_tokens=True, most=2048)
    assert sum(encoded) <= 65_536


@given(
    st.lists(st.sampled_from(["a", " ", "\n", "word", "é", "日本", "🙂", "    ", "0"]), max_size=60),
    st.integers(1, 900),
)
@settings(deadline=None, max_examples=60)
def test_bounded_encoding_of_fitting_text_is_unchanged(codec: TextCodec, parts: list[str], times: int) -> None:
    text = "".join(parts) * times
    plain = codec._whole(text, True)
    assert codec.encode(text, add_special_tokens=True) == plain
    assert codec.encode(text, add_special_tokens=True, most=len(plain)) == plain
    if len(text) > 65_536:
        with pytest.raises(TooLong):
            codec.encode(text, add_special_tokens=True, most=len(plain) - 1)


WORDS = ("Hello there, friend! ", "日本語 ", "  \n\n", "x" * 40, "<|im_end|>\n", "0123456789", "don't ", "é🙂é ")


@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
def test_chunked_encoding_of_long_text_matches_whole(kind: str, tmp_path: Path) -> None:
    """Whatever is around the cuts, and with the special tokens that the tokenizer adds."""
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if kind == "metaspace":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
        tokenizer.train_from_iterator(WORDS * 9, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("A $A B", special_tokens=[("A", 1), ("B", 2)])
    codec = TextCodec(tokenizer, template=None, end_ids=[], max_positions=None)
    sizes = list[int]()
    whole = codec._tokens
    codec._tokens = lambda text: sizes.append(len(text)) or whole(text)  # type: ignore[method-assign,func-returns-value]
    random = Random(7)
    for _ in range(2):
        text = "".join(random.choice(WORDS) for _ in range(12_000))
        sizes.clear()
        ids = codec.encode(text, add_special_tokens=True)
        assert ids == codec._whole(text, True) and (ids[0], ids[-1]) == (1, 2)
        assert len(sizes) > 5 and max(sizes) <= 16_384
        assert encoded_in_pieces(whole, text, lambda so_far: None) == ids[1:-1]


class CountingTokenizer:
    """A tokenizer that counts the texts that it encodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.encoded = 0

    def encode_batch_fast(self, texts: list[str], **options: bool) -> Any:
        self.encoded += len(texts)
        return self._tokenizer.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def test_group_prompt_is_encoded_once(sentencepiece: Tokenizer) -> None:
    tokenizer = CountingTokenizer(sentencepiece)
    codec = TextCodec(cast(Tokenizer, tokenizer), template=None, end_ids=(), max_positions=None)
    first = codec.encode("Hello there", add_special_tokens=False)
    tokens, tokenizer.encoded = list(first), 0
    first.append(1)
    assert [codec.encode("Hello there", add_special_tokens=False) for _ in range(8)] == [tokens] * 8
    assert tokenizer.encoded == 0
    assert codec.encode("Hello there", add_special_tokens=True) == sentencepiece.encode("Hello there").ids


def test_single_word_text_is_encoded_whole(codec: TextCodec) -> None:
    for text in ("aa" * 34_000, "ab" * 34_000, "😀" * 66_000):
        assert codec.encode(text, add_special_tokens=False) == codec._whole(text, False)


def test_long_encoding_can_stop_between_chunks(codec: TextCodec) -> None:
    left = threading.Event()
    token = _abandoned.set(left)
    try:
        whole, pieces = codec._tokens, list[int]()

        def tokens(text: str) -> Any:
            pieces.append(len(text))
            left.set()
            return whole(text)

        with pytest.raises(Abandoned), MonkeyPatch.context() as patch:
            patch.setattr(codec, "_tokens", tokens)
            codec.encode("word " * 1_000_000, add_special_tokens=False)
        assert len(pieces) == 1
    finally:
        _abandoned.reset(token)


async def test_abandoned_codec_work_does_not_delay_next() -> None:
    pool, begun, stopped = CodecPool(2), threading.Semaphore(0), threading.Semaphore(0)

    def endless() -> None:
        begun.release()
        try:
            while True:
                check_wanted()
        except Abandoned:
            stopped.release()
            raise

    tasks = [asyncio.create_task(pool.run(endless, 1e9)) for _ in range(4)]  # two run, two wait
    for _ in range(2):
        assert await asyncio.to_thread(begun.acquire, timeout=60)
    for task in (*tasks[2:], *tasks[:2]):  # else a waiting one could begin, where a running one ends
        task.cancel()
    assert await pool.run(lambda: "next", 1e9) == "next"
    for _ in range(2):
        assert await asyncio.to_thread(stopped.acquire, timeout=60)
    assert not begun.acquire(blocking=False)  # those that waited never began


TEXT = "Hello 世界 👩‍👩‍👧 naïve \n  two spaces"


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
def test_byte_level_stream_matches_whole_decoding(codec: TextCodec, ids: list[int], skip: bool) -> None:
    known = [token_id for token_id in ids if token_id < 300 or codec.bytes_of(token_id)]
    assert "".join(run(codec.stream(skip_special=skip), known)) == codec.decode(known, skip_special=skip)
    assert codec.stream(skip_special=skip).whole(known) == codec.decode(known, skip_special=skip)


def test_byte_level_stream_hides_special_tokens_by_default(codec: TextCodec) -> None:
    ids = codec.encode("hi<|im_end|>", add_special_tokens=False)
    assert "".join(run(codec.stream(), ids)) == "hi"
    assert "".join(run(codec.stream(skip_special=False), ids)) == "hi<|im_end|>"


def test_out_of_vocabulary_token_has_no_text(codec: TextCodec) -> None:
    assert "".join(run(codec.stream(), [10**6])) == ""


@pytest.mark.parametrize("text", ["Hello there", "Hello  世界 and 👩‍👧!", "0123 quick"])
@pytest.mark.parametrize("step", [1, 3])
def test_window_stream_keeps_spaces_and_characters(sentencepiece: Tokenizer, text: str, step: int) -> None:
    ids = sentencepiece.encode(text).ids
    pieces = run(WindowStream(lambda part: whole(sentencepiece, part)), ids, step)
    assert "".join(pieces) == whole(sentencepiece, ids) == text
    assert WindowStream(lambda part: whole(sentencepiece, part)).whole(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_window_stream_eventually_emits_garbage_bytes(sentencepiece: Tokenizer) -> None:
    lone = sentencepiece.token_to_id("<0xE4>")
    assert lone is not None
    stream = WindowStream(lambda part: whole(sentencepiece, part))
    text = "".join(stream.push([lone]) for _ in range(40))
    assert len(text) >= 24


def test_token_texts_and_bytes_are_exact(codec: TextCodec, sentencepiece: Tokenizer) -> None:
    ids = codec.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(codec.bytes_of, ids)).decode() == TEXT
    pieces = TextCodec(sentencepiece, template=None, end_ids=(), max_positions=None)
    ids = pieces.encode("Hello 世", add_special_tokens=False)
    assert b"".join(map(pieces.bytes_of, ids)).decode() == " Hello 世"


def test_slow_template_is_loaded_or_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    slow = "{% for a in range(9999) %}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(slow)
    assert load_codec(str(tmp_path)).chat is not None
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(endless)
    with pytest.raises(UsageFault, match="the chat template is refused"):
        load_codec(str(tmp_path))
