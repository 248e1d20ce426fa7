"""``areal agent sessions``, ``reward`` and ``export``. The home stores the current session of each service."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal.cli.objects import complete_names, service_name
from areal.cli.options import (
    FiniteRange,
    Invocation,
    common,
    output,
    pass_invocation,
    read_options,
    remote,
    stack,
    style_option,
)
from areal.cli.output import Column, clock, emit_one, field
from areal.cli.remote import gateway, gateway_of
from areal.cli.services import all_sessions, emit_sessions, limit_option
from areal.client.gateway import GatewayClient, call_session, checked_session_key, close_session, content_text
from areal.dataclasses import replace
from areal.errors import ArealError, NotFound, UsageFault
from areal.numbers import age, duration, number
from areal.resources.kinds import AGENT_SERVICE
from areal.terminal import spelled

if TYPE_CHECKING:
    from areal.wire.agents import SessionHistory

_CALL_S = 60.0  # a call may start or export an RL session
_TEXT = 600  # characters of a tool's arguments and result on a page


service_option = click.option(
    "--service",
    metavar="NAME",
    callback=lambda ctx, param, given: (
        given if ctx.resilient_parsing else service_name(ctx.ensure_object(Invocation), given, AGENT_SERVICE)
    ),
    shell_complete=complete_names(AGENT_SERVICE),
    help="The agent service  [default: the only one, else 'default'].",
)


def agent_gateway(cli: Invocation, service: str) -> GatewayClient:
    """Return the gateway of an agent service. Raises NotFound for an unknown service, ArealError for one that does not
    run or whose key is not in this home."""
    return replace(gateway_of(cli, service, AGENT_SERVICE), timeout_s=cli.timeout_s or _CALL_S)


def known_session(cli: Invocation, chosen: GatewayClient, given: str) -> str:
    """Return the key of a session, given whole or by a beginning that no other session has. Raises NotFound,
    UsageFault."""
    try:
        return str(call_session(chosen, "GET", given)["session_key"])
    except NotFound:
        keys = [str(row["session_key"]) for row in all_sessions(cli, chosen, "/sessions")]
        keys = [key for key in keys if given and key.startswith(given)]
        if len(keys) > 1:
            shown = ", ".join(keys[:_SHOWN]) + (", ..." if keys[_SHOWN:] else "")
            raise UsageFault(f"{len(keys)} sessions begin with {given}: {shown}") from None
        if not keys:
            raise
        return keys[0]


_SHOWN = 4


def _post(cli: Invocation, chosen: GatewayClient, given: str, verb: str, body: Any) -> tuple[str, dict[str, Any]]:
    """Call a route of a session, given as for ``known_session``. Returns its key and the answer."""
    try:
        return given, call_session(chosen, "POST", given, verb, body)
    except NotFound:
        key = known_session(cli, chosen, given)
        return key, call_session(chosen, "POST", key, verb, body)


def new_session(chosen: GatewayClient, key: str | None = None) -> str:
    body = {} if key is None else {"session_key": checked_session_key(key)}
    document = chosen.checked("POST", "/sessions", *chosen.ask("POST", "/sessions", body))
    return str(document["session_key"])


def _current(cli: Invocation) -> dict[str, str]:
    """Return the current session of each service, by the service's name or its gateway's URL."""
    from areal.state.files import UnreadableFile, read_json

    try:
        found: dict[str, str] = read_json(cli.home.current_sessions)
    except (FileNotFoundError, UnreadableFile):
        return {}
    return found


def _place(cli: Invocation, service: str) -> str:
    chosen = gateway(cli)
    return service if chosen is None else chosen.url


def current_session(cli: Invocation, service: str) -> str | None:
    return _current(cli).get(_place(cli, service))


def set_current(cli: Invocation, service: str, key: str | None) -> None:
    """Make ``key`` the current session of the service. None unsets it."""
    from areal.state.files import write_json

    place, found = _place(cli, service), _current(cli)
    if found.get(place) != key:
        now = {**found, place: key}
        write_json(cli.home.ensure().current_sessions, {name: key for name, key in now.items() if key is not None})


def named_session(cli: Invocation, service: str, given: str | None) -> str:
    """Return the given session, else the current one. Raises UsageFault without either."""
    key = given if given is not None else current_session(cli, service)
    if key is None:
        raise UsageFault("no session is selected", hint="--session ID, or areal agent sessions switch")
    return key


_COLUMNS = (
    Column("", lambda row: "*" if row["current"] else ""),
    field("SESSION", "session_key"),
    field("STATE", "state", state=True),
    field("TURNS", "turns", right=True),
    Column("AGE", lambda row: age(time.time() - row["created"]), right=True),
    Column("IDLE", lambda row: age(time.time() - row["used"]) if not row["running"] else None, right=True),
    field("RECORDED AS", "inference_session_id", wide=True),
    field("METADATA", "metadata", wide=True),
)
_session = click.argument("session", metavar="SESSION")
_session_option = click.option("--session", metavar="ID", help="The session  [default: the current one].")


@click.command()
@service_option
@limit_option
@read_options()
def sessions_list(cli: Invocation, service: str, limit: int) -> int:
    """List sessions: state, turns, age. The current one is marked."""
    current = current_session(cli, service)
    pages = all_sessions(cli, agent_gateway(cli, service), "/sessions")
    sessions = ({**row, "current": row["session_key"] == current} for row in pages)
    emit_sessions(cli, sessions, limit, _COLUMNS if current is not None else _COLUMNS[1:], name="session_key")
    return 0


@click.command()
@_session
@service_option
@read_options()
def sessions_show(cli: Invocation, session: str, service: str) -> int:
    """Print the history of SESSION: its turns, with the agent's tool calls and their results."""
    chosen = agent_gateway(cli, service)
    document = call_session(chosen, "GET", session := known_session(cli, chosen, session))
    emit_one(cli, document, name=session, text=lambda: _page(document), answered=True)
    return 0


def _page(document: SessionHistory) -> str:
    old = age(time.time() - document["created"])
    head = f"{spelled(document['session_key'])}: {document['state']}, {document['turns']} turns, {old} old"
    return "\n".join([head, *turn_lines(document)])


def turn_lines(document: SessionHistory) -> Iterator[str]:
    """Yield the lines of all turns of a session, including failed ones: messages, tool calls and their results."""
    for turn in document["recorded_turns"]:
        yield f"\n[{clock(turn['at'])}, {duration(turn['seconds'])}, {turn['outcome']}]"
        for message in turn["messages"]:
            role, content = message.get("role"), content_text(message.get("content"))
            if role == "tool":
                yield result_line(content)
                continue
            if content:
                yield f"{role}: {spelled(content)}"
            for call in message.get("tool_calls") or ():
                yield tool_line(call["function"]["name"], call["function"]["arguments"])
        if turn["error"]:
            yield f"failed: {_short(turn['error'])}"


def tool_line(name: str, arguments: str) -> str:
    from areal.trajectories.view import call_text

    return f"  {_short(call_text(name, arguments))}"


def result_line(text: str) -> str:
    return f"  <- {_short(text)}"


def _short(text: str) -> str:
    line = spelled(" ".join(text.split()))
    return line if len(line) <= _TEXT else f"{line[:_TEXT]}... ({len(line)} characters)"


@click.command()
@click.argument("session", metavar="[SESSION]", required=False)
@service_option
@read_options()
def sessions_new(cli: Invocation, session: str | None, service: str) -> int:
    """Open a session and make it the current one. SESSION: its key  [default: generated]."""
    key = new_session(agent_gateway(cli, service), session)
    set_current(cli, service, key)
    emit_one(cli, {"session": key}, name=key, text=lambda: key)
    return 0


@click.command()
@_session
@service_option
@read_options()
def sessions_switch(cli: Invocation, session: str, service: str) -> int:
    """Make SESSION the current one."""
    session = known_session(cli, agent_gateway(cli, service), session)
    set_current(cli, service, session)
    emit_one(cli, {"session": session}, name=session, text=lambda: f"{session} is the current session")
    return 0


@click.command()
@_session
@service_option
@read_options()
def sessions_close(cli: Invocation, session: str, service: str) -> int:
    """Close SESSION: its running turn is cancelled, its history is forgotten."""
    chosen = agent_gateway(cli, service)
    session = known_session(cli, chosen, session)
    close_session(chosen, session)
    if current_session(cli, service) == session:
        set_current(cli, service, None)
    emit_one(cli, {"session": session, "closed": True}, name=session, text=lambda: f"{session} is closed")
    return 0


@click.command(context_settings={"ignore_unknown_options": True})  # -1 is a reward
@click.argument("value", type=float)
@_session_option
@click.option("--interaction", metavar="ID", help="The interaction  [default: the last one].")
@service_option
@read_options()
def reward(cli: Invocation, value: float, session: str | None, interaction: str | None, service: str) -> int:
    """Give the reward VALUE to an interaction of a session. The reward of the last one seals the trajectory."""
    if not math.isfinite(value):
        raise UsageFault(f"a reward is a finite number, not {value}")
    key = named_session(cli, service, session)
    body = {"reward": value, **({"interaction_id": interaction} if interaction else {})}
    key, document = _post(cli, agent_gateway(cli, service), key, "/reward", body)

    def text() -> str:
        ready = "ready to be exported" if document["trajectory_ready"] else "not sealed yet"
        count = document["interaction_count"]
        return f"reward {number(value)}: trajectory {document['trajectory_id']} of {count} interactions is {ready}"

    emit_one(cli, {"session": key, **document}, name=key, text=text, answered=True)
    return 0


_FORMATS = (".json", ".jsonl", ".parquet")


def _write(document: Mapping[str, Any], path: Path) -> None:
    """Write an export in the format of the file's suffix, atomically. Raises OSError."""
    import secrets

    from areal.state.files import write_atomic
    from areal.trajectories.reading import write_parquet
    from areal.trajectories.record import episodes_of_export

    if path.suffix == ".json":
        write_atomic(path, json.dumps(document) + "\n", 0o644)
    elif path.suffix == ".jsonl":
        episodes = episodes_of_export(document)
        write_atomic(path, "".join(json.dumps(each.document()) + "\n" for each in episodes), 0o644)
    else:
        whole = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
        try:
            write_parquet(episodes_of_export(document), whole)
            whole.replace(path)
        finally:
            whole.unlink(missing_ok=True)


@click.command()
@_session_option
@click.option("--output", "file", metavar="FILE", required=True, help="Output file: NAME.json, .jsonl or .parquet.")
@click.option(
    "--trajectory", type=click.IntRange(min=0), metavar="N", help="Its number  [default: all that are ready]."
)
@click.option("--discount", type=FiniteRange(0, 1), default=1.0, show_default=True, help="Of a later reward.")
@style_option("Rows: one per interaction, or one per conversation.")
@service_option
@stack(remote, output(dest=None), common, pass_invocation)
def export(
    cli: Invocation, session: str | None, file: str, trajectory: int | None, discount: float, style: str, service: str
) -> int:
    """Export a session's trajectory, once: tokens, logprobs, versions, rewards.

    .json holds the service's response; .jsonl (an episode per line) and .parquet (an interaction per row) are in the
    format of `areal inf collect`. `areal inf trajectories show FILE` shows each.
    """
    from areal.trajectories.reading import pyarrow

    path = Path(file).absolute()
    if path.suffix not in _FORMATS:
        raise UsageFault(
            f"{file}: the name must end in one of {', '.join(_FORMATS)}", hint=f"--output {path.stem}.json"
        )
    if path.suffix == ".parquet":
        pyarrow()  # raises if it is not installed, before the export
    if not path.parent.is_dir():
        raise NotFound(f"there is no folder {path.parent}")
    chosen, key = agent_gateway(cli, service), named_session(cli, service, session)
    body = {"discount": discount, "style": style, **({"trajectory_id": trajectory} if trajectory is not None else {})}
    key, document = _post(cli, chosen, key, "/export", body)
    try:
        _write(document, path)
    except OSError as error:
        hint = "export to another file before the next reward: the service repeats the export until then"
        raise ArealError(f"cannot write {file}: {error.strerror}", hint=hint) from error
    call_session(chosen, "POST", key, "/export/ack", {"export_id": document["export_id"]})
    rows = len(document["rows"])
    about = {"session": key, "file": file, "rows": rows, "exportId": document.get("export_id")}
    emit_one(cli, about, name=file, text=lambda: f"{rows} rows in {file}")
    return 0
