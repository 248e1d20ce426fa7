"""Finds, among the turns of an open trajectory, the one that a call continues.

By messages first: the longest prefix of the call's conversation that some turn's answer completes. Where that finds
none (plain completions, clients that rewrite what they were told), by tokens: the longest turn whose tokens the
prompt begins with. A conversation without an answer in it continues nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from areal.services.inference.recording.conversation import Conversation, TokenPrefix
from areal.services.inference.recording.database import SEQUENCES
from areal.services.inference.recording.ledger import Ledger, row_id
from areal.services.inference.recording.session import Phase, matured

_PREFIXES_AT_A_TIME = 32
_TOKEN_CANDIDATES = 64  # by tokens alone only the newest turns are tried

_Candidate = tuple[int, int, bytes | None]  # row id, tokens, their digest


@dataclass(frozen=True)
class Parent:
    """``shared``: how many tokens the prompt has in common with it: all of the parent's, or 0."""

    seq: int
    shared: int


def find_parent(
    ledger: Ledger, session: int, first: int, conversation: Conversation | None, prompt: array[int] | None
) -> Parent | None:
    """The parent among the interactions from ``first`` on. ``prompt`` None: a call without tokens."""
    answered = conversation.answered if conversation is not None else ()
    if conversation is not None and not answered:
        return None
    candidates = _by_messages(ledger, session, row_id(session, first), answered)
    tokens = TokenPrefix(prompt) if prompt is not None else None
    if candidates:
        joined = _longest_joined(candidates, tokens)
        return joined or Parent(max(candidates)[0] % SEQUENCES, 0)
    if tokens is None:
        return None
    query = "SELECT id, total, tokens FROM interactions WHERE id>=? AND id<? ORDER BY id DESC LIMIT ?"
    bounds = (row_id(session, first), row_id(session + 1, 0), _TOKEN_CANDIDATES)
    return _longest_joined(ledger.db.execute(query, bounds).fetchall(), tokens)


def continued(ledger: Ledger, session: int, conversation: Conversation, now: float) -> int | None:
    """The row of the turn that this conversation would continue; of several with the same answer the newest."""
    last = ledger.last_trajectory(session)
    if last is None or not conversation.answered or matured(last, now).phase is not Phase.OPEN:
        return None
    candidates = _by_messages(ledger, session, row_id(session, last.first), conversation.answered)
    return max(candidates)[0] if candidates else None


def _by_messages(ledger: Ledger, session: int, low: int, prefixes: Sequence[bytes]) -> list[_Candidate]:
    """Every turn whose answer completes the longest prefix that any completes."""
    for end in range(len(prefixes), 0, -_PREFIXES_AT_A_TIME):
        wanted = prefixes[max(0, end - _PREFIXES_AT_A_TIME) : end]
        marks = ",".join("?" * len(wanted))
        query = f"SELECT id, total, tokens, after FROM interactions WHERE session=? AND after IN ({marks}) AND id>=?"
        rows = ledger.db.execute(query, (session, *wanted, low)).fetchall()
        if rows:
            best = max(wanted.index(after) for _, _, _, after in rows)
            return [(found, total, digest) for found, total, digest, after in rows if after == wanted[best]]
    return []


def _longest_joined(candidates: Sequence[_Candidate], tokens: TokenPrefix | None) -> Parent | None:
    """The candidate with the most tokens that the prompt begins with; of equals the newest."""
    if tokens is None:
        return None
    digests = tokens.digests(total for _, total, digest in candidates if digest is not None)
    joined = [(total, found) for found, total, digest in candidates if digest and digests.get(total) == digest]
    if not joined:
        return None
    total, found = max(joined)
    return Parent(found % SEQUENCES, total)
