"""The session routes of a gateway: the order of calls that rewards and seals a session, and a client for collections.

``seal`` is the protocol without I/O, for the threads of a collection and the tasks of a trainer: it yields calls and is
sent the responses of the session routes. The reward of the newest interaction seals its trajectory, so rewards are sent
oldest first. A session whose calls alternated between a token model and an external one has several trajectories, which
all get the episode's reward.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

from areal.client.http import AdminClient
from areal.dataclasses import dataclass, field
from areal.errors import UsageFault
from areal.rollout.failures import EpisodeFailed, FailureKind, refusal
from areal.trajectories.record import Interaction, rows_of_export
from areal.wire.bodies import EndSession, ExportTrajectories, SetReward, StartSession
from areal.wire.fields import write_fields


class SessionCall(NamedTuple):
    """``interaction_id`` None: the newest interaction."""

    kind: Literal["describe", "reward", "end"]
    reward: float = 0.0
    interaction_id: str | None = None


def seal(reward: float | Mapping[str, float]) -> Generator[SessionCall, Mapping[str, Any], None]:
    """``reward``: of the episode, or by interaction id ("" is the newest). Ends the session where no reward seals it.
    Raises UsageFault for an unknown id."""
    rewards = reward if isinstance(reward, Mapping) else {"": reward}
    order: list[str] = []
    if any(rewards):
        session = yield SessionCall("describe")
        order = [each["interaction_id"] for item in session["trajectories"] for each in item["interactions"]]
        if unknown := [name for name in rewards if name and name not in order]:
            raise UsageFault(f"the agent rewards {unknown[0]!r}, which is no interaction of its session")
    sealed = False
    for name in sorted(rewards, key=[*order, ""].index):
        answer = yield SessionCall("reward", float(rewards[name]), name or None)
        has_several = answer["trajectory_id"] > 0
        if has_several and not name:
            session = yield SessionCall("describe")
            for trajectory in session["trajectories"]:
                if trajectory["state"] == "open" and trajectory["interactions"]:
                    newest = trajectory["interactions"][-1]["interaction_id"]
                    yield SessionCall("reward", float(rewards[name]), newest)
        sealed = bool(answer["trajectory_ready"]) and not (has_several and name)
    if not sealed:
        yield SessionCall("end")


# The client of a collection: standard library only, every failure typed

_MAX_ATTEMPTS = 4
_NOTHING_TO_EXPORT = "nothing_to_export"
_FIRST_WAIT_S = 0.25


@dataclass(frozen=True)
class CollectionSession:
    """``key`` is for the agent; empty for a session that an earlier run has started."""

    session_id: str
    key: str = field(default="", repr=False)


@dataclass(frozen=True)
class Exported:
    rows: tuple[Interaction, ...]
    export_id: str
    failures: tuple[Mapping[str, Any], ...] = ()

    @property
    def rewarded(self) -> bool:
        return any(row.rewarded for row in self.rows)


@dataclass(frozen=True)
class SessionService:
    """``url`` of a gateway or a data proxy. Idempotent calls are retried while the service is away."""

    url: str
    admin_key: str | None = field(repr=False)
    discount: float = 1.0
    style: Literal["individual", "concat"] = "individual"
    timeout_s: float = 60.0

    def start(self, task: str, count: int, model: str) -> list[CollectionSession]:
        """Start sessions, without a retry: it could start them twice. Sessions whose response is lost expire."""
        body = write_fields(StartSession(task_id=task, group_size=count, model=model, online=False))
        document = self._call("POST", "/rl/start_session", body, repeat=False)
        return [CollectionSession(each["session_id"], each["session_api_key"]) for each in document["sessions"]]

    def seal(self, session: CollectionSession, rewards: Mapping[str, float]) -> None:
        """Reward the session and seal it. Raises EpisodeFailed."""
        steps, answer = seal(rewards), None
        try:
            while True:
                answer = self._send(session, steps.send(answer))  # type: ignore[arg-type]  # None starts it
        except StopIteration:
            return
        except UsageFault as error:
            raise EpisodeFailed(FailureKind.REFUSED, error.message) from error

    def _send(self, session: CollectionSession, call: SessionCall) -> Any:
        if call.kind == "describe":
            return self._call("GET", f"/rl/sessions/{quote(session.session_id, safe='')}")
        if call.kind == "end":
            return self._call("POST", "/rl/end_session", write_fields(EndSession(session_id=session.session_id)))
        reward = SetReward(reward=call.reward, interaction_id=call.interaction_id, session_id=session.session_id)
        try:
            return self._call("POST", "/rl/set_reward", write_fields(reward))
        except EpisodeFailed as failure:
            if failure.status == 400 and call.interaction_id is None:
                raise EpisodeFailed(FailureKind.NO_INTERACTION, failure.message) from failure
            raise

    def export(self, session: CollectionSession) -> Exported | None:
        """Returns the same export until it is acknowledged; None while no trajectory of the session is ready."""
        body = ExportTrajectories(session_ids=(session.session_id,), discount=self.discount, style=self.style)
        status, document = self._request("POST", "/export_trajectories", write_fields(body))
        if status == 425 or (status == 404 and document.get("error", {}).get("code") == _NOTHING_TO_EXPORT):
            return None
        if status == 404:
            raise EpisodeFailed(FailureKind.LOST, f"session {session.session_id} is gone")
        if status != 200:
            raise refusal(status, document)
        try:
            return Exported(rows_of_export(document), document["export_id"], tuple(document.get("failures") or ()))
        except ValueError as error:
            raise EpisodeFailed(
                FailureKind.REFUSED, f"the export of {session.session_id} is unreadable: {error}"
            ) from error

    def acknowledge(self, export_id: str) -> None:
        self._call("POST", "/export_trajectories/ack", {"export_id": export_id})

    def drop(self, session: CollectionSession) -> None:
        """End the session and discard its trajectories. Failures are ignored: the session expires."""
        try:
            self._call("POST", "/rl/end_session", write_fields(EndSession(session_id=session.session_id)), repeat=False)
            exported = self.export(session)
            if exported is not None:
                self.acknowledge(exported.export_id)
        except EpisodeFailed:
            return

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, repeat: bool = True) -> Any:
        status, document = self._request(method, path, body, repeat=repeat)
        if status not in (200, 201):
            raise refusal(status, document)
        return document

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, repeat: bool = True
    ) -> tuple[int, Any]:
        """Retry connection errors and transient statuses. Raises EpisodeFailed without a response."""
        client = AdminClient(self.url, self.admin_key, timeout_s=self.timeout_s)
        wait_s = _FIRST_WAIT_S
        for left in range(_MAX_ATTEMPTS - 1 if repeat else 0, -1, -1):
            try:
                status, document = client.call(method, path, None if body is None else dict(body))
                if status not in (502, 503, 504, 429) or not left:
                    return status, document
            except OSError as error:
                if not left:
                    reason = str(error) or type(error).__name__
                    raise EpisodeFailed(FailureKind.UNREACHABLE, f"{self.url}{path}: {reason}") from error
            time.sleep(wait_s * (0.5 + random.random()))
            wait_s *= 2
        raise AssertionError("unreachable")
