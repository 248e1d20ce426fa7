"""``areal inf trajectories show`` and ``areal train trajectories``: tokens with their log-probabilities, versions,
rewards and advantages."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal.cli import options
from areal.cli.inf.address import gateway_of
from areal.cli.inf.flags import service_option
from areal.cli.invocation import Invocation, fancy, pass_invocation
from areal.cli.output.emit import compact, dump, write
from areal.cli.remote import not_remote
from areal.cli.targets import complete_names, stored
from areal.errors import ArealError, NotFound

if TYPE_CHECKING:
    from areal.cli.remote import Gateway
    from areal.trajectories.decoding import Decoder
    from areal.trajectories.record import Episode
    from areal.trajectories.view import Turn

_ON_A_SCREEN, _ON_A_PAGE = 10, 500


def _showing(function: Any) -> Any:
    for option in (
        click.option("--html", "page", metavar="FILE.html", help="Write one self-contained page instead."),
        click.option(
            "--tokenizer", metavar="PATH", help="Model folder or tokenizer.json  [default: the model's, if here]."
        ),
        click.option(
            "--color",
            "paint",
            type=click.Choice(["logprob", "version", "mask"]),
            default="logprob",
            show_default=True,
            help="What the colours of tokens say.",
        ),
        click.option(
            "--sort",
            type=click.Choice(["recorded", "best", "worst", "longest"]),
            default="recorded",
            show_default=True,
            help="Which come first.",
        ),
        click.option(
            "--limit", type=click.IntRange(min=1), metavar="N", help="At most so many  [default: 10; 500 with --html]."
        ),
        click.option("--training", "only", flag_value="training", help="Only what was trained on."),
        click.option("--eval", "only", flag_value="eval", help="Only what was sampled for evaluation."),
        click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only those of this training step."),
        click.option("--group", metavar="NAME", help="Only the samples of this group."),
        click.option("--episode", metavar="NAME", help="Only this one."),
    ):
        function = option(function)
    return options.remote(options.output()(options.common(function)))


@click.command()
@click.argument("target", metavar="FILE|SESSION")
@service_option
@_showing
@pass_invocation
def show(cli: Invocation, /, target: str, **given: Any) -> int:
    """Show trajectories: a file or folder of `inf collect` or of a job, a saved export, or a session of the service.

    \b
    areal inf trajectories show rollouts --sort worst
    areal inf trajectories show rollouts --html rollouts.html
    areal inf trajectories show SESSION

    A session is only looked at: nothing is taken from whoever trains on it.
    """
    chosen = None if Path(target).exists() else _service(cli, target, given["service"])
    return _show(cli, _episodes(target, chosen), chosen, target, given)


@click.command("trajectories")
@click.argument("name", shell_complete=complete_names("TrainJob"))
@_showing
@pass_invocation
def of_job(cli: Invocation, /, name: str, **given: Any) -> int:
    """Show what the job NAME trained on and evaluated with: samples of a group, their turns, rewards and advantages.

    \b
    areal train trajectories NAME --step 12 --sort worst
    areal train trajectories NAME --eval --html eval.html

    Jobs with `rollout.dump_to_file: true` write them.
    """
    from areal.resources.kinds import Ref, check_name

    not_remote(cli, "train trajectories")
    stored(cli.home, Ref("TrainJob", check_name(name)))
    folder = cli.home.jobs / name / "trajectories"
    if not any(folder.glob("trajectories-*")):
        hint = f"rollout.dump_to_file=true has them written; areal train status {name}"
        raise NotFound(f"trainjob/{name} has written no trajectories", hint=hint)
    return _show(cli, _episodes(str(folder), None), None, str(folder), given)


def _show(
    cli: Invocation, episodes: Iterator[Episode], chosen: Gateway | None, target: str, given: Mapping[str, Any]
) -> int:
    limit = given["limit"] or (_ON_A_PAGE if given["page"] else _ON_A_SCREEN)
    wanted = (each for each in episodes if _is_wanted(each, given))
    shown, more = _chosen(wanted, given["episode"], given["sort"], limit, target)
    decoder = _decoder(cli, given["tokenizer"], shown, chosen)
    if more:
        cli.say(f"these are the first {len(shown)}; --limit shows more")
    if given["page"]:
        return _write_page(cli, Path(given["page"]), shown, decoder, target)
    return _print(cli, shown, decoder, given["paint"])


def _is_wanted(episode: Episode, given: Mapping[str, Any]) -> bool:
    return (
        given["only"] in (None, "eval" if episode.is_eval else "training")
        and given["step"] in (None, episode.step)
        and given["group"] in (None, episode.group)
    )


def _service(cli: Invocation, target: str, service: str | None) -> Gateway:
    beside = "/" in target and Path(target).parent.is_dir()
    if beside or target.endswith((".json", ".jsonl", ".parquet", ".npz")) or target.startswith((".", "/", "~")):
        raise NotFound(f"there is no file {target}")
    return gateway_of(cli, service)


def _episodes(target: str, chosen: Gateway | None) -> Iterator[Episode]:
    from areal.trajectories.reading import read_episodes

    return read_episodes(Path(target)) if chosen is None else _of_session(chosen, target)


def _of_session(chosen: Gateway, session: str) -> Iterator[Episode]:
    from areal.cli.inf.sessions import read_session
    from areal.trajectories.record import episodes_of_export

    for trajectory in read_session(chosen, session, rows=True)["trajectories"]:
        yield from episodes_of_export({**trajectory, "failures": ()})


def _chosen(
    episodes: Iterator[Episode], name: str | None, sort: str, limit: int, target: str
) -> tuple[list[Episode], bool]:
    """The first ``limit`` of them in the order that was asked for, and whether there are more."""
    if name is not None:
        found = [each for each in episodes if each.episode == name]
        if not found:
            raise NotFound(f"{target} has no episode {name}")
        return found, False
    if sort == "recorded":
        first = list(islice(episodes, limit + 1))
        return first[:limit], len(first) > limit
    import heapq

    first = heapq.nsmallest(limit + 1, episodes, key=_KEYS[sort])  # holds no more than these
    return first[:limit], len(first) > limit


_KEYS = {
    "best": lambda each: -(each.reward if each.reward is not None else float("-inf")),
    "worst": lambda each: each.reward if each.reward is not None else float("inf"),
    "longest": lambda each: -sum(row.generated_tokens for row in each.interactions),
}


def _decoder(cli: Invocation, named: str | None, episodes: list[Episode], chosen: Gateway | None) -> Decoder | None:
    """The tokenizer that was named, else that of the episodes' model where its folder is on this machine."""
    from areal.trajectories.decoding import load_decoder

    if named is not None:
        return load_decoder(Path(named).expanduser())
    models = {row.model for each in episodes for row in each.interactions if row.input_ids}
    if len(models) != 1:
        return None
    (model,) = models
    folder = _folder_here(cli, model) or (_folder_there(chosen, model) if chosen is not None else None)
    if folder is None or not (Path(folder) / "tokenizer.json").is_file():
        cli.say(f"the tokenizer of {model} is not on this machine: ids are shown; --tokenizer names it")
        return None
    return load_decoder(Path(folder))


def _folder_here(cli: Invocation, model: str) -> str | None:
    from areal.resources.kinds import served_name
    from areal.resources.paths import resolve_model_path
    from areal.state.objects import ObjectStore

    mine = (item for item in ObjectStore(cli.home).list("Model") if served_name(item.name, item.spec) == model)
    found = next(mine, None)
    path = (found.spec.get("tokenizerPath") or found.spec.get("path")) if found is not None else None
    if found is None or path is None:
        return None
    source = next((layer.source.get("file") for layer in found.layers if layer.source), None)
    return resolve_model_path(str(path), source)


def _folder_there(chosen: Gateway, model: str) -> str | None:
    """Where the service has the model from: of use where it is this very machine's folder."""
    listed = chosen.get("/v1/models").get("data", [])
    return next((item.get("root") for item in listed if item.get("id") == model), None)


def _write_page(cli: Invocation, path: Path, episodes: list[Episode], decoder: Decoder | None, target: str) -> int:
    from areal.trajectories.html import page

    try:
        path.write_text(page(episodes, decoder, title=target), encoding="utf-8")
    except OSError as error:
        raise ArealError(f"cannot write {path}: {error.strerror}") from error
    cli.say(f"{len(episodes)} trajectories in {path}")
    return 0


def _print(cli: Invocation, episodes: list[Episode], decoder: Decoder | None, paint: Any) -> int:
    from areal.trajectories import terminal
    from areal.trajectories.view import turns

    if not cli.format.is_table:
        _dump(cli, episodes, decoder)
        return 0
    paint = paint if fancy(sys.stdout) else None
    versions: set[int] = set()
    for number, episode in enumerate(episodes):
        conversation = turns(episode, decoder)
        versions.update(version for turn in conversation for version in turn.versions)
        write(("\n" if number else "") + terminal.render(episode, conversation, paint=paint))
    if not episodes:
        cli.say("no trajectory")
    elif paint is not None:
        cli.say("\n" + terminal.legend(paint, sorted(versions)))
    return 0


def _dump(cli: Invocation, episodes: list[Episode], decoder: Decoder | None) -> None:
    from areal.trajectories.view import turns

    if cli.format.kind == "name":
        write("\n".join(each.episode for each in episodes))
        return
    documents = [_document(each, turns(each, decoder)) for each in episodes]
    if cli.format.kind == "jsonl":
        write("\n".join(map(compact, documents)))
    else:
        write(dump(cli.format, documents))


def _document(episode: Episode, conversation: list[Turn]) -> dict[str, Any]:
    """The episode with its text beside the ids, where that is known."""
    document = episode.document()
    said = {turn.row.interaction_id: turn for turn in conversation}
    for row in document["interactions"]:
        turn = said[row["interaction_id"]]
        row["turn"] = turn.number
        if all(token.text is not None for token in turn.tokens):
            row["text"] = "".join(token.text or "" for token in turn.generated)
    return document
