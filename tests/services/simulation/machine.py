"""Generated histories of a simulated service: replicas come, go, die and return, reports are late, and callers go on
with their sessions. No session whose turn was answered begins anew, is unknown, or is in two processes, and each call
ends once the replicas are quiet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from areal.http.client import HttpReply
from areal.services.journal.keys import key_digest
from tests.services.simulation.service import RELAYS, SimulatedService

_MOST_REPLICAS = 3
_QUIET_S = 120.0
PASSING = (502, 503)  # the session is away for now, or a process was lost


@dataclass(repr=False)
class Conversation:
    """A session as its caller knows it. ``kind``: what its running call does. ``answered``: its turns that were
    acknowledged. ``unsure``: those whose answer was lost or a failure. ``named``: with a key of the caller's choice."""

    key: str
    session_id: str = ""
    named: bool = True
    answered: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)
    call: asyncio.Task[HttpReply | None] | None = None
    kind: str = ""
    message: str = ""
    relay: str = RELAYS[0]
    exists: bool = False
    ends: bool = False

    def __repr__(self) -> str:
        return f"<{self.key[:16]} {self.answered} unsure {self.unsure}{' ends' * self.ends}>"

    @property
    def is_kept(self) -> bool:
        """Whether the service must know it."""
        return (self.exists or bool(self.answered)) and not self.ends


class SessionMachine(RuleBasedStateMachine):
    agents: bool

    def __init__(self) -> None:
        super().__init__()
        self.service = SimulatedService(agents=self.agents)
        self.numbers = itertools.count()
        self.sessions: list[Conversation] = []
        self.live: list[str] = []
        self.dead: list[str] = []
        self.free: list[str] = []  # keys of sessions that have ended

    def _key(self, data: st.DataObject) -> str:
        """A new key, or that of a session that has ended."""
        key = data.draw(st.sampled_from([f"callers-key-{next(self.numbers)}", *self.free]))
        self.free = [each for each in self.free if each != key]
        return key

    # Processes.

    @initialize(replicas=st.integers(1, 2))
    def begin(self, replicas: int) -> None:
        for _ in range(replicas):
            self.add_replica()

    def _uid(self) -> str:
        return f"r{next(self.numbers)}"

    @property
    def router_lives(self) -> bool:
        return not self.service.router.killed

    @rule()
    @precondition(lambda self: self.router_lives and len(self.live) < _MOST_REPLICAS)
    def add_replica(self) -> None:
        uid = self._uid()
        self.service.start_replica(uid)
        self.live.append(uid)
        self._route()

    def _route(self) -> None:
        self.service.route([*self.live, *self.dead])
        self.service.command("/undrain", {"worker_id": "all"})

    @rule(data=st.data())
    @precondition(lambda self: self.router_lives and self.live)
    def remove_replica(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(self.live))
        self.service.loop.cut.discard(frozenset(("router", uid)))
        self.live.remove(uid)
        self.service.remove_replica(uid)

    @rule(data=st.data(), relay=st.sampled_from(RELAYS))
    @precondition(lambda self: self.router_lives and 0 < len(self.live) < _MOST_REPLICAS and not self.service.loop.cut)
    def short_lived_replica(self, data: st.DataObject, relay: str) -> None:
        """A replica that is removed as soon as callers have used it."""
        self.add_replica()
        session = self._new(data)
        session.relay = relay
        for _ in range(2):
            if session in self._idle():
                self._begin_turn(session, "short")
            self._wait_a_moment(session)
        uid = self.live.pop()
        self.service.remove_replica(uid)
        if session in self._idle():
            self._begin_turn(session, "short")
            self._wait_a_moment(session)

    @rule(data=st.data(), drained=st.booleans())
    @precondition(lambda self: self.router_lives and self.live)
    def drain_or_undrain(self, data: st.DataObject, drained: bool) -> None:
        """As an operator, without a stop that follows."""
        uid = data.draw(st.sampled_from(self.live))
        self.service.command("/drain" if drained else "/undrain", {"worker_id": uid})

    @rule(data=st.data())
    @precondition(lambda self: self.live)
    def kill_replica(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(self.live))
        self.live.remove(uid)
        self.dead.append(uid)
        self.service.kill(self.service.replicas[uid])

    @rule(data=st.data())
    @precondition(lambda self: self.dead)
    def restart_replica(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(self.dead))
        self.dead.remove(uid)
        self.service.start_replica(uid)
        self.live.append(uid)

    @rule()
    @precondition(lambda self: self.dead and self.router_lives)
    def replace_dead_replicas(self) -> None:
        self.dead.clear()
        self.add_replica()

    @rule()
    @precondition(lambda self: self.router_lives)
    def kill_router(self) -> None:
        self.service.kill(self.service.router)

    @rule(file=st.sampled_from(["kept", "kept", "damaged"]))
    @precondition(lambda self: not self.router_lives)
    def start_router(self, file: str) -> None:
        if file == "lost":
            self.service.router_file.unlink()
        elif file == "damaged":
            self.service.router_file.write_text("{")
        self.service.start_router()

    @rule(name=st.sampled_from(RELAYS))
    def restart_relay(self, name: str) -> None:
        self.service.kill(self.service.relays[name])
        self.service.start_relay(name)

    @rule(data=st.data())
    @precondition(lambda self: len(self.service.loop.cut) < 2)
    def cut(self, data: st.DataObject) -> None:
        other = data.draw(st.sampled_from([*RELAYS, *self.live]))
        self.service.loop.cut.add(frozenset(("router", other)))

    @rule()
    @precondition(lambda self: self.service.loop.cut)
    def heal(self) -> None:
        self.service.loop.cut.clear()

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 3.0, 10.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.service.loop.run_for(seconds)
        self.collect()

    # Callers.

    def _idle(self) -> list[Conversation]:
        return [each for each in self.sessions if each.call is None and not each.ends]

    def _begin(self, session: Conversation, kind: str, work: Coroutine[Any, Any, HttpReply | None]) -> None:
        session.kind = kind
        session.call = self.service.client.spawn(work)

    def _wait_a_moment(self, session: Conversation) -> None:
        for _ in range(10):
            if session.call is None or session.call.done():
                break
            self.service.loop.run_for(0.1)
        self.collect()

    @rule(data=st.data(), wait=st.booleans(), long=st.booleans(), relay=st.sampled_from(RELAYS))
    @precondition(lambda self: self._idle())
    def turn(self, data: st.DataObject, wait: bool, long: bool, relay: str) -> None:
        session = data.draw(st.sampled_from(self._idle()))
        session.relay = relay
        self._begin_turn(session, "long" if long else "short")
        if wait:
            self._wait_a_moment(session)

    def _begin_turn(self, session: Conversation, length: str) -> None:
        session.message = f"{length} {next(self.numbers)}"
        self._begin(session, "turn", self._turn(session))

    @rule(data=st.data())
    @precondition(lambda self: self._idle())
    def end(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self._idle()))
        session.ends = True
        session.relay = data.draw(st.sampled_from(RELAYS))
        self._begin(session, "end", self._end(session))
        self._wait_a_moment(session)

    @invariant()
    def collect(self) -> None:
        """Check the answers that have come."""
        for session in list(self.sessions):
            if session.call is not None and session.call.done():
                reply, session.call = session.call.result(), None
                about = f"{session.kind} of {session}: {reply and (reply.status, reply.body[:300])}"
                self._ended(session, reply if reply is None or reply.status not in PASSING else None, about)
        self._check_owners()

    def _ended(self, session: Conversation, reply: HttpReply | None, about: str) -> None:
        """``reply`` None: the call failed for now, or its answer was lost."""
        known = session.exists or bool(session.answered)
        if session.kind == "turn":
            if reply is not None and reply.status == 200:
                session.answered.append(self._answered(session, reply))
                return
            session.unsure.append(session.message)
            assert reply is None or not session.is_kept, about
        elif session.kind == "end":
            assert reply is None or reply.status == 200 or not known, about
            if reply is not None and session.named:
                self.free.append(session.key)
                self.sessions.remove(session)

    def _check_owners(self) -> None:
        lives = [process for process in self.service.processes if not (process.killed or process.ended)]
        journals = [journal for process in lives if process.store is not None for journal in process.store]
        tags = [journal.tag for journal in journals]
        assert len(tags) == len(set(tags)), f"two processes serve a journal: {tags}"
        for session in self.sessions:
            digest = key_digest(session.key.encode())
            held = [journal.tag for journal in journals if journal.session_by_key(digest) is not None]
            assert len(held) <= 1, f"{session} is in the journals {held}"

    # What the two kinds of services differ in.

    def _new(self, data: st.DataObject) -> Conversation:
        """A session with a key of the caller's choice, to be started."""
        raise NotImplementedError

    async def _ask(self, session: Conversation, method: str, path: str, *args: Any, **more: Any) -> HttpReply | None:
        return await self.service.ask(method, path, *args, base=f"http://{session.relay}:80", **more)

    async def _turn(self, session: Conversation) -> HttpReply | None:
        raise NotImplementedError

    def _answered(self, session: Conversation, reply: HttpReply) -> str:
        """The turn's name."""
        raise NotImplementedError

    async def _end(self, session: Conversation) -> HttpReply | None:
        raise NotImplementedError

    async def _read(self, session: Conversation) -> HttpReply | None:
        raise NotImplementedError

    def _recorded(self, session: Conversation, reply: HttpReply) -> list[str]:
        raise NotImplementedError

    # The end: processes are quiet.

    def teardown(self) -> None:
        try:
            self._settle()
        finally:
            self.service.close()

    def _settle(self) -> None:
        self.service.loop.cut.clear()
        if not self.router_lives:
            self.service.start_router()
        self.service.loop.run_for(1.0)
        if self.dead or not self.live:
            self.dead.clear()
            self.add_replica()
        else:
            self._route()
        until = self.service.loop.now + _QUIET_S
        while any(each.call is not None for each in self.sessions) and self.service.loop.now < until:
            self.service.loop.run_for(1.0)
            self.collect()
        assert not (left := [each for each in self.sessions if each.call is not None]), f"they wait for ever: {left}"
        for session in self.sessions:
            if session.is_kept:
                reply = self.service.loop.run_until_complete(self.service.client.spawn(self._read(session)))
                assert reply is not None and reply.status == 200, (session, reply and (reply.status, reply.body))
                recorded = self._recorded(session, reply)
                assert [each for each in recorded if each in session.answered] == session.answered, (session, recorded)
                assert len(recorded) <= len(session.answered) + len(session.unsure), (session, recorded)
        self._check_owners()


class AgentSessionMachine(SessionMachine):
    agents = True

    @rule()
    @precondition(lambda self: len(self.sessions) < 4)
    def new_key(self) -> None:
        """A key whose first turn starts the session."""
        self._new()

    def _new(self, data: st.DataObject | None = None) -> Conversation:
        self.sessions.append(session := Conversation(f"callers-key-{next(self.numbers)}"))
        return session

    @rule(data=st.data())
    @precondition(lambda self: self.free)
    def reopen(self, data: st.DataObject) -> None:
        """A session with the key of one that has ended."""
        session = Conversation(self.free.pop())
        session.relay = data.draw(st.sampled_from(RELAYS))
        self.sessions.append(session)
        self._begin(session, "start", self._start(session))
        self._wait_a_moment(session)

    async def _start(self, session: Conversation) -> HttpReply | None:
        return await self._ask(session, "POST", "/sessions", {"session_key": session.key})

    def _ended(self, session: Conversation, reply: HttpReply | None, about: str) -> None:
        if session.kind == "start":
            if reply is None:
                self.sessions.remove(session)
                return
            assert reply.status == 201, about
            session.exists = True
        else:
            super()._ended(session, reply, about)

    @rule()
    @precondition(lambda self: len(self.sessions) < 4)
    def start(self) -> None:
        """A session with a key of the service."""
        reply = self.service.call("POST", "/sessions", {}, timeout_s=5.0)
        if reply is not None and reply.status == 201:
            self.sessions.append(Conversation(reply.object()["session_key"], exists=True, named=False))

    async def _turn(self, session: Conversation) -> HttpReply | None:
        headers = {"X-AReaL-Session-Key": session.key}
        return await self._ask(session, "POST", "/v1/responses", {"input": session.message}, headers)

    def _answered(self, session: Conversation, reply: HttpReply) -> str:
        before = int(reply.object()["output"][0]["content"][0]["text"])
        least, most = len(session.answered), len(session.answered) + len(session.unsure)
        assert least <= before <= most, f"{session} has {before} turns"
        return session.message

    async def _end(self, session: Conversation) -> HttpReply | None:
        return await self._ask(session, "POST", "/sessions/close", {"session_key": session.key})

    async def _read(self, session: Conversation) -> HttpReply | None:
        return await self._ask(session, "GET", f"/sessions/{session.key}", timeout_s=_QUIET_S)

    def _recorded(self, session: Conversation, reply: HttpReply) -> list[str]:
        turns = [turn for turn in reply.object()["recorded_turns"] if turn["outcome"] == "complete"]
        return [turn["messages"][0]["content"] for turn in turns]


class ModelSessionMachine(SessionMachine):
    agents = False

    @rule(data=st.data(), named=st.booleans(), wait=st.booleans())
    @precondition(lambda self: len(self.sessions) < 4)
    def start(self, data: st.DataObject, named: bool, wait: bool) -> None:
        session = self._new(data, named=named)
        if wait:
            self._wait_a_moment(session)

    def _new(self, data: st.DataObject, *, named: bool = True) -> Conversation:
        session = Conversation(self._key(data) if named else "", named=named)
        session.relay = data.draw(st.sampled_from(RELAYS))
        self.sessions.append(session)
        self._begin(session, "start", self._start(session))
        return session

    @rule(data=st.data())
    @precondition(lambda self: any(each.named for each in self._idle()))
    def start_again(self, data: st.DataObject) -> None:
        """The key of a session that has not ended is in use."""
        session = data.draw(st.sampled_from([each for each in self._idle() if each.named]))
        self._begin(session, "again", self._start(session))
        self._wait_a_moment(session)

    async def _start(self, session: Conversation) -> HttpReply | None:
        key = {"api_key": session.key} if session.named else {}
        return await self._ask(session, "POST", "/rl/start_session", {"task_id": "task", **key})

    def _ended(self, session: Conversation, reply: HttpReply | None, about: str) -> None:
        if session.kind == "start":
            if reply is None:
                self.sessions.remove(session)
                return
            assert reply.status == 201, about
            started = reply.object()["sessions"][0]
            session.key, session.session_id, session.exists = started["session_api_key"], started["session_id"], True
        elif session.kind == "again":
            assert reply is None or reply.status == 409, about
        else:
            super()._ended(session, reply, about)

    def _bearer(self, session: Conversation) -> dict[str, str]:
        return {"Authorization": f"Bearer {session.key}"}

    async def _turn(self, session: Conversation) -> HttpReply | None:
        body = {"messages": [{"role": "user", "content": session.message}], "max_tokens": 4}
        return await self._ask(session, "POST", "/v1/chat/completions", body, self._bearer(session))

    def _answered(self, session: Conversation, reply: HttpReply) -> str:
        return str(reply.object()["id"])

    async def _end(self, session: Conversation) -> HttpReply | None:
        if not session.answered:
            return await self._ask(session, "POST", "/rl/end_session", {}, self._bearer(session))
        body = {"session_ids": [session.session_id], "reward": 1.0, "style": "individual", "remove_session": True}
        return await self._ask(session, "POST", "/export_trajectories", body)

    async def _read(self, session: Conversation) -> HttpReply | None:
        return await self._ask(session, "GET", f"/rl/sessions/{session.session_id}", timeout_s=_QUIET_S)

    def _recorded(self, session: Conversation, reply: HttpReply) -> list[str]:
        found = [turn for each in reply.object()["trajectories"] for turn in each["interactions"]]
        return [turn["interaction_id"] for turn in sorted(found, key=lambda turn: turn["at"])]
