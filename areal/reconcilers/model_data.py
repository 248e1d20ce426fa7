"""The folder of a Model's journals: where its data proxies record sessions, and what is left of it after the Model.

A Model's recorded trajectories outlive each of its processes. They go with the Model, but for those that are finished
and that nobody has exported: hours of rollouts are not thrown away by a ``delete``. A Model of the same name serves
them again; whoever does not want them removes the folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from areal.resources.kinds import Ref, check_name
from areal.state.home import Home

_DISPOSAL = "areal.services.inference.recording.disposal"
_DEADLINE_S = 60.0


def data_folder(home: Home, model: str) -> Path:
    return home.data / check_name(model)


def router_file(home: Home, service: Ref) -> Path:
    """What was declared to the routers of a service, and where its router is."""
    return home.object_folder(service) / "routes.json"


def left_behind(home: Home, models: Iterable[str]) -> list[Path]:
    """Folders of Models that are none of ``models``."""
    try:
        found = sorted(path for path in home.data.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    known = set(models)
    return [path for path in found if path.name not in known]


def dispose_of_data(home: Home, ref: Ref) -> str | None:
    """Remove what nobody could want, in a process of the recording's own: only that reads journals. What has to be said
    about the rest, or None where there is none."""
    folder = data_folder(home, ref.name)
    if not folder.exists():
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-m", _DISPOSAL, str(folder)],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            stdin=subprocess.DEVNULL,
            check=True,
        )
        remains = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        return f"{ref}: {folder} is kept: {_last_line(error.stderr)}"
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        return f"{ref}: {folder} is kept: what is recorded in it could not be read: {error}"
    return _sentence(str(ref), folder, remains)


def _sentence(ref: str, folder: Path, remains: dict[str, object]) -> str | None:
    reasons = []
    finished = remains["finished"]
    if finished:
        plural = "trajectory was" if finished == 1 else "trajectories were"
        reasons.append(f"{finished} finished {plural} never exported")
    if remains["unreadable"]:
        reasons.append(f"unreadable journals: {_listed(remains['unreadable'])}")
    if remains["served"]:
        reasons.append(f"journals in use: {_listed(remains['served'])}")
    if not reasons:
        return None
    return f"{ref}: {folder} is kept: {'; '.join(reasons)}. A Model of this name serves it again; remove it by hand"


def _listed(names: object) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list) else str(names)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no reason given"
