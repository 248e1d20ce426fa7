"""Everything an operator does to a running service, done under sessions that talk, are rewarded and exported: no call
or stream breaks, and every token comes out as its caller received it.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.conftest import Box
from tests.e2e.load import Load
from tests.e2e.rollouts import ask


def changed(before: dict[str, int], after: dict[str, int]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def under_load(box: Box, *command: str) -> set[str]:
    """Run a command under load; which processes are others, or gone, or new afterwards."""
    before = box.pids()
    with Load(box) as load:
        result = box.areal(*command)
        load.wait_for_all(2)
    assert result.code == 0, result.text
    assert load.broken == []
    return changed(before, box.pids())


def scraped(box: Box) -> dict[str, set[str]]:
    """What Prometheus scrapes, by job."""
    found: dict[str, set[str]] = {}
    for each in ask(box, "GET", "/http_sd")[1]:
        found.setdefault(each["labels"]["job"], set()).update(each["targets"])
    return found


@pytest.mark.slow
def test_blue_green_update_under_load_breaks_and_loses_nothing(two: Box) -> None:
    model = "replicas: 2\nengineArgs: {max-batch-size: 16}\nstrategy: {type: BlueGreen, keepOldSeconds: 2}"
    before = scraped(two)
    touched = under_load(two, "apply", "-f", two.manifest(model=model, name="blue-green.yaml"))
    assert touched == {"engine/0", "engine/1", "data-proxy/0", "data-proxy/1"}
    after = scraped(two)
    assert after["areal-gateway"] == before["areal-gateway"]
    for job in ("areal-data-proxy", "areal-engine"):
        assert len(after[job]) == 2 and not after[job] & before[job]


@pytest.mark.slow
def test_killed_engine_under_load_fails_only_its_streams(two: Box) -> None:
    before = two.pids()
    with Load(two) as load:
        load.kills = True
        os.kill(before["engine/0"], signal.SIGKILL)
        two.ok("reconcile")
        load.wait_for_all(2)
    assert load.broken == [] and load.forgiven <= 6, "at most one call of each caller was under way"
    assert changed(before, two.pids()) == {"engine/0"}


@pytest.mark.slow
def test_router_killed_under_load_is_restored_without_engines(two: Box) -> None:
    before = two.pids()
    with Load(two) as load:
        os.kill(before["router/0"], signal.SIGKILL)
        load.wait_for_all(1)
        two.ok("reconcile")
        load.wait_for_all(2)
    assert load.broken == []
    assert changed(before, two.pids()) == {"router/0"}
    assert two.areal("diff", "--drift").code == 0


@pytest.mark.slow
def test_router_and_gateway_update_under_load_loses_nothing(two: Box) -> None:
    manifest = two.manifest(service="logLevel: warning", model="replicas: 2", name="front.yaml")
    assert {"router/0", "gateway/0"} == {
        name for name in under_load(two, "apply", "-f", manifest, "--yes") if not name.startswith(("engine", "data"))
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_day_of_operations_under_load_loses_nothing(box: Box) -> None:
    """One load through everything: what one operation leaves behind the next one finds."""
    box.ok("apply", "-f", box.manifest(model="replicas: 2"))
    rolling = box.manifest(model="replicas: 2\nengineArgs: {max-batch-size: 8}", name="rolling.yaml")
    blue_green = box.manifest(
        model="replicas: 2\nengineArgs: {max-batch-size: 4}\nstrategy: {type: BlueGreen, keepOldSeconds: 3}",
        name="blue.yaml",
    )
    with Load(box, sessions=6, strangers=3) as load:
        for command in (
            ("apply", "-f", rolling),
            ("scale", "model/reverse", "--replicas", "3"),
            ("restart", "model/reverse"),
            ("scale", "model/reverse", "--replicas", "1"),
            ("scale", "model/reverse", "--replicas", "2"),
            ("apply", "-f", blue_green),
            ("rollback", "model/reverse", "--yes"),
            ("restart", "inferenceservice/default"),
        ):
            result = box.areal(*command)
            assert result.code == 0, f"{command}: {result.text}"
            load.wait_for_all(2)
            assert load.broken == [], command
        load.kills = True
        for component in ("engine/0", "data-proxy/1", "router/0"):
            os.kill(box.pids()[component], signal.SIGKILL)
            box.ok("reconcile")
            load.wait_for_all(2)
            assert load.broken == [], component
    assert load.broken == []
    assert box.areal("diff", "--drift").code == 0
