"""What `diff` says of a change of one field is what `apply` does to the processes, and it does nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areal.client.command import free_port
from tests.e2e.conftest import Box

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

# In this order, each on top of those before.
CHANGES = (
    ("router: {strategy: round_robin}", ""),
    (f"router: {{port: {free_port()}}}", ""),
    ("logLevel: debug", ""),
    ("limits: {requestTimeoutSeconds: 60}", ""),
    ("strategy: {minReadySeconds: 0.5}", ""),
    ("", "replicas: 2"),
    ("", "toolCallParser: qwen"),
    ("", "resources: {memory: 1Gi}"),
    ("", "engineArgs: {max-batch-size: 8}"),
    ("", "probes: {liveness: {periodSeconds: 9}}"),
    ("", "restart: {budget: {count: 5}}"),
)
SAME = (("", "toolCallParser: hermes"), ("", "resources: {memory: 1024Mi}"), ("suspend: false", ""))


def identities(box: Box) -> dict[tuple[str, int], list[str]]:
    rows = json.loads(box.ok("get", "processes", "-o", "json").out)["items"]
    found: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        found.setdefault((row["component"], row["replica"]), []).append(f"{row['uid']} {row['pid']}")
    return {slot: sorted(each) for slot, each in found.items()}


def planned(box: Box, file: str) -> tuple[set[tuple[str, int]], dict[str, Any]]:
    """The slots whose process the plan starts or stops, and the plan."""
    shown = box.areal("diff", "-f", file, "-o", "json")
    assert shown.code in (0, 1), shown
    plan = json.loads(shown.out)
    slots = {op["target"] for op in plan["ops"] if op["verb"] in ("spawn", "stop", "kick")}
    return {(name, int(number)) for name, _, number in (slot.partition("/") for slot in slots)}, plan


def test_field_change_touches_only_processes_of_its_plan(two: Box) -> None:
    service: list[str] = []
    model = ["replicas: 2"]
    for mine, its in (*CHANGES, *SAME):
        for fields, text in ((service, mine), (model, its)):
            if text:
                name = text.partition(":")[0]
                fields[:] = [each for each in fields if each.partition(":")[0] != name] + [text]
        file = two.manifest(service="\n".join(service), model="\n".join(model))
        before = identities(two)
        named, plan = planned(two, file)
        two.ok("apply", "-f", file, "--yes")
        after = identities(two)
        changed = {slot for slot in before.keys() | after.keys() if before.get(slot) != after.get(slot)}
        assert changed == named, (mine, its, plan["ops"])
        if (mine, its) in SAME:
            assert not named, plan["ops"]
        assert two.areal("diff", "-f", file).code == 0
