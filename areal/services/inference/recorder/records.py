"""Recorded model calls: the values, the digests that link a call to the turn it continues, and the stored bytes.

A conversation is digested message by message, each digest including the one before. A turn stores the digest of
everything up to and including its answer (``after``); a call has the digests of all its prefixes that end with an
answer, and its parent is the turn whose ``after`` equals the longest of them. Only what a client sends back unchanged
counts: role, text, tool calls. Tokens are digested as a whole; a turn is a token parent when the call's prompt begins
with all its tokens.

One interaction is stored as a checksummed header in JSON, followed by the arrays::

    magic (4) | crc32 of the rest (4) | header length (4) | header | prompt int32 | output int32 | logprobs float32

A prompt that begins with all the parent's tokens is stored without them: the header's ``shared`` counts them. So a
conversation of n turns takes the space of its longest prompt, not of the sum.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from typing import Any

import orjson

from areal.services.http.errors import ApiError, bad_request
from areal.services.journal.storage import CorruptRecord

# -- conversation digests

DIGEST_BYTES = 16


@dataclass(frozen=True)
class ConversationDigest:
    """``answered``: the digests up to and with each assistant message; ``whole``: that of all messages."""

    answered: tuple[bytes, ...]
    whole: bytes

    def after(self, answer: Mapping[str, Any]) -> bytes:
        """The digest of the conversation with ``answer`` at its end."""
        return _following(self.whole, answer)


def digest_conversation(messages: Iterable[Mapping[str, Any]]) -> ConversationDigest:
    answered, last = [], b""
    for message in messages:
        last = _following(last, message)
        if message.get("role") == "assistant":
            answered.append(last)
    return ConversationDigest(tuple(answered), last)


def _following(before: bytes, message: Mapping[str, Any]) -> bytes:
    content = message.get("content") or ""
    if isinstance(content, list):  # one text part, or several, weigh the same as their text
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        texts = [text for text in parts if isinstance(text, str)]
        if len(texts) == len(parts):
            content = "\n".join(texts)
    calls = message.get("tool_calls") or []
    essence = [message.get("role"), content, [_call(call) for call in calls]]
    encoded = orjson.dumps(essence, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return blake2b(before + encoded, digest_size=DIGEST_BYTES).digest()


def _call(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(arguments)
    return [function.get("name"), arguments]


def body_digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=DIGEST_BYTES).digest()


def prefix_digests(tokens: array[int], lengths: Iterable[int]) -> dict[int, bytes]:
    """Digests of a prompt's prefixes by their length, each token hashed about once. Lengths that the prompt does not
    have are left out."""
    data, width = memoryview(tokens).cast("B"), tokens.itemsize
    found, state, done = {}, blake2b(digest_size=DIGEST_BYTES), 0
    for length in sorted(set(lengths)):
        if length > len(tokens):
            break
        state.update(data[done * width : length * width])
        done = length
        found[length] = state.copy().digest()
    return found


def token_digest(*parts: array[int]) -> bytes:
    state = blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        state.update(memoryview(part).cast("B"))
    return state.digest()


def text_digest(text: str) -> tuple[int, bytes]:
    """Length and digest of a text, by which a longer one is known to begin with it."""
    return len(text), blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def begins_with(text: str, mark: tuple[int, bytes]) -> bool:
    return len(text) >= mark[0] and text_digest(text[: mark[0]]) == mark


TRUNCATED = "length"


@dataclass(frozen=True)
class TokenSample:
    """One choice, token for token as the engine saw and sampled it. The last three lists have equal lengths.

    ``after`` digests the conversation including this answer; ``text`` is the length and digest of the prompt and
    answer as text, by which a next turn knows that it may go on with these very tokens. ``temperature`` is that of the
    logprobs and of the sampling, 0 for a greedy answer.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str
    temperature: float = 1.0
    after: bytes | None = None
    text: tuple[int, bytes] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # what a replay needs besides, as JSON


@dataclass(frozen=True)
class TextSample:
    """One choice of an external model: messages in, the assistant's message out."""

    messages: Sequence[Mapping[str, Any]]
    response: Mapping[str, Any]
    finish_reason: str
    after: bytes | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


Sample = TokenSample | TextSample


@dataclass(frozen=True)
class ModelCall:
    """One answered model call: all its choices, recorded together or not at all.

    ``conversation`` is None for a call without messages. ``digest`` is that of the request body, ``idempotency``
    that of the caller's Idempotency-Key. ``call_id``: the relay's id of the call.
    """

    answer_id: str
    model: str
    created: int
    digest: bytes
    samples: Sequence[Sample]
    conversation: ConversationDigest | None = None
    idempotency: bytes | None = None
    call_id: str | None = None

    def interaction_id(self, choice: int) -> str:
        return self.answer_id if choice == 0 else f"{self.answer_id}-{choice}"


@dataclass(frozen=True)
class RecordedTurn:
    """One recorded interaction, read back. ``parent`` is the sequence number of the turn it continues.

    ``joined``: its prompt begins with exactly the parent's tokens.
    """

    seq: int
    interaction_id: str
    answer_id: str
    created: int
    parent: int | None
    joined: bool
    model: str
    finish_reason: str
    reward: float | None
    at: float

    @property
    def truncated(self) -> bool:
        return self.finish_reason == TRUNCATED

    def size(self) -> dict[str, int]:
        """Lengths of the entry, for logs."""
        return {}


@dataclass(frozen=True)
class TokenTurn(RecordedTurn):
    prompt_ids: array[int]
    output_ids: array[int]
    logprobs: array[float]
    versions: array[int]
    extra: Mapping[str, Any]
    temperature: float = 1.0

    def size(self) -> dict[str, int]:
        return {"prompt_tokens": len(self.prompt_ids), "output_tokens": len(self.output_ids)}


@dataclass(frozen=True)
class TextTurn(RecordedTurn):
    messages: Sequence[Mapping[str, Any]]
    response: Mapping[str, Any]
    extra: Mapping[str, Any]

    def size(self) -> dict[str, int]:
        return {"messages": len(self.messages)}


@dataclass(frozen=True)
class TrajectoryTurns:
    """One trajectory with all its turns, in the order in which they were recorded."""

    session_id: str
    number: int
    turns: Sequence[RecordedTurn]
    failures: Mapping[str, int] = field(default_factory=dict)  # calls that failed, by code


# -- stored bytes

_MAGIC = b"ARI1"
_FRONT = struct.Struct("<4sII")


@dataclass(frozen=True)
class PackedInteraction:
    """An interaction as stored. ``prompt`` is what follows the ``shared`` tokens of the parent."""

    header: Mapping[str, Any]
    prompt: array[int]
    output: array[int]
    logprobs: array[float]

    @property
    def shared(self) -> int:
        shared: int = self.header["shared"]
        return shared

    def versions(self) -> array[int]:
        versions = array("q")
        for version, count in self.header["versions"]:
            versions.extend(array("q", [version]) * count)
        return versions


def pack(header: Mapping[str, Any], prompt: array[int], output: array[int], logprobs: array[float]) -> bytes:
    head = orjson.dumps({**header, "lengths": [len(prompt), len(output)]})
    body = b"".join((len(head).to_bytes(4, "little"), head, prompt.tobytes(), output.tobytes(), logprobs.tobytes()))
    return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def unpack(data: bytes, what: str) -> PackedInteraction:
    """Raises CorruptRecord, naming ``what``."""
    try:
        magic, crc, length = _FRONT.unpack_from(data)
        if magic != _MAGIC or zlib.crc32(memoryview(data)[8:]) != crc:
            raise CorruptRecord(f"{what}: the checksum does not match")
    except struct.error as error:
        raise CorruptRecord(f"{what}: cut short") from error
    at = _FRONT.size + length
    header = orjson.loads(data[_FRONT.size : at])
    prompt_length, output_length = header["lengths"]
    prompt, output, logprobs = array("i"), array("i"), array("f")
    for part, count in ((prompt, prompt_length), (output, output_length), (logprobs, output_length)):
        end = at + count * part.itemsize
        part.frombytes(data[at:end])
        at = end
    return PackedInteraction(header, prompt, output, logprobs)


def token_array(values: Sequence[int]) -> array[int]:
    """The same as ``array("i", values)``, in a quarter of its time; an array is returned unchanged."""
    if isinstance(values, array):
        return values
    tokens = array("i")
    tokens.frombytes(struct.pack(f"{len(values)}i", *values))
    return tokens


def version_runs(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Versions change rarely: (version, how many tokens in a row)."""
    return [(version, len(list(group))) for version, group in groupby(versions)]


def checksum(*values: object) -> int:
    """The checksum of a control row's columns, stored beside them."""
    return zlib.crc32(repr(values).encode())


# -- recent turns in memory

_MOST_TOKENS = 2**21


@dataclass(frozen=True)
class PrefixMatch:
    """All tokens of a turn, prompt and answer, and the mark of their text (``text_digest``)."""

    tokens: array[int]
    text: tuple[int, bytes]


class RecentTurns:
    """Turns by row id; evicts the least recently used."""

    def __init__(self) -> None:
        self._held = 0
        self._turns: OrderedDict[int, PrefixMatch] = OrderedDict()

    def get(self, row: int) -> PrefixMatch | None:
        known = self._turns.get(row)
        if known is not None:
            self._turns.move_to_end(row)
        return known

    def put(self, row: int, known: PrefixMatch) -> None:
        self._drop(row)
        self._turns[row] = known
        self._held += len(known.tokens)
        while self._held > _MOST_TOKENS:
            self._drop(next(iter(self._turns)))

    def _drop(self, row: int) -> None:
        gone = self._turns.pop(row, None)
        self._held -= len(gone.tokens) if gone is not None else 0


# -- retries that join the call in flight instead of sampling again
#
# A call repeats another one of its session when it has the same Idempotency-Key, when it is a relay's next attempt at
# the same call, or when it is an SDK's retry of the same body. The first one leads; one that comes while it runs waits
# for it. When the leader is recorded the follower replays what is on disk; when the leader failed, or its caller left,
# the follower leads.

_LONGEST_CALL_ID = 64


@dataclass(frozen=True)
class CallIdentity:
    """Two calls of one identity are one call. ``retry``: the caller says that it repeats the same body. ``call_id``:
    the relay's id of the call. ``again``: the relay has attempted it before."""

    session: tuple[str, int]  # the journal's tag and the session's number
    digest: bytes
    idempotency: bytes | None = None
    retry: bool = False
    call_id: str | None = None
    again: bool = False

    def __post_init__(self) -> None:
        assert len(self.digest) == DIGEST_BYTES

    @property
    def repeatable(self) -> bool:
        return self.retry or self.again or self.idempotency is not None


def check_call_id(text: str | None) -> str | None:
    """A relay's id of a call; None for what is none."""
    return text if text is not None and text.isascii() and len(text) <= _LONGEST_CALL_ID else None


def read_retry_count(text: str | None) -> bool:
    """Whether an SDK says that this is not its first try."""
    return text is not None and text.isascii() and text.isdecimal() and int(text) > 0


def check_idempotency_key(text: str | None) -> str | None:
    """Raises 400 for an empty, long or unprintable key."""
    if text is None:
        return None
    if not 1 <= len(text) <= 255 or not text.isprintable():
        raise bad_request("Idempotency-Key must be 1 to 255 printable characters", param="Idempotency-Key")
    return text


class CallsInFlight:
    """The calls of all sessions that run now, by body and by key. The newest of equal ones is the one to join."""

    def __init__(self) -> None:
        self._by_digest: dict[tuple[tuple[str, int], bytes], list[CallInFlight]] = {}
        self._by_key: dict[tuple[tuple[str, int], bytes], CallInFlight] = {}

    async def join(self, call: CallIdentity) -> int | None:
        """Wait for a call in flight that this one repeats, and return where its answer is recorded. None when there is
        none, or when it failed. Raises 422 for a key used with another body."""
        while (flight := self._leader(call)) is not None:
            if flight.call.digest != call.digest:
                raise other_body()
            await flight.over.wait()
            if flight.recorded is not None:
                return flight.recorded
        return None

    def running(self, call: CallIdentity) -> bool:
        """Whether a call that this one repeats is in flight. If not, this one may lead, before anything else runs."""
        return self._leader(call) is not None

    def _leader(self, call: CallIdentity) -> CallInFlight | None:
        if call.idempotency is not None:
            return self._by_key.get((call.session, call.idempotency))
        running = self._by_digest.get((call.session, call.digest), [])
        attempts = [each for each in running if call.again and each.call.call_id == call.call_id]
        newest = attempts or (running if call.retry else [])
        return newest[-1] if newest else None

    @contextlib.contextmanager
    def leading(self, call: CallIdentity) -> Iterator[CallInFlight]:
        """Lead a call: others that repeat it wait until it is over, whether it succeeds or fails."""
        flight = CallInFlight(call)
        same = self._by_digest.setdefault((call.session, call.digest), [])
        same.append(flight)
        if call.idempotency is not None:
            self._by_key[call.session, call.idempotency] = flight
        try:
            yield flight
        finally:
            same.remove(flight)
            if not same:
                del self._by_digest[call.session, call.digest]
            if call.idempotency is not None:
                self._by_key.pop((call.session, call.idempotency), None)
            flight.over.set()

    def __len__(self) -> int:
        return sum(map(len, self._by_digest.values()))


@dataclass(eq=False)
class CallInFlight:
    """``recorded``: the row of its answer, once that is durable."""

    call: CallIdentity
    over: asyncio.Event = field(default_factory=asyncio.Event)
    recorded: int | None = None


def other_body() -> ApiError:
    message = "this Idempotency-Key was used in this session with another body"
    return ApiError(422, message, code="idempotency_key_reused", param="Idempotency-Key")
