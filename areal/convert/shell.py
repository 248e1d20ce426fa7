"""The commands of a shell script that run a trainer, with the words that bash would pass to them.

Variables, arrays, arithmetic, functions, loops, and the files beside the script are followed, and a few commands that
only print (``dirname``, ``seq``, ``wc``). No other command is executed, so its output and its success are not known:
what depends on them stays a reference to the variable that decides (``${N}``). If a condition is not known, all of its
branches are read.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from areal.convert.reading import DOLLAR, Unread
from areal.convert.shell_nodes import (
    AndOrList,
    ArithmeticCommand,
    Case,
    CompoundCommand,
    For,
    FunctionDefinition,
    If,
    Node,
    ParameterExpansion,
    Pipeline,
    Redirection,
    SimpleCommand,
    While,
    Word,
)
from areal.convert.shell_printing import NotKnown, calculated, printed
from areal.convert.shell_syntax import read_script
from areal.convert.shell_words import Values, matches
from areal.dataclasses import dataclass, field

_MOST_STEPS = 100_000
_MOST_CALLS = 20
_MOST_CHARACTERS = 1 << 20


class Command(NamedTuple):
    """A command that runs a trainer. ``program``: the match of its name. ``launcher``: the words before it. ``first``
    and ``last``: its lines in the script. ``calls``: the lines of the functions' calls that lead to it. ``rest``: the
    number and the text of a later line that looks like a part of the command, but which a comment separates from it.
    ``unset``: variables that are never set, in whose place it has no words. ``written``: the texts of the files that
    the script wrote before, by name."""

    program: re.Match[str]
    launcher: list[str]
    words: list[str]
    first: int = 0
    last: int = 0
    rest: tuple[int, str] | None = None
    calls: tuple[int, ...] = ()
    unset: tuple[str, ...] = ()
    written: Mapping[str, str] = MappingProxyType({})


def script_commands(text: str, programs: re.Pattern[str], environment: Mapping[str, str], name: str) -> list[Command]:
    """Return the commands that run one of ``programs``, which match one word, or two with a space between them. Raises
    Unread for a script without such a command that cannot be read."""
    run = _Run(programs)
    shell = _Shell({"PWD": str(Path.cwd()), **environment}, script=Path(name), run=run, exported=set(environment))
    body, fault = read_script(text)
    try:
        shell.nodes(body)
    except RecursionError as error:
        raise Unread(f"{name}: too deeply nested") from error
    for function in () if run.found else tuple(shell.functions.values()):  # which another script calls
        shell.node(function.body)
    for written in () if run.found else tuple(run.written.values()):  # a file that is run elsewhere
        shell.child().read(written)
    if not run.found and fault is not None and programs.search(text):
        raise Unread(f"{name}:{fault.line}: the command cannot be read: {fault}")
    return run.found


@dataclass
class _Run:
    """What all shells of one reading share. ``written``: the texts of files."""

    programs: re.Pattern[str]
    steps: int = 0
    found: list[Command] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)


# How a list of commands is left before its end.
_EXIT, _FAIL, _RETURN, _BREAK, _CONTINUE = "exit", "fail", "return", "break", "continue"
_ARGUMENT = re.compile(r"\s*(?:--\w|\+*\w+(?:\.\w+)+=)")
_RUN_FILE = re.compile(r"^(?:(?:bash|sh|sbatch) (?!-)(.+)|(\.{1,2}/\S*|\S+\.sh))$", re.DOTALL)
_RUNS = re.compile(r"\b(?:bash|sh|source|sbatch)\s+\S|\.sh\b")
_PYTHON = {"python", "python3"}
_SHELLS = {"bash", "sh", "sbatch", "ssh", "srun"}
_TESTS = ("[", "[[", "test")
_DECLARING = ("export", "local", "declare", "typeset", "readonly")
_SUCCEED = ("cd", "mkdir", "echo", "printf", "shopt", "ulimit", "trap", "sleep", "wait", "true", ":")
_OF_NPU = re.compile(r"-c import torch_npu\s*$")
_HERE = ("<<", "<<-", "<<<")


@dataclass
class _Shell(Values):
    """A shell. ``within``: the scripts that run this one. ``place``: the lines that the present command is in.
    ``local``: the earlier values of a function's local variables. ``status``: whether the last command succeeded.
    ``is_certain``: the present branch runs. ``given``, ``printed``: its input, and its output if that is read."""

    run: _Run = field(default_factory=lambda: _Run(re.compile("")))
    exported: set[str] = field(default_factory=set)
    functions: dict[str, FunctionDefinition] = field(default_factory=dict)
    within: tuple[Path, ...] = ()
    place: tuple[int, int] | None = None
    calls: tuple[int, ...] = ()
    local: dict[str, str | None] | None = None
    status: bool | None = True
    is_certain: bool = True
    given: str | None = None
    printed: list[str] | None = None

    def child(self) -> _Shell:
        """Return a copy with the same state, whose changes this shell does not see."""
        made = copy.copy(self)
        made.become(self)
        return made

    def become(self, other: _Shell) -> None:
        self.variables, self.arrays, self.arguments = dict(other.variables), dict(other.arrays), other.arguments
        self.exported, self.functions = set(other.exported), dict(other.functions)

    # lists of commands

    def read(self, text: str) -> str | None:
        """Run the commands of a text, and return how it is left; None at its end."""
        return self.nodes(read_script(text).body)

    def nodes(self, nodes: Sequence[Node]) -> str | None:
        found, cut = self.run.found, False
        for node in nodes:
            if cut and isinstance(node, SimpleCommand) and _ARGUMENT.match(node.source):
                found[-1] = found[-1]._replace(rest=(node.first, node.source.replace("\\\n", " ")))
            before = len(found)
            left = self.node(node)
            cut = isinstance(node, SimpleCommand) and node.is_cut and len(found) > before
            if left is not None and (left != _FAIL or not self.is_certain or self.calls):
                return left
        return None

    def node(self, node: Node) -> str | None:
        self.run.steps += 1
        if self.run.steps > _MOST_STEPS:
            raise Unread(f"{self.script}: it runs more than {_MOST_STEPS:,} commands")
        match node:
            case SimpleCommand():
                return self.simple(node)
            case Pipeline():
                return self.pipeline(node)
            case AndOrList():
                return self.chain(node)
            case If():
                branches = [(lambda it=it: self.condition(it), body) for it, body in node.branches]
                return self.branches(branches, self.cause(node))
            case Case():
                word = self.text(node.word)
                tests = [
                    (lambda it=it: matches(word, [self.text(each) for each in it]), body) for it, body in node.branches
                ]
                return self.branches(tests, self.named([word, *_sources([node.word])]), is_case=True)
            case For():
                return self.loop(node)
            case While():
                return self.repeat(node)
            case CompoundCommand():
                shell = self.child() if node.in_child else self
                given, shell.given = self.given, self.input(node.redirections)
                left = shell.nodes(node.body)
                shell.given, self.status = given, shell.status
                return None if node.in_child else left
            case ArithmeticCommand():
                found = calculated(self.text(node.inner), self.variables)
                self.status = None if "$" in found else found != "0"
            case FunctionDefinition():
                self.functions[node.name] = node
        return None

    def pipeline(self, node: Pipeline) -> str | None:
        if not node.commands[1:]:
            left = self.node(node.commands[0])
            self.status = None if self.status is None else not self.status
            return left
        given, is_read = self.given, self.printed is not None
        for place, command in enumerate(node.commands):
            part = self.child()
            part.given, part.printed = given, []
            try:
                part.node(command)
                given = "".join(part.printed)
            except NotKnown:
                given = None
                if is_read and place == len(node.commands) - 1:
                    raise
        if self.printed is not None:
            self.printed.append(given or "")
        self.status = None
        return None

    def chain(self, node: AndOrList) -> str | None:
        for operator, command in node.commands:
            if self.status is None and operator:  # it may also be left out
                before, end = self.child(), self.child()
                end.is_certain = False
                if end.node(command) is None:
                    self.merge([before, end], self.cause(node.commands[0][1]))
                self.status = None
            elif (not operator or self.status == (operator == "&&")) and (left := self.node(command)) is not None:
                return left
        return None

    def condition(self, condition: Sequence[Node]) -> bool | None:
        self.status = True
        self.nodes(condition)
        return self.status

    def branches(
        self, branches: Sequence[tuple[object, Sequence[Node]]], cause: str, *, is_case: bool = False
    ) -> str | None:
        """Run the branch whose test holds. If that is not known, run each that may be it, and merge their ends."""
        ends, before, is_sure = list[_Shell](), self.child(), False
        for test, body in branches:
            assert callable(test)
            holds = test()
            if holds is False:
                continue
            if holds and not ends:
                left = self.nodes(body)
                if left == _FAIL:  # usually a check of arguments: the script is read on
                    self.become(before)
                return None if left == _FAIL else left
            end = before.child()
            end.is_certain = False
            ends += [end] if end.nodes(body) is None else []
            is_sure = is_sure or holds is True
            if is_sure:
                break
        if not is_sure and not (is_case and ends):  # one pattern of a case always matches
            ends.append(before)
        self.merge(ends or [before], cause)
        self.status = None
        return None

    def loop(self, node: For) -> str | None:
        words = self.arguments or [] if node.words is None else self.fields(node.words)
        if any("$" in each or "*" in each for each in words):
            words = [f"${{{node.name}}}"]
        for word in words:
            self.variables[node.name] = word
            left = self.nodes(node.body)
            if left not in (None, _CONTINUE):
                return None if left == _BREAK else left
        return None

    def repeat(self, node: While) -> str | None:
        """Run a loop until its condition does not hold, or a round changes nothing. If it is not known how often it
        runs, what a round changes is not known."""
        while True:
            before = self.child()
            self.arguments = self.arguments or []  # a script that reads its arguments has none
            holds = self.condition(node.condition)
            self.arguments = self.arguments or before.arguments
            if holds is node.until:
                return None
            left = self.nodes(node.body)
            if left not in (None, _CONTINUE):
                return None if left in (_BREAK, _FAIL) else left
            state = (self.variables, self.arrays, self.arguments)
            if state == (before.variables, before.arrays, before.arguments):
                return None
            may_end = any(each.source.strip() == _BREAK for each in _simple_commands(node.body))
            if holds is None or may_end or self.run.steps > _MOST_STEPS // 2:
                for key in {key for key in before.variables if self.variables.get(key) != before.variables[key]}:
                    self.variables[key] = f"${{{self.cause(node) or key}}}"
                return None

    def merge(self, ends: Sequence[_Shell], cause: str) -> None:
        """Take the state after several branches, one of which has run. The value of a variable that they set
        differently is a reference to ``cause``, the variable that decides between them."""
        self.become(ends[0])
        if cause and len(ends) > 1:
            self.variables[cause] = f"${{{cause}}}"
        for key in {key for end in ends for key in end.variables} - {cause}:
            found = {end.variables[key] for end in ends if key in end.variables}
            self.variables[key] = found.pop() if len(found) == 1 else f"${{{cause or key}}}"
        for key in {key for end in ends for key in end.arrays}:
            arrays = [end.arrays.get(key, {}) for end in ends]
            if any(each != arrays[0] for each in arrays):
                options = [_options(list(each.values())) for each in arrays]
                common = {each: all(each in others for others in options) for each in chain(*options)}
                words = [each if known else _unknown(each, cause or key) for each, known in common.items()]
                self.arrays[key] = {str(place): word for place, word in enumerate(chain(*words))}

    def cause(self, node: Node) -> str:
        """Return the first variable of a condition that is not known, or ""."""
        written = [word for each in _simple_commands(_conditions(node)) for word in each.words]
        return self.named([*(self.text(each) for each in written), *_sources(written)])

    # simple commands

    def simple(self, node: SimpleCommand) -> str | None:
        self.unset.clear()
        words, self.status = self.fields(node.words), True
        if not self.within and (not self.calls or self.place is None) and self.printed is None:
            self.place = (node.first, node.last)
        name, arguments = words[0] if words else "", words[1:]
        if not words or name in _DECLARING:
            self.declare(node, name, arguments)
        elif name in self.functions and len(self.calls) < _MOST_CALLS:
            return self.call(self.functions[name], arguments, node)
        elif name in (_BREAK, _CONTINUE, _RETURN):
            return name
        elif name == "exit":
            return _EXIT if arguments[:1] in ([], ["0"]) else _FAIL
        elif name in _TESTS:
            self.status = self.holds(node.words)
        elif name == "eval":
            return self.read(" ".join(arguments).replace(DOLLAR, "$"))
        elif name in ("source", "."):
            return self.source(arguments)
        elif not self.builtin(name, arguments, node):
            self.status = None
            self.external(node, words)
        return None

    def declare(self, node: SimpleCommand, name: str, arguments: Sequence[str]) -> None:
        """Make assignments, also those of ``export`` and ``local``."""
        names = [each.name for each in node.assigned] + [each for each in arguments if each.isidentifier()]
        for each in names if self.local is not None and name in ("local", "declare", "typeset") else ():
            self.local.setdefault(each, self.variables.get(each))  # type: ignore[union-attr]
        for assigned in node.assigned:
            self.assign(assigned)
        if name == "export" or "-x" in arguments or "-a" in self.exported:
            self.exported.update(names)
        if not name and any("$(" in self.variables.get(each, "") for each in names):
            self.status = None

    def call(self, function: FunctionDefinition, arguments: list[str], node: SimpleCommand) -> str | None:
        """Call a function. Its local variables have their earlier values afterwards."""
        outer = (self.arguments, self.calls, self.local, self.place)
        self.arguments, self.local, self.calls = arguments, {}, (*self.calls, node.first)
        self.place = self.place if self.within else None
        self.local |= {each.name: self.variables.get(each.name) for each in node.assigned}
        for each in node.assigned:
            self.assign(each)
        left = self.node(function.body)
        for name, value in self.local.items():
            self.variables.pop(name, None)
            self.variables |= {} if value is None else {name: value}
        self.arguments, self.calls, self.local, self.place = outer
        return None if left == _RETURN else left

    def builtin(self, name: str, arguments: Sequence[str], node: SimpleCommand) -> bool:
        """Run a command of the shell itself, or one whose output is known. Return False for any other."""
        if name == "unset":
            for each in arguments:
                self.variables.pop(each, None)
                self.arrays.pop(each, None)
        elif name == "shift":
            count = int(arguments[0]) if arguments and arguments[0].isdigit() else 1
            self.arguments = self.arguments if self.arguments is None else self.arguments[count:]
        elif name == "set":
            at = list(arguments).index("--") + 1 if "--" in arguments else None
            self.arguments = self.arguments if at is None else list(arguments[at:])
            is_all = any(re.match(r"-[a-z]*a", each) for each in arguments[:at])
            self.exported = (
                self.exported | {"-a"} if is_all else self.exported - {"-a"} if "+a" in arguments else self.exported
            )
        elif name == "let":
            calculated(" ".join(arguments), self.variables)
        elif name == "false":
            self.status = False
        elif name == "read":
            self.read_input(arguments, node)
        elif name == "getopts":
            self.status = None if self.arguments else False
        elif self.printed is not None or name in ("echo", "cat"):
            return self.prints(name, arguments, node)
        else:
            return name in _SUCCEED
        return True

    def prints(self, name: str, arguments: Sequence[str], node: SimpleCommand) -> bool:
        """Add what a command prints to the output, or to a file. Return whether that is known."""
        text = printed(name, arguments, self.input(node.redirections), self.variables.get("PWD", ""))
        files = [each for each in node.redirections if each.operation in (">", ">>", ">|") and each.channel != "2"]
        if text is None:
            return self.printed is None and name == "echo"
        for each in files:
            file = self.text(each.target)
            earlier = self.run.written.get(file, "") if each.operation == ">>" else ""
            self.run.written[file] = earlier + text.replace(DOLLAR, "$")
        if self.printed is not None and not files:
            self.printed.append(text)
        if name == "cd" and arguments:
            self.variables["PWD"] = os.path.normpath(Path(self.variables.get("PWD", ""), arguments[0]))
        return True

    def output(self, body: Sequence[Node]) -> str:
        child = self.child()
        child.printed, child.is_certain = [], False
        child.nodes(body)
        self.status = child.status
        return "".join(child.printed)

    def input(self, redirections: Sequence[Redirection]) -> str | None:
        """Return the standard input of a command, if it is known."""
        for each in redirections:
            if each.operation in (*_HERE, "<"):
                text = self.text(each.target)
                return self.run.written.get(text) if each.operation == "<" else text
        return self.given

    def read_input(self, arguments: Sequence[str], node: SimpleCommand) -> None:
        """Read variables, or an array (``-a``), from the first line of the input or the whole input (``-d ''``)."""
        flags = "".join(each for each in arguments if each.startswith("-"))
        names = [each for each in arguments if each.isidentifier()] or ["REPLY"]
        text, separator = self.input(node.redirections), None
        for each in node.assigned:
            separator = self.text(each.value) if each.name == "IFS" and isinstance(each.value, tuple) else separator
        if text is None or "$(" in text:
            self.status = None
            self.variables |= {each: f"${{{each}}}" for each in names}
            return
        line = text if "d" in flags else text.partition("\n")[0]
        if "a" in flags:
            self.arrays[names[0]] = {str(place): each for place, each in enumerate(line.split(separator or None))}
        else:
            pieces = line.strip().split(separator or None, len(names) - 1) if names[1:] else [line.strip()]
            self.variables |= dict(zip(names, [*pieces, *[""] * len(names)], strict=False))

    # commands that are not run

    def external(self, node: SimpleCommand, words: list[str]) -> None:
        """Find the trainer in a command, or in the texts and the file that it runs."""
        before = ["", *words]
        whole = [
            each for last, each in zip(before, words, strict=False) if each.strip(" \t\"'") or last.startswith("--")
        ]
        found, run = _command(whole, self.run.programs), self.run
        if found is not None:
            first, last = self.place or (node.first, node.last)
            unset = tuple(dict.fromkeys(self.unset))
            placed = found._replace(first=first, last=last, calls=self.calls)
            run.found.append(placed._replace(unset=unset, written=dict(run.written)))
        elif not self.run_texts(whole, node):
            self.run_file(node, whole)
        if _OF_NPU.search(" ".join(words)):  # areal runs on CUDA and on CPUs
            self.status = False
        elif self.printed is not None:
            raise NotKnown

    def run_texts(self, words: Sequence[str], node: SimpleCommand) -> bool:
        """Run the texts of ``bash -c TEXT`` and the like, and the here-document of a shell. Return whether the trainer
        is in one of them."""
        texts = [
            each
            for last, each in pairwise(words)
            if re.search(r"\s", each.strip()) and not (last == "-c" and _PYTHON & set(words))
        ]
        if _SHELLS & set(words[:3]):
            texts += [self.text(each.target) for each in node.redirections if each.operation in _HERE]
        before = len(self.run.found)
        for text in (each.replace(DOLLAR, "$") for each in texts):
            if self.run.programs.search(re.sub(r"[\"'\\]\n?", " ", text)) or _RUNS.search(text):
                child = self.child()
                child.printed, child.within = None, (*self.within, self.script)
                child.read(text)
        return len(self.run.found) > before

    def run_file(self, node: SimpleCommand, words: list[str]) -> None:
        """Follow a script that is run, with its arguments and the exported variables."""
        pairs = [
            (at, _RUN_FILE.match(each))
            for at in range(len(words))
            for each in (" ".join(words[max(0, at - 1) : at + 1]), words[at])
        ]
        at, called = next(((at, match) for at, match in pairs if match is not None), (0, None))
        path, text = self.file(called[1] or called[2]) if called is not None else (None, None)
        if path is None or text is None:
            return
        exported = self.variables if "-a" in self.exported else self.exported & self.variables.keys()
        variables = {key: self.variables[key] for key in exported} | {"PWD": self.variables.get("PWD", "")}
        variables |= {name: value for name, equals, value in (each.partition("=") for each in words[:at]) if equals}
        variables |= {each.name: self.text(each.value) for each in node.assigned if isinstance(each.value, tuple)}
        child = _Shell(variables, script=path, run=self.run, exported={*self.exported, *variables})
        child.arguments, child.within, child.place = words[at + 1 :], (*self.within, self.script), self.place
        child.read(text)

    def source(self, arguments: Sequence[str]) -> str | None:
        path, text = self.file(arguments[0]) if arguments else (None, None)
        if path is None or text is None:
            return None
        outer = (self.within, self.script, self.arguments)
        self.within, self.script = (*self.within, self.script), path
        self.arguments = list(arguments[1:]) or self.arguments
        left = self.read(text)
        self.within, self.script, self.arguments = outer
        return None if left == _RETURN else left

    def file(self, name: str) -> tuple[Path, str | None]:
        """Return the path and the text of a file that the script wrote, or that is in the working directory or in that
        of the script; no text for one that is being read. If ``name`` has an unknown variable, its last part beside the
        script is tried too."""
        if name in self.run.written:
            return Path(name), self.run.written.pop(name)
        folder = self.script.parent
        tried = (Path(name), folder / name, *([folder / name.rpartition("/")[2]] if "$" in name else []))
        path = next((each for each in tried if each.is_file() and each not in (self.script, *self.within)), None)
        try:
            text = path.read_text("utf-8-sig") if path is not None and path.stat().st_size < _MOST_CHARACTERS else None
        except (OSError, UnicodeDecodeError):
            text = None
        return path or Path(name), text


def _conditions(node: Node) -> Sequence[Node]:
    """Return the commands that decide what ``node`` does."""
    match node:
        case If():
            return [each for condition, _ in node.branches for each in condition]
        case While():
            return node.condition
    return [node]


def _simple_commands(nodes: Sequence[Node]) -> Iterator[SimpleCommand]:
    for node in nodes:
        match node:
            case SimpleCommand():
                yield node
            case Pipeline():
                yield from _simple_commands(node.commands)
            case AndOrList():
                yield from _simple_commands([each for _, each in node.commands])
            case If():
                yield from _simple_commands([each for condition, body in node.branches for each in (*condition, *body)])
            case Case():
                yield from _simple_commands([each for _, body in node.branches for each in body])
            case CompoundCommand() | For() | While():
                yield from _simple_commands(node.body)
            case ArithmeticCommand():
                names = re.findall(r"[A-Za-z_]\w*", "".join(getattr(each, "text", "") for each in node.inner))
                yield SimpleCommand(
                    [], [node.inner, *((ParameterExpansion(name, f"${name}", True),) for name in names)], []
                )


def _sources(words: Sequence[Word]) -> list[str]:
    """Return references to the variables in ``words`` that have no default."""
    parts = (part for word in words for part in word if isinstance(part, ParameterExpansion))
    return [f"${part.name}" for part in parts if part.operation not in (":-", "-")]


def _options(words: Sequence[str]) -> list[tuple[str, ...]]:
    """Group words into options: ``key=value``, or ``--key`` with the values that follow it."""
    found = list[tuple[str, ...]]()
    for word in words:
        if found and found[-1][0].startswith("--") and "=" not in found[-1][0] + word and not word.startswith("--"):
            found[-1] = (*found[-1], word)
        else:
            found.append((word,))
    return found


def _unknown(option: Sequence[str], cause: str) -> Sequence[str]:
    """Return an option with a reference to ``cause`` in place of its value; a word without a value stays."""
    key, equals, _ = option[0].partition("=")
    return [f"{key}=${{{cause}}}"] if equals or key.startswith("--") else option


def _command(words: Sequence[str], programs: re.Pattern[str]) -> Command | None:
    """Return the command whose program the words name; None if they name none."""
    for at in range(len(words) - 1, -1, -1):
        pair = " ".join(words[max(0, at - 1) : at + 1])
        match = programs.search(pair)
        of_another = re.match(r"--\w+ ", pair) and any(each.endswith(".py") for each in words[:at])
        if of_another or "=" in words[at] or re.search(r"\s", words[at].strip()):
            continue  # an argument
        if match is not None and match.end() == len(pair):
            return Command(match, list(words[:at]), list(words[at + 1 :]))
    return None
