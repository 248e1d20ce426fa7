"""The chat prompt: text is a question, ``/`` a command, ``\"\"\"`` opens and closes a text of many lines."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING

from areal.cli.failures import report
from areal.errors import ArealError, UsageFault

if TYPE_CHECKING:
    from areal.cli.inf.conversation import Conversation
    from areal.cli.invocation import Invocation

_QUOTES = '"""'
_HELP = '''/set NAME VALUE   system, model, temperature, max_tokens, top_p, seed, stop, ...; no VALUE unsets
/set              what is set
/save FILE        save the conversation
/load FILE        go on with a saved one
/clear            forget what was said
/bye              leave; Ctrl-D does too
/?                this help
"""               begin and end a text of many lines
Ctrl-C            stop the answer'''

Read = Callable[[str], str]


class Repl:
    """One conversation at a prompt. ``read(prompt)`` gives a line and raises EOFError at the end."""

    def __init__(self, cli: Invocation, talk: Conversation, read: Read) -> None:
        self._cli = cli
        self._talk = talk
        self._read = read
        self._commands: dict[str, Callable[[str], bool]] = {
            "set": self._set,
            "save": self._save,
            "load": self._load,
            "clear": self._clear,
            "bye": lambda rest: True,
            "exit": lambda rest: True,
            "quit": lambda rest: True,
            "?": self._help,
            "help": self._help,
        }

    def run(self) -> int:
        while True:
            try:
                text = self._next()
            except EOFError:
                self._cli.say("")
                return 0
            except KeyboardInterrupt:
                self._cli.say("\n/bye or Ctrl-D leaves")
                continue
            try:
                if self._take(text):
                    return 0
            except ArealError as error:
                report(error, self._cli)

    def _take(self, text: str) -> bool:
        """Whether to leave."""
        if not text.strip():
            return False
        if text.startswith("/"):
            return self._command(text[1:])
        answer = self._talk.ask(text, show=True)
        if answer.stopped:
            self._cli.say("(stopped)")
        elif answer.finish_reason == "length":
            self._cli.say("(cut at the longest answer; /set max_tokens N allows more)")
        return False

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
        name, _, rest = text.strip().partition(" ")
        if name not in self._commands:
            from areal.resources.suggest import did_you_mean

            raise UsageFault(f'no command "/{name}"{did_you_mean(name, self._commands)}', hint="/? lists them")
        return self._commands[name](rest.strip())

    def _set(self, rest: str) -> bool:
        if not rest:
            for name, value in self._talk.settings.items():
                self._cli.say(f"{name} {value}")
            return False
        name, _, value = rest.partition(" ")
        self._talk.set(name, value.strip().strip('"'))
        return False

    def _save(self, rest: str) -> bool:
        path = _path(rest, "/save")
        self._talk.save(path)
        self._cli.say(f"saved {len(self._talk.messages)} messages to {path}")
        return False

    def _load(self, rest: str) -> bool:
        path = _path(rest, "/load")
        self._talk.load(path)
        self._cli.say(f"loaded {len(self._talk.messages)} messages from {path}")
        return False

    def _clear(self, rest: str) -> bool:
        self._talk.messages.clear()
        self._cli.say("forgotten")
        return False

    def _help(self, rest: str) -> bool:
        self._cli.say(_HELP)
        return False


def _path(rest: str, command: str) -> str:
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise UsageFault(f"{command}: {error}") from None
    if len(words) != 1:
        raise UsageFault(f"{command} takes one file", hint=f"{command} talk.json")
    return words[0]


def read_line(prompt: str) -> str:
    """A line from the terminal, with the arrow keys and the history of this session."""
    import readline  # noqa: F401 - its import makes input() editable

    return input(prompt)
