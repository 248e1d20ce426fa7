"""The inference service over HTTP, blocking: the async client on a thread of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from areal.client.inference import AsyncGroup, AsyncInferenceClient, AsyncSession, AsyncWorkers, Message
from areal.client.loop_thread import LoopThread

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")


def _blocking(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """The same method of the blocking form, whose ``_thread`` runs it on the object that ``_async`` is."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        thread: LoopThread = self._thread
        return thread.run(method(self._async, *args, **kwargs))

    return call


@dataclass(frozen=True)
class Session:
    """The blocking form of AsyncSession."""

    _thread: LoopThread = field(repr=False)
    _async: AsyncSession

    chat = _blocking(AsyncSession.chat)
    reward = _blocking(AsyncSession.reward)
    end = _blocking(AsyncSession.end)
    export = _blocking(AsyncSession.export)

    @property
    def session_id(self) -> str:
        return self._async.session_id

    @property
    def api_key(self) -> str:
        return self._async.api_key


@dataclass(frozen=True)
class Group:
    """The blocking form of AsyncGroup."""

    _thread: LoopThread = field(repr=False)
    _async: AsyncGroup

    export = _blocking(AsyncGroup.export)

    @property
    def group_id(self) -> str:
        return self._async.group_id

    @property
    def sessions(self) -> tuple[Session, ...]:
        return tuple(Session(self._thread, each) for each in self._async.sessions)


@dataclass(frozen=True)
class Workers:
    """The blocking form of AsyncWorkers."""

    _thread: LoopThread = field(repr=False)
    _async: AsyncWorkers

    list = _blocking(AsyncWorkers.list)
    pause = _blocking(AsyncWorkers.pause)
    resume = _blocking(AsyncWorkers.resume)
    release_memory = _blocking(AsyncWorkers.release_memory)
    resume_memory = _blocking(AsyncWorkers.resume_memory)
    set_version = _blocking(AsyncWorkers.set_version)
    get_version = _blocking(AsyncWorkers.get_version)
    versions = _blocking(AsyncWorkers.versions)
    drain = _blocking(AsyncWorkers.drain)
    undrain = _blocking(AsyncWorkers.undrain)
    register_model = _blocking(AsyncWorkers.register_model)
    deregister_model = _blocking(AsyncWorkers.deregister_model)


class InferenceClient:
    """The blocking form of AsyncInferenceClient, with its arguments. Safe to use from several threads. Use it as
    ``with``, or close it."""

    def __init__(self, base_url: str, api_key: str | None = None, **options: Any) -> None:
        self._async = AsyncInferenceClient(base_url, api_key, **options)
        self._thread = LoopThread("areal-client")
        self.workers = Workers(self._thread, self._async.workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent. Calls in other threads are cancelled."""
        with contextlib.suppress(RuntimeError):
            self._thread.run(self._async.close())
        self._thread.close()

    models = _blocking(AsyncInferenceClient.models)
    wait_ready = _blocking(AsyncInferenceClient.wait_ready)
    chat = _blocking(AsyncInferenceClient.chat)
    complete = _blocking(AsyncInferenceClient.complete)
    set_reward = _blocking(AsyncInferenceClient.set_reward)
    end_session = _blocking(AsyncInferenceClient.end_session)
    session = _blocking(AsyncInferenceClient.session)
    export = _blocking(AsyncInferenceClient.export)
    acknowledge = _blocking(AsyncInferenceClient.acknowledge)
    lend = _blocking(AsyncInferenceClient.lend)
    acknowledge_leases = _blocking(AsyncInferenceClient.acknowledge_leases)

    def start_group(self, task_id: str, group_size: int = 1, **options: Any) -> Group:
        return Group(self._thread, self._thread.run(self._async.start_group(task_id, group_size, **options)))

    def start_session(self, task_id: str, **options: Any) -> Session:
        return Session(self._thread, self._thread.run(self._async.start_session(task_id, **options)))

    @contextlib.contextmanager
    def stream_chat(self, messages: Sequence[Message], **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """Chunks while they come. Leaving the context ends the generation."""
        context = self._async.stream_chat(messages, **fields)
        chunks = self._thread.run(_coroutine(context.__aenter__))
        try:
            yield self._items(chunks)
        finally:
            self._thread.run(_coroutine(context.__aexit__, None, None, None))

    def sessions(self, page: int = 1000) -> Iterator[dict[str, Any]]:
        return self._items(self._async.sessions(page))

    def _items(self, items: Any) -> Iterator[dict[str, Any]]:
        while (item := self._thread.run(_coroutine(anext, items, None))) is not None:
            yield item


async def _coroutine(call: Callable[..., Any], *args: Any) -> Any:
    """Make a coroutine of a call whose result is merely awaitable."""
    return await call(*args)
