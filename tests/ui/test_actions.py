"""What the page may change: each change planned, confirmed and carried out as its command does."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable
from typing import Any

import pytest

from areal.errors import Conflict, UsageFault
from areal.state.home import Home
from areal.state.records import StoredObject
from areal.ui.views import ViewContext
from areal.ui.views.action import Actions, plan_of
from tests.ui.conftest import Job, Page, eventually
from tests.ui.test_server import METHODS

Record = Callable[..., StoredObject]
RESTART = {"verb": "restart", "kind": "trainjob", "name": "noisy"}


@pytest.fixture
def acting(serve: Callable[..., Page]) -> Page:
    return serve("--allow-actions")


def post(page: Page, **body: Any) -> tuple[int, Any]:
    response, answer = page.ask("/api/action", method="POST", body=json.dumps(body).encode())
    found = json.loads(answer)
    return response.status, found.get("error") or found.get("plan") or found["action"]


def pids(page: Page) -> list[int]:
    rows = page.read("object", kind="trainjob", name="noisy")["processes"]
    return [row["pid"] for row in rows if row["state"] == "running"]


def ended(page: Page) -> Any:
    """The newest change, once it has ended."""
    return eventually(lambda: (it := page.read("action")["actions"][0])["state"] != "running" and it)


@pytest.mark.parametrize("method", METHODS)
def test_action_route_exists_only_when_allowed(page: Page, acting: Page, method: str) -> None:
    for server, allowed in ((page, {}), (acting, {"GET": 200, "HEAD": 200, "POST": 400})):
        status = server.ask("/api/action", method=method)[0].status
        assert status == (501 if method == "BREW" else allowed.get(method, 404 if server is page else 405))
    token, own = {"Authorization": f"Bearer {acting.token}"}, acting.host
    for headers in (
        {**token, "Host": "evil.example"},
        {**token, "Host": own, "Origin": "http://evil.example"},
        {**token, "Host": own, "Sec-Fetch-Site": "same-site"},
        {"Host": own, "Authorization": f"Bearer {page.token}"},
        {"Host": own},
    ):
        assert acting.ask("/api/action", headers, method=method)[0].status in (401, 403, 501), headers
    assert page.read("about")["actions"] is False and acting.read("about")["actions"] is True


def test_restart_is_planned_confirmed_and_replaces_process(job: Job, acting: Page) -> None:
    (before,) = eventually(lambda: pids(acting))
    status, plan = post(acting, **RESTART)
    assert status == 200 and plan["words"] == "areal restart trainjob/noisy" and plan["confirm"] == "noisy"
    assert any("restart requested" in line for line in plan["lines"])
    assert post(acting, **RESTART, digest=plan["digest"])[0] == 400
    assert post(acting, **RESTART, digest=plan["digest"], confirm="other")[0] == 400
    assert post(acting, **RESTART, digest="0" * 32, confirm="noisy")[0] == 409
    assert pids(acting) == [before] and acting.read("action") == {"actions": []}
    status, action = post(acting, **RESTART, digest=plan["digest"], confirm="noisy")
    assert status == 200 and action["words"] == plan["words"]
    done = ended(acting)
    assert done["error"] is None and done["outcome"][0].startswith("TrainJob/noisy restarted") and done["progress"]
    assert before not in pids(acting)


def test_suspend_and_resume_match_commands(job: Job, acting: Page) -> None:
    for verb in ("suspend", "resume"):
        asked = {**RESTART, "verb": verb}
        plan = post(acting, **asked)[1]
        assert post(acting, **asked, digest=plan["digest"], confirm="noisy")[0] == 200
        assert ended(acting)["outcome"][0].startswith(f"TrainJob/noisy {verb.rstrip('e')}ed"), verb
        again = post(acting, **asked)[1]
        assert again["empty"] and post(acting, **asked, digest=again["digest"], confirm="noisy")[0] == 409
    assert "Running" in job.areal("get", "trainjob/noisy")


def test_plan_changed_since_shown_is_refused_under_locks(job: Job, home: Home) -> None:
    view = ViewContext(home, actions=Actions())
    assert view.actions is not None
    plan = plan_of(view, {**RESTART, "verb": "suspend"})
    job.areal("suspend", "trainjob/noisy")  # a colleague at the terminal
    action = view.actions.start(plan, plan.digest, "noisy")
    eventually(lambda: action.ended)
    assert action.error is not None and action.error["type"] == "Conflict" and "has changed" in action.error["message"]
    with pytest.raises(Conflict, match="is suspended"):
        plan_of(view, RESTART)


def test_disconnected_reader_does_not_stop_change(job: Job, acting: Page) -> None:
    (before,) = eventually(lambda: pids(acting))
    plan = post(acting, **RESTART)[1]
    body = json.dumps({**RESTART, "digest": plan["digest"], "confirm": "noisy"})
    name, _, port = acting.host.rpartition(":")
    with socket.create_connection((name, int(port))) as connection:
        head = f"POST /api/action HTTP/1.1\r\nHost: {acting.host}\r\nAuthorization: Bearer {acting.token}"
        connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        connection.shutdown(socket.SHUT_RDWR)
    eventually(lambda: acting.read("action")["actions"])
    assert ended(acting)["error"] is None and before not in pids(acting)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_server_ending_during_change_leaves_nothing_half_done(job: Job, acting: Page, number: int) -> None:
    plan = post(acting, **RESTART)[1]
    assert post(acting, **RESTART, digest=plan["digest"], confirm="noisy")[0] == 200
    acting.popen.send_signal(number)
    assert acting.popen.wait(60) == 130
    assert "journal" not in job.areal("doctor")
    job.areal("reconcile", "trainjob/noisy")
    assert "Running" in job.areal("get", "trainjob/noisy")


def test_second_change_waits_for_the_first(home: Home) -> None:
    actions = Actions()
    view = ViewContext(home, actions=actions)
    assert view.actions is actions
    import threading

    from areal.ui.views.action import ActionPlan, RunningAction

    go_on = threading.Event()

    def run(action: RunningAction) -> list[str]:
        go_on.wait(30)
        return ["done"]

    plan = ActionPlan("areal restart model/a", "Model/a", "a", [], [], False, "d", run)
    first = actions.start(plan, "d", "a")
    with pytest.raises(Conflict, match="still runs"):
        actions.start(plan, "d", "a")
    go_on.set()
    actions.close()
    assert first.document()["state"] == "done" and first.interrupted.is_set()


@pytest.mark.parametrize(
    "asked",
    [
        {"verb": "delete", "kind": "model", "name": "m"},
        {"verb": "scale", "kind": "model", "name": "m"},
        {"verb": "scale", "kind": "model", "name": "m", "replicas": True},
        {"verb": "scale", "kind": "model", "name": "m", "replicas": -1},
        {"verb": "scale", "kind": "model", "name": "m", "replicas": "2"},
        {"verb": ["restart"], "kind": "model", "name": "m"},
        {"verb": "restart", "kind": "model", "name": "../m"},
        {"verb": "reward", "kind": "model", "name": "m", "session": "s", "reward": 1},
        {"verb": "reward", "kind": "agentservice", "name": "a"},
        {},
    ],
)
def test_rejects_invalid_change(home: Home, record: Record, asked: dict[str, Any]) -> None:
    record("InferenceService", "default", {})
    record("Model", "m", {"service": "default", "backend": "embedded:d1", "path": "/m"})
    record("AgentService", "a", {"agent": "x:Y"})
    with pytest.raises(UsageFault):
        plan_of(ViewContext(home, actions=Actions()), asked)


def test_scale_of_model_is_planned_with_changed_field(home: Home, record: Record) -> None:
    record("InferenceService", "default", {})
    record("Model", "m", {"service": "default", "backend": "embedded:d1", "path": "/m"})
    view = ViewContext(home)
    asked = {"verb": "scale", "kind": "inferenceservice", "name": "default", "replicas": 3}
    plan = plan_of(view, asked)
    assert plan.target == "Model/m" and plan.confirm == "m" and any("spec.replicas" in line for line in plan.lines)
    assert plan_of(view, asked).digest == plan.digest
    assert plan_of(view, {**asked, "replicas": 2}).digest != plan.digest
    record("Model", "other-home", {"service": "else", "backend": "embedded:d1", "path": "/m"})
    assert plan_of(view, {**asked, "kind": "model", "name": "m"}).digest == plan.digest, "another object has changed"
