"""``areal inf sessions`` and ``trajectories``, ``areal train trajectories``: recorded sessions, and their tokens with
log-probabilities, weight versions, rewards and advantages.
"""

from __future__ import annotations

import heapq
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli.objects import complete_names, service_option, stored
from areal.cli.options import Invocation, gather, read_options
from areal.cli.output import Column, Row, clock, emit_one, emit_rows, field, render_table, write
from areal.cli.remote import gateway_of, local_options
from areal.cli.services import all_sessions, emit_sessions, limit_option
from areal.client.gateway import GatewayClient, read_session
from areal.errors import ArealError, NotFound
from areal.numbers import age
from areal.resources.kinds import TRAIN_JOB, Ref, check_name
from areal.terminal import fancy

if TYPE_CHECKING:
    from areal.trajectories.record import Episode
    from areal.trajectories.view import TokenDecoder


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
@click.option("--state", type=click.Choice(["active", "ended", "removed"]), help="Only sessions in this state.")
@click.option("--task", metavar="PREFIX", help="Only of tasks whose id begins so.")
@click.option("--group", metavar="ID", help="Only of this group.")
@click.option("--ready", is_flag=True, help="Only those with a trajectory that waits to be exported.")
@limit_option
@read_options()
def sessions_list(
    cli: Invocation,
    service: str | None,
    limit: int,
    state: str | None,
    task: str | None,
    group: str | None,
    ready: bool,
) -> int:
    """List sessions: state, turns, rewards, trajectories ready for export, age. Filters are joined by "and".

    \b
    areal inf sessions list --state active --task math-
    areal inf sessions list --ready -o name | xargs -n1 areal inf trajectories show
    """

    def wanted(row: Row) -> bool:
        return (
            state in (None, row["state"])
            and str(row["task_id"]).startswith(task or "")
            and group in (None, row["group_id"])
            and (not ready or row["ready"] > 0)
        )

    sessions = filter(wanted, all_sessions(cli, gateway_of(cli, service), "/rl/sessions"))
    emit_sessions(cli, sessions, limit, _COLUMNS, name="session_id")
    return 0


@click.command()
@click.argument("session", metavar="SESSION")
@service_option
@read_options()
def sessions_show(cli: Invocation, session: str, service: str | None) -> int:
    """Show a session: its trajectories, their interactions, rewards and failures.

    `areal inf trajectories show SESSION` shows the tokens.
    """
    document = read_session(gateway_of(cli, service), session)
    emit_one(cli, document, name=session, text=lambda: _page(document), answered=True)
    return 0


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


_ON_A_SCREEN, _ON_A_PAGE = 10, 500


class _Chosen(NamedTuple):
    """The flags of a command that shows trajectories: which ones, and how."""

    episode: str | None
    group: str | None
    step: int | None
    only: str | None
    limit: int | None
    sort: str
    paint: Any
    tokenizer: str | None
    page: str | None


_options = (
    click.option("--episode", metavar="NAME", help="Only this one."),
    click.option("--group", metavar="NAME", help="Only the samples of this group."),
    click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only those of this training step."),
    click.option("--eval", "only", flag_value="eval", help="Only evaluation samples."),
    click.option("--training", "only", flag_value="training", help="Only training samples."),
    click.option(
        "--limit", type=click.IntRange(min=1), metavar="N", help="Maximum number  [default: 10; 500 with --html]."
    ),
    click.option(
        "--sort",
        type=click.Choice(["recorded", "best", "worst", "longest"]),
        default="recorded",
        show_default=True,
        help="Which come first.",
    ),
    click.option(
        "--color",
        "paint",
        type=click.Choice(["logprob", "version", "mask"]),
        default="logprob",
        show_default=True,
        help="Meaning of the tokens' colors.",
    ),
    click.option(
        "--tokenizer", metavar="PATH", help="Model folder or tokenizer.json  [default: the model's, if here]."
    ),
    click.option("--html", "page", metavar="FILE.html", help="Write one self-contained page instead."),
)
_show_options = gather("flags", _Chosen, _options)


@click.command()
@click.argument("target", metavar="FILE|SESSION")
@service_option
@_show_options
@read_options()
def show(cli: Invocation, target: str, service: str | None, flags: _Chosen) -> int:
    """Show trajectories: a file or folder of `inf collect` or of a job, a saved export, or a session of the service.

    \b
    areal inf trajectories show rollouts --sort worst
    areal inf trajectories show rollouts --html rollouts.html
    areal inf trajectories show SESSION

    Reading a session does not affect its export.
    """
    from areal.trajectories.reading import read_episodes
    from areal.trajectories.record import episodes_of_export

    path = Path(target)
    if path.exists():
        return _show(cli, read_episodes(path), None, target, flags)
    beside = "/" in target and path.parent.is_dir()
    if beside or target.endswith((".json", ".jsonl", ".parquet", ".npz")) or target.startswith((".", "/", "~")):
        raise NotFound(f"there is no file {target}")
    chosen = gateway_of(cli, service)
    trajectories = read_session(chosen, target, rows=True)["trajectories"]
    episodes = (each for recorded in trajectories for each in episodes_of_export({**recorded, "failures": ()}))
    return _show(cli, episodes, chosen, target, flags)


@click.command("trajectories")
@click.argument("name", shell_complete=complete_names(TRAIN_JOB))
@_show_options
@local_options
def of_job(cli: Invocation, name: str, flags: _Chosen) -> int:
    """Show the training and evaluation samples of the job NAME: groups, turns, rewards and advantages.

    \b
    areal train trajectories NAME --step 12 --sort worst
    areal train trajectories NAME --eval --html eval.html

    Jobs with `rollout.dump_to_file: true` write them.
    """
    from areal.trajectories.reading import read_episodes

    stored(cli.home, Ref(TRAIN_JOB, check_name(name)))
    folder = cli.home.jobs / name / "trajectories"
    if not any(folder.glob("trajectories-*")):
        hint = f"rollout.dump_to_file=true has them written; areal train status {name}"
        raise NotFound(f"trainjob/{name} has written no trajectories", hint=hint)
    narrowing = (flags.episode, flags.group, flags.step, flags.only)
    if flags.page and narrowing == (None, None, None, None) and flags.sort == "recorded":
        episodes, left_out = _spread_over_steps(folder, flags.limit or _ON_A_PAGE)
        return _show(cli, episodes, None, str(folder), flags, title=name, left_out=left_out)
    return _show(cli, read_episodes(folder), None, str(folder), flags, title=name)


def _show(
    cli: Invocation,
    episodes: Iterator[Episode],
    chosen: GatewayClient | None,
    target: str,
    flags: _Chosen,
    *,
    title: str | None = None,
    left_out: str = "",
) -> int:
    """Show episodes. ``title`` and ``left_out``: texts of the page."""
    title = title or target.rstrip("/").rpartition("/")[2]
    limit = flags.limit or (_ON_A_PAGE if flags.page else _ON_A_SCREEN)
    wanted = (
        each
        for each in episodes
        if flags.only in (None, "eval" if each.is_eval else "training")
        and flags.step in (None, each.step)
        and flags.group in (None, each.group)
    )
    shown, more = _first(wanted, flags.episode, flags.sort, limit, target)
    decoder = _decoder(cli, flags.tokenizer, shown, chosen)
    if more and not flags.page:
        cli.info(f"these are the first {len(shown)}; --limit shows more")
    if flags.page:
        _write_page(cli, Path(flags.page), shown, decoder, title, left_out if left_out or not more else _MORE)
    elif cli.format.is_table:
        _print(cli, shown, decoder, flags.paint)
    else:
        emit_rows(cli, [_document(each, decoder) for each in shown], (), name="{episode}".format_map, answered=True)
    return 0


_MORE = "These are not all of its trajectories: --limit N, --step N, --group NAME and --sort choose others"


def _write_page(
    cli: Invocation, path: Path, episodes: list[Episode], decoder: TokenDecoder | None, title: str, left_out: str
) -> None:
    from areal.ui.page import render_html

    text, count = render_html(episodes, decoder, title=title, left_out=left_out)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArealError(f"cannot write {path}: {error.strerror}") from error
    cut = f"; {len(episodes) - count} more would make it too large" if count < len(episodes) else ""
    cli.info(f"{count} trajectories in {path}{cut}{f'. {left_out}' if left_out else ''}")


def _spread_over_steps(folder: Path, limit: int) -> tuple[Iterator[Episode], str]:
    """Return the episodes of steps that are evenly spread over a job, about ``limit`` in total, and a text about what
    is left out."""
    from areal.trajectories.reading import read_lines
    from areal.trajectories.steps import step_files

    files = [each for each in step_files(folder) if not each.is_eval]
    if not files:
        from areal.trajectories.reading import read_episodes

        return read_episodes(folder), ""
    with (folder / files[-1].name).open("rb") as file:
        size = sum(1 for _ in file)
    count = min(len(files), max(2, limit // max(1, size)))
    chosen = [files[place * (len(files) - 1) // max(1, count - 1)] for place in range(count)]
    episodes = chain.from_iterable(read_lines(folder / each.name) for each in dict.fromkeys(chosen))
    if count == len(files):
        return episodes, ""
    of = f"These are {count} of the job's {len(files)} training steps, evenly spread"
    return episodes, f"{of}; --step N shows one whole, --eval the evaluations, `areal ui` all"


def _first(
    episodes: Iterator[Episode], name: str | None, sort: str, limit: int, target: str
) -> tuple[list[Episode], bool]:
    """Return the first ``limit`` episodes in the order ``sort``, and whether there are more. With ``name``, all
    episodes of that name. Raises NotFound."""
    if name is not None:
        found = [each for each in episodes if each.episode == name]
        if not found:
            raise NotFound(f"{target} has no episode {name}")
        return found, False
    if sort == "recorded":
        first = list(islice(episodes, limit + 1))
        return first[:limit], len(first) > limit
    first = heapq.nsmallest(limit + 1, episodes, key=_KEYS[sort])  # keeps only limit + 1 episodes in memory
    return first[:limit], len(first) > limit


_KEYS = {
    "best": lambda each: -(each.reward if each.reward is not None else float("-inf")),
    "worst": lambda each: each.reward if each.reward is not None else float("inf"),
    "longest": lambda each: -each.generated_tokens,
}


def _decoder(
    cli: Invocation, named: str | None, episodes: list[Episode], chosen: GatewayClient | None
) -> TokenDecoder | None:
    """Return the decoder of the tokenizer ``named``, else of the episodes' model if its folder is on this machine."""
    from areal.trajectories.view import load_decoder
    from areal.ui.jobs import tokenizer_here

    if named is not None:
        return load_decoder(Path(named).expanduser())
    models = {row.model for each in episodes for row in each.interactions if row.input_ids}
    if len(models) != 1:
        return None
    (model,) = models
    folder: Path | str | None = tokenizer_here(cli.home, model)
    if folder is None and chosen is not None:  # the service may run on this machine
        listed = chosen.get("/v1/models").get("data", [])
        folder = next((item.get("root") for item in listed if item.get("id") == model), None)
    if folder is None or not (Path(folder) / "tokenizer.json").is_file():
        cli.info(f"the tokenizer of {model} is not on this machine: ids are shown; --tokenizer names it")
        return None
    return load_decoder(Path(folder))


def _print(cli: Invocation, episodes: list[Episode], decoder: TokenDecoder | None, paint: Any) -> None:
    from areal.trajectories.render import legend, render_terminal
    from areal.trajectories.view import turns

    paint = paint if fancy(sys.stdout) else None
    versions: set[int] = set()
    for number, episode in enumerate(episodes):
        conversation = turns(episode, decoder)
        versions.update(version for turn in conversation for version in turn.versions)
        write(("\n" if number else "") + render_terminal(episode, conversation, paint=paint))
    if not episodes:
        cli.info("no trajectory")
    elif paint is not None:
        cli.info("\n" + legend(paint, sorted(versions)))


def _document(episode: Episode, decoder: TokenDecoder | None) -> dict[str, object]:
    """Return the episode as a document, with the text of its tokens if the tokenizer is known."""
    from areal.trajectories.view import turns

    document = episode.document()
    by_interaction = {turn.row.interaction_id: turn for turn in turns(episode, decoder)}
    for row in document["interactions"]:
        turn = by_interaction[row["interaction_id"]]
        row["turn"] = turn.number
        if all(token.text is not None for token in turn.tokens):
            row["text"] = "".join(token.text or "" for token in turn.generated)
    return document
