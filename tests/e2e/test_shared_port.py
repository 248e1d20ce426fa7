"""A listener of one's own behind the gateway's port takes some of its calls: it is found, and named. Another home's
service of the same name is another service."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.e2e.conftest import Box, make_box, tear_down

pytestmark = [pytest.mark.extended, pytest.mark.timeout(200)]


def test_listener_shadowing_gateway_port_is_reported(served: Box) -> None:
    clean = served.areal("doctor").out
    assert "listens on its port" not in clean and served.areal("diff", "--drift").code == 0

    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", served.port))
        other.listen()
        status = json.loads(served.ok("get", "inf/default", "-o", "json").out)["status"]
        found = served.areal("doctor")
        drift = served.areal("diff", "--drift")

    assert status["phase"] == "Degraded"
    ready = next(each for each in status["conditions"] if each["type"] == "Ready")
    assert ready["status"] == "False"
    assert "another process listens on its port and takes calls" in found.out and found.code == 1
    assert drift.code == 1 and "InferenceService/default" in drift.out
    served.ok("wait", "inf/default", "--for", "ready", "--timeout", "30s")
    assert served.areal("diff", "--drift").code == 0


def test_homes_with_same_names_do_not_affect_each_other(box: Box, tmp_path: Path) -> None:
    def manifest(at: Box, port: int) -> str:
        head = "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: default}\n"
        return at.write(f"{head}spec: {{gateway: {{port: {port}}}}}\n", f"{port}.yaml")

    (tmp_path / "other").mkdir()
    other = make_box(tmp_path / "other")
    try:
        box.ok("apply", "-f", manifest(box, box.port))
        taken = other.areal("apply", "-f", manifest(other, box.port))
        assert taken.code == 10 and f"port {box.port} is in use by pid" in taken.text
        assert f"`areal get processes --home {box.home}` shows whose process it is" in taken.text
        other.ok("apply", "-f", manifest(other, other.port))
        before = box.pids()
        assert set(before.values()).isdisjoint(other.pids().values())
        other.ok("doctor", "--fix", "--yes")
        other.ok("delete", "inf/default", "--yes")
        assert box.pids() == before and box.phase("inf/default") == "Ready"
    finally:
        tear_down(other)
