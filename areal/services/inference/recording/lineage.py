"""Finds, among the turns of an open trajectory, the one that a call continues.

By messages first: the longest prefix of the call's conversation that some turn's answer completes. Where that finds
none (plain completions, clients that rewrite what they were told), by tokens: the longest turn whose tokens the
prompt begins with. A conversation without an answer in it continues nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from areal.services.inference.recording.conversation import Conversation, TokenPrefix
from areal.services.inference.recording.database import SEQUENCES
from areal.services.inference.recording.ledger import Ledger, row_id
from areal.services.inference.recording.session import Kind

_PREFIXES_AT_A_TIME = 32
_TOKEN_CANDIDATES = 64  # by tokens alone only the newest turns are tried

Candidate = tuple[int, int, bytes | None]
"""A turn: its row id, how many tokens it has, their digest (None: it has messages only)."""


@dataclass(frozen=True)
class Parent:
    """``shared``: how many tokens the prompt has in common with it: all of the parent's, or 0."""

    seq: int
    shared: int


class Turns(Protocol):
    """The turns of one trajectory that can be continued."""

    def completing(self, prefixes: Sequence[bytes]) -> list[Candidate]:
        """Every turn whose answer completes the longest prefix that any completes."""
        ...

    def newest(self, limit: int) -> list[Candidate]: ...


@dataclass(frozen=True)
class StoredTurns:
    """Those of ``session`` from row ``low`` on, on disk."""

    ledger: Ledger
    session: int
    low: int

    def completing(self, prefixes: Sequence[bytes]) -> list[Candidate]:
        for end in range(len(prefixes), 0, -_PREFIXES_AT_A_TIME):
            wanted = prefixes[max(0, end - _PREFIXES_AT_A_TIME) : end]
            marks = ",".join("?" * len(wanted))
            query = (
                f"SELECT id, total, tokens, after FROM interactions WHERE session=? AND after IN ({marks}) AND id>=?"
            )
            rows = self.ledger.db.execute(query, (self.session, *wanted, self.low)).fetchall()
            if rows:
                best = max(wanted.index(after) for _, _, _, after in rows)
                return [(found, total, digest) for found, total, digest, after in rows if after == wanted[best]]
        return []

    def newest(self, limit: int) -> list[Candidate]:
        query = "SELECT id, total, tokens FROM interactions WHERE id>=? AND id<? ORDER BY id DESC LIMIT ?"
        return self.ledger.db.execute(query, (self.low, row_id(self.session + 1, 0), limit)).fetchall()


def kind_of(turns: Turns) -> Kind:
    """The kind of a trajectory, from its newest turn."""
    newest = turns.newest(1)
    return Kind.TEXT if newest and newest[0][2] is None else Kind.TOKENS


def find_parent(turns: Turns, conversation: Conversation | None, prompt: array[int] | None) -> Parent | None:
    """The parent among ``turns``. ``prompt`` None: a call without tokens."""
    answered = conversation.answered if conversation is not None else ()
    if conversation is not None and not answered:
        return None
    candidates = turns.completing(answered)
    tokens = TokenPrefix(prompt) if prompt is not None else None
    if candidates:
        joined = _longest_joined(candidates, tokens)
        return joined or Parent(max(candidates)[0] % SEQUENCES, 0)
    return _longest_joined(turns.newest(_TOKEN_CANDIDATES), tokens) if tokens is not None else None


def continued(turns: Turns, conversation: Conversation) -> int | None:
    """The row of the turn that this conversation would continue; of several with the same answer the newest."""
    candidates = turns.completing(conversation.answered)
    return max(candidates)[0] if candidates else None


def _longest_joined(candidates: Sequence[Candidate], tokens: TokenPrefix | None) -> Parent | None:
    """The candidate with the most tokens that the prompt begins with; of equals the newest."""
    if tokens is None:
        return None
    digests = tokens.digests(total for _, total, digest in candidates if digest is not None)
    joined = [(total, found) for found, total, digest in candidates if digest and digests.get(total) == digest]
    if not joined:
        return None
    total, found = max(joined)
    return Parent(found % SEQUENCES, total)
