"""``get_custom_dataset``: loads the data set of a configuration, with the columns of each kind of training:

rl   messages, and the columns that the reward needs (answer)
sft  input_ids, loss_mask (1 on trained tokens)
rw   chosen_ids, rejected_ids, prompt_length (preference pairs: reward models, DPO)
dpo  the same
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.conversation import ConversationError, field_as_given, in_common, normalise
from areal.conversation.learning import TRAIN_ON, TrainedTokens, TrainOn, trained_tokens
from areal.dataclasses import dataclass
from areal.dataset.files import SUFFIXES, BadData, Row, Rows, read_dataset
from areal.dataset.images import BadImage, check, check_count, located
from areal.dataset.tokenizers import chat_of, prompt_tokens, template_variables
from areal.errors import UsageFault
from areal.loading import Registry, load_attr

if TYPE_CHECKING:
    from areal.api.cli_args import DatasetConfig


DEFAULT_SPLITS = {"train_dataset": "train", "valid_dataset": "test"}
KINDS = ("rl", "sft", "rw", "dpo")
_QUESTIONS = ("question", "prompt", "problem", "instruction", "input")
_ANSWERS = ("answer", "response", "completion", "output", "solution")
_SFT_TARGETS = (*_ANSWERS[1:], _ANSWERS[0])  # a whole solution rather than the bare answer beside it
_PICTURES = ("images", "image", "videos", "video", "audio")
_TEXT_ALONE = "here prompts are text; images are seen by areal.workflow.vision_rlvr:VisionRLVRWorkflow, of type rl"
_KWARGS = "chat_template_kwargs"
_UNREAD = {  # columns of other trainers without which a row would be learned differently: what to do with them
    "completion_mask": "name it loss_mask",
    "assistant_masks": "name it loss_mask",
    "position_ids": "a row is one sequence",
    "seq_lengths": "a row is one sequence",
    "prompt_ids": "chosen_ids and rejected_ids begin with the prompt, of prompt_length tokens",
    "margin": "a preference has no margin",
}
_UNREAD_BESIDE_QUESTIONS = {  # the same in rows that are not conversations
    "history": "put its turns into messages",
    **dict.fromkeys(("context", "passage", "choices", "options"), "put it into the question"),
}
_IGNORE_INDEX = -100  # the label of a token that is not learned, as in torch
BOXED = "\nPlease put your final answer within \\boxed{}."


def formatted(
    rows: Rows,
    kind: str,
    tokenizer: Any,
    max_length: int | None,
    instruction: str = "",
    train_on: TrainOn = "last",
    template_kwargs: Mapping[str, object] | None = None,
    images: ImageColumn | None = None,
) -> Rows:
    """Rows in the format of ``kind``. ``instruction`` is appended to a question of ``rl`` that has no ``messages``.
    ``train_on``: the messages of a conversation that ``sft`` learns. ``template_kwargs``: variables of the chat
    template; those of the row's own column ``chat_template_kwargs`` come first. ``images``: of ``rl``, where the model
    sees images; otherwise rows with images are refused. Rows longer than ``max_length`` tokens are dropped. Raises
    UsageFault, and BadData naming the row."""
    if kind not in KINDS:
        raise UsageFault(f"a data set's type is one of {', '.join(KINDS)}, not {kind!r}")
    if train_on not in TRAIN_ON:
        raise UsageFault(f"train_on is one of {', '.join(TRAIN_ON)}, not {train_on!r}")
    if train_on != "last" and kind != "sft":
        raise UsageFault(f"train_on needs a data set of type sft, and this one is of type {kind}")
    if images is not None and max_length is not None:
        raise UsageFault("max_length of a data set with images: the tokens of an image are not counted when it is read")
    needs = [] if kind == "rl" else ["its rows"]
    needs += [name for name, value in (("max_length", max_length), (_KWARGS, template_kwargs or None)) if value]
    if tokenizer is None and needs:
        raise UsageFault(f"a data set of type {kind} needs a tokenizer for {needs[0]}")

    def converted(row: Row) -> Row:
        if kind == "sft":
            return _supervised(row, tokenizer, train_on)
        if kind != "rl":
            return _pair(row, tokenizer)
        made = _prompt(row, instruction)
        if tokenizer is not None:
            template_variables(chat_of(tokenizer, bool(made.get("tools"))), made.get(_KWARGS))
        return made

    kept: list[tuple[Row, str]] = []
    for number, row in enumerate(rows):
        place = rows.place(number)
        try:
            row = _checked(_with_kwargs(row, template_kwargs or {}), kind, images)
            made = converted(row)
            if max_length is None or _length(made, tokenizer) <= max_length:
                kept.append((made, place))
        except KeyError as error:
            columns = ", ".join(row) or "nothing"
            raise BadData(f"{place}: a row of type {kind} has no {error.args[0]}; it has {columns}") from error
        except (ValueError, TypeError, BadImage) as error:
            raise BadData(f"{place}: {error}") from error
    if max_length is not None and not kept:
        raise BadData(f"{rows.source}: every row is longer than max_length ({max_length} tokens)")
    return Rows((row for row, _ in kept), rows.source, [place for _, place in kept])


def _checked(row: Row, kind: str, images: ImageColumn | None) -> Row:
    """Return the row without empty ``messages``, with tools and images. Raises ValueError, BadImage."""
    if row.get("messages") is None:  # a table has the column in all of its rows
        row = {name: value for name, value in row.items() if name != "messages"}
    if _are_objects(functions := row.get("functions"), "name"):  # from before tools
        row = {**row, "tools": row.get("tools") or functions}
    if kind != "rl":  # a workflow and a reward get all columns
        _check_columns(row)
    if images is not None and kind == "rl":
        return images.checked(row)
    if pictures := [name for name in _PICTURES if row.get(name)]:
        raise ValueError(f"the row has {', '.join(pictures)}: {_TEXT_ALONE}")
    return row


def _check_columns(row: Row) -> None:
    """Raise ValueError for a column that changes what other trainers learn from the row, and is not read here."""
    turns = next((row[name] for name in ("messages", "prompt", "chosen") if _is_conversation(row.get(name))), None)
    for name, advice in {**_UNREAD, **(_UNREAD_BESIDE_QUESTIONS if turns is None else {})}.items():
        if row.get(name):
            raise ValueError(f"{name} is not read: {advice}")
    for name in ("system", "system_prompt"):
        if row.get(name) and (turns is None or turns[0]["role"] not in ("system", "developer")):
            raise ValueError(f"{name} is not read: make it the first of the messages, with the role system")
    for name in ("kto_tag", "label"):  # of KTO
        if row.get(name) is False and (name == "kto_tag" or "completion" in row):
            raise ValueError(f"{name} is false: the row is an answer that is not wanted, and would be learned")


def _with_kwargs(row: Row, given: Mapping[str, object]) -> Row:
    """Return the row with the variables of its chat template: its own, then those of the data set."""
    own = row.get(_KWARGS)
    if not isinstance(own, Mapping | None):
        raise ValueError(f"{_KWARGS} must be an object, not {type(own).__name__}")
    kwargs = {**given, **{name: value for name, value in (own or {}).items() if value is not None}}
    rest = {name: value for name, value in row.items() if name != _KWARGS}
    return {**rest, _KWARGS: kwargs} if kwargs else rest


@dataclass(frozen=True)
class ImageColumn:
    """How a data set's images are found: relative paths are in ``folder``."""

    folder: Path | None

    def checked(self, row: Row) -> Row:
        """Return the row with a list ``images`` of existing files. Raises ValueError, BadImage."""
        if others := [name for name in _PICTURES[2:] if row.get(name)]:
            raise ValueError(f"the row has {', '.join(others)}: only images are supported")
        given = [name for name in _PICTURES[:2] if row.get(name)]
        if not given:
            return row
        if len(given) == 2:
            raise ValueError("the row has image and images: give one of them")
        images = located(row[given[0]], self.folder)
        check_count(len(images))
        for number, each in enumerate(images):
            check(each, f"images[{number}]")
        return {**{name: value for name, value in row.items() if name != "image"}, "images": images}


def _prompt(row: Row, instruction: str) -> Row:
    if "messages" in row:
        if not row.get("images"):
            normalise(row["messages"], row.get("tools"))  # a malformed one is refused here, and not in an episode
        return dict(row)
    answers = [name for name in _ANSWERS if row.get(name) is not None]
    answer = {}
    if answers:  # several right answers stay a list, for a reward that takes one
        value = row[answers[0]]
        answer["answer"] = value if isinstance(value, list | tuple | dict) else _text(answers[0], value)
    if _is_conversation(row.get("prompt")):
        rest = {name: value for name, value in row.items() if name != "prompt"}
        return {**rest, **answer, "messages": list(row["prompt"])}
    content = f"{_question(row)}{instruction}"
    return {**row, **answer, "messages": [{"role": "user", "content": content}]}  # a reward may read the question


def _supervised(row: Row, tokenizer: Any, train_on: TrainOn) -> Row:
    if "input_ids" in row:
        _refuse_templating(row)
        ids = list(row["input_ids"])
        if not all(row.get("attention_mask") or (1,)):
            raise ValueError("attention_mask has zeros: leave the padding out of the row")
        if row.get("loss_mask") is not None:
            if len(row["loss_mask"]) != len(ids) or any(each not in (0, 1) for each in row["loss_mask"]):
                raise ValueError(
                    "loss_mask must have a 1 for each of the input_ids that is learned, and 0 for the others"
                )
            return {"input_ids": ids, "loss_mask": list(row["loss_mask"])}
        labels = ids if row.get("labels") is None else list(row["labels"])
        if len(labels) != len(ids) or any(
            label not in (_IGNORE_INDEX, token) for token, label in zip(ids, labels, strict=True)
        ):
            raise ValueError(f"labels must be the input_ids, and {_IGNORE_INDEX} where nothing is learned")
        return {"input_ids": ids, "loss_mask": [int(label != _IGNORE_INDEX) for label in labels]}
    if "messages" in row:
        return _conversation(row, row["messages"], tokenizer, train_on)
    if _is_conversation(row.get("prompt")):
        prompt, answer = (
            list(row["prompt"]),
            next((row[name] for name in _SFT_TARGETS if row.get(name) is not None), None),
        )
        if answer is None:
            raise KeyError(" or ".join(_ANSWERS))
        turns = answer if _is_conversation(answer) else [{"role": "assistant", "content": _text("answer", answer)}]
        return _conversation(row, _following(prompt, turns), tokenizer, train_on)
    _refuse_templating(row)
    question, answer = _question(row), _first(row, _SFT_TARGETS)
    before = list(tokenizer.encode(question))
    whole = list(tokenizer.encode(f"{question}{answer}{tokenizer.eos_token or ''}"))
    known = in_common(before, whole)  # a token over the boundary is learned
    return {"input_ids": whole, "loss_mask": [0] * known + [1] * (len(whole) - known)}


def _conversation(row: Row, messages: Any, tokenizer: Any, train_on: TrainOn) -> Row:
    learned = _learned(row, messages, tokenizer, train_on)
    return {"input_ids": learned.ids, "loss_mask": learned.mask}


def _refuse_templating(row: Row) -> None:
    for name in (_KWARGS, "tools"):
        if row.get(name):
            raise ValueError(f"{name} have no effect: the row is not a conversation")


def _learned(row: Row, messages: Any, tokenizer: Any, train_on: TrainOn = "last") -> TrainedTokens:
    conversation = normalise(messages, row.get("tools"))
    chat = chat_of(tokenizer, bool(conversation.tools))
    try:
        return trained_tokens(chat, conversation, train_on, **template_variables(chat, row.get(_KWARGS)))
    except ConversationError as error:
        raise ConversationError(field_as_given(error.field, messages), error.problem) from error


def _pair(row: Row, tokenizer: Any) -> Row:
    """Token ids of a preference pair. ``prompt_length``, in tokens, is set if the prompt is known: from a column, or as
    all but the last message of two conversations."""
    if "chosen_ids" in row:
        _refuse_templating(row)
        lengths = {"prompt_length": int(row["prompt_length"])} if "prompt_length" in row else {}
        return {"chosen_ids": list(row["chosen_ids"]), "rejected_ids": list(row["rejected_ids"]), **lengths}
    sides = [row["chosen"], row["rejected"]]
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        if not isinstance(side, str | list):
            raise ValueError(f"{name} must be a text or a list of messages, not {type(side).__name__}")
    if _is_conversation(row.get("prompt")):
        sides = [[{"role": "assistant", "content": side}] if isinstance(side, str) else side for side in sides]
    if all(isinstance(side, str) for side in sides):
        _refuse_templating(row)
        prompt = _question(row) if any(row.get(each) is not None for each in _QUESTIONS) else ""
        ids = [list(tokenizer.encode(f"{prompt}{side}{tokenizer.eos_token or ''}")) for side in sides]
        before = list(tokenizer.encode(prompt)) if prompt else None
        lengths = {} if before is None else {"prompt_length": min(in_common(before, side) for side in ids)}
        return {"chosen_ids": ids[0], "rejected_ids": ids[1], **lengths}
    first = row.get("prompt")
    turns = list(first) if isinstance(first, list) else []  # without a prompt, both sides are whole conversations
    if not turns and all(_is_conversation(side) and side[0]["role"] == "assistant" for side in sides):
        turns = [{"role": "user", "content": _question(row)}]
    chosen, rejected = (_following(turns, side) for side in sides)
    if normalise(chosen, None).messages[:-1] != normalise(rejected, None).messages[:-1]:
        raise ValueError("chosen and rejected must be the same but for their last message")
    learned = [_learned(row, messages, tokenizer) for messages in (chosen, rejected)]
    lengths = {"prompt_length": min(side.prompt_length for side in learned)}
    return {"chosen_ids": learned[0].learned_ids, "rejected_ids": learned[1].learned_ids, **lengths}


def _following(prompt: list[Any], answer: list[Any]) -> list[Any]:
    """Return a conversation. The answer may be a whole one, which begins with the prompt."""
    is_whole = prompt and normalise(answer).messages[: len(prompt)] == normalise(prompt).messages
    return answer if is_whole else [*prompt, *answer]


def _is_conversation(value: object) -> bool:
    return _are_objects(value, "role")


def _are_objects(value: object, key: str) -> bool:
    """Return whether the value is a list of objects that have this key."""
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) and key in each for each in value)


def _question(row: Row) -> str:
    """Return the question: of Alpaca's rows ``instruction`` and ``input``."""
    if row.get("instruction") is not None and row.get("input") and not any(row.get(each) for each in _QUESTIONS[:3]):
        return f"{_first(row, ('instruction',))}\n{_first(row, ('input',))}"
    return _first(row, _QUESTIONS)


def _first(row: Row, names: Sequence[str]) -> str:
    for name in names:
        if row.get(name) is not None:
            return _text(name, row[name])
    raise KeyError(" or ".join(names))


def _text(name: str, value: Any) -> str:
    """Return a value as text. Raises ValueError for a list, a map or bytes, and for NaN, which marks missing values."""
    if isinstance(value, list | tuple | dict | bytes) or value != value:
        kind = "NaN" if value != value else "bytes" if isinstance(value, bytes) else f"a {type(value).__name__}"
        raise ValueError(f"{name} must be a text, not {kind}")
    return str(value)


def _length(row: Row, tokenizer: Any) -> int:
    if "input_ids" in row:
        return len(row["input_ids"])
    if "chosen_ids" in row:
        return max(len(row["chosen_ids"]), len(row["rejected_ids"]))
    return len(prompt_tokens(tokenizer, row["messages"], row.get("tools"), **row.get(_KWARGS, {})))


DATASETS: Registry[Any] = Registry("dataset")
"""Registered custom loaders: ``(split, dataset_config, tokenizer) -> rows``."""


def get_custom_dataset(
    split: str | None = None,
    dataset_config: DatasetConfig | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    *,
    path: str | None = None,
    type: str | None = None,
    max_length: int | None = None,
    train_on: TrainOn | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    img_folder_path: str | None = None,
) -> Any:
    """Load a data set. ``path`` is a local file or folder, a registered name or ``module:function``, or a data set of
    the Hugging Face hub (``org/name``, ``org/name:split`` or ``org/name:config:split``). Arguments override
    ``dataset_config``. ``processor``: of a model that sees the rows' images, whose relative paths are in
    ``img_folder_path``, by default the folder of the file. Raises NotFound, UsageFault, BadData."""
    where = path or (dataset_config.path if dataset_config is not None else "")
    if not isinstance(where, str):
        options: dict[str, Any] = {"type": type, "max_length": max_length, "train_on": train_on}
        options |= {_KWARGS: chat_template_kwargs, "processor": processor, "img_folder_path": img_folder_path}
        read = [get_custom_dataset(split, dataset_config, tokenizer, path=each, **options) for each in where]
        return Rows((row for rows in read for row in rows), ", ".join(where))
    if img_folder_path is not None and processor is None:
        raise UsageFault("img_folder_path has no effect without an image processor")
    if not where:
        raise UsageFault("the data set has no path", hint="train_dataset.path=FILE")
    split = split or (dataset_config.split if dataset_config is not None else None)
    kind = type or (dataset_config.type if dataset_config is not None else "") or "rl"
    longest = max_length if max_length is not None else getattr(dataset_config, "max_length", None)
    if is_loader(where):
        loader = DATASETS.resolve(where) if where in DATASETS else load_attr(where, "dataset")
        return loader(split=split, dataset_config=dataset_config, tokenizer=tokenizer)
    rows = read_dataset(where, split)
    first = rows[0]
    is_gsm8k = set(first) == {"question", "answer"} and "####" in str(first["answer"])
    learned = train_on or getattr(dataset_config, "train_on", None) or "last"
    template_kwargs = chat_template_kwargs or getattr(dataset_config, _KWARGS, None)
    images = None if processor is None else ImageColumn(_image_folder(where, img_folder_path))
    return formatted(rows, kind, tokenizer, longest, BOXED if is_gsm8k else "", learned, template_kwargs, images)


def _image_folder(where: str, given: str | None) -> Path | None:
    """Return the folder of relative image paths: that of the data set's file, if it is a file."""
    if given is not None:
        return Path(given).expanduser()
    path = Path(where).expanduser()
    return (path if path.is_dir() else path.parent).absolute() if path.exists() else None


def columns_named(
    columns: Mapping[str, str],
    path: str | Sequence[str],
    split: str | None,
    dataset_config: DatasetConfig,
    tokenizer: Any,
    system: str = "",
) -> Rows:
    """Return a data set whose columns have other names: for a loader of one's own (``path: module:function``).
    ``columns``: by the name that is read here, that of the files; dots go into an object. ``system``: the text of a
    system message before each prompt. Raises BadData."""

    def renamed(row: Row, place: str) -> Row:
        found = {name: value for name, value in row.items() if name != "messages" and name not in columns.values()}
        for ours, theirs in columns.items():
            value: Any = row
            for part in theirs.split("."):
                if not isinstance(value, Mapping) or part not in value:
                    raise BadData(f"{place}: the row has no {theirs}; it has {', '.join(row) or 'nothing'}")
                value = value[part]
            found[ours] = value
        if system and (prompt := found.pop("prompt", None)) is not None:
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            found["messages"] = [{"role": "system", "content": system}, *asked]
        return found

    several = [path] if isinstance(path, str) else path
    read = [read_dataset(each, split) for each in several]
    rows = [renamed(row, part.place(number)) for part in read for number, row in enumerate(part)]
    places = [part.place(number) for part in read for number in range(len(part))]
    return formatted(
        Rows(rows, ", ".join(several), places),
        dataset_config.type or "rl",
        tokenizer,
        dataset_config.max_length,
        train_on=dataset_config.train_on,
        template_kwargs=dataset_config.chat_template_kwargs,
    )


def is_loader(where: str) -> bool:
    """Return whether ``where`` names a function that loads a data set."""
    return where in DATASETS or (":" in where and "/" not in where) or _is_dotted(where)


def _is_dotted(where: str) -> bool:
    """Return whether ``where`` is ``package.module.function``, and neither a file nor a name on the hub."""
    *module, name = where.split(".")
    is_name = bool(module) and where.replace(".", "").isidentifier() and f".{name}" not in SUFFIXES
    return is_name and not Path(where).exists()
