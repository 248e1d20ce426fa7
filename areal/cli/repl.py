"""A chat with a model or an agent in the terminal: one message with ``-m`` or piped stdin, otherwise a prompt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import click

from areal.cli.failures import report
from areal.cli.options import Decorator, Invocation
from areal.errors import ArealError, UsageFault, did_you_mean

message_option: Decorator[Any] = click.option(
    "-m", "--message", metavar="TEXT", help="One shot: send TEXT, print the answer."
)


def message_of(cli: Invocation, given: str | None, command: str) -> str | None:
    """Return the message to send (``-m``, or piped text); None in a terminal, where the caller opens a prompt. Raises
    UsageFault for an empty message, and for a prompt with an output format of data."""
    if given is None and sys.stdin.isatty():
        if not cli.format.is_table:
            raise UsageFault("-o json needs a message: pass -m TEXT or pipe the text in")
        return None
    # Newlines at the end of piped text are removed, as by $(...) in a shell.
    text = given if given is not None else sys.stdin.read().rstrip("\n")
    if not text.strip():
        raise UsageFault("the message is empty", hint=f'{command} -m "TEXT"')
    return text


_QUOTES = '"""'
_LEAVING = ("bye", "exit", "quit")
_HELP = '''/bye              leave; Ctrl-D does too
/?                this help
"""               begin and end a text of many lines
Ctrl-C            stop the answer'''

Read = Callable[[str], str]


class Repl:
    """A conversation at a prompt. ``answer`` sends a text, prints the answer as it streams, and returns a remark on how
    it ended, or ""; it raises ArealError. ``read(prompt)`` returns a line and raises EOFError at the end of input.
    ``commands`` are called with the text after their name; ``help`` has a line for each."""

    def __init__(
        self,
        cli: Invocation,
        answer: Callable[[str], str],
        read: Read,
        commands: Mapping[str, Callable[[str], None]],
        help: str,
    ) -> None:
        self._cli = cli
        self._answer = answer
        self._read = read
        self._help = f"{help}\n{_HELP}"
        self._commands = {**commands, "?": self._show_help, "help": self._show_help}

    def run(self) -> int:
        leave = False
        while not leave:
            try:
                text = self._next()
            except EOFError:
                self._cli.info("")
                return 0
            except KeyboardInterrupt:
                self._cli.info("\n/bye or Ctrl-D leaves")
                continue
            try:
                if text.startswith("/"):
                    leave = self._command(text[1:])
                elif text.strip() and (remark := self._answer(text)):
                    self._cli.info(remark)
            except ArealError as error:
                report(error, self._cli)
        return 0

    def _show_help(self, rest: str) -> None:
        self._cli.info(self._help)

    def _next(self) -> str:
        line = self._read(">>> ")
        if not line.lstrip().startswith(_QUOTES):
            return line
        lines = [line.lstrip().removeprefix(_QUOTES)]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(self._read("... "))
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip("\n")

    def _command(self, text: str) -> bool:
        """Run a command. Returns whether to leave. Raises UsageFault for an unknown command."""
        name, _, rest = text.strip().partition(" ")
        if name in _LEAVING:
            return True
        if name not in self._commands:
            known = (*self._commands, *_LEAVING)
            raise UsageFault(f'no command "/{name}"{did_you_mean(name, known)}', hint="/? lists them")
        self._commands[name](rest.strip())
        return False


def read_line(prompt: str) -> str:
    """Read a line from the terminal, with arrow keys and the history of this session."""
    import readline  # noqa: F401 - its import makes input() editable

    return input(prompt)
