"""Where the weight-update gateway of a run is, as a file: ``areal weight-update`` reads it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from areal.resources.bind import base_url
from areal.services.web.options import ServeOptions


@contextlib.contextmanager
def discoverable(path: Path | None, options: ServeOptions, admin_key_file: str | None) -> Iterator[None]:
    """Write ``path`` aside and rename it: whoever reads it reads all of it. Removed at exit while it is still ours."""
    if path is None:
        yield
        return
    about = {
        "url": base_url(options.host, options.port),
        "pid": os.getpid(),
        "admin_key_file": str(Path(admin_key_file).absolute()) if admin_key_file else None,
    }
    text = json.dumps(about)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}.tmp")
    aside.write_text(text)
    aside.rename(path)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            if path.read_text() == text:
                path.unlink()
