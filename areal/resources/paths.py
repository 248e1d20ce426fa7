"""Where a model's ``path`` leads: a folder, or a Hugging Face id that only the engine can resolve."""

from __future__ import annotations

from pathlib import Path


def looks_local(path: str) -> bool:
    """Whether ``path`` can only mean a folder; ``org/name`` may be either."""
    return path.startswith(("/", "./", "../", "~")) or path in (".", "..") or path.count("/") > 1


def resolve_model_path(path: str, source_file: str | None = None) -> str | None:
    """The absolute folder that ``path`` names: from the working directory, else from beside its manifest.

    None when there is no such folder: a Hugging Face id, or a mistake when ``looks_local``.
    """
    bases = [Path.cwd()]
    if source_file:
        bases += Path(source_file).absolute().parents[:2]
    for base in bases:
        candidate = base / _expanded(path)
        if candidate.is_dir():
            return str(candidate.resolve())
    return None


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # a user that this machine does not have
        return Path(path)
