"""This installation of areal: how to start one of its modules, how to install an extra, and whether another project
hides it. The name `areal` belongs to another project on the package index, so this package is installed as
``DISTRIBUTION``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "arealctl"
_PACKAGE = Path(__file__).resolve().parent


def module_argv(module: str, *words: str) -> list[str]:
    """Return the argv that starts a module of areal. ``-P``: files in the working folder do not shadow the modules that
    it imports."""
    return [sys.executable, "-P", "-m", module, *words]


def install_command(extra: str) -> str:
    """Return the shell command that installs ``extra`` from the source of this installation."""
    return _command(extra, _recorded())


def origin() -> str:
    """Return the source of this installation: a URL for pip, or a folder; "" for a package index, or if areal is not
    installed."""
    source = _recorded()
    if not source:
        return ""
    return _folder(source) if "dir_info" in source else _url(source)


def requirement(extras: str) -> str:
    """Return pip's requirement for this areal with ``extras``; "" if areal is not installed."""
    source = _recorded()
    return "" if source is None else _requirement(extras, source)


class ForeignProject(NamedTuple):
    """Another project with the name `areal` that this Python, or one that starts in this folder, may import."""

    what: str
    why: str
    fix: str


def conflicts(search: Sequence[str]) -> Iterator[ForeignProject]:
    """Yield such projects among the installed distributions, and in the folders of ``search``."""
    from importlib import metadata

    again = install_command("train").replace("[train]", "").replace("pip install", "pip install --force-reinstall")
    hidden = "its package and its command have the names of ours: it replaces them, or is imported in their place"
    for found in metadata.distributions(name="areal"):
        record = found.read_text("direct_url.json")
        if found.read_text("WHEEL") is None or (record and Path(_folder(json.loads(record)), "areal") == _PACKAGE):
            continue  # metadata of a build, or this checkout, installed before its distribution was renamed
        what = f"the distribution areal {found.version} in {found.locate_file('')} is another project"
        yield ForeignProject(what, hidden, f"pip uninstall areal, then {again}")
    for folder in dict.fromkeys(str(Path(each).resolve()) for each in search):
        for module in (Path(folder, "areal", "__init__.py"), Path(folder, "areal.py")):
            if module.exists() and module.resolve().parent != _PACKAGE:
                why = f"a Python that starts there, or has {folder} on its path, imports it in place of {_PACKAGE}"
                yield ForeignProject(
                    f"another areal: {module}", why, f"start from another folder than {folder}, or rename it"
                )


def searched() -> list[str]:
    """Return the folders in which this Python, a script in the working folder, or their child processes look for
    `areal`."""
    return [".", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *filter(os.path.isdir, sys.path)]


def _recorded() -> Mapping[str, object] | None:
    """Return the PEP 610 record of this installation: empty if the source was an index, None without an
    installation."""
    from importlib import metadata  # it takes as long as a light command's start

    for found in metadata.distributions(name=DISTRIBUTION):
        # A build leaves a folder of metadata in the source, which a Python that starts there finds first: no wheel.
        if found.read_text("WHEEL") is not None:
            return json.loads(found.read_text("direct_url.json") or "{}")
    return None


def _folder(source: Mapping[str, object]) -> str:
    return unquote(urlsplit(str(source["url"])).path)


def _url(source: Mapping[str, Any]) -> str:
    if "vcs_info" not in source:
        return str(source["url"])
    vcs = source["vcs_info"]
    return f"{vcs['vcs']}+{source['url']}@{vcs.get('requested_revision') or vcs['commit_id']}"


def _requirement(extras: str, source: Mapping[str, object]) -> str:
    if not source:
        return f"{DISTRIBUTION}[{extras}]"
    if "dir_info" in source:
        return f"{_folder(source)}[{extras}]"
    return f"{DISTRIBUTION}[{extras}] @ {_url(source)}"


def _command(extra: str, source: Mapping[str, Any] | None) -> str:
    """``source``: a record as of ``_recorded``."""
    if source is None:
        return f"pip install -e '.[{extra}]', in a checkout of areal's source"
    editable = "-e " if source.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}'{_requirement(extra, source)}'"
