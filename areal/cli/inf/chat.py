"""``areal inf chat``: answers one message with ``-m`` or piped stdin; else it opens an interactive prompt."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sys
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal import interrupt
from areal.cli.objects import model_name_option, service_name, service_option
from areal.cli.options import FiniteRange, Invocation, read_options, timeout
from areal.cli.output import Column, camel, dump, render_table, write
from areal.cli.remote import gateway, gateway_of, model_at
from areal.cli.repl import Repl, message_of, message_option, read_line
from areal.client.gateway import GatewayClient
from areal.dataclasses import dataclass, field, replace
from areal.errors import ArealError, UsageFault, did_you_mean
from areal.files import parse_json
from areal.reconcilers.home_view import HomeView, service_of
from areal.resources.kinds import MODEL, served_name

if TYPE_CHECKING:
    from areal.client.http import ChatClient, ChatDelta, TokenLogprob


_ANSWER_S, _LOOK_S = 600.0, 2.0
_HELD = ("Progressing", "Failed", "Missing", "Suspended")  # phases in which a gateway holds requests


@click.command()
@service_option
@model_name_option(required=False)
@message_option
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("--temperature", type=FiniteRange(min=0), metavar="T", help="Sampling temperature.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Longest answer.")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is whole.")
@click.option("--show-logprobs", is_flag=True, help="Print each token with its log-probability.")
@timeout("10m", "Give up after this long without output (exit 7)", positive=True)
@read_options()
def chat(cli: Invocation, /, service: str | None, message: str | None, **given: Any) -> int:
    """Talk to a model: one shot with -m or piped stdin, else a prompt (/? lists its commands).

    \b
    areal inf chat -m "What is 17 * 23?"
    git diff | areal inf chat --system "Write a commit message." --max-tokens 200
    """
    from areal.client.http import ChatClient

    given["model"] = model_at(cli, service, given["model"])
    given |= {"stream": False if given.pop("no_stream") else None, "logprobs": given.pop("show_logprobs") or None}
    chosen = gateway_of(cli, service)
    _require_serving(cli, chosen, service, given["model"])
    client = ChatClient(chosen.url, chosen.key, cli.timeout_s or _ANSWER_S)
    talk = ModelChat(client, {name: value for name, value in given.items() if value is not None})
    text = message_of(cli, message, "areal inf chat")
    return _prompt(cli, talk) if text is None else _one_shot(cli, talk, text)


def _one_shot(cli: Invocation, talk: ModelChat, text: str) -> int:
    readable = cli.format.is_table or cli.format.kind == "name"
    answer = talk.ask(text, show=readable)
    if answer.stopped:
        return interrupt.STATUS
    if not readable:
        write(dump(cli.format, answer.document(talk.model)))
    elif answer.finish_reason == "length":
        cli.info("(cut at the longest answer; --max-tokens allows more)")
    return 0


def _prompt(cli: Invocation, talk: ModelChat) -> int:
    models = talk.client.models()
    if talk.model is None and len(models) == 1:
        talk.settings["model"] = models[0]
    if talk.model is None:
        raise UsageFault(f"there are {len(models)} models; say which", hint=f"--model {models[0]}" if models else None)
    cli.info(f"talking to {talk.model} at {talk.client.url}; /? for help")
    return Repl(cli, talk.answer, read_line, _commands(cli, talk), _HELP).run()


_HELP = """/set NAME VALUE   system, model, temperature, max_tokens, top_p, seed, stop, ...; no VALUE unsets
/set              list the settings
/save FILE        save the conversation
/load FILE        load a saved conversation
/clear            clear the conversation"""


def _commands(cli: Invocation, talk: ModelChat) -> dict[str, Callable[[str], None]]:
    def set_(rest: str) -> None:
        if not rest:
            for name, value in talk.settings.items():
                cli.info(f"{name} {value}")
            return
        name, _, value = rest.partition(" ")
        talk.set(name, value.strip().strip('"'))

    def save(rest: str) -> None:
        talk.save(path := _path(rest, "/save"))
        cli.info(f"saved {len(talk.messages)} messages to {path}")

    def load(rest: str) -> None:
        talk.load(path := _path(rest, "/load"))
        cli.info(f"loaded {len(talk.messages)} messages from {path}")

    def clear(rest: str) -> None:
        talk.messages.clear()
        cli.info("forgotten")

    return {"set": set_, "save": save, "load": load, "clear": clear}


def _path(rest: str, command: str) -> str:
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise UsageFault(f"{command}: {error}") from None
    if len(words) != 1:
        raise UsageFault(f"{command} takes one file", hint=f"{command} talk.json")
    return words[0]


_NUMBERS = {
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "top_k": int,
    "max_tokens": int,
    "seed": int,
    "presence_penalty": float,
    "frequency_penalty": float,
}
_SWITCHES = ("stream", "logprobs")
SETTINGS = ("system", "model", "stop", *_NUMBERS, *_SWITCHES)
_FORMAT = "areal-chat/1"

_LOGPROBS = (
    Column("TOKEN", lambda row: json.dumps(row["token"], ensure_ascii=False)),
    Column("LOGPROB", lambda row: row["logprob"], right=True),
)


def _require_serving(cli: Invocation, chosen: GatewayClient, service: str | None, model: str | None) -> None:
    """Raise ArealError with the reason if ``model``, or every model of the service, is known not to serve: the gateway
    would hold a request until it does."""
    if gateway(cli) is not None:
        from areal.cli.remote_view import GatewayAnswers, model_healths

        try:
            workers = replace(chosen, timeout_s=_LOOK_S).get("/workers")
        except ArealError:  # the key may not see them
            return
        healths = model_healths(GatewayAnswers((200, {}), (), workers))
        seen = [(name, name, it.phase, it.ready, it.message) for name, it in healths.items()]
    else:
        home, host = HomeView(cli.home), service_name(cli, service)
        items = [item for item in home.of_kind(MODEL) if service_of(item) == host]
        found = home.statuses(items)
        seen = [
            (served_name(item.name, item.spec), item.name, status.phase, status.ready_replicas, status.message)
            for item in items
            if (status := found[str(item.ref)])
        ]
    wanted = [about for served, *about in seen if model in (None, served)]
    if not wanted or any(ready or phase not in _HELD for _, phase, ready, _ in wanted):
        return
    name, phase, _, message = wanted[0]
    why = f"model/{name} is {phase}" + (f": {message}" if message else "")
    first = {"Failed": "", "Suspended": f"areal resume model/{name}; "}
    step = first.get(str(phase), f"areal wait model/{name} --for ready; ")
    raise ArealError(why, hint=f"{step}areal describe model/{name}")


@dataclass
class ChatAnswer:
    """A model's answer. ``stopped``: the user interrupted it."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    usage: Mapping[str, int] | None = None
    stopped: bool = False

    def add(self, piece: ChatDelta) -> None:
        self.text += piece.text
        self.logprobs.extend(piece.logprobs)
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.usage = piece.usage or self.usage

    def document(self, model: str | None) -> dict[str, object]:
        return {
            "model": model,
            "message": {"role": "assistant", "content": self.text},
            "finishReason": self.finish_reason,
            "usage": camel(self.usage) if self.usage else None,
            "logprobs": self.tokens or None,
        }

    @property
    def tokens(self) -> list[dict[str, object]]:
        return [{"token": item.token, "logprob": item.logprob} for item in self.logprobs]


@dataclass
class ModelChat:
    """The messages and settings of a chat. The server's defaults apply to absent settings."""

    client: ChatClient
    settings: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def model(self) -> str | None:
        return self.settings.get("model")

    def answer(self, text: str) -> str:
        answer = self.ask(text, show=True)
        if answer.stopped:
            return "(stopped)"
        cut = answer.finish_reason == "length"
        return "(cut at the longest answer; /set max_tokens N allows more)" if cut else ""

    def ask(self, text: str, *, show: bool) -> ChatAnswer:
        """Send ``text`` and receive the answer; with ``show``, print it as it arrives. A failed request leaves the
        messages unchanged; an answer interrupted by Ctrl-C is kept as far as it was received."""
        self.messages.append({"role": "user", "content": text})
        answer = ChatAnswer()
        try:
            with contextlib.closing(self._deltas()) as pieces:
                for piece in pieces:
                    answer.add(piece)
                    if show:
                        sys.stdout.write(piece.text)
                        sys.stdout.flush()
        except KeyboardInterrupt:
            answer.stopped = True
        except BaseException:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer.text})
        if show:
            write("\n" if not answer.text.endswith("\n") else "")
            if answer.logprobs:
                write(render_table(answer.tokens, _LOGPROBS))
            sys.stdout.flush()
        return answer

    def _deltas(self) -> Generator[ChatDelta]:
        system = self.settings.get("system")
        messages = [{"role": "system", "content": system}, *self.messages] if system else self.messages
        fields = {name: self.settings.get(name) for name in (*_NUMBERS, "stop")}
        fields["logprobs"] = True if self.settings.get("logprobs") else None
        if not self.settings.get("stream", True):
            yield self.client.complete(messages, model=self.model, **fields)
            return
        with self.client.stream(messages, model=self.model, **fields) as pieces:
            yield from pieces

    def set(self, name: str, text: str) -> None:
        """Set a setting; an empty ``text`` removes it. Raises UsageFault for an unknown name or an invalid value."""
        if name not in SETTINGS:
            raise UsageFault(
                f'no setting "{name}"{did_you_mean(name, SETTINGS)}', hint=f"settings: {', '.join(SETTINGS)}"
            )
        if not text:
            self.settings.pop(name, None)
        elif name in _SWITCHES:
            if text not in ("on", "off"):
                raise UsageFault(f"{name} is on or off")
            self.settings[name] = text == "on"
        elif name in _NUMBERS:
            try:
                number = _NUMBERS[name](text)
                if not math.isfinite(number):
                    raise ValueError
            except ValueError:
                raise UsageFault(f"{name} is a number, not {text!r}") from None
            self.settings[name] = number
        else:
            self.settings[name] = text

    def save(self, path: str) -> None:
        from areal.state.files import write_atomic

        document = {"format": _FORMAT, "settings": self.settings, "messages": self.messages}
        write_atomic(_absolute(path), json.dumps(document, indent=2, ensure_ascii=False) + "\n")

    def load(self, path: str) -> None:
        """Load a saved conversation. Raises ArealError, and changes nothing, if the file is not one."""
        try:
            document = parse_json(_absolute(path).read_text("utf-8"))
            assert document["format"] == _FORMAT
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in document["messages"]]
            settings = {name: document["settings"][name] for name in SETTINGS if name in document["settings"]}
        except OSError as error:
            raise ArealError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise ArealError(f"{path} holds no conversation saved by /save") from error
        self.messages, self.settings = messages, {**self.settings, **settings}


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()
