"""Who acts, and with which command: recorded beside every change, so it must hold no secret."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

_HIDDEN = "REDACTED"
_WORDS = "key|token|secret|password|passwd|credential|credentials"
_FLAG = re.compile(rf"--?(?:.*[-_.])?(?:{_WORDS})", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"""((?:(?<![A-Za-z])(?i:{_WORDS})|(?<=[a-z0-9])(?:Key|Token|Secret|Password))["']?\s*[:=]\s*["']?)[^"'\s,}}]+"""
)
_SECRET_VALUE = re.compile(r"\b(?:sk-|hf_|ghp_|xox[abp]-)[A-Za-z0-9_-]{8,}")
_BEARER = re.compile(r"(?<=\b[Bb]earer )\S+")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def actor() -> str:
    """``user@host`` of the effective user."""
    return f"{user_name(os.geteuid())}@{os.uname().nodename}"


def user_name(uid: int) -> str:
    """The login name of a uid, or ``uid N`` where the system knows none (containers)."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command as it could be typed again, with every value that looks like a secret replaced by REDACTED."""
    words = list(sys.argv if argv is None else argv)
    if words:
        words[0] = Path(words[0]).name
    shown: list[str] = []
    hide_next = False
    for word in words:
        hidden = hide_next and not word.startswith("--")
        hide_next = not hidden and _FLAG.fullmatch(word) is not None
        shown.append(_HIDDEN if hidden else shlex.quote(redact(word)))
    return " ".join(shown)


def redact(text: str) -> str:
    """``text`` without what looks like a secret: values of keys and tokens, bearer and vendor tokens, URL logins."""
    for pattern in (_SECRET_VALUE, _BEARER, _USERINFO):
        text = pattern.sub(_HIDDEN, text)
    return _ASSIGNED.sub(rf"\g<1>{_HIDDEN}", text)
