"""Conversations as rows to learn and as prompts, with the chat templates of real models."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from areal.api.cli_args import TrainDatasetConfig
from areal.conversation import ConversationError
from areal.dataset import get_custom_dataset
from areal.dataset.files import BadData
from areal.dataset.tokenizers import load_hf_tokenizer, prompt_tokens
from areal.errors import UsageFault
from areal.rollout.rows import PromptCache, prompt_ids
from areal.training.frontier import rows_digest
from tests.conversation.families import families
from tests.dataset.test_dataset import lines, parquet

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
USER = {"role": "user", "content": "Weather in Oslo?"}
RAIN = {"role": "assistant", "content": "Rain."}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "rain"}


def called(arguments: Any, content: str | None = None) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def of(name: str) -> Any:
        return load_hf_tokenizer(str(families()[name].write_folder(tmp_path_factory.getbasetemp() / "families" / name)))

    return of


def learned(tmp_path: Path, tokenizer: Any, row: dict[str, Any], **settings: Any) -> list[str]:
    """The runs of learned tokens of a row for fine-tuning."""
    file = str(lines(tmp_path / "rows.jsonl", [row]))
    (found,) = get_custom_dataset(path=file, type="sft", tokenizer=tokenizer, **settings)
    runs: list[list[int]] = [[]]
    for token, mask in zip(found["input_ids"], found["loss_mask"], strict=True):
        if mask:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def refusal(tmp_path: Path, tokenizer: Any, row: dict[str, Any], **settings: Any) -> str:
    with pytest.raises(BadData) as caught:
        learned(tmp_path, tokenizer, row, **settings)
    return str(caught.value)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "glm4moe"])
def test_json_call_arguments_equal_mapping_arguments(tmp_path: Path, tokenizers: Any, name: str) -> None:
    tokenizer = tokenizers(name)
    rows = [{"messages": [USER, called(form({"city": "Oslo"}))], "tools": [WEATHER]} for form in (json.dumps, dict)]
    assert learned(tmp_path, tokenizer, rows[0]) == learned(tmp_path, tokenizer, rows[1])
    prompts = [{**row, "messages": [*row["messages"], RESULT], "tools": json.dumps(row["tools"])} for row in rows]
    first, second = (prompt_ids(tokenizer, row) for row in prompts)
    assert first == second and "\\" not in tokenizer.decode(first)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_5_think", "glm4moe"])
def test_parquet_nulls_are_treated_as_absent(tmp_path: Path, tokenizers: Any, name: str) -> None:
    tokenizer = tokenizers(name)
    rows = [
        {"messages": [USER, called({"city": "Oslo"})], "tools": [WEATHER]},
        {"messages": [USER, called({"query": "x"})], "tools": [{**WEATHER, "strict": True}]},
    ]
    file = parquet(tmp_path / "rows.parquet", rows)
    assert "None" in str(get_custom_dataset(path=str(file))[0]), "Parquet unified the rows"
    read = get_custom_dataset(path=str(file), type="sft", tokenizer=tokenizer)
    plain = get_custom_dataset(path=str(lines(tmp_path / "r.jsonl", rows)), type="sft", tokenizer=tokenizer)
    assert list(read) == list(plain)


def test_functions_of_a_row_are_its_tools(tmp_path: Path, tokenizers: Any) -> None:
    asked = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}}
    rows: list[dict[str, Any]] = [
        {"messages": [USER, asked], "functions": [WEATHER["function"]], "tools": None},
        {"messages": [USER, called({})], "tools": [WEATHER]},
    ]
    file = str(lines(tmp_path / "f.jsonl", rows))
    old, new = get_custom_dataset(path=file, type="sft", tokenizer=tokenizers("qwen3"))
    assert old == new


def test_prompt_length_counts_the_tools(tmp_path: Path, tokenizers: Any) -> None:
    tokenizer = tokenizers("qwen3")
    row = {"messages": [USER], "tools": json.dumps([WEATHER])}
    file, size = str(lines(tmp_path / "rl.jsonl", [row])), len(prompt_tokens(tokenizer, [USER], [WEATHER]))
    assert len(get_custom_dataset(path=file, tokenizer=tokenizer, max_length=size)) == 1
    with pytest.raises(BadData, match="every row is longer"):
        get_custom_dataset(path=file, tokenizer=tokenizer, max_length=size - 1)


def test_prompt_that_ends_with_its_answer_is_refused(tmp_path: Path, tokenizers: Any) -> None:
    tokenizer, row = tokenizers("qwen3"), {"messages": [USER, RAIN]}
    with pytest.raises(ConversationError, match=r"messages\[1\].role is 'assistant'"):
        prompt_ids(tokenizer, row)
    with pytest.raises(BadData, match=r"rl.jsonl:1: messages\[1\].role"):
        get_custom_dataset(path=str(lines(tmp_path / "rl.jsonl", [row])), tokenizer=tokenizer, max_length=99)


@pytest.mark.parametrize("kind", ["dpo", "rw"])
def test_pairs_keep_their_tools_and_learn_the_last_message(tmp_path: Path, tokenizers: Any, kind: str) -> None:
    tokenizer = tokenizers("qwen3")
    row = {"prompt": [USER], "chosen": [called({"city": "Oslo"})], "rejected": [RAIN], "tools": [WEATHER]}
    (found,) = get_custom_dataset(path=str(lines(tmp_path / "p.jsonl", [row])), type=kind, tokenizer=tokenizer)
    assert found["chosen_ids"][: found["prompt_length"]] == prompt_tokens(tokenizer, [USER], [WEATHER])
    assert tokenizer.decode(found["rejected_ids"][found["prompt_length"] :]).endswith("Rain.<|im_end|>")
    assert '"name": "weather"' in tokenizer.decode(found["chosen_ids"][found["prompt_length"] :])


def test_pairs_differing_before_last_message_are_refused(tmp_path: Path, tokenizers: Any) -> None:
    row = {"chosen": [USER, RAIN, USER, RAIN], "rejected": [USER, {**RAIN, "content": "Sun."}, USER, RAIN]}
    with pytest.raises(BadData, match=r"p.jsonl:1: chosen and rejected must be the same but for their last message"):
        get_custom_dataset(path=str(lines(tmp_path / "p.jsonl", [row])), type="dpo", tokenizer=tokenizers("qwen3"))


@pytest.mark.parametrize(("answer", "end"), [(RAIN, "<|user|>"), (called({"city": "Oslo"}), "<|observation|>")])
def test_glm_learns_its_end_of_turn_token(tmp_path: Path, tokenizers: Any, answer: Any, end: str) -> None:
    (run,) = learned(tmp_path, tokenizers("glm4moe"), {"messages": [USER, answer], "tools": [WEATHER]})
    assert run.endswith(end)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER, RAIN, USER]}, "messages[2].role is 'user': a row ends with the assistant's message"),
        ({"messages": [USER, called("{}"), RESULT]}, "messages[2].role is 'tool'"),
        ({"prompt": [USER], "completion": [RAIN, USER]}, "messages[2].role is 'user'"),
    ],
)
def test_rows_not_ending_with_assistant_are_refused(
    tmp_path: Path, tokenizers: Any, row: dict[str, Any], message: str
) -> None:
    assert f"rows.jsonl:1: {message}" in refusal(tmp_path, tokenizers("qwen3"), row)


@pytest.mark.parametrize(
    ("name", "wanted"), [("glm4moe", "\n<think></think>\nRain.<|user|>"), ("lfm2_v2", "Ra\nin.<|im_end|>")]
)
def test_answer_of_several_parts_is_learned(tmp_path: Path, tokenizers: Any, name: str, wanted: str) -> None:
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Ra"}, {"type": "text", "text": "in."}]}
    assert learned(tmp_path, tokenizers(name), {"messages": [USER, answer]}) == [wanted]


@pytest.mark.parametrize("key", ["weight", "train", "training", "loss"])
def test_messages_of_weight_zero_are_not_learned(tmp_path: Path, tokenizers: Any, key: str) -> None:
    tokenizer, bad = (
        tokenizers("qwen2_5"),
        {"role": "assistant", "content": "Snow.", key: 0 if key == "weight" else False},
    )
    row = {"messages": [USER, bad, USER, {**RAIN, key: 1.0 if key == "weight" else True}]}
    assert learned(tmp_path, tokenizer, row, train_on="assistant") == ["Rain.<|im_end|>"]
    assert f"messages[1].{key} is {bad[key]}, so nothing" in refusal(tmp_path, tokenizer, {"messages": [USER, bad]})
    half = {"messages": [USER, {**RAIN, key: 0.5}]}
    assert f"messages[1].{key} is 0.5: it must be 0" in refusal(tmp_path, tokenizer, half)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [{**USER, "train": True}, RAIN]}, "messages[0].train is True: only messages of the assistant"),
        ({"messages": [USER, {**RAIN, "weight": 1}, USER, RAIN]}, "messages[1].weight is 1: with train_on: last, only"),
        ({"messages": [USER, {**RAIN, "train_detail": [{"begin_offset": 0}]}]}, "messages[1].train_detail is not read"),
        ({"messages": [USER, RAIN], "system": "Be brief."}, "system is not read"),
        ({"system_prompt": "Be brief.", "question": "Weather?", "response": "Rain."}, "system_prompt is not read"),
        ({"instruction": "Weather?", "output": "Rain.", "history": [["Hi", "Hello"]]}, "history is not read"),
        ({"instruction": "Who?", "context": "Ada wrote it.", "response": "Ada"}, "context is not read"),
        ({"question": "Which?", "choices": ["a", "b"], "answer": 1}, "choices is not read: put it into the question"),
        ({"messages": [USER, RAIN], "kto_tag": False}, "kto_tag is false"),
        ({"prompt": [USER], "completion": [RAIN], "label": False}, "label is false"),
        ({"prompt": "Weather?", "completion": "Rain.", "tools": [WEATHER]}, "tools have no effect"),
        ({"input_ids": [5, 6], "completion_mask": [0, 1]}, "completion_mask is not read: name it loss_mask"),
        ({"input_ids": [5, 6], "assistant_masks": [0, 1]}, "assistant_masks is not read: name it loss_mask"),
        ({"input_ids": [5, 6], "position_ids": [0, 0]}, "position_ids is not read: a row is one sequence"),
        ({"input_ids": [5, 6], "attention_mask": [1, 0]}, "attention_mask has zeros"),
        ({"input_ids": [5, 6], "loss_mask": [0, 0.5]}, "loss_mask must have a 1"),
        ({"input_ids": [5, 6], "loss_mask": [1]}, "loss_mask must have a 1"),
        ({"messages": [USER, called("{'city': 'Oslo'}")]}, "messages[1].tool_calls[0].function.arguments are not"),
        ({"messages": [USER, called([1])]}, "messages[1].tool_calls[0].function.arguments are not a JSON object"),
        (
            {"messages": [USER, {"role": "assistant", "function_call": {"name": "weather", "arguments": "{"}}]},
            "messages[1].function_call.arguments are not a JSON object",
        ),
    ],
)
def test_rows_that_other_trainers_learn_differently_are_refused(
    tmp_path: Path, tokenizers: Any, row: dict[str, Any], problem: str
) -> None:
    assert problem in refusal(tmp_path, tokenizers("qwen2_5"), row)


@pytest.mark.parametrize(
    "row",
    [
        {
            "messages": [{"role": "system", "content": "Be brief."}, USER, RAIN],
            "system": "Be brief.",
            "history": [["a", "b"]],
        },
        {"messages": None, "prompt": [USER], "completion": [RAIN], "label": True, "system": "", "history": []},
        {"prompt": [USER], "completion": [USER, RAIN], "context": "x"},
        {"messages": [{**USER, "train": False, "loss": False}, {**RAIN, "train_detail": []}], "label": False},
    ],
)
def test_columns_without_an_effect_are_accepted(tmp_path: Path, tokenizers: Any, row: dict[str, Any]) -> None:
    assert learned(tmp_path, tokenizers("qwen2_5"), row) == ["Rain.<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"system": "Be brief.", "question": "Weather?", "chosen": "Rain.", "rejected": "No."}, "system is not read"),
        ({"prompt": [USER], "chosen": [{**RAIN, "train": False}], "rejected": [RAIN]}, "train is False"),
        ({"prompt": "Weather?", "chosen": "Rain.", "rejected": None}, "rejected must be a text or a list of messages"),
        ({"prompt": [USER], "chosen": RAIN, "rejected": RAIN}, "chosen must be a text or a list of messages, not dict"),
        ({"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [2, 4]}, "prompt_ids is not read"),
        ({"prompt": "Weather?", "chosen": "Rain.", "rejected": "No.", "margin": 0.5}, "margin is not read"),
    ],
)
def test_pairs_that_other_trainers_learn_differently_are_refused(
    tmp_path: Path, tokenizers: Any, row: dict[str, Any], problem: str
) -> None:
    with pytest.raises(BadData) as caught:
        get_custom_dataset(path=str(lines(tmp_path / "p.jsonl", [row])), type="rw", tokenizer=tokenizers("qwen2_5"))
    assert problem in str(caught.value)


def test_text_prompt_of_pairs_of_messages_is_a_question(tmp_path: Path, tokenizers: Any) -> None:
    tokenizer = tokenizers("qwen2_5")
    pair = {"chosen": [RAIN], "rejected": [{**RAIN, "content": "Snow."}]}
    rows = [{"prompt": prompt, **pair} for prompt in (USER["content"], [USER])]
    first, second = get_custom_dataset(path=str(lines(tmp_path / "p.jsonl", rows)), type="dpo", tokenizer=tokenizer)
    assert first == second and USER["content"] in tokenizer.decode(first["chosen_ids"][: first["prompt_length"]])
    with pytest.raises(BadData, match="has no question or prompt"):
        get_custom_dataset(path=str(lines(tmp_path / "p.jsonl", [pair])), type="dpo", tokenizer=tokenizer)


def test_prompt_that_pairs_repeat_is_stored_once(tmp_path: Path, tokenizers: Any) -> None:
    sides = {"chosen": [USER, RAIN], "rejected": [USER, {**RAIN, "content": "Snow."}]}
    rows = [
        sides,
        {"prompt": [{**USER, "name": None}], **sides},
        {"prompt": [USER], **{name: side[1:] for name, side in sides.items()}},
    ]
    file = str(lines(tmp_path / "p.jsonl", rows))
    first, second, third = get_custom_dataset(path=file, type="dpo", tokenizer=tokenizers("qwen2_5"))
    assert first == second == third


def test_user_turns_and_default_system_prompt_are_not_learned(tmp_path: Path, tokenizers: Any) -> None:
    row = {"prompt": [USER], "completion": [RAIN, {**USER, "content": "And Rome?"}, {**RAIN, "content": "Dry."}]}
    tokenizer = tokenizers("qwen2_5")
    assert learned(tmp_path, tokenizer, row) == ["Dry.<|im_end|>"]
    assert learned(tmp_path, tokenizer, row, train_on="assistant") == ["Rain.<|im_end|>", "Dry.<|im_end|>"]
    assert learned(tmp_path, tokenizer, {"messages": [RAIN]}) == ["Rain.<|im_end|>"]


def test_train_on_is_a_dataset_setting(tmp_path: Path, tokenizers: Any) -> None:
    tokenizer = tokenizers("qwen2_5")
    file = str(lines(tmp_path / "r.jsonl", [{"messages": [USER, RAIN, USER, RAIN]}]))
    counts = []
    for value in ("last", "assistant"):
        config = TrainDatasetConfig(path=file, type="sft", train_on=value)
        counts.append(sum(get_custom_dataset(dataset_config=config, tokenizer=tokenizer)[0]["loss_mask"]))
    assert counts[1] == 2 * counts[0]
    with pytest.raises(UsageFault, match="train_on needs a data set of type sft"):
        get_custom_dataset(path=file, type="rl", train_on="assistant")


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("llama3", {"messages": [USER, RAIN], "tools": [WEATHER]}, "tools have no place in the chat template"),
        ("llama3", {"messages": [USER, called({"city": "Oslo"})]}, "messages[1].tool_calls[0] has no place"),
        ("gemma", {"messages": [{"role": "system", "content": "x"}, USER, RAIN]}, "System role not supported"),
        (
            "deepseek_r1_distill",
            {"messages": [USER, RAIN]},
            "is served, which ends with '<think>\\n', and its content has no </think>",
        ),
        (
            "diffusion_gemma",
            {"messages": [USER, called({"city": "Oslo"}), RESULT, RAIN], "tools": [WEATHER]},
            "messages[3] is written after another prompt than the one that is served, which has no '<|turn>model",
        ),
        (
            "qwen3",
            {"messages": [USER, RAIN], "chat_template_kwargs": {"thinking": False}},
            "chat_template_kwargs.thinking has no effect: the chat template does not read it",
        ),
        ("qwen3", {"messages": [USER, RAIN], "chat_template_kwargs": {"tools": []}}, "kwargs.tools cannot be set"),
        ("qwen3", {"messages": [USER, RAIN], "chat_template_kwargs": [1]}, "must be an object, not list"),
        ("qwen3", {"prompt": "a", "completion": "b", "chat_template_kwargs": {"x": 1}}, "is not a conversation"),
        (
            "qwen3",
            {
                "messages": [USER, {**RAIN, "reasoning_content": "Hm."}],
                "chat_template_kwargs": {"enable_thinking": False},
            },
            "messages[1] is written after another prompt than the one that is served",
        ),
        ("qwen2_5", {"messages": [USER, {**RAIN, "reasoning_content": "hm"}]}, "messages[1].reasoning_content is not"),
    ],
)
def test_rows_unsupported_by_template_are_refused_by_field(
    tmp_path: Path, tokenizers: Any, name: str, row: dict[str, Any], expected: str
) -> None:
    message = refusal(tmp_path, tokenizers(name), row)
    assert "rows.jsonl:1: " in message and expected in message


def test_thought_kept_by_template_is_learned(tmp_path: Path, tokenizers: Any) -> None:
    row = {"messages": [USER, {**RAIN, "reasoning_content": "hm"}]}
    assert learned(tmp_path, tokenizers("qwen3"), row) == ["<think>\nhm\n</think>\n\nRain.<|im_end|>"]


THOUGHTS = [
    {"content": "<think>\nHm.\n</think>\n\nRain."},
    {"content": "Hm.\n</think>\n\nRain."},
]


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "deepseek_r1_distill_training", "deepseekv3"])
@pytest.mark.parametrize("answer", THOUGHTS)
def test_thought_opened_by_prompt_is_learned_after_it(
    tmp_path: Path, tokenizers: Any, name: str, answer: dict[str, Any]
) -> None:
    tokenizer = tokenizers(name)
    asked, sampled = [USER, THOUGHTS[0] | {"role": "assistant"}, USER], "Hm.\n</think>\n\nRain.<｜end▁of▁sentence｜>"
    row = {"messages": [*asked, {"role": "assistant", **answer}]}
    assert learned(tmp_path, tokenizer, row) == [sampled]
    file = str(lines(tmp_path / "rows.jsonl", [row]))
    (found,) = get_custom_dataset(path=file, type="sft", tokenizer=tokenizer)
    prompt = prompt_tokens(tokenizer, asked)
    assert found["input_ids"][: len(prompt)] == prompt and sum(found["loss_mask"]) == len(found["input_ids"]) - len(
        prompt
    )
    pair = {"prompt": asked, "chosen": [row["messages"][-1]], "rejected": [row["messages"][-1]]}
    file = str(lines(tmp_path / "pairs.jsonl", [pair]))
    (found,) = get_custom_dataset(path=file, type="dpo", tokenizer=tokenizer)
    assert found["prompt_length"] == len(prompt) and tokenizer.decode(found["chosen_ids"][len(prompt) :]) == sampled


@pytest.mark.parametrize("is_own", [False, True], ids=["of the data set", "of the row"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "nemotron_3_nano"])
def test_template_variables_apply_to_every_row_kind(tmp_path: Path, tokenizers: Any, name: str, is_own: bool) -> None:
    tokenizer, given = tokenizers(name), {"enable_thinking": False}
    served = prompt_tokens(tokenizer, [USER], **given)
    assert served != prompt_tokens(tokenizer, [USER])
    own = {"chat_template_kwargs": given} if is_own else {"chat_template_kwargs": {"enable_thinking": None}}
    config = TrainDatasetConfig(chat_template_kwargs={} if is_own else given)

    def found(kind: str, row: dict[str, Any]) -> Any:
        config.path, config.type = str(lines(tmp_path / "rows.jsonl", [{**row, **own}])), kind
        return get_custom_dataset(dataset_config=config, tokenizer=tokenizer)[0]

    row = found("sft", {"messages": [USER, RAIN]})
    assert row["input_ids"][: len(served)] == served and row["loss_mask"].index(1) == len(served)
    for kind in ("rw", "dpo"):
        row = found(kind, {"prompt": [USER], "chosen": "Rain.", "rejected": "Dry."})
        assert row["chosen_ids"][: len(served)] == served and row["prompt_length"] == len(served)
    row = found("rl", {"messages": [USER], "answer": "Rain."})
    assert prompt_ids(tokenizer, row) == PromptCache(tokenizer).of(row)[0] == served
    assert rows_digest([row]) != rows_digest([{"messages": [USER], "answer": "Rain."}])
    config.max_length = len(served) - 1
    with pytest.raises(BadData, match="every row is longer than max_length"):
        found("rl", {"messages": [USER]})


def test_variables_unused_by_chat_template_are_refused(tmp_path: Path, tokenizers: Any) -> None:
    file = str(lines(tmp_path / "rows.jsonl", [{"messages": [USER]}]))
    config = TrainDatasetConfig(path=file, type="rl", chat_template_kwargs={"enable_thinking": False})
    with pytest.raises(BadData, match=r"chat_template_kwargs.enable_thinking has no effect"):
        get_custom_dataset(dataset_config=config, tokenizer=tokenizers("qwen2_5"))
    with pytest.raises(UsageFault, match="needs a tokenizer for chat_template_kwargs"):
        get_custom_dataset(dataset_config=config)
    with pytest.raises(ConversationError, match=r"chat_template_kwargs.enable_thinking has no effect"):
        prompt_ids(tokenizers("qwen2_5"), {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}})


@pytest.mark.parametrize("is_fast", [True, False])
def test_tokenizer_is_freed_with_its_chat(tmp_path: Path, is_fast: bool) -> None:
    from transformers import AutoTokenizer, ByT5Tokenizer

    tokenizer: Any
    if is_fast:
        tokenizer = AutoTokenizer.from_pretrained(families()["qwen3"].write_folder(tmp_path))
    else:
        tokenizer = ByT5Tokenizer(chat_template=families()["qwen2_5"].source)
    assert tokenizer.is_fast == is_fast
    assert prompt_tokens(tokenizer, [USER])
    freed = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert freed() is None


def test_named_templates_without_a_default_are_refused(tokenizers: Any) -> None:
    tokenizer = copy.deepcopy(tokenizers("qwen3"))
    tokenizer.chat_template = {"tool_use": tokenizer.chat_template}
    assert prompt_tokens(tokenizer, [USER], [WEATHER])
    with pytest.raises(UsageFault, match="has no chat template"):
        prompt_tokens(tokenizer, [USER])
