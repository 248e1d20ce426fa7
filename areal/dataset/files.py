"""Data sets from local files or the Hugging Face hub: JSONL, JSON, Parquet and Arrow.

Rows are held in memory, with what training needs of the interface of ``datasets``. Errors name file and line.

The ``configs:`` block at the head of a hub repository's README.md assigns files to splits; without one, the words
train, validation and test in the file paths do (https://huggingface.co/docs/hub/datasets-data-files-configuration).
Files of other formats are read by the package ``datasets`` if that is installed.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, overload

from areal.errors import ArealError, NotFound, UsageFault
from areal.hub import Hub, is_id, literal_pattern
from areal.installation import install_command

Row = dict[str, Any]
_FORMS = "a data set is JSON lines (an object in each line), a JSON list, Parquet or Arrow, as UTF-8 and not compressed"
_SAVED, _SAVED_SPLITS = ("dataset_info.json", "state.json"), "dataset_dict.json"  # written by save_to_disk of datasets
_CARD = "README.md"
_DEFAULT, _USUAL = "", ("default", "main")


class Rows(Sequence[Row]):
    """An immutable sequence of rows: ``map``, ``filter``, ``select`` return new ones. ``places``: for errors."""

    def __init__(self, rows: Iterable[Row], source: str = "", places: Sequence[str] = ()) -> None:
        self._rows = list(rows)
        self.source = source
        self._places = places

    def place(self, index: int) -> str:
        """Return the file and line of a row."""
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


_BINARY = (".parquet", ".arrow")
SUFFIXES = (".jsonl", ".json", *_BINARY)


class BadData(ArealError):
    exit_code = 3


def read_dataset(source: str, split: str | None = None) -> Rows:
    """Read a file or folder, or ``NAME[:CONFIG][:SPLIT]`` of the hub. Raises NotFound, UsageFault, BadData."""
    if "://" in source:
        raise NotFound(f"{source} is a URL: a data set is a file, a folder, or a name of the hub", hint="download it")
    path = Path(source).expanduser()
    if path.exists() or source.startswith((".", "/", "~")) or source.endswith(SUFFIXES):
        return read_rows(path, split)
    return hub_rows(source, split)


def read_rows(path: Path, split: str | None = None, *, first: int | None = None) -> Rows:
    """Read a file, or the files of a folder whose names begin with ``split`` (``train.jsonl``, ``train-00000-of-...``);
    without ``split``, all of its files. Raises NotFound, UsageFault, BadData."""
    if path.is_file() and path.suffix not in SUFFIXES:
        raise UsageFault(f"{path}: a data set is one of {', '.join(SUFFIXES)}")
    return read_files([path] if path.is_file() else _files_of(path, split), str(path), first=first)


def read_files(files: Iterable[Path], source: str, *, first: int | None = None) -> Rows:
    """Return the rows of files, or the ``first`` of them: Parquet and Arrow by suffix, others JSON. Raises BadData."""
    placed = (each for file in files for each in (_columns(file) if file.suffix in _BINARY else _json(file)))
    found = list(islice(placed, first))
    rows = Rows((row for row, _ in found), source, [place for _, place in found])
    if not rows:
        raise BadData(f"{source}: there are no rows")
    return rows


def _files_of(folder: Path, split: str | None) -> list[Path]:
    if not folder.is_dir():
        raise NotFound(f"there is no data set {folder}", hint=f"a path is relative to the working folder, {Path.cwd()}")
    if (folder / _SAVED_SPLITS).is_file():
        splits = _decoded((folder / _SAVED_SPLITS).read_text(encoding="utf-8"), folder / _SAVED_SPLITS)["splits"]
        if split is None or split not in splits:
            raise NotFound(f"{folder} has no split {split!r}; there is {', '.join(splits) or 'nothing'}")
        return sorted((folder / split).glob("*.arrow"))
    if all((folder / name).is_file() for name in _SAVED):
        return sorted(folder.glob("*.arrow"))
    for place in (folder, folder / "data", folder / "main"):
        found = sorted(each for each in place.glob("*") if each.suffix in SUFFIXES)
        # Its file or its parts, train.jsonl or train-00000-of-00002.parquet, and not train_hard.jsonl.
        pattern = re.compile(re.escape(split or "") + r"[-_.]?\d*(-of-\d+)?(-[0-9a-f]{6,})?\.")
        of_split = [each for each in found if split is not None and pattern.match(each.name)]
        if of_split:
            _check_once(of_split)
            return of_split
        if found and split is None:
            return found
    there = sorted(each.name for each in folder.rglob("*") if each.suffix in SUFFIXES)
    what = f"split {split!r}" if split is not None else "JSONL, JSON or Parquet file"
    raise NotFound(f"{folder} has no {what}; there is {', '.join(there[:8]) or 'nothing'}")


def _check_once(files: list[Path]) -> None:
    """Raise BadData if a split exists in two formats, because each row would be read twice."""
    by_stem: dict[str, Path] = {}
    for file in files:
        if (other := by_stem.setdefault(file.stem, file)) != file:
            raise BadData(f"{other} and {file.name} are one split in two formats: name the file that is meant")


Placed = tuple[Row, str]
"""A row and its place: ``file:line``, or ``file: row N``."""


def _json(file: Path) -> Iterator[Placed]:
    """Yield the rows of a JSON list if the text of the file begins with ``[``, else of JSON lines."""
    begun = False
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                text, place = _utf8(line, file, number), f"{file}:{number}"
                if not begun and text.lstrip().startswith("["):
                    for index, item in enumerate(_decoded(text + _utf8(lines.read(), file, number + 1), file, number)):
                        place = f"{file}: row {index}"
                        yield _row(item, place), place
                    return
                if text.strip():
                    begun = True
                    yield _row(_decoded(text.rstrip("\r\n"), file, number), place), place
    except OSError as error:
        raise BadData(f"cannot read {file}: {error}") from error


def _utf8(data: bytes, file: Path, line: int) -> str:
    """Decode the text from this line on. Raises BadData."""
    try:
        return data.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        *before, last = data[: error.start].split(b"\n")
        wrong = f"0x{data[error.start]:02x} in column {len(last.decode()) + 1}"
        problem = f"no UTF-8: {wrong}, after {last.decode()[-30:]!r}"
        raise BadData(f"{file}:{line + len(before)}: {problem}", hint=_FORMS) from error


def _decoded(text: str, file: Path, line: int = 1) -> Any:
    """Parse the JSON text that begins on this line. Raises BadData."""
    try:
        found = json.loads(text, object_pairs_hook=_object)
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except json.JSONDecodeError as error:
        read = text[: error.pos].rstrip()[-30:]
        problem = f"{error.msg.removesuffix(' at')} in column {error.colno}, after {repr(read) if read else 'nothing'}"
        raise BadData(f"{file}:{line + error.lineno - 1}: no JSON: {problem}", hint=_FORMS) from error
    except UnicodeEncodeError as error:
        raise BadData(f"{file}:{line}: a text has half of a surrogate pair: {error.object[error.start]!r}") from error
    except RecursionError:
        raise BadData(f"{file}:{line}: it has too many levels") from None
    except ValueError as error:
        raise BadData(f"{file}:{line}: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is given twice")
    return found


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
    number = 0
    try:
        with arrow.memory_map(str(file)) as source:
            is_parquet = file.suffix == ".parquet"
            batches = parquet.ParquetFile(source).iter_batches() if is_parquet else arrow.ipc.open_stream(source)
            for batch in batches:
                names = batch.schema.names
                if twice := [name for name in names if names.count(name) > 1]:
                    raise BadData(f"{file}: the column {twice[0]!r} is given twice")
                for row in batch.to_pylist():
                    yield row, f"{file}: row {number}"
                    number += 1
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:  # a text that is not UTF-8, year 10000
        where = f"{file}: after row {number - 1}" if number else file
        raise BadData(f"{where}: cannot be read as {file.suffix[1:]}: {error}") from error


# Data sets of the hub

_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
Files = Mapping[str, Sequence[str]]
"""Patterns of files by split."""


def hub_rows(source: str, split: str | None = None) -> Rows:
    """Read ``NAME``, ``NAME:SPLIT`` or ``NAME:CONFIG:SPLIT`` of the hub. ``split`` applies if ``source`` has none.
    Raises NotFound, UsageFault, BadData."""
    hub = Hub.of()
    name, config, split = _parts(source, split)
    commit = hub.commit(name, kind="dataset")
    files = _hub_files(hub, name, commit, config, split)
    if not files or not all(file.endswith(SUFFIXES) for file in files):
        try:
            import datasets
        except ImportError as error:
            raise NotFound(
                f"the data set {name} of the hub is not made of JSONL, JSON or Parquet files; to read it, the package"
                " datasets is needed",
                hint="pip install datasets",
            ) from error
        try:
            found = datasets.load_dataset(name, config, split=split or "train", revision=commit)
        except (FileNotFoundError, ValueError, ConnectionError) as error:
            raise NotFound(f"the data set {name} cannot be downloaded: {error}") from error
        return Rows((dict(row) for row in found), name)
    folder = hub.snapshot(name, commit, "dataset", only=tuple(map(literal_pattern, files)))
    return read_files([folder / file for file in files], name)


def cached_files(source: str, split: str | None, hub: Hub) -> list[Path] | None:
    """Return the files that ``hub_rows`` reads; None if they are unknown, not all of them are in the cache, or another
    package reads them."""
    try:
        name, config, split = _parts(source, split)
        commit = hub.commit(name, kind="dataset")
        files = _hub_files(hub, name, commit, config, split)
    except ArealError:
        return None
    folder = hub.repository(name, "dataset") / "snapshots" / commit
    found = [folder / file for file in files if file.endswith(SUFFIXES) and (folder / file).is_file()]
    return found if found and len(found) == len(files) else None


def _parts(source: str, split: str | None) -> tuple[str, str | None, str | None]:
    """Return name, configuration and split of ``NAME[:CONFIG][:SPLIT]``. Raises NotFound."""
    name, *rest = source.split(":")
    if not is_id(name) or len(rest) > 2:
        raise NotFound(f"{source} is neither a file or folder here nor NAME[:CONFIG][:SPLIT] of the Hugging Face hub")
    return name, (rest[0] if len(rest) == 2 else None), (rest[-1] if rest else split)


def _hub_files(hub: Hub, name: str, commit: str, config: str | None, split: str | None) -> list[str]:
    names = hub.files(name, commit, "dataset")
    card = (hub.snapshot(name, commit, "dataset", only=(_CARD,)) / _CARD) if _CARD in names else None
    text = card.read_text(encoding="utf-8") if card is not None and card.is_file() else ""
    return files_of(names, configs_of(text), config, split, name)


def configs_of(card: str) -> dict[str, Files]:
    """Return the configurations that a data set card declares. The default one is also under ""."""
    import yaml

    match = re.match(r"---\s*\n(.*?)\n---", card, re.DOTALL)
    try:
        head = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return {}
    declared = head.get("configs") if isinstance(head, Mapping) else None
    found: dict[str, Files] = {}
    items = [item for item in declared if isinstance(item, Mapping)] if isinstance(declared, list) else []
    for item in items:
        if item.get("data_files"):
            name = str(item.get("config_name", "default"))
            found[name] = _patterns(item["data_files"])
            if item.get("default") or (name in _USUAL and _DEFAULT not in found):
                found[_DEFAULT] = found[name]
    return found


def _patterns(data_files: Any) -> Files:
    if not isinstance(data_files, list) or not all(isinstance(item, Mapping) for item in data_files):
        return {"train": _listed(data_files)}
    return {str(item.get("split", "train")): _listed(item.get("path")) for item in data_files}


def _listed(paths: Any) -> list[str]:
    return [str(path) for path in (paths if isinstance(paths, list) else [paths])]


def files_of(
    names: Iterable[str], configs: Mapping[str, Files], config: str | None, split: str | None, name: str
) -> list[str]:
    """Return the sorted files of a split; empty for an unknown layout. Raises UsageFault, NotFound."""
    names = sorted(names)
    if configs:
        if config is None and len(configs) > 1 and _DEFAULT not in configs:
            raise UsageFault(
                f"the data set {name} has several configurations: {_shown(configs)}",
                hint=f"name one: {name}:{next(iter(configs))}:{split or 'train'}",
            )
        chosen = config or (_DEFAULT if len(configs) > 1 else next(iter(configs)))
        if chosen not in configs:
            raise NotFound(f"the data set {name} has no configuration {chosen}; there is {_shown(configs)}")
        by_split = {
            each: [
                n for n in names if any(fnmatch.fnmatchcase(n, p) or n.startswith(f"{p.rstrip('/')}/") for p in paths)
            ]
            for each, paths in configs[chosen].items()
        }
    else:
        data = [n for n in names if n.endswith((*SUFFIXES, ".csv")) and (config is None or n.startswith(f"{config}/"))]
        words = {each: rf"(?:^|[/._-])(?:{'|'.join(spelled)})(?:$|[/._-])" for each, spelled in _WORDS.items()}
        by_split = {each: [n for n in data if re.search(word, n, re.IGNORECASE)] for each, word in words.items()}
        by_split = {each: found for each, found in by_split.items() if found}
        if data and not by_split:
            by_split = {"train": data}
    if not by_split:
        return []
    wanted = split or ("train" if "train" in by_split else next(iter(by_split)))
    if wanted not in by_split:
        raise NotFound(f"the data set {name} has no split {wanted!r}; there is {', '.join(by_split)}")
    return by_split[wanted]


def _shown(configs: Mapping[str, Files]) -> str:
    return ", ".join(each for each in configs if each)
