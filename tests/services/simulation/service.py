"""A simulated service: router, gateway and replicas, each a process of ``SimulatedLoop`` with the code of the real one,
and commands as the reconciler gives them."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import random
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import orjson

from areal.http.client import CallFailed, HttpClient, HttpReply
from areal.services.agent.data_proxy.app import agent_data_proxy
from areal.services.agent.gateway.app import agent_gateway
from areal.services.http.auth import Access, AdminKey
from areal.services.http.messages import AnyResponse, Request, Response, read_object
from areal.services.http.process import ServeOptions
from areal.services.http.service import Service, json_response
from areal.services.inference.data_proxy import process as inference_proxy
from areal.services.inference.gateway.app import gateway
from areal.services.inference.router import app, prober, registry, sessions
from areal.services.inference.router.app import router
from areal.services.journal import keys, storage, store
from areal.services.journal.storage import Journal, JournalFolder
from areal.services.journal.store import JournalStore
from areal.wire.agents import EVENTS
from areal.wire.processes import (
    AgentDataProxyConfig,
    AgentGatewayConfig,
    DataProxyConfig,
    GatewayConfig,
    RegistrationConfig,
    RouterConfig,
)
from tests.services.simulation.loop import SimulatedCommits, SimulatedLoop, SimulatedProcess, current_process
from tests.services.tokenizer_folder import write_tokenizer

MODEL = "tiny"
RELAYS = ("relay-a", "relay-b")
KEY = AdminKey(b"key-of-the-simulated-service-000000000000")
_BURIAL_S = 60.0
_SHARED_MEMORY = Path("/dev/shm")


@cache
def tokenizer_path() -> str:
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return str(write_tokenizer(folder))


class SimulatedFolder(JournalFolder):
    """A folder whose lock ends with its process."""

    def __init__(self, path: Path, descriptor: int, left: bool = False) -> None:
        super().__init__(path, descriptor, left)
        current_process().locks.add(descriptor)

    @property
    def _is_held(self) -> bool:
        """Whether its process was not killed since."""
        return self.descriptor in current_process().locks

    def release(self) -> None:
        if self._is_held:
            current_process().locks.discard(self.descriptor)
            super().release()

    def leave(self) -> None:
        if self._is_held:
            super().leave()

    def remove(self) -> None:
        if self._is_held:
            super().remove()


class SimulatedStore(JournalStore[Journal]):
    """A store that its process knows."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        current_process().store = self


class SimulatedService:
    """``agents``: an agent service, else a model."""

    def __init__(self, *, agents: bool, seed: int = 0) -> None:
        self.agents = agents
        self._stack = contextlib.ExitStack()
        self.folder = Path(tempfile.mkdtemp(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None))
        self._stack.callback(shutil.rmtree, self.folder)
        self.loop = SimulatedLoop()
        self._enter_simulation(seed)
        self.client = SimulatedProcess(self.loop, "client")
        self.http = self._make_client()
        self.processes: list[SimulatedProcess] = []
        self.replicas: dict[str, SimulatedProcess] = {}
        self.routed: list[str] = []
        self._helper("worker" if agents else "engine")
        self.start_router()
        self.relays: dict[str, SimulatedProcess] = {}
        for name in RELAYS:
            self.start_relay(name)

    def _enter_simulation(self, seed: int) -> None:
        loop, dice = self.loop, random.Random(seed)
        clock = SimpleNamespace(
            monotonic=loop.time, sleep=loop.sleep, time=time.time, time_ns=time.time_ns, perf_counter=loop.time
        )
        connect = storage._connect

        def connect_here(*args: Any) -> Any:
            database = connect(*args)
            current_process().databases.append(database)
            return database

        for module in (registry, sessions, prober, app, storage):
            self._stack.enter_context(mock.patch.object(module, "time", clock))
        self._stack.enter_context(mock.patch.object(storage, "CommitThread", SimulatedCommits))
        self._stack.enter_context(mock.patch.object(storage, "JournalFolder", SimulatedFolder))
        self._stack.enter_context(mock.patch.object(storage, "_connect", connect_here))
        self._stack.enter_context(mock.patch.object(store, "JournalStore", SimulatedStore))
        chance = SimpleNamespace(
            token_bytes=dice.randbytes,
            token_hex=lambda size: dice.randbytes(size).hex(),
            token_urlsafe=secrets.token_urlsafe,
        )
        for module in (keys, registry):
            self._stack.enter_context(mock.patch.object(module, "secrets", chance))
        self._stack.enter_context(mock.patch.dict(os.environ))
        state = random.getstate()
        random.seed(seed)
        self._stack.callback(random.setstate, state)

    def _make_client(self) -> HttpClient:
        async def make() -> HttpClient:
            return HttpClient()

        return self.loop.run_until_complete(self.client.spawn(make()))

    def _start(self, name: str, build: Any, **environment: str) -> SimulatedProcess:
        process = SimulatedProcess(self.loop, name, build, environment)
        self.processes.append(process)
        return process

    @property
    def state_dir(self) -> Path:
        return self.folder / "journals"

    @property
    def router_file(self) -> Path:
        return self.folder / "routes.json"

    # What the processes run.

    def _helper(self, name: str) -> None:
        @contextlib.asynccontextmanager
        async def build() -> AsyncIterator[Service]:
            service = Service(name, key=KEY, loopback=True, details=lambda: {"keeps_sessions": False, "version": 0})
            if self.agents:
                service.route("POST", "/run", self._run_agent, Access.ADMIN)
            else:
                service.route("POST", "/generate", self._generate, Access.ADMIN)
                service.route("GET", "/get_version", self._version, Access.ADMIN)
            yield service

        self._start(name, build)

    async def _run_agent(self, request: Request) -> AnyResponse:
        """Answer with the number of turns before this one."""
        turn: dict[str, Any] = await read_object(request)
        await self._think(str(turn["message"]))
        summary = str(sum(message["role"] == "user" for message in turn["history"]))
        event = {"type": "complete", "summary": summary, "metadata": {}}
        return Response(body=orjson.dumps(event) + b"\n", content_type=EVENTS)

    async def _generate(self, request: Request) -> AnyResponse:
        body: dict[str, Any] = await read_object(request)
        await self._think("long" if len(body["input_ids"]) % 2 else "short")
        tokens = [64, 2]  # ends with <|im_end|>
        about = {"token_ids": tokens, "logprobs": [-0.5, -0.5], "versions": [0, 0], "top_logprobs": None}
        choice = {"index": 0, **about, "finish_reason": "stop", "stop_token_id": 2}
        return json_response({"choices": [choice], "prompt_tokens": len(body["input_ids"])})

    async def _version(self, request: Request) -> Response:
        return json_response({"version": 0})

    async def _think(self, message: str) -> None:
        await asyncio.sleep(5.0 if message.startswith("long") else 0.2)

    def _options(self) -> ServeOptions:
        return ServeOptions("127.0.0.1", 80, KEY, 60.0, "info")

    def start_router(self) -> None:
        config = RouterConfig(state_file=str(self.router_file))
        self.router = self._start("router", lambda: router(config, self._options()))

    def start_relay(self, name: str) -> None:
        if self.agents:
            agents = AgentGatewayConfig(router_url="http://router:80", service=MODEL)
            self.relays[name] = self._start(name, lambda: agent_gateway(agents, self._options()))
        else:
            config = GatewayConfig(router_url="http://router:80")
            self.relays[name] = self._start(name, lambda: gateway(config, self._options()))

    def start_replica(self, uid: str) -> None:
        registration = RegistrationConfig(router_file=str(self.router_file), worker_id=uid)
        common: dict[str, Any] = {"registration": registration, "state_dir": str(self.state_dir)}
        if self.agents:
            agents = AgentDataProxyConfig(service=MODEL, worker_url="http://worker:80", **common)
            process = self._start(uid, lambda: agent_data_proxy(agents, self._options()), AREAL_RUN_UID=uid)
        else:
            config = DataProxyConfig(
                model=MODEL, engine="embedded", engine_url="http://engine:80", tokenizer_path=tokenizer_path(), **common
            )
            process = self._start(uid, lambda: inference_proxy.data_proxy(config, self._options()), AREAL_RUN_UID=uid)
        self.replicas[uid] = process

    def kill(self, process: SimulatedProcess) -> None:
        process.kill()
        self.loop.run_for(0.01)  # its peers learn it

    # What the reconciler does.

    def command(self, path: str, body: dict[str, Any]) -> None:
        """Tell the router."""
        work = self.http.fetch(
            "POST", self.router.url, path, headers=KEY.bearer(), body=orjson.dumps(body), timeout_s=60.0
        )
        reply = self.loop.run_until_complete(self.client.spawn(work))
        assert reply.status in (200, 404), (path, reply.body)

    def add_replica(self, uid: str) -> None:
        self.start_replica(uid)
        self.route([*self.routed, uid])

    def route(self, uids: list[str]) -> None:
        self.routed = uids
        workers = [{"worker_id": uid, "worker_addr": f"http://{uid}:80"} for uid in uids]
        self.command("/register_model", {"model": MODEL, "workers": workers, "expected": len(uids)})

    def remove_replica(self, uid: str) -> None:
        """As a scale-down: drain, wait for running calls, unroute, stop."""
        self.command("/drain", {"worker_id": uid, "stopping": True})
        self.loop.run_for(0.3)
        for _ in range(300):
            reply = self.call("GET", "/health", None, base=f"http://{uid}:80")
            about = reply.object() if reply is not None else {}
            if not max(about.get("in_flight", 0), about.get("busy_sessions", 0)):
                break
            self.loop.run_for(0.1)
        self.route([each for each in self.routed if each != uid])
        self.replicas[uid].stop()
        process = self.replicas.pop(uid)
        for _ in range(700):
            if process.ended or process.killed:
                break
            self.loop.run_for(0.1)

    # What callers do.

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Any = None,
        *,
        base: str = "http://relay-a:80",
        timeout_s: float = 600.0,
    ) -> HttpReply | None:
        """None: the answer was lost."""
        data = b"" if body is None else orjson.dumps(body)
        more = {"Content-Type": "application/json", **KEY.bearer(), **(headers or {})}
        try:
            return await self.http.fetch(method, base, path, headers=more, body=data, timeout_s=timeout_s)
        except (CallFailed, TimeoutError):
            return None

    def call(self, *args: Any, **more: Any) -> HttpReply | None:
        return self.loop.run_until_complete(self.client.spawn(self.ask(*args, **more)))

    def close(self) -> None:
        """End every process."""
        for process in self.processes:
            process.kill()
        for process in [*self.processes, self.client]:
            process.bury()
        if tasks := asyncio.all_tasks(self.loop):
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=_BURIAL_S))
        self.loop.close()
        self._stack.close()
