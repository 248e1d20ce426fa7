"""Metrics: what each process exposes is what docs/metrics.md lists, and the dashboard asks for nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.cli.traffic import inference_page, inference_traffic
from areal.client.gateway import GatewayClient
from areal.client.prometheus import Page, parse
from tests.services.inference.recorder.rollouts import begin
from tests.services.processes import REPOSITORY, Process, Processes, wait_ready, wait_until

DOCS = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
DASHBOARDS = REPOSITORY / "examples" / "grafana"
MODEL = REPOSITORY / "examples" / "reverse_digits" / "model"
AGENT_PARTS = ("agent-gateway", "agent-data-proxy", "agent-worker")
Fleet = dict[str, Process]


def documented(component: str) -> dict[str, tuple[str, set[str]]]:
    """By name: type and labels, as the page has them."""
    section = DOCS.split(f"<!-- metrics: {component} -->")[1].split("<!-- end -->")[0]
    rows = [line.strip("|").split("|") for line in section.strip().splitlines()[2:]]
    assert all(row[3].strip() for row in rows), "each has a text"
    return {row[0].strip(" `"): (row[1].strip(), set(re.findall(r"`(\w+)`", row[2]))) for row in rows}


def check_documented(text: str, component: str) -> None:
    """It exposes exactly what the page lists, with these labels or, where nothing was counted yet, with none."""
    wanted = documented("every") | documented(component)
    kinds = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
    exposed = {name: kind for name, kind in kinds if not name.endswith("_created")}
    assert exposed == {name: kind for name, (kind, _) in wanted.items()}
    samples = parse(text).samples
    for name, (_, labels) in wanted.items():
        series = [each for part in ("", "_total", "_bucket", "_count") for each in samples.get(name + part, ())]
        assert {label for each in series for label, _ in each} - {"le"} in (labels, set()), name


@pytest.fixture(scope="module")
def fleet(module_processes: Processes, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One of each, after a rollout went through them."""
    processes = module_processes
    engine = processes.service("engines.embedded", "--model-path", str(MODEL))
    wait_ready(engine)
    state = str(tmp_path_factory.mktemp("state"))
    proxy = processes.data_proxy(engine, MODEL, "--state-dir", state)
    router = processes.router()
    gateway = processes.gateway(router)
    processes.register(router, proxy)
    wait_until(lambda: gateway.call("GET", "/v1/models", key=processes.key).json()["data"])
    fleet = {"engine": engine, "data-proxy": proxy, "router": router, "gateway": gateway}
    rollout_through(fleet, processes.key)
    yield fleet


def rollout_through(fleet: Fleet, key: str) -> None:
    rollout = begin(fleet["gateway"], key)
    rollout.chat("1234", max_tokens=8, temperature=0)
    rollout.reward(1.0)
    exported = rollout.export()
    fleet["gateway"].call("POST", "/export_trajectories/ack", {"export_id": exported["export_id"]}, key=key)


def page_of(process: Process) -> str:
    answer = process.call("GET", "/metrics")
    assert answer.status == 200
    return answer.body.decode()


def scraped(process: Process) -> Page:
    return parse(page_of(process))


@pytest.mark.parametrize("component", ["gateway", "router", "data-proxy", "engine"])
def test_metrics_match_documentation(fleet: Fleet, component: str) -> None:
    check_documented(page_of(fleet[component]), component)


def listed(fleet: Fleet) -> dict[str, list[str]]:
    answer = fleet["gateway"].call("GET", "/http_sd")
    assert answer.status == 200
    return {each["labels"]["job"]: each["targets"] for each in answer.json()}


def test_prometheus_lists_every_process_and_its_successor(
    fleet: Fleet, module_processes: Processes, tmp_path: Path
) -> None:
    wait_until(lambda: len(listed(fleet)) == 4)
    assert listed(fleet) == {f"areal-{name}": [f"127.0.0.1:{process.port}"] for name, process in fleet.items()}
    trainer = {"target": "127.0.0.1:9", "labels": {"job": "areal-trainer"}}
    assert fleet["gateway"].call("POST", "/http_sd", trainer).status == 401
    assert fleet["gateway"].call("POST", "/http_sd", {**trainer, "target": 9}, key=module_processes.key).status == 400
    assert fleet["gateway"].call("POST", "/http_sd", trainer, key=module_processes.key).status == 200
    assert listed(fleet)["areal-trainer"] == ["127.0.0.1:9"]
    successor = module_processes.data_proxy(fleet["engine"], MODEL, "--state-dir", str(tmp_path))
    module_processes.register(fleet["router"], successor)
    assert listed(fleet)["areal-data-proxy"] == [f"127.0.0.1:{successor.port}"]
    module_processes.register(fleet["router"], fleet["data-proxy"])


def test_rollout_is_counted_once_per_component(fleet: Fleet, module_processes: Processes) -> None:
    before = {name: scraped(process) for name, process in fleet.items()}
    rollout_through(fleet, module_processes.key)
    after = {name: scraped(process) for name, process in fleet.items()}

    def grown(component: str, name: str) -> float:
        return (after[component].total(name) or 0) - (before[component].total(name) or 0)

    for name in ("sessions_started", "rewards", "exports", "exported_rows", "exports_acknowledged", "choices"):
        assert grown("data-proxy", f"areal_{name}_total") == 1, name
    assert grown("data-proxy", "areal_time_to_first_token_seconds_count") == 1
    assert grown("data-proxy", "areal_generated_tokens_total") > 1
    assert grown("data-proxy", "areal_time_per_output_token_seconds_count") == 1
    assert grown("data-proxy", "areal_commit_seconds_count") >= 4
    assert after["data-proxy"].total("areal_trajectories_ready") == 0
    assert after["router"].total("areal_router_workers") == 1


def test_watch_shows_traffic_of_each_replica(fleet: Fleet, module_processes: Processes) -> None:
    traffic = inference_traffic(GatewayClient(fleet["gateway"].url, module_processes.key))
    assert traffic.look()["tokensPerSecond"] is None
    rollout_through(fleet, module_processes.key)
    seen = traffic.look()
    (replica,) = seen["replicas"]
    assert replica["state"] == "ready"
    assert seen["tokensPerSecond"] == replica["tokensPerSecond"] > 0
    assert seen["gateway"]["requestsPerSecond"] > 0
    assert seen["firstTokenSeconds"]["p50"] > 0
    assert replica["worker"] in inference_page(seen, wide=True)


def test_watch_prints_one_document_per_look_with_rates(fleet: Fleet, module_processes: Processes) -> None:
    words = ("inf", "status", "--watch", "--interval", "0.1", "-o", "json", "--gateway", fleet["gateway"].url)
    environment = {**os.environ, "AREAL_API_KEY": module_processes.key}
    watching = subprocess.Popen([sys.executable, "-m", "areal.cli", *words], stdout=subprocess.PIPE, env=environment)
    assert watching.stdout is not None
    first = json.loads(watching.stdout.readline())
    rollout_through(fleet, module_processes.key)
    looks = [json.loads(watching.stdout.readline()) for _ in range(2)]
    while not (tokens := sum(look["traffic"]["tokensPerSecond"] for look in looks)):
        looks.append(json.loads(watching.stdout.readline()))
    watching.send_signal(signal.SIGINT)
    watching.stdout.close()
    assert watching.wait(30) in (130, 141)
    assert tokens > 0
    assert first["traffic"]["tokensPerSecond"] is None and first["healthy"]


PARTS = {
    "areal-inference": ("every", "gateway", "router", "data-proxy", "engine"),
    "areal-agents": ("router", *AGENT_PARTS),
    "areal-training": ("trainer",),
}


def panels_of(dashboard: str) -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = json.loads((DASHBOARDS / f"{dashboard}.json").read_text(encoding="utf-8"))["panels"]
    return panels


@pytest.mark.parametrize("dashboard", PARTS)
def test_dashboard_queries_only_known_metrics(dashboard: str) -> None:
    known = {name for part in PARTS[dashboard] for name in documented(part)}
    expressions = [target["expr"] for panel in panels_of(dashboard) for target in panel.get("targets", ())]
    asked = {
        re.sub("_(bucket|sum|count)$", "", name) for each in expressions for name in re.findall(r"areal_\w+", each)
    }
    assert asked == known, "and shows all of it"
    labels = {label for each in expressions for label in re.findall(r"(\w+)[!=]=?~?\"", each)}
    assert labels <= {"job", "instance", "status", "route", "state", "outcome", "experiment", "trial", "phase", "name"}


def test_every_dashboard_is_checked() -> None:
    assert {file.stem for file in DASHBOARDS.iterdir()} == set(PARTS)


def test_page_names_only_known_metrics() -> None:
    known = {name for parts in PARTS.values() for part in parts for name in documented(part)}
    assert set(re.findall(r"areal_[a-z]\w+", DOCS)) <= known | {f"{name}_bucket" for name in known}


@pytest.mark.parametrize("dashboard", PARTS)
def test_dashboard_panels_do_not_overlap(dashboard: str) -> None:
    panels = panels_of(dashboard)
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
