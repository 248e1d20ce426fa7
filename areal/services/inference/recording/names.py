"""Names that say where a thing is recorded, so that no relay needs a table of sessions.

Each journal has a random tag. Session ids, session keys, group, export and lease ids and answer ids carry the tag of
their journal: who knows which data proxy holds which journals can route every one of them. A tag is no secret; a
session key is one, by the 256 random bits behind its tag.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from dataclasses import dataclass

from areal.services.web.ids import unique_id

HITL = "__hitl__"
_TAG = "[a-z2-7]{8}"
_TAG_ALONE = re.compile(_TAG)
_SESSION = re.compile(rf"(?P<task>.{{1,256}})-(?P<tag>{_TAG})-(?P<number>[0-9]{{1,9}})", re.DOTALL)
_GROUP = re.compile(rf"grp-(?P<tag>{_TAG})-(?P<first>[0-9]{{1,9}})-(?P<size>[0-9]{{1,4}})")
_KEY = re.compile(rf"sk-(?P<tag>{_TAG})-[A-Za-z0-9_-]{{43}}")
_EXPORT = re.compile(rf"exp-(?P<tag>{_TAG})-(?P<number>[0-9]{{1,12}})-(?P<nonce>[0-9a-f]{{8}})")
_LEASE = re.compile(rf"lse-(?P<tag>{_TAG})-(?P<session>[0-9]{{1,9}})-(?P<trajectory>[0-9]{{1,9}})")
_ANSWER = re.compile(rf"[a-z]+-(?P<tag>{_TAG})[0-9a-f]{{24}}(-[0-9]+)?")


def new_tag() -> str:
    return base64.b32encode(secrets.token_bytes(5)).decode("ascii").lower()


def is_tag(text: str) -> bool:
    return _TAG_ALONE.fullmatch(text) is not None


@dataclass(frozen=True)
class SessionName:
    """``str()`` is the session id that callers see."""

    task: str
    tag: str
    number: int

    def __str__(self) -> str:
        return f"{self.task}-{self.tag}-{self.number}"

    @classmethod
    def parse(cls, text: str) -> SessionName | None:
        met = _SESSION.fullmatch(text)
        return cls(met["task"], met["tag"], int(met["number"])) if met else None


@dataclass(frozen=True)
class GroupName:
    """The sessions of one group are numbered in a row."""

    tag: str
    first: int
    size: int

    def __str__(self) -> str:
        return f"grp-{self.tag}-{self.first}-{self.size}"

    @classmethod
    def parse(cls, text: str) -> GroupName | None:
        met = _GROUP.fullmatch(text)
        return cls(met["tag"], int(met["first"]), int(met["size"])) if met else None


@dataclass(frozen=True)
class ExportName:
    tag: str
    number: int
    nonce: str

    def __str__(self) -> str:
        return f"exp-{self.tag}-{self.number}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> ExportName | None:
        met = _EXPORT.fullmatch(text)
        return cls(met["tag"], int(met["number"]), met["nonce"]) if met else None


@dataclass(frozen=True)
class LeaseName:
    tag: str
    session: int
    trajectory: int

    def __str__(self) -> str:
        return f"lse-{self.tag}-{self.session}-{self.trajectory}"

    @classmethod
    def parse(cls, text: str) -> LeaseName | None:
        met = _LEASE.fullmatch(text)
        return cls(met["tag"], int(met["session"]), int(met["trajectory"])) if met else None


def new_session_key(tag: str) -> str:
    return f"sk-{tag}-{secrets.token_urlsafe(32)}"


def tag_of_key(key: str) -> str | None:
    """The journal of a session key. None for a key that a caller chose itself."""
    met = _KEY.fullmatch(key)
    return met["tag"] if met else None


def key_digest(key: bytes) -> bytes:
    """What is stored of a session key. The keys are random, so one round of SHA-256 is enough."""
    return hashlib.sha256(key).digest()


def new_answer_id(prefix: str, tag: str | None) -> str:
    """``chatcmpl-`` and the like, with the journal's tag where the answer is recorded."""
    return unique_id(prefix + (tag or ""))


def tag_of_answer(answer_id: str) -> str | None:
    met = _ANSWER.fullmatch(answer_id)
    return met["tag"] if met else None
