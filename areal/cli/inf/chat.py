"""``areal inf chat``: one shot with ``-m`` or piped stdin, else a prompt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from areal.cli import options
from areal.cli.inf.address import gateway_of, model_at
from areal.cli.inf.flags import model_name_option, service_option
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.output.emit import compact, dump, write
from areal.errors import UsageFault

if TYPE_CHECKING:
    from areal.cli.inf.conversation import Conversation
    from areal.client.chat import ChatClient

_ANSWER_S = 600.0


@click.command()
@service_option
@model_name_option(required=False)
@click.option("-m", "--message", metavar="TEXT", help="One shot: send TEXT, print the answer.")
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("--temperature", type=click.FloatRange(min=0), metavar="T", help="Sampling temperature.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Longest answer.")
@click.option("--no-stream", is_flag=True, help="Print the answer when it is whole.")
@click.option("--show-logprobs", is_flag=True, help="Print each token with its log-probability.")
@options.timeout("10m", "Give up on an answer after so long a silence (exit 7)")
@options.remote
@options.output()
@options.common
@pass_invocation
def chat(
    cli: Invocation,
    /,
    service: str | None,
    message: str | None,
    **given: Any,
) -> int:
    """Talk to a model: one shot with -m or piped stdin, else a prompt (/? lists its commands).

    \b
    areal inf chat -m "What is 17 * 23?"
    git diff | areal inf chat --system "Write a commit message." --max-tokens 200
    """
    from areal.cli.inf.conversation import Conversation

    given["model"] = model_at(cli, service, given["model"])
    talk = Conversation(_client(cli, service), _settings(given))
    text = message if message is not None else None if sys.stdin.isatty() else _piped()
    if text is None:
        return _prompt(cli, talk)
    if not text.strip():
        raise UsageFault("there is nothing to say: the message is empty", hint='areal inf chat -m "TEXT"')
    return _one_shot(cli, talk, text)


def _piped() -> str:
    """Standard input without the newline that ends its last line, as a shell's ``$(...)`` has it."""
    return sys.stdin.read().rstrip("\n")


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    settings = {
        name: given[name] for name in ("system", "temperature", "max_tokens", "model") if given[name] is not None
    }
    if given["no_stream"]:
        settings["stream"] = False
    if given["show_logprobs"]:
        settings["logprobs"] = True
    return settings


def _client(cli: Invocation, service: str | None) -> ChatClient:
    from areal.client.chat import ChatClient

    chosen = gateway_of(cli, service)
    return ChatClient(chosen.url, chosen.key, cli.timeout_s or _ANSWER_S)


def _one_shot(cli: Invocation, talk: Conversation, text: str) -> int:
    readable = cli.format.is_table or cli.format.kind == "name"
    answer = talk.ask(text, show=readable)
    if answer.stopped:
        return 130
    if not readable:
        document = answer.document(talk.model)
        write(compact(document) if cli.format.kind == "jsonl" else dump(cli.format, document))
    elif answer.finish_reason == "length":
        cli.say("(cut at the longest answer; --max-tokens allows more)")
    return 0


def _prompt(cli: Invocation, talk: Conversation) -> int:
    from areal.cli.inf.repl import Repl, read_line

    if not cli.format.is_table:
        raise UsageFault("-o json needs one shot: give -m TEXT or pipe the text in")
    models = talk.client.models()
    if talk.model is None and len(models) == 1:
        talk.settings["model"] = models[0]
    if talk.model is None:
        raise UsageFault(f"there are {len(models)} models; say which", hint=f"--model {models[0]}" if models else None)
    cli.say(f"talking to {talk.model} at {talk.client.base_url}; /? for help")
    return Repl(cli, talk, read_line).run()
