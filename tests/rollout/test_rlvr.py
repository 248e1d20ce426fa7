"""Prompts as token ids, answers as text and as rows, and their rewards."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.api.io_struct import ModelResponse
from areal.dataset.tokenizers import load_hf_tokenizer, prompt_tokens, texts
from areal.errors import UsageFault
from areal.rollout.rows import PromptCache, RowReward, prompt_ids
from areal.rollout.tensors import RewardedResponse, concat_padded_tensors, response_rows, row
from tests.conversation.families import families
from tests.services.tokenizer_folder import write_tokenizer

CHAT = [{"role": "user", "content": "Hello friend"}]
CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def row_of(form: type) -> dict[str, Any]:
    """A conversation with a call, whose arguments and tools are objects or JSON text."""
    write = json.dumps if form is str else lambda value: value
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": write({"city": "Oslo"})}}
    messages = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
    ]
    return {"messages": messages, "tools": write([{"type": "function", "function": {"name": "weather"}}])}


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "reverse_digits" / "model"


@pytest.fixture(params=["bytes", "words"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return load_hf_tokenizer(str(write_tokenizer(tmp_path / "made") if request.param == "bytes" else EXAMPLE))


def test_prompt_and_texts_match_tokenizer(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "3141"}]
    own = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert prompt_tokens(tokenizer, chat) == own
    answers = [own, own[:3], [own[0], tokenizer.eos_token_id], [tokenizer.eos_token_id], []]
    assert texts(tokenizer, answers) == [tokenizer.decode(each, skip_special_tokens=True) for each in answers]


class Counted:
    """A tokenizer that counts the texts that it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self.chat_template = tokenizer.chat_template
        self.special_tokens_map = tokenizer.special_tokens_map
        self.asked = 0
        self._tokenizer = tokenizer
        self.decode = tokenizer.decode

    def encode(self, text: str, **how: Any) -> Any:
        self.asked += 1
        return self._tokenizer.encode(text, **how)


def test_repeated_row_prompt_is_cached(tokenizer: Any) -> None:
    counted = Counted(tokenizer)
    prompts = PromptCache(counted)
    ids, text = prompts.of({"messages": CHAT, "answer": 1})
    assert ids == prompt_tokens(tokenizer, CHAT) and text == tokenizer.decode(ids)
    ids.clear()  # it was the caller's
    again, _ = prompts.of({"messages": CHAT, "answer": 2})
    assert again == prompt_tokens(tokenizer, CHAT) and counted.asked == 1
    prompts.of({"messages": [{**CHAT[0], "content": "fox"}]})
    assert counted.asked == 2


_MESSAGES = st.sampled_from(
    [[{"role": "user", "content": text}] for text in ("a", "b", "", "é")]
    + [[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], [{"role": "system", "content": "a"}]]
)
_TOOLS = st.sampled_from([None, [], *([{"type": "function", "function": {"name": name}}] for name in "ab")])
_KWARGS = st.sampled_from([None, {}, {"enable_thinking": False}, {"enable_thinking": True}, {"enable_thinking": 0}])
_ROWS = st.fixed_dictionaries({"messages": _MESSAGES, "tools": _TOOLS, "chat_template_kwargs": _KWARGS})


@given(rows=st.lists(st.tuples(_ROWS, st.sampled_from([None, True, False])), min_size=2, max_size=12))
@settings(deadline=None)
def test_prompt_cache_is_specific_to_row(rows: list[tuple[dict[str, Any], bool | None]]) -> None:
    tokenizer = families()["qwen3"].tokenizer
    caches = {thinking: PromptCache(tokenizer, thinking) for thinking in (None, True, False)}
    for each, thinking in rows:
        assert caches[thinking].of(each)[0] == prompt_ids(tokenizer, each, thinking)


def test_prompt_cache_distinguishes_tools(tmp_path: Path) -> None:
    tokenizer = load_hf_tokenizer(str(write_tokenizer(tmp_path / "made")))
    prompts = PromptCache(tokenizer)
    for name in ("weather", "flights"):
        tools = [{"type": "function", "function": {"name": name}}]
        assert f'"{name}"' in prompts.of({"messages": CHAT, "tools": tools})[1]
    assert "Tools" not in prompts.of({"messages": CHAT})[1]


def test_json_text_prompt_equals_its_value(tmp_path: Path) -> None:
    tokenizer = load_hf_tokenizer(str(write_tokenizer(tmp_path / "made", template=CALLS)))
    found = {PromptCache(tokenizer).of(row_of(form))[1] for form in (str, dict)}
    assert len(found) == 1 and '{"city": "Oslo"}' in found.pop()


def test_prompt_cache_is_bounded(tokenizer: Any) -> None:
    counted = Counted(tokenizer)
    prompts = PromptCache(counted, max_tokens=len(prompt_tokens(tokenizer, CHAT)))
    others = [[{**CHAT[0], "content": word}] for word in ("fox", "friend")]
    for chat in (CHAT, *others, CHAT):
        prompts.of({"messages": chat})
    assert counted.asked == 4  # what came first went first


def test_concurrently_made_prompt_is_cached_once(tokenizer: Any) -> None:
    both = threading.Barrier(2)

    class Slow(Counted):
        def encode(self, text: str, **how: Any) -> Any:
            both.wait(10)
            return super().encode(text, **how)

    slow = Slow(tokenizer)
    prompts = PromptCache(slow, max_tokens=len(prompt_tokens(tokenizer, CHAT)))
    with ThreadPoolExecutor(2) as makers:
        first, second = makers.map(prompts.of, [{"messages": CHAT}] * 2)
    assert first == second == prompts.of({"messages": CHAT})
    assert slow.asked == 2


def test_uncacheable_prompts_are_made_each_time(tokenizer: Any) -> None:
    prompts = PromptCache(tokenizer)
    assert prompts.of({"input_ids": [3, 4]})[0] == [3, 4]
    assert prompts.of({"prompt": "7"})[0] == tokenizer.encode("7") == prompts.of({"prompt": "7"})[0]
    strange = {"messages": [{"role": "user", "content": "7", "note": object()}]}
    assert prompts.of(strange)[0] == prompts.of(strange)[0]


def answers() -> st.SearchStrategy[ModelResponse]:
    tokens = st.integers(0, 2**31 - 1)

    def of(size: int) -> st.SearchStrategy[ModelResponse]:
        return st.builds(
            ModelResponse,
            input_tokens=st.lists(tokens, min_size=1, max_size=4),
            output_tokens=st.lists(tokens, min_size=size, max_size=size),
            output_logprobs=st.lists(st.floats(-50, 0, width=32), min_size=size, max_size=size),
            output_versions=st.lists(st.integers(0, 9), min_size=size, max_size=size),
            stop_reason=st.sampled_from(["stop", "length"]),
        )

    return st.integers(0, 4).flatmap(of)


@given(st.lists(st.tuples(answers(), st.floats(-1, 1, width=32)), min_size=1, max_size=4))
def test_grouped_answers_equal_single_rows(given_: list[tuple[ModelResponse, float]]) -> None:
    alone = [
        row(
            answer.input_tokens + answer.output_tokens,
            [0] * answer.input_len + [1] * answer.output_len,
            [0.0] * answer.input_len + answer.output_logprobs,
            [-1] * answer.input_len + answer.output_versions,
            [-1] * answer.input_len + [0] * answer.output_len,
            reward,
            truncated=answer.stop_reason == "length",
        )
        for answer, reward in given_
    ]
    together, apart = response_rows([RewardedResponse(*each) for each in given_]), concat_padded_tensors(alone)
    assert list(together) == list(apart)
    for name, column in apart.items():
        assert together[name].dtype == column.dtype and torch.equal(together[name], column), name


# Several rewards of one answer

LENGTH, RIGHT = f"{__name__}:length", f"{__name__}:right"


def length(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return float(len(completions))


def right(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **data: Any) -> float:
    if completions == "raise":
        raise ValueError("no reward")
    return float(completions == answer)


async def test_rewards_are_summed_by_weight() -> None:
    rewards = RowReward([LENGTH, RIGHT], 30.0, [0.5, 2.0])
    row = {"answer": "yes"}
    assert await rewards("q", "yes", [1], [2], row) == 0.5 * 3 + 2.0
    found = await rewards.each("q", [1], [("no", [2]), ("raise", [3]), ("yes", [4])], row)
    assert (found[0], found[2]) == (1.0, 3.5)
    assert isinstance(found[1], Exception)  # of one function: the answer has no reward


async def test_rewards_without_weights_count_equally() -> None:
    assert await RowReward([LENGTH, RIGHT], 30.0)("q", "yes", [1], [2], {"answer": "yes"}) == 4.0
    assert await RowReward(LENGTH, 30.0)("q", "yes", [1], [2], {}) == 3.0


@pytest.mark.parametrize(
    ("functions", "weights", "message"),
    [
        ([LENGTH, RIGHT], [1.0], "reward_weights has 1 numbers, and reward_fn 2 functions"),
        ([LENGTH], [float("nan")], "must be finite"),
        ([LENGTH, LENGTH], None, "functions of the same name"),
        ([], None, "reward_fn 0 functions"),
    ],
)
def test_wrong_weights_are_reported(functions: list[Any], weights: list[float] | None, message: str) -> None:
    with pytest.raises(UsageFault, match=message):
        RowReward(functions, 30.0, weights)


def test_row_without_reward_column_is_reported_before_sampling() -> None:
    with pytest.raises(UsageFault, match="answer"):
        RowReward([LENGTH, RIGHT]).check({"question": "?"})
