"""AReaL's import path of loggers: the standard library's, at level INFO if the driver has not configured logging."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def getLogger(name: str | None = None, *_: Any) -> logging.Logger:
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, format=_FORMAT)
    return logging.getLogger(name)


def setup_file_logging(path: str, *_: Any) -> None:
    """Write all records to a file too, whose folder is made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT))
    getLogger().addHandler(handler)


def __getattr__(name: str) -> Any:
    return getattr(logging, name)
