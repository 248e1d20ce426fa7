"""What a component reports of itself in ``$AREAL_STAGE_FILE``, which its supervisor names: the stage of its start, and
a failure of its work. The file is replaced whole each time."""

from __future__ import annotations

import json
import os

from areal.files import replace_file

FAILING = "failing"  # the field of a failure


def report_stage(stage: str, *, done: int | None = None, total: int | None = None, failing: str = "") -> None:
    """Report the stage, and why the work of a running component fails. Does nothing without ``AREAL_STAGE_FILE``."""
    path = os.environ.get("AREAL_STAGE_FILE")
    if path:
        report = {"stage": stage, "done": done, "total": total} | ({FAILING: failing} if failing else {})
        replace_file(path, json.dumps(report).encode())
