"""Nothing needs a command to finish: what shims start again finds itself, whatever else was killed with it, and what
nothing starts again needs one `apply`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.e2e.conftest import ROOT, Box, make_box, tear_down
from tests.e2e.test_quickstart import applied
from tests.e2e.test_trainer_kills import assert_nothing_lost, started, until

SOON = "restart: {backoff: {initialSeconds: 0.1, maxSeconds: 0.1, jitter: 0}, budget: {count: 1000}}"


def kill_everything(box: Box) -> None:
    """Shims too, as a reboot does: none sees another one die."""
    pids = box.living()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    until(lambda: not box.living())


def kill_together(box: Box, *components: str) -> None:
    """Their supervisors start them again."""
    pids = box.pids()
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for component in components:
            os.kill(pids[f"{component}/0"], number)


def asked(box: Box) -> tuple[int, str, str | None]:
    """Status of a chat, 0 where the port is closed; the error's code; Retry-After."""
    body = {"model": "reverse", "messages": [{"role": "user", "content": "12"}], "max_tokens": 2}
    headers = {"Authorization": f"Bearer {box.key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{box.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, "", None
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["code"], error.headers.get("Retry-After")
    except OSError:
        return 0, "", None


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """A service whose processes are started again at once."""
    made = make_box(tmp_path_factory.mktemp("quick"))
    made.ok("apply", "-f", made.manifest(service=SOON, model=SOON))
    yield made
    tear_down(made)


@pytest.mark.extended
@pytest.mark.parametrize(
    "components",
    [
        ("gateway", "router"),
        pytest.param(("router", "data-proxy"), marks=pytest.mark.slow),
        pytest.param(("gateway", "router", "data-proxy"), marks=pytest.mark.slow),
        ("gateway", "router", "data-proxy", "engine"),
    ],
    ids="+".join,
)
def test_components_killed_together_heal_without_a_command(quick: Box, components: tuple[str, ...]) -> None:
    kill_together(quick, *components)
    answers = [asked(quick)]
    deadline = time.monotonic() + 120
    while answers[-1][0] != 200:
        assert time.monotonic() < deadline, answers
        answers.append(asked(quick))
    refused = [answer for answer in answers if answer[0] not in (0, 200)]
    assert [answer for answer in refused if answer[0] not in (502, 503)] == []
    assert [answer for answer in refused if answer[0] == 503 and answer[2] is None] == []
    assert quick.areal("diff", "--drift").code == 0


@pytest.mark.extended
def test_job_continues_with_one_apply_after_all_are_killed(box: Box) -> None:
    job = started(box, "learn", steps=8, mode="shm")
    until(lambda: len(job.notes()) >= 4)
    kill_everything(box)
    box.ok("apply", "-f", str(box.folder / "manifest.yaml"), "--timeout", "120s")
    assert_nothing_lost(job)


@pytest.mark.slow
def test_job_continues_after_no_wait_apply(box: Box) -> None:
    job = started(box, "learn", steps=8, mode="shm")
    until(lambda: len(job.notes()) >= 4)
    kill_everything(box)
    applied = box.ok("apply", "-f", str(box.folder / "manifest.yaml"), "--no-wait")
    assert "trainjob/learn healed: Pending" in applied.out
    assert_nothing_lost(job)


def background(box: Box) -> int | None:
    """The process that goes on with what `--no-wait` has left."""
    return box.pids().get("reconcile/0")


@pytest.mark.extended
@pytest.mark.parametrize(
    "killed", [pytest.param(False, marks=pytest.mark.slow, id="undisturbed"), pytest.param(True, id="killed")]
)
def test_no_wait_apply_leaves_converging_process(box: Box, killed: bool) -> None:
    box.ok("apply", "-f", box.manifest(), "--no-wait")
    pid = background(box)
    assert pid is not None
    assert "GoesOn" in box.ok("events").out
    if killed:
        os.kill(pid, signal.SIGKILL)
    box.ok("wait", "inferenceservice/default", "--for", "ready", "--timeout", "120s")
    box.ok("wait", "model/reverse", "--for", "ready", "--timeout", "120s")
    assert box.chat("1234").isdigit()
    until(lambda: background(box) is None)
    assert box.areal("diff", "--drift").code == 0


@pytest.mark.extended
def test_quickstart_applied_with_no_wait_trains_to_end(box: Box) -> None:
    box = replace(box, folder=ROOT)
    applied(box, "total_train_steps=3", wait=False)
    box.ok("wait", "trainjob/learn", "--for", "completed", "--timeout", "120s")
    assert background(box) is None
    assert "reconcile" not in box.ok("get", "processes").out
    assert "reconcile" in box.ok("get", "processes", "--all").out
    assert box.areal("diff", "--drift").code == 0


@pytest.mark.slow
def test_rolling_update_with_no_wait_ends_at_new_version(box: Box) -> None:
    box.ok("apply", "-f", box.manifest(model="replicas: 2"))
    before = box.pids()
    box.ok("apply", "-f", box.manifest(model="replicas: 2\nengineArgs: {maxBatchSize: 4}"), "--no-wait")
    box.ok("wait", "model/reverse", "--for", "ready", "--timeout", "120s")
    until(lambda: background(box) is None)
    assert all(box.pids()[engine] != before[engine] for engine in ("engine/0", "engine/1"))
    assert box.chat("1234").isdigit()
    assert box.areal("diff", "--drift").code == 0


@pytest.mark.slow
def test_command_takes_over_background_process_of_earlier_one(box: Box) -> None:
    box.ok("apply", "-f", box.manifest(), "--no-wait")
    box.ok("apply", "-f", box.manifest())
    assert box.chat("1234").isdigit()
    until(lambda: background(box) is None)
    box.ok("apply", "-f", box.manifest(model="engineArgs: {maxBatchSize: 4}"), "--no-wait")
    box.ok("delete", "inferenceservice/default", "--cascade", "--yes")
    until(lambda: background(box) is None)
    assert box.living() == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_quickstart_job_killed_ten_times_recovers_by_apply(box: Box) -> None:
    dice = random.Random(int(os.environ.get("AREAL_TEST_SEED", "1")))
    job = started(box, "learn", steps=120, mode="shm")
    for number in range(1, 11):
        known = len(job.notes())
        until(lambda known=known: len(job.notes()) >= known + dice.randint(1, 6))  # type: ignore[misc]
        time.sleep(dice.uniform(0.0, 0.5))
        assert not (job.folder / "checkpoints" / f"step_{job.steps}").exists(), f"it ended before kill {number}"
        kill_everything(box)
        began = time.monotonic()
        box.ok("apply", "-f", str(box.folder / "manifest.yaml"), "--timeout", "300s")
        print(f"kill {number} at step {job.notes()[-1]['step']}: applied in {time.monotonic() - began:.1f} s")
    assert_nothing_lost(job)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_thirty_random_multi_kills_need_no_command(box: Box) -> None:
    dice = random.Random(int(os.environ.get("AREAL_TEST_SEED", "1")))
    job = started(box, "learn", steps=2400, mode="shm", service=SOON, model=SOON)
    components = ("router", "gateway", "data-proxy", "engine", "driver")
    for number in range(1, 31):
        time.sleep(dice.uniform(0.0, 8.0))
        assert not (job.folder / "checkpoints" / f"step_{job.steps}").exists(), f"it ended before kill {number}"
        victims = dice.sample(components, dice.choice((2, 3)))
        until(lambda victims=victims: {f"{victim}/0" for victim in victims} <= box.pids().keys())  # type: ignore[misc]
        pids = box.pids()
        for signal_number in (signal.SIGSTOP, signal.SIGKILL):
            for victim in victims:
                with contextlib.suppress(ProcessLookupError, KeyError):  # it may have followed another one by itself
                    os.kill(pids[f"{victim}/0"], signal_number)
        print(f"kill {number}: {' '.join(victims)} at step {len(job.notes())}", flush=True)
        if number % 3 == 0:
            known = len(job.notes())
            until(lambda known=known: len(job.notes()) > known)  # type: ignore[misc]
    assert_nothing_lost(job)
