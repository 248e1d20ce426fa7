"""Trajectories from files: what ``areal inf collect`` writes, and answers of the export routes as they were saved.

Known by name and content: ``.jsonl`` (an episode a line), ``.parquet``, ``.npz`` and ``.json`` (an export's answer, the
answer of ``GET /trajectories``, or a list of episodes), and a folder that a collection wrote.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal.errors import ArealError, NotFound
from areal.trajectories.record import Episode, episodes_of_export, read_episode

JSONL, PARQUET = ".jsonl", ".parquet"
TRAJECTORIES = "trajectories"


def read_episodes(path: Path) -> Iterator[Episode]:
    """Raises NotFound, and ArealError saying where a file is not what it should be."""
    if path.is_dir():
        yield from read_folder(path)
    elif not path.exists():
        raise NotFound(f"there is no file {path}")
    elif path.suffix == PARQUET:
        from areal.trajectories.parquet import read_parquet

        yield from read_parquet(path)
    elif path.suffix == ".npz":
        yield from _read_npz(path)
    elif path.suffix == JSONL:
        yield from read_lines(path)
    else:
        yield from _read_json(path)


def read_folder(folder: Path) -> Iterator[Episode]:
    """Everything that a collection has written so far, in the order in which it came."""
    parquet = sorted(folder.glob(f"{TRAJECTORIES}-*{PARQUET}"))
    lines = [
        each for each in sorted(folder.glob(f"{TRAJECTORIES}*{JSONL}")) if each.with_suffix(PARQUET) not in parquet
    ]
    if not parquet and not lines:
        raise NotFound(f"{folder} holds no {TRAJECTORIES}{JSONL}", hint="is it the --output of `areal inf collect`?")
    for path in [*parquet, *lines]:
        yield from read_episodes(path)


def read_lines(path: Path, *, unfinished: bool = False) -> Iterator[Episode]:
    """``unfinished``: a last line without its end is what a killed writer left, and no error."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if unfinished and not line.endswith(b"\n"):
                return
            if not line.strip():
                continue
            try:
                yield read_episode(json.loads(line))
            except ValueError as error:
                raise ArealError(f"{path}:{number}: {error}") from error


def _read_json(path: Path) -> Iterator[Episode]:
    try:
        document = json.loads(path.read_bytes())
        yield from _episodes(document)
    except ValueError as error:
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
    """NumPy's own reader, without pickles; what is said about the rows lies beside the arrays."""
    try:
        import numpy as np
    except ImportError as error:
        raise ArealError(f"reading {path} needs NumPy", hint="pip install numpy, or export as JSON") from error
    try:
        with np.load(path, allow_pickle=False) as arrays:
            traj = {name: arrays[name].tolist() for name in arrays.files if not name.endswith(".json")}
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read("about.json"))
        yield from episodes_of_export({"traj": traj, **about})
    except (ValueError, KeyError, zipfile.BadZipFile, OSError) as error:
        raise ArealError(f"{path} holds no export: {error}") from error
