"""An agent service under load: updated, killed piece by piece, filled. No acknowledged turn is lost or doubled."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import pytest

from tests.e2e.agents import AgentLoad, Agents
from tests.e2e.conftest import make_box, tear_down
from tests.services.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAIRS = 4
FIELDS = (f"pairs: {PAIRS}", "healthPollSeconds: 1")


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    made = Agents(make_box(tmp_path_factory.mktemp("agents")))
    made.apply(*FIELDS, "kwargs: {seconds: 0.05}")
    yield made
    tear_down(made.box)


def test_a_hundred_sessions_are_balanced_over_four_pairs(agents: Agents) -> None:
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda number: agents.ask("POST", "/sessions", {}), range(100)))
    assert {status for status, _ in answers} == {201}
    keys = {answer["session_key"] for _, answer in answers}
    proxies = [row["ports"][0] for name, row in agents.box.processes().items() if name.startswith("data-proxy/")]
    held = [json.load(urlopen(f"http://127.0.0.1:{port}/ready", timeout=10))["sessions"] for port in proxies]
    assert len(keys) == sum(held) == 100
    assert len(held) == PAIRS and min(held) >= 20, held


def test_update_of_the_agent_under_load_breaks_no_turn(agents: Agents) -> None:
    before = agents.box.pids()
    with AgentLoad(agents, 32, prefix="updated") as load:
        agents.apply(*FIELDS, "kwargs: {seconds: 0.05, name: two}")
        load.wait_for_all(2)
    load.check()
    assert {caller.answers[0].split(" ")[0] for caller in load.callers} == {"one"}
    assert {caller.answers[-1].split(" ")[0] for caller in load.callers} == {"two"}
    after = agents.box.pids()
    kept = {name for name in before if before[name] == after[name]}
    assert kept == {"router/0", "gateway/0"}


def test_scale_down_under_load_breaks_no_turn(agents: Agents) -> None:
    with AgentLoad(agents, 16, prefix="scaled") as load:
        agents.box.ok("scale", agents.ref, "--replicas", "2")
        load.wait_for_all(2)
        agents.box.ok("scale", agents.ref, "--replicas", str(PAIRS))
        load.wait_for_all(2)
    load.check()


@pytest.mark.parametrize("component", ["worker/0", "data-proxy/0", "router/0", "gateway/0"])
def test_killed_process_loses_and_doubles_no_acknowledged_turn(agents: Agents, component: str) -> None:
    prefix = f"killed-{component.partition('/')[0]}"
    before = agents.box.pids()
    with AgentLoad(agents, 32, retries=True, prefix=prefix) as load:
        os.kill(before[component], signal.SIGKILL)
        load.wait_for_all(3)
    load.check()
    wait_until(lambda: agents.box.pids().keys() == before.keys())
    after = agents.box.pids()
    assert {name for name in before if before[name] != after[name]} == {component}


def test_one_apply_heals_all_killed_processes(agents: Agents) -> None:
    fields = (*FIELDS, "kwargs: {seconds: 0.05, name: healed}")
    agents.apply(*fields)
    sessions = [f"survivor-{number}" for number in range(12)]
    for session in sessions:
        agents.say("a", session)
    for pid in agents.box.living():
        os.kill(pid, signal.SIGKILL)
    assert "process-died" in agents.box.areal("diff", "--drift").out
    assert f"{agents.ref} healed: Ready" in agents.apply(*fields)
    assert {agents.say("b", session) for session in sessions} == {"healed 1 b"}
    assert agents.box.areal("diff", "--drift").code == 0


@pytest.mark.parametrize("strategy", ["{type: BlueGreen, keepOldSeconds: 1}", "{type: Rolling, maxSurge: 2}"])
def test_strategies_and_a_rollback_under_load_break_no_turn(agents: Agents, strategy: str) -> None:
    base = (*FIELDS, f"strategy: {strategy}")
    agents.apply(*base, "kwargs: {seconds: 0.05, name: old}")
    with AgentLoad(agents, 16, prefix=strategy[7:11]) as load:
        agents.apply(*base, "kwargs: {seconds: 0.05, name: new}")
        load.wait_for_all(1)
        assert agents.say("a", f"probe {strategy}").startswith("new")
        agents.box.ok("rollback", agents.ref)
        load.wait_for_all(1)
    load.check()
    assert agents.say("b", f"probe {strategy}") == "old 1 b"
