"""Text to syntax tree.

    pipeline  = choice ("|" name ["(" arguments ")"])*          x | f(a) is f(x, a)
    choice    = or ["if" or "else" choice]
    or        = and (("or" | "||") and)*          and = not (("and" | "&&") not)*
    not       = ("not" | "!") not | comparison
    comparison = sum [("==" "!=" "<" "<=" ">" ">=" "in" "not in") sum]
    sum       = term (("+" | "-") term)*          term = unary (("*" | "/" | "//" | "%") unary)*
    unary     = "-" unary | postfix               postfix = primary ("." name | "[" pipeline "]")*
    primary   = number | string | true | false | null | name | name "(" arguments ")" | "(" pipeline ")" | "[" ... "]"

Columns are 1-based within the scalar that holds the expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

MAX_LENGTH = 2_000
MAX_DEPTH = 40


class ExpressionError(ValueError):
    """What is wrong with an expression, at a 1-based column of its scalar."""

    def __init__(self, message: str, column: int) -> None:
        super().__init__(message)
        self.message = message
        self.column = column


@dataclass(frozen=True, slots=True)
class Literal:
    value: str | int | float | bool | None
    column: int


@dataclass(frozen=True, slots=True)
class Name:
    name: str
    column: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """``holder.key`` and ``holder[key]``."""

    holder: Expr
    key: Expr
    column: int


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: tuple[Expr, ...]
    column: int


@dataclass(frozen=True, slots=True)
class Unary:
    operator: str
    operand: Expr
    column: int


@dataclass(frozen=True, slots=True)
class Binary:
    operator: str
    left: Expr
    right: Expr
    column: int


@dataclass(frozen=True, slots=True)
class Choice:
    condition: Expr
    then: Expr
    otherwise: Expr
    column: int


@dataclass(frozen=True, slots=True)
class Items:
    items: tuple[Expr, ...]
    column: int


Expr: TypeAlias = Literal | Name | Lookup | Call | Unary | Binary | Choice | Items


class Token(NamedTuple):
    kind: str  # number | string | name | operator | end
    text: str
    column: int


_TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<number>(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?)
    |(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<name>[A-Za-z_]\w*)
    |(?P<end>\}\})
    |(?P<operator>==|!=|<=|>=|//|\|\||&&|[-+*/%<>()\[\],.|!])""",
    re.VERBOSE | re.DOTALL,
)
_WORDS = {"true": True, "false": False, "null": None}
_RESERVED = {"if", "else", "and", "or", "not", "in"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}


def tokenize(text: str, start: int) -> tuple[list[Token], int]:
    """Tokens from offset ``start`` up to the closing braces, and the offset after those."""
    tokens: list[Token] = []
    at = start
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            what = "an unfinished string" if text[at] in "\"'" else f'"{text[at]}"'
            raise ExpressionError(f"{what} is not part of an expression", at + 1)
        kind, at = match.lastgroup, match.end()
        if at - start > MAX_LENGTH:
            raise ExpressionError(f"the expression is longer than {MAX_LENGTH} characters", start + 1)
        if kind != "space":
            tokens.append(Token(kind, match[0], match.start() + 1))
        if kind == "end":
            return tokens, at
    raise ExpressionError('"${{" without "}}"', start - 2)


def parse(tokens: list[Token]) -> Expr:
    """The tree of one expression; the last token is its end."""
    parser = _Parser(tokens)
    tree = parser.pipeline()
    parser.expect("}}")
    return tree


class _Parser:
    """Recursive descent; ``_depth`` bounds the recursion, here and in the evaluation of what is built."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0

    def pipeline(self) -> Expr:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(f"nested more than {MAX_DEPTH} deep", self._next.column)
        tree = self._choice()
        links = 0
        while self._accept("|"):
            token = self._take("name", "a function")
            arguments = self._arguments() if self._accept("(") else ()
            tree = Call(token.text, (tree, *arguments), token.column)
            links = self._chained(links)
        self._depth -= 1
        return tree

    def expect(self, text: str) -> None:
        if not self._accept(text):
            raise ExpressionError(f'expected "{text}", found {self._found()}', self._next.column)

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _found(self) -> str:
        return "the end" if self._next.kind == "end" else f'"{self._next.text}"'

    def _accept(self, *texts: str) -> Token | None:
        token = self._next
        if token.kind in ("string", "number") or token.text not in texts:
            return None
        self._at += 1
        return token

    def _take(self, kind: str, what: str) -> Token:
        token = self._next
        if token.kind != kind:
            raise ExpressionError(f"expected {what}, found {self._found()}", token.column)
        self._at += 1
        return token

    def _chained(self, links: int) -> int:
        """Chains such as ``a + b + c`` nest to the left: their length is depth as well."""
        if links + self._depth >= MAX_DEPTH:
            raise ExpressionError(f"more than {MAX_DEPTH} operations in a row", self._next.column)
        return links + 1

    def _choice(self) -> Expr:
        tree = self._or()
        token = self._accept("if")
        if token is None:
            return tree
        condition = self._or()
        self.expect("else")
        return Choice(condition, tree, self._nested(self._choice), token.column)

    def _nested(self, rule: Callable[[], Expr]) -> Expr:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(f"nested more than {MAX_DEPTH} deep", self._next.column)
        tree = rule()
        self._depth -= 1
        return tree

    def _chain(self, operand: Callable[[], Expr], operators: dict[str, str]) -> Expr:
        tree = operand()
        links = 0
        while token := self._accept(*operators):
            tree = Binary(operators[token.text], tree, operand(), token.column)
            links = self._chained(links)
        return tree

    def _or(self) -> Expr:
        return self._chain(self._and, {"or": "or", "||": "or"})

    def _and(self) -> Expr:
        return self._chain(self._not, {"and": "and", "&&": "and"})

    def _not(self) -> Expr:
        token = self._accept("not", "!")
        return Unary("not", self._nested(self._not), token.column) if token else self._comparison()

    def _comparison(self) -> Expr:
        left = self._sum()
        token = self._accept("==", "!=", "<", "<=", ">", ">=", "in")
        if token is not None:
            return Binary(token.text, left, self._sum(), token.column)
        token = self._accept("not")
        if token is None:
            return left
        self.expect("in")
        return Unary("not", Binary("in", left, self._sum(), token.column), token.column)

    def _sum(self) -> Expr:
        return self._chain(self._term, {"+": "+", "-": "-"})

    def _term(self) -> Expr:
        return self._chain(self._unary, {"*": "*", "/": "/", "//": "//", "%": "%"})

    def _unary(self) -> Expr:
        token = self._accept("-")
        return Unary("-", self._nested(self._unary), token.column) if token else self._postfix()

    def _postfix(self) -> Expr:
        tree = self._primary()
        links = 0
        while token := self._accept(".", "["):
            if token.text == ".":
                name = self._take("name", "a name")
                tree = Lookup(tree, Literal(name.text, name.column), name.column)
            else:
                tree = Lookup(tree, self.pipeline(), token.column)
                self.expect("]")
            links = self._chained(links)
        return tree

    def _primary(self) -> Expr:
        token = self._next
        if token.kind in ("number", "string"):
            self._at += 1
            return Literal(_number(token) if token.kind == "number" else _unquote(token.text), token.column)
        if token.kind == "name" and token.text not in _RESERVED:
            self._at += 1
            if token.text in _WORDS:
                return Literal(_WORDS[token.text], token.column)
            return (
                Call(token.text, self._arguments(), token.column)
                if self._accept("(")
                else Name(token.text, token.column)
            )
        if self._accept("("):
            tree = self.pipeline()
            self.expect(")")
            return tree
        if self._accept("["):
            return Items(self._arguments("]"), token.column)
        raise ExpressionError(f"expected a value, found {self._found()}", token.column)

    def _arguments(self, closing: str = ")") -> tuple[Expr, ...]:
        items: list[Expr] = []
        while not self._accept(closing):
            if items:
                self.expect(",")
            items.append(self.pipeline())
        return tuple(items)


def _number(token: Token) -> int | float:
    if token.text.isdigit():
        if len(token.text) > 18:
            raise ExpressionError("the number has more than 18 digits", token.column)
        return int(token.text)
    value = float(token.text)
    if value in (float("inf"), float("-inf")):
        raise ExpressionError("the number is too large", token.column)
    return value


def _unquote(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), text[1:-1], flags=re.DOTALL)
