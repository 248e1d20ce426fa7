"""Who is to blame for a failed attempt: errors of other people's clients, groups and causes; and what a job reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from areal.client.errors import CallerError, NotReady, UnknownName, Unreachable
from areal.errors import UsageFault
from areal.reward.frames import RewardProcessLost, RewardRaised, RewardTimeout
from areal.rollout.failures import (
    AttemptReport,
    EpisodeFailed,
    Failure,
    FailureKind,
    RolloutsFailed,
    cause_of,
)

REQUEST: Any = httpx2.Request("POST", "http://127.0.0.1/v1/chat/completions")


class Answered(Exception):
    """An error of a client of the agent's own, with the status of its answer."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it answered {status}")
        self.status_code = status


def of_openai(status: int, code: str | None = None) -> openai.APIStatusError:
    response: Any = httpx2.Response(status, request=REQUEST)
    return openai.APIStatusError("no", response=response, body={"code": code})


def raised(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind", "blame"),
    [
        (of_openai(400), FailureKind.REFUSED, "caller"),
        (of_openai(401), FailureKind.LOST, "caller"),
        (of_openai(404), FailureKind.REFUSED, "caller"),
        (of_openai(404, "session_not_found"), FailureKind.LOST, "caller"),
        (of_openai(409, "session_ended"), FailureKind.LOST, "caller"),
        (of_openai(404, "model_not_found"), FailureKind.REFUSED, "service"),
        (of_openai(408), FailureKind.UNREACHABLE, "caller"),
        (of_openai(425), FailureKind.UNREACHABLE, "caller"),
        (of_openai(429), FailureKind.UNREACHABLE, "service"),
        (of_openai(500), FailureKind.UNREACHABLE, "service"),
        (openai.APIConnectionError(request=REQUEST), FailureKind.UNREACHABLE, "infrastructure"),
        (openai.APITimeoutError(request=REQUEST), FailureKind.UNREACHABLE, "infrastructure"),
        (Answered(400), FailureKind.AGENT, "caller"),  # of its own call, not of the service
        (Answered(401), FailureKind.AGENT, "caller"),
        (Answered(429), FailureKind.AGENT, "service"),
        (Answered(499), FailureKind.AGENT, "caller"),
        (Answered(500), FailureKind.AGENT, "service"),
        (httpx2.ConnectTimeout("no"), FailureKind.AGENT, "infrastructure"),
        (CallerError("no model"), FailureKind.REFUSED, "caller"),
        (UnknownName("it has ended", status=409, code="session_ended"), FailureKind.LOST, "caller"),
        (UnknownName("the key is wrong", status=401), FailureKind.LOST, "caller"),
        (ExceptionGroup("both", [Unreachable("no"), KeyError("x")]), FailureKind.UNREACHABLE, "infrastructure"),
        (raised(ValueError("x"), Unreachable("no")), FailureKind.UNREACHABLE, "infrastructure"),
        (raised(ValueError("x"), raised(KeyError("y"), TimeoutError())), FailureKind.TIMEOUT, "workflow"),
        (raised(TimeoutError(), Unreachable("no")), FailureKind.TIMEOUT, "workflow"),
        (EpisodeFailed(FailureKind.LOST, "gone"), FailureKind.LOST, "workflow"),
        (raised(EpisodeFailed(FailureKind.LOST, "gone"), Answered(500)), FailureKind.LOST, "service"),
        (RewardProcessLost("it was killed"), FailureKind.REWARD, "reward"),
    ],
)
def test_cause_is_that_of_the_call_that_failed(error: BaseException, kind: FailureKind, blame: str) -> None:
    assert cause_of(error) == (kind, blame)


def test_report_is_renewed_when_the_failures_in_a_row_have_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = tmp_path / "stage.json"
    monkeypatch.setenv("AREAL_STAGE_FILE", str(stage))
    report, written = AttemptReport(), {}
    for count in range(1, 20):
        stage.unlink(missing_ok=True)
        report.add(NotReady(f"no\n reward {'x' * 600}", status=425))
        if stage.exists():
            written[count] = json.loads(stage.read_text())["failing"]
    assert list(written) == [4, 8, 16]
    assert written[8].startswith("8 attempts of episodes in a row failed, by fault of the caller: ")
    assert "no reward xx" in written[8] and len(written[8].partition("caller: ")[2]) == 500
    report.add(None)
    assert not json.loads(stage.read_text()).get("failing"), "an attempt has succeeded"
    stage.unlink()
    for _ in range(3):
        report.add(KeyError("x"))
    report.add(None)
    assert not stage.exists(), "three were not reported"


@pytest.mark.parametrize(
    ("errors", "permanent"),
    [
        ([("workflow", UsageFault("no column"))], True),
        ([("caller", CallerError("no"))], True),
        ([("reward", RewardRaised("no"))], True),
        ([("reward", RewardTimeout("late"))], False),
        ([("reward", RewardProcessLost("killed"))], False),
        ([("workflow", KeyError("x"))], False),
        ([("caller", CallerError("no")), ("service", Unreachable("no"))], False),
        ([], False),
    ],
)
def test_failures_are_permanent_if_each_would_happen_again(
    errors: list[tuple[str, Exception]], permanent: bool
) -> None:
    failed = RolloutsFailed("stopped", [Failure(f"t-{at}", *each, 1) for at, each in enumerate(errors)])
    assert failed.is_permanent is permanent


@pytest.mark.parametrize(("streak", "first"), [(0, 0), (1, 2), (2, 1), (3, 0), (9, 0)])
def test_message_names_the_first_failure_of_the_streak(streak: int, first: int) -> None:
    failures = [Failure(f"t-{number}", "workflow", KeyError(number), 1) for number in range(3)]
    message = RolloutsFailed("stopped", failures, streak).message
    assert message == f"stopped; the first, t-{first}, by fault of the workflow: KeyError: {first}"
    assert RolloutsFailed("stopped", [], streak).message == "stopped"
