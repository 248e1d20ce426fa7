"""``python -m areal.training.checking``: reads the configurations of jobs as their drivers will, and validates them.

Reads a list of requests from stdin, and writes the faults and the values of each to stdout, as JSON. It is a separate
process because commands do not import what drivers import, and because interpolations read the driver's environment.
No user code is imported.
"""

from __future__ import annotations

import ast
import inspect
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from areal.api import cli_args
from areal.api.cli_args import BaseExperimentConfig, PPOConfig
from areal.api.config.loading import ConfigError, ConfigFault, examine, values_of
from areal.api.config.training import TrainEngineConfig
from areal.dataset.files import SUFFIXES, Rows, cached_files, read_files, read_rows
from areal.dataset.loading import DEFAULT_SPLITS, formatted, is_loader
from areal.dataset.tokenizers import NO_TEMPLATE
from areal.errors import ArealError, UsageFault
from areal.files import parse_json
from areal.hub import Hub, is_id
from areal.resources.paths import import_fault, looks_local, module_of
from areal.resources.tree import FieldPath
from areal.reward.functions import Parameters, SignatureText, check_columns, columns_read
from areal.rollout.workflows import configured_workflow

_FIRST_ROWS = 64
_LARGE = 64 << 20
_MAX_IMPORTS = 8  # modules through which a function is imported


class ConfigAnswer(TypedDict):
    """The faults of a configuration, and the values that it sets; None if they cannot be read."""

    faults: list[dict[str, object]]
    values: dict[str, object] | None


def check(request: Mapping[str, Any]) -> ConfigAnswer:
    """Return the faults and the values of a configuration. The request has ``config`` (the class, None if it is not
    known), ``file`` or its ``text``, ``overrides``, ``trains``. ``built_in``: the driver is built in, so data sets,
    models and functions are those of the configuration. ``later``: an earlier job may create files. ``notes``: also
    report keys that have no effect, and cautions."""

    def more_faults(config: BaseExperimentConfig) -> Iterator[tuple[FieldPath, str]]:
        if request["built_in"]:
            yield from _code_faults(config)
            if not request["later"]:
                yield from _file_faults(config, trains=request["trains"])
                yield from _template_faults(config)
                yield from _row_faults(config)
                yield from _batch_faults(config)

    file, overrides = request["file"], request["overrides"]
    cls = getattr(cli_args, request["config"]) if request["config"] is not None else None
    faults, values = list[ConfigFault](), None
    try:
        if cls is not None:
            found = examine(file, overrides, cls, more_faults)
            faults, values = [*found.faults, *(found.notes if request.get("notes") else ())], found.values
    except ConfigError as error:
        faults = list(error.faults)
    except ArealError as error:
        faults = [ConfigFault((), error.message, file)]
    try:
        values = values_of(file, overrides, cls) if values is None else values
    except ArealError as error:
        faults = faults or [ConfigFault((), error.message, file)]
    return ConfigAnswer(faults=[asdict(fault) for fault in faults], values=values)


def _file_faults(config: BaseExperimentConfig, *, trains: bool) -> Iterator[tuple[FieldPath, str]]:
    """Yield data sets and models that do not exist."""
    online = isinstance(config, PPOConfig) and config.is_online
    if trains and not online and not config.train_dataset.path:
        yield ("train_dataset", "path"), "is needed: a file, a folder, or a data set of the Hugging Face hub"
    for name in ("train_dataset", "valid_dataset"):
        for path in _texts(getattr(getattr(config, name), "path", "")):
            if not Path(path).expanduser().exists() and (looks_local(path) or path.endswith(SUFFIXES)):
                yield (name, "path"), f"there is no data set {path!r} in {Path.cwd()}"
    for each in fields(config):
        engine = getattr(config, each.name)
        if is_dataclass(engine) and isinstance(engine, TrainEngineConfig) and (path := engine.path):
            exists = Path(path).expanduser().exists()
            if not exists and (looks_local(path) or not is_id(path)):
                yield (each.name, "path"), f"there is no model folder {path!r} in {Path.cwd()}"


def _code_faults(config: BaseExperimentConfig) -> Iterator[tuple[FieldPath, str]]:
    """Yield functions and classes that cannot be imported."""
    if not isinstance(config, PPOConfig):
        return
    rewards = _texts(config.reward_fn)
    agent = config.rollout.agent or config.rollout.openai
    workflow = configured_workflow(config.workflow, PPOConfig.workflow, os.environ)
    named: list[tuple[FieldPath, str]] = [(("workflow",), workflow)]
    named += [(("reward_fn",), each) for each in rewards]
    named += [(("rollout", "agent", "agent_cls_path"), agent.agent_cls_path)] if agent is not None else []
    hooks = ("loss_fn", "advantage_fn", "gae_lambda")
    named += [(("actor", name), hook) for name in hooks if isinstance(hook := getattr(config.actor, name), str)]
    for path, name in named:
        if name and (fault := import_fault(name, ["", *sys.path])) is not None:
            yield path, f"{name!r}: {fault}"
    for name in rewards:
        try:
            written_parameters(name, ["", *sys.path]).check_types()
        except UsageFault as error:
            yield ("reward_fn",), f"{error.message}; {error.hint}"
    rewarded = rewards or config.is_online or "reward_fn" in config.workflow_kwargs
    if workflow == PPOConfig.workflow and not rewarded:  # the default workflow requires one
        yield (
            ("reward_fn",),
            "is needed: what an answer is worth, as module:function, such as areal.reward.gsm8k:gsm8k_reward_fn",
        )


def _texts(setting: str | Sequence[str]) -> list[str]:
    """Return the texts of a setting that has one or several."""
    return [each for each in ([setting] if isinstance(setting, str) else setting) if each]


def _first_rows(path: str, split: str, count: int) -> Rows | None:
    """Return the first rows of a local data set, or of one of the hub that is in the cache; None if it must be
    downloaded, or would be slow to read. Raises ArealError."""
    local = Path(path).expanduser()
    if local.exists():
        return read_rows(local, split, first=count) if _is_quick_to_read(local) else None
    files = _cached_files(path, split)
    return read_files(files, path, first=count) if files and all(map(_is_quick_to_read, files)) else None


def _cached_files(path: str, split: str) -> list[Path] | None:
    if looks_local(path) or path.endswith(SUFFIXES) or is_loader(path):
        return None
    return cached_files(path, split, replace(Hub.of(), offline=True))


def _is_outdated(path: str, split: str) -> bool:
    """Return whether the hub has other files than the cache. It is asked only about data sets with a fault."""
    return not Path(path).expanduser().exists() and cached_files(path, split, Hub.of()) != _cached_files(path, split)


def _is_quick_to_read(path: Path) -> bool:
    """Return whether the first rows of a local data set can be read quickly. A JSON list is decoded as a whole."""
    if not path.is_file() or path.stat().st_size < _LARGE:
        return path.exists()
    with path.open("rb") as stream:
        return stream.read(1) != b"["


def _template_faults(config: BaseExperimentConfig) -> Iterator[tuple[FieldPath, str]]:
    """Yield a local tokenizer without a chat template: that of a base model."""
    if not isinstance(config, PPOConfig) or not _uses_default_workflow(config):
        return
    if config.workflow_kwargs.get("get_input_ids_fn"):
        return
    folder = Path(config.tokenizer_path).expanduser()
    described = [_json_of(folder / name) for name in ("tokenizer_config.json", "chat_template.json")]
    if described[0] is None or (folder / "chat_template.jinja").is_file():
        return
    if not any(each and each.get("chat_template") for each in described):
        path = ("tokenizer_path",) if config.tokenizer_path != config.actor.path else ("actor", "path")
        yield path, f"the tokenizer in {str(folder)!r} has no chat template: {NO_TEMPLATE}"


def _json_of(file: Path) -> dict[str, Any] | None:
    try:
        found = parse_json(file.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _row_faults(config: BaseExperimentConfig) -> Iterator[tuple[FieldPath, str]]:
    """Yield data sets whose first rows cannot be read, or lack columns that the reward requires. The columns of
    user-defined workflows are not known; the driver checks all rows before an engine starts."""
    rewards: list[Parameters] | None = None
    if isinstance(config, PPOConfig) and _uses_default_workflow(config):
        rewards = [written_parameters(each, ["", *sys.path]) for each in _texts(config.reward_fn)]
    for name in ("train_dataset", "valid_dataset"):
        dataset = getattr(config, name)
        for path in _texts(getattr(dataset, "path", "")):
            split = dataset.split or DEFAULT_SPLITS[name]
            try:
                given = _first_rows(path, split, _FIRST_ROWS)
                if given is not None and rewards is not None:
                    rows = formatted(given, "rl", None, None) if (dataset.type or "rl") == "rl" else given
                    check_columns(rewards, rows, rows.place)
            except ArealError as error:
                if not _is_outdated(path, split):
                    hint = f"; {error.hint}" if error.hint and isinstance(error, UsageFault) else ""
                    yield (name, "path"), f"{error.message}{hint}"


def _uses_default_workflow(config: PPOConfig) -> bool:
    """Return whether the default workflow passes the rows to the reward."""
    is_default = config.workflow == PPOConfig.workflow and not config.is_online
    return is_default and config.rollout.agent is None and config.rollout.openai is None


def _batch_faults(config: BaseExperimentConfig) -> Iterator[tuple[FieldPath, str]]:
    """Yield a batch size for which the data sets have too few rows. The driver counts without rows that are too
    long."""
    data = config.train_dataset
    paths, split = _texts(data.path), data.split or DEFAULT_SPLITS["train_dataset"]
    if not paths or not data.drop_last:
        return
    try:
        read = [_first_rows(path, split, data.batch_size) for path in paths]
    except ArealError:  # reported by ``_row_faults``
        return
    count = sum(len(rows) for rows in read if rows is not None)
    if None in read or count >= data.batch_size or any(_is_outdated(path, split) for path in paths):
        return
    why = f"a batch of {data.batch_size} is more than the {count} rows of the data set"
    yield ("train_dataset", "batch_size"), f"{why}: lower it, or set train_dataset.drop_last=false"


def written_parameters(name: str, places: Sequence[str]) -> Parameters:
    """Return the parameters of ``module:function`` as its file defines it, even if other modules import it by name.
    They have no signature if the files do not show it: the function is assigned, decorated, or a class."""
    module, _, function = name.partition(":") if ":" in name else name.rpartition(".")
    for _ in range(_MAX_IMPORTS):
        found = module_of(module, places)
        if isinstance(found, str) or found[1] or found[0].suffix != ".py":
            break
        try:
            tree = ast.parse(found[0].read_bytes())
        except (OSError, SyntaxError, ValueError):
            break
        defined = [
            each
            for each in tree.body
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == function
        ]
        if len(defined) == 1 and not defined[0].decorator_list:
            return Parameters(function, _signature(defined[0]), columns_read(defined[0]))
        imports = [
            (each, alias.name)
            for each in ast.walk(tree)
            if isinstance(each, ast.ImportFrom)
            for alias in each.names
            if (alias.asname or alias.name) == function
        ]
        if defined or len(imports) != 1:
            break
        node, function = imports[0]
        above = module.split(".")
        above = above[: len(above) - node.level + (found[0].name == "__init__.py")] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
    return Parameters(name, None)


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature:
    made, given = inspect.Parameter, function.args

    def text(node: ast.expr | None) -> Any:
        return made.empty if node is None else SignatureText(ast.unparse(node))

    by_place = [*given.posonlyargs, *given.args]
    defaults = dict(zip(reversed(by_place), reversed(given.defaults), strict=False))
    named = dict(zip(given.kwonlyargs, given.kw_defaults, strict=True))
    listed: list[tuple[ast.arg, Any]] = [(each, made.POSITIONAL_ONLY) for each in given.posonlyargs]
    listed += [(each, made.POSITIONAL_OR_KEYWORD) for each in given.args]
    listed += [(given.vararg, made.VAR_POSITIONAL)] if given.vararg else []
    listed += [(each, made.KEYWORD_ONLY) for each in given.kwonlyargs]
    listed += [(given.kwarg, made.VAR_KEYWORD)] if given.kwarg else []
    return inspect.Signature(
        [
            made(each.arg, kind, default=text(defaults.get(each) or named.get(each)), annotation=text(each.annotation))
            for each, kind in listed
        ],
        return_annotation=text(function.returns),
    )


def check_all(requests: Sequence[Mapping[str, Any]]) -> list[ConfigAnswer]:
    """Check each request in its job's working folder, environment and import path."""
    home, environment, imported = Path.cwd(), dict(os.environ), list(sys.path)
    answers = []
    for request in requests:
        os.chdir(request["folder"])
        os.environ.update(request["env"])
        sys.path[:0] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        try:
            with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as inline:
                if request["text"] is not None:
                    inline.write(request["text"])
                    inline.flush()
                    request = {**request, "file": inline.name}
                answers.append(check(request))
        finally:
            os.chdir(home)
            os.environ.clear()
            os.environ.update(environment)
            sys.path[:] = imported
    return answers


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # warnings are the driver's
    json.dump(check_all(json.load(sys.stdin)), sys.stdout, default=str)
