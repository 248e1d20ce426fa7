"""Two homes on one machine with objects of the same names: neither sees, counts, stops or heals what is the other's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Box, make_box, tear_down

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[tuple[Box, Box]]:
    boxes = []
    try:
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            boxes.append(make_box(tmp_path / name))
            boxes[-1].ok("apply", "-f", boxes[-1].manifest())
        yield boxes[0], boxes[1]
    finally:
        for box in boxes:
            tear_down(box)


def ports(box: Box) -> set[int]:
    return {port for row in box.processes().values() for port in row["ports"]}


def test_homes_with_same_object_names_do_not_mix(homes: tuple[Box, Box]) -> None:
    one, other = homes
    assert not set(one.pids().values()) & set(other.pids().values())
    assert not ports(one) & ports(other)
    for box in homes:
        rows = json.loads(box.ok("get", "processes", "-o", "json").out)["items"]
        assert {row["pid"] for row in rows} == set(box.pids().values())
        listed = json.loads(box.ok("inf", "ps", "--all", "-o", "json").out)["items"]
        assert len(listed) == 1
        top = json.loads(box.ok("top", "-o", "json").out)["items"]
        assert {row["pid"] for row in top if row.get("pid")} <= set(box.pids().values())
        assert box.areal("diff", "--drift").code == 0
        findings = box.areal("doctor")
        assert not any(str(pid) in findings.text for pid in (other if box is one else one).pids().values()), findings
        assert box.chat("1234").isdigit()


def test_port_of_other_home_is_refused_naming_owner(
    homes: tuple[Box, Box],
) -> None:
    one, other = homes
    before = one.pids()
    taken = other.write(
        "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: default}\n"
        f"spec: {{gateway: {{port: {one.port}}}}}\n",
        "taken.yaml",
    )
    refused = other.areal("apply", "-f", taken, "--yes", "--timeout", "30s")
    assert refused.code not in (0, 70) and str(one.port) in refused.text, refused
    assert other.chat("1234").isdigit(), "the refused change has not touched what serves"
    other.ok("delete", "inf/default", "--cascade", "--yes")
    other.areal("doctor", "--fix", "--yes")
    assert one.pids() == before and one.chat("1234").isdigit()
    assert one.areal("diff", "--drift").code == 0
