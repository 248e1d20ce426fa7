"""Encode a long text piece by piece: in little memory, and so that it can be stopped between two pieces.

Neighbouring pieces share some text. Each is cut in the middle of a run of tokens that both of them have there, with the
same ids at the same characters: from such a run on a tokenizer goes on alike, for what it does depends on what is near.
Where there is no such run (a text that is one long word), nothing is said, and the text is to be encoded as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Token = tuple[int, int, int]
"""Id, first character, last character + 1."""

PIECE = 16_384  # characters
_SHARED = 1_024
_RUN = 32  # tokens that both must have


def encoded_in_pieces(
    tokens_of: Callable[[str], Sequence[Token]], text: str, settled: Callable[[int], None]
) -> list[int] | None:
    """The ids of ``text``, or None where its pieces do not fit together. ``settled`` is told after each piece how many
    tokens there are for certain, and may raise."""
    ids: list[int] = []
    same: dict[int, int] = {}  # one object for all uses of an id: a long list of them is eight bytes each
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
    """Where each is cut: the middle of the first run that both have."""
    begins = right[0][1] if right else 0
    places = {token: place for place, token in enumerate(left) if token[1] >= begins}
    for place, token in enumerate(right):
        other = places.get(token)
        if other is not None and list(left[other : other + _RUN]) == list(right[place : place + _RUN]):
            if len(left) - other < _RUN or len(right) - place < _RUN:
                return None
            return other + _RUN // 2, place + _RUN // 2
    return None
