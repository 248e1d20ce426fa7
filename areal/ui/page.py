"""One self-contained HTML page of episodes, from the modules that the live page has: no network, no server.

Text from models and data sets is untrusted. It is embedded as data: JSON in a script element of a type that browsers do
not run, with every character escaped that could end the element, and the scripts insert it as text nodes only. A
content security policy enforces this: it allows only the hashes of our script and style. A page is bounded, and says
what it omits.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from areal.trajectories.record import Episode
from areal.trajectories.view import TokenDecoder, shown_episode

MOST_BYTES = 8 << 20
_SCRIPTS, _STYLES = ("numbers.js", "tokens.js", "page.js"), ("app.css", "tokens.css", "page.css")
_MODULE_WORDS = re.compile(r"^import .*$|^export (?=function|const)", re.MULTILINE)

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
<script type="module">{script}</script>
</body>
</html>
"""


def render_html(
    episodes: Sequence[Episode],
    decoder: TokenDecoder | None,
    *,
    title: str,
    left_out: str = "",
    most_bytes: int = MOST_BYTES,
) -> tuple[str, int]:
    """Return the page, and how many of the episodes it has: the first ones, as many as ``most_bytes`` hold and at least
    one. ``left_out``: what the reader of the page should know that it does not show."""
    shown: list[str] = []
    size = 0
    for episode in episodes:
        text = harmless(shown_episode(episode, decoder))
        if shown and size + len(text) > most_bytes:
            rest = len(episodes) - len(shown)
            note = f"{rest:,} more would make this page larger than {most_bytes >> 20} MB"
            left_out = f"{note}. {left_out}".strip()
            break
        shown.append(text)
        size += len(text)
    head = harmless({"title": title, "decoded": decoder is not None, "leftOut": left_out})
    script = _MODULE_WORDS.sub("", "\n".join(map(_asset, _SCRIPTS)))
    style = "\n".join(map(_asset, _STYLES))
    data = f'{head[:-1]},"episodes":[{",".join(shown)}]}}'
    page = _PAGE.format(script=script, style=style, script_hash=_hash(script), style_hash=_hash(style), data=data)
    return page, len(shown)


def harmless(document: Any) -> str:
    """Return JSON for a script element: no content of it can end the element or begin a comment."""
    text = json.dumps(document, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return resources.files("areal.ui").joinpath("static", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
