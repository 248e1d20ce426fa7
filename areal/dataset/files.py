"""Rows of JSONL, JSON, Parquet and Arrow files, also of what ``datasets`` saved to disk; every fault with its file and
line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from areal.dataset.rows import Row, Rows
from areal.errors import ArealError, NotFound, UsageFault
from areal.installation import install_command

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
_SAVED, _SAVED_SPLITS = ("dataset_info.json", "state.json"), "dataset_dict.json"  # beside what datasets saves


class BadData(ArealError):
    exit_code = 3


def read_rows(path: Path, split: str | None = None) -> Rows:
    """A file; or of a folder the files whose names begin with ``split`` (``train.jsonl``, ``train-00000-of-...``),
    else all of them. Raises NotFound, BadData."""
    return read_files([path] if path.is_file() else _files_of(path, split), str(path))


def read_files(files: Iterable[Path], source: str) -> Rows:
    """Their rows, one after the other; ``source`` is what they are, for errors. Raises BadData."""
    found = [placed for file in files for placed in _read(file)]
    rows = Rows((row for row, _ in found), source, [place for _, place in found])
    if not rows:
        raise BadData(f"{source}: there are no rows")
    return rows


def _files_of(folder: Path, split: str | None) -> list[Path]:
    if not folder.is_dir():
        raise NotFound(f"there is no data set {folder}", hint=f"a path is relative to the working folder, {Path.cwd()}")
    if (folder / _SAVED_SPLITS).is_file():
        return _files_of_split(folder, split)
    if all((folder / name).is_file() for name in _SAVED):
        return sorted(folder.glob("*.arrow"))
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


Placed = tuple[Row, str]
"""A row, and where it stands: ``file:line``, or ``file: row N``."""


def _files_of_split(folder: Path, split: str | None) -> list[Path]:
    """Of a ``DatasetDict`` that was saved to disk."""
    splits = _decoded((folder / _SAVED_SPLITS).read_text(encoding="utf-8"), str(folder / _SAVED_SPLITS))["splits"]
    if split is None or split not in splits:
        raise NotFound(f"{folder} has no split {split!r}; there is {', '.join(splits) or 'nothing'}")
    return sorted((folder / split).glob("*.arrow"))


def _read(file: Path) -> Iterator[Placed]:
    if file.suffix in (".parquet", ".arrow"):
        yield from _columns(file)
    elif file.suffix == ".json":
        yield from _json(file)
    elif file.suffix == ".jsonl":
        yield from _jsonl(file)
    else:
        raise UsageFault(f"{file}: a data set is one of {', '.join(SUFFIXES)}")


def _jsonl(file: Path) -> Iterator[Placed]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{file}:{number}"
                yield _row(_decoded(line, place), place), place


def _json(file: Path) -> Iterator[Placed]:
    data = _decoded(file.read_text(encoding="utf-8"), str(file))
    if not isinstance(data, list):
        raise BadData(f"{file}: must be a list of rows")
    for number, item in enumerate(data):
        yield _row(item, f"{file}: row {number}"), f"{file}: row {number}"


def _decoded(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadData(f"{where}: no JSON: {error.msg} after {_tail(text[: error.pos])}") from error


def _tail(text: str) -> str:
    """The end of what was read, for an error."""
    return f"{text.rstrip()[-30:]!r}" if text.strip() else "nothing"


def _row(item: Any, where: str) -> Row:
    if not isinstance(item, dict):
        raise BadData(f"{where}: a row is a map of columns, not {type(item).__name__}")
    return item


def _columns(file: Path) -> Iterator[Placed]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ArealError(f"{file} needs pyarrow", hint=install_command("train")) from error
    try:
        if file.suffix == ".parquet":
            table = parquet.read_table(file)
        else:
            with arrow.memory_map(str(file)) as source:
                table = arrow.ipc.open_stream(source).read_all()
    except (arrow.ArrowException, OSError) as error:
        raise BadData(f"{file}: cannot be read as {file.suffix[1:]}: {error}") from error
    for number, row in enumerate(table.to_pylist()):
        yield row, f"{file}: row {number}"
