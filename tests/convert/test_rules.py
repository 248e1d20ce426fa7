"""Conversion by a table of rules: values that cannot be used, names of older versions, sections and their switches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from areal.convert.drafts import Draft, Fate
from areal.convert.rules import (
    Framework,
    alike,
    choice,
    convert,
    files,
    ignored,
    joint,
    lossy,
    number,
    optional,
    pair,
    period,
    refused,
    to,
    whole,
)


def frame(**changes: Any) -> Framework:
    rules = {
        "count": to("seed", whole(1)),
        "name": to("train_dataset.path"),
        "run": to("trial_name"),
        "flag": to("actor.use_lora"),
        "rate": joint("actor.optimizer.lr", number),
        "maybe": to("valid_dataset.path", neutral=(None,)),
        "extra.*": ignored("a section"),
        "extra.known": lossy("no counterpart", 0),
        "lora.*": refused("adapters of another kind", False),
        **alike(to("actor.path"), "path weights", "model"),
    }
    defaults = {"count": 7, "name": "rows", "flag": False, "rate": 1.0, "maybe": None, "lora.use": False}
    given: dict[str, Any] = {"rules": rules, "defaults": defaults, "finish": lambda draft: None, **changes}
    return Framework("own", **given)


def only_entry(key: str, value: Any, **changes: Any) -> tuple[Fate, str]:
    (entry,) = convert(frame(**changes), {key: value}).entries
    assert entry.key == key
    return entry.fate, entry.note


@pytest.mark.parametrize(
    ("key", "value", "note"),
    [
        ("name", "${data.path}", "${data.path} is not resolved here: add name=VALUE"),
        ("name", "${env:ROOT}/x", "${env:ROOT} is not resolved here: add name=VALUE"),
        ("name", "$1/rows", "it is argument 1 of the script: add name=VALUE"),
        ("name", "${12}/rows", "it is argument 12 of the script: add name=VALUE"),
        ("name", "$ROOT/rows", "$ROOT is not set: export it, or add name=VALUE"),
        ("name", "${ROOT:-/data}/rows", "$ROOT is not set: export it, or add name=VALUE"),
        ("name", "$(ls)", "it is what a command prints: add name=VALUE"),
        ("name", "`ls`", "it is what a command prints: add name=VALUE"),
        ("name", None, "it must not be null; its default is 'rows'"),
        ("flag", "yes", "it must be true or false, not 'yes'"),
        ("flag", 1, "it must be true or false, not 1"),
        ("count", "8", "it must be a number, not '8'"),
        ("count", True, "it must be a number, not True"),
        ("rate", math.inf, "it must be a number, not inf"),
        ("count", 0, "it must be a whole number from 1 on, not 0"),
        ("count", 1.5, "it must be a whole number from 1 on, not 1.5"),
        ("absent", 1, "this is not a known key of own"),
        ("cuont", 1, 'this is not a known key of own (did you mean "count"?)'),
        ("model.pth", "x", 'this is not a known key of own (did you mean "model.path"?)'),
        ("lora.use", True, "adapters of another kind"),
    ],
)
def test_value_that_cannot_be_used_is_refused_with_its_reason(key: str, value: Any, note: str) -> None:
    assert only_entry(key, value) == (Fate.REFUSED, note)


@pytest.mark.parametrize(
    ("key", "value", "fate"),
    [
        ("name", "a`b", Fate.MAPPED),
        ("count", 3, Fate.MAPPED),
        ("flag", True, Fate.MAPPED),
        ("maybe", "rows", Fate.MAPPED),
        ("maybe", None, Fate.IGNORED),
        ("run", "$USER", Fate.IGNORED),  # a name changes nothing
        ("extra.other.deep", 1, Fate.IGNORED),
        ("extra.known", 1, Fate.LOSSY),
        ("extra.known", 0, Fate.IGNORED),
        ("extra.known", None, Fate.IGNORED),
        ("lora.use", False, Fate.IGNORED),
        ("model.any._target_", "x.Y", Fate.IGNORED),
        ("model.weights", "org/m", Fate.MAPPED),
    ],
)
def test_fate_of_a_key_is_that_of_its_rule_and_value(key: str, value: Any, fate: Fate) -> None:
    assert only_entry(key, value)[0] is fate


@pytest.mark.parametrize(("switch", "fate"), [(False, Fate.IGNORED), (True, Fate.REFUSED), (None, Fate.IGNORED)])
def test_unknown_key_of_a_section_that_is_off_is_ignored(switch: bool | None, fate: Fate) -> None:
    source = frame(switches={"reward.": "flag"})
    given = {"reward.model": "x"} if switch is None else {"reward.model": "x", "flag": switch}
    (entry,) = (each for each in convert(source, given).entries if each.key == "reward.model")
    assert entry.fate is fate and (entry.note == "flag is off") == (fate is Fate.IGNORED)


def test_defaults_are_converted_without_an_entry_and_stand_in_for_refused_values() -> None:
    draft = convert(frame(), {"count": 0, "flag": True})
    assert [(each.key, each.fate) for each in draft.entries] == [("count", Fate.REFUSED), ("flag", Fate.MAPPED)]
    assert draft.config["seed"] == 7 and draft.config["actor"] == {"use_lora": True}
    assert draft.config["train_dataset"] == {"path": "rows"}
    assert "valid_dataset" not in draft.config, "its default is null"
    assert convert(frame(), {"rate": "fast"}).config["actor"] == {"use_lora": False}, "`finish` sets a joint key"


def test_older_names_are_read_and_shown_as_given() -> None:
    source = frame(aliases={"old": "count", "both": "name run"})
    draft = convert(source, {"both": "b", "old": 3})
    assert [(each.key, each.target) for each in draft.entries] == [
        ("both", "train_dataset.path"),
        ("both", "trial_name"),
        ("old", "seed"),
    ]
    assert (draft.config["seed"], draft.config["trial_name"], draft.config["train_dataset"]["path"]) == (3, "b", "b")
    for given in ({"count": 5, "old": None}, {"old": None, "count": 5}):
        assert convert(source, given).config["seed"] == 5, "null sets nothing beside the other name"


def test_number_of_steps_stands_over_that_of_epochs() -> None:
    rules = {"steps": to("total_train_steps"), "epochs": to("total_train_epochs"), "lr": to("actor.optimizer.lr")}
    source = Framework("own", rules, {"epochs": 3}, lambda draft: None)
    draft = convert(source, {"epochs": 2, "lr": 1e-5, "steps": 9})
    assert "total_train_epochs" not in draft.config and draft.config["total_train_steps"] == 9
    assert [(each.key, each.fate) for each in draft.entries] == [
        ("epochs", Fate.IGNORED),
        ("lr", Fate.MAPPED),
        ("steps", Fate.MAPPED),
    ]
    assert draft.config["actor"]["optimizer"] == {"lr": 1e-5, "warmup_steps_proportion": 0.0}
    assert convert(source, {"epochs": 2}).config == {"total_train_epochs": 2}


ERROR = object()


@pytest.mark.parametrize(
    ("translate", "values"),
    [
        (number, {1: 1, 2.5: 2.5, -0.5: -0.5, "1": ERROR, None: ERROR, math.nan: ERROR}),
        (pair, {(1, 2.0): [1, 2.0], (1,): ERROR, (1, 2, 3): ERROR, (1, "2"): ERROR, "12": ERROR}),
        (whole(0), {0: 0, 5: 5, -1: ERROR, 0.0 + 0.5: ERROR, "1": ERROR}),
        (optional, {None: None, -1: -1, 0: 0, -2: ERROR}),
        (period, {None: None, -1: None, 0: None, 1: 1, 20: 20, -2: ERROR}),
        (choice(a="x", no=1), {"a": "x", False: 1, "no": 1, "b": ERROR, True: ERROR}),
        (choice(a="x"), {False: ERROR}),
        (
            files,
            {"a": "a", "a, b": ["a", "b"], ("a",): "a", ("a", " b"): ["a", "b"], "": ERROR, "a,": ERROR, (): ERROR},
        ),
    ],
)
def test_values_are_translated_or_have_no_counterpart(translate: Callable[[Any], Any], values: dict[Any, Any]) -> None:
    for value, expected in values.items():
        if expected is ERROR:
            with pytest.raises(ValueError, match=r"must be|has no counterpart|names no data set"):
                translate(value)
        else:
            assert translate(value) == expected and type(translate(value)) is type(expected)


def test_draft_has_values_that_finish_reads() -> None:
    read: list[Draft] = []
    convert(frame(finish=read.append), {"rate": 2.0, "count": "many"})
    assert (read[0].values["rate"], read[0].values["count"]) == (2.0, 7)
