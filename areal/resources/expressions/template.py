"""A scalar with expressions in it. One expression alone keeps its type; text around it makes text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from areal.resources.expressions.evaluate import Scope, evaluate
from areal.resources.expressions.functions import MAX_TEXT, Refused, to_text
from areal.resources.expressions.syntax import Expr, ExpressionError, parse, tokenize

OPENING = "${{"
_ESCAPED = "$${{"


@dataclass(frozen=True)
class Template:
    """Literal texts and expressions in order."""

    parts: tuple[str | Expr, ...]

    def evaluate(self, scope: Scope) -> Any:
        """The value: of the expression when there is nothing else, else text. Raises ExpressionError."""
        if len(self.parts) == 1 and not isinstance(self.parts[0], str):
            return evaluate(self.parts[0], scope)
        texts: list[str] = []
        for part in self.parts:
            texts.append(part if isinstance(part, str) else _text(part, scope))
            if sum(map(len, texts)) > MAX_TEXT:
                raise ExpressionError(f"the result is longer than {MAX_TEXT} characters", 1)
        return "".join(texts)


@lru_cache(maxsize=4096)
def parse_template(text: str) -> Template:
    """``$${{`` stands for a literal ``${{``. Raises ExpressionError. Cached: a generated template is parsed once."""
    parts: list[str | Expr] = []
    literal, at = "", 0
    while True:
        found = text.find(OPENING, at)
        if found < 0:
            break
        if text.startswith(_ESCAPED, found - 1) and found > at:
            literal += text[at : found - 1] + OPENING
            at = found + len(OPENING)
            continue
        literal += text[at:found]
        tokens, at = tokenize(text, found + len(OPENING))
        parts += [literal, parse(tokens)] if literal else [parse(tokens)]
        literal = ""
    literal += text[at:]
    if literal or not parts:
        parts.append(literal)
    return Template(tuple(parts))


def _text(part: Expr, scope: Scope) -> str:
    try:
        return to_text(evaluate(part, scope))
    except Refused as error:
        raise ExpressionError(str(error), part.column)
