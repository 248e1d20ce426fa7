"""Files of a home are damaged while its processes live: what `get` does not call Ready is in `diff --drift` with a
cause, `apply` heals it or fails with that cause, and none of them harms what serves."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Box

pytestmark = [pytest.mark.timeout(300), pytest.mark.extended]
SETTLED_S = 30.0
MANIFEST_TIMEOUT = "60s"


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(path: Path) -> None:
    path.write_bytes(b"\x00{]garbage" + path.read_bytes()[5:])


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def close(path: Path) -> None:
    path.chmod(0)


NO_CAPABILITIES = tuple(f"--{kind}=-dac_override,-dac_read_search" for kind in ("bounding-set", "inh-caps"))


def without_override() -> tuple[str, ...]:
    """The beginning of a command line in which root reads only what it may."""
    if os.geteuid():
        return ()
    if shutil.which("setpriv") is None:
        pytest.skip("root reads it anyway")
    return ("setpriv", *NO_CAPABILITIES)


DAMAGES: dict[str, tuple[Callable[[Path], None], ...]] = {
    "objects/inferenceservice/default/routes.json": (delete, empty, cut, garble, become_a_folder, close),
    "objects/inferenceservice/default/object.json": (delete, garble),
    "objects/model/reverse/object.json": (delete, cut, become_a_folder, close),
    "objects/model/reverse/events.jsonl": (garble,),
    "objects/serial": (delete, garble, close),
    "credentials/default": (delete, empty, garble, close),
    "runs/*router*/id.json": (delete, garble, become_a_folder),
    "runs/*engine*/intent.json": (garble,),
    "runs/*engine*/config.json": (delete, garble, close),
    "runs/*engine*/life.lock": (garble, close),
    "runs/*proxy*/id.json": (delete, cut),
    "runs/*gateway*/child.json": (garble, delete),
    "data/reverse/*/tag": (garble,),
}
OFTEN = {
    "routes.json delete",
    "object.json cut",
    "default garble",
    "id.json delete",
    "config.json garble",
}  # else `slow`
HEALED = {
    "default": (delete, empty, garble),
    "id.json": (delete, garble, cut),
    "config.json": (delete, garble),
    "child.json": (garble, delete),
}
CASES = [
    pytest.param(pattern, damage, marks=() if f"{Path(pattern).name} {damage.__name__}" in OFTEN else pytest.mark.slow)
    for pattern, damages in DAMAGES.items()
    for damage in damages
]


@dataclass(frozen=True)
class Seen:
    """What `get` and `diff --drift` say: phases by object, the objects that the plan names, and all of its text."""

    phases: dict[str, str]
    unreadable: bool
    named: set[str]
    drift: Any
    code: int

    @classmethod
    def of(cls, box: Box) -> Seen:
        got = box.areal("get", "-o", "json")
        items = json.loads(got.out)["items"] if got.out else []
        phases = {f"{item['kind']}/{item['metadata']['name']}": item["status"]["phase"] for item in items}
        found = box.areal("diff", "--drift", "-o", "json")
        if not found.out:  # it fails as a whole
            return cls(phases, got.code != 0, set(), {"ops": [], "error": found.err}, found.code)
        plan = json.loads(found.out)
        named = {drift["ref"] for drift in plan["drift"] if drift["message"]}
        named |= {op["ref"] for op in plan["ops"] if op["cause"]}
        named |= {item["ref"] for item in plan["objects"] if item["action"] == "blocked" and item["cause"]}
        named |= {text.partition(" ")[0].rstrip(":") for text in plan["unknown"]}
        return cls(phases, got.code != 0, named, plan, found.code)

    @property
    def unwell(self) -> set[str]:
        return {ref for ref, phase in self.phases.items() if phase != "Ready"}


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SETTLED_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def is_well(box: Box) -> bool:
    seen = Seen.of(box)
    return len(seen.phases) == 2 and not seen.unwell and not seen.unreadable


def test_damaged_journal_is_a_condition_of_serving_model(two: Box) -> None:
    lives = {row["uid"] for row in two.processes().values()}
    spare = two.home / "data/reverse/run-damaged"
    spare.mkdir(parents=True)
    try:
        shutil.copy(next((two.home / "data/reverse").glob("*/tag")), spare / "tag")
        (spare / "tag").write_text("zzzzzzzz")
        (spare / "journal.db").write_bytes(b"no database")

        def conditions() -> dict[str, Any]:
            status = json.loads(two.ok("get", "model/reverse", "-o", "json").out)["status"]
            return {each["type"]: each for each in status["conditions"]}

        assert until(lambda: conditions()["Degraded"]["reason"] == "JournalDamaged"), conditions()
        found = conditions()
        assert (found["Ready"]["status"], found["Degraded"]["status"]) == ("True", "True")
        assert "damaged journal entries: 1" in found["Degraded"]["message"]
        assert two.areal("diff", "--drift").code == 0, "no operation would mend it"
        assert two.chat("1234").isdigit()
    finally:
        shutil.rmtree(spare)
    assert until(lambda: conditions()["Degraded"]["status"] == "False"), conditions()
    assert lives == {row["uid"] for row in two.processes().values()}


@pytest.mark.parametrize(("pattern", "damage"), CASES, ids=lambda each: getattr(each, "__name__", each))
def test_damage_is_reported_equally_by_every_command(
    two: Box, tmp_path: Path, pattern: str, damage: Callable[[Path], None]
) -> None:
    lives = {row["uid"] for row in two.processes().values()}
    path = next(
        each
        for each in sorted(two.home.glob(pattern))
        if each.parent.parent.name != "runs" or each.parent.name in lives
    )
    kept = tmp_path / "kept"
    shutil.copy2(path, kept)
    before = two.living()
    two.prefix = without_override() if damage is close else ()
    damage(path)
    try:
        time.sleep(6.5)  # a lease runs out in five seconds
        seen = Seen.of(two)
        assert seen.unwell <= seen.named, seen
        assert not seen.unreadable or seen.code not in (0, 1)
        assert seen.code or (not seen.unwell and not seen.unreadable and not seen.named), seen
        assert not seen.drift.get("error") or str(path) in seen.drift["error"]
        ops = seen.drift["ops"]
        unroutes = [op for op in ops if op["verb"] in ("unroute", "stop") and "key-lost" not in op["cause"]]
        assert not unroutes, "what serves is not harmed"
        manifest = two.manifest(model="replicas: 2")
        applied = two.areal("apply", "-f", manifest, "--timeout", MANIFEST_TIMEOUT, "--yes")
        after = Seen.of(two)
        if applied.code == 0:
            assert not after.unwell and not after.unreadable, applied.text
            assert two.chat("1234").isdigit()
        else:
            assert damage not in HEALED.get(path.name, ()), applied.text
            assert applied.text.strip() and after.code, applied.text
            assert after.unwell <= after.named
    finally:
        two.prefix = ()
        if path.is_dir():
            path.rmdir()
        if damage is close:
            path.chmod(0o600)
        if not path.exists() or path.read_bytes() != kept.read_bytes():
            shutil.copy2(kept, path)
        two.areal("apply", "-f", two.manifest(model="replicas: 2"), "--timeout", "60s", "--yes")
        assert until(lambda: is_well(two)), Seen.of(two)
    assert set(before) <= set(two.living()) or path.name == "default" or path.name == "intent.json", "none was replaced"


def test_reconcile_keeps_unreadable_model_serving(two: Box) -> None:
    path = two.home / "objects/model/reverse/object.json"
    content = path.read_bytes()
    garble(path)
    try:
        for words in (
            ("reconcile",),
            ("apply", "-f", two.manifest(model="replicas: 2")),
            ("get",),
            ("diff", "--drift"),
        ):
            refused = two.areal(*words)
            assert refused.code == 3 and "object.json" in refused.err
        kept = two.areal("delete", "inf/default", "--yes")
        assert kept.code == 5 and "depends on one of InferenceService/default" in kept.err
        assert two.chat("1234").isdigit()
        two.ok("doctor", "--fix", "--yes")
    finally:
        path.write_bytes(content)
    two.ok("reconcile")


def test_no_new_key_is_created_while_processes_run(two: Box) -> None:
    path = two.home / "credentials/default"
    key = path.read_bytes()
    path.unlink()
    try:
        refused = two.areal("scale", "model/reverse", "--replicas", "3", "--timeout", "15s")
        assert refused.code == 2 and not path.exists(), refused.text
        assert f"cannot read the key in {path}" in refused.text and "until every process has a new one" in refused.text
        assert "the key of InferenceService/default is lost" in two.areal("doctor").out
    finally:
        path.write_bytes(key)
    two.ok("scale", "model/reverse", "--replicas", "2", "--force-conflicts")


def test_service_with_lost_key_restarts_with_new_one(two: Box) -> None:
    path = two.home / "credentials/default"
    path.unlink()
    two.ok("suspend", "inferenceservice/default")
    two.ok("resume", "inferenceservice/default")
    assert two.chat("1234").isdigit()
