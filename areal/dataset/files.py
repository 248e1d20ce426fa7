"""A data set in memory, with as much of the interface of ``datasets`` as training needs, read from JSONL, JSON, Parquet
and Arrow files, also from those that ``datasets`` saved to disk. Every fault has its file and line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from areal.errors import ArealError, NotFound, UsageFault
from areal.installation import install_command

Row = dict[str, Any]


class Rows(Sequence[Row]):
    """Immutable: ``map`` and ``filter`` give new ones. ``source``, and ``places`` of the rows in it, are for errors."""

    def __init__(self, rows: Iterable[Row], source: str = "", places: Sequence[str] = ()) -> None:
        self._rows = list(rows)
        self.source = source
        self._places = places

    def place(self, index: int) -> str:
        """The file and line of a row."""
        return self._places[index] if index < len(self._places) else f"{self.source or 'the data set'}: row {index}"

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> Row | Rows:
        return Rows(self._rows[index], self.source) if isinstance(index, slice) else self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Rows({len(self._rows)} rows of {self.column_names}, from {self.source or 'memory'})"

    @property
    def column_names(self) -> list[str]:
        return list(self._rows[0]) if self._rows else []

    def map(self, function: Callable[[Row], Row]) -> Rows:
        return Rows((function(row) for row in self._rows), self.source)

    def filter(self, function: Callable[[Row], bool]) -> Rows:
        return Rows((row for row in self._rows if function(row)), self.source)

    def select(self, indices: Iterable[int]) -> Rows:
        return Rows((self._rows[index] for index in indices), self.source)


SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
_SAVED, _SAVED_SPLITS = ("dataset_info.json", "state.json"), "dataset_dict.json"  # beside what datasets saves


class BadData(ArealError):
    exit_code = 3


def read_rows(path: Path, split: str | None = None) -> Rows:
    """A file; or of a folder the files whose names begin with ``split`` (``train.jsonl``, ``train-00000-of-...``),
    else all of them. Raises NotFound, BadData."""
    if path.is_file() and path.suffix not in SUFFIXES:
        raise UsageFault(f"{path}: a data set is one of {', '.join(SUFFIXES)}")
    return read_files([path] if path.is_file() else _files_of(path, split), str(path))


def read_files(files: Iterable[Path], source: str) -> Rows:
    """Their rows, one after the other: Parquet and Arrow by their suffix, others are JSON. ``source`` is for errors.
    Raises BadData."""
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
    """The files of a split of a ``DatasetDict`` that was saved to disk."""
    splits = _decoded((folder / _SAVED_SPLITS).read_text(encoding="utf-8"), str(folder / _SAVED_SPLITS))["splits"]
    if split is None or split not in splits:
        raise NotFound(f"{folder} has no split {split!r}; there is {', '.join(splits) or 'nothing'}")
    return sorted((folder / split).glob("*.arrow"))


def _read(file: Path) -> Iterator[Placed]:
    return _columns(file) if file.suffix in (".parquet", ".arrow") else _json(file)


def _json(file: Path) -> Iterator[Placed]:
    """A file that begins with a bracket is one list, any other one is lines."""
    try:
        with file.open(encoding="utf-8") as lines:
            if lines.read(1) == "[":
                lines.seek(0)
                for number, item in enumerate(_decoded(lines.read(), str(file))):
                    yield _row(item, f"{file}: row {number}"), f"{file}: row {number}"
                return
            lines.seek(0)
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = f"{file}:{number}"
                    yield _row(_decoded(line, place), place), place
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"cannot read {file}: {error}") from error


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
        raise ArealError(f"{file} needs pyarrow", hint=install_command("parquet")) from error
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
