"""Changes under load: no request breaks, and a version that does not start replaces nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import MODEL, Box
from tests.e2e.traffic import Traffic


@pytest.mark.extended
def test_rolling_update_under_traffic_breaks_no_request(served: Box) -> None:
    before = served.pids()
    edited = served.manifest(model="engineArgs: {max-batch-size: 16}")
    with Traffic(served) as traffic:
        result = served.areal("apply", "-f", edited)
        traffic.wait_for(5)
    assert result.code == 0, result.text
    assert traffic.broken == []
    after = served.pids()
    assert after["engine/0"] != before["engine/0"]
    assert after["gateway/0"] == before["gateway/0"]
    assert served.areal("diff", "-f", edited).code == 0


@pytest.mark.slow
def test_restart_under_traffic_breaks_no_request(served: Box) -> None:
    before = served.pids()
    with Traffic(served) as traffic:
        result = served.areal("restart", "model/reverse")
        traffic.wait_for(5)
    assert result.code == 0, result.text
    assert traffic.broken == []
    assert served.pids()["engine/0"] != before["engine/0"]


@pytest.mark.extended
def test_failing_new_version_keeps_old_one_serving(served: Box) -> None:
    manifest = served.manifest()
    served.ok("apply", "-f", manifest)
    before = served.pids()
    broken = served.folder / "broken-model"
    shutil.copytree(MODEL, broken)
    (broken / "model.safetensors").write_bytes(b"not weights")
    text = Path(manifest).read_text()
    bad = served.write(text.replace(str(MODEL), str(broken)), "bad.yaml")
    with Traffic(served) as traffic:
        result = served.areal("apply", "-f", bad)
        traffic.wait_for(3)
    assert result.code == 8, result.text
    assert "model.safetensors" in result.text
    assert traffic.broken == []
    assert served.pids() == before
    assert "RolloutFailed" in served.ok("get", "model/reverse", "-o", "json").out
    served.ok("apply", "-f", manifest)
    assert served.pids() == before
    assert served.areal("diff", "-f", manifest).code == 0


@pytest.mark.extended
def test_recovered_failure_is_cleared_by_next_apply(served: Box) -> None:
    manifest, engine = served.manifest(), served.pids()["engine/0"]
    served.ok("apply", "-f", manifest)
    os.kill(engine, signal.SIGSTOP)
    try:
        failed = served.areal("apply", "-f", manifest, "--timeout", "3s")
    finally:
        os.kill(engine, signal.SIGCONT)
    assert failed.code == 7
    assert f"pid {engine} is stopped by a signal (kill -CONT {engine})" in failed.err
    served.ok("wait", "model/reverse", "--for", "ready", "--timeout", "60s")
    served.ok("apply", "-f", manifest)
    assert "RolloutFailed" not in served.ok("get", "model/reverse", "-o", "json").out
    assert served.areal("inf", "status").code == 0
    assert served.pids()["engine/0"] == engine


@pytest.mark.slow
def test_scale_up_and_down_under_traffic_breaks_no_request(served: Box) -> None:
    manifest = served.manifest()
    served.ok("apply", "-f", manifest)
    with Traffic(served) as traffic:
        up = served.areal("scale", "model/reverse", "--replicas", "2")
        assert up.code == 0, up.text
        assert {"engine/0", "engine/1"} <= set(served.pids())
        assert served.areal("diff", "-f", manifest).code == 0, "a manifest that is silent leaves the scale alone"
        conflicting = served.areal("apply", "-f", served.manifest(model="replicas: 3", name="three.yaml"))
        assert conflicting.code == 5
        assert "spec.replicas: 2 was set by scale" in conflicting.text
        down = served.areal("scale", "model/reverse", "--replicas", "1")
        assert down.code == 0, down.text
        traffic.wait_for(3)
    assert traffic.broken == []
    assert "engine/1" not in served.pids()


@pytest.mark.slow
def test_rollback_restores_earlier_spec(served: Box) -> None:
    served.ok("apply", "-f", served.manifest())
    served.ok("apply", "-f", served.manifest(model="chatTemplate: " + str(MODEL / "chat_template.jinja")))
    engine = served.pids()["engine/0"]
    served.ok("rollback", "model/reverse")
    assert "chatTemplate" not in served.ok("get", "model/reverse", "-o", "manifest").out
    assert served.pids()["engine/0"] == engine, "only the data proxy depends on the chat template"


@pytest.mark.extended
def test_rollback_keeps_scaled_replicas_serving(served: Box) -> None:
    served.ok("apply", "-f", served.manifest())
    served.ok("scale", "model/reverse", "--replicas", "2")
    served.ok("apply", "-f", served.manifest(model="chatTemplate: " + str(MODEL / "chat_template.jinja")))
    ops = json.loads(served.ok("rollback", "model/reverse", "--dry-run", "-o", "json").out)["ops"]
    routes = [op["runs"] for op in ops if op["verb"] == "route"]
    assert routes and all(len(runs) >= 2 for runs in routes), "a replica leaves when its successor is routed"
    engines = [pid for name, pid in served.pids().items() if name.startswith("engine")]
    served.ok("rollback", "model/reverse")
    assert [pid for name, pid in served.pids().items() if name.startswith("engine")] == engines
    assert served.ok("get", "model/reverse", "-o", "jsonpath={.spec.replicas}").out.strip() == "2"
    served.ok("scale", "model/reverse", "--replicas", "1")


@pytest.mark.extended
def test_destructive_rollback_asks_like_apply(served: Box) -> None:
    recreate = "strategy: {type: Recreate}\nengineArgs: {max-batch-size: %d}"
    served.ok("apply", "-f", served.manifest(model=recreate % 4), "--yes")
    served.ok("apply", "-f", served.manifest(model=recreate % 8), "--yes")
    engine = served.pids()["engine/0"]
    refused = served.areal("rollback", "model/reverse")
    assert refused.code == 2 and "rollback would destroy something" in refused.err
    assert served.pids()["engine/0"] == engine
    served.ok("rollback", "model/reverse", "--yes")
    assert served.pids()["engine/0"] != engine


@pytest.mark.extended
def test_suspend_stops_and_resume_restarts(served: Box) -> None:
    served.ok("suspend", "model/reverse")
    assert not any(name.startswith(("engine", "data-proxy")) for name in served.pids())
    assert "Suspended" in served.ok("get", "models").out
    served.ok("resume", "model/reverse")
    assert served.chat("1234").isdigit()
