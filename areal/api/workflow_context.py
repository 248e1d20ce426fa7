"""The episode of the calling code. Each episode is an asyncio task with its own context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class EpisodeContext:
    """The running episode. ``task_id`` is None outside of episodes."""

    task_id: str | None = None
    is_eval: bool = False


_NONE = EpisodeContext()
_current: ContextVar[EpisodeContext] = ContextVar("areal_episode", default=_NONE)


def get() -> EpisodeContext:
    return _current.get()


def stat_scope() -> str:
    """The name of the metrics tracker of the episode: evaluation has its own."""
    return "eval-rollout" if get().is_eval else "rollout"


@contextmanager
def episode(context: EpisodeContext) -> Iterator[None]:
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
