"""Data sets of the Hugging Face hub: which of a repository's files are a split, as the hub's documentation has it.

A ``configs:`` block in the head of README.md names them; without one, the words train, validation and test in their
paths do (https://huggingface.co/docs/hub/datasets-data-files-configuration). Files are JSONL, JSON and Parquet; other
formats are left to the library ``datasets``, where that is installed.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal.dataset.files import SUFFIXES, Rows, read_files
from areal.errors import NotFound, UsageFault
from areal.hub import Hub, is_id

_CARD = "README.md"
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_DEFAULT, _USUAL = "", ("default", "main")
Files = Mapping[str, Sequence[str]]
"""Patterns of files by split."""


def hub_rows(source: str, split: str | None = None, hub: Hub | None = None) -> Rows:
    """``NAME``, ``NAME:SPLIT`` or ``NAME:CONFIG:SPLIT``; ``split`` where the name has none. Raises NotFound,
    UsageFault, BadData."""
    name, config, split = _parts(source, split)
    hub = hub or Hub.of()
    commit = hub.commit(name, kind="dataset")
    names = hub.files(name, commit, "dataset")
    card = (hub.snapshot(name, commit, "dataset", only=(_CARD,)) / _CARD) if _CARD in names else None
    text = card.read_text(encoding="utf-8") if card is not None and card.is_file() else ""
    files = files_of(names, configs_of(text), config, split, name)
    if not files or not all(file.endswith(SUFFIXES) for file in files):
        return _by_library(name, config, split, commit)
    folder = hub.snapshot(name, commit, "dataset", only=tuple(map(_literal, files)))
    return read_files([folder / file for file in files], name)


def _parts(source: str, split: str | None) -> tuple[str, str | None, str | None]:
    name, *rest = source.split(":")
    if not is_id(name) or len(rest) > 2:
        raise NotFound(f"{source} is neither a file or folder here nor NAME[:CONFIG][:SPLIT] of the Hugging Face hub")
    return name, (rest[0] if len(rest) == 2 else None), (rest[-1] if rest else split)


def configs_of(card: str) -> dict[str, Files]:
    """The configurations that a data set's card declares; the default one under "" too."""
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
    """The files of a split, in order; empty where the layout is none that is known. Raises UsageFault, NotFound."""
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
        by_split = {each: [n for n in names if _matches(n, paths)] for each, paths in configs[chosen].items()}
    else:
        data = [n for n in names if n.endswith((*SUFFIXES, ".csv")) and (config is None or n.startswith(f"{config}/"))]
        by_split = {each: [n for n in data if _has_word(n, words)] for each, words in _WORDS.items()}
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


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern.rstrip('/')}/") for pattern in patterns)


def _has_word(name: str, words: Sequence[str]) -> bool:
    return any(re.search(rf"(?:^|[/._-]){word}(?:$|[/._-])", name, re.IGNORECASE) for word in words)


def _literal(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _by_library(name: str, config: str | None, split: str | None, commit: str) -> Rows:
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
        raise NotFound(f"the data set {name} cannot be had: {error}") from error
    return Rows((dict(row) for row in found), name)
