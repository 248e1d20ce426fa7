"""Finds the session of each model call, and records the call.

A call belongs to the session whose key it presents; with the admin key it belongs to the human in the loop's session. A
repeated call waits for the call in flight and is answered from its record; only a call without a record generates. A
record is durable before the response's last byte is sent. A failed call is counted in the session's trajectory under
its error code and is not scored.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from areal.dataclasses import dataclass, field
from areal.http import headers as names
from areal.services.http.auth import AdminKey, presented_key, unknown_key
from areal.services.http.errors import ApiError, unsupported
from areal.services.http.messages import AnyResponse, Request, idempotency_key
from areal.services.inference.engines.base import Capabilities
from areal.services.inference.recorder.changes import HITL_SESSION
from areal.services.inference.recorder.journal import SessionJournal
from areal.services.inference.recorder.records import (
    CallIdentity,
    CallInFlight,
    CallsInFlight,
    ConversationDigest,
    ModelCall,
    PrefixMatch,
    RecordedTurn,
    Sample,
    check_call_id,
    digest_conversation,
    read_retry_count,
    token_array,
    token_digest,
)
from areal.services.inference.recorder.session import HITL, SessionName, SessionState, new_answer_id
from areal.services.inference.recorder.store import TrajectoryStore
from areal.services.journal.keys import request_digest, tag_of_key
from areal.services.journal.storage import held_elsewhere
from areal.wire.sampling import derived_seed

_log = logging.getLogger(__name__)
_COUNTED_REFUSALS = ("context_length_exceeded",)  # 4xx codes that describe the rollout


def journal_of(store: TrajectoryStore, tag: str) -> SessionJournal:
    """Return the journal with this tag. Raises 421 if another data proxy holds it."""
    journal = store.journals.get(tag)
    if journal is None:
        raise held_elsewhere()
    return journal


@dataclass(frozen=True)
class Caller:
    """The session of a request. ``admin``: the request has the admin key and may name other sessions."""

    journal: SessionJournal
    session: int
    admin: bool


@dataclass(eq=False)
class CallerResolver:
    """Finds the session of a request's key. ``key`` None: the service has no admin key, and every request without a
    session key is an admin's."""

    _store: TrajectoryStore
    _key: AdminKey | None

    def resolve(self, request: Request) -> Caller:
        """Return the caller. Raises 401 for an unknown key, 421 for a session that another data proxy holds."""
        self._store.require(request.headers)
        if request.by_admin:
            return self._human()
        try:
            key = presented_key(request.headers)
        except ApiError:
            if self._key is not None:
                raise
            return self._human()
        held = self._store.holder_of_key(key)
        if held is not None:
            return Caller(*held, admin=self._key is None)
        tag = tag_of_key(key.decode("ascii"))
        if tag is not None:
            journal_of(self._store, tag)
        if self._key is None and tag is None:
            return self._human()
        raise unknown_key()

    def resolve_active(self, request: Request) -> Caller:
        """Return the caller as ``resolve`` does. Raises also 409 for a session that has ended."""
        caller = self.resolve(request)
        session = caller.journal.session(caller.session)
        if session is None or session.state is not SessionState.ACTIVE:
            raise ApiError(409, "the session has ended", code="session_ended")
        return caller

    def _human(self) -> Caller:
        return Caller(self._store.own, HITL_SESSION, admin=True)

    def named(self, session_id: str) -> Caller:
        """Return an admin caller for the session of this id. Raises 404, or 421 if another data proxy holds it."""
        if session_id == HITL:
            return self._human()
        name = SessionName.require(session_id)
        journal = journal_of(self._store, name.tag)
        return Caller(journal, journal.session_by_name(name).number, admin=True)

    def selected(self, caller: Caller, session_id: str | None) -> Caller:
        """Return ``caller``, or a caller for the session that an admin names. Raises 403, 404, 421."""
        if session_id is None:
            return caller
        if not caller.admin:
            own = caller.journal.session(caller.session)
            if own is not None and caller.journal.name(own) == session_id:
                return caller
            raise ApiError(403, "a session key is valid for its own session only", code="admin_key_required")
        return self.named(session_id)


# Seeds for the calls that do not set one. A session that was started with a seed gives each of its calls a different
# seed, derived from the session's seed, the prompt's tokens, and how often the session has sampled that prompt. The
# seeds therefore do not depend on the order in which concurrent calls arrive. They are kept in memory: after a restart
# of the data proxy, further calls of the session are not seeded. A ``default_seed`` is used only if seeding costs the
# engine nothing (``Capabilities.free_seeds``).

_MOST_SESSIONS = 65_536
_NONE = Capabilities(sampling_fields=frozenset())


@dataclass
class _SessionSeed:
    seed: int
    sampled: Counter[bytes] = field(default_factory=Counter)


class SessionSeeds:
    """The seeds of the sessions. ``capabilities`` None: an external model, which does not support seeds."""

    def __init__(self, capabilities: Capabilities | None) -> None:
        self._capabilities = capabilities or _NONE
        self._sessions: OrderedDict[tuple[str, int], _SessionSeed] = OrderedDict()

    def chosen(self, seed: int | None, default_seed: int | None) -> int | None:
        """Return the seed of a group that is being started. Raises 400 for a ``seed`` if the engine does not support
        seeds."""
        if seed is not None and "seed" not in self._capabilities.sampling_fields:
            raise unsupported("seed", "this engine does not have it")
        return seed if seed is not None or not self._capabilities.free_seeds else default_seed

    def start(self, seed: int, session_ids: Sequence[str]) -> None:
        for member, name in enumerate(map(SessionName.require, session_ids)):
            self._sessions[name.tag, name.number] = _SessionSeed(derived_seed(seed, member))
        while len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)

    def end(self, tag: str, session: int) -> None:
        self._sessions.pop((tag, session), None)

    def of_call(self, tag: str, session: int, prompts: Sequence[Sequence[int]]) -> list[int] | None:
        """Return a seed for each prompt of a call, or None if the session has no seed."""
        held = self._sessions.get((tag, session))
        if held is None:
            return None
        seeds = []
        for digest in (token_digest(token_array(prompt)) for prompt in prompts):
            seeds.append(derived_seed(held.seed, digest.hex(), held.sampled[digest]))
            held.sampled[digest] += 1
        return seeds


@dataclass(eq=False)
class CallRecorder:
    """Records one model call. ``caller`` None: the data proxy has no journal and records nothing. ``replayed``: the
    recorded turns of an earlier call that this call repeats, so that nothing is generated. ``conversation``: the digest
    of the chat, once it is set."""

    _caller: Caller | None
    _identity: CallIdentity | None = None
    replayed: Sequence[RecordedTurn] | None = None
    _flight: CallInFlight | None = None
    _seeds: SessionSeeds | None = None
    conversation: ConversationDigest | None = field(default=None, init=False)

    @property
    def has_session_key(self) -> bool:
        return self._caller is not None and not self._caller.admin

    def records(self, store: bool) -> bool:
        """Return whether this call is recorded; ``store`` is the request's ``store`` field."""
        return store and self._caller is not None

    def seeds(self, prompts: Sequence[Sequence[int]]) -> list[int] | None:
        """Return the session's seeds for this call, one for each prompt, or None."""
        if self._caller is None or self._seeds is None:
            return None
        return self._seeds.of_call(self._caller.journal.tag, self._caller.session, prompts)

    def answer_id(self, prefix: str) -> str:
        return new_answer_id(prefix, self._caller.journal.tag if self._caller is not None else None)

    def set_conversation(self, messages: Sequence[Mapping[str, object]]) -> ConversationDigest:
        self.conversation = digest_conversation(messages)
        return self.conversation

    async def match_prefix(self, messages: Sequence[Mapping[str, object]]) -> PrefixMatch | None:
        """Return the recorded turn that this chat continues."""
        if self._caller is None:
            return None
        return await self._caller.journal.match_prefix(self._caller.session, self.set_conversation(messages))

    async def record(self, answer_id: str, model: str, created: int, samples: Sequence[Sample]) -> None:
        """Record the call; the record is durable on return."""
        assert self._caller is not None and self._identity is not None, "nothing is recorded without a journal"
        call = ModelCall(
            answer_id=answer_id,
            model=model,
            created=created,
            digest=self._identity.digest,
            samples=samples,
            conversation=self.conversation,
            idempotency=self._identity.idempotency,
            call_id=self._identity.call_id,
        )
        recorded = await self._caller.journal.record(self._caller.session, call)
        if self._flight is not None:
            self._flight.recorded = recorded.first

    async def fail(self, code: str) -> None:
        """Count a failure for which no ApiError is raised."""
        if self._caller is not None:
            await _count_failure(self._caller, ApiError(502, "", code=code))


Answer = Awaitable[AnyResponse]


class CallRecorders:
    """Makes the recorder of each model call. ``store`` None: nothing is recorded."""

    def __init__(
        self, store: TrajectoryStore | None, key: AdminKey | None, capabilities: Capabilities | None = None
    ) -> None:
        self.seeds = SessionSeeds(capabilities)
        self._callers = CallerResolver(store, key) if store is not None else None
        self._flights = CallsInFlight()

    def authenticate(self, request: Request) -> Caller | None:
        """Return the caller; None without a store. Raises 401, 421, and 409 for a session that has ended."""
        return self._callers.resolve_active(request) if self._callers is not None else None

    async def run(
        self, caller: Caller | None, headers: Mapping[str, str], body: bytes, answer: Callable[[CallRecorder], Answer]
    ) -> AnyResponse:
        """Return the answer to one call, given its recorder. Raises what ``answer`` raises, 507 at once if the journal
        accepts no more records, 422 for an Idempotency-Key that was used with another body, 421 if another data proxy
        holds the session."""
        if caller is None:
            return await answer(CallRecorder(None))
        with caller.journal.in_use():
            await caller.journal.check_writable()
            key = idempotency_key(headers)
            call_id = check_call_id(headers.get(names.CALL))
            identity = CallIdentity(
                session=(caller.journal.tag, caller.session),
                digest=request_digest(body),
                idempotency=request_digest(key) if key is not None else None,
                retry=read_retry_count(headers.get("x-stainless-retry-count")),
                call_id=call_id,
                again=call_id is not None and names.AGAIN in headers,
            )
            while identity.repeatable:
                row = await self._flights.join(identity)
                found = await (caller.journal.answer(row) if row is not None else caller.journal.replay(identity))
                if found:
                    return await answer(CallRecorder(caller, identity, found))
                if not self._flights.running(identity):
                    break
            flight = self._flights.begin(identity)
            try:
                return await answer(CallRecorder(caller, identity, None, flight, self.seeds))
            except ApiError as error:
                await _count_failure(caller, error)
                raise
            finally:
                self._flights.end(flight)


async def _count_failure(caller: Caller, error: ApiError) -> None:
    if error.status < 500 and error.code not in _COUNTED_REFUSALS:
        return
    try:
        await caller.journal.note_failure(caller.session, error.code or str(error.status))
    except ApiError as other:  # the client receives the error of the call itself
        _log.warning("a failure could not be counted: %s", other)
