"""Failures of episodes. A failure is data: it is counted, retried or discarded, and never becomes a reward of 0.

``cause_of`` gives its kind, which summaries of a collection count, and the party that can act on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from areal.client.errors import Blame, CallerError, ClientError
from areal.dataclasses import dataclass
from areal.errors import ArealError, UsageFault, where_raised
from areal.reward.frames import RewardError, RewardProcessLost, RewardTimeout
from areal.wire.stage import report_stage

WORKFLOW, REWARD = "workflow", "reward"
_HINT = "with rollout.dump_to_file, trajectories/failures.jsonl has them all; in a driver, RolloutController.failures()"
_NO_MODEL = "model_not_found"  # the model existed at the start: a restarting service has it again soon
_SESSION_GONE = ("session_not_found", "session_ended")
_REPORTED_FAILURES = 4  # consecutive failures that the stage reports
_LONGEST_REPORT = 500
_CONNECTION_ERRORS = {"APIConnectionError", "APITimeoutError", "TransportError", "ClientConnectionError"}


class FailureKind(StrEnum):
    UNREACHABLE = "unreachable"  # the gateway did not answer, or its engine is away
    REFUSED = "refused"  # a 4xx: the same request fails again
    TIMEOUT = "timeout"  # the episode took longer than it may
    AGENT = "agent"  # the agent raised
    NO_INTERACTION = "no_interaction"  # the agent ended without calling the model
    REWARD = "reward"  # the reward raised, or returned no finite number
    REWARD_TIMEOUT = "reward_timeout"
    LOST = "lost"  # the service no longer has the session


@dataclass(frozen=True)
class Failure:
    """An episode without a result. ``blame``: caller, service, infrastructure, reward or workflow."""

    task_id: str
    blame: str
    error: BaseException
    attempts: int


class RolloutFailed(Exception):
    """The failure of an episode, for the caller that waits for its id."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.task_id}: {error_line(failure.error)}")
        self.failure = failure


def error_line(error: BaseException) -> str:
    """Return the error as one line. An error of the user's code includes file and line."""
    return str(error) if isinstance(error, ArealError) else f"{type(error).__name__}: {error}{where_raised(error)}"


class RolloutsFailed(ArealError):
    """Too many consecutive episodes failed or were rejected, or no further rollout can arrive. ``failures``: the last
    ones; ``streak``: how many of them are consecutive."""

    def __init__(self, message: str, failures: Sequence[Failure], streak: int = 0, hint: str | None = None) -> None:
        first = failures[-min(streak or len(failures), len(failures))] if failures else None
        cause = (
            f"; the first, {first.task_id}, by fault of the {first.blame}: {error_line(first.error)}" if first else ""
        )
        remedy = first.error.hint if first is not None and isinstance(first.error, ArealError) else None
        super().__init__(message + cause, hint=hint or remedy or (_HINT if failures else None))
        self.failures = tuple(failures)

    @property
    def is_permanent(self) -> bool:
        """Whether each failure is a refused request, a row that the workflow cannot use, or a reward that raised or
        returned no number."""
        by_chance = RewardTimeout | RewardProcessLost
        return bool(self.failures) and all(
            isinstance(each.error, UsageFault)
            or (each.blame in (Blame.CALLER, REWARD) and not isinstance(each.error, by_chance))
            for each in self.failures
        )


class AttemptReport:
    """Reports consecutive failures of attempts in the stage of this process, and so in the status of its job, until an
    attempt succeeds. The report is renewed whenever their number has doubled."""

    def __init__(self) -> None:
        self._failures = 0

    def add(self, error: BaseException | None) -> None:
        before, self._failures = self._failures, 0 if error is None else self._failures + 1
        if error is None:
            if before >= _REPORTED_FAILURES:
                self._write("")
        elif self._failures >= _REPORTED_FAILURES and self._failures & before == 0:
            line = " ".join(error_line(error).split())[:_LONGEST_REPORT]
            blame = cause_of(error).blame
            self._write(f"{self._failures} attempts of episodes in a row failed, by fault of the {blame}: {line}")

    def _write(self, failing: str) -> None:
        with contextlib.suppress(OSError):  # a full disk fails the run where it loses something
            report_stage("sampling", failing=failing)


class EpisodeFailed(Exception):
    """A failed attempt of a collection."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class FailureCause(NamedTuple):
    """The kind of a failure, and the party to blame: caller, service, infrastructure, reward, or workflow."""

    kind: FailureKind
    blame: str


def cause_of(error: BaseException) -> FailureCause:
    """Return the cause of an exception of an attempt: of a call to the service, the reward, or the agent. The first
    error of an exception group counts; an error of an unknown kind counts as the one that it was raised from.

    Errors of other HTTP clients are recognized by a ``status_code``, by ``ConnectionError`` or by their class name.
    Clients of OpenAI and Anthropic call the service; any other call is the agent's own.
    """
    if isinstance(error, EpisodeFailed):
        return FailureCause(error.kind, cause_of(error.__cause__).blame if error.__cause__ is not None else WORKFLOW)
    if isinstance(error, BaseExceptionGroup):
        return cause_of(error.exceptions[0])
    if isinstance(error, RewardError):
        is_late = isinstance(error, RewardTimeout)
        return FailureCause(FailureKind.REWARD_TIMEOUT if is_late else FailureKind.REWARD, REWARD)
    code = getattr(error, "code", None)
    if (answer := _http_answer(error)) is None:
        if isinstance(error, TimeoutError):
            return FailureCause(FailureKind.TIMEOUT, WORKFLOW)
        if code == _NO_MODEL or error.__cause__ is None:
            return FailureCause(FailureKind.AGENT, Blame.SERVICE if code == _NO_MODEL else WORKFLOW)
        return cause_of(error.__cause__)
    status, blame = answer
    is_ours = isinstance(error, ClientError) or type(error).__module__.partition(".")[0] in ("openai", "anthropic")
    kind = _kind_of_answer(status, code) if is_ours else FailureKind.AGENT
    return FailureCause(kind, Blame.SERVICE if code == _NO_MODEL else blame)


def _http_answer(error: BaseException) -> tuple[int, str] | None:
    """Return the status (0: no answer) of an HTTP client's error, and the party to blame; None for any other error."""
    if isinstance(error, ClientError):
        return error.status or (400 if isinstance(error, CallerError) else 0), str(error.blame)
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return status, Blame.SERVICE if status >= 500 or status == 429 else Blame.CALLER
    if isinstance(error, ConnectionError) or _CONNECTION_ERRORS & {kind.__name__ for kind in type(error).__mro__}:
        return 0, Blame.INFRASTRUCTURE
    return None


def _kind_of_answer(status: int, code: str | None) -> FailureKind:
    """Return the kind of failure for an HTTP status; 0 means that there was no answer."""
    if status == 0 or status >= 500 or status in (408, 425, 429):
        return FailureKind.UNREACHABLE
    return FailureKind.LOST if status == 401 or code in _SESSION_GONE else FailureKind.REFUSED


def failure_of(error: BaseException, timeout_s: float) -> EpisodeFailed:
    """Return the failure for an exception of an attempt. ``timeout_s``: the timeout of its agent."""
    if isinstance(error, EpisodeFailed):
        return error
    kind, message = cause_of(error).kind, f"{type(error).__name__}: {error}"
    if isinstance(error, RewardError):
        message = error.message
    elif isinstance(error, ClientError):
        message = f"{error.status}: {error.message}" if error.status else error.message
    elif isinstance(error, TimeoutError) and kind is FailureKind.TIMEOUT:
        message = f"the agent did not end within {timeout_s:g} s"
    elif kind is FailureKind.AGENT:
        message += where_raised(error)
    return EpisodeFailed(kind, message)
