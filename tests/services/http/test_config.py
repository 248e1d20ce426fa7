"""The configuration of a service process: a JSON file, and flags on top of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal.errors import UsageFault
from areal.services.http.process import read_config
from areal.wire.processes import GatewayConfig


def written(folder: Path, config: object) -> str:
    file = folder / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(file)


def test_config_file_with_flags_on_top_is_one_configuration(tmp_path: Path) -> None:
    file = written(tmp_path, {"router_url": "http://r:1", "relays": 2, "drain_timeout": 5})
    config = read_config(GatewayConfig, "gateway", ["--config", file, "--relays", "4", "--port", "0"])
    assert config == GatewayConfig(router_url="http://r:1", relays=4, drain_timeout=5.0, port=0)


def test_config_flags_alone_suffice() -> None:
    config = read_config(GatewayConfig, "gateway", ["--router-url", "http://r:1", "--max-body-bytes", "9"])
    assert (config.router_url, config.limits.max_body_bytes, config.port) == ("http://r:1", 9, 8080)


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        ({"router_url": "r", "realys": 2}, [], "realys is not a known field"),
        ({"router_url": "r", "relays": "2"}, [], "relays must be a whole number, not '2'"),
        ({}, [], "router_url is required"),
        ({"router_url": "r"}, ["--relays", "0"], "--relays must be at least 1, not 0"),
        ("{", [], "is not valid JSON"),
        ([], [], "must be an object"),
    ],
)
def test_config_that_cannot_be_used_is_named_by_file_and_field(
    tmp_path: Path, content: object, flags: list[str], says: str
) -> None:
    file = written(tmp_path, content)
    with pytest.raises(UsageFault) as caught:
        read_config(GatewayConfig, "gateway", ["--config", file, *flags])
    assert says in caught.value.message
    assert file in caught.value.message or flags


def test_config_file_that_is_not_there_and_required_flag_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match=r"cannot read the configuration .*nothing\.json"):
        read_config(GatewayConfig, "gateway", ["--config", str(tmp_path / "nothing.json")])
    with pytest.raises(UsageFault, match=r"^--router-url is required$"):
        read_config(GatewayConfig, "gateway", [])
