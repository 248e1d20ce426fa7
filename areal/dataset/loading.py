"""``get_custom_dataset``: from what the configuration says to rows that a trainer takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.api.registry import Registry, load_attr
from areal.dataset.files import SUFFIXES, read_rows
from areal.dataset.hub import hub_rows
from areal.dataset.rows import Rows
from areal.dataset.shapes import BOXED, shaped
from areal.errors import UsageFault

if TYPE_CHECKING:
    from areal.api.cli_args import DatasetConfig

DATASETS: Registry[Any] = Registry("dataset")
"""Loaders of one's own: ``(split, dataset_config, tokenizer) -> rows``."""


def get_custom_dataset(
    split: str | None = None,
    dataset_config: DatasetConfig | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    *,
    path: str | None = None,
    type: str | None = None,
    max_length: int | None = None,
) -> Any:
    """``path`` is a file or folder here, a registered name or ``module:function``, or a data set of the Hugging Face
    hub (``org/name``, ``org/name:split`` or ``org/name:config:split``). Raises NotFound, UsageFault, BadData."""
    where = path or (dataset_config.path if dataset_config is not None else "")
    if not where:
        raise UsageFault("the data set has no path", hint="train_dataset.path=FILE")
    split = split or (dataset_config.split if dataset_config is not None else None)
    kind = type or (dataset_config.type if dataset_config is not None else "") or "rl"
    longest = max_length if max_length is not None else getattr(dataset_config, "max_length", None)
    if where in DATASETS or (":" in where and "/" not in where) or _is_dotted(where):
        loader = DATASETS.resolve(where) if where in DATASETS else load_attr(where, "dataset")
        return loader(split=split, dataset_config=dataset_config, tokenizer=tokenizer)
    rows = _rows(where, split)
    return shaped(rows, kind, tokenizer, longest, BOXED if _is_gsm8k(rows) else "")


def _rows(where: str, split: str | None) -> Rows:
    local = Path(where).expanduser()
    if local.exists() or where.startswith((".", "/", "~")):
        return read_rows(local, split)
    return hub_rows(where, split)


def _is_dotted(where: str) -> bool:
    """Of ``package.module.function``, and not of a file or of a name on the hub."""
    *module, name = where.split(".")
    is_name = bool(module) and where.replace(".", "").isidentifier() and f".{name}" not in SUFFIXES
    return is_name and not Path(where).exists()


def _is_gsm8k(rows: Rows) -> bool:
    """By its content, not its name: a question, and a solution that ends in ``#### number``."""
    first = rows[0]
    return set(first) == {"question", "answer"} and "####" in str(first["answer"])
