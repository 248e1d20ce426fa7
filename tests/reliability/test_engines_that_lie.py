"""An engine says what cannot be true: its call fails, saying so, and nothing of it becomes training data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.asking import Reply
from tests.reliability.faults import Outcome, fault
from tests.reliability.fleet import Fleet, running_fleet
from tests.reliability.scenes import SERVED, failure, instruct, scene_at

PART = "Invalid answers of an engine"
LIES: dict[str, dict[str, Any]] = {
    "log-probabilities that are not numbers": {"line": {"logprobs": [float("nan")]}},
    "log-probability of minus infinity": {"line": {"logprobs": [float("-inf")]}},
    "log-probability missing": {"line": {"logprobs": []}},
    "log-probability as text": {"line": {"logprobs": ["-0.5"]}},
    "more log-probabilities than tokens": {"line": {"logprobs": [-0.5, -0.5]}},
    "weight version missing": {"line": {"versions": []}},
    "token outside any vocabulary": {"line": {"token_ids": [2**40]}},
    "token that is not a whole number": {"line": {"token_ids": [7.5]}},
    "negative token": {"line": {"token_ids": [-7]}},
    "token as text": {"line": {"token_ids": ["7"]}},
    "choice that was not requested": {"line": {"index": 7}},
    "unknown finish reason": {"line": {"finish_reason": "tired"}},
    "end without a finish reason": {"line": {"finish_reason": None}},
    "line without fields": {"raw": "{}"},
    "line that is not an object": {"raw": "[1, 2]"},
    "line that is not JSON": {"raw": "<html>502 Bad Gateway</html>"},
    "line that is not text": {"raw": "\\ud800"},
    "error line": {"raw": '{"error": {"message": "out of memory"}}'},
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("lies"), tokenizer) as fleet:
        yield fleet


@pytest.mark.parametrize(
    "lie", [pytest.param(lie, id=name, marks=fault(PART, name, "in an answer")) for name, lie in LIES.items()]
)
def test_invalid_engine_output_fails_its_call_unrecorded(fleet: Fleet, outcome: Outcome, lie: dict[str, Any]) -> None:
    scene = scene_at(fleet)
    instruct(fleet.engines[0], **lie)
    body, streamed = scene.body(), scene.body(stream=True)
    outcome.callers(failure(scene.ask(body)), f"as a stream {failure(scene.ask(streamed))}")
    outcome.recorded(scene.kept())
    instruct(fleet.engines[0])
    assert isinstance(scene.ask(body), Reply)
    outcome.healed(SERVED)
    assert scene.exported()
