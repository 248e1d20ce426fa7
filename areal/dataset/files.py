"""Rows of JSONL, JSON and Parquet files; every fault with its file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal.dataset.rows import Row, Rows
from areal.errors import ArealError, NotFound, UsageFault

SUFFIXES = (".jsonl", ".json", ".parquet")


class BadData(ArealError):
    exit_code = 3


def read_rows(path: Path, split: str | None = None) -> Rows:
    """A file; or of a folder the files whose names begin with ``split`` (``train.jsonl``, ``train-00000-of-...``),
    else all of them. Raises NotFound, BadData."""
    files = [path] if path.is_file() else _files_of(path, split)
    rows = Rows((row for file in files for row in _read(file)), str(path))
    if not rows:
        raise BadData(f"{path}: there are no rows")
    return rows


def _files_of(folder: Path, split: str | None) -> list[Path]:
    if not folder.is_dir():
        raise NotFound(f"there is no data set {folder}")
    for place in (folder, folder / "data", folder / "main"):
        found = sorted(each for each in place.glob("*") if each.suffix in SUFFIXES)
        of_split = [each for each in found if split is not None and each.name.startswith(split)]
        if of_split:
            return of_split
        if found and split is None:
            return found
    there = sorted(each.name for each in folder.rglob("*") if each.suffix in SUFFIXES)
    what = f"split {split!r}" if split is not None else "JSONL, JSON or Parquet file"
    raise NotFound(f"{folder} has no {what}; there is {', '.join(there[:8]) or 'nothing'}")


def _read(file: Path) -> Iterator[Row]:
    if file.suffix == ".parquet":
        yield from _parquet(file)
    elif file.suffix == ".json":
        yield from _json(file)
    elif file.suffix == ".jsonl":
        yield from _jsonl(file)
    else:
        raise UsageFault(f"{file}: a data set is one of {', '.join(SUFFIXES)}")


def _jsonl(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _row(_decoded(line, f"{file}:{number}"), f"{file}:{number}")


def _json(file: Path) -> Iterator[Row]:
    data = _decoded(file.read_text(encoding="utf-8"), str(file))
    if not isinstance(data, list):
        raise BadData(f"{file}: must be a list of rows")
    for number, item in enumerate(data):
        yield _row(item, f"{file}: row {number}")


def _decoded(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadData(f"{where}: no JSON: {error}") from error


def _row(item: Any, where: str) -> Row:
    if not isinstance(item, dict):
        raise BadData(f"{where}: a row is a map of columns, not {type(item).__name__}")
    return item


def _parquet(file: Path) -> Iterator[Row]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ArealError(f"{file}: Parquet needs pyarrow", hint="pip install 'areal[train]'") from error
    try:
        table = parquet.read_table(file)
    except (arrow.ArrowException, OSError) as error:
        raise BadData(f"{file}: no Parquet: {error}") from error
    yield from table.to_pylist()
