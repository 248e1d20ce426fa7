"""What AReaL's examples use works here, or is refused with a reason (``areal_examples.tsv``)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.drivers.areal_examples import BESIDE, REFUSED, Row, examine, judge, read_table
from tests.drivers.areal_runs import FAMILIES, REFUSED_FAMILIES

ROWS = read_table()


@pytest.mark.parametrize("kind", ["import", "member", "string", "key", "allocation"])
def test_example_usage_works_or_is_refused_per_table(kind: str) -> None:
    listed = [row for row in ROWS if row.kind == kind]
    beside = [row for row in listed if row.why.startswith(BESIDE)]
    judged = [judge(kind, row.subject) for row in listed if row not in beside]
    assert judged == [row for row in listed if row not in beside]
    refused = {row.subject for row in ROWS if row.verdict == REFUSED}
    assert {row.why.removeprefix(BESIDE) for row in beside} <= refused  # the import that is refused before
    assert listed


def test_every_subject_works_or_is_refused_with_reason() -> None:
    assert {row.verdict for row in ROWS} == {"works", REFUSED}
    assert all(row.why for row in ROWS if row.verdict == REFUSED)


def test_subject_neither_working_nor_refused_is_missing() -> None:
    unknown = {
        "import": "areal.api Nothing",
        "member": "areal.api.cli_args:GenerationHyperparameters.nothing",
        "string": "areal.workflow.nothing.Agent",
        "key": "GRPOConfig actor.nothing",
    }
    assert {judge(kind, subject).verdict for kind, subject in unknown.items()} == {"missing"}
    assert judge("member", "areal.api.cli_args:GRPOConfig.actor") == Row(
        "member", "areal.api.cli_args:GRPOConfig.actor"
    )


def test_recorded_families_match_tested_ones() -> None:
    ran = {row.subject: row.verdict for row in ROWS if row.kind == "run"}
    assert ran == dict.fromkeys(FAMILIES, "works") | dict.fromkeys(REFUSED_FAMILIES, REFUSED)


@pytest.mark.skipif("AREAL_EXAMPLES" not in os.environ, reason="AREAL_EXAMPLES is a checkout of AReaL")
def test_table_matches_checkout() -> None:
    found = [str(row) for row in examine(Path(os.environ["AREAL_EXAMPLES"]))]
    assert found == [str(row) for row in ROWS if row.kind != "run"]
