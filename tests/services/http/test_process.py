"""How a service process starts: its configuration, its stage, and its garbage collector."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from areal.errors import UsageFault
from areal.services.http.process import read_config
from areal.wire.processes import GatewayConfig
from areal.wire.stage import report_stage


def written(folder: Path, config: object) -> str:
    file = folder / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(file)


def test_flags_override_config_file(tmp_path: Path) -> None:
    file = written(tmp_path, {"router_url": "http://r:1", "relays": 2, "drain_timeout": 5})
    config = read_config(GatewayConfig, "gateway", ["--config", file, "--relays", "4", "--port", "0"])
    assert config == GatewayConfig(router_url="http://r:1", relays=4, drain_timeout=5.0, port=0)


def test_flags_alone_form_a_config() -> None:
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
def test_config_error_names_file_and_field(tmp_path: Path, content: object, flags: list[str], says: str) -> None:
    file = written(tmp_path, content)
    with pytest.raises(UsageFault) as caught:
        read_config(GatewayConfig, "gateway", ["--config", file, *flags])
    assert says in caught.value.message
    assert file in caught.value.message or flags


def test_missing_config_file_and_required_flag_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageFault, match=r"cannot read the configuration .*nothing\.json"):
        read_config(GatewayConfig, "gateway", ["--config", str(tmp_path / "nothing.json")])
    with pytest.raises(UsageFault, match=r"^--router-url is required$"):
        read_config(GatewayConfig, "gateway", [])


def test_stage_is_written_atomically_to_configured_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "stage.json"
    monkeypatch.setenv("AREAL_STAGE_FILE", str(file))
    report_stage("loading", done=1, total=2)
    report_stage("serving")
    assert json.loads(file.read_text()) == {"stage": "serving", "done": None, "total": None}
    assert list(tmp_path.iterdir()) == [file]


def test_stage_without_file_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREAL_STAGE_FILE", raising=False)
    report_stage("serving")


# The collector is a setting of the whole interpreter: tested in a process of its own.

SCRIPT = """
import gc, weakref
from areal.services.http.process import collect_rarely
collect_rarely()
assert gc.get_freeze_count() > 1000 and gc.get_threshold()[0] >= 10_000

class Node: pass

def cycle():
    node = Node()
    node.self = node
    return weakref.ref(node)

gone = cycle()
kept = [[] for _ in range(2 * gc.get_threshold()[0])]
assert gone() is None, "cycles are still found"
print("ok")
"""


def test_gc_runs_rarely_and_skips_imported_objects() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout == "ok\n", ran.stderr
