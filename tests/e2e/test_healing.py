"""Whatever is killed: drift names it, apply heals it, and nothing else is touched."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Box


def killed_until_it_backs_off(box: Box, name: str) -> dict[str, Any]:
    """The processes before the second kill: after the first one a component starts again at once."""
    first = box.processes()[name]
    os.kill(first["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while (rows := box.processes()).get(name, first)["pid"] == first["pid"]:
        assert time.monotonic() < deadline, rows
    os.kill(rows[name]["pid"], signal.SIGKILL)
    return rows


def test_component_killed_once_restarts_at_once_with_event(served: Box) -> None:
    first = served.processes()["data-proxy/0"]
    os.kill(first["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while served.processes().get("data-proxy/0", first)["pid"] == first["pid"]:
        assert time.monotonic() < deadline
    served.ok("wait", "model/reverse", "--for", "ready", "--timeout", "1m")

    events = json.loads(served.ok("events", "model/reverse", "-o", "json").out)["items"]
    told = [(each["reason"], each["message"]) for each in events if each["actor"] == "supervisor"]
    assert [reason for reason, _ in told] == ["Died", "Restarted"]
    assert told[0][1].startswith("data-proxy/0: killed by SIGKILL after ") and told[0][1].endswith(
        "starts again at once"
    )
    assert events[-1]["at"] - events[-2]["at"] < 5
    served.ok("restart", "model/reverse")  # with a fresh budget


@pytest.mark.parametrize(
    "component",
    [
        "engine",
        pytest.param("router", marks=pytest.mark.slow),
        pytest.param("gateway", marks=pytest.mark.extended),
        pytest.param("data-proxy", marks=pytest.mark.slow),
    ],
)
def test_apply_heals_only_killed_component(served: Box, component: str) -> None:
    before = killed_until_it_backs_off(served, f"{component}/0")
    drift = served.areal("diff", "--drift")
    assert drift.code == 1
    assert f"{component}/0: process-died: killed by SIGKILL" in drift.out
    served.ok("apply", "-f", served.manifest())
    after = served.processes()
    changed = {name for name in before if before[name]["pid"] != after[name]["pid"]}
    assert changed == {f"{component}/0"}
    assert served.chat("1234").isdigit()
    assert served.areal("diff", "--drift").code == 0


@pytest.mark.slow
def test_reconcile_heals_killed_shim_and_its_session(served: Box) -> None:
    before = served.processes()
    engine = before["engine/0"]["pid"]
    shim = int(Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(shim, signal.SIGKILL)
    served.ok("reconcile")
    after = served.processes()
    assert after["engine/0"]["pid"] != engine
    assert after["engine/0"]["ports"] == before["engine/0"]["ports"]
    assert after["data-proxy/0"]["pid"] == before["data-proxy/0"]["pid"]
    assert engine not in served.living()
    assert served.chat("1234").isdigit()
