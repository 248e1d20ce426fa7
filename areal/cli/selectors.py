"""Label selectors as in kubectl: ``a=b``, ``a==b``, ``a!=b``, ``a in (x,y)``, ``a notin (x,y)``, ``a``, ``!a``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from areal.errors import UsageFault

Labels = Mapping[str, str]
Selector = Callable[[Labels], bool]

_KEY = r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?"
_VALUE = r"[A-Za-z0-9._-]*"
_TERM = re.compile(
    rf"""\s*(?:
        (?P<set_key>{_KEY})\s+(?P<set_op>in|notin)\s*\((?P<values>[^()]*)\)
      | (?P<key>{_KEY})\s*(?P<op>==|=|!=)\s*(?P<value>{_VALUE})
      | (?P<absent>!)?\s*(?P<exists>{_KEY})
    )\s*(?:,|$)""",
    re.VERBOSE,
)


def parse_selector(text: str) -> Selector:
    """One predicate over labels: every comma-separated requirement holds. As in Kubernetes, ``!=`` and ``notin`` also
    match an object without the label."""
    terms: list[Selector] = []
    at = 0
    while at < len(text):
        match = _TERM.match(text, at)
        if match is None:
            raise UsageFault(
                f"cannot read the selector at {text[at:]!r}",
                hint="write a=b, a!=b, 'a in (x,y)', 'a notin (x,y)', a or !a, joined by commas",
            )
        terms.append(_term(match))
        at = match.end()
    if not terms or text.rstrip().endswith(","):
        raise UsageFault(f"the selector {text!r} ends where a requirement is needed")
    return lambda labels: all(term(labels) for term in terms)


def _term(match: re.Match[str]) -> Selector:
    if match["set_key"]:
        key, wanted = match["set_key"], frozenset(value.strip() for value in match["values"].split(","))
        inside = match["set_op"] == "in"
        return lambda labels: (labels.get(key) in wanted) == inside
    if match["key"]:
        key, value = match["key"], match["value"]
        equal = match["op"] != "!="
        return lambda labels: (labels.get(key) == value) == equal
    key = match["exists"]
    present = not match["absent"]
    return lambda labels: (key in labels) == present
