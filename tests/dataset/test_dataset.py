"""Data sets from files: what is read, and how faults are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal.api.cli_args import GRPOConfig, TrainDatasetConfig, ValidDatasetConfig
from areal.dataset import get_custom_dataset
from areal.dataset.files import BadData
from areal.errors import NotFound, UsageFault
from areal.rollout.rows import prompt_ids
from areal.training.drivers import _rows
from areal.utils.hf_utils import load_hf_tokenizer
from tests.services.tokenizer_folder import write_tokenizer

GSM = [{"question": "1 + 1?", "answer": "One and one.\n#### 2"}, {"question": "2 + 2?", "answer": "#### 4"}]


def lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_hf_tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def parquet(path: Path, rows: list[Any]) -> Path:
    import pyarrow as arrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


def test_gsm8k_folder_is_detected_by_content(tmp_path: Path) -> None:
    parquet(tmp_path / "main" / "train-00000-of-00001.parquet", GSM)
    parquet(tmp_path / "main" / "test-00000-of-00001.parquet", GSM[:1])
    config = TrainDatasetConfig(path=str(tmp_path), type="rl")
    train = get_custom_dataset(split="train", dataset_config=config)
    assert train[1] == {
        "question": "2 + 2?",
        "answer": "#### 4",
        "messages": [{"role": "user", "content": "2 + 2?\nPlease put your final answer within \\boxed{}."}],
    }
    assert len(train) == 2
    assert len(get_custom_dataset(dataset_config=ValidDatasetConfig(path=str(tmp_path)))) == 1


def test_split_reads_only_its_files(tmp_path: Path) -> None:
    for name in ("train-00000-of-00002", "train-00001-of-00002-0123abcd", "train_hard", "training", "train-easy"):
        lines(tmp_path / f"{name}.jsonl", [{"question": name, "answer": "1"}])
    rows = get_custom_dataset("train", path=str(tmp_path))
    assert [row["messages"][0]["content"] for row in rows] == ["train-00000-of-00002", "train-00001-of-00002-0123abcd"]
    for suffix in ("jsonl", "json"):
        lines(tmp_path / f"test.{suffix}", [{"question": "a", "answer": "1"}])
    with pytest.raises(BadData, match=r"test.json and test.jsonl are one split in two formats"):
        get_custom_dataset("test", path=str(tmp_path))


def test_configured_split_is_read(tmp_path: Path) -> None:
    for name, count in (("train", 2), ("test", 1)):
        parquet(tmp_path / "main" / f"{name}-00000-of-00001.parquet", GSM[:count])
        config = GRPOConfig(train_dataset=TrainDatasetConfig(path=str(tmp_path), type="rl", split=name))
        assert len(_rows(config, None, "train") or []) == count


def test_messages_are_read_with_all_columns(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Hi"}], "answer": "x", "extra": [1]}
    assert list(get_custom_dataset(path=str(lines(tmp_path / "a.jsonl", [row])))) == [row]


def test_sft_learns_only_answer(tmp_path: Path, tokenizer: Any) -> None:
    data = get_custom_dataset(path=str(lines(tmp_path / "a.jsonl", GSM)), type="sft", tokenizer=tokenizer)
    row = data[0]
    learned = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
    assert tokenizer.decode(learned) == "One and one.\n#### 2<|im_end|>"
    chat = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "friend"}]}
    row = get_custom_dataset(path=str(lines(tmp_path / "b.jsonl", [chat])), type="sft", tokenizer=tokenizer)[0]
    learned = [token for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask]
    assert tokenizer.decode(learned) == "friend<|im_end|>"


QUESTION, ANSWER = [{"role": "user", "content": "Hello"}], [{"role": "assistant", "content": "friend"}]


def learned_of(tmp_path: Path, tokenizer: Any, row: dict[str, Any]) -> tuple[str, str]:
    """The whole text of a row for fine-tuning, and what of it is learned."""
    (found,) = get_custom_dataset(path=str(lines(tmp_path / "r.jsonl", [row])), type="sft", tokenizer=tokenizer)
    pairs = list(zip(found["input_ids"], found["loss_mask"], strict=True))
    return tokenizer.decode(found["input_ids"]), tokenizer.decode([token for token, mask in pairs if mask])


@pytest.mark.parametrize("answer", [ANSWER, "friend"])
def test_conversation_prompt_stays_one_conversation(tmp_path: Path, tokenizer: Any, answer: Any) -> None:
    whole = learned_of(tmp_path, tokenizer, {"messages": [*QUESTION, *ANSWER]})
    assert learned_of(tmp_path, tokenizer, {"prompt": QUESTION, "completion": answer}) == whole
    row = {"prompt": QUESTION, "answer": "x", "data_source": "y"}
    (found,) = get_custom_dataset(path=str(lines(tmp_path / "rl.jsonl", [row])))
    assert found == {"messages": QUESTION, "answer": "x", "data_source": "y"}


def test_text_answers_to_conversation_become_last_messages(tmp_path: Path, tokenizer: Any) -> None:
    texts = {"prompt": QUESTION, "chosen": "friend", "rejected": "fox"}
    turns = {**texts, **{name: [{"role": "assistant", "content": texts[name]}] for name in ("chosen", "rejected")}}
    rows = [
        get_custom_dataset(path=str(lines(tmp_path / f"{n}.jsonl", [row])), type="rw", tokenizer=tokenizer)[0]
        for n, row in enumerate((texts, turns))
    ]
    assert rows[0] == rows[1]


def test_input_of_an_instruction_is_part_of_the_question(tmp_path: Path, tokenizer: Any) -> None:
    row = {"instruction": "Add.", "input": "1 and 2", "output": "four"}
    assert learned_of(tmp_path, tokenizer, row) == ("Add.\n1 and 2four<|im_end|>", "four<|im_end|>")
    (found,) = get_custom_dataset(path=str(lines(tmp_path / "rl.jsonl", [row])))
    assert found["messages"][0]["content"] == "Add.\n1 and 2" and found["answer"] == "four"
    assert learned_of(tmp_path, tokenizer, {**row, "input": ""})[0] == "Add.four<|im_end|>"


def test_whole_solution_is_learned_over_bare_answer(tmp_path: Path, tokenizer: Any) -> None:
    row = {"problem": "1+1? ", "solution": "one and one: 2", "answer": "2"}
    assert learned_of(tmp_path, tokenizer, row)[1] == "one and one: 2<|im_end|>"
    (found,) = get_custom_dataset(path=str(lines(tmp_path / "rl.jsonl", [row])))
    assert found["answer"] == "2"


def test_tools_of_a_row_are_in_its_prompt(tmp_path: Path) -> None:
    tokenizer = load_hf_tokenizer(str(write_tokenizer(tmp_path / "t")))
    tokenizer.chat_template = (
        "{{ tools[0].function.name if tools }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    )
    row = {"messages": [*QUESTION, *ANSWER], "tools": [{"name": "fox"}]}
    assert learned_of(tmp_path, tokenizer, row) == ("foxHello<|im_end|>friend<|im_end|>", "friend<|im_end|>")
    assert tokenizer.decode(prompt_ids(tokenizer, {**row, "messages": QUESTION})) == "foxHello<|im_end|>"


def test_labels_select_learned_tokens(tmp_path: Path, tokenizer: Any) -> None:
    ids = tokenizer.encode("Hello friend")
    labels = [-100, *ids[1:]]
    (found,) = get_custom_dataset(
        path=str(lines(tmp_path / "l.jsonl", [{"input_ids": ids, "labels": labels}])), type="sft", tokenizer=tokenizer
    )
    assert found["loss_mask"] == [0] + [1] * (len(ids) - 1)
    shifted = lines(tmp_path / "s.jsonl", [{"input_ids": ids, "labels": [*ids[1:], -100]}])
    with pytest.raises(BadData, match=r"s.jsonl:1: labels must be the input_ids"):
        get_custom_dataset(path=str(shifted), type="sft", tokenizer=tokenizer)


def test_pairs_become_two_token_rows(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "Hello ", "chosen": "friend", "rejected": "fox"}]
    (row,) = get_custom_dataset(path=str(lines(tmp_path / "a.jsonl", rows)), type="rw", tokenizer=tokenizer)
    assert list(get_custom_dataset(path=str(tmp_path / "a.jsonl"), type="dpo", tokenizer=tokenizer)) == [row]
    assert tokenizer.decode(row["chosen_ids"]) == "Hello friend<|im_end|>"
    assert tokenizer.decode(row["rejected_ids"]) == "Hello fox<|im_end|>"
    answer = row["chosen_ids"][row["prompt_length"] :]
    assert tokenizer.decode(answer).strip() == "friend<|im_end|>"  # also the f that both answers begin with


def test_preference_over_answers_equals_whole_conversations(tmp_path: Path, tokenizer: Any) -> None:
    asked = [{"role": "user", "content": "Hello"}]
    answers = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    apart = {"prompt": asked, **answers}
    whole = {name: [*asked, *answer] for name, answer in answers.items()}
    rows = [
        get_custom_dataset(path=str(lines(tmp_path / f"{n}.jsonl", [row])), type="rw", tokenizer=tokenizer)[0]
        for n, row in enumerate((apart, whole))
    ]
    assert rows[0] == rows[1] and rows[0]["chosen_ids"] != rows[0]["rejected_ids"]
    assert tokenizer.decode(rows[0]["chosen_ids"][rows[0]["prompt_length"] :]).startswith("chosen")


def test_overlong_rows_are_dropped(tmp_path: Path, tokenizer: Any) -> None:
    file = str(lines(tmp_path / "a.jsonl", [GSM[0], {"question": "9" * 200, "answer": "#### 4"}]))
    assert len(get_custom_dataset(path=file, tokenizer=tokenizer, max_length=100)) == 1
    with pytest.raises(BadData, match="every row is longer than max_length"):
        get_custom_dataset(path=file, tokenizer=tokenizer, max_length=1)
    with pytest.raises(UsageFault, match="needs a tokenizer for max_length"):
        get_custom_dataset(path=file, max_length=1)


def test_rows_have_training_interface(tmp_path: Path) -> None:
    data = get_custom_dataset(path=str(lines(tmp_path / "a.jsonl", GSM)))
    assert data.column_names == ["question", "answer", "messages"]
    assert len(data[:1]) == len(data.select([1])) == len(data.filter(lambda row: row["answer"] == "#### 4")) == 1
    assert data.map(lambda row: {"n": len(row)})[0] == {"n": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"question": "a", "answer": "b"}\n{"question"\n',
            "a.jsonl:2: no JSON: Expecting ':' delimiter in column 12",
        ),
        ('\n[{"question": "a", "answer": "b"},\n {"question": é}]', "a.jsonl:3: no JSON: Expecting value in column 15"),
        ('{"question": "a", "answer": "é\n', "a.jsonl:1: no JSON: Unterminated string starting in column 29, after"),
        (b'{"question": "a", "answer": "b"}\n{"question": "\xff"}', "a.jsonl:2: no UTF-8: 0xff in column 15, after"),
        (b'[\n{"question": "\xc3\xa9\xff"}]', "a.jsonl:2: no UTF-8: 0xff in column 16, after"),
        ('{"question": "a", "answer": "\\uD83D"}', "a.jsonl:1: a text has half of a surrogate pair: '\\ud83d'"),
        ('{"question": "a", "answer": "b", "answer": "c"}', "a.jsonl:1: 'answer' is given twice"),
        ('{"question": "a", "answer": NaN}', "a.jsonl:1: answer must be a text, not NaN"),
        ("[1]\n", "a.jsonl: row 0: a row is a map of columns, not int"),
        ('{"answer": "b"}\n', "a.jsonl:1: a row of type rl has no question or prompt"),
        ("", "there are no rows"),
    ],
)
def test_bad_row_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(BadData) as caught:
        get_custom_dataset(path=str(tmp_path / "a.jsonl"))
    assert message in str(caught.value)
    assert "a data set is JSON lines" in str(caught.value.hint) or ": no " not in message


def test_url_is_refused_by_its_name() -> None:
    with pytest.raises(NotFound, match=r"https://host/a.jsonl is a URL: a data set is a file, a folder"):
        get_custom_dataset(path="https://host/a.jsonl")


def test_file_may_begin_with_byte_order_mark_and_have_any_line_ends(tmp_path: Path) -> None:
    for text in ("{0}\r\n\r\n{0}", "\r\n [{0},\r\n{0}]"):
        row = '{"question": "🙂 \\ud83d\\ude42\u2028", "answer": "b"}'
        (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + text.format(row).encode())
        data = get_custom_dataset(path=str(tmp_path / "a.jsonl"))
        assert [each["messages"][0]["content"] for each in data] == ["🙂 🙂\u2028"] * 2


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    file, names = tmp_path / "a.parquet", ["question", "answer"]
    broken = arrow.StringArray.from_buffers(1, arrow.py_buffer(b"\0\0\0\0\1\0\0\0"), arrow.py_buffer(b"\xff"))
    for columns, more, message in (
        ([["a"], ["b"], ["c"]], ["answer"], "a.parquet: the column 'answer' is given twice"),
        ([["a"], broken], [], "a.parquet: cannot be read as parquet: 'utf-8' codec can't decode byte 0xff"),
        ([["a"], [b"b"]], [], "a.parquet: row 0: answer must be a text, not bytes"),
        ([["a"], [float("nan")]], [], "a.parquet: row 0: answer must be a text, not NaN"),
    ):
        table = arrow.Table.from_arrays([arrow.array(column) for column in columns], names=[*names, *more])
        arrow.parquet.write_table(table, file)
        with pytest.raises(BadData) as caught:
            get_custom_dataset(path=str(file))
        assert message in str(caught.value)


def test_missing_path_is_explained(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no data set"):
        get_custom_dataset(path=str(tmp_path / "none"))
    lines(tmp_path / "train.jsonl", GSM)
    with pytest.raises(NotFound, match=r"has no split 'test'; there is train.jsonl"):
        get_custom_dataset(split="test", path=str(tmp_path))
    with pytest.raises(UsageFault, match="one of rl, sft, rw, dpo"):
        get_custom_dataset(split="train", path=str(tmp_path), type="ppo")
    with pytest.raises(NotFound, match="no model folder"):
        load_hf_tokenizer(str(tmp_path / "none"))


def test_model_folder_without_tokenizer_is_explained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(NotFound, match="no tokenizer can be read from") as reported:
        load_hf_tokenizer(str(tmp_path))
    assert "tokenizer_path" in str(reported.value.hint)


def test_custom_loader_is_called_with_configuration() -> None:
    config = TrainDatasetConfig(path="tests.dataset.test_dataset:own_loader", type="rl")
    assert get_custom_dataset(split="train", dataset_config=config) == [("train", "rl")]


def own_loader(split: str, dataset_config: TrainDatasetConfig, tokenizer: Any) -> list[tuple[str, str]]:
    return [(split, dataset_config.type)]


def saved_to_disk(folder: Path, rows: list[dict[str, Any]]) -> None:
    """What ``datasets.Dataset.save_to_disk`` writes: a stream of Arrow batches beside two files of JSON."""
    arrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    table = arrow.Table.from_pylist(rows)
    with arrow.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as sink:
        with arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))


def test_saved_to_disk_dataset_is_read_without_datasets_library(tmp_path: Path) -> None:
    saved_to_disk(tmp_path / "one", GSM)
    assert [row["answer"] for row in get_custom_dataset(path=str(tmp_path / "one"), split="train")] == [
        row["answer"] for row in GSM
    ]
    for split, rows in (("train", GSM), ("test", GSM[:1])):
        saved_to_disk(tmp_path / "dict" / split, rows)
    (tmp_path / "dict" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert len(get_custom_dataset(path=str(tmp_path / "dict"), split="test")) == 1
    with pytest.raises(NotFound, match=r"has no split 'dev'; there is train, test"):
        get_custom_dataset(path=str(tmp_path / "dict"), split="dev")
    (tmp_path / "one" / "data-00000-of-00001.arrow").write_bytes(b"cut")
    with pytest.raises(BadData, match=r"data-00000-of-00001.arrow: cannot be read as arrow"):
        get_custom_dataset(path=str(tmp_path / "one"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hello"}, "messages must be a list with at least one message"),
        ({"messages": []}, "messages must be a list with at least one message"),
        ({"messages": [{"content": "x"}]}, "messages[0].role must be a text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type is 'image': this model takes text only",
        ),
        ({"question": ["what", "is it?"]}, "question must be a text, not a list"),
        (
            {"question": "what is it?", "images": ["x.png"]},
            "the row has images: here prompts are text; images are seen by",
        ),
    ],
)
def test_row_without_valid_prompt_is_reported_with_line(
    tmp_path: Path, tokenizer: Any, row: dict[str, Any], message: str
) -> None:
    good = {"messages": [{"role": "user", "content": "12"}], "answer": "21"}
    file = lines(tmp_path / "d.jsonl", [good, row])
    with pytest.raises(BadData) as caught:
        get_custom_dataset(path=str(file), type="rl", tokenizer=tokenizer, max_length=64)
    assert f"d.jsonl:2: {message}" in str(caught.value)


def test_tokenizer_without_a_chat_template_is_named(tmp_path: Path) -> None:
    tokenizer = load_hf_tokenizer(str(write_tokenizer(tmp_path / "bare")))
    tokenizer.chat_template = None
    with pytest.raises(UsageFault, match="bare has no chat template") as caught:
        get_custom_dataset(path=str(lines(tmp_path / "d.jsonl", GSM)), type="rl", tokenizer=tokenizer, max_length=64)
    assert caught.value.hint is not None and "{{ messages[-1]['content'] }}" in caught.value.hint


def own_rows(split: str | None, dataset_config: Any, tokenizer: Any) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": str(split)}]}]


@pytest.mark.parametrize("name", [f"{__name__}:own_rows", f"{__name__}.own_rows"])
def test_dataset_may_be_a_named_function(name: str) -> None:
    assert get_custom_dataset("train", path=name)[0]["messages"][0]["content"] == "train"
