"""Whatever is killed: drift names it, apply heals it, and nothing else is touched."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import Box


@pytest.mark.parametrize(
    "component",
    [
        "engine",
        pytest.param("router", marks=pytest.mark.slow),
        "gateway",
        pytest.param("data-proxy", marks=pytest.mark.slow),
    ],
)
def test_apply_heals_only_what_was_killed(served: Box, component: str) -> None:
    before = served.processes()
    os.kill(before[f"{component}/0"]["pid"], signal.SIGKILL)
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
def test_reconcile_heals_a_killed_shim_with_its_whole_session(served: Box) -> None:
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
