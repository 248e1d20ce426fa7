"""What a starting component is doing, for whoever waits for it: ``$AREAL_STAGE_FILE``, replaced whole each time."""

from __future__ import annotations

import json
import os
from pathlib import Path


def report_stage(stage: str, *, done: int | None = None, total: int | None = None) -> None:
    """Say where the start is. Without ``AREAL_STAGE_FILE`` nobody listens, and this does nothing."""
    path = os.environ.get("AREAL_STAGE_FILE")
    if not path:
        return
    target = Path(path)
    draft = target.with_name(f"{target.name}.{os.getpid()}")
    draft.write_text(json.dumps({"stage": stage, "done": done, "total": total}), encoding="utf-8")
    draft.replace(target)
