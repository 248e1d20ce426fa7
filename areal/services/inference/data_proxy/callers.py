"""Whose call it is: a session's, by its key, or the human in the loop's, by the admin key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from areal.services.inference.recording.changes import STANDING
from areal.services.inference.recording.commits import elsewhere
from areal.services.inference.recording.journal import Journal
from areal.services.inference.recording.names import HITL, SessionName, tag_of_key
from areal.services.inference.recording.session import Life
from areal.services.inference.recording.vault import Vault
from areal.services.web.access import presented_key, unknown_key
from areal.services.web.errors import ApiError, bad_request
from areal.services.web.keys import AdminKey


@dataclass(frozen=True)
class Caller:
    """A session of ours. ``admin``: the caller has the admin key, and may speak of other sessions too."""

    journal: Journal
    session: int
    admin: bool


class Callers:
    """``key`` None: a service without keys, where everybody is admin who does not present a session's key."""

    def __init__(self, vault: Vault, key: AdminKey | None) -> None:
        self._vault = vault
        self._key = key

    def of(self, headers: Mapping[str, str]) -> Caller:
        """Raises 401 for a key of nobody, 421 for a session that another data proxy holds."""
        key = self._presented(headers)
        if key is None or (self._key is not None and self._key.matches(key)):
            return self._human()
        held = self._vault.holder_of_key(key)
        if held is not None:
            return Caller(*held, admin=self._key is None)
        tag = tag_of_key(key.decode("ascii"))
        if tag is not None and self._vault.journal(tag) is None:
            raise elsewhere()
        if self._key is None and tag is None:
            return self._human()
        raise unknown_key()

    def _presented(self, headers: Mapping[str, str]) -> bytes | None:
        try:
            return presented_key(headers)
        except ApiError:
            if self._key is not None:
                raise
            return None

    def _human(self) -> Caller:
        return Caller(self._vault.own, STANDING, admin=True)

    def named(self, session_id: str) -> Caller:
        """The session of this id. Raises 404, or 421 where another data proxy has it."""
        if session_id == HITL:
            return self._human()
        name = SessionName.parse(session_id)
        if name is None:
            raise ApiError(404, f"no session {session_id!r}", code="session_not_found", param="session_id")
        journal = self._vault.journal(name.tag)
        if journal is None:
            raise elsewhere()
        return Caller(journal, journal.session_by_name(name).number, admin=True)

    def meant(self, caller: Caller, session_id: object) -> Caller:
        """The caller's own session, or the one that an admin names. Raises 400, 403, 404."""
        if session_id is None:
            return caller
        if not isinstance(session_id, str):
            raise bad_request("session_id must be a string", param="session_id")
        if not caller.admin:
            own = caller.journal.session(caller.session)
            if own is not None and caller.journal.name(own) == session_id:
                return caller
            raise ApiError(403, "a session key speaks for its own session only", code="admin_key_required")
        return self.named(session_id)


def check_active(caller: Caller) -> None:
    """Raises 409 for a session that ended."""
    session = caller.journal.session(caller.session)
    if session is None or session.life is not Life.ACTIVE:
        raise ApiError(409, "the session has ended", code="session_ended")
