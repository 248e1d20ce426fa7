"""Recorded model calls: the values, the digests that link a call to the turn it continues, and the stored bytes.

A conversation is digested message by message; each digest includes the previous one. A turn stores the digest of
everything up to and including its answer (``after``). A call has a digest for each prefix of its messages that ends
with an answer; its parent is the turn whose ``after`` equals the longest of them. The digests cover only the parts of
a message that clients send back unchanged: role, text and tool calls. All tokens of a turn have one digest, and a call
can also continue the turn whose tokens, all of them, begin the call's prompt.

One interaction is stored as a checksummed JSON header, followed by the arrays::

    magic (4) | crc32 of the rest (4) | header length (4) | header | prompt int32 | output int32 | logprobs float32

A prompt that begins with all the parent's tokens is stored without them; the header's ``shared`` is their number. So a
conversation of n turns takes the space of its longest prompt, not of the sum of its prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import sys
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any, TypedDict

import orjson

from areal.dataclasses import dataclass, field
from areal.services.http.errors import ApiError
from areal.services.journal.keys import request_digest
from areal.services.journal.storage import CorruptRecord

DIGEST_BYTES = 16


@dataclass(frozen=True)
class ConversationDigest:
    """``answered``: the digest of each prefix that ends with an assistant message; ``whole``: that of all messages."""

    answered: tuple[bytes, ...]
    whole: bytes

    def after(self, answer: Mapping[str, object]) -> bytes:
        """Return the digest of the conversation followed by ``answer``."""
        return _digest((answer,), self.whole).whole


def digest_conversation(messages: Iterable[Mapping[str, object]]) -> ConversationDigest:
    return _digest(messages, b"")


def _digest(messages: Iterable[Mapping[str, object]], last: bytes) -> ConversationDigest:
    """Return the digests of a conversation that begins with the one whose digest is ``last``."""
    answered = []
    for message in messages:
        role, content = message.get("role"), message.get("content") or ""
        if type(content) is str and not message.get("tool_calls"):  # as nearly all
            encoded = orjson.dumps([role, content, []])
        else:
            encoded = _essence(message)
        last = blake2b(last + encoded, digest_size=DIGEST_BYTES).digest()
        if role == "assistant":
            answered.append(last)
    return ConversationDigest(tuple(answered), last)


def _essence(message: Mapping[str, Any]) -> bytes:
    """Return the parts of a message that its digest covers."""
    content, calls = message.get("content") or "", message.get("tool_calls")
    if isinstance(content, list):  # a list of text parts has the digest of its text
        parts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        texts = [text for text in parts if isinstance(text, str)]
        if len(texts) == len(parts):
            content = "\n".join(texts)
    essence = [message.get("role"), content, [_call(call) for call in calls or ()]]
    return orjson.dumps(essence, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)


def _call(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(arguments)
    return [function.get("name"), arguments]


def prefix_digests(tokens: array[int], lengths: Iterable[int]) -> dict[int, bytes]:
    """Return the digests of the prompt's prefixes by length, in one pass over the tokens. Lengths above the prompt's
    are omitted."""
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


TRUNCATED = ("length", "abort")  # the finish reasons of answers that were cut off


class ReplayData(TypedDict, total=False):
    """What a replay cannot derive from a turn's tokens or message, as JSON. ``top_logprobs``: the likeliest tokens at
    each position; ``scores``: log-probabilities of the prompt, and the likeliest tokens there. ``completion``: the
    whole answer of an external model."""

    stop_token_id: int
    top_logprobs: Sequence[Sequence[tuple[int, float]]]
    call_ids: Sequence[str]
    scores: tuple[tuple[float, ...], tuple[tuple[tuple[int, float], ...], ...]]
    completion: Mapping[str, Any]


@dataclass(frozen=True)
class TokenSample:
    """One choice with the engine's own tokens. ``output_ids``, ``logprobs`` and ``versions`` have equal lengths.

    ``after`` is the digest of the conversation including this answer, and ``place`` the number of messages before it: a
    next turn that continues the conversation may reuse these tokens. ``temperature`` is that of sampling and
    log-probabilities, 0 for greedy decoding.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str
    temperature: float = 1.0
    after: bytes | None = None
    place: int | None = None
    extra: ReplayData = field(default_factory=ReplayData)


@dataclass(frozen=True)
class TextSample:
    """One choice of an external model: the request's messages and the assistant's message."""

    messages: Sequence[Mapping[str, object]]
    response: Mapping[str, object]
    finish_reason: str
    after: bytes | None = None
    extra: ReplayData = field(default_factory=ReplayData)


Sample = TokenSample | TextSample


@dataclass(frozen=True)
class ModelCall:
    """One answered model call. All its choices are recorded together or not at all.

    ``conversation`` is None for a call without messages. ``digest`` is that of the request body, ``idempotency``
    that of the client's Idempotency-Key. ``call_id`` is the id that the relay gave the call.
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
    """One recorded interaction, read back. ``parent`` is the sequence number of the turn that it continues.

    ``joined``: the prompt begins with all the parent's tokens. ``at``: when it was recorded, in Unix seconds.
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
        return self.finish_reason in TRUNCATED

    def size(self) -> dict[str, int]:
        """Return the turn's lengths by name, for the session's description."""
        return {}


@dataclass(frozen=True)
class TokenTurn(RecordedTurn):
    prompt_ids: array[int]
    output_ids: array[int]
    logprobs: array[float]
    versions: array[int]
    extra: ReplayData
    temperature: float = 1.0

    def size(self) -> dict[str, int]:
        return {"prompt_tokens": len(self.prompt_ids), "output_tokens": len(self.output_ids)}


@dataclass(frozen=True)
class TextTurn(RecordedTurn):
    messages: Sequence[Mapping[str, object]]
    response: Mapping[str, object]
    extra: ReplayData

    def size(self) -> dict[str, int]:
        return {"messages": len(self.messages)}


@dataclass(frozen=True)
class TrajectoryTurns:
    """One trajectory with all its turns, in the order in which they were recorded."""

    session_id: str
    number: int
    turns: Sequence[RecordedTurn]
    failures: Mapping[str, int] = field(default_factory=dict)  # calls that failed, by code


_MAGIC = b"ARI1"
_FRONT = struct.Struct("<4sII")


@dataclass(frozen=True)
class PackedInteraction:
    """An interaction as stored. ``prompt`` begins after the ``shared`` tokens, which the parent stores."""

    header: Mapping[str, Any]
    prompt: array[int]
    output: array[int]
    logprobs: array[float]

    @property
    def shared(self) -> int:
        return self.header["shared"]

    def versions(self) -> array[int]:
        versions = array("q")
        for version, count in self.header["versions"]:
            versions.extend(array("q", [version]) * count)
        return versions


def pack(header: Mapping[str, object], prompt: array[int], output: array[int], logprobs: array[float]) -> bytes:
    head = orjson.dumps({**header, "lengths": [len(prompt), len(output)]})
    body = b"".join((len(head).to_bytes(4, "little"), head, prompt.tobytes(), output.tobytes(), logprobs.tobytes()))
    return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def unpack(data: bytes, what: str) -> PackedInteraction:
    """Parse and check stored bytes. Raises CorruptRecord, naming ``what``."""
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
    """Return ``array("i", values)``, in a quarter of its time. An array is returned unchanged."""
    if isinstance(values, array):
        return values
    tokens = array("i")
    tokens.frombytes(struct.pack(f"{len(values)}i", *values))
    return tokens


def version_runs(versions: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs of version and number of tokens: a run-length encoding, since versions change rarely."""
    if versions and versions[0] == versions[-1] and versions.count(versions[0]) == len(versions):
        return [(versions[0], len(versions))]
    return [(version, len(list(group))) for version, group in groupby(versions)]


def checksum(*values: object) -> int:
    """Return the checksum of a row's columns, which is stored in the same row."""
    return zlib.crc32(repr(values).encode())


_MOST_BYTES = 2**24
_ENTRY_BYTES = 400  # of a turn without tokens: the objects, and its place in two dictionaries


@dataclass(slots=True)
class PrefixMatch:
    """All tokens of a turn, prompt and answer. ``place``: the number of messages before the answer. ``decoded``: the
    number of tokens decoded so far, and their text, so that the next turn decodes only new tokens."""

    tokens: array[int]
    place: int
    decoded: tuple[int, str] = (0, "")

    @property
    def bytes(self) -> int:
        return _ENTRY_BYTES + len(self.tokens) * self.tokens.itemsize + sys.getsizeof(self.decoded[1])


class RecentTurns:
    """LRU cache of turns by row id, bounded by their memory. A text that two turns share counts for both."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self.held_bytes = 0
        self._most = most_bytes
        self._turns: OrderedDict[int, tuple[PrefixMatch, int]] = OrderedDict()

    def get(self, row: int) -> PrefixMatch | None:
        known, size = self._turns.get(row, (None, 0))
        if known is not None and known.bytes != size:
            self.put(row, known)  # more of it has been decoded
        elif known is not None:
            self._turns.move_to_end(row)
        return known

    def put(self, row: int, known: PrefixMatch) -> None:
        self.drop(row)
        size = known.bytes
        self._turns[row] = known, size
        self.held_bytes += size
        while self.held_bytes > self._most:
            self.drop(next(iter(self._turns)))

    def drop(self, row: int) -> None:
        _, size = self._turns.pop(row, (None, 0))
        self.held_bytes -= size


# A call repeats another call of its session when it has the same Idempotency-Key, when it is a relay's next attempt at
# the same call, or when it is an SDK's retry of the same body. The first call is the leader; a repetition that arrives
# while the leader runs is a follower and waits. Once the leader is recorded, the follower replays the stored answer. If
# the leader fails or its client disconnects, the follower becomes the leader.

_LONGEST_CALL_ID = 64


@dataclass(frozen=True)
class CallIdentity:
    """Identifies a call and its repetitions. ``digest``: of the request body. ``retry``: an SDK sends the body again.
    ``call_id``: the relay's id of the call. ``again``: the relay has attempted the call before."""

    session: tuple[str, int]  # the journal's tag and the session's number
    digest: bytes
    idempotency: bytes | None = None
    retry: bool = False
    call_id: str | None = None
    again: bool = False

    @property
    def repeatable(self) -> bool:
        return self.retry or self.again or self.idempotency is not None


def check_call_id(text: str | None) -> str | None:
    """Return ``text`` if it is a valid call id of a relay, else None."""
    return text if text is not None and text.isascii() and len(text) <= _LONGEST_CALL_ID else None


def read_retry_count(text: str | None) -> bool:
    """Return whether an SDK's retry header says that this is not the first attempt."""
    return text is not None and text.isascii() and text.isdecimal() and int(text) > 0


@dataclass(frozen=True)
class NamedRequest:
    """A change with an Idempotency-Key. Both fields are digests: ``key`` of the key, ``asked`` of the request's
    body."""

    key: bytes
    asked: bytes


def named_request(key: str | None, body: object) -> NamedRequest | None:
    """Return the NamedRequest of a key and a JSON ``body``, or None without a key."""
    return NamedRequest(request_digest(key), request_digest(orjson.dumps(body))) if key is not None else None


class CallsInFlight:
    """The running calls of all sessions, by body and by Idempotency-Key. A repetition joins the newest equal call."""

    def __init__(self) -> None:
        self._by_digest: dict[tuple[tuple[str, int], bytes], list[CallInFlight]] = {}
        self._by_key: dict[tuple[tuple[str, int], bytes], CallInFlight] = {}

    async def join(self, call: CallIdentity) -> int | None:
        """Wait for a call in flight that this one repeats, and return the row id of its answer. Return None if there is
        no such call or it failed. Raises 422 for an Idempotency-Key used with another body."""
        while (flight := self._leader(call)) is not None:
            if flight.call.digest != call.digest:
                raise other_body()
            flight.over = flight.over or asyncio.Event()
            await flight.over.wait()
            if flight.recorded is not None:
                return flight.recorded
        return None

    def running(self, call: CallIdentity) -> bool:
        """Return whether a call that this one repeats is in flight. If not, this one may lead before the next
        ``await``."""
        return self._leader(call) is not None

    def _leader(self, call: CallIdentity) -> CallInFlight | None:
        if call.idempotency is not None:
            return self._by_key.get((call.session, call.idempotency))
        running = self._by_digest.get((call.session, call.digest), [])
        attempts = [each for each in running if call.again and each.call.call_id == call.call_id]
        newest = attempts or (running if call.retry else [])
        return newest[-1] if newest else None

    def begin(self, call: CallIdentity) -> CallInFlight:
        """Lead a call: repetitions wait until ``end``, which follows whether the call succeeds or fails."""
        flight = CallInFlight(call)
        self._by_digest.setdefault((call.session, call.digest), []).append(flight)
        if call.idempotency is not None:
            self._by_key[call.session, call.idempotency] = flight
        return flight

    def end(self, flight: CallInFlight) -> None:
        call = flight.call
        same = self._by_digest[call.session, call.digest]
        same.remove(flight)
        if not same:
            del self._by_digest[call.session, call.digest]
        if call.idempotency is not None:
            self._by_key.pop((call.session, call.idempotency), None)
        if flight.over is not None:
            flight.over.set()

    def __len__(self) -> int:
        return sum(map(len, self._by_digest.values()))


@dataclass(eq=False)
class CallInFlight:
    """A running call. ``over`` is set at its end, once a repetition waits for it; ``recorded``: the row id of its
    answer, once that is durable."""

    call: CallIdentity
    over: asyncio.Event | None = None
    recorded: int | None = None


def other_body() -> ApiError:
    message = "this Idempotency-Key was used in this session with another body"
    return ApiError(422, message, code="idempotency_key_reused", param="Idempotency-Key")
