"""How this installation of areal starts a module of its own, and gets an extra: an index may have another project of
the same name."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit


def module_argv(module: str, *words: str) -> list[str]:
    """The argv of a module of ours. ``-P``: a file of the working folder never shadows a module that it imports."""
    return [sys.executable, "-P", "-m", module, *words]


def install_command(extra: str) -> str:
    """The shell command that adds ``extra`` from where areal itself was installed."""
    return _command(extra, _recorded())


def origin() -> str:
    """The source of this installation: a URL for pip, a folder, "" for an index or where areal is not installed."""
    source = _recorded()
    if source is None:
        return ""
    return unquote(urlsplit(str(source["url"])).path) if "dir_info" in source else _url(source)


def _recorded() -> Mapping[str, Any] | None:
    from importlib import metadata  # it takes as long as a light command's start

    # A build leaves a folder of metadata in the source, which a Python that starts there finds first: it does not tell.
    texts = (found.read_text("direct_url.json") for found in metadata.distributions(name="areal"))
    recorded = next(filter(None, texts), None)
    return json.loads(recorded) if recorded else None


def _url(source: Mapping[str, Any]) -> str:
    if "vcs_info" not in source:
        return str(source["url"])
    vcs = source["vcs_info"]
    return f"{vcs['vcs']}+{source['url']}@{vcs.get('requested_revision') or vcs['commit_id']}"


def _command(extra: str, source: Mapping[str, Any] | None) -> str:
    """``source``: a PEP 610 record; None where areal came from an index or is not installed."""
    if source is None:
        return f"pip install -e '.[{extra}]', in a checkout of areal's source"
    url = str(source["url"])
    if "dir_info" in source:
        folder = unquote(urlsplit(url).path)
        editable = "-e " if source["dir_info"].get("editable") else ""
        return f"pip install {editable}'{folder}[{extra}]'"
    return f"pip install 'areal[{extra}] @ {_url(source)}'"
