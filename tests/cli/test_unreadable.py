"""One record that cannot be read, and what can still be done to the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal.cli.operate import _ask_once
from areal.client.command import free_port
from areal.errors import UsageFault
from areal.reconcilers.plan import Plan
from areal.state.files import seal, unseal
from areal.state.home import Home
from tests.cli.conftest import Areal, Spawner
from tests.cli.test_apply import document


@pytest.fixture
def recorded(areal: Areal, home: Home, tmp_path: Path) -> Callable[[str], Path]:
    """Objects without processes: a service, its model, and a service that nothing needs; the file of one of them."""
    model = {"service": "default", "backend": "embedded", "path": str(tmp_path), "suspend": True}
    objects = [
        document("InferenceService", name, {"suspend": True, "gateway": {"port": free_port()}})
        for name in ("default", "spare", "other")
    ]
    file = tmp_path / "m.yaml"
    file.write_text(yaml.safe_dump_all([*objects, document("Model", "m", model)]))
    applied = areal("apply", "-f", str(file), "--yes")
    assert applied.code == 0, applied

    def path(ref: str) -> Path:
        return home.objects / ref / "object.json"

    return path


def test_unreadable_record_does_not_block_other_deletes(areal: Areal, recorded: Callable[[str], Path]) -> None:
    recorded("model/m").write_text("{")
    deleted = areal("delete", "inf/spare", "--yes")
    assert deleted.code == 0 and "inferenceservice/spare deleted" in deleted.out, deleted
    assert not recorded("inferenceservice/spare").exists()


def test_object_needed_by_unreadable_one_is_not_deleted(areal: Areal, recorded: Callable[[str], Path]) -> None:
    recorded("model/m").write_text("{")
    refused = areal("delete", "inf/default", "--yes")
    assert refused.code == 5 and "depends on one of InferenceService/default" in refused.err, refused
    assert recorded("inferenceservice/default").exists()


def lose(record: Path) -> None:
    """Damage a record and all its revisions."""
    for file in (record, *(record.parent / "revisions").iterdir()):
        file.write_text("{")


def test_unreadable_object_without_revision_blocks_all_deletes(areal: Areal, recorded: Callable[[str], Path]) -> None:
    lose(recorded("model/m"))
    refused = areal("delete", "inf/spare", "--yes")
    assert refused.code == 5 and "may depend on InferenceService/spare" in refused.err, refused


@pytest.mark.parametrize("words", [("model/m", "inf/default"), ("--all",), ("model/m", "--ignore-not-found")])
def test_object_without_revision_is_deleted(
    areal: Areal, recorded: Callable[[str], Path], words: tuple[str, ...]
) -> None:
    lose(recorded("model/m"))
    deleted = areal("delete", *words, "--yes")
    assert deleted.code == 0 and "model/m deleted" in deleted.out, deleted
    assert not recorded("model/m").exists()
    assert recorded("inferenceservice/default").exists() == ("--ignore-not-found" in words)
    assert areal("doctor").code == 0


def test_service_without_revision_is_deleted_with_its_models(areal: Areal, recorded: Callable[[str], Path]) -> None:
    lose(recorded("inferenceservice/default"))
    refused = areal("delete", "inf/default", "--yes")
    assert refused.code == 5 and "Model/m (depends on InferenceService/default)" in refused.err, refused
    deleted = areal("delete", "inf/default", "--cascade", "--yes")
    assert deleted.code == 0 and "model/m deleted" in deleted.out, deleted
    assert not recorded("inferenceservice/default").exists() and not recorded("model/m").exists()


def test_models_of_unreadable_service_are_listed(areal: Areal, recorded: Callable[[str], Path]) -> None:
    recorded("inferenceservice/default").write_text("{")
    for words in (("get",), ("get", "models,inf"), ("get", "-o", "name")):
        listed = areal(*words)
        assert "model/m" in listed.out and listed.code == 3, (words, listed)
    assert areal("get", "model/m").code == areal("describe", "model/m").code == 0
    assert areal("diff", "--drift").code == 3


@pytest.mark.parametrize("damage", [lambda record: record.write_text("{"), lose])
def test_status_of_service_shows_unreadable_model(
    areal: Areal, recorded: Callable[[str], Path], damage: Callable[[Path], object]
) -> None:
    damage(recorded("model/m"))
    status = areal("inf", "status", "-o", "json")
    assert status.code == 1 and status.json["healthy"] is False
    (model,) = status.json["models"]
    assert (model["name"], model["phase"]) == ("m", "Unknown") and "areal doctor --fix" in model["message"]
    assert "its record is unreadable" in areal("inf", "status").out


def test_short_lists_name_unreadable_records(areal: Areal, recorded: Callable[[str], Path]) -> None:
    recorded("inferenceservice/spare").write_text("{")
    recorded("model/m").write_text("{")
    for words, lost in ((("inf", "ps", "--all"), "spare"), (("inf", "models"), "model/m")):
        listed = areal(*words)
        assert listed.code == 3 and f"{lost}/object.json is unreadable" in listed.err, listed
        assert "no model" not in listed.err
    kept = areal("inf", "stop", "--all", "--yes")
    assert kept.code == 3 and "spare/object.json is unreadable" in kept.err


def test_record_without_revision_is_replaced_by_its_manifest(
    areal: Areal, recorded: Callable[[str], Path], tmp_path: Path
) -> None:
    record = recorded("inferenceservice/spare")
    record.write_text("{")
    (record.parent / "revisions" / "1.json").write_text("{")
    doctor = areal("doctor", "--fix")
    assert doctor.code == 1 and "its manifest replaces it and keeps its processes: areal apply -f FILE" in doctor.out
    file = str(tmp_path / "m.yaml")
    assert areal("diff", "-f", file).code == 1
    applied = areal("apply", "-f", file)
    assert applied.code == 0 and "inferenceservice/spare created" in applied.out, applied
    assert areal("doctor").code == areal("diff", "--drift").code == 0


def test_folder_without_record_is_not_an_object(areal: Areal, recorded: Callable[[str], Path]) -> None:
    (recorded("model/half").parent / "revisions").mkdir(parents=True)  # a full disk, or a killed command
    lost = areal("get", "model/half")
    assert lost.code == 4 and "half" not in lost.err.replace("Model/half", "", 1), lost
    deleted = areal("delete", "--all", "--yes")
    assert deleted.code == 0 and "model/m deleted" in deleted.out, deleted


def test_selector_finds_labels_of_unreadable_record(areal: Areal, home: Home, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    labelled = document("InferenceService", "a", {"suspend": True})
    labelled["metadata"]["labels"] = {"tier": "prod"}
    file.write_text(yaml.safe_dump(labelled))
    assert areal("apply", "-f", str(file)).code == 0
    (home.objects / "inferenceservice" / "a" / "object.json").write_text("{")
    refused = areal("delete", "inf", "-l", "tier=prod", "--yes")
    assert refused.code == 3 and "a/object.json is unreadable" in refused.err, refused


def test_closed_folder_is_named_by_events_and_doctor(
    areal: Areal, home: Home, recorded: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded("model/m")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != home.locks)
    doctor = areal("doctor")
    assert doctor.code == 1 and f"error: {home.locks}: it cannot be written by uid" in doctor.out, doctor
    scandir = os.scandir

    def refuse(path: str | Path) -> Any:
        if Path(path) == home.objects / "model":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    events = areal("events")
    assert events.code == 1 and f"cannot list {home.objects}/model: permission denied" in events.err, events


@pytest.mark.parametrize("damage", [lambda path: path.write_text("x"), lambda path: path.mkdir()])
def test_damaged_serial_is_repaired_with_objects(
    areal: Areal, home: Home, recorded: Callable[[str], Path], damage: Callable[[Path], object]
) -> None:
    recorded("model/m").write_text("{")
    serial = home.objects / "serial"
    serial.unlink()
    damage(serial)
    assert areal("doctor", "--fix").code == 0
    assert areal("get").code == areal("diff", "--drift").code == areal("doctor").code == 0


def test_object_with_refused_fields_is_blocked_alone(areal: Areal, recorded: Callable[[str], Path]) -> None:
    record = recorded("inferenceservice/default")
    body = unseal(record.read_bytes())
    body["layers"][0]["spec"]["scheduler"] = {"type": "slurm", "slurm": {"containerMounts": ["/a:/a"]}}
    record.write_bytes(seal(body))
    why = "InferenceService/default: the spec of this InferenceService is not valid: spec.scheduler.slurm: containerM"
    for command in (("reconcile", "--yes"), ("diff", "--drift")):
        found = areal(*command)
        assert found.code == 3 and why in found.err and "apply its manifest again without the fault" in found.err
        assert "/spare unchanged" in found.out and "/other unchanged" in found.out
    doctor = areal("doctor", "-o", "json").items
    assert [each["what"] for each in doctor if each["severity"] == "error"] == [
        "the recorded fields of InferenceService/default are refused"
    ]
    assert areal("suspend", "inf/default").code == 3
    assert areal("resume", "inf/spare", "--timeout", "30s").code == 0
    assert areal("suspend", "inf/spare").code == 0
    assert areal("delete", "inf/default", "--cascade", "--yes").code == 0
    assert areal("reconcile", "--yes").code == 0


def ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.timeout(60)
def test_watch_reports_persistent_fault_once(spawn: Spawner, recorded: Callable[[str], Path]) -> None:
    record = recorded("inferenceservice/other")
    record.write_text("{")
    process = spawn("reconcile", "--watch", "--interval", "0.01s").popen
    lines: list[str] = []

    def read_until(words: str) -> None:
        assert process.stderr is not None
        while words not in (line := process.stderr.readline()):
            assert line, lines
            lines.append(line)
        lines.append(line)

    read_until("other/object.json is unreadable")
    began = ticks(process.pid)
    while ticks(process.pid) < began + os.sysconf("SC_CLK_TCK") // 4:  # many rounds
        time.sleep(0.01)
    recorded("inferenceservice/spare").write_text("{")
    read_until("spare/object.json is unreadable")
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=30)[1]
    output = "".join([*lines, rest])
    assert output.count("spare/object.json is unreadable") == 1, output
    assert output.count("other/object.json is unreadable") == 2, output


def test_watch_without_terminal_asks_each_plan_once() -> None:
    asked: list[Plan] = []

    def declines(plan: Plan) -> bool:
        asked.append(plan)
        return False

    def cannot_ask(plan: Plan) -> bool:
        raise UsageFault("it would destroy something", detail="stop engine/0", hint="add --yes")

    plan: Any = type("", (), {"destructive": ["stop engine/0"]})()
    approve = _ask_once(declines)
    assert [approve(plan), approve(plan), len(asked)] == [False, False, 1]
    with pytest.raises(UsageFault) as caught:
        _ask_once(cannot_ask)(plan)
    assert "areal reconcile --yes" in (caught.value.hint or "") and "--watch --yes" in (caught.value.hint or "")
