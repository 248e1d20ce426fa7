"""The data proxy of an agent service: its routes for sessions and turns (``areal.wire.agents``), and its process."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
from collections.abc import AsyncIterator, Mapping
from urllib.parse import quote

import orjson

from areal.dataclasses import dataclass
from areal.http import headers as names
from areal.http.client import HttpClient
from areal.services.agent.data_proxy.inference import CallNames, RlSessions
from areal.services.agent.data_proxy.journal import (
    AgentJournal,
    RlSession,
    SessionEntry,
    TurnEntry,
    TurnRequestKey,
    open_agent_journal,
)
from areal.services.agent.data_proxy.turns import SessionTurn, TurnCaller, TurnMessage, TurnRunner
from areal.services.agent.data_proxy.worker import PairWorker, TurnFailed, event_line, recorded_events
from areal.services.http.auth import Access
from areal.services.http.errors import ApiError, bad_request
from areal.services.http.lease import RouterLease
from areal.services.http.messages import AnyResponse, Request, Response, query_int, read_body
from areal.services.http.process import ServeOptions, save_settings
from areal.services.http.service import Service, json_response, to_response
from areal.services.http.tasks import background, uninterrupted, until_beat
from areal.services.journal.keys import key_digest, request_digest, tag_of_key
from areal.services.journal.storage import held_elsewhere
from areal.services.journal.store import JournalRoutes, JournalStore, serve_journals, store_details
from areal.wire import agents
from areal.wire.processes import AgentDataProxyConfig

_log = logging.getLogger(__name__)
_BODY_BYTES = 1024 * 1024
_PAGE = 100
_EXPIRY_S = 1.0
_EXPIRED_AT_ONCE = 64
_ACCEPTED_S = 0.01  # `accepted` is held for this time, to be sent together with the first event
_RESERVED = "areal_inference"


@dataclass(eq=False)
class PairRoutes:
    """The routes of one data proxy, and the expiry of its idle sessions."""

    _config: AgentDataProxyConfig
    _store: JournalStore[AgentJournal]
    _runner: TurnRunner
    _worker: PairWorker
    _rl: RlSessions

    def __post_init__(self) -> None:
        self._idle_timeout = self._config.idle_timeout

    def add_to(self, service: Service) -> None:
        counter = service.metrics.counter
        self._started = counter("areal_sessions_started_total", "Sessions started.")
        self._rewards = counter("areal_rewards_total", "Rewards accepted.")
        service.route("POST", "/session/{key}/turn", self.turn, Access.INFERENCE)  # first: patterns are tried in order
        service.route("POST", "/rl/start_session", self.start, Access.ADMIN)
        service.route("GET", "/sessions", self.sessions, Access.ADMIN)
        service.route("GET", "/session/{key}", self.session, Access.ADMIN)
        service.route("GET", "/session/{key}/history", self.session, Access.ADMIN)
        service.route("DELETE", "/session/{key}/turn", self.cancel, Access.ADMIN)
        service.route("POST", "/session/{key}/close", self.close, Access.ADMIN)
        service.route("POST", "/session/{key}/reward", self.reward, Access.ADMIN)
        service.route("POST", "/session/{key}/export", self.export, Access.ADMIN)
        service.route("POST", "/session/{key}/export/ack", self.acknowledge, Access.ADMIN)
        service.route("POST", "/configure", self.configure, Access.ADMIN)

    async def start(self, request: Request) -> Response:
        """Start a session, or return the open session that has the key."""
        body = await read_body(request, agents.StartAgentSession, _BODY_BYTES)
        if body.model not in (None, self._config.service):
            raise ApiError(404, f"no agent service {body.model!r}", code="model_not_found", param="model")
        _check_metadata(body.metadata)
        self._store.require(request.headers)
        theirs = RlSession(**vars(body.inference)) if body.inference is not None else None
        session, new = self._find(body.api_key) if body.api_key is not None else None, False
        if session is not None and session.closing is not None:
            await asyncio.wait([session.closing])
            session = self._find(session.key)
        await self._rl.check_brought(session, theirs)
        if session is None:
            journal = self._journal_for(body.api_key, reopen=body.reopen)
            with journal.in_use():
                inference = theirs or await self._rl.start(body.metadata)
                try:
                    session, new = await journal.start(body.api_key, body.metadata, inference)
                except BaseException:
                    await uninterrupted(self._rl.end(inference), "end-rl-session")
                    raise
            if new:
                self._started.inc()
                session.checked_at = time.monotonic()
            else:
                await self._rl.end(inference)
        if not new and theirs is not None and session.inference != theirs:
            await session.journal.set_inference(session, theirs)
        rl = session.inference
        started = {
            "session_id": session.key,
            "session_api_key": session.key,
            "created": new,
            "metadata": session.metadata,
            "inference_session_id": rl.session_id if rl is not None else None,
        }
        counted = self._store.count_started(int(new))
        return json_response({"sessions": [started], "journal": session.journal.tag}, status=201, more_headers=counted)

    def _journal_for(self, key: str | None, *, reopen: bool) -> AgentJournal:
        """Return a new session's journal. Raises 410 for an ended key without ``reopen``, 421 for another process's."""
        if key is None:
            return self._store.own
        ended = self._ended(key)
        if ended is not None and not reopen:
            raise session_ended()
        return ended or self._store.own

    def _ended(self, key: str) -> AgentJournal | None:
        """Return the journal of the ended session with this key, or None. Raises 421 for another process's journal."""
        tag = tag_of_key(key)
        if tag is None:
            return self._store.holder_of_digest(key_digest(key.encode()))
        if (journal := self._store.journals.get(tag)) is None:
            raise held_elsewhere()
        return journal

    def _find(self, key: str) -> SessionEntry | None:
        held = self._store.holder_of_key(key.encode())
        return held[0].sessions[held[1]] if held is not None else None

    def _named(self, request: Request) -> SessionEntry:
        """Return the open session that the path names. Raises 400, 404, 410, and 421 for another process's journal."""
        key = request.match_info["key"]
        if not agents.is_session_key(key):
            raise bad_request("this is no session key", param="session_key")
        self._store.require(request.headers)
        session = self._find(key)
        if session is not None and session.closing is None:
            return session
        if self._ended(key) is not None:
            raise session_ended()
        raise ApiError(404, "no session has this key", code="session_not_found", param="session_key")

    async def sessions(self, request: Request) -> Response:
        """Return one page of sessions, ordered by key. ``after``: the last key of the previous page."""
        limit, after = query_int(request, "limit", _PAGE, 1, 1000), request.query.get("after", "")
        later = (each for journal in self._store for each in journal.sessions.values() if each.key > after)
        page = heapq.nsmallest(limit + 1, later, key=lambda session: session.key)
        following = page[limit - 1].key if len(page) > limit else None
        return json_response({"sessions": [self._summary(each) for each in page[:limit]], "next": following})

    async def session(self, request: Request) -> Response:
        """Return one session with its conversation and all its turns, including failed ones."""
        session = self._named(request)
        history = orjson.Fragment(b"[%b]" % session.journal.conversation(session))
        turns = [_turn(each) for each in session.journal.turns(session)]
        return json_response({**self._summary(session), "history": history, "recorded_turns": turns})

    def _summary(self, session: SessionEntry) -> agents.SessionSummary:
        queue, rl = self._runner.queue(session), session.inference
        return {
            "session_key": session.key,
            "state": "idle" if queue is None else "running",
            "created": session.created,
            "used": session.used_at,
            "turns": session.turns,
            "running": queue.running.run_id if queue is not None else None,
            "waiting": sum(len(turn.callers) for turn in queue.waiting) if queue is not None else 0,
            "inference_session_id": rl.session_id if rl is not None else None,
            "metadata": session.metadata,
        }

    async def close(self, request: Request) -> Response:
        """End the session's turns, its state in the worker's agent, its RL session, and the session."""
        session = self._named(request)
        await request.read(_BODY_BYTES)
        await self._close(session)
        return json_response({"session_key": session.key, "closed": True})

    async def _close(self, session: SessionEntry) -> None:
        """Close the session; concurrent calls share one attempt. Raises 507, 500 if the deletion cannot be written."""
        if session.closing is None:
            session.closing = asyncio.create_task(self._end(session), name=f"close-{session.number}")
        await asyncio.shield(session.closing)

    async def _end(self, session: SessionEntry) -> None:
        try:
            await self._runner.abort(session, TurnFailed("cancelled", "the session was closed"), waiting=True)
            await asyncio.gather(self._forget(session), self._rl.end(session.inference, session.exported))
            await session.journal.delete(session)
        finally:
            session.closing = None

    async def _forget(self, session: SessionEntry) -> None:
        if session.ran and self._worker.keeps_sessions:
            await self._worker.close_session(f"/session/{quote(session.key, safe='')}/close")

    async def expire(self) -> None:
        """Close sessions that have been idle for longer than the idle timeout, until cancelled."""
        while True:
            await asyncio.sleep(until_beat(_EXPIRY_S))
            for journal in self._store:
                oldest = journal.clock() - self._idle_timeout
                idle: list[SessionEntry] = []
                for session in journal.sessions.values():
                    if session.used_at > oldest or len(idle) >= _EXPIRED_AT_ONCE:
                        break
                    if self._runner.queue(session) is None:
                        idle.append(session)
                closed = await asyncio.gather(*map(self._close, idle), return_exceptions=True)
                for error in filter(None, closed):
                    _log.warning("an idle session was not closed: %r", error)

    async def forget_all(self, journal: AgentJournal) -> None:
        """Let the worker's agent drop the sessions of a journal that was handed over to another process."""
        for session in journal.sessions.values():
            if self._worker.fault is None:
                await self._forget(session)

    async def configure(self, request: Request) -> Response:
        body = await read_body(request, agents.ConfigureSessions, _BODY_BYTES)
        if body.idle_timeout is not None:
            self._idle_timeout = body.idle_timeout
        if body.turn_timeout is not None:
            self._runner.turn_timeout = body.turn_timeout
        if body.max_concurrent is not None:
            self._runner.slots.set_limit(body.max_concurrent)
        if body.health_period is not None:
            self._worker.period_s = body.health_period
        save_settings(self.settings)
        return json_response({"status": "ok", **self.settings})

    @property
    def settings(self) -> dict[str, float]:
        """The settings that ``/configure`` changes."""
        return {
            "idle_timeout": self._idle_timeout,
            "turn_timeout": self._runner.turn_timeout,
            "max_concurrent": self._runner.slots.limit,
            "health_period": self._worker.period_s,
        }

    async def turn(self, request: Request) -> AnyResponse:
        """Run a turn and answer with its events.

        A request with the Idempotency-Key of a running or waiting turn joins that turn; with the key of a recorded
        turn, it gets the recorded events. A turn that failed through no fault of the agent is not recorded under its
        key, so that a retry runs it again. Raises 422 for a key used with another message.
        """
        asked = await read_body(request, agents.TurnRequest, self._config.max_body_bytes)
        read_at = time.perf_counter()
        _check_metadata(asked.metadata)
        session = self._named(request)
        if asked.inference is not None:
            await self._rl.check_brought(session, RlSession(**vars(asked.inference)))
            session = self._named(request)
        with session.journal.in_use():
            key = None
            if asked.idempotency_key is not None:
                key = TurnRequestKey(request_digest(asked.idempotency_key), request_digest(asked.message))
            caller = TurnCaller(request, TurnMessage(asked.message, asked.metadata, asked.inference, key), asked.stream)
            turn = self._joined(session, caller, key) if key is not None else None
            if turn is None:
                recorded = session.journal.requested(session, key.key) if key is not None else None
                if key is not None and recorded is not None:
                    before, ended = recorded
                    _check_same(before, key)
                    return Response(body=_accepted(ended.run_id) + recorded_events(ended), content_type=agents.EVENTS)
                if session.journal.commits.failing is not None:
                    await session.journal.check_writable()
                    session = self._named(request)
                turn = self._runner.add(session, asked, caller)
            caller.out.headers[names.OVERHEAD] = str(int((time.perf_counter() - read_at) * 1e6))
            return await self._answer(session, turn, caller)

    async def _answer(self, session: SessionEntry, turn: SessionTurn, caller: TurnCaller) -> AnyResponse:
        caller.accepted = _accepted(turn.run_id)
        if caller.live and turn.events:  # the caller joins a running turn
            caller.pass_on(b"".join(event + b"\n" for event in turn.events))
        timer = asyncio.get_running_loop().call_later(_ACCEPTED_S, caller.begin) if caller.stream else None
        try:
            await caller.ended.wait()
        except BaseException:
            self._runner.leave(session, turn, caller)
            raise
        finally:
            if timer is not None:
                timer.cancel()
        events = recorded_events(turn.recorded) if turn.recorded is not None and not caller.live else turn.last
        last = caller.failed or events
        if not caller.out.prepared:
            return Response(body=caller.accepted + last, headers=caller.out.headers)
        caller.out.end = last
        return caller.out

    def _joined(self, session: SessionEntry, caller: TurnCaller, key: TurnRequestKey) -> SessionTurn | None:
        """Join the running or waiting turn of the request that the caller repeats, and return it, or None."""
        found = self._runner.find(session, key.key)
        if found is None:
            return None
        turn, message = found
        assert message.request is not None
        _check_same(message.request, key)
        caller.live, caller.message = turn.events is not None, message
        turn.callers.append(caller)
        return turn

    async def cancel(self, request: Request) -> Response:
        """Cancel the running turn; with ``idempotency_key``, the message of that request, which may still wait."""
        session, key = self._named(request), request.query.get("idempotency_key")
        await request.read(_BODY_BYTES)
        why = TurnFailed("cancelled", "the turn was cancelled")
        if key is None:
            cancelled = await self._runner.abort(session, why)
        else:
            cancelled = await self._runner.withdraw(session, request_digest(key), why)
        return json_response({"session_key": session.key, "cancelled": cancelled})

    async def reward(self, request: Request) -> Response:
        session = self._named(request)
        body = await read_body(request, agents.RewardSession, _BODY_BYTES)
        reply = await self._rl.reward(session, body, CallNames.of(request))
        self._rewards.inc(int(reply.status == 200))
        return to_response(reply)

    async def export(self, request: Request) -> Response:
        session = self._named(request)
        body = await read_body(request, agents.ExportSession, _BODY_BYTES)
        if self._runner.queue(session) is not None:
            raise ApiError(409, "a turn is running: export the session after its end", code="turn_running")
        reply = await self._rl.export(session, body, CallNames.of(request))
        self._rewards.inc(int(body.reward is not None and reply.status == 200))
        return to_response(reply)

    async def acknowledge(self, request: Request) -> Response:
        session = self._named(request)
        body = await read_body(request, agents.AcknowledgeExport, _BODY_BYTES)
        return to_response(await self._rl.acknowledge(session, body.export_id, CallNames.of(request)))


def session_ended() -> ApiError:
    why = "it was closed, or idle for longer than session.idleTimeoutSeconds"
    message = f"the session has ended: {why}; POST /sessions with its key begins a new one, without its history"
    return ApiError(410, message, code="session_ended", param="session_key")


def _accepted(run_id: str) -> bytes:
    return event_line(type="accepted", run_id=run_id)


def _check_metadata(metadata: Mapping[str, object]) -> None:
    if _RESERVED in metadata:
        message = f"metadata.{_RESERVED} is reserved: the service sets it"
        raise bad_request(message, param=f"metadata.{_RESERVED}", code="reserved_metadata")


def _check_same(before: TurnRequestKey, now: TurnRequestKey) -> None:
    if before.message != now.message:
        message = "the Idempotency-Key was used with another message"
        raise ApiError(422, message, code="idempotency_key_reused", param="idempotency_key")


def _turn(turn: TurnEntry) -> dict[str, object]:
    return {
        "run_id": turn.run_id,
        "outcome": turn.outcome,
        "error": turn.error,
        "at": turn.at,
        "seconds": turn.seconds,
        "messages": orjson.Fragment(turn.messages),
        "metadata": orjson.Fragment(turn.metadata),
    }


@contextlib.asynccontextmanager
async def agent_data_proxy(config: AgentDataProxyConfig, options: ServeOptions) -> AsyncIterator[Service]:
    async with HttpClient() as http, serve_journals(config.state_dir, open_agent_journal, config.adopt_after) as store:
        worker = PairWorker(config, http, options.headers)

        def details() -> dict[str, object]:
            return {
                "model": config.service,
                "worker_url": config.worker_url,
                "turns_running": runner.slots.taken,
                "busy_sessions": runner.busy_sessions,
                "settings": routes.settings,
                **store_details(store),
            }

        service = Service(
            "data-proxy",
            key=options.key,
            loopback=options.loopback,
            not_ready=lambda: worker.fault or rl.fault,
            details=details,
        )
        rl = RlSessions(http, config.inference)
        worker.on_change = rl.on_change = service.lifetime.news.set
        runner = TurnRunner(config, worker, rl, service.metrics)
        routes = PairRoutes(config, store, runner, worker, rl)
        JournalRoutes(store).add_to(service)
        routes.add_to(service)
        store.on_left = routes.forget_all
        service.add_lifespan(lambda: background("worker-probes", worker.run))
        if config.inference is not None:
            service.add_lifespan(lambda: background("inference-probes", rl.watch))
        service.add_lifespan(lambda: background("session-expiry", routes.expire))
        if config.registration is not None:
            lease = RouterLease(config.registration, service, http, options.headers, config.service)
            service.add_lifespan(lambda: background("registration", lease.run))
        try:
            yield service
        finally:
            await runner.close()
