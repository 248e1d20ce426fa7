from __future__ import annotations

import pytest

from areal.services.dialects import Content, Reasoning
from areal.services.inference.data_proxy.parsers.reader import first_marker, possible_start
from areal.services.inference.data_proxy.parsers.registry import REASONING_FORMATS, reasoning_format
from tests.services.inference.data_proxy.parsers.reading import new_reader, read


@pytest.mark.parametrize(
    ("name", "inside", "text", "reasoning", "content"),
    [
        ("qwen3", False, "<think>\nHm.\n</think>\n\nHi.", "Hm.", "Hi."),
        ("qwen3", True, "Hm.\n</think>\n\nHi.", "Hm.", "Hi."),
        ("qwen3", True, "<think>\nHm.</think>Hi.", "Hm.", "Hi."),
        ("qwen3", False, "Hi <think> is a tag </think>", "", "Hi <think> is a tag </think>"),
        ("qwen3", False, "\n\n Hi", "", "\n\n Hi"),
        ("qwen3", True, "never ends\n", "never ends", ""),
        ("qwen3", False, "<think></think>Hi", "", "Hi"),
        ("qwen3", False, "<think>a\n\nb</think>\n  Hi\n", "a\n\nb", "  Hi\n"),
        ("qwen3", False, "<thi", "", "<thi"),
        ("qwen3", False, "</think>\n\nHi", "", "Hi"),
        ("minimax_m3", False, "</mm:think>Hi", "", "Hi"),
        ("minimax_m3", False, "<mm:think>Hm</mm:think>Hi", "Hm", "Hi"),
        ("hy_v3", True, "Hm</think:opensource>Hi", "Hm", "Hi"),
        ("mistral", False, "[THINK]Hm[/THINK]Hi", "Hm", "Hi"),
        ("cohere_command3", True, "Hm<|END_THINKING|>Hi", "Hm", "Hi"),
        ("kimi", False, "◁think▷Hm◁/think▷Hi", "Hm", "Hi"),
        ("granite", False, "Here is my thought process: Hm. Here is my response: Hi", " Hm.", " Hi"),
    ],
)
def test_reasoning_is_separate_from_content(name: str, inside: bool, text: str, reasoning: str, content: str) -> None:
    reply = read(new_reader(None, REASONING_FORMATS[name], inside=inside), [text])
    assert (reply.reasoning, reply.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("name", "tail", "inside"),
    [
        ("qwen3", "<|im_start|>assistant\n", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("deepseek_r1", "<｜Assistant｜>", True),
        ("deepseek_r1", "<｜Assistant｜><think>\n", True),
        ("deepseek_r1", "<｜Assistant｜><think></think>", False),
        ("deepseek_v3", "<｜Assistant｜></think>", False),
    ],
)
def test_prompt_tail_decides_if_answer_starts_in_reasoning(name: str, tail: str, inside: bool) -> None:
    assert reasoning_format(name).opened_by(tail) is inside


def test_tool_call_ends_reasoning_in_glm45() -> None:
    text = "<think>Hm.\n<tool_call>now</tool_call>"
    reply = read(new_reader("glm45", REASONING_FORMATS["glm45"]), list(text))
    assert reply.reasoning == "Hm." and [call.name for call in reply.calls] == ["now"]


def test_calls_in_reasoning_are_reasoning() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    reply = read(new_reader("hermes", REASONING_FORMATS["qwen3"]), [f"<think>{call}</think>{call}"])
    assert reply.reasoning == call and len(reply.calls) == 1


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "calls"),
    [
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<|return|>",
            "Hm.", "Hi.", [],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
            "Hm.", "I look.", [("now", "{}")],
        ),
        ("<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}", "", "", [("now", "{}")]),
        ("<|channel|>final<|message|>", "", "", []),
        ("plain", "", "plain", []),
    ],
)  # fmt: skip
def test_channels_are_reasoning_content_and_calls(
    text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    reply = read(new_reader("gpt_oss"), list(text))
    assert (reply.reasoning, reply.content) == (reasoning, content)
    assert [(call.name, call.arguments) for call in reply.calls] == calls


def test_pieces_are_emitted_as_soon_as_unambiguous() -> None:
    reader = new_reader(None, REASONING_FORMATS["qwen3"])
    assert reader.push("<think>") == ()
    assert reader.push("\nHm") == (Reasoning("Hm"),)
    assert reader.reasoning_open
    assert reader.push(" </th") == ()
    assert reader.push("en </think>\n") == (Reasoning(" </then"),)
    assert reader.push("\nHi") == (Content("Hi"),)
    assert not reader.reasoning_open


def test_reasoning_is_open_until_content_or_a_call() -> None:
    assert not new_reader("hermes").reasoning_open and not new_reader(None).reasoning_open
    assert new_reader("hermes", REASONING_FORMATS["qwen3"]).reasoning_open, "it may begin with reasoning"
    channels = new_reader("gpt_oss")
    seen = []
    for text in (
        "<|channel|>analysis<|message|>Hm.",
        "<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
        "<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.",
        "<|end|><|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
    ):
        channels.push(text)
        seen.append(channels.reasoning_open)
    assert seen == [True, False, True, False]


@pytest.mark.parametrize(
    ("text", "at", "markers", "held"),
    [
        ("a<t", 0, ("<tool>",), 2),
        ("a<t", 1, ("<tool>",), 2),
        ("a<t", 2, ("<tool>",), 0),
        ("<", 1, ("<tool>",), 0),
        ("<tool", 0, ("<tool>",), 5),
        ("ab", 0, ("b>", "abc"), 2),
        ("ab", 0, ("b>", "xyz"), 1),
        ("ab", 0, ("xyz",), 0),
        ("ab", 0, (), 0),
        ("", 0, ("<tool>",), 0),
    ],
)
def test_text_that_may_start_a_marker_is_held_back(text: str, at: int, markers: tuple[str, ...], held: int) -> None:
    assert possible_start(text, at, markers) == held


@pytest.mark.parametrize(
    ("text", "at", "markers", "found"),
    [
        ("a</x><x>", 0, ("<x>", "</x>"), (1, "</x>")),
        ("a</x><x>", 2, ("<x>", "</x>"), (5, "<x>")),
        ("<x>", 0, ("x>", "<x>"), (0, "<x>")),
        ("<x>y", 0, ("<x>y", "x>"), (1, "x>")),
        ("abc", 0, ("x",), None),
    ],
)
def test_marker_that_is_complete_first_wins(text: str, at: int, markers: tuple[str, ...], found: object) -> None:
    assert first_marker(text, at, markers) == found
