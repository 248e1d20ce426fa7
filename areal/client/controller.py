"""``AgentController``: starts an agent service for a program, and runs episodes in it.

The controller starts the service with ``areal agent run`` and stops it with ``areal agent stop``, so that it is listed
and supervised like any other. Calls run on the event loop of one thread, with one connection pool: the controller can
be used from any event loop, from several at once, and from a notebook.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypedDict, TypeVar

from areal.client.agent import AsyncAgentClient, Input
from areal.client.blocking import blocking
from areal.client.command import address_lookup, free_port, read_key_file, run_areal
from areal.client.errors import ClientError, UnknownName
from areal.client.inference import AsyncInferenceClient, AsyncSession, Style
from areal.client.loop_thread import LoopThread
from areal.client.trajectories import Trajectories
from areal.errors import UsageFault
from areal.wire.agents import ModelAccess
from areal.wire.bodies import Rewarded

if TYPE_CHECKING:
    from areal.api.config.rollout import AgentServiceConfig

P = ParamSpec("P")
T = TypeVar("T")

_CLOSE_S = 10.0


class ControllerSession(TypedDict):
    """A started session. ``api_key``: of an RL session that the controller started, never of one of the service."""

    session_id: str
    inference_session_id: str | None
    api_key: str | None


class UnknownSession(UnknownName, KeyError):
    """The session key belongs to no session that this controller has started."""

    __str__ = UnknownName.__str__


class Episodes:
    """The asynchronous implementation of a controller's calls. It runs on the controller's thread."""

    def __init__(self, agents: AsyncAgentClient, config: AgentServiceConfig) -> None:
        self.agents = agents
        self._config = config
        self._sessions: dict[str, AsyncSession | None] = {}  # by key, the RL session if this controller started it
        self._inference: dict[tuple[str, str | None], AsyncInferenceClient] = {}

    async def start_session(
        self,
        task_id: str,
        *,
        inference_gateway_addr: str | None = None,
        inference_admin_api_key: str | None = None,
        inference_model: str | None = None,
        api_key: str | None = None,
    ) -> ControllerSession:
        """Start a session for one episode. The service starts its RL session. With ``inference_gateway_addr``, which
        must be the gateway that the service uses, it is started here, with the key ``api_key`` if one is given."""
        about = {"task_id": task_id}
        if inference_gateway_addr is None:
            if inference_admin_api_key or inference_model or api_key:
                raise UsageFault("inference_admin_api_key, inference_model and api_key need inference_gateway_addr")
            own = await self.agents.start_session(metadata=about)
            self._sessions[own.key] = None
            return {"session_id": own.key, "inference_session_id": own.inference_session_id, "api_key": None}
        place = (inference_gateway_addr, inference_admin_api_key)
        client = self._inference.get(place) or AsyncInferenceClient(*place, timeout_s=self._config.request_timeout)
        self._inference[place] = client
        recorded = await client.start_session(task_id, api_key=api_key, model=inference_model)
        access = ModelAccess(base_url=client.base_url, api_key=recorded.api_key, model=inference_model)
        try:
            session = await self.agents.start_session(metadata=about, inference=access)
        except BaseException:
            with contextlib.suppress(ClientError):
                await recorded.end()
            raise
        self._sessions[session.key] = recorded
        return {"session_id": session.key, "inference_session_id": recorded.session_id, "api_key": recorded.api_key}

    async def step(
        self, input: Input, session_id: str, *, metadata: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        """Run one turn and return its response. ``output`` has the agent's text and tool calls."""
        self._recorded(session_id)
        return await self.agents.session(session_id).respond(input, metadata=metadata)

    async def set_reward(self, reward: float, session_id: str, *, interaction_id: str | None = None) -> Rewarded:
        """Reward an interaction. Without ``interaction_id`` it is the last model call, and the trajectory is sealed."""
        session = self._recorded(session_id) or self.agents.session(session_id)
        return await session.reward(reward, interaction_id)

    async def export_trajectory(
        self,
        session_id: str,
        *,
        trajectory_id: int | None = None,
        discount: float | None = None,
        style: Style | None = None,
        reward: float | None = None,
    ) -> Trajectories:
        """Return the training rows of a session, and acknowledge them: each row is delivered once. ``discount`` and
        ``style`` default to ``turn_discount`` and ``export_style`` of the configuration. ``reward``: set as by
        ``set_reward``, in the same call."""
        recorded, agent = self._recorded(session_id), self.agents.session(session_id)
        rows = await (recorded or agent).export(
            trajectory_id=trajectory_id,
            discount=self._config.turn_discount if discount is None else discount,
            style=style or self._config.export_style,
            reward=reward,
        )
        with contextlib.suppress(ClientError):  # the rows are here; an unacknowledged export expires
            await (recorded.client if recorded is not None else agent).acknowledge(rows)
        return rows

    async def close_session(self, session_id: str) -> None:
        """Close the session, which may have expired, and end its RL session if this controller started that."""
        recorded = self._recorded(session_id)
        with contextlib.suppress(UnknownName):
            await self.agents.session(session_id).close()
        del self._sessions[session_id]
        if recorded is not None:
            await recorded.end()

    def _recorded(self, session_id: str) -> AsyncSession | None:
        """Return the RL session that this controller started for the session, if any. Raises UnknownSession."""
        if session_id not in self._sessions:
            raise UnknownSession("this controller has started no such session", param="session_id")
        return self._sessions[session_id]

    async def close(self) -> None:
        """Close the sessions that this controller started, and the clients."""
        closing = (self.close_session(key) for key in list(self._sessions))
        with contextlib.suppress(TimeoutError):  # they expire
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*closing, return_exceptions=True)
        await self.agents.close()
        for client in self._inference.values():
            await client.close()


def run_flags(config: AgentServiceConfig, key_file: str = "") -> list[str]:
    """Return the configuration as flags of ``areal agent run``."""
    agent = config.agent_cls_path
    if ":" not in agent:  # a.b.Class, as AReaL writes it
        agent = ":".join(agent.rsplit(".", 1))
    given = {
        "--agent": agent,
        "--pairs": str(config.num_pairs),
        "--inf": config.inference,
        "--model": config.model,
        "--setup-timeout": f"{config.setup_timeout}s",
        "--health-poll-interval": f"{config.health_poll_interval}s",
        "--drain-timeout": f"{config.drain_timeout}s",
        "--session-timeout": f"{config.session_timeout}s",
        "--log-level": config.log_level,
        "--admin-api-key-file": key_file,
    }
    words = [word for flag, value in given.items() if value for word in (flag, value)]
    return [*words, *(word for name, value in config.env.items() for word in ("--env", f"{name}={value}"))]


class _Controller:
    """Starts, scales and stops the service. Use it as a context manager, or call ``initialize`` and ``destroy``."""

    def __init__(self, config: AgentServiceConfig) -> None:
        self.config = config
        self.num_pairs = 0
        self._service = ""
        self._thread: LoopThread | None = None
        self._opened = contextlib.ExitStack()
        self._calls: Episodes | None = None
        self._changing = threading.RLock()

    @property
    def gateway_addr(self) -> str:
        """The service's address, as far as it is known; "" before ``initialize``."""
        return self._calls.agents.base_url if self._calls is not None else ""

    def __enter__(self) -> Self:
        self.initialize()
        return self

    def __exit__(self, *error: object) -> None:
        self.destroy()

    async def __aenter__(self) -> Self:
        cancelled = threading.Event()

        def start() -> None:
            with self._changing:
                if not cancelled.is_set():
                    self.initialize()

        try:
            await asyncio.to_thread(start)
        except asyncio.CancelledError:  # its thread goes on
            cancelled.set()
            asyncio.get_running_loop().run_in_executor(None, self.destroy)
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.destroy)

    def initialize(self, *_: Any, **__: Any) -> None:
        """Start the service and wait until it is ready. Arguments are ignored; drivers pass those of their servers.
        Raises ArealError as ``areal agent run`` does, and UsageFault if a service of this name exists."""
        with self._changing:
            if self._calls is not None:
                return
            try:
                address, key = self._attach() if self.config.gateway_addr else self._start()
                lookup = address_lookup(f"agentservice/{self._service}" if self._service else "")
                client = AsyncAgentClient(address, key, timeout_s=self.config.request_timeout, lookup=lookup)
                thread = LoopThread("areal-agents")
                self._opened.callback(thread.close)
                calls = Episodes(client, self.config)
                self._opened.callback(lambda: thread.run(calls.close()))
                self._thread, self._calls = thread, calls
            except BaseException:
                self.destroy()
                raise

    def _attach(self) -> tuple[str, str | None]:
        config = self.config
        if config.admin_api_key or not config.admin_api_key_file:
            return config.gateway_addr, config.admin_api_key or None
        return config.gateway_addr, read_key_file(config.admin_api_key_file)

    def _start(self) -> tuple[str, str]:
        """Start the service. Returns its address and key."""
        config = self.config
        if not config.agent_cls_path:
            raise UsageFault("nothing says which agent runs", hint="AgentServiceConfig(agent_cls_path='module:Class')")
        self._service = config.service or f"agents-{secrets.token_hex(4)}"
        if config.service and run_areal("get", f"agentservice/{config.service}", what=config.service, absent=True):
            hint = "gateway_addr and admin_api_key_file use it as it is; areal agent stop --service NAME deletes it"
            raise UsageFault(f"the agent service {config.service} is there already, and not ours to change", hint=hint)
        flags = run_flags(config, self._key_file())
        self._opened.callback(self._areal, "stop", "--yes", absent=True)
        self._areal("run", "-d", "--port", str(free_port()), *flags)
        about = json.loads(self._areal("status", "-o", "json"))
        self.num_pairs = config.num_pairs
        return about["address"], Path(about["keyFile"]).read_text("utf-8").strip()

    def _key_file(self) -> str:
        """Return the file of the configured admin key; "" lets the service generate a key."""
        if not self.config.admin_api_key:
            return self.config.admin_api_key_file
        folder = Path(tempfile.mkdtemp(prefix="areal-agents-"))  # 0700
        self._opened.push(lambda *_: shutil.rmtree(folder, ignore_errors=True))
        file = folder / "admin.key"
        file.touch(mode=0o600)
        file.write_text(self.config.admin_api_key)
        return str(file)

    def _areal(self, verb: str, *words: str, absent: bool = False) -> str:
        what = f"the agent service {self._service}"
        return run_areal("agent", verb, "--service", self._service, *words, what=what, absent=absent)

    def destroy(self) -> None:
        """Stop the service if this controller started it, else close the sessions that it started. Idempotent."""
        with self._changing:
            self._calls = self._thread = None
            self.num_pairs = 0
            self._opened.close()

    def scale_up(self, count: int = 1) -> list[int]:
        """Add ``count`` pairs and return their numbers."""
        return self._scale("scaleup", count, self.num_pairs + count)

    def scale_down(self, count: int = 1) -> list[int]:
        """Remove ``count`` pairs and return their numbers. Their turns end, and their sessions move to other pairs."""
        return self._scale("scaledown", count, self.num_pairs - count)

    def _scale(self, verb: str, count: int, wanted: int) -> list[int]:
        if not self._service or self._calls is None:
            raise UsageFault("no service was started here: its pairs are not ours to change")
        if count < 1 or wanted < 0:
            raise UsageFault(f"{count} of {self.num_pairs} pairs: there is no such change")
        self._areal(verb, "--pairs", str(wanted))
        before, self.num_pairs = self.num_pairs, wanted
        return list(range(before, wanted)) or list(range(before - 1, wanted - 1, -1))

    @property
    def _async(self) -> Episodes:
        if self._calls is None:
            raise RuntimeError("the controller is not initialized")
        return self._calls


def _awaited(
    method: Callable[Concatenate[Episodes, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Controller, P], Coroutine[Any, Any, T]]:
    """Return a controller's method: ``method`` on the controller's thread, awaited on the caller's loop."""

    @wraps(method)
    async def call(self: _Controller, /, *args: P.args, **kwargs: P.kwargs) -> T:
        calls = self._async
        assert self._thread is not None
        return await asyncio.wrap_future(self._thread.start(method(calls, *args, **kwargs)))

    return call


class AgentController(_Controller):
    """An agent service for a program. Its methods are coroutines and work on any event loop; those of
    ``BlockingAgentController`` block. Use it by ``with``, ``async with``, or ``initialize`` and ``destroy``."""

    start_session = _awaited(Episodes.start_session)
    step = _awaited(Episodes.step)
    set_reward = _awaited(Episodes.set_reward)
    export_trajectory = _awaited(Episodes.export_trajectory)
    close_session = _awaited(Episodes.close_session)


class BlockingAgentController(_Controller):
    """The blocking form of AgentController."""

    start_session = blocking(Episodes.start_session)
    step = blocking(Episodes.step)
    set_reward = blocking(Episodes.set_reward)
    export_trajectory = blocking(Episodes.export_trajectory)
    close_session = blocking(Episodes.close_session)
