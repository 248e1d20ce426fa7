"""Token ids as text, one piece a token, by the tokenizer file that lies with a model. ``tokenizers`` is imported here
only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from areal.errors import ArealError, NotFound

Decode = Callable[[Sequence[int]], str]
_FILE = "tokenizer.json"
_BROKEN = "\ufffd"
_LONGEST = 64  # tokens that are held back at most: what is broken still then is broken text


class Decoder:
    """``texts`` says how the ids of a row read, in as many pieces. A character that several tokens make stands with
    the last of them, the others are empty."""

    def __init__(self, decode: Decode, source: str) -> None:
        self._decode = decode
        self.source = source

    def texts(self, ids: Sequence[int]) -> list[str]:
        found: list[str] = []
        start = read = 0
        for end in range(1, len(ids) + 1):
            before = self._decode(ids[start:read])
            whole = self._decode(ids[start:end])
            if whole.endswith(_BROKEN) and end < len(ids) and end - read < _LONGEST:
                found.append("")
                continue
            found.append(whole[len(before) :])
            start, read = read, end
        return found


def load_decoder(path: Path) -> Decoder:
    """From a model's folder, or the tokenizer's own file. Raises NotFound, and ArealError for what cannot be read."""
    file = path / _FILE if path.is_dir() else path
    if not file.is_file():
        raise NotFound(f"there is no tokenizer {file}", hint="give the model's folder with --tokenizer")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ArealError("decoding tokens needs tokenizers", hint="pip install tokenizers") from error
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a file that is none
        raise ArealError(f"cannot read the tokenizer {file}: {error}") from error
    return Decoder(lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)), str(file))
