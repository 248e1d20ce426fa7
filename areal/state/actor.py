"""Who acts, and with which command: recorded beside every change, so it must hold no secret."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

_HIDDEN = "REDACTED"
_SECRET_WORD = re.compile(r"(?:^|[-_.])(?:key|token|secret|password|passwd|pwd|credential|credentials)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"\b(?:sk-|hf_|ghp_|xox[abp]-)[A-Za-z0-9_-]{8,}")
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
        if hide_next and not word.startswith("-"):
            shown.append(_HIDDEN)
            hide_next = False
            continue
        name, equals, _ = word.partition("=")
        hide_next = not equals and word.startswith("-") and _is_secret(name)
        shown.append(f"{name}={_HIDDEN}" if equals and _is_secret(name) else _redact(word))
    return " ".join(word if word == _HIDDEN else shlex.quote(word) for word in shown)


def _is_secret(name: str) -> bool:
    return _SECRET_WORD.search(name.lstrip("-")) is not None


def _redact(word: str) -> str:
    return _USERINFO.sub(_HIDDEN, _SECRET_VALUE.sub(_HIDDEN, word))
