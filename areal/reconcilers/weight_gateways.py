"""The weight-update gateways of training jobs: each has a file in the folder of its job, which names its address."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from areal.files import parse_json
from areal.state.home import read_key
from areal.wire.processes import WEIGHT_UPDATE_FILE


class GatewayRecord(NamedTuple):
    """One gateway. ``name``: the name of its job. ``url`` and ``pid`` come from its file; the process may have died
    since."""

    name: str
    folder: Path
    url: str
    pid: int
    key_file: str | None

    def key(self) -> str | None:
        """Return the admin key; None if there is no key file or it is gone. Raises ArealError if it cannot be read."""
        return read_key(self.key_file) if self.key_file is not None and Path(self.key_file).exists() else None


def read_gateway(folder: Path) -> GatewayRecord:
    """Read a gateway's file. Raises OSError if the job has no gateway, and ValueError, KeyError or TypeError if the
    file is damaged."""
    about = parse_json((folder / WEIGHT_UPDATE_FILE).read_text(encoding="utf-8"))
    key_file = about["admin_key_file"]
    if not isinstance(about["url"], str) or not (key_file is None or isinstance(key_file, str)):
        raise TypeError("url and admin_key_file are not text")
    return GatewayRecord(folder.name, folder, about["url"], int(about["pid"]), key_file)
