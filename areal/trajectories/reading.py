"""Reads trajectories from files: the output of ``areal inf collect``, and saved responses of the export routes.

By name and content: ``.jsonl`` (an episode a line), ``.parquet``, ``.npz``, ``.json`` (episodes, or a response of
``POST /export_trajectories``, ``GET /trajectories`` or ``GET /rl/sessions/ID?rows=true``), or a collection's folder.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from areal.errors import ArealError, NotFound
from areal.files import parse_json
from areal.installation import install_command
from areal.trajectories.record import Episode, episodes_of_export, read_episode
from areal.wire.columns import TOKEN_COLUMNS

JSONL, PARQUET = ".jsonl", ".parquet"
TRAJECTORIES = "trajectories"
_AT_A_TIME = 256  # episodes per write, rows per read: bounds memory use


def read_episodes(path: Path) -> Iterator[Episode]:
    """Yield the episodes of a file or folder. Raises NotFound, and ArealError naming the file and line."""
    if path.is_dir():
        yield from read_folder(path)
    elif not path.exists():
        raise NotFound(f"there is no file {path}")
    elif path.suffix == PARQUET:
        yield from read_parquet(path)
    elif path.suffix == ".npz":
        yield from _read_npz(path)
    elif path.suffix == JSONL:
        yield from read_lines(path)
    else:
        yield from _read_json(path)


def read_folder(folder: Path) -> Iterator[Episode]:
    """Yield the episodes that a collection has written so far: Parquet files, then JSON lines. Raises NotFound."""
    parquet = sorted(folder.glob(f"{TRAJECTORIES}-*{PARQUET}"))
    lines = [
        each for each in sorted(folder.glob(f"{TRAJECTORIES}*{JSONL}")) if each.with_suffix(PARQUET) not in parquet
    ]
    if not parquet and not lines:
        raise NotFound(f"{folder} holds no {TRAJECTORIES}{JSONL}", hint="is it the --output of `areal inf collect`?")
    for path in parquet:
        yield from read_parquet(path)
    for path in lines:
        yield from read_lines(path, unfinished=True)


def each_once(episodes: Iterable[Episode]) -> Iterator[Episode]:
    """Yield the episodes of one collection, each name once: a person may have put files together."""
    seen: set[str] = set()
    for episode in episodes:
        if episode.episode not in seen:
            seen.add(episode.episode)
            yield episode


def read_lines(path: Path, *, unfinished: bool = False) -> Iterator[Episode]:
    """Yield the episodes of a JSON lines file. ``unfinished``: ignore a last line without a line end, which a killed
    writer left. Raises NotFound, and ArealError naming the line."""
    if not path.exists():
        raise NotFound(f"there is no file {path}")
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if unfinished and not line.endswith(b"\n"):
                return
            if not line.strip():
                continue
            try:
                yield read_episode(parse_json(line))
            except ValueError as error:
                raise ArealError(f"{path}:{number}: {error}") from error


def _read_json(path: Path) -> Iterator[Episode]:
    try:
        document = parse_json(path.read_bytes())
        yield from _episodes(document)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ArealError(
            f"{path} holds no trajectories: {error}",
            hint="give a file of `areal inf collect`, or a saved answer of POST /export_trajectories",
        ) from error


def _episodes(document: Any) -> list[Episode]:
    if isinstance(document, list):
        return [read_episode(each) for each in document]
    if not isinstance(document, Mapping):
        raise ValueError("neither an object nor a list")
    if "items" in document:
        return [episode for item in document["items"] for episode in episodes_of_export(item)]
    if "trajectories" in document:
        return [episode for item in document["trajectories"] for episode in episodes_of_export(item)]
    return [read_episode(document)] if "episode" in document else episodes_of_export(document)


def _read_npz(path: Path) -> Iterator[Episode]:
    """Load arrays with NumPy, without pickles; ``about.json`` in the archive describes the rows."""
    try:
        import numpy as np
    except ImportError as error:
        raise ArealError(f"reading {path} needs NumPy", hint="pip install numpy, or export as JSON") from error
    try:
        with np.load(path, allow_pickle=False) as arrays:
            traj = {name: arrays[name].tolist() for name in arrays.files if not name.endswith(".json")}
        with zipfile.ZipFile(path) as archive:
            about = parse_json(archive.read("about.json"))
        yield from episodes_of_export({"traj": traj, **about})
    except (ValueError, KeyError, zipfile.BadZipFile, OSError) as error:
        raise ArealError(f"{path} holds no export: {error}") from error


# Parquet has a row per interaction, and needs pyarrow.

_EPISODE = ("episode", "prompt", "sample", "group", "step", "is_eval", "answer", "seconds", "export_id")
_TEXT = ("messages", "response")  # of an external model, as JSON


def pyarrow() -> Any:
    """Return the pyarrow module. Raises ArealError with the install command if it is missing."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ArealError("Parquet needs pyarrow, which is not installed", hint=install_command("parquet")) from error
    return pyarrow


def write_parquet(episodes: Iterable[Episode], path: Path) -> int:
    """Write a whole file in parts; returns its number of rows. Not atomic: the caller renames the complete file."""
    arrow, rows = pyarrow(), 0
    ids, texts = arrow.list_(arrow.int64()), arrow.string()
    fields = {
        "episode": texts, "prompt": arrow.int64(), "sample": arrow.int64(), "episode_reward": arrow.float64(),
        "group": texts, "step": arrow.int64(), "is_eval": arrow.bool_(),
        "answer": texts, "seconds": arrow.float64(), "export_id": texts, "example": texts, "failures": texts,
        "session_id": texts, "trajectory_id": arrow.int64(), "interaction_id": texts, "parent_id": texts,
        "finish_reason": texts, "truncated": arrow.bool_(), "rewarded": arrow.bool_(), "model": texts,
        "reward": arrow.float32(), "original_reward": arrow.float32(), "advantage": arrow.float32(),
        "input_ids": ids, "loss_mask": arrow.list_(arrow.int8()), "logprobs": arrow.list_(arrow.float32()),
        "versions": ids, "turn_ids": arrow.list_(arrow.int32()), "messages": texts, "response": texts,
        "temperature": arrow.float32(), "token_temperatures": arrow.list_(arrow.float32()),
    }  # fmt: skip
    schema = arrow.schema(list(fields.items()))
    with arrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        waiting: list[dict[str, object]] = []
        for number, episode in enumerate(episodes, 1):
            waiting += _rows(episode)
            if number % _AT_A_TIME == 0:
                writer.write_table(arrow.Table.from_pylist(waiting, schema))
                rows, waiting = rows + len(waiting), []
        writer.write_table(arrow.Table.from_pylist(waiting, schema))
    return rows + len(waiting)


def _rows(episode: Episode) -> Iterator[dict[str, object]]:
    shared = {name: getattr(episode, name) for name in _EPISODE}
    shared["episode_reward"] = episode.reward
    shared["example"] = json.dumps(episode.example)
    shared["failures"] = json.dumps([dict(each) for each in episode.failures])
    for each in episode.interactions:
        document = each.document()
        yield {**shared, **document, **{name: json.dumps(document[name]) for name in _TEXT if name in document}}


def read_parquet(path: Path) -> Iterator[Episode]:
    """Yield the episodes of a file that ``write_parquet`` wrote. Raises ArealError for any other file."""
    arrow = pyarrow()
    try:
        batches = arrow.parquet.ParquetFile(path).iter_batches(_AT_A_TIME)
        rows = (row for batch in batches for row in batch.to_pylist())
        for _, of_one in groupby(rows, key=lambda row: row["episode"]):
            yield read_episode(_document(list(of_one)))
    except (arrow.ArrowException, KeyError, ValueError) as error:
        raise ArealError(f"{path} holds no trajectories: {error}") from error


def _document(rows: list[dict[str, Any]]) -> dict[str, object]:
    first = rows[0]
    return {
        **{name: first[name] for name in _EPISODE if name in first},
        "reward": first["episode_reward"],
        "example": parse_json(first["example"]),
        "failures": parse_json(first["failures"]),
        "interactions": [_interaction(row) for row in rows],
    }


def _interaction(row: Mapping[str, Any]) -> dict[str, Any]:
    columns: dict[str, Any] = {name: row[name] or [] for name in TOKEN_COLUMNS}
    columns["token_temperatures"] = row.get("token_temperatures") or []
    columns["temperature"] = row.get("temperature", 1.0)
    texts = {name: json.loads(row[name]) for name in _TEXT if row[name]}
    return {**{name: value for name, value in row.items() if name not in _TEXT}, **columns, **texts}
