"""The routes and the process of an agent worker (see ``areal.services.agent.worker``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from areal.api.agent import AgentRequest, Tool
from areal.client.errors import Blame
from areal.errors import UsageFault
from areal.http import tracing
from areal.installation import install_command
from areal.rollout.failures import cause_of
from areal.services.agent.worker.agent_loop import AgentLoop, is_own_code, place_of
from areal.services.agent.worker.agents import (
    AgentAdapter,
    abandoned_threads,
    is_openai_agent,
    make_agent,
    openai_agent,
)
from areal.services.agent.worker.command import command_agent
from areal.services.agent.worker.turn import AgentFailed, WorkerTurn
from areal.services.http.auth import Access
from areal.services.http.errors import ApiError, bad_request
from areal.services.http.messages import AnyResponse, Request, Response, StreamingResponse, read_body
from areal.services.http.process import ServeOptions
from areal.services.http.service import Service, json_response
from areal.services.http.tasks import background, until_beat
from areal.wire.agents import EVENTS, Failure, WorkerRun, is_session_key
from areal.wire.processes import AgentWorkerConfig
from areal.wire.stage import report_stage

_CANCEL_S = 3.0  # for cancelled turns to end
_CLOSE_S = 10.0
_LATE_S = 5.0  # the time that a turn may continue after it was cancelled
_MOST_LATE = 8
_AT_START = dict(os.environ)
_log = logging.getLogger(__name__)


class WorkerRoutes:
    """The routes of an agent worker, and its running turns."""

    def __init__(self, config: AgentWorkerConfig, loop: AgentLoop, agent: AgentAdapter, service: Service) -> None:
        self._limit = config.max_body_bytes
        self._loop = loop
        self._agent = agent
        self.turns: dict[asyncio.Task[Any], WorkerTurn] = {}  # including cancelled turns that have not ended
        self._turns = service.metrics.counter("areal_agent_turns_total", "Turns that ended, by how.", ("outcome",))
        self._seconds = service.metrics.histogram("areal_agent_turn_seconds", "Of one turn.", labels=())
        service.route("POST", "/run", self.run, Access.INFERENCE)
        service.route("POST", "/session/{key}/close", self.close_session, Access.ADMIN)

    async def run(self, request: Request) -> AnyResponse:
        """Run a turn and answer with its events. The turn is cancelled when its caller disconnects."""
        order = await read_body(request, WorkerRun, self._limit)
        turn, out = WorkerTurn(self._limit), StreamingResponse(headers={"Content-Type": EVENTS})
        started = time.monotonic()
        running = self._loop.start(self._turn(order, turn))
        try:
            lines, last = await turn.take()
            if last:
                return Response(body=lines, content_type=EVENTS)
            out.begin(request, lines)
            while not last:
                lines, last = await turn.take()
                await out.write(lines)
        except BaseException:
            turn.cancel()
            running.cancel()
            _log.info("turn %s is cancelled: its caller left", order.run_id)
            raise
        finally:
            self._turns.labels(turn.outcome or "cancelled").inc()
            self._seconds.observe(time.monotonic() - started)
        return out

    async def close_session(self, request: Request) -> Response:
        key = request.match_info["key"]
        if not is_session_key(key):
            raise bad_request("this is no session key", param="key")
        try:
            await self._loop.run(asyncio.wait_for(self._agent.close_session(key), _CLOSE_S))
        except Exception as error:  # the boundary to user code
            _log.exception("close_session of the agent failed")
            raise ApiError(500, f"close_session: {_error_line(error)}", code="agent_failed") from error
        return json_response({"status": "ok"})

    async def _turn(self, order: WorkerRun, turn: WorkerTurn) -> None:
        """Run a turn on the agent's loop. The turn gets its last event whatever the agent raises."""
        task = asyncio.current_task()
        assert task is not None
        task.set_name(f"turn {order.run_id}")
        self.turns[task] = turn
        history, metadata = [dict(message) for message in order.history], dict(order.metadata)
        try:
            with tracing.span("invoke_agent", {"gen_ai.operation.name": "invoke_agent", "areal.run_id": order.run_id}):
                request = AgentRequest(
                    order.message, order.session_key, order.run_id, history, order.queue_mode, metadata
                )
                await turn.complete(await self._agent.run(request, turn))
        except BaseException as error:  # noqa: BLE001 - the boundary to user code
            if not turn.cancelled:
                _log.warning("turn %s failed", order.run_id, exc_info=error)
                turn.fail(*_failure(error))
        finally:
            del self.turns[task]

    @property
    def is_stuck(self) -> bool:
        """Whether the loop is blocked by a turn that was cancelled over ``_LATE_S`` ago, or, if something other than a
        turn blocks it, whether all turns were cancelled that long ago."""
        turn = self.turns.get(task) if (task := self._loop.current_task) is not None else None
        suspects = [turn] if turn is not None else list(self.turns.values())
        return (
            bool(suspects) and self._loop.blocked is not None and all(each.cancelled_for > _LATE_S for each in suspects)
        )

    async def close(self) -> None:
        """Close the agent, once all turns have ended or ``_CANCEL_S`` has passed. Call it on the agent's loop."""
        if self.turns:
            await asyncio.wait(self.turns, timeout=_CANCEL_S)
        await asyncio.wait_for(self._agent.close_all_sessions(), _CLOSE_S)


def _failure(error: BaseException) -> tuple[Failure, str]:
    """Return the kind of a failure (``infra`` or ``agent``), and its message."""
    try:
        failure: Failure = "infra" if cause_of(error).blame in (Blame.SERVICE, Blame.INFRASTRUCTURE) else "agent"
        return failure, _error_line(error)
    except BaseException as worse:  # noqa: BLE001 - the boundary to user code: the error's __str__
        return "agent", f"{type(error).__name__}, whose text cannot be had: {type(worse).__name__}"


def _error_line(error: BaseException) -> str:
    """Return the message of an error (of a group, of its first), with the innermost line of the agent's code."""
    frames = traceback.extract_tb(error.__traceback__)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
        frames += traceback.extract_tb(error.__traceback__)
    text = str(error) if isinstance(error, AgentFailed) else f"{type(error).__name__}: {error}".removesuffix(": ")
    own = [each for each in frames if is_own_code(each.filename)]
    return f"{text} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else text


@contextlib.asynccontextmanager
async def agent_worker(config: AgentWorkerConfig, options: ServeOptions, found: Any) -> AsyncIterator[Service]:
    """Yield the worker's service. ``found``: the object that ``config.agent`` names, None for a command."""
    loop, resources = AgentLoop(), contextlib.AsyncExitStack()
    service = Service(
        "worker",
        key=options.key,
        loopback=options.loopback,
        not_ready=lambda: loop.blocked,
        details=lambda: {
            "agent": config.agent or list(config.command),
            "form": agent.form,
            "turns": len(routes.turns),
            "keeps_sessions": agent.keeps_sessions,
        },
    )
    service.add_lifespan(lambda: background("late-turns", lambda: _watch_turns(routes, loop)))
    async with loop.opened(service.metrics):
        report_stage(f"making the agent {config.agent or config.command[0]}")
        agent = await loop.run(resources.enter_async_context(_made(config, found)))
        routes = WorkerRoutes(config, loop, agent, service)
        _log.info("the agent is %s (%s)", config.agent or " ".join(config.command), agent.form)
        try:
            yield service
        finally:
            for end in (routes.close(), resources.aclose()):
                try:
                    await loop.run(end)
                except Exception:  # noqa: BLE001 - the boundary to user code: the worker ends all the same
                    _log.exception("the agent does not close well")


restart_wanted = threading.Event()


async def _watch_turns(routes: WorkerRoutes, loop: AgentLoop) -> None:
    """Restart the process if the agent does not end a cancelled turn: at once if it blocks the loop, since no other
    turn makes progress either; for threads, once no turn runs or ``_MOST_LATE`` threads are late."""
    while not restart_wanted.is_set():
        await asyncio.sleep(until_beat(1.0))
        if routes.is_stuck:
            _log.error("a cancelled turn goes on; the worker restarts: %s", loop.blocked)
            restart()
        late = late_threads()
        if late and (not routes.turns or len(late) >= _MOST_LATE):
            where = "; ".join(map(place_of, late[:_MOST_LATE]))
            _log.error("%d cancelled plain functions go on; the worker restarts: %s", len(late), where)
            restart_wanted.set()
            os.kill(os.getpid(), signal.SIGTERM)


def restart() -> None:
    """Replace the process image under the same process id, so that the supervisor does not count a failure."""
    os.execve(sys.executable, sys.orig_argv, _AT_START)


def late_threads() -> list[threading.Thread]:
    """Return the threads of turns that were cancelled over ``_LATE_S`` ago."""
    for thread in [each for each in abandoned_threads if not each.is_alive()]:
        del abandoned_threads[thread]
    return [thread for thread, since in abandoned_threads.items() if time.monotonic() - since > _LATE_S]


def _connected(config: AgentWorkerConfig) -> AbstractAsyncContextManager[list[Tool]]:
    try:
        from areal.services.agent.worker.tools import mcp_tools
    except ModuleNotFoundError as error:
        raise UsageFault("tools: the package mcp is not installed", hint=install_command("agents")) from error
    return mcp_tools(config.tools, config.connect_timeout)


@contextlib.asynccontextmanager
async def _made(config: AgentWorkerConfig, found: Any) -> AsyncIterator[AgentAdapter]:
    """Construct the agent and connect its tools. Enter it on the agent's loop."""
    if config.agent is None:
        yield command_agent(config.command, config.tools)
        return
    async with _connected(config) if config.tools else contextlib.nullcontext() as tools:
        if is_openai_agent(found):
            yield openai_agent(found, config.kwargs or {}, tools)
        else:
            yield make_agent(config.agent, found, config.kwargs or {}, tools)
