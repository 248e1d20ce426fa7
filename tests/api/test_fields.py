"""Every field of every configuration class: it is acted upon, or refused, or documented as without effect."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import logging
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml

import areal
from areal.api.cli_args import (
    ConfigError,
    DPOConfig,
    GenerationHyperparameters,
    GRPOConfig,
    RWConfig,
    SFTConfig,
    load_expr_config,
)
from areal.api.config.fields import NoEffect, NotSupported
from areal.wire.fields import default_of, hints_of

ROOT = Path(areal.__file__).parent
EXPERIMENTS = (GRPOConfig, SFTConfig, RWConfig, DPOConfig)
CONFIG = ROOT / "api" / "config"
ADOPTED = {"max_concurrent_rollouts", "greedy", "peft_type", "preset", "group_reward_norm", "group_adv_norm"} | {
    f"{prefix}_imp_weight_{name}" for prefix in ("behave", "behav") for name in ("cap", "mode")
}
"""Read by the configuration classes themselves, which hand on what follows from them."""

HANDED_DOWN = ("experiment_name", "trial_name", "fileroot")

Path_ = tuple[str, ...]


def default_in(cls: Any, name: str) -> Any:
    return default_of(cls.__dataclass_fields__[name])


def classes_below(hint: Any) -> Iterator[type]:
    arguments = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        yield hint
    for argument in arguments:
        yield from classes_below(argument)


def fields_of(cls: type, path: Path_ = ()) -> Iterator[tuple[type, Path_, Any]]:
    """(class, path, type) of every field, not those below a field that is marked itself."""
    for name, hint in hints_of(cls).items():
        yield cls, (*path, name), hint
        for nested in [] if marks_of(hint) else classes_below(hint):
            yield from fields_of(nested, (*path, name))


def marks_of(hint: Any) -> list[NotSupported | NoEffect]:
    found = hint.__metadata__ if get_origin(hint) is Annotated else ()
    return [mark for mark in found if isinstance(mark, NotSupported | NoEffect)]


def other_than(default: Any, hint: Any) -> Any:
    """A value of the type that is not the default."""
    if get_origin(hint) is Annotated:
        return other_than(default, hint.__origin__)
    if get_origin(hint) is Literal:
        return next(option for option in get_args(hint) if option != default)
    if get_origin(hint) in (Union, types.UnionType):
        return other_than(default, next(kind for kind in get_args(hint) if kind is not type(None)))
    if get_origin(hint) is list:
        return [{}] if list(classes_below(hint)) else ["x"]
    kind: Any = get_origin(hint) or hint
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        name = next(name for name in hints_of(kind) if name not in HANDED_DOWN)
        return {name: other_than(default_in(kind, name), hints_of(kind)[name])}
    if isinstance(kind, type) and issubclass(kind, dict):
        return {"x": 1}
    return {bool: not default, int: 7, float: 7.5}.get(kind, "x")


MARKED = {path: (cls, hint) for each in EXPERIMENTS for cls, path, hint in fields_of(each) if marks_of(hint)}
SPELT = {"backend": "sglang:d2", "allocation_mode": "sglang:d2+fsdp:d1"}  # fields with a grammar of their own
TRAINED = {"backend": "fsdp:d2"}


def experiment_of(path: Path_) -> type:
    return next(each for each in EXPERIMENTS if path in {found for _, found, _ in fields_of(each)})


@pytest.mark.parametrize("path", sorted(MARKED), ids=".".join)
def test_ineffective_field_is_reported_with_file_line_and_key(
    path: Path_, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cls, hint = MARKED[path]
    (mark,) = marks_of(hint)
    name = path[-1]
    spelt = TRAINED if path[0] in ("actor", "critic", "ref", "model", "teacher") else SPELT
    tree: Any = spelt.get(name, other_than(default_in(cls, name), hint))
    for part in reversed(path):
        tree = {part: tree}
    file = tmp_path / "c.yaml"
    file.write_text("experiment_name: e\ntrial_name: t\n" + yaml.safe_dump(tree))
    key = f"c.yaml:{2 + len(path)}: {'.'.join(path)}: "
    argv = ["--config", str(file)]
    if isinstance(mark, NotSupported):
        with pytest.raises(ConfigError) as caught:
            load_expr_config(argv, experiment_of(path))
        assert f"{key}is not supported: {mark.why}" in str(caught.value)
    else:
        with caplog.at_level(logging.WARNING):
            load_expr_config(argv, experiment_of(path))
        assert any(f"{key}has no effect: {mark.why}" in message for message in caplog.messages)


def test_layout_used_by_job_has_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.yaml").write_text(
        "experiment_name: e\ntrial_name: t\nrollout: {backend: 'sglang:d2'}\nscheduler: {type: slurm}\n"
    )
    monkeypatch.setenv("AREAL_RUN_FOLDER", str(tmp_path))
    load_expr_config(["--config", str(tmp_path / "c.yaml")], GRPOConfig)
    (reported,) = caplog.messages
    assert "scheduler: has no effect" in reported


def names_read() -> set[str]:
    """Attributes that code outside the configuration classes reads."""
    found: set[str] = set()
    for part in ("training", "client", "rollout", "dataset", "reward"):
        for file in (ROOT / part).rglob("*.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            found |= {
                str(node.value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
    for line in inspect.getsource(GenerationHyperparameters.request_fields).splitlines():
        found |= set(re.findall(r"self\.(\w+)", line))  # what the rollout engine sends
    return found


def test_every_silently_accepted_field_is_read() -> None:
    read = names_read() | ADOPTED
    parents = {path for each in EXPERIMENTS for _, path, hint in fields_of(each) if any(classes_below(hint))}
    unread = {
        ".".join(path)
        for each in EXPERIMENTS
        for _, path, hint in fields_of(each)
        if not marks_of(hint) and path[-1] not in read and path not in parents
    }
    assert not unread
