from __future__ import annotations

from pathlib import Path

import pytest

from areal.errors import UsageFault
from areal.services.http.process import serve_options
from areal.services.inference.data_proxy.openai import load_parsers
from areal.services.inference.data_proxy.parsers.registry import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    detect_tool_format,
    reasoning_format,
    tool_format,
)
from areal.services.inference.data_proxy.process import data_proxy
from areal.wire.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS, WHOLE, parser_conflict
from areal.wire.processes import DataProxyConfig
from tests.conversation.families import family_of


@pytest.mark.parametrize(
    ("asked", "name"),
    [("hermes", "hermes"), ("qwen", "hermes"), ("Qwen25", "hermes"), ("deepseekv3", "deepseek_v3"),
     ("kimi-k2", "kimi_k2"), ("llama3", "llama3_json"), ("glm47", "glm45"), ("qwen3_xml", "qwen3_coder"),
     ("step3p5", "qwen3_coder"), ("granite4", "hermes"), ("hunyuan_a13b", "jamba"), ("minimax", "jamba"),
     ("xlam", "llama3_json"), ("minimax-m3", "minimax_m3"), ("ling3", "glm45"), ("granite-20b-fc", "granite_20b_fc"),
     ("hunyuan", "hy_v3"), ("muse", "muse_glimmer")],
)  # fmt: skip
def test_tool_format_is_found_by_alias(asked: str, name: str) -> None:
    assert tool_format(asked).name == name


@pytest.mark.parametrize(
    ("asked", "name"),
    [("deepseek-v4", "deepseek_v3"), ("nemotron_v3", "qwen3"), ("glm47", "glm45"),
     ("cohere_command4", "cohere_command3"),
     ("openai_gptoss", "gpt_oss"), ("muse", "muse_glimmer"), ("step3p5", "step3"), ("minimax-m3", "minimax_m3")],
)  # fmt: skip
def test_reasoning_format_is_found_by_alias(asked: str, name: str) -> None:
    assert REASONING_PARSERS.resolve(asked) == name


def test_unknown_tool_parser_error_suggests_and_lists_names() -> None:
    with pytest.raises(UsageFault, match=r'"hermse" is not a tool-call parser .did you mean "hermes"') as caught:
        tool_format("hermse")
    assert "mistral" in (caught.value.hint or "") and "none" in (caught.value.hint or "")


def test_unknown_reasoning_parser_error_suggests_name() -> None:
    with pytest.raises(UsageFault, match=r'"deepseek-r2" is not a reasoning parser .did you mean "deepseek_r1"'):
        reasoning_format("deepseek-r2")
    assert reasoning_format("deepseek-r1").always


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('<tool_call>\\n{"name": <function-name>, "arguments": ...}\\n</tool_call>', "hermes"),
        ("<tool_call>\\n<function=example>\\n<parameter=x>", "qwen3_coder"),
        ("<tool_call>{name}\\n<arg_key>{key}</arg_key>", "glm45"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<｜tool▁calls▁begin｜>...\\n```json\\n", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>...", "deepseek_v31"),
        ("{{- '<|tool_call>call:' + function['name'] + '{' -}}", "gemma4"),
        ("{{- '<start_function_call>call:' + function['name'] + '{' -}}", "functiongemma"),
        ("{{ '<function_calls>\\n' }}{{ name }}(", "olmo3"),
        ("You MUST put it in the format of [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{- '<atem:invoke name=\"' + name + '\">' -}}", "muse_glimmer"),
        ('{{- "<|tool_call_start|>[" + calls + "]<|tool_call_end|>" -}}', "lfm2"),
        ("{{ '<' + dsml_token + 'function_calls>' }}{% set dsml_token = '｜DSML｜' %}", "deepseek_v32"),
        ("{{ '<' + dsml_token + 'tool_calls>' }}{% set dsml_token = '｜DSML｜' %}", "deepseek_v4"),
        ('<|START_ACTION|>[\n{"tool_call_id": "{{ tool_idx.value }}", "tool_name": ...', "cohere_command3"),
        ("{{- '<TOOLCALL>[' -}}", "nemotron_json"),
        ('Respond in the format {"name": function name, "parameters": dictionary', "llama3_json"),
    ],
)
def test_tool_format_is_detected_from_template(template: str, name: str) -> None:
    form = detect_tool_format(template)
    assert form is not None and form.name == name


def test_template_without_tools_has_no_format() -> None:
    assert detect_tool_format("{% for message in messages %}{{ message.content }}{% endfor %}") is None


def test_template_with_tools_in_unknown_format_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = "{{ tools }}{{ ']<[' ~ '<tool_call>' }}<invoke name={{ messages }}>"  # as MiniMax-M3's
    folder = family_of("m3", source, "qwen").write_folder(tmp_path)
    for parser, warnings in ((None, 1), ("none", 0), ("hermes", 0)):
        caplog.clear()
        config = DataProxyConfig(
            model="tiny", engine="embedded", engine_url="http://127.0.0.1:9", tokenizer_path=str(folder), port=0,
            tool_call_parser=parser,
        )  # fmt: skip
        data_proxy(config, serve_options(config))
        assert len(caplog.messages) == warnings and all("spec.toolCallParser" in text for text in caplog.messages)


def test_call_ids_follow_the_family_format() -> None:
    assert tool_format("hermes").new_id().startswith("call_")
    ids = {tool_format("mistral").new_id() for _ in range(50)}
    assert len(ids) == 50 and all(len(each) == 9 and each.isalnum() for each in ids)


def test_manifest_parser_names_match_formats() -> None:
    assert set(TOOL_CALL_PARSERS.canonical.values()) == {form.name for form in TOOL_FORMATS}
    assert set(REASONING_PARSERS.canonical.values()) == {*REASONING_FORMATS, *WHOLE}


def test_parsers_load_exactly_when_manifest_accepts_them() -> None:
    for tools in (None, *TOOL_CALL_PARSERS.spellings):
        for reasoning in (None, *REASONING_PARSERS.spellings):
            try:
                load_parsers(tools, reasoning, None)
                loads = True
            except UsageFault:
                loads = False
            assert loads == (parser_conflict(tools, reasoning) is None), (tools, reasoning)
