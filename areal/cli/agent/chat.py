"""``areal agent chat``: answers one message with ``-m`` or piped stdin; else it opens an interactive prompt."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from areal import interrupt
from areal.cli.agent.sessions import (
    agent_gateway,
    current_session,
    known_session,
    new_session,
    result_line,
    service_option,
    set_current,
    tool_line,
    turn_lines,
)
from areal.cli.options import Invocation, Seconds, read_options
from areal.cli.output import dump, show, write
from areal.cli.repl import Repl, message_of, message_option, read_line
from areal.client.gateway import GatewayClient, call_session, close_session
from areal.dataclasses import dataclass, field
from areal.errors import NotFound

if TYPE_CHECKING:
    from areal.client.http import TurnClient

_ANSWER_S = 600.0


@click.command()
@service_option
@click.option("--session", metavar="ID", help="Continue this session  [default: the current one, else a new one].")
@message_option
@click.option("--no-stream", is_flag=True, help="Print the answer when it is whole.")
@click.option(
    "--timeout", "answer_timeout", type=Seconds(positive=True), metavar="TIME", help="Give up on an answer after."
)
@read_options()
def chat(
    cli: Invocation,
    /,
    service: str,
    session: str | None,
    message: str | None,
    no_stream: bool,
    answer_timeout: float | None,
) -> int:
    """Talk to the agent: one shot with -m or piped stdin, else a prompt (/? lists its commands).

    \b
    areal agent chat -m "What is the weather in Paris?"
    areal agent chat --session ID

    A new session becomes the current one. Tool calls are shown on stderr. Ctrl-C cancels the turn.
    """
    from areal.client.http import TurnClient

    chosen = agent_gateway(cli, service)
    text = message_of(cli, message, "areal agent chat")
    key = _session(cli, chosen, service, session)
    if session is None:
        set_current(cli, service, key)
    client = TurnClient(chosen.url, chosen.key, answer_timeout or _ANSWER_S)
    talk = AgentTalk(client, key, cli.info, streamed=not no_stream)
    if text is None:
        cli.info(f"talking to the agent at {chosen.url}, session {key}; /? for help")
        return Repl(cli, talk.answer, read_line, _commands(cli, chosen, service, talk), _HELP).run()
    if session is None:
        cli.info(f"session {key}")
    return _one_shot(cli, talk, text)


def _session(cli: Invocation, chosen: GatewayClient, service: str, given: str | None) -> str:
    """Return the key of the given session; else of the current one, if it exists; else of a new one. Raises
    NotFound."""
    if given is not None:
        return known_session(cli, chosen, given)
    key = current_session(cli, service)
    if key is not None:
        with contextlib.suppress(NotFound):
            call_session(chosen, "GET", key)
            return key
        cli.info(f"the current session {key} has ended; a new one begins")
    return new_session(chosen)


def _one_shot(cli: Invocation, talk: AgentTalk, text: str) -> int:
    readable = cli.format.is_table or cli.format.kind == "name"
    turn = talk.ask(text, show=readable)
    if turn.stopped:
        return interrupt.STATUS
    if not readable:
        write(dump(cli.format, {"session": talk.session, **turn.document()}))
    return 0


@dataclass
class ChatTurn:
    """The answer of one turn. ``stopped``: the user cancelled it."""

    text: str = ""
    tool_calls: list[dict[str, object]] = field(default_factory=list)
    tool_results: list[str] = field(default_factory=list)
    stopped: bool = False

    def document(self) -> dict[str, object]:
        message = {"role": "assistant", "content": self.text}
        return {"message": message, "toolCalls": self.tool_calls, "toolResults": self.tool_results}


@dataclass
class AgentTalk:
    """A conversation in one session. ``say`` prints messages for the user, apart from the answer."""

    client: TurnClient
    session: str
    print_line: Callable[[str], None]
    streamed: bool = True

    def answer(self, text: str) -> str:
        return "(cancelled)" if self.ask(text, show=True).stopped else ""

    def ask(self, text: str, *, show: bool) -> ChatTurn:
        """Send ``text`` and receive the answer; with ``show``, print it as it arrives. Ctrl-C cancels the turn."""
        turn = ChatTurn()
        ended = True  # the last printed line is complete
        try:
            with self.client.stream(text, self.session) as pieces:
                for piece in pieces:
                    if show and piece.text and self.streamed:
                        sys.stdout.write(piece.text)
                        sys.stdout.flush()
                        ended = piece.text.endswith("\n")
                    turn.text += piece.text
                    if piece.text:
                        continue
                    if show and not ended:
                        write("\n")
                        ended = True
                    if piece.name is not None:
                        turn.tool_calls.append({"name": piece.name, "arguments": piece.arguments})
                        self.print_line(tool_line(piece.name, piece.arguments))
                    elif piece.result is not None:
                        turn.tool_results.append(piece.result)
                        self.print_line(result_line(piece.result))
        except KeyboardInterrupt:
            turn.stopped = True
        if show and not self.streamed:
            write(turn.text)
        elif show and not ended:
            write("\n")
        sys.stdout.flush()
        return turn


_HELP = """/session [ID]     print the session, or switch to ID
/new              switch to a new session
/history          print the history of this session
/close            close this session, switch to a new one"""


def _commands(
    cli: Invocation, chosen: GatewayClient, service: str, talk: AgentTalk
) -> dict[str, Callable[[str], None]]:
    def use(key: str) -> None:
        talk.session = key
        set_current(cli, service, key)

    def session(rest: str) -> None:
        if rest:
            use(known_session(cli, chosen, rest))
        cli.info(f"session {talk.session}")

    def new(rest: str) -> None:
        use(new_session(chosen))
        cli.info(f"session {talk.session}")

    def history(rest: str) -> None:
        found = call_session(chosen, "GET", talk.session)
        show("\n".join(turn_lines(found)).strip("\n") or "no messages yet")

    def close(rest: str) -> None:
        close_session(chosen, talk.session)
        cli.info("closed")
        new(rest)

    return {"session": session, "new": new, "history": history, "close": close}
