"""The inference service over HTTP, blocking: the async client on a thread of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from areal.client.inference import ALL, AsyncGroup, AsyncInferenceClient, AsyncSession, AsyncWorkers, Message, Rewarded
from areal.client.loop_thread import LoopThread
from areal.client.trajectories import Lease, Trajectories


@dataclass(frozen=True)
class Session:
    """The blocking form of AsyncSession."""

    _thread: LoopThread = field(repr=False)
    _session: AsyncSession

    @property
    def session_id(self) -> str:
        return self._session.session_id

    @property
    def api_key(self) -> str:
        return self._session.api_key

    def chat(self, messages: Sequence[Message], **fields: Any) -> dict[str, Any]:
        return self._thread.run(self._session.chat(messages, **fields))

    def reward(self, value: float, interaction_id: str | None = None) -> Rewarded:
        return self._thread.run(self._session.reward(value, interaction_id))

    def end(self) -> list[int]:
        return self._thread.run(self._session.end())

    def export(self, **options: Any) -> Trajectories:
        return self._thread.run(self._session.export(**options))


@dataclass(frozen=True)
class Group:
    """The blocking form of AsyncGroup."""

    _thread: LoopThread = field(repr=False)
    _group: AsyncGroup

    @property
    def group_id(self) -> str:
        return self._group.group_id

    @property
    def sessions(self) -> tuple[Session, ...]:
        return tuple(Session(self._thread, each) for each in self._group.sessions)

    def export(self, **options: Any) -> Trajectories:
        return self._thread.run(self._group.export(**options))


class Workers:
    """The blocking form of AsyncWorkers."""

    def __init__(self, thread: LoopThread, workers: AsyncWorkers) -> None:
        self._thread = thread
        self._workers = workers

    def list(self) -> list[dict[str, Any]]:
        return self._thread.run(self._workers.list())

    def pause(self, worker: str = ALL) -> None:
        self._thread.run(self._workers.pause(worker))

    def resume(self, worker: str = ALL) -> None:
        self._thread.run(self._workers.resume(worker))

    def release_memory(self, worker: str = ALL) -> None:
        self._thread.run(self._workers.release_memory(worker))

    def resume_memory(self, worker: str = ALL) -> None:
        self._thread.run(self._workers.resume_memory(worker))

    def set_version(self, version: int, worker: str = ALL, *, force: bool = False) -> None:
        self._thread.run(self._workers.set_version(version, worker, force=force))

    def get_version(self, worker: str = ALL) -> int | None:
        return self._thread.run(self._workers.get_version(worker))

    def drain(self, worker: str = ALL) -> None:
        self._thread.run(self._workers.drain(worker))

    def undrain(self, worker: str = ALL) -> None:
        self._thread.run(self._workers.undrain(worker))

    def register_model(self, model: str, data_proxy_addrs: Sequence[str]) -> None:
        self._thread.run(self._workers.register_model(model, data_proxy_addrs))

    def deregister_model(self, model: str) -> None:
        self._thread.run(self._workers.deregister_model(model))


class InferenceClient:
    """The blocking form of AsyncInferenceClient, with its arguments. Safe to use from several threads. Use it as
    ``with``, or close it."""

    def __init__(self, base_url: str, api_key: str | None = None, **options: Any) -> None:
        self._client = AsyncInferenceClient(base_url, api_key, **options)
        self._thread = LoopThread("areal-client")
        self.workers = Workers(self._thread, self._client.workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent. Calls in other threads are cancelled."""
        with contextlib.suppress(RuntimeError):
            self._thread.run(self._client.close())
        self._thread.close()

    def models(self) -> list[str]:
        return self._thread.run(self._client.models())

    def wait_ready(self, timeout_s: float = 300.0) -> None:
        self._thread.run(self._client.wait_ready(timeout_s))

    def chat(self, messages: Sequence[Message], **fields: Any) -> dict[str, Any]:
        return self._thread.run(self._client.chat(messages, **fields))

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> dict[str, Any]:
        return self._thread.run(self._client.complete(prompt, **fields))

    @contextlib.contextmanager
    def stream_chat(self, messages: Sequence[Message], **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """Chunks while they come. Leaving the context ends the generation."""
        context = self._client.stream_chat(messages, **fields)
        chunks = self._thread.run(_entered(context))
        try:
            yield self._pieces(chunks)
        finally:
            self._thread.run(_left(context))

    def _pieces(self, chunks: Any) -> Iterator[dict[str, Any]]:
        while (chunk := self._thread.run(_next(chunks))) is not None:
            yield chunk

    def start_group(self, task_id: str, group_size: int = 1, **options: Any) -> Group:
        return Group(self._thread, self._thread.run(self._client.start_group(task_id, group_size, **options)))

    def start_session(self, task_id: str, **options: Any) -> Session:
        return Session(self._thread, self._thread.run(self._client.start_session(task_id, **options)))

    def set_reward(self, reward: float, **options: Any) -> Rewarded:
        return self._thread.run(self._client.set_reward(reward, **options))

    def end_session(self, **options: Any) -> list[int]:
        return self._thread.run(self._client.end_session(**options))

    def sessions(self, page: int = 1000) -> Iterator[dict[str, Any]]:
        sessions = self._client.sessions(page)
        return self._pieces(sessions)

    def session(self, session_id: str) -> dict[str, Any]:
        return self._thread.run(self._client.session(session_id))

    def export(self, session_ids: Sequence[str], **options: Any) -> Trajectories:
        return self._thread.run(self._client.export(session_ids, **options))

    def acknowledge(self, export: Trajectories | str) -> None:
        self._thread.run(self._client.acknowledge(export))

    def lend(self, limit: int = 1, wait_s: float = 0.0, kind: Literal["tokens", "text"] | None = None) -> list[Lease]:
        return self._thread.run(self._client.lend(limit, wait_s, kind))

    def acknowledge_leases(self, leases: Sequence[Lease]) -> None:
        self._thread.run(self._client.acknowledge_leases(leases))


async def _entered(context: contextlib.AbstractAsyncContextManager[Any]) -> Any:
    return await context.__aenter__()


async def _left(context: contextlib.AbstractAsyncContextManager[Any]) -> None:
    await context.__aexit__(None, None, None)


async def _next(chunks: Any) -> dict[str, Any] | None:
    return await anext(chunks, None)
