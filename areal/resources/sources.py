"""``-f`` arguments to texts: files, folders, standard input. The only reading of manifests from disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from areal.resources.diagnostics import Pos, Problems
from areal.resources.loader import MAX_FILE_BYTES

OVERLAY_FILE = "areal.overlay.yaml"
STDIN = "<stdin>"

_SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class SourceText:
    """One manifest file. ``named``: the user named it, rather than a folder it is in."""

    file: str
    text: str
    sha256: str
    named: bool = True


def read_sources(
    files: tuple[str, ...], recursive: bool, stdin: str | None, problems: Problems
) -> Iterator[SourceText]:
    """The texts of all arguments in order, a folder's files by name; each file once."""
    seen: set[Path] = set()
    for argument in files:
        if argument == "-":
            yield _from_stdin(stdin, problems)
            continue
        for path, named in _expand(argument, recursive, problems):
            real = path.resolve()
            if real in seen:
                continue
            seen.add(real)
            source = read_text(path, problems, named=named)
            if source is not None:
                yield source


def read_text(path: Path, problems: Problems, *, named: bool = True) -> SourceText | None:
    """The text of one file, None after reporting why it cannot be read."""
    start = Pos(str(path), 1, 1)
    problems.files[str(path)] = None
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        problems.add(start, "", f"cannot be read: {error.strerror or error}")
        return None
    if len(data) > MAX_FILE_BYTES:
        problems.add(start, "", f"larger than {MAX_FILE_BYTES // 2**20} MiB, which no manifest is")
        return None
    text = _decode(data, str(path), problems)
    return None if text is None else SourceText(str(path), text, hashlib.sha256(data).hexdigest(), named)


def _from_stdin(stdin: str | None, problems: Problems) -> SourceText:
    text = stdin or ""
    problems.files[STDIN] = None
    data = text.encode("utf-8", "surrogateescape")
    if len(data) > MAX_FILE_BYTES:
        problems.add(Pos(STDIN, 1, 1), "", f"larger than {MAX_FILE_BYTES // 2**20} MiB, which no manifest is")
        text = "null"
    return SourceText(STDIN, text, hashlib.sha256(data).hexdigest())


def _expand(argument: str, recursive: bool, problems: Problems) -> Iterator[tuple[Path, bool]]:
    path = Path(argument)
    if not path.is_dir():
        yield path, True
        return
    start = Pos(argument, 1, 1)
    if (path / OVERLAY_FILE).is_file():
        problems.add(start, "", f"an overlay ({OVERLAY_FILE}), not plain manifests", hint=f"use -k {argument}")
        return
    found = list(_manifests(path, recursive))
    if not found:
        deeper = not recursive and any(_manifests(path, True))
        hint = f"add -R to read the folders below {argument}" if deeper else None
        problems.add(
            start, "", f"no manifests in this folder ({', '.join('*' + suffix for suffix in _SUFFIXES)})", hint=hint
        )
    yield from ((file, False) for file in found)


def _manifests(folder: Path, recursive: bool) -> Iterator[Path]:
    """Manifest files of a folder by name; hidden files and folders are passed over, links to folders not followed."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if recursive and not path.is_symlink():
                yield from _manifests(path, recursive)
        elif path.suffix in _SUFFIXES and path.name != OVERLAY_FILE:
            yield path


def _decode(data: bytes, file: str, problems: Problems) -> str | None:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        problems.add(Pos(file, 1, 1), "", "UTF-16 text: save it as UTF-8")
        return None
    try:
        return data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        col = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        what = "binary data" if b"\0" in data else f"not UTF-8: byte 0x{data[error.start]:02x}"
        problems.add(Pos(file, line, col), "", what)
        return None
