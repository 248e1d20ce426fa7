"""The variables that a run inherits from its caller. A run outlives the shell and the folder that it was started from:
relative paths become absolute, and what describes the caller's own terminal or interpreter is left out."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from contextlib import suppress

# PYTHONINSPECT turns each exit status into 0; PYTHONSAFEPATH is set where it is wanted.
_LEFT_OUT = frozenset(
    ("AREAL_CRASH_AT", "COLUMNS", "LINES", "OLDPWD", "PWD", "PYTHONINSPECT", "PYTHONIOENCODING", "PYTHONSAFEPATH")
) | {"PYTHONSTARTUP"}
_LISTS = ("LD_LIBRARY_PATH", "PATH", "PYTHONPATH")
_PATHS = (
    *("AREAL_HOME", "HF_HOME", "HF_HUB_CACHE", "HOME", "HUGGINGFACE_HUB_CACHE", "REQUESTS_CA_BUNDLE"),
    *("SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "TORCH_HOME", "TRITON_CACHE_DIR", "VIRTUAL_ENV", "XDG_CACHE_HOME"),
)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for a process that may start again in another folder. An empty entry of a list of paths, which is the
    working folder, is dropped: a trailing colon is never meant."""
    kept = {name: value for name, value in environ.items() if name not in _LEFT_OUT}
    for name in _LISTS:
        if name in kept:
            kept[name] = absolute_paths(kept[name])
    for name in _PATHS:
        if kept.get(name):
            kept[name] = _absolute(kept[name])
    if not kept.get("PYTHONPATH", "."):
        del kept["PYTHONPATH"]
    if not kept.get("HOME"):
        with suppress(KeyError):  # a user id without a name
            kept["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
    return {**kept, "PYTHONUTF8": "1"}


def absolute_paths(listed: str) -> str:
    """A list of paths, such as that of ``PYTHONPATH``, without its empty entries and relative to no folder."""
    return os.pathsep.join(map(_absolute, filter(None, listed.split(os.pathsep))))


def _absolute(path: str) -> str:
    try:
        return path if path.startswith(("/", "~")) else os.path.abspath(path)
    except FileNotFoundError:  # the working folder is gone
        return path
