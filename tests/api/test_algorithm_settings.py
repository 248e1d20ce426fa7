"""Settings of an algorithm: linked where they are one thing, refused at their place where they could have no effect."""

from __future__ import annotations

from pathlib import Path

from tests.api.test_config import SMALL, faults, load

OVERLONG = "gconfig: {max_new_tokens: 10}\nactor: {overlong_reward_penalty: true, overlong_tokens: 4"


def test_overlong_penalty_is_linked_to_the_answers_longest_length(tmp_path: Path) -> None:
    assert load(tmp_path, SMALL + OVERLONG + "}").actor.max_new_tokens == 10
    assert load(tmp_path, SMALL + OVERLONG + ", max_new_tokens: 8}").actor.max_new_tokens == 8
    said = faults(tmp_path, SMALL + OVERLONG + ", max_new_tokens: 1024}")
    assert "config.yaml:4: actor.max_new_tokens: " in said
    assert "gconfig.max_new_tokens 10" in said
