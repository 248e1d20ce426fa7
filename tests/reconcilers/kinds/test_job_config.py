from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal.api import cli_args
from areal.api.registry import load_attr
from areal.errors import InvalidManifest, UsageFault
from areal.reconcilers.kinds.job_config import BUILT_IN, choose_driver, read_config
from areal.resources.specs import DRIVERS


@pytest.mark.parametrize(
    ("given", "config", "overrides", "chosen"),
    [
        ("a:b", {"driver": "c:d", "trainer": {"type": "grpo"}}, (), "a:b"),
        (None, {"driver": "c:d", "trainer": {"type": "grpo"}}, (), "c:d"),
        (None, {"driver": "c:d"}, ("x=1", "driver=e:f"), "e:f"),
        (None, {"trainer": {"type": "grpo"}}, (), BUILT_IN["grpo"]),
        (None, {"trainer": {"type": "grpo"}}, ("trainer.type=sft",), BUILT_IN["sft"]),
        (None, {}, ("+trainer.type=dpo",), BUILT_IN["dpo"]),
        (None, {"trainer": {"type": "null"}}, (), BUILT_IN["null"]),
    ],
)
def test_driver_is_chosen_by_precedence(
    given: str | None, config: dict[str, Any], overrides: tuple[str, ...], chosen: str
) -> None:
    assert choose_driver(given, config, overrides, "c.yaml") == chosen


def test_no_driver_and_an_unknown_type_are_errors_that_say_what_to_do() -> None:
    with pytest.raises(UsageFault, match="nothing says which driver"):
        choose_driver(None, {}, (), "c.yaml")
    with pytest.raises(UsageFault, match=r"'grop' has no built-in driver.*grpo"):
        choose_driver(None, {"trainer": {"type": "grop"}}, (), "c.yaml")


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just words"])
def test_config_that_is_no_map_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InvalidManifest, match=r"c\.yaml:1:"):
        read_config(path)


def test_built_in_drivers_are_those_that_there_are() -> None:
    for driver, config in DRIVERS.values():
        assert driver == load_attr(driver, "driver").__module__ + ":" + load_attr(driver, "driver").__name__
        assert issubclass(getattr(cli_args, config), cli_args.BaseExperimentConfig)
