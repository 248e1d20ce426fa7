"""How this installation of areal gets an extra: an index may have another project of the same name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """The shell command that adds ``extra`` from where areal itself was installed."""
    from importlib import metadata  # it takes as long as a light command's start

    try:
        recorded = metadata.distribution("areal").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        recorded = None
    return _command(extra, json.loads(recorded) if recorded else None)


def _command(extra: str, source: Mapping[str, Any] | None) -> str:
    """``source``: a PEP 610 record; None where areal came from an index or is not installed."""
    if source is None:
        return f"pip install -e '.[{extra}]', in a checkout of areal's source"
    url = str(source["url"])
    if "dir_info" in source:
        folder = unquote(urlsplit(url).path)
        editable = "-e " if source["dir_info"].get("editable") else ""
        return f"pip install {editable}'{folder}[{extra}]'"
    if "vcs_info" in source:
        vcs = source["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs.get('requested_revision') or vcs['commit_id']}"
    return f"pip install 'areal[{extra}] @ {url}'"
