"""How an episode's reward seals its recorded session: one protocol, without I/O, for the threads of a collection and
the tasks of a trainer. ``seal`` yields calls and is sent their answers, the documents of the session routes.

The reward of the newest interaction seals its trajectory, so rewards go oldest first. Where the calls changed between a
token model and an external one, the session has several trajectories: the episode's reward goes to all of them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, Literal, NamedTuple

from areal.errors import UsageFault


class SessionCall(NamedTuple):
    """``interaction_id`` None: the newest interaction."""

    kind: Literal["describe", "reward", "end"]
    reward: float = 0.0
    interaction_id: str | None = None


def seal(reward: float | Mapping[str, float]) -> Generator[SessionCall, Mapping[str, Any], None]:
    """``reward``: the episode's, or by interaction id ("" is the newest one). The session is ended where no reward has
    sealed it. Raises UsageFault for an unknown id."""
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
        several = answer["trajectory_id"] > 0
        if several and not name:
            session = yield SessionCall("describe")
            for trajectory in session["trajectories"]:
                if trajectory["state"] == "open" and trajectory["interactions"]:
                    newest = trajectory["interactions"][-1]["interaction_id"]
                    yield SessionCall("reward", float(rewards[name]), newest)
        sealed = bool(answer["trajectory_ready"]) and not (several and name)
    if not sealed:
        yield SessionCall("end")
