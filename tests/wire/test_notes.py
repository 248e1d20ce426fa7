from __future__ import annotations

import json
from pathlib import Path

from areal.wire.notes import EVENTS_VARIABLE, OWNER_VARIABLE, SERVES, note


def lines(file: Path) -> list[tuple[str | None, str | None, int | None]]:
    found = [json.loads(line) if line.endswith("}") else {} for line in file.read_text().splitlines()]
    return [(each.get("reason"), each.get("message"), each.get("count")) for each in found]


def test_versions_of_one_training_run_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    environ = {EVENTS_VARIABLE: str(file), OWNER_VARIABLE: "Model/qwen"}
    file.write_text('{"half a line\n')
    note(environ, "Warning", "Died", "engine-0: killed", "supervisor")
    for version in range(1, 2001):
        note(environ, "Normal", SERVES, f"serves version {version} of trainjob/x", "data-proxy")
    note(environ, "Warning", "Died", "engine-0: killed", "supervisor")
    note(environ, "Normal", SERVES, "serves version 2001 of trainjob/x", "data-proxy")

    assert [json.loads(line)["reason"] for line in file.read_text().splitlines()[1:]] == [
        "Died",
        SERVES,
        "Died",
        SERVES,
    ]
    file.write_text("".join(line + "\n" for line in file.read_text().splitlines()[1:]))
    assert lines(file)[1] == (SERVES, "serves version 2000 of trainjob/x", 2000)
    assert lines(file)[3] == (SERVES, "serves version 2001 of trainjob/x", 1)
