"""Episodes as one HTML file that needs nothing else: no network, no server, opened from a mail or a share.

Everything that a model or a data set wrote is data in it: JSON in a script element of a type that no browser runs, with
every character that could end the element escaped, and put on the page as text nodes alone. A content security policy
with the hashes of our own script and style says the same to the browser.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from areal.trajectories.record import Episode
from areal.trajectories.terminal import origin
from areal.trajectories.view import TokenDecoder, Turn, text_of_messages, turns

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src '{script_hash}'; \
style-src '{style_hash}'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="referrer" content="no-referrer">
<title>Trajectories</title>
<style>{style}</style>
</head>
<body>
<div id="app"></div>
<noscript>This page needs JavaScript to lay out its trajectories.</noscript>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page(episodes: Sequence[Episode], decoder: TokenDecoder | None, *, title: str) -> str:
    script, style = _asset("viewer.js"), _asset("viewer.css")
    document = {
        "title": title,
        "decoded": decoder is not None,
        "episodes": [_episode(each, decoder) for each in episodes],
    }
    return _PAGE.format(
        script=script,
        style=style,
        script_hash=_hash(script),
        style_hash=_hash(style),
        data=harmless(document),
    )


def harmless(document: Any) -> str:
    """JSON that can stand in a script element whatever is in it: nothing of it ends the element or begins a comment."""
    text = json.dumps(document, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return resources.files("areal.trajectories").joinpath("viewer", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _episode(episode: Episode, decoder: TokenDecoder | None) -> dict[str, Any]:
    example = {name: value if isinstance(value, str) else json.dumps(value) for name, value in episode.example.items()}
    return {
        "name": episode.episode,
        "origin": origin(episode),
        "reward": episode.reward,
        "seconds": episode.seconds,
        "example": example,
        "failures": [f"{each.get('code')} ×{each.get('count')}" for each in episode.failures],
        "turns": [_turn(each) for each in turns(episode, decoder)],
    }


def _turn(turn: Turn) -> dict[str, Any]:
    row = turn.row
    about: dict[str, Any] = {
        "id": row.interaction_id,
        "number": turn.number,
        "depth": turn.depth,
        "model": row.model,
        "finish": row.finish_reason,
        "truncated": row.truncated,
        "reward": row.original_reward if row.rewarded else None,
        "ret": row.reward,
        "advantage": row.advantage,
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
        "lp": [round(token.logprob, 4) for token in tokens if token.generated],
        "v": [token.version for token in tokens if token.generated],
        "turns": [token.turn for token in tokens if token.generated] if len(turn.turn_ids) > 1 else None,
    }
