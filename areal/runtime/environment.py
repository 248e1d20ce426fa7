"""The variables that a run inherits from its caller. A run outlives the shell and the folder in which it was started:
relative paths become absolute, and variables about the caller's terminal or interpreter are left out."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from contextlib import suppress

# PYTHONINSPECT turns every exit status into 0; PYTHONSAFEPATH is set explicitly where it is needed.
_LEFT_OUT = frozenset(
    ("AREAL_CRASH_AT", "COLUMNS", "LINES", "OLDPWD", "PWD", "PYTHONINSPECT", "PYTHONIOENCODING", "PYTHONSAFEPATH")
) | {"PYTHONSTARTUP"}
_LISTS = ("LD_LIBRARY_PATH", "PATH", "PYTHONPATH")
_PATHS = (
    *("AREAL_HOME", "HF_HOME", "HF_HUB_CACHE", "HOME", "HUGGINGFACE_HUB_CACHE", "REQUESTS_CA_BUNDLE"),
    *("SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "TORCH_HOME", "TRITON_CACHE_DIR", "VIRTUAL_ENV", "XDG_CACHE_HOME"),
)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` for a process that may be restarted in another folder. An empty entry in a list of paths means
    the working folder; it is dropped, since a trailing colon is never intended."""
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
    """Return a list of paths, such as ``PYTHONPATH``, with absolute paths and without its empty entries."""
    return os.pathsep.join(map(_absolute, filter(None, listed.split(os.pathsep))))


def _absolute(path: str) -> str:
    try:
        return path if path.startswith(("/", "~")) else os.path.abspath(path)
    except FileNotFoundError:  # the working folder is gone
        return path
