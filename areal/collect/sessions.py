"""The session routes of a gateway, as a collector uses them: standard library only, every failure typed."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from areal.client.admin import AdminClient
from areal.collect.agents import refusal
from areal.collect.failures import EpisodeFailed, Kind
from areal.trajectories.record import Interaction, rows_of_export

_TRIES = 4
_NOTHING = "nothing_to_export"
_FIRST_WAIT_S = 0.25


@dataclass(frozen=True)
class Session:
    """``key`` is the agent's; empty for a session that an earlier run of the collector has started."""

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
    """``url`` is a gateway's, or a data proxy's. Calls that may be repeated are, while the service is away."""

    url: str
    admin_key: str | None = field(repr=False)
    discount: float = 1.0
    style: str = "individual"
    timeout_s: float = 60.0

    def start(self, task: str, count: int, model: str) -> list[Session]:
        """Not repeated: a start whose answer was lost leaves idle sessions, which expire."""
        body = {"task_id": task, "group_size": count, "model": model, "online": False}
        document = self._call("POST", "/rl/start_session", body, repeat=False)
        return [Session(each["session_id"], each["session_api_key"]) for each in document["sessions"]]

    def reward(self, session: Session, value: float, interaction_id: str = "") -> bool:
        """Whether everything of the session is sealed now. The same reward again is only answered again."""
        body: dict[str, Any] = {"session_id": session.session_id, "reward": value}
        if interaction_id:
            body["interaction_id"] = interaction_id
        answer = self._call("POST", "/rl/set_reward", body)
        several = answer["trajectory_id"] > 0
        if several and not interaction_id:
            self._reward_open(session, value)
        return bool(answer["trajectory_ready"]) and not (several and interaction_id)

    def _reward_open(self, session: Session, value: float) -> None:
        """The trajectories that a change between token and external models left open have the episode's reward too."""
        document = self._call("GET", f"/rl/sessions/{quote(session.session_id, safe='')}")
        for trajectory in document["trajectories"]:
            if trajectory["state"] == "open" and trajectory["interactions"]:
                newest = trajectory["interactions"][-1]["interaction_id"]
                body = {"session_id": session.session_id, "reward": value, "interaction_id": newest}
                self._call("POST", "/rl/set_reward", body)

    def end(self, session: Session) -> None:
        self._call("POST", "/rl/end_session", {"session_id": session.session_id})

    def interactions(self, session: Session) -> list[str]:
        """Ids in the order in which they were recorded."""
        document = self._call("GET", f"/rl/sessions/{quote(session.session_id, safe='')}")
        return [each["interaction_id"] for item in document["trajectories"] for each in item["interactions"]]

    def export(self, session: Session) -> Exported | None:
        """The same answer each time until it is acknowledged. None while nothing in the session is ready."""
        body = {"session_ids": [session.session_id], "discount": self.discount, "style": self.style}
        status, document = self._answer("POST", "/export_trajectories", body)
        if status == 425 or (status == 404 and document.get("error", {}).get("code") == _NOTHING):
            return None
        if status == 404:
            raise EpisodeFailed(Kind.LOST, f"session {session.session_id} is gone")
        if status != 200:
            raise refusal(status, document)
        try:
            return Exported(rows_of_export(document), document["export_id"], tuple(document.get("failures") or ()))
        except ValueError as error:
            raise EpisodeFailed(Kind.REFUSED, f"the export of {session.session_id} is unreadable: {error}") from error

    def acknowledge(self, export_id: str) -> None:
        self._call("POST", "/export_trajectories/ack", {"export_id": export_id})

    def drop(self, session: Session) -> None:
        """End it and let go of what it holds, as far as the service is there; what is left expires."""
        try:
            self._call("POST", "/rl/end_session", {"session_id": session.session_id}, repeat=False)
            exported = self.export(session)
            if exported is not None:
                self.acknowledge(exported.export_id)
        except EpisodeFailed:
            return

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, repeat: bool = True) -> Any:
        status, document = self._answer(method, path, body, repeat=repeat)
        if status not in (200, 201):
            raise refusal(status, document)
        return document

    def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, repeat: bool = True
    ) -> tuple[int, Any]:
        """Repeats what failed without an answer, or with one that passes. Raises EpisodeFailed for the former."""
        client = AdminClient(self.url, self.admin_key, timeout_s=self.timeout_s)
        wait_s = _FIRST_WAIT_S
        for left in range(_TRIES - 1 if repeat else 0, -1, -1):
            try:
                status, document = client.call(method, path, None if body is None else dict(body))
                if status not in (502, 503, 504, 429) or not left:
                    return status, document
            except OSError as error:
                if not left:
                    what = str(error) or type(error).__name__
                    raise EpisodeFailed(Kind.UNREACHABLE, f"{self.url}{path}: {what}") from error
            time.sleep(wait_s * (0.5 + random.random()))
            wait_s *= 2
        raise AssertionError("unreachable")


def in_order(rewards: Mapping[str, float], recorded: Sequence[str]) -> list[tuple[str, float]]:
    """Rewards in the order of their interactions: the one on the newest seals, so it has to come last."""
    places = {name: place for place, name in enumerate(recorded)}
    return sorted(rewards.items(), key=lambda item: places.get(item[0], len(places)))
