"""Why an episode gave no trajectory, by who can act on it. None of them is a reward: a failure is no 0."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    UNREACHABLE = "unreachable"  # the gateway did not answer, or its engine is away
    REFUSED = "refused"  # a 4xx: the same request will not do better
    TIMEOUT = "timeout"  # the episode took longer than it may
    AGENT = "agent"  # the agent raised
    NO_INTERACTION = "no_interaction"  # the agent ended without calling the model
    REWARD = "reward"  # the reward raised, or gave no finite number
    REWARD_TIMEOUT = "reward_timeout"
    LOST = "lost"  # the service no longer has the session


_FINAL = frozenset((Kind.REFUSED,))


class EpisodeFailed(Exception):
    """``status``: what the service answered; 0 where it was not the service."""

    def __init__(self, kind: Kind, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.status = status

    @property
    def worth_retrying(self) -> bool:
        return self.kind not in _FINAL
