"""The syntax of shell scripts: from text to commands and words, as bash reads them. Nothing is evaluated."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from areal.convert.shell_nodes import (
    AndOrList,
    ArithmeticCommand,
    ArithmeticExpansion,
    Assignment,
    Case,
    CommandSubstitution,
    CompoundCommand,
    For,
    FunctionDefinition,
    If,
    Literal,
    Node,
    ParameterExpansion,
    Part,
    Pipeline,
    Redirection,
    SimpleCommand,
    While,
    Word,
)


class ShellSyntaxError(ValueError):
    """Text that is not a shell script, or syntax that the parser does not know. ``line``: its first line."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


_BLANK = re.compile(r"(?:[ \t\r]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_RESERVED = re.compile(
    r"(?:if|then|elif|else|fi|for|select|while|until|do|done|case|esac|function|[{}!]|\[\[)(?=[\s;&|()]|$)"
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"[A-Za-z_]\w*|\d+|[@*#?$!-]")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(?:\[[^\]]*\])?\+?=")
_OPERATION = re.compile(r":[-=+?]|##|%%|//|\^\^|,,|[-=+?#%/^,:@]")
_REDIRECTED = re.compile(r"(\d*|\{\w+\})(&>>|&>|<<<|<<-|<<|<>|<&|>>|>&|>\||<|>)(?!\()")
_FUNCTION = re.compile(r"[^\s$\"'`\\(){}=;&|<>]+(?=[ \t]*\([ \t]*\))")
_FUNCTION_WORD = re.compile(r"function\s+")
_WORD_OF_NAME = re.compile(r"[^\s(){};&|]+")
_IN = re.compile(r"in\b")
_PARENTHESES = re.compile(r"[ \t]*\([ \t]*\)")
_OF_TEST = re.compile(r"[&|]{2}|[()<>\n](?!\()")
_KEY = re.compile(r"\[[^\]\s]*\]=")
_GROUP = re.compile(r"[<>]\(|(?<=[@!?*+])\(")
_ESCAPED = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_SHORT = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
_PREFIX = re.compile(r"[#!](?=[\w@*])")
_BACKQUOTED = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL)
_END_OF_WORD = " \t\r\n;&|()<>"
_PLAIN = re.compile(r"[^\s\\'\"`$;&|()<>{}\]]+")
_DECLARING = ("export", "local", "declare", "typeset", "readonly")
_MOST_FAULTS = 50
_MOST_DEPTH = 100


class Script(NamedTuple):
    """The commands of a script, and the first text in it that could not be read."""

    body: list[Node]
    fault: ShellSyntaxError | None


def read_script(text: str) -> Script:
    """Return the commands of a script. After a fault it is read on at the next line."""
    reader, found, faults = _Reader(text.replace("\r\n", "\n")), list[Node](), list[ShellSyntaxError]()
    while len(faults) < _MOST_FAULTS:
        begun = reader.skip()
        if begun >= len(reader.text):
            break
        try:
            found.append(reader.chain())
            reader.blanks()
            if reader.at < len(reader.text) and reader.text[reader.at] not in "\n;&":
                raise reader.fault(f"{reader.text[reader.at]!r} is not expected")
        except (ShellSyntaxError, RecursionError) as error:
            faults.append(error if isinstance(error, ShellSyntaxError) else reader.fault("too deeply nested", begun))
            end = reader.text.find("\n", begun)
            reader.at, reader.waiting, reader.depth = len(reader.text) if end < 0 else end + 1, [], 0
    return Script(found, faults[0] if faults else None)


class _Reader:
    """Reads a text from left to right. ``at``: the next character. ``waiting``: here-documents that begin after the
    present line, with the word that ends each."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0
        self.waiting: list[tuple[Redirection, str, bool]] = []
        self.newlines = [each.start() for each in re.finditer("\n", text)]
        self.is_cut = False

    def line(self, at: int) -> int:
        return bisect_right(self.newlines, at - 1) + 1

    def fault(self, what: str, at: int | None = None) -> ShellSyntaxError:
        return ShellSyntaxError(self.line(self.at if at is None else at), what)

    def matches(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return pattern.match(self.text, self.at)

    def takes(self, token: str) -> bool:
        """Skip ``token`` and return True if it comes next."""
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        return True

    def blanks(self) -> None:
        """Skip blanks, continued lines and a comment."""
        begun = self.at
        if (found := self.matches(_BLANK)) is not None:
            self.at = found.end()
        if self.text.startswith("#", self.at) and (self.at == 0 or self.text[self.at - 1] in _END_OF_WORD):
            self.is_cut = "\n" in self.text[begun : self.at]
            self.at = self.matches(_COMMENT).end()  # type: ignore[union-attr]

    def newline(self) -> None:
        """Skip the end of a line, and the here-documents after it."""
        self.at += 1
        for redirection, end, is_plain in self.waiting:
            lines = list[str]()
            for line in self.text[self.at :].splitlines(keepends=True):
                self.at += len(line)
                line = line.lstrip("\t") if redirection.operation == "<<-" else line
                if line.strip() == end:
                    break
                lines.append(line)
            text = "".join(lines)
            inner = _Reader(text)
            redirection.target = (Literal(text, True),) if is_plain else inner.parts("", quoted=True, quotes=False)
        self.waiting = []

    def skip(self) -> int:
        """Skip what may be between two commands, and return the position of the next one."""
        while True:
            self.blanks()
            if self.text.startswith("\n", self.at):
                self.newline()
            elif self.at < len(self.text) and self.text[self.at] in ";&" and self.text[self.at : self.at + 2] != ";;":
                self.at += 1
            else:
                return self.at

    def commands(self, *ends: str) -> tuple[list[Node], str]:
        """Read commands up to one of the ``ends``, which are reserved words or operators; and return which it is."""
        found, begun = list[Node](), self.at
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise self.fault("too deeply nested")
        while True:
            self.skip()
            word = self.reserved()
            for end in ends:
                if word == end or (end in (")", ";;") and self.text.startswith(end, self.at)):
                    self.at += len(end)
                    self.depth -= 1
                    return found, end
            if self.at >= len(self.text):
                raise self.fault(f"no {ends[-1]!r}", begun)
            found.append(self.chain())

    def chain(self) -> Node:
        found: list[tuple[str, Node]] = [("", self.pipeline())]
        while connected := next((each for each in ("&&", "||") if self.takes(each)), ""):
            self.skip()
            found.append((connected, self.pipeline()))
        return AndOrList(found) if len(found) > 1 else found[0][1]

    def pipeline(self) -> Node:
        negated = self.reserved() == "!"
        if negated:
            self.takes("!")
            self.blanks()
        found = [self.command()]
        while self.text.startswith("|", self.at) and not self.text.startswith("||", self.at):
            self.at += 2 if self.text.startswith("|&", self.at) else 1
            self.skip()
            found.append(self.command())
        return Pipeline(found) if negated or found[1:] else found[0]

    def reserved(self) -> str:
        """Return the reserved word that comes next, or ""."""
        found = self.matches(_RESERVED)
        return found[0] if found is not None else ""

    def takes_group(self) -> list[Node]:
        """Read the body of a loop."""
        self.skip()
        if self.takes("{"):
            return self.commands("}")[0]
        if not self.takes("do"):
            raise self.fault("no 'do'")
        return self.commands("done")[0]

    def command(self) -> Node:
        word, begun = self.reserved(), self.at
        if (name := self.matches(_FUNCTION)) is not None:
            self.at = name.end()
            return self.function(name[0])
        if word == "function":
            self.at = self.matches(_FUNCTION_WORD).end()  # type: ignore[union-attr]
            own = self.matches(_WORD_OF_NAME)
            self.at += len(own[0]) if own is not None else 0
            return self.function(own[0] if own is not None else "")
        node: Node
        if self.takes("(("):
            inner = self.parts(")", quoted=True)
            node = ArithmeticCommand(inner)
            if not self.takes("))"):
                self.at = begun + 1
                node = CompoundCommand(self.commands(")")[0], in_child=True)
        elif self.takes("("):
            node = CompoundCommand(self.commands(")")[0], in_child=True)
        elif word and word != "[[":
            self.at += len(word)
            node = self.compound(word)
        else:
            return self.simple()
        self.blanks()
        redirections = list(self.redirections())
        return CompoundCommand([node], in_child=False, redirections=redirections) if redirections else node

    def function(self, name: str) -> FunctionDefinition:
        if (both := self.matches(_PARENTHESES)) is not None:
            self.at = both.end()
        self.skip()
        return FunctionDefinition(name, self.command())

    def compound(self, word: str) -> Node:
        match word:
            case "{":
                return CompoundCommand(self.commands("}")[0], in_child=False)
            case "if":
                return self.branches()
            case "while" | "until":
                return While(self.commands("do")[0], self.commands("done")[0], word == "until")
            case "for":
                return self.loop()
            case "case":
                return self.case()
        raise self.fault(f"{word!r} is not expected")

    def branches(self) -> If:
        found, end = list[tuple[list[Node], list[Node]]](), "elif"
        while end == "elif":
            condition, _ = self.commands("then")
            body, end = self.commands("elif", "else", "fi")
            found.append((condition, body))
        if end == "else":
            found.append(([], self.commands("fi")[0]))
        return If(found)

    def loop(self) -> Node:
        self.blanks()
        if self.takes("(("):
            begun = self.at
            self.parts(")", quoted=True)
            before, condition, after = (*self.text[begun : self.at].split(";"), "", "")[:3]
            if not self.takes("))"):
                raise self.fault("no '))'", begun)
            step = [
                ArithmeticCommand(_Reader(each or "1").parts("", quoted=True))
                for each in (before, condition.strip(), after)
            ]
            return CompoundCommand(
                [step[0], While([step[1]], [*self.takes_group(), step[2]], until=False)], in_child=False
            )
        name, words = self.matches(_NAME), None
        if name is None:
            raise self.fault("no name of a variable")
        self.at = name.end()
        self.skip()
        if self.matches(_IN) is not None:
            self.at += 2
            words = []
            self.blanks()
            while self.at < len(self.text) and self.text[self.at] not in ";\n&":
                words.append(self.word())
                self.blanks()
        return For(name[0], words, self.takes_group())

    def case(self) -> Case:
        self.blanks()
        word, found = self.word(), list[tuple[list[Word], list[Node]]]()
        self.skip()
        if not self.takes("in"):
            raise self.fault("no 'in'")
        while True:
            self.skip()
            if self.reserved() == "esac":
                self.takes("esac")
                return Case(word, found)
            self.takes("(")
            patterns = list[Word]()
            while not patterns or self.takes("|"):
                self.blanks()
                patterns.append(self.word())
                self.blanks()
            if not self.takes(")"):
                raise self.fault("no ')' after a pattern")
            body, end = self.commands(";;", "esac")
            found.append((patterns, body))
            if end == "esac":
                return Case(word, found)

    def redirections(self) -> Iterator[Redirection]:
        while (found := self.matches(_REDIRECTED)) is not None:
            self.at = found.end()
            self.blanks()
            made, begun = Redirection(found[1], found[2]), self.at
            made.target = self.word()
            if found[2] in ("<<", "<<-"):
                is_plain = re.search(r"[\\'\"]", self.text[begun : self.at]) is not None
                self.waiting.append((made, _plain(made.target), is_plain))
            self.blanks()
            yield made

    def simple(self) -> SimpleCommand:
        begun = end = self.at
        made, self.is_cut = SimpleCommand(first=self.line(begun)), False
        in_test = self.text.startswith("[[", self.at)
        declares = True
        while self.at < len(self.text):
            if in_test and (operator := self.matches(_OF_TEST)) is not None:
                made.words.append((Literal(operator[0].strip(), False),))
                self.at = operator.end()
            elif not in_test and (found := list(self.redirections())):
                made.redirections += found
            elif declares and self.matches(_ASSIGNED) is not None:
                self.assignment(made)
            elif self.text[self.at] in "\n;&|()<>" and not self.text.startswith(("<(", ">("), self.at):
                break
            else:
                made.words.append(self.word())
                declares = _plain(made.words[0]) in _DECLARING
                in_test = in_test and _plain(made.words[-1]) != "]]"
            end = self.at
            self.blanks()
        if end == begun:
            raise self.fault(f"{self.text[begun : begun + 2].strip() or 'end of line'!r} is not expected")
        made.source, made.last, made.is_cut = self.text[begun:end], self.line(end), self.is_cut
        return made

    def assignment(self, made: SimpleCommand) -> None:
        name, key = self.matches(_ASSIGNED), Word()
        assert name is not None
        self.at += len(name[1])
        if self.takes("["):
            key = self.parts("]", quoted=False)
            self.takes("]")
        extends = self.takes("+=") or not self.takes("=")
        value: Word | list[tuple[Word, Word]] = ()
        if self.takes("("):
            value = self.elements()
        elif self.at < len(self.text) and self.text[self.at] not in _END_OF_WORD:
            value = self.word()
        made.assigned.append(Assignment(name[1], key, extends, value))

    def elements(self) -> list[tuple[Word, Word]]:
        """Read the elements of an array."""
        begun, found = self.at, list[tuple[Word, Word]]()
        while True:
            self.blanks()
            if self.at >= len(self.text):
                raise self.fault("no ')' after an array", begun)
            if self.text[self.at] == "\n":
                self.newline()
            elif self.takes(")"):
                return found
            elif (whole := self.matches(_KEY)) is not None:
                self.at += 1
                key = self.parts("]", quoted=False)
                self.at = whole.end()
                found.append((key, self.parts(_END_OF_WORD, quoted=False)))
            else:
                found.append(((), self.word()))

    def word(self) -> Word:
        begun = self.at
        found = self.parts(_END_OF_WORD, quoted=False)
        while self.matches(_GROUP) is not None:  # <(command), or a pattern like @(a|b)
            first = self.at
            self.at += 1 if self.text[self.at] == "(" else 2
            self.parts(")", quoted=True)
            self.at += 1
            found += (Literal(self.text[first : self.at], False), *self.parts(_END_OF_WORD, quoted=False))
        if self.at == begun:
            raise self.fault(f"{self.text[begun : begun + 1].strip() or 'end of line'!r} is not expected")
        return found

    def parts(self, ends: str, *, quoted: bool, quotes: bool = True) -> Word:
        """Read the parts of a word up to one of the characters ``ends``, outside of parentheses if that is ``)``.
        ``quoted``: within double quotes, or in arithmetic. ``quotes``: quotes are not characters of the text."""
        found, depth, text = list[Part](), 0, self.text
        while self.at < len(text):
            character = text[self.at]
            if character in ends and depth == 0:
                break
            depth += ((character == "(") - (character == ")")) if ends == ")" else 0
            if character == "\\" and self.at + 1 < len(text):
                following = text[self.at + 1]
                self.at += 2
                stays = quoted and following not in '$`"\\\n'
                found += [Literal("\\" * stays + following, True)] if following != "\n" else []
            elif character == "'" and quotes and not quoted:
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    raise self.fault("no closing '")
                found.append(Literal(text[self.at + 1 : end], True))
                self.at = end + 1
            elif character == '"' and quotes:
                self.at += 1
                found += self.parts('"', quoted=True) or (Literal("", True),)
                self.at += 1
            elif character == "$":
                found.append(self.dollar(quoted))
            elif character == "`":
                found.append(self.backquoted(quoted))
            else:
                run = self.matches(_PLAIN)
                end = run.end() if run is not None and not set(run[0]) & set(ends) else self.at + 1
                found.append(Literal(text[self.at : end], quoted))
                self.at = end
        if self.at >= len(text) and ends not in ("", _END_OF_WORD):
            raise self.fault(f"no closing {ends}")
        groups = (
            list(each) for _, each in groupby(found, lambda it: str(it.quoted) if isinstance(it, Literal) else id(it))
        )
        return tuple(
            each[0] if len(each) == 1 else Literal("".join(getattr(it, "text", "") for it in each), each[0].quoted)
            for each in groups
        )

    def dollar(self, quoted: bool) -> Part:
        begun, text = self.at, self.text
        if self.takes("$(("):
            try:
                inner = self.parts(")", quoted=True)
            except ShellSyntaxError:
                inner = ()
            if inner and self.takes("))"):
                return ArithmeticExpansion(inner, quoted)
            self.at = begun
        if self.takes("$("):
            body, _ = self.commands(")")
            return CommandSubstitution(body, text[begun : self.at], quoted)
        if self.takes("${"):
            return self.parameter(begun, quoted)
        if not quoted and (escaped := self.matches(_ESCAPED)) is not None:
            self.at = escaped.end()
            return Literal(escaped[1].replace("\\n", "\n").replace("\\t", "\t").replace("\\'", "'"), True)
        self.at += 1
        if (name := self.matches(_SHORT)) is not None:
            self.at = name.end()
            return ParameterExpansion(name[0], text[begun : self.at], quoted)
        return Literal("$", True)

    def parameter(self, begun: int, quoted: bool) -> ParameterExpansion:
        prefix = self.text[self.at] if self.matches(_PREFIX) is not None else ""
        self.at += len(prefix)
        name, index = self.matches(_PARAMETER), Word()
        if name is None:
            raise self.fault("this expansion is not read", begun)
        self.at = name.end()
        if self.takes("["):
            index = self.parts("]", quoted=True)
            self.takes("]")
        operation, operand = self.matches(_OPERATION), Word()
        if operation is not None:
            self.at = operation.end()
            operand = self.parts("}", quoted=quoted)
        if not self.takes("}"):
            raise self.fault("no closing }", begun)
        done = operation[0] if operation is not None else ""
        return ParameterExpansion(name[0], self.text[begun : self.at], quoted, prefix, index, done, operand)

    def backquoted(self, quoted: bool) -> CommandSubstitution:
        found = self.matches(_BACKQUOTED)
        if found is None:
            raise self.fault("no closing `")
        self.at = found.end()
        script = read_script(re.sub(r"\\([`$\\])", r"\1", found[1]))
        if script.fault is not None:
            raise self.fault(str(script.fault), found.start())
        return CommandSubstitution(script.body, found[0], quoted)


def _plain(word: Word) -> str:
    """Return the text of a word without expansions, or ""."""
    return "".join(each.text if isinstance(each, Literal) else "$" for each in word)
