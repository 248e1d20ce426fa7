"""``areal convert``: a configuration of another framework as a TrainJob, with what becomes of each of its keys."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal.cli.apply import resource
from areal.cli.options import Invocation, common, output, pass_invocation, stack
from areal.cli.output import emit_rows, field, refuse_existing, to_yaml, write_file
from areal.errors import NotFound, Partial, UsageFault
from areal.resources.kinds import INFERENCE_SERVICE, MODEL, TRAIN_JOB, name_problem

if TYPE_CHECKING:
    from areal.convert.rules import Draft, Entry

_COLUMNS = (
    field("KEY", "key"),
    field("VALUE", "value"),
    field("", "fate"),
    field("HERE", "target"),
    field("NOTE", "note"),
)
_SHOWN = 60  # characters of a value in the table


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False), metavar="FILE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--from", "framework", type=click.Choice(["verl"]), required=True, help="The framework of FILE.")
@click.option("--out", "directory", metavar="DIR", help="Write manifests.yaml, config.yaml and reward.py here.")
@click.option("--allow-lossy", is_flag=True, help="Also where something is lost or refused.")
@click.option("--name", default="converted", show_default=True, metavar="NAME", help="Of the job.")
@click.option("--backend", metavar="BACKEND", help="Serves the model  [default: the framework's engine].")
@click.option("--train-backend", metavar="BACKEND", help="Trains it  [default: fsdp or megatron on the other GPUs].")
@click.option("--force", is_flag=True, help="Replace files of DIR.")
@stack(output(), common, pass_invocation)
def convert(cli: Invocation, file: str, overrides: tuple[str, ...], framework: str, **given: Any) -> int:
    """Convert a configuration of verl: a YAML file, or a script with its command. Overrides are in its own keys.

    \b
    areal convert run_qwen3-8b.sh --from verl                          # what becomes of each key
    areal convert run_qwen3-8b.sh --from verl --out job --allow-lossy
    cd job && areal apply -f manifests.yaml

    A key is mapped, ignored because it does not change what is learned, lossy because it does and has no counterpart,
    or refused because the job would be another one. Exit status: 0; 9 if a key is lossy or refused, and then nothing is
    written without --allow-lossy.
    """
    from areal.convert.rules import Fate

    if problem := name_problem(given["name"]):
        raise UsageFault(f"--name {given['name']}: {problem}")
    draft = _converted(file, overrides)
    _choose_backends(draft, given["backend"], given["train_backend"])
    emit_rows(cli, [_row(each) for each in draft.entries], _COLUMNS, name="{key}".format_map)
    lost = Counter(each.fate for each in draft.entries if each.fate in (Fate.LOSSY, Fate.REFUSED))
    if lost and not given["allow_lossy"]:
        listed = " and ".join(f"{count} keys are {fate}" for fate, count in sorted(lost.items()))
        raise Partial(f"{file}: {listed}; nothing was written", hint="read their notes, then add --allow-lossy")
    if given["directory"]:
        _write(Path(given["directory"]), draft, given["name"], force=given["force"])
        cli.info(f"wrote {given['directory']}; next: cd {given['directory']} && areal apply -f manifests.yaml")
    return 0


def _converted(file: str, overrides: Sequence[str]) -> Draft:
    from areal.convert.reading import assignments, read_yaml, script_command
    from areal.convert.rules import convert
    from areal.convert.verl import PROGRAMS, VERL

    try:
        text = Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"{file} cannot be read: {error}") from error
    if file.endswith((".yaml", ".yml")):
        keys = read_yaml(text, file)
    else:
        keys = assignments(script_command(text, PROGRAMS, os.environ, file), file)
    return convert(VERL, {**keys, **assignments(overrides, "the command line")})


def _choose_backends(draft: Draft, backend: str | None, train: str | None) -> None:
    from areal.convert.rules import Fate

    if backend:
        draft.backend, draft.engine_args = backend, {}
        draft.entries = [
            each
            if not each.target.startswith("Model ")
            else type(each)(each.key, each.value, Fate.IGNORED, note="--backend")
            for each in draft.entries
        ]
    if train:
        for part in ("actor", "critic", "ref"):
            if part in draft.config:
                draft.set(f"{part}.backend", train)


def _row(entry: Entry) -> dict[str, Any]:
    text = str(entry.value)
    value = entry.value if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return {"key": entry.key, "value": value, "fate": str(entry.fate), "target": entry.target, "note": entry.note}


def _write(folder: Path, draft: Draft, name: str, *, force: bool) -> None:
    files = {"config.yaml": to_yaml([draft.config]), **draft.files, "manifests.yaml": _manifests(draft, name)}
    folder.mkdir(parents=True, exist_ok=True)
    for each in files:
        refuse_existing(folder / each, force=force)
    for each, text in files.items():
        write_file(folder / each, text)


def _manifests(draft: Draft, name: str) -> str:
    model: dict[str, Any] = {"service": name, "backend": draft.backend, "path": draft.model}
    if draft.engine_args:
        model["engineArgs"] = draft.engine_args
    job: Mapping[str, Any] = {
        "rollout": {"service": name, "model": name},
        "config": "config.yaml",
        "restart": {"policy": "OnFailure"},
    }
    documents = [
        resource(INFERENCE_SERVICE, name, {}),
        resource(MODEL, name, model),
        resource(TRAIN_JOB, name, dict(job)),
    ]
    return to_yaml(documents, manifests=True)
