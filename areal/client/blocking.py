"""Blocking clients of the services. Each runs an async client on its own thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from areal.client.agent import AsyncAgentClient, AsyncAgentSession, Input
from areal.client.inference import AsyncGroup, AsyncInferenceClient, AsyncSession, AsyncWorkers, Message
from areal.client.loop_thread import LoopThread
from areal.dataclasses import dataclass, field
from areal.wire.agents import SessionSummary

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")


def blocking(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return the blocking form of an async method: it runs on ``self._async``, on the loop of ``self._thread``."""

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

    chat = blocking(AsyncSession.chat)
    reward = blocking(AsyncSession.reward)
    end = blocking(AsyncSession.end)
    export = blocking(AsyncSession.export)

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

    export = blocking(AsyncGroup.export)

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

    list = blocking(AsyncWorkers.list)
    pause = blocking(AsyncWorkers.pause)
    resume = blocking(AsyncWorkers.resume)
    release_memory = blocking(AsyncWorkers.release_memory)
    resume_memory = blocking(AsyncWorkers.resume_memory)
    set_version = blocking(AsyncWorkers.set_version)
    get_version = blocking(AsyncWorkers.get_version)
    versions = blocking(AsyncWorkers.versions)
    drain = blocking(AsyncWorkers.drain)
    undrain = blocking(AsyncWorkers.undrain)
    register_model = blocking(AsyncWorkers.register_model)
    deregister_model = blocking(AsyncWorkers.deregister_model)


class _Client:
    """Base of the blocking clients. Safe to use from several threads. Use it as ``with``, or close it."""

    def __init__(self, client: AsyncInferenceClient | AsyncAgentClient) -> None:
        self._async: Any = client
        self._thread = LoopThread("areal-client")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client. Calls in other threads are cancelled. Idempotent."""
        with contextlib.suppress(RuntimeError):
            self._thread.run(self._async.close())
        self._thread.close()


def _items(thread: LoopThread, items: Any) -> Iterator[Any]:
    while (item := thread.run(_coroutine(anext, items, None))) is not None:
        yield item


@contextlib.contextmanager
def _streamed(thread: LoopThread, context: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """Yield the items of the async iterator that ``context`` yields."""
    pieces = thread.run(_coroutine(context.__aenter__))
    try:
        yield _items(thread, pieces)
    finally:
        thread.run(_coroutine(context.__aexit__, None, None, None))


class InferenceClient(_Client):
    """The blocking form of AsyncInferenceClient, with its arguments. Thread-safe. Use it as ``with``, or close it."""

    def __init__(self, base_url: str, api_key: str | None = None, **options: Any) -> None:
        client = AsyncInferenceClient(base_url, api_key, **options)
        super().__init__(client)
        self.workers = Workers(self._thread, client.workers)

    models = blocking(AsyncInferenceClient.models)
    wait_ready = blocking(AsyncInferenceClient.wait_ready)
    chat = blocking(AsyncInferenceClient.chat)
    complete = blocking(AsyncInferenceClient.complete)
    set_reward = blocking(AsyncInferenceClient.set_reward)
    end_session = blocking(AsyncInferenceClient.end_session)
    session = blocking(AsyncInferenceClient.session)
    export = blocking(AsyncInferenceClient.export)
    acknowledge = blocking(AsyncInferenceClient.acknowledge)
    lend = blocking(AsyncInferenceClient.lend)
    acknowledge_leases = blocking(AsyncInferenceClient.acknowledge_leases)

    def start_group(self, task_id: str, group_size: int = 1, **options: Any) -> Group:
        return Group(self._thread, self._thread.run(self._async.start_group(task_id, group_size, **options)))

    def start_session(self, task_id: str, **options: Any) -> Session:
        return Session(self._thread, self._thread.run(self._async.start_session(task_id, **options)))

    def stream_chat(
        self, messages: Sequence[Message], **fields: Any
    ) -> contextlib.AbstractContextManager[Iterator[dict[str, Any]]]:
        """Yield the chunks of a streamed chat completion. Leaving the context ends the generation."""
        return _streamed(self._thread, self._async.stream_chat(messages, **fields))

    def sessions(self, page: int = 1000) -> Iterator[dict[str, Any]]:
        return _items(self._thread, self._async.sessions(page))


@dataclass(frozen=True)
class AgentSession:
    """The blocking form of AsyncAgentSession."""

    _thread: LoopThread = field(repr=False)
    _async: AsyncAgentSession

    respond = blocking(AsyncAgentSession.respond)
    show = blocking(AsyncAgentSession.show)
    cancel = blocking(AsyncAgentSession.cancel)
    reward = blocking(AsyncAgentSession.reward)
    export = blocking(AsyncAgentSession.export)
    acknowledge = blocking(AsyncAgentSession.acknowledge)
    close = blocking(AsyncAgentSession.close)

    @property
    def key(self) -> str:
        return self._async.key

    def stream(self, input: Input, **options: Any) -> contextlib.AbstractContextManager[Iterator[dict[str, Any]]]:
        """Yield the events of a turn. Leaving the context cancels the turn."""
        return _streamed(self._thread, self._async.stream(input, **options))


class AgentClient(_Client):
    """The blocking form of AsyncAgentClient, with its arguments. Thread-safe. Use it as ``with``, or close it."""

    def __init__(self, base_url: str, api_key: str | None = None, **options: Any) -> None:
        super().__init__(AsyncAgentClient(base_url, api_key, **options))

    def start_session(self, key: str | None = None, **options: Any) -> AgentSession:
        return AgentSession(self._thread, self._thread.run(self._async.start_session(key, **options)))

    def session(self, key: str) -> AgentSession:
        return AgentSession(self._thread, self._async.session(key))

    def sessions(self, page: int = 1000) -> Iterator[SessionSummary]:
        return _items(self._thread, self._async.sessions(page))


async def _coroutine(call: Callable[..., Any], *args: Any) -> Any:
    """Wrap a call that returns an awaitable other than a coroutine."""
    return await call(*args)
