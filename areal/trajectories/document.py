"""An episode as the JSON document of a page: its turns with their tokens. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from areal.terminal import safe
from areal.trajectories.record import Episode
from areal.trajectories.view import ShownTurn, TokenDecoder, text_of_messages, turns

HINT = 200  # characters


def origin(episode: Episode) -> list[str]:
    """Return the origin of a trainer's episode: "training step 12", "sample 3 of group t-7"."""
    found = []
    if episode.step is not None:
        found.append(f"{'evaluation after' if episode.is_eval else 'training'} step {episode.step}")
    elif episode.is_eval:
        found.append("evaluation")
    if episode.group:
        found.append(f"sample {episode.sample} of group {safe(episode.group)}")
    return found


def shown_episode(episode: Episode, decoder: TokenDecoder | None) -> dict[str, Any]:
    """Columns of a turn: ``ids``, ``texts`` (None without a tokenizer) and ``mask`` of all tokens; ``lp``, ``v`` and
    ``turns`` of the generated ones. ``before``: tokens at its beginning that an earlier turn shows. ``hint``: the
    beginning of the model's last answer."""
    example = {name: value if isinstance(value, str) else json.dumps(value) for name, value in episode.example.items()}
    conversation = turns(episode, decoder)
    return {
        "name": episode.episode,
        "origin": origin(episode),
        "reward": _finite(episode.reward),
        "seconds": _finite(episode.seconds),
        "example": example,
        "failures": [f"{each.get('code')} ×{each.get('count')}" for each in episode.failures],
        "hint": _hint(conversation[-1]) if conversation else "",
        "turns": [_turn(each) for each in conversation],
    }


def _hint(turn: ShownTurn) -> str:
    if turn.row.response is not None:
        return text_of_messages(turn.row)[-1][1][:HINT]
    return tokens_hint([token.id for token in turn.generated], [token.text for token in turn.generated])


def tokens_hint(ids: Sequence[int], texts: Sequence[str | None]) -> str:
    """Return the text of tokens, or their ids, up to ``HINT`` characters."""
    found = "".join(f"{each} " if text is None else text[:HINT] for each, text in zip(ids[:HINT], texts, strict=False))
    return found[:HINT].strip()


def _turn(turn: ShownTurn) -> dict[str, object]:
    row = turn.row
    about: dict[str, Any] = {
        "id": row.interaction_id,
        "number": turn.number,
        "depth": turn.depth,
        "model": row.model,
        "finish": row.finish_reason,
        "truncated": row.truncated,
        "reward": _finite(row.original_reward) if row.rewarded else None,
        "ret": _finite(row.reward),
        "advantage": _finite(row.advantage),
    }
    if row.response is not None:
        return {**about, "messages": text_of_messages(row)}
    tokens = turn.tokens
    return {
        **about,
        "temperature": ", ".join(f"{each:g}" for each in turn.temperatures),
        "before": turn.shown_before,
        "ids": [token.id for token in tokens],
        "texts": [token.text for token in tokens],
        "mask": "".join("1" if token.generated else "0" for token in tokens),
        "lp": [_finite(token.logprob) for token in tokens if token.generated],
        "v": [token.version for token in tokens if token.generated],
        "turns": [token.turn for token in tokens if token.generated] if len(turn.turn_ids) > 1 else None,
    }


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: the page shows null as absent."""
    return round(value, 4) if value is not None and math.isfinite(value) else None
