"""Hugging Face model folders: what of one is not weights, and so goes beside every version of them."""

from __future__ import annotations

import shutil
from pathlib import Path

from areal.hub import model_folder

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".safetensors.index.json", ".bin.index.json", ".gguf")


def config_files(folder: Path) -> tuple[Path, ...]:
    """Configuration, tokenizer and chat template of ``folder``."""
    return tuple(path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.endswith(_WEIGHTS))


def copy_missing(source: str, target: Path) -> None:
    """Bring the tokenizer of ``source`` (a folder, or an id of the hub) to ``target``, overwriting nothing there."""
    for path in config_files(model_folder(source)):
        if not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
