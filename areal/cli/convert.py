"""``areal convert``: converts a configuration of another framework to a TrainJob, and lists the result for each key."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal.cli.apply import resource
from areal.cli.options import Invocation, common, only_with, output, pass_invocation, stack
from areal.cli.output import emit_rows, field, refuse_existing, to_yaml, write_file
from areal.errors import NotFound, Partial, UsageFault
from areal.resources.kinds import INFERENCE_SERVICE, MODEL, TRAIN_JOB, name_problem

if TYPE_CHECKING:
    from areal.convert.drafts import Draft, Entry

_COLUMNS = (
    field("KEY", "key"),
    field("VALUE", "value"),
    field("", "fate"),
    field("HERE", "target"),
    field("NOTE", "note"),
)
_SHOWN = 60  # characters of a value in the table
_MOST_CHARACTERS = 1 << 20


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False), metavar="FILE")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--from",
    "framework",
    type=click.Choice(["verl", "trl", "openrlhf", "areal"]),
    required=True,
    help="The framework of FILE.",
)
@click.option("--trainer", metavar="NAME", help="Its trainer that reads FILE  [default: as the command or keys say].")
@click.option("--line", type=click.IntRange(1), metavar="N", help="Its command at this line  [default: the last].")
@click.option("--out", "directory", metavar="DIR", help="Write manifests.yaml, config.yaml and reward.py here.")
@click.option("--allow-lossy", is_flag=True, help="Also where something is lost or refused.")
@click.option("--name", default="converted", show_default=True, metavar="NAME", help="Of the job.")
@click.option("--backend", metavar="BACKEND", help="Serves the model  [default: the framework's engine].")
@click.option("--train-backend", metavar="BACKEND", help="Trains it  [default: fsdp or megatron on the other GPUs].")
@click.option("--force", is_flag=True, help="Replace files of DIR.")
@only_with("directory", "force")
@stack(output(), common, pass_invocation)
def convert(cli: Invocation, file: str, overrides: tuple[str, ...], framework: str, **given: Any) -> int:
    """Convert a configuration of verl, TRL, OpenRLHF or AReaL: a YAML file, or a script with its command. Overrides are
    in its own keys.

    \b
    areal convert run_qwen3-8b.sh --from verl                          # what becomes of each key
    areal convert run_qwen3-8b.sh --from verl --out job --allow-lossy
    cd job && areal apply -f manifests.yaml
    areal convert grpo.yaml --from trl --trainer grpo num_processes=8
    areal convert train_ppo_ray_hybrid_engine.sh --from openrlhf

    A key is mapped, ignored because it does not change what is learned, lossy because it does and has no counterpart,
    or refused because the job would be another one. Exit status: 0; 9 if a key is lossy or refused, and then nothing is
    written without --allow-lossy.
    """
    from areal.convert.drafts import Fate

    if problem := name_problem(given["name"]):
        raise UsageFault(f"--name {given['name']}: {problem}")
    draft = _converted(file, framework, given["trainer"], overrides, given["line"])
    _choose_backends(draft, given["backend"], given["train_backend"])
    emit_rows(cli, [_row(each) for each in draft.entries], _COLUMNS, name="{key}".format_map)
    lost = Counter(each.fate for each in draft.entries if each.fate in (Fate.LOSSY, Fate.REFUSED))
    if lost and not given["allow_lossy"]:
        listed = " and ".join(
            f"{count} key{'s are' if count > 1 else ' is'} {fate}" for fate, count in sorted(lost.items())
        )
        raise Partial(f"{file}: {listed}; nothing was written", hint="read their notes, then add --allow-lossy")
    if given["directory"]:
        source = " ".join(f"{file} {draft.command}".split())
        _write(Path(given["directory"]), draft, given["name"], source, force=given["force"])
        cli.info(f"wrote {given['directory']}; next: cd {given['directory']} && areal apply -f manifests.yaml")
    return 0


def _converted(file: str, framework: str, trainer: str | None, overrides: Sequence[str], line: int | None) -> Draft:
    if framework == "areal":
        if line is not None:
            raise UsageFault("--line chooses a command of a script, and configurations of areal are YAML files")
        return _of_areal(file, trainer, overrides)
    from areal.convert.reading import assignments, read_yaml
    from areal.convert.rules import convert
    from areal.convert.sources import SOURCES, read_keys

    trainers = SOURCES[framework].trainers
    if trainer is not None and trainer not in trainers:
        raise UsageFault(f"--trainer {trainer}: those of {framework} are {', '.join(trainers)}")
    read = read_keys(framework, trainer, _text(Path(file)), os.environ, file, line)
    keys = {**read.keys, **assignments(overrides, "the command line")}
    if framework == "trl":
        if isinstance(below := keys.get("config"), str):  # TRL's own YAML file
            if (text := _named_text(file, below, read.written)) is None:
                raise NotFound(f"{file}: there is no file {below}", hint="run this where it is, or add config=FILE")
            keys = {**read_yaml(text, below, nested=False), **keys}
        launched = keys.get("config_file")
        if isinstance(launched, str) and (text := _named_text(file, launched, read.written)) is not None:
            count = read_yaml(text, launched).get("num_processes")  # of accelerate
            keys = {**({"num_processes": count} if count is not None else {}), **keys}
    draft = convert(trainers[read.trainer], {key: _absolute(key, value) for key, value in keys.items()})
    draft.command, draft.entries = read.command, [*read.beside, *draft.entries]
    return draft


_NAMES_FILES = re.compile(r"(?:path|files|dataset|dataset_name|pretrain|remote_url|rm_url)$")


def _absolute(key: str, value: Any) -> Any:
    """Return a path below the working folder as an absolute one: the job starts in the folder that is written."""
    if isinstance(value, list):
        return [_absolute(key, each) for each in value]
    named = type(value) is str and 0 < len(value) < 256 and _NAMES_FILES.search(key)
    return str(Path(value).absolute()) if named and Path(value).exists() else value


def _named_text(file: str, name: str, written: Mapping[str, str]) -> str | None:
    """Return the text of the file with this name: one that the script writes, or one below the folder of ``file`` or a
    folder above that, or below the working folder; None if there is none."""
    folders = (*Path(file).absolute().parents, Path())
    path = next((each for above in folders if (each := above / name).is_file()), None)
    return written.get(name) if path is None else _text(path)


def _of_areal(file: str, trainer: str | None, overrides: Sequence[str]) -> Draft:
    """Return the table for an AReaL configuration. These are read unchanged, so the table contains what their
    validation finds."""
    import yaml

    from areal.convert.areal import TRAINERS, convert, trainer_of
    from areal.convert.reading import Unread, load_yaml
    from areal.reconcilers.kinds.job_config import checked
    from areal.resources.tree import BadOverride, apply_override, parse_override

    if trainer is not None and trainer not in TRAINERS:
        raise UsageFault(f"--trainer {trainer}: those of areal are {', '.join(TRAINERS)}")
    document = load_yaml(_text(Path(file)), file)
    try:
        for text in overrides:
            override = parse_override(text)
            apply_override(document, override, yaml.safe_load(override.value or "null"))
    except (yaml.YAMLError, BadOverride) as error:
        raise Unread(f"{file}: {error}") from error
    return convert(document, trainer or trainer_of(document), checked)


def _text(path: Path) -> str:
    from areal.convert.reading import Unread

    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(f"{path} cannot be read: {error}") from error
    if len(text) > _MOST_CHARACTERS:
        raise Unread(f"{path}: more than {_MOST_CHARACTERS:,} characters are no configuration of a training run")
    return text


def _choose_backends(draft: Draft, backend: str | None, train: str | None) -> None:
    from areal.convert.drafts import Fate
    from areal.resources.backend import INFERENCE_ENGINES, TRAIN_ENGINES, BackendError, parse_backend

    for flag, layout, engines in (("backend", backend, INFERENCE_ENGINES), ("train-backend", train, TRAIN_ENGINES)):
        try:
            parse_backend(layout or engines[0], engines=engines, single=True)
        except BackendError as error:
            raise UsageFault(f"--{flag} {layout}: {error}") from error
    if backend and "rollout" in draft.config and not draft.backend:  # AReaL's own section says it
        draft.set("rollout.backend", backend)
    elif backend and not draft.backend:
        raise UsageFault("--backend serves the model that is sampled from, and this job samples nothing")
    elif backend:
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


def _row(entry: Entry) -> dict[str, object]:
    text = str(entry.value)
    value = entry.value if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return {"key": entry.key, "value": value, "fate": str(entry.fate), "target": entry.target, "note": entry.note}


def _write(folder: Path, draft: Draft, name: str, source: str, *, force: bool) -> None:
    manifests = f"# Converted from {source}\n{_manifests(draft, name)}"
    files = {"config.yaml": to_yaml([draft.config]), **draft.files, "manifests.yaml": manifests}
    folder.mkdir(parents=True, exist_ok=True)
    for each in files:
        refuse_existing(folder / each, force=force)
    for each, text in files.items():
        write_file(folder / each, text)


def _manifests(draft: Draft, name: str) -> str:
    model: dict[str, object] = {"service": name, "backend": draft.backend, "path": draft.model}
    if draft.engine_args:
        model["engineArgs"] = draft.engine_args
    job: dict[str, object] = {"config": "config.yaml", "restart": {"policy": "OnFailure"}}
    if not draft.backend:  # rows of a data set are not sampled
        return to_yaml([resource(TRAIN_JOB, name, job)], manifests=True)
    job["rollout"] = {"service": name, "model": name}
    documents = [resource(INFERENCE_SERVICE, name, {}), resource(MODEL, name, model), resource(TRAIN_JOB, name, job)]
    return to_yaml(documents, manifests=True)
