"""Every place that prints a status, against every way in which a process can be there and not serve."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from areal.cli.main import run
from tests.e2e.conftest import Box
from tests.services.processes import halted

SERVICE, MODEL = "inferenceservice/default", "model/reverse"


Areal = Callable[..., tuple[int, str]]


@pytest.fixture
def areal(served: Box, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Areal:
    """The command line in this process: its exit status and stdout."""
    monkeypatch.setenv("AREAL_HOME", str(served.home))

    def call(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        code = run(list(words))
        return code, capsys.readouterr().out

    return call


def phases(areal: Areal) -> dict[str, set[str]]:
    """What the verbs say of the service and of the model; ``conditions`` are Ready's."""

    def document(*words: str) -> Any:
        return json.loads(areal(*words, "-o", "json")[1])

    found: dict[str, set[str]] = {"service": set(), "model": set(), "conditions": set()}
    for item in document("get")["items"]:
        found["service" if item["kind"] == "InferenceService" else "model"].add(item["status"]["phase"])
        ready = next(each for each in item["status"]["conditions"] if each["type"] == "Ready")
        found["conditions"].add(f"{item['kind']} {ready['status']}")
    found["model"] |= {row["phase"] for row in document("inf", "models")["items"]}
    found["service"] |= {row["phase"] for row in document("inf", "ps", "--all")["items"]}
    status = document("inf", "status")
    found["service"].add(status["phase"])
    found["model"] |= {row["phase"] for row in status["models"]}
    described = document("describe", SERVICE)
    found["service"].add(described["status"]["phase"])
    found["model"] |= {row["phase"] for row in described["related"]}
    found["model"].add(document("describe", MODEL)["status"]["phase"])
    return found


def at_rest(areal: Areal) -> None:
    assert areal("wait", SERVICE, MODEL, "--for", "ready", "--timeout", "60s")[0] == 0


@pytest.mark.extended
@pytest.mark.parametrize(
    ("component", "service", "model"),
    [
        ("engine", "Ready", "Unknown"),
        pytest.param("data-proxy", "Ready", "Unknown", marks=pytest.mark.slow),
        pytest.param("router", "Degraded", "Unknown", marks=pytest.mark.slow),
        pytest.param("gateway", "Degraded", "Unknown", marks=pytest.mark.slow),
    ],
)
def test_halted_process_is_shown_ready_nowhere(
    served: Box, areal: Areal, component: str, service: str, model: str
) -> None:
    at_rest(areal)
    assert phases(areal) == {
        "service": {"Ready"},
        "model": {"Ready"},
        "conditions": {"InferenceService True", "Model True"},
    }
    pid = served.pids()[f"{component}/0"]
    with halted(pid):
        found = phases(areal)
        drift = areal("diff", "--drift")
        rows = json.loads(areal("get", "processes", "-o", "json")[1])["items"]
        told = areal("get")[1]
        late = areal("wait", MODEL, "--for", "ready", "--timeout", "1s")
    assert found["service"] == {service} and found["model"] == {model}, found
    assert drift[0] == 1 and f"{component}/0: unhealthy: " in drift[1], drift[1]
    assert f"kill -CONT {pid}" in drift[1]
    assert {row["state"] for row in rows if row["component"] == component} == {"halted"}
    assert late[0] == 7
    assert "MESSAGE" not in told or component in told


def router_call(box: Box, path: str, body: dict[str, Any]) -> None:
    url = box.processes()["router/0"]["url"]
    headers = {"Authorization": f"Bearer {box.key}", "Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode(), headers), timeout=30):
        pass


@pytest.mark.extended
def test_unrouted_model_is_shown_ready_nowhere(served: Box, areal: Areal) -> None:
    at_rest(areal)
    router_call(served, "/remove_model", {"model": "reverse"})
    found = phases(areal)
    drift = areal("diff", "--drift")
    assert found["model"] == {"Progressing"} and found["service"] == {"Ready"}
    assert drift[0] == 1 and "route-missing" in drift[1]
    assert areal("reconcile", "--timeout", "60s")[0] == 0
    at_rest(areal)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("component", "service", "model"),
    [
        ("gateway", "Degraded", "Degraded"),
        pytest.param("router", "Degraded", "Unknown", marks=pytest.mark.slow),
        ("engine", "Ready", "Failed"),
    ],
)
def test_process_killed_with_shim_is_shown_ready_nowhere(
    served: Box, areal: Areal, component: str, service: str, model: str, until: Callable[..., None]
) -> None:
    at_rest(areal)
    row = served.processes()[f"{component}/0"]
    os.kill(row["shimPid"], signal.SIGKILL)
    os.kill(row["pid"], signal.SIGKILL)
    until(lambda: f"{component}/0" not in served.processes())
    found = phases(areal)
    assert found["service"] == {service} and found["model"] == {model}, found
    assert areal("diff", "--drift")[0] == 1
    assert areal("reconcile", "--timeout", "120s")[0] == 0
    at_rest(areal)


@pytest.fixture
def until() -> Callable[..., None]:
    import time

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline

    return wait
