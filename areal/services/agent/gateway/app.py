"""Construction of the agent gateway's process, and its HTTP routes for turns."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping

from areal.dataclasses import dataclass
from areal.http.client import HttpClient
from areal.http.headers import OVERHEAD
from areal.services.agent.gateway.openai import (
    CompletionAnswer,
    ResponsesAnswer,
    TurnAnswer,
    TurnBody,
    read_chat,
    read_responses,
)
from areal.services.agent.gateway.sessions import AgentSessionRoutes, AgentSessions, key_in_header, require_session_key
from areal.services.agent.gateway.sockets import SocketRoutes
from areal.services.agent.gateway.turns import Event, TurnCall, TurnDispatcher, TurnMetrics, new_run_id
from areal.services.http.auth import Access
from areal.services.http.errors import ApiError
from areal.services.http.messages import AnyResponse, Request, idempotency_key, read_object
from areal.services.http.process import ServeOptions
from areal.services.http.service import Handler, Service
from areal.services.inference.gateway.routing import LiveTable
from areal.services.inference.gateway.sessions import gateway_parts
from areal.wire.agents import StartAgentSession, TurnRequest
from areal.wire.bodies import IDEMPOTENCY_KEY
from areal.wire.processes import AgentGatewayConfig

ReadBody = Callable[[Mapping[str, object]], TurnBody]


@dataclass(eq=False)
class TurnRoutes:
    """The routes of the Responses and Chat Completions APIs; each request is one turn."""

    _table: LiveTable
    _sessions: AgentSessions
    _runner: TurnDispatcher

    def add_to(self, service: Service) -> None:
        for prefix in ("/v1", ""):
            responses, chat = self._turn(read_responses, ResponsesAnswer), self._turn(read_chat, CompletionAnswer)
            service.route("POST", f"{prefix}/responses", responses, Access.ADMIN)
            service.route("POST", f"{prefix}/chat/completions", chat, Access.ADMIN)

    def _turn(self, read: ReadBody, answers: type[TurnAnswer]) -> Handler:
        async def handle(request: Request) -> AnyResponse:
            data = await read_object(request, self._table.limits.max_body_bytes)
            inference = self._sessions.model_access(data)
            body = read(data)
            key = key_in_header(request.headers) or body.user
            turn = TurnRequest(
                message=body.message,
                run_id=new_run_id(),
                idempotency_key=require_session_key(idempotency_key(request.headers), key, IDEMPOTENCY_KEY),
                metadata=body.metadata,
                inference=inference,
                stream=body.stream,
            )
            if key is None:
                start = StartAgentSession(model=self._sessions.service, inference=inference)
                key = (await self._sessions.start(start, request.id)).key
            answer = answers(request, body, key, self._sessions.service)
            call = TurnCall(key, turn, request.id)

            async def sink(event: Event) -> None:
                answer.overhead(call.overhead_us)
                await answer.event(event)

            try:
                complete = await self._runner.run(call, sink)
            except ApiError as error:
                error.headers = {**error.headers, OVERHEAD: str(call.overhead_us)}
                raise
            answer.overhead(call.overhead_us)
            return await answer.end(complete)

        return handle


@contextlib.asynccontextmanager
async def agent_gateway(config: AgentGatewayConfig, options: ServeOptions) -> AsyncIterator[Service]:
    async with HttpClient() as http:
        parts = gateway_parts(config, options, http, "Turns waiting for a pair.", service=config.service)
        service, table, router = parts.service, parts.table, parts.router
        sessions = AgentSessions(config.service, table, router, parts.keys, config.inference)
        metrics = TurnMetrics(service.metrics)
        runner = TurnDispatcher(sessions, table, parts.follower, parts.admission, http, options.headers, metrics)
        session_routes = AgentSessionRoutes(sessions, parts.journals)
        TurnRoutes(table, sessions, runner).add_to(service)
        session_routes.add_to(service)
        SocketRoutes(table, sessions, session_routes, runner).add_to(service)
        service.route("GET", "/http_sd", router.lists_targets(service, "agent-gateway"), Access.METRICS)
        yield service
