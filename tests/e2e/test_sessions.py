"""Sessions of a running service, while its processes are killed, replaced and taken away under them."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.conftest import Box
from tests.e2e.rollouts import Talks, ask
from tests.services.processes import wait_until


@pytest.mark.extended
def test_sessions_of_killed_data_proxy_return(two: Box) -> None:
    with Talks(two, 10) as talks:
        assert sorted(Counter(talk.journal for talk in talks.talks).values()) == [5, 5]
        os.kill(two.pids()["data-proxy/0"], signal.SIGKILL)
        talks.wait_for_all(3)
    talks.assert_all_is_there_once()


@pytest.mark.slow
def test_rolling_restart_loses_no_turn(two: Box) -> None:
    before = two.pids()
    with Talks(two, 4) as talks:
        result = two.areal("restart", "model/reverse")
        assert result.code == 0, result.text
        talks.wait_for_all(2)
    assert not set(before.values()) & {pid for name, pid in two.pids().items() if name.startswith("data-proxy")}
    talks.assert_all_is_there_once()


@pytest.mark.slow
def test_sessions_of_removed_replica_continue_on_another(two: Box) -> None:
    wait_until(lambda: idle(two) == 2)
    with Talks(two, 4) as talks:
        assert len({talk.journal for talk in talks.talks}) == 2
        result = two.areal("scale", "model/reverse", "--replicas", "1")
        assert result.code == 0, result.text
        talks.wait_for_all(2)
    talks.assert_all_is_there_once()
    two.ok("scale", "model/reverse", "--replicas", "2")


def idle(box: Box) -> int:
    """How many replicas are ready, with no session yet."""
    workers = ask(box, "GET", "/workers")[1]["workers"]
    return sum(worker["state"] == "ready" and not worker["sessions"] for worker in workers)


def finished_session(box: Box) -> str:
    _, started = ask(box, "POST", "/rl/start_session", {"task_id": "kept"})
    (session,) = started["sessions"]
    body = {"model": "reverse", "messages": [{"role": "user", "content": "1"}], "max_tokens": 2}
    assert ask(box, "POST", "/v1/chat/completions", body, session["session_api_key"])[0] == 200
    assert ask(box, "POST", "/rl/set_reward", {"reward": 0.5}, session["session_api_key"])[0] == 200
    return str(session["session_id"])


@pytest.mark.slow
def test_deleted_model_keeps_trajectories_for_successor(box: Box) -> None:
    manifest = box.manifest()
    box.ok("apply", "-f", manifest)
    session_id = finished_session(box)
    folder = box.home / "data" / "reverse"
    deleted = box.ok("delete", "model/reverse", "--yes")
    assert f"{folder} is kept: 1 finished trajectory was never exported" in deleted.text
    assert f"info: {folder} holds trajectories of Model/reverse, which does not exist any more" in box.ok("doctor").text
    box.ok("apply", "-f", manifest)
    status, exported = ask(box, "POST", "/export_trajectories", {"session_ids": [session_id]})
    assert (status, exported["traj"]["rewards"]) == (200, [0.5])
    assert str(folder) not in box.ok("delete", "model/reverse", "--yes").text
    assert not folder.exists()


@pytest.mark.extended
def test_data_is_under_the_home_and_private(two: Box) -> None:
    folder = two.home / "data"
    assert [path.name for path in folder.iterdir()] == ["reverse"]
    assert all(not path.stat().st_mode & 0o077 for path in [folder, *_folders(folder)])


def _folders(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_dir()]
