"""Text from tokens as they come, never a broken character.

The deltas of a stream, joined, are exactly what decoding all its tokens at once gives. A character whose bytes are
spread over several tokens appears when its last byte does; bytes that can belong to no character become U+FFFD.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_MAX_HELD = 8  # tokens; a character has at most four bytes


class TextStream(Protocol):
    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        ...

    def flush(self) -> str:
        """What was held back. Nothing may be pushed after it."""
        ...

    def whole(self, token_ids: Sequence[int]) -> str:
        """``push`` and ``flush`` of all there is, before anything else."""
        ...


class ByteStream:
    """For byte-level tokenizers: each token is bytes, so the text is their incremental UTF-8 decoding."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._holds = False  # the decoder, the beginning of a character

    def push(self, token_ids: Iterable[int]) -> str:
        data = b"".join(map(self._bytes_of, token_ids))
        if not self._holds:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._holds = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def whole(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self._bytes_of, token_ids)).decode("utf-8", "replace")


class WindowStream:
    """For every other tokenizer: decode a short window of the newest tokens, with and without what is new.

    ``context`` tokens before the new ones settle how their text begins (a leading space, for one).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._held) < _MAX_HELD:
            return ""
        if text:
            self._context, self._held = self._held, []
        return text

    def _new_text(self) -> str:
        return self._decode(self._context + self._held)[len(self._decode(self._context)) :]

    def flush(self) -> str:
        return self._new_text() if self._held else ""

    def whole(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids)


class MarkedStream:
    """Another stream, with the texts of some tokens that it would skip. Around those it begins anew."""

    def __init__(self, new_stream: Callable[[], TextStream], marks: Mapping[int, str]) -> None:
        self._new_stream = new_stream
        self._marks = marks
        self._stream = new_stream()

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def _push_one(self, token_id: int) -> str:
        mark = self._marks.get(token_id)
        if mark is None:
            return self._stream.push((token_id,))
        before, self._stream = self._stream.flush(), self._new_stream()
        return before + mark

    def flush(self) -> str:
        return self._stream.flush()

    def whole(self, token_ids: Sequence[int]) -> str:
        return self.push(token_ids) + self.flush()
