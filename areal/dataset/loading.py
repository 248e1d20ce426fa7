"""``get_custom_dataset``: from a configuration to the rows of each kind of training.

rl   messages, and the columns that the reward needs (answer)
sft  input_ids, loss_mask (1 on learned tokens)
rw   chosen_ids, rejected_ids, prompt_length (preference pairs: reward models, DPO)
dpo  the same
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.dataset.files import SUFFIXES, BadData, Row, Rows, read_dataset
from areal.dataset.tokenizers import templated
from areal.errors import UsageFault
from areal.loading import Registry, load_attr

if TYPE_CHECKING:
    from areal.api.cli_args import DatasetConfig


KINDS = ("rl", "sft", "rw", "dpo")
_QUESTIONS = ("question", "prompt", "problem", "instruction", "input")
_ANSWERS = ("answer", "response", "completion", "output", "solution")
_PICTURES = ("images", "image", "videos", "video", "audio")
BOXED = "\nPlease put your final answer within \\boxed{}."


def formatted(rows: Rows, kind: str, tokenizer: Any, max_length: int | None, instruction: str = "") -> Rows:
    """``instruction`` is put after a bare question of ``rl``. Rows longer than ``max_length`` tokens are left out.
    Raises UsageFault, BadData naming the row."""
    if kind not in KINDS:
        raise UsageFault(f"a data set's type is one of {', '.join(KINDS)}, not {kind!r}")
    if tokenizer is None and (kind != "rl" or max_length is not None):
        raise UsageFault(f"a data set of type {kind} needs a tokenizer" + (" for max_length" if kind == "rl" else ""))
    made = [_formatted(row, rows.place(number), kind, tokenizer, instruction) for number, row in enumerate(rows)]
    if max_length is not None:
        sizes = [_length(row, rows.place(number), tokenizer) for number, row in enumerate(made)]
        made = [row for row, size in zip(made, sizes, strict=True) if size <= max_length]
        if not made:
            raise BadData(f"{rows.source}: every row is longer than max_length ({max_length} tokens)")
    return Rows(made, rows.source)


def _formatted(row: Row, place: str, kind: str, tokenizer: Any, instruction: str) -> Row:
    try:
        if kind == "rl":
            return _prompt(row, instruction)
        return _supervised(row, tokenizer) if kind == "sft" else _pair(row, tokenizer)
    except KeyError as error:
        columns = ", ".join(row) or "nothing"
        raise BadData(f"{place}: a row of type {kind} has no {error.args[0]}; it has {columns}") from error
    except (ValueError, TypeError) as error:
        raise BadData(f"{place}: {error}") from error


def _prompt(row: Row, instruction: str) -> Row:
    if pictures := [name for name in _PICTURES if row.get(name)]:
        raise ValueError(f"the row has {', '.join(pictures)}: prompts of more than text are not supported")
    if "messages" in row:
        return dict(row)
    question = _first(row, _QUESTIONS)
    rest = {name: value for name, value in row.items() if name not in _QUESTIONS}
    answer = {"answer": _first(row, _ANSWERS)} if any(name in row for name in _ANSWERS) else {}
    return {**rest, **answer, "messages": [{"role": "user", "content": f"{question}{instruction}"}]}


def _supervised(row: Row, tokenizer: Any) -> Row:
    if "input_ids" in row:
        ids = list(row["input_ids"])
        return {"input_ids": ids, "loss_mask": list(row.get("loss_mask") or [1] * len(ids))}
    if "messages" in row:
        whole = templated(tokenizer, row["messages"])
        before = templated(tokenizer, row["messages"][:-1], add_generation_prompt=True)
        return {"input_ids": whole, "loss_mask": [0] * len(before) + [1] * (len(whole) - len(before))}
    question, answer = _first(row, _QUESTIONS), _first(row, _ANSWERS)
    before = list(tokenizer.encode(question))
    whole = list(tokenizer.encode(f"{question}{answer}{tokenizer.eos_token or ''}"))
    return {"input_ids": whole, "loss_mask": [0] * min(len(before), len(whole)) + [1] * (len(whole) - len(before))}


def _pair(row: Row, tokenizer: Any) -> Row:
    """``prompt_length`` is set where the row separates its prompt from its answers."""
    if "chosen_ids" in row:
        lengths = {"prompt_length": int(row["prompt_length"])} if "prompt_length" in row else {}
        return {"chosen_ids": list(row["chosen_ids"]), "rejected_ids": list(row["rejected_ids"]), **lengths}
    sides = [row["chosen"], row["rejected"]]
    if all(isinstance(side, str) for side in sides):
        prompt = next((str(row[each]) for each in _QUESTIONS if each in row), "")
        ids = [list(tokenizer.encode(f"{prompt}{side}{tokenizer.eos_token or ''}")) for side in sides]
        before = list(tokenizer.encode(prompt)) if prompt else None
    else:
        first = row.get("prompt")
        turns = list(first) if isinstance(first, list) else []  # else the conversations are whole
        chosen, rejected = ([*turns, *side] for side in sides)
        ids = [templated(tokenizer, messages) for messages in (chosen, rejected)]
        shared = chosen[: len(turns) or min(_in_common(chosen, rejected), len(chosen) - 1)]
        before = templated(tokenizer, shared, add_generation_prompt=True) if shared else None
    lengths = {} if before is None else {"prompt_length": min(_in_common(before, side) for side in ids)}
    return {"chosen_ids": ids[0], "rejected_ids": ids[1], **lengths}


def _in_common(left: Sequence[Any], right: Sequence[Any]) -> int:
    """The length of the common prefix."""
    pairs = zip(left, right, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _first(row: Row, names: Sequence[str]) -> str:
    for name in names:
        if row.get(name) is not None:
            return str(row[name])
    raise KeyError(" or ".join(names))


def _length(row: Row, place: str, tokenizer: Any) -> int:
    if "input_ids" in row:
        return len(row["input_ids"])
    if "chosen_ids" in row:
        return max(len(row["chosen_ids"]), len(row["rejected_ids"]))
    try:
        return len(templated(tokenizer, row["messages"]))
    except (ValueError, TypeError) as error:
        raise BadData(f"{place}: {error}") from error


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
    rows = read_dataset(where, split)
    first = rows[0]
    is_gsm8k = set(first) == {"question", "answer"} and "####" in str(first["answer"])
    return formatted(rows, kind, tokenizer, longest, BOXED if is_gsm8k else "")


def _is_dotted(where: str) -> bool:
    """Whether it is ``package.module.function`` and not a file or a name on the hub."""
    *module, name = where.split(".")
    is_name = bool(module) and where.replace(".", "").isidentifier() and f".{name}" not in SUFFIXES
    return is_name and not Path(where).exists()
