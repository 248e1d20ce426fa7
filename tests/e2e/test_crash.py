"""``kill -9`` of the command at any instant: nothing without a record, nothing that doctor cannot explain, and one
more apply converges.

The object is an InferenceService without models: two real processes, started in well under a second. The default
suite dies at a named point of each thing that a command does (each floor's own tests pass all of theirs); `-m crash`
at every named one, walks every point of every command, and kills 150 times at random.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.state.files import CRASH_POINTS
from tests.e2e.conftest import Box, make_box, tear_down

COMMANDS = ("create", "update", "delete")
BY_DEFAULT = ("fork-after", "stop-signalled")


@pytest.fixture(scope="module")
def crashing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    made = make_box(tmp_path_factory.mktemp("crash"))
    yield made
    tear_down(made)


def service(box: Box, level: str = "info", queued: int = 1000) -> str:
    return box.write(
        "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: default}\n"
        f"spec: {{gateway: {{port: {box.port}}}, logLevel: {level}, limits: {{maxQueuedRequests: {queued}}}}}\n",
        f"service-{level}-{queued}.yaml",
    )


def before(box: Box, command: str) -> tuple[str, ...]:
    """Bring the box to where ``command`` begins; its arguments."""
    if command == "create":
        box.areal("delete", "inferenceservice/default", "--yes", "--ignore-not-found", "--grace", "1")
        return ("apply", "-f", service(box))
    box.ok("apply", "-f", service(box), "--yes")
    if command == "update":
        return ("apply", "-f", service(box, "warning"), "--yes")
    return ("delete", "inferenceservice/default", "--yes", "--grace", "1")


def recorded(box: Box) -> set[int]:
    """Every pid that a record knows: shims and components."""
    pids = set()
    for path in (box.home / "runs").glob("*/*.json"):
        if path.name in ("id.json", "child.json"):
            data = json.loads(path.read_text())
            pids |= {value for value in (data.get("pid"), (data.get("identity") or {}).get("pid")) if value}
    return pids


def settled(box: Box) -> list[int]:
    """Living processes of the box, once a shim that lost its caller has had time to leave."""
    deadline = time.monotonic() + 10
    while True:
        strays = [pid for pid in box.living() if pid not in recorded(box) and not descends(pid, recorded(box))]
        if not strays or time.monotonic() > deadline:
            return strays
        time.sleep(0.05)


def descends(pid: int, ancestors: set[int]) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return int(fields[1]) in ancestors or int(fields[3]) in ancestors


def assert_ready_has_converged(box: Box, what: str) -> None:
    """What `get` calls Ready is what the manifest says, whatever the killed command had left to do."""
    if box.phase("inferenceservice/default") == "Ready":
        drifted = box.areal("diff", "--drift")
        assert drifted.code == 0, f"{what}: Ready, and yet: {drifted.text}"


def assert_recovers(box: Box, what: str) -> None:
    assert settled(box) == [], f"{what}: a process without a record"
    assert_ready_has_converged(box, what)
    explained = box.areal("doctor", "-o", "json")
    assert explained.code in (0, 1), f"{what}: {explained.text}"
    result = box.areal("apply", "-f", service(box), "--yes")
    assert result.code == 0, f"{what}: {result.text}"
    assert box.areal("diff", "-f", service(box)).code == 0, what
    assert set(box.processes()) == {"router/0", "gateway/0"}, what
    assert settled(box) == [], f"{what}: after recovery"
    left = [each for each in json.loads(box.areal("doctor", "-o", "json").out)["items"] if not is_remains(each)]
    assert left == [], f"{what}: doctor still finds {left}"


def is_remains(finding: dict[str, Any]) -> bool:
    """Harmless: a hidden folder of a killed command, say, which is named from its tenth minute on and goes with the
    next run that is made."""
    return finding["severity"] == "info" or str(finding["what"]).startswith("leftover-folder")


@pytest.mark.extended
@pytest.mark.parametrize(
    "point", [pytest.param(each, marks=() if each in BY_DEFAULT else pytest.mark.crash) for each in CRASH_POINTS]
)
def test_kill_at_each_named_point_leaks_nothing(crashing: Box, point: str) -> None:
    command = "delete" if point.startswith(("delete", "stop", "forget")) else "create"
    arguments = before(crashing, command)
    result = crashing.areal(*arguments, env={"AREAL_CRASH_AT": point})
    assert result.code == 137, f"{point} is not passed by {command}: {result.text}"
    assert_recovers(crashing, point)


@pytest.mark.crash
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("command", COMMANDS)
def test_kill_at_every_point_of_a_command_leaks_nothing(crashing: Box, command: str) -> None:
    for number in range(1, 500):
        arguments = before(crashing, command)
        result = crashing.areal(*arguments, env={"AREAL_CRASH_AT": f"any:{number}"})
        if result.code == 0:
            assert number > 20, "the walk ended too early to mean anything"
            return
        assert result.code == 137, result.text
        assert_recovers(crashing, f"{command} any:{number}")
    raise AssertionError("the command never ended")


@pytest.mark.extended
@pytest.mark.parametrize(
    "number", [pytest.param(each, marks=() if each % 20 == 10 else pytest.mark.crash) for each in range(1, 80)]
)
def test_unset_limits_of_killed_command_are_not_ready(crashing: Box, number: int) -> None:
    crashing.ok("apply", "-f", service(crashing), "--yes")
    assert crashing.phase("inferenceservice/default") == "Ready"
    command = ("apply", "-f", service(crashing, queued=77), "--yes")
    result = crashing.areal(*command, env={"AREAL_CRASH_AT": f"any:{number}"})
    assert result.code in (0, 137), result.text
    drifted = crashing.areal("diff", "--drift")
    told = crashing.phase("inferenceservice/default")
    assert told == ("Progressing" if drifted.code else "Ready"), f"limits any:{number}: {told}, and {drifted.text}"
    described = crashing.ok("describe", "inferenceservice/default").out
    assert ("router: settings changed; areal reconcile goes on with it" in described) == (told == "Progressing")
    crashing.ok("reconcile", "inferenceservice/default")
    assert crashing.phase("inferenceservice/default") == "Ready"
    assert crashing.areal("diff", "--drift").code == 0


MANY = 40  # enough to be written together, and made durable by a sync of the file system
RECORDING = [f"{point}:{at}" for point in ("write-synced", "write-after") for at in range(1, 7)]
USUAL, EXTENDED = "write-after:4", ("write-synced:1", "write-synced:4", "write-after:1")


def many(box: Box) -> str:
    head = "apiVersion: areal.dev/v1alpha1\n"
    service = f"{head}kind: InferenceService\nmetadata: {{name: default}}\nspec: {{suspend: true}}\n"
    model = f"---\n{head}kind: Model\nmetadata: {{name: m%d}}\nspec: {{backend: sglang, path: a/b}}\n"
    return box.write(service + "".join(model % number for number in range(MANY)), "many.yaml")


@pytest.mark.parametrize(
    "at",
    [
        USUAL,
        *(pytest.param(each, marks=pytest.mark.extended) for each in EXTENDED),
        *(pytest.param(each, marks=pytest.mark.crash) for each in RECORDING if each not in (USUAL, *EXTENDED)),
    ],
)
def test_kill_while_recording_many_objects_loses_none(box: Box, at: str) -> None:
    killed = box.areal("apply", "-f", many(box), env={"AREAL_CRASH_AT": at})
    assert killed.code in (0, 137), killed.text
    assert box.areal("diff", "-f", many(box)).code in (0, 1), "a record is damaged"
    again = box.areal("apply", "-f", many(box))
    assert again.code == 0, again.text
    assert box.areal("diff", "-f", many(box)).code == 0
    assert len(json.loads(box.ok("get", "models", "-o", "json").out)["items"]) == MANY


@pytest.mark.parametrize(
    "at", ["write-after:8", pytest.param("journal-append-after:4", marks=pytest.mark.extended)]
)  # a few writes, and not one an object
def test_apply_of_many_objects_batches_writes(box: Box, at: str) -> None:
    done = box.areal("apply", "-f", many(box), env={"AREAL_CRASH_AT": at})
    assert done.code == 0, done.text


def kill_at_random(box: Box, times: int, seed: int) -> None:
    chance = random.Random(seed)
    began = time.monotonic()
    box.ok("apply", "-f", service(box))
    usual = time.monotonic() - began
    for number in range(times):
        command = chance.choice(COMMANDS)
        process = box.start(*before(box, command))
        time.sleep(chance.uniform(0, usual * 1.2))  # the moment is what is random here
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert settled(box) == [], f"kill {number} of {command}: a process without a record"
        if number % 10 == 9:
            assert_recovers(box, f"kill {number} of {command}")
    assert_recovers(box, "the last kill")


@pytest.mark.extended
def test_some_kills_at_random_moments_leak_nothing(crashing: Box) -> None:
    kill_at_random(crashing, 4, seed=1)


@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_150_kills_at_random_moments_leak_nothing(crashing: Box) -> None:
    kill_at_random(crashing, 150, seed=2)
