"""Public example configurations of each framework: every key is known (``public_examples.py`` makes the table)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areal.convert.drafts import Fate
from areal.convert.sources import SOURCES
from tests.convert.public_examples import CHOSEN, TABLE

EXAMPLES: dict[str, dict[str, dict[str, Any]]] = json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("framework", SOURCES)
def test_table_has_ten_public_examples_per_framework(framework: str) -> None:
    assert len(EXAMPLES[framework]) >= 10
    assert set(EXAMPLES[framework]) == set(CHOSEN[framework])


@pytest.mark.parametrize("framework", SOURCES)
def test_every_key_of_a_public_example_has_a_rule(framework: str) -> None:
    for name, example in EXAMPLES[framework].items():
        trainer = SOURCES[framework].trainers[example["trainer"]]
        for fate in (Fate.MAPPED, Fate.LOSSY, Fate.REFUSED):  # an unknown key without a value is ignored
            for key in example[fate].split():
                rule = trainer.rule(trainer.aliases.get(key, key), trainer.defaults)
                assert "not a known key" not in rule.note, (name, key)
                assert fate is not Fate.MAPPED or rule.fate is Fate.MAPPED, (name, key)
