"""Clients that are programs: where they are, and one run of one in a home of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def npm_folder() -> Path:
    """The folder whose ``node_modules`` has the clients of npm. Skips without one."""
    named = os.environ.get("AREAL_NPM_CLIENTS")
    if named is None or shutil.which("node") is None:
        pytest.skip("set AREAL_NPM_CLIENTS to a folder with node_modules, and have node on PATH")
    return Path(named)


def npm_program(name: str) -> str:
    program = npm_folder() / "node_modules" / ".bin" / name
    if not program.exists():
        pytest.skip(f"{program} is not there")
    return str(program)


def run(home: Path, *argv: str, timeout_s: float = 280.0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder of its own below ``home``, without a terminal."""
    work = home / "work"
    work.mkdir(exist_ok=True)
    folders = {name: str(home / name.lower()) for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")}
    given = {"PATH": os.environ["PATH"], "HOME": str(home), **folders, **env}
    quiet = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "check": False}
    return subprocess.run(argv, cwd=work, env=given, timeout=timeout_s, **quiet)
