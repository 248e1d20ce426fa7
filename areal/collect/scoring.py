"""Rewards that need no code of one's own: ``--reward exact`` and ``--reward number``.

A reward is a function of an example's fields and of ``completion``, the text of the answer; it takes the keywords that
it needs, among them ``prompt``, ``messages``, ``completion`` and ``completions`` (the same, under a usual name), and of
a single turn ``prompt_ids`` and ``completion_ids``.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact(completion: str, answer: object) -> float:
    """1 for the very answer, but for space around it."""
    return float(completion.strip() == str(answer).strip())


def number(completion: str, answer: object) -> float:
    """1 when the last number of the completion is the last one of the answer, as in GSM8K."""
    said, wanted = _last(completion), _last(str(answer))
    return float(said is not None and said == wanted)


def _last(text: str) -> float | None:
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


BUILT_IN = {"exact": "areal.collect.scoring:exact", "number": "areal.collect.scoring:number"}
