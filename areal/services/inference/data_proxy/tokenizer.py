"""Text codec: loads a model's ``tokenizer.json``, configuration and chat template, without the package transformers.

Long encoding and rendering run in a small thread pool (``tokenizers`` releases the GIL), so that a long prompt delays
no other stream. Short work runs inline: switching threads would cost more.

A long text is encoded in pieces, which takes little memory, stops at the context length, and is cancelled when the
client disconnects. Only a text whose pieces cannot be joined is encoded whole, without a way to cancel.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jinja2
from tokenizers import Tokenizer

from areal.conversation import Chat, Template
from areal.conversation.budget import TakesLonger, TemplateBudget, budget_in_use
from areal.dataclasses import dataclass
from areal.errors import UsageFault
from areal.files import parse_json
from areal.hub import model_folder
from areal.services.inference.recorder.records import token_array

# The exact bytes of each token. Byte-level BPE writes each byte as one printable character, by the table of GPT-2 that
# all byte-level tokenizers share: printable Latin-1 stands for itself, the other bytes are moved up from U+0100 in
# order. SentencePiece vocabularies write a space as U+2581 and a lone byte as ``<0xNN>``.

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


@cache
def byte_of_char() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table |= {chr(256 + position): byte for position, byte in enumerate(moved)}
    return table


def byte_level_bytes(piece: str) -> bytes:
    """Return the bytes of a byte-level token. An added token is plain text, encoded as UTF-8."""
    table = byte_of_char()
    try:
        return bytes(table[char] for char in piece)
    except KeyError:
        return piece.encode()


def sentencepiece_bytes(piece: str) -> bytes:
    lone = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(lone[1], 16)]) if lone else piece.replace(_SPACE, " ").encode()


# Long texts are encoded in pieces: in little memory, and cancellable between pieces. Neighboring pieces overlap. Both
# are cut in the middle of a run of tokens that they share, with equal ids at the same characters: a token depends on
# nearby text only, so both pieces continue alike from there. Without such a run (one very long word) the text is
# encoded whole.

Token = tuple[int, int, int]
"""Id, first character, last character + 1."""

PIECE = 16_384  # characters
_SHARED = 1_024  # characters by which neighboring pieces overlap
_RUN = 32  # tokens that both pieces must share


def encoded_in_pieces(
    tokens_of: Callable[[str], Sequence[Token]], text: str, settled: Callable[[int], None]
) -> list[int] | None:
    """Return the token ids of ``text``; None if its pieces cannot be joined. ``settled`` is called with the number of
    final tokens after each piece, and may raise."""
    ids: list[int] = []
    same: dict[int, int] = {}  # one int object for each id: a long list then takes eight bytes a token
    last: Sequence[Token] = ()
    start = 0
    while True:
        end = min(len(text), start + PIECE)
        piece = [(token, start + first, start + after) for token, first, after in tokens_of(text[start:end])]
        if start:
            joint = _joint(last, piece)
            if joint is None:
                return None
            ids += [same.setdefault(token, token) for token, _, _ in last[: joint[0]]]
            piece = piece[joint[1] :]
        if end == len(text):
            ids += [same.setdefault(token, token) for token, _, _ in piece]
            settled(len(ids))
            return ids
        settled(len(ids))
        last, start = piece, end - _SHARED


def _joint(left: Sequence[Token], right: Sequence[Token]) -> tuple[int, int] | None:
    """Return where to cut the two pieces: in the middle of the first run that they share."""
    begins = right[0][1] if right else 0
    places = {token: place for place, token in enumerate(left) if token[1] >= begins}
    for place, token in enumerate(right):
        other = places.get(token)
        if other is not None and list(left[other : other + _RUN]) == list(right[place : place + _RUN]):
            if len(left) - other < _RUN or len(right) - place < _RUN:
                return None
            return other + _RUN // 2, place + _RUN // 2
    return None


# Incremental detokenization. The deltas of a stream, joined, equal the decoding of all its tokens. A character whose
# bytes are spread over several tokens appears with its last byte; invalid bytes become U+FFFD.

_REPLACEMENT = "\ufffd"
_MAX_HELD = 8  # tokens; a character has at most four bytes


class TextStream(Protocol):
    """Decodes the tokens of one choice as they arrive."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete."""

    def flush(self) -> str:
        """Return the held text. Nothing may be pushed afterwards."""

    def whole(self, token_ids: Sequence[int]) -> str:
        """Return the text of all tokens in one step, on an unused stream: the same text as ``push`` and ``flush``."""


class ByteStream:
    """Decodes tokens of a byte-level tokenizer, which are bytes: decodes UTF-8 incrementally."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._rest = b""  # of a character that is incomplete

    def push(self, token_ids: Iterable[int]) -> str:
        data = self._rest + b"".join(map(self._bytes_of, token_ids))
        text, read = codecs.utf_8_decode(data, "replace")
        self._rest = data[read:]
        return text

    def flush(self) -> str:
        return self._rest.decode("utf-8", "replace")

    def whole(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self._bytes_of, token_ids)).decode("utf-8", "replace")


class WindowStream:
    """Decodes tokens of any other tokenizer: decodes a short window of the newest tokens, with and without the new
    ones. The context before the new tokens decides how their text begins (a leading space, for example)."""

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
    """Adds the texts of some special tokens to a stream that skips them; the stream restarts after each of them."""

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


_T = TypeVar("_T")


_LONG = 4 * PIECE
_REPEATED = 64  # texts whose tokens are kept: the rollouts of a group begin with the same prompt
_PER_CUT = 16  # the most tokens that cutting a text in one place adds


class TooLong(Exception):
    """A text has more tokens than its limit."""


class Abandoned(Exception):
    """The task that waits for the work was cancelled because its client disconnected."""


_abandoned: ContextVar[threading.Event | None] = ContextVar("_abandoned", default=None)


def check_wanted() -> None:
    """Raise Abandoned if the result is no longer needed. Long work calls this between its steps."""
    event = _abandoned.get()
    if event is not None and event.is_set():
        raise Abandoned


@dataclass(frozen=True)
class _Bound:
    """Called after each piece of a text with its number of tokens so far. Raises TooLong and Abandoned."""

    most: int | None

    def __call__(self, so_far: int) -> None:
        check_wanted()
        if self.most is not None and so_far > self.most:
            raise TooLong


class TextCodec:
    """Converts text to token ids and back for one model. Immutable; its methods may be called from any thread.

    ``tool_chat``: the chat of conversations with tools, for which some models have another template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: Template | None,
        end_ids: Sequence[int],
        max_positions: int | None,
        vocab_size: int = 0,
        tool_template: Template | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.max_positions = max_positions
        self.vocab_size = vocab_size or tokenizer.get_vocab_size(with_added_tokens=True)  # the model's, if configured
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._byte_level = _is_byte_level(json.loads(tokenizer.to_str()).get("decoder"))
        self.bytes_of: Callable[[int], bytes] = lru_cache(maxsize=65536)(self._bytes_of)
        self._visible: Callable[[int], bytes] = lru_cache(maxsize=65536)(
            lambda token_id: b"" if token_id in self._special else self._bytes_of(token_id)
        )
        self._repeated = lru_cache(maxsize=_REPEATED)(lambda *text: token_array(self._whole(*text)))
        self.chat = self._chat(template, end_ids, frozenset(added)) if template is not None else None
        self.tool_chat = self._chat(tool_template, end_ids, frozenset(added)) if tool_template else self.chat
        self.end_ids = frozenset(end_ids)
        try:
            with _AT_LOAD.used():
                for chat in filter(None, (self.chat, self.tool_chat)):
                    self.end_ids |= chat.end_ids
        except TakesLonger as error:
            raise UsageFault(f"the chat template is refused: for two short messages, {error}") from error
        self.sorted_end_ids = tuple(sorted(self.end_ids))

    def _chat(self, template: Template, end_ids: Sequence[int], added_ids: frozenset[int]) -> Chat:
        return Chat(
            template,
            encode=partial(self.encode, add_special_tokens=False),
            decode=partial(self.decode, skip_special=False),
            eos_ids=end_ids,
            added_ids=added_ids,
            bytewise=self._byte_level,
        )

    def encode(self, text: str, *, add_special_tokens: bool, most: int | None = None) -> list[int]:
        """Encode a text. Raises TooLong if it surely has more than ``most`` tokens, and Abandoned."""
        check_wanted()
        if len(text) * ENCODE_US > _INLINE_US and budget_in_use().budget is _INLINE:
            raise TakesLonger("the text is long")
        if len(text) > _LONG and (ids := encoded_in_pieces(self._tokens, text, _Bound(most))) is not None:
            before, after = self._around if add_special_tokens else ([], [])
            return [*before, *ids, *after]
        if most is not None and len(text) > max(most, PIECE):
            self.count(text, most)
        if len(text) <= PIECE:
            return self._repeated(text, add_special_tokens).tolist()
        return self._whole(text, add_special_tokens)

    def _whole(self, text: str, add_special_tokens: bool) -> list[int]:
        # Only the batch method can leave out the offsets.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def _tokens(self, text: str) -> list[Token]:
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return [(token, *offsets) for token, offsets in zip(encoding.ids, encoding.offsets, strict=True)]

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer adds before and after a text."""
        plain, added = self._whole("a", False), self._whole("a", True)
        start = next(n for n in range(len(added)) if added[n : n + len(plain)] == plain)
        return added[:start], added[start + len(plain) :]

    def count(self, text: str, most: int | None = None) -> int:
        """Count the tokens of a text in pieces, where each cut may add a few. Raises TooLong once there are surely more
        than ``most``, and Abandoned."""
        total = 0
        for cuts, start in enumerate(range(0, len(text), PIECE)):
            check_wanted()
            piece = text[start : start + PIECE]
            (encoding,) = self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)
            total += len(encoding.ids)
            if most is not None and total - cuts * _PER_CUT > most:
                raise TooLong
        return total

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        if self._byte_level:  # takes a tenth of the tokenizer's time
            return b"".join(map(self._visible if skip_special else self.bytes_of, ids)).decode("utf-8", "replace")
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def stream(self, *, skip_special: bool = True, shown: Iterable[str] = ()) -> TextStream:
        """Return a new incremental decoder for one choice. ``shown``: the texts of special tokens to keep."""
        if self._byte_level:
            if not skip_special:
                return ByteStream(self.bytes_of)
            if not shown:
                return ByteStream(self._visible)
            hidden = self._special - {self.special_id(text) for text in shown}
            return ByteStream(lambda token_id: b"" if token_id in hidden else self.bytes_of(token_id))
        ids = frozenset(token_id for text in shown if (token_id := self.special_id(text)) is not None)
        if not skip_special or not ids:
            return WindowStream(lambda ids: self.decode(ids, skip_special=skip_special))
        return MarkedStream(
            lambda: WindowStream(self.decode), {token_id: self.token_text(token_id) for token_id in ids}
        )

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with this text, if there is one."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id if token_id in self._special else None

    def token_text(self, token_id: int) -> str:
        return self.bytes_of(token_id).decode("utf-8", "replace")

    def _bytes_of(self, token_id: int) -> bytes:
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:  # beyond the vocabulary: embeddings are often padded to a round number
            return b""
        if token_id in self._special:
            return piece.encode()
        return byte_level_bytes(piece) if self._byte_level else sentencepiece_bytes(piece)


def _is_byte_level(decoder: Any) -> bool:
    """Return whether decoding only concatenates the tokens' bytes."""
    if not isinstance(decoder, dict):
        return False
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"] for step in steps}
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}


RENDER_US = 0.02  # a character of a chat, by a template
ENCODE_US = 0.15  # a character
DECODE_US = 0.1  # a token
_INLINE_US = 600.0  # the most that runs on the event loop


_INLINE = TemplateBudget(units=2**20, of_input=0, seconds=0.005, first_try=True)
_IN_POOL = TemplateBudget(of_input=16, seconds=0.25, first_try=True)
_AT_LOAD = TemplateBudget(seconds=2.0, first_try=True)


class CodecPool:
    """Runs codec work, in a thread if it takes long.

    A chat template may take far longer than the length of the messages says. So each try is bounded: on the event loop,
    then in a thread that other work waits for, then in a thread for such templates alone."""

    def __init__(self, threads: int = 2) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="codec")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="slow-template")

    async def run(self, work: Callable[[], _T], cost_us: float) -> _T:
        """Run ``work``, which takes about ``cost_us``. When the caller is cancelled, queued work is dropped and running
        work stops at its next ``check_wanted``."""
        if cost_us <= _INLINE_US:
            try:
                with _INLINE.used():
                    return work()
            except TakesLonger:  # than its length says
                pass
        try:
            return await self._in_thread(self._executor, work, _IN_POOL)
        except TakesLonger:
            return await self._in_thread(self._slow, work, TemplateBudget())

    async def _in_thread(self, executor: ThreadPoolExecutor, work: Callable[[], _T], budget: TemplateBudget) -> _T:
        left = threading.Event()

        def watched() -> _T:
            _abandoned.set(left)
            try:
                with budget.used():
                    return work()
            finally:
                _abandoned.set(None)

        future = executor.submit(watched)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            left.set()
            future.cancel()
            raise


def load_codec(folder: str, chat_template_file: str | None = None) -> TextCodec:
    """Load the codec of a model's folder. Raises UsageFault naming the file that is missing or wrong."""
    root = model_folder(folder)
    file = root / "tokenizer.json"
    if not file.is_file():
        raise UsageFault(f"no tokenizer.json in {folder}", hint="point --tokenizer-path at a folder that has one")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise UsageFault(f"cannot read {file}: {error}") from error
    config = _read_json(root / "tokenizer_config.json")
    model = _read_json(root / "config.json")
    return TextCodec(
        tokenizer,
        template=_template(_template_source(root, config, chat_template_file), config),
        tool_template=_template(_tool_source(root, config), config) if chat_template_file is None else None,
        end_ids=_end_ids(tokenizer, config, model, _read_json(root / "generation_config.json")),
        max_positions=model.get("max_position_embeddings"),
        vocab_size=model.get("vocab_size", 0),
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageFault(f"cannot read {file}: {error}") from error
    return data if isinstance(data, dict) else {}


def _template(source: str | None, config: dict[str, object]) -> Template | None:
    if source is None:
        return None
    try:
        return Template(source, _special_tokens(config))
    except jinja2.TemplateSyntaxError as error:
        raise UsageFault(f"the chat template is not valid: line {error.lineno}: {error.message}") from error


def _template_source(root: Path, config: dict[str, object], given: str | None) -> str | None:
    """Return the first template of: the given file, the folder's own file, the tokenizer's configuration."""
    file = Path(given) if given is not None else root / "chat_template.jinja"
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        if given is not None:
            raise UsageFault(f"cannot read the chat template {given}: {error.strerror}") from error
    source = config.get("chat_template") or _read_json(root / "chat_template.json").get("chat_template")
    return _named(source, "default") if isinstance(source, list) else source if isinstance(source, str) else None


def _named(sources: list[Any], name: str) -> str | None:
    """Return one of several templates by name; the one for plain chats is called default."""
    found = {item.get("name"): item.get("template") for item in sources if isinstance(item, dict)}.get(name)
    return found if isinstance(found, str) else None


def _tool_source(root: Path, config: dict[str, object]) -> str | None:
    """Return the template for chats with tools, if the model has one of its own."""
    if (root / "chat_template.jinja").is_file():
        file = root / "additional_chat_templates" / "tool_use.jinja"
        return file.read_text(encoding="utf-8") if file.is_file() else None
    source = config.get("chat_template")
    return _named(source, "tool_use") if isinstance(source, list) else None


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    """Return ``bos_token`` and the like, each given as a string or as an object with ``content``."""
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(name)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            tokens[name] = content
    return tokens


def _end_ids(tokenizer: Tokenizer, *configs: dict[str, object]) -> list[int]:
    """Return every id that ends a response, from all three configurations."""
    ids: set[int] = set()
    for config in configs:
        value = config.get("eos_token_id")
        ids |= {item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)}
    eos = _special_tokens(configs[0]).get("eos_token")
    if eos is not None and (eos_id := tokenizer.token_to_id(eos)) is not None:
        ids.add(eos_id)
    return sorted(ids)
