"""The episode that the calling code belongs to. Each episode is an asyncio task with its own context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EpisodeContext:
    """The running episode. ``task_id`` is None outside of one. ``http_client`` returns the one that all share."""

    task_id: str | None = None
    is_eval: bool = False
    http_client: Callable[[], Any] | None = None


_NONE = EpisodeContext()
_current: ContextVar[EpisodeContext] = ContextVar("areal_episode", default=_NONE)


def get() -> EpisodeContext:
    return _current.get()


def stat_scope() -> str:
    """Return the name of the metrics tracker of the episode: evaluation has its own."""
    return "eval-rollout" if get().is_eval else "rollout"


async def get_httpx_client() -> Any:
    """Return the ``httpx.AsyncClient`` that episodes share, for clients such as
    ``openai.AsyncOpenAI(http_client=...)``; its owner closes it. Raises RuntimeError outside of episodes."""
    if (client := get().http_client) is None:
        raise RuntimeError("the HTTP client of episodes is only available in an episode")
    return client()


@contextmanager
def episode(context: EpisodeContext) -> Iterator[None]:
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
