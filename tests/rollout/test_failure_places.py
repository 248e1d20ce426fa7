"""Failures say where the user's code raised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal.rollout.failures import Failure, RolloutFailed, error_line, failure_of


def raises() -> None:
    json.loads("{")


def raised() -> Exception:
    with pytest.raises(json.JSONDecodeError) as caught:
        raises()
    return caught.value


def test_failure_names_user_line_and_not_library_line() -> None:
    place = f"({Path(__file__)}:{raises.__code__.co_firstlineno + 1}, in raises)"
    assert error_line(raised()).endswith(place)
    assert failure_of(raised(), 1.0).message.endswith(place)
    assert str(RolloutFailed(Failure("t", "workflow", raised(), 1))).endswith(place)
    assert error_line(ValueError("never raised")) == "ValueError: never raised"
