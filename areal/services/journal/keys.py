"""Tags of journals, and session keys that contain a tag, so that a relay can route a key without a table of sessions:
it knows which process serves which journal. A tag is not secret; a session key is, because of the 256 random bits after
the tag."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets

from areal.services.http.errors import ApiError

TAG = "[a-z2-7]{8}"
_TAG_ALONE = re.compile(TAG)
_KEY = re.compile(rf"sk-(?P<tag>{TAG})-[A-Za-z0-9_-]{{43}}")


def new_tag() -> str:
    return base64.b32encode(secrets.token_bytes(5)).decode("ascii").lower()


def is_tag(text: str) -> bool:
    return _TAG_ALONE.fullmatch(text) is not None


def new_session_key(tag: str) -> str:
    return f"sk-{tag}-{secrets.token_urlsafe(32)}"


def tag_of_key(key: str) -> str | None:
    """Return the tag in a session key, or None for a key that a client chose itself."""
    met = _KEY.fullmatch(key)
    return met["tag"] if met else None


def key_digest(key: bytes) -> bytes:
    """Return the stored form of a session key. The keys are random, so one round of SHA-256 is enough."""
    return hashlib.sha256(key).digest()


def request_digest(data: bytes | str) -> bytes:
    """Return the stored form of an Idempotency-Key or of a request's content."""
    return hashlib.blake2b(data.encode() if isinstance(data, str) else data, digest_size=16).digest()


def damaged_journal(name: str, was: str = "was") -> ApiError:
    """Return the error for a call whose session ``was`` recorded in the journal of the folder ``name``, which is
    damaged."""
    message = f"this session {was} recorded in the journal {name}, which is damaged: repair its folder or set it aside"
    return ApiError(503, message, code="journal_damaged", headers={"x-should-retry": "false"})
