"""``areal inf sessions``: the sessions that a gateway's data proxies keep."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any
from urllib.parse import quote

import click

from areal.cli import options
from areal.cli.inf.address import gateway_of
from areal.cli.inf.flags import service_option
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.output.emit import emit_one, emit_rows
from areal.cli.output.table import Column, Row, field, render_table
from areal.cli.output.units import age, clock
from areal.cli.remote import Gateway
from areal.errors import NotFound

_PAGE = 200  # a data proxy answers a page in one go, while its calls wait
_STATES = ("active", "ended", "removed")


def _age(row: Row) -> str:
    return age(time.time() - row["created"])


_COLUMNS = (
    field("SESSION", "session_id"),
    field("TASK", "task_id"),
    field("STATE", "state", state=True),
    field("TURNS", "interaction_count", right=True),
    field("REWARD", "reward", right=True),
    field("READY", "ready", right=True),
    field("TRAJECTORIES", "trajectory_count", right=True, wide=True),
    field("GROUP", "group_id", wide=True),
    field("ONLINE", "online", wide=True),
    Column("AGE", _age, right=True),
)
_TURNS = (
    field("INTERACTION", "interaction_id"),
    field("AFTER", "parent_id"),
    field("FINISH", "finish_reason"),
    field("PROMPT", "prompt_tokens", right=True),
    field("ANSWER", "output_tokens", right=True),
    field("REWARD", "reward", right=True),
    Column("AT", lambda row: clock(row["at"]), right=True),
)


@click.command()
@service_option
@click.option("--state", type=click.Choice(_STATES), help="Only sessions in this state.")
@click.option("--task", metavar="PREFIX", help="Only of tasks whose id begins so.")
@click.option("--group", metavar="ID", help="Only of this group.")
@click.option("--ready", is_flag=True, help="Only those with a trajectory that waits to be exported.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, metavar="N", help="At most so many."
)
@options.remote
@options.output()
@options.common
@pass_invocation
def sessions_list(
    cli: Invocation,
    service: str | None,
    state: str | None,
    task: str | None,
    group: str | None,
    ready: bool,
    limit: int,
) -> int:
    """List sessions: state, turns, rewards, what is ready to be exported, age. Filters are joined by "and".

    \b
    areal inf sessions list --state active --task math-
    areal inf sessions list --ready -o name | xargs -n1 areal inf trajectories show
    """

    def wanted(row: Row) -> bool:
        return (
            (state is None or row["state"] == state)
            and (task is None or str(row["task_id"]).startswith(task))
            and (group is None or row["group_id"] == group)
            and (not ready or row["ready"] > 0)
        )

    chosen = gateway_of(cli, service)
    found = list(islice((row for row in _sessions(cli, chosen) if wanted(row)), limit + 1))
    if len(found) > limit:
        cli.say(f"there are more than {limit}; --limit shows them")
    emit_rows(cli, found[:limit], _COLUMNS, name=lambda row: str(row["session_id"]), empty="no session")
    return 0


def _sessions(cli: Invocation, chosen: Gateway) -> Iterator[dict[str, Any]]:
    """All of them, a page at a time; journals that nobody serves just now are named."""
    after: str | None = ""
    while after is not None:
        page = chosen.get(f"/rl/sessions?limit={_PAGE}" + (f"&after={quote(after, safe='')}" if after else ""))
        yield from page["sessions"]
        after = page["next"]
        if after is None and page.get("journals_away"):
            cli.say(f"sessions of {len(page['journals_away'])} data proxies that are away are not listed")


@click.command()
@click.argument("session", metavar="SESSION")
@service_option
@options.remote
@options.output()
@options.common
@pass_invocation
def sessions_show(cli: Invocation, session: str, service: str | None) -> int:
    """One session: its trajectories, their interactions, rewards and failures.

    `areal inf trajectories show SESSION` shows the tokens.
    """
    document = read_session(gateway_of(cli, service), session)
    emit_one(cli, document, name=session, text=lambda: _page(document))
    return 0


def read_session(chosen: Gateway, session: str, *, rows: bool = False) -> dict[str, Any]:
    """Raises NotFound. ``rows``: with the training rows of its trajectories."""
    status, document = chosen.ask("GET", f"/rl/sessions/{quote(session, safe='')}" + ("?rows=true" if rows else ""))
    if status == 404:
        raise NotFound(f"{chosen.url} has no session {session}", hint="areal inf sessions list")
    found: dict[str, Any] = chosen.checked("GET", "/rl/sessions/...", status, document)
    return found


def _page(document: Mapping[str, Any]) -> str:
    head = f"{document['session_id']}: {document['state']}, task {document['task_id']}, {_age(document)} old"
    head += f", group {document['group_id']}" if document["group_id"] else ""
    parts = [head]
    for trajectory in document["trajectories"]:
        title = f"trajectory {trajectory['trajectory_id']}: {trajectory['state']}"
        failures = ", ".join(f"{code} x{count}" for code, count in trajectory["failures"].items())
        parts.append(title + (f"; failures: {failures}" if failures else ""))
        parts.append(render_table(trajectory["interactions"], _TURNS))
    return "\n\n".join(parts)
