"""Episodes of several turns decode to exactly the conversation that was held, with the templates of real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api.cli_args import GenerationHyperparameters
from areal.api.io_struct import ModelRequest, ModelResponse
from areal.dataset.tokenizers import load_hf_tokenizer
from areal.rollout.workflows import GroupedWorkflow
from areal.training.trainers.rollouts import sample_rewards
from areal.workflow.multi_turn import MultiTurnWorkflow
from areal.workflow.rlvr import RLVRWorkflow
from tests.conversation.families import Family, families

USER = {"role": "user", "content": "6 * 7?"}
FEEDBACK = "Wrong."


class Script:
    """An engine that samples these texts."""

    def __init__(self, family: Family, texts: list[str]) -> None:
        self._texts = iter(texts)
        self._family = family
        self.requests: list[ModelRequest] = []

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        self.requests.append(request)
        ids = self._family.base.encode(next(self._texts), add_special_tokens=False).ids
        return ModelResponse(list(request.input_ids), ids, [-1.0] * len(ids), [0] * len(ids), "stop")


async def never_right(*args: Any, **data: Any) -> float:  # async: of this process, which needs no worker
    return 0.0


async def answers_42(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return float("42" in completions)


def text_of(family: Family, ids: torch.Tensor) -> str:
    return str(family.base.decode(ids.tolist(), skip_special_tokens=False))


async def rows_of(family: Family, texts: list[str]) -> tuple[list[str], list[list[str]], Script]:
    """Hold an episode. Return the texts of its rows, and of each what was learned."""
    tokenizer = family.tokenizer
    tokenizer.pad_token_id = tokenizer.eos_token_id
    script = Script(family, texts)
    workflow = MultiTurnWorkflow(
        never_right, GenerationHyperparameters(max_new_tokens=64), tokenizer, max_turns=len(texts), feedback=FEEDBACK
    )
    found = await workflow.arun_episode(script, {"messages": [USER]})  # type: ignore[arg-type]
    assert found is not None
    whole: list[str] = []
    learned: list[list[str]] = []
    for ids, seen, turns in zip(found["input_ids"], found["attention_mask"], found["turn_ids"], strict=True):
        whole.append(text_of(family, ids[seen]))
        learned.append([text_of(family, ids[turns == turn]) for turn in range(len(texts)) if turn in turns])
    return whole, learned, script


def held(family: Family, contents: list[str]) -> str:
    """The template's own prompt after these responses."""
    messages: list[dict[str, str]] = [USER]
    for content in contents:
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": FEEDBACK}]
    if family.takes_parts:
        messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]  # type: ignore[dict-item]
    return str(family.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


# What the models of a family sample: a response of content "41", with a thought or without one.
THOUGHT = "<think>\nhm\n</think>\n\n41<|im_end|>"
FINAL = "<|channel|>final<|message|>41<|return|>"
SAMPLES = [
    ("qwen2_5", "41<|im_end|>", "41", 1),
    ("qwen3", "41<|im_end|>", "41", 1),
    ("qwen3", THOUGHT, "41", 3),
    ("qwen3_5_nothink", "41<|im_end|>", "41", 3),
    ("qwen3_5_think", "hm\n</think>\n\n41<|im_end|>", "41", 3),
    ("qwen3_6", "hm\n</think>\n\n41<|im_end|>", "41", 3),
    ("glm4moe", "\n<think></think>\n41<|user|>", "41", 1),
    ("glm4moe", "\n<think>hm</think>\n41<|user|>", "41", 3),
    ("gptoss", FINAL, "41", 3),
    ("gptoss", f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{FINAL}", "41", 3),
    ("gemma", "41<end_of_turn>", "41", 1),
    ("gemma3", "41<end_of_turn>", "41", 1),
    ("gemma4", "41<turn|>", "41", 1),
    ("deepseek_r1_distill", "hm\n</think>\n\n41<｜end▁of▁sentence｜>", "\n\n41", 3),
    ("deepseekv3", "hm\n</think>\n\n41<｜end▁of▁sentence｜>", "\n\n41", 3),
    ("llama3_1", "41<|eot_id|>", "41", 1),
    ("cohere2", "41<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "41", 1),
    ("muse_glimmer", " to=user<|message|>41<|eot|>", "41", 1),
    ("phi3", "41<|end|>", "41", 1),
    ("llava_next", " 41 42</s>", "41 42", 1),
    ("smolvlm", " 41<end_of_utterance>", "41", 1),
    ("lfm2", "41<|im_end|>", "41", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sampled", "content", "rows"), SAMPLES)
async def test_episode_decodes_to_its_conversation(name: str, sampled: str, content: str, rows: int) -> None:
    family = families()[name]
    whole, learned, _ = await rows_of(family, [sampled] * 3)
    assert learned == ([[sampled] * 3] if rows == 1 else [[sampled]] * 3)
    turns = [2] if rows == 1 else [0, 1, 2]
    assert whole == [held(family, [content] * turn) + sampled for turn in turns]


@pytest.mark.parametrize("name", sorted(families()))
async def test_episode_of_any_template_continues_or_branches(name: str) -> None:
    family = families()[name]
    texts = ["41", "<think>\nhm\n</think>\n\n42", "the rain "]
    whole, learned, script = await rows_of(family, [text + family.ends.eos for text in texts])
    assert [run for row in learned for run in row] == [text + family.ends.eos for text in texts]
    prompts = [family.base.decode(request.input_ids, skip_special_tokens=False) for request in script.requests]
    assert prompts[0] == held(family, [])
    assert all(row.startswith(prompts[0]) or row.count(FEEDBACK) for row in whole)
    assert [prompt.count(FEEDBACK) for prompt in prompts] == [0, 1, 2]
    assert "!" not in "".join(whole).replace(held(family, []), "")


async def test_branching_episode_is_one_sample_with_final_reward() -> None:
    script = Script(families()["qwen3"], [THOUGHT, THOUGHT.replace("41", "42")])
    gconfig = GenerationHyperparameters(max_new_tokens=64)
    workflow = MultiTurnWorkflow(answers_42, gconfig, families()["qwen3"].tokenizer, max_turns=3, turn_discount=0.5)
    found = await GroupedWorkflow(workflow, 1).arun_episode(script, {"messages": [USER]})
    assert found is not None
    assert found["rewards"].tolist() == [0.5, 0.5] and found["original_rewards"].tolist() == [0.0, 0.5]
    assert found["sample_ids"].tolist() == [0, 0]
    assert sample_rewards(found).tolist() == [0.5]


async def test_truncated_response_is_closed_by_prompt_and_untrained() -> None:
    whole, learned, _ = await rows_of(families()["gemma"], ["4", "41<end_of_turn>"])
    assert learned == [["4", "41<end_of_turn>"]] and "4<end_of_turn>\n<start_of_turn>user\nWrong." in whole[0]


@pytest.mark.parametrize(("name", "ends"), [("gemma", {"<end_of_turn>"}), ("glm4moe", {"<|user|>", "<|observation|>"})])
def test_sampling_stops_at_end_of_turn_of_template(tmp_path: Path, name: str, ends: set[str]) -> None:
    folder = families()[name].write_folder(tmp_path / name)
    (folder / "generation_config.json").unlink()
    tokenizer = load_hf_tokenizer(str(folder))
    workflow = RLVRWorkflow(never_right, GenerationHyperparameters(), tokenizer)
    assert ends <= {tokenizer.decode([token]) for token in workflow.gconfig.stop_token_ids}


async def test_custom_prompt_function_receives_row_tools() -> None:
    family = families()["qwen3"]
    script = Script(family, ["41<|im_end|>"])
    workflow = RLVRWorkflow(
        never_right,
        GenerationHyperparameters(max_new_tokens=8),
        family.tokenizer,
        data_extract_prompt_fn=lambda data: data["asked"],
    )
    tools = [{"type": "function", "function": {"name": "weather"}}]
    await workflow.arun_episode(script, {"asked": [USER], "tools": tools})  # type: ignore[arg-type]
    assert '"name": "weather"' in family.base.decode(script.requests[0].input_ids)
