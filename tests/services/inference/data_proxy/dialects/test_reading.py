"""What a data proxy is started with, and what that makes of tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal.conversation import Template
from areal.dataset.tokenizers import prompt_tokens
from areal.errors import UsageFault
from areal.services.dialects import CallArguments, CallStart, Content
from areal.services.http.errors import ApiError
from areal.services.inference.data_proxy.fields import Fields
from areal.services.inference.data_proxy.generation import Choice
from areal.services.inference.data_proxy.openai import (
    Parsers,
    ResponseParsing,
    ToolUse,
    load_parsers,
    read_chat,
    read_tool_use,
)
from areal.services.inference.data_proxy.tokenizer import TextCodec, load_codec
from areal.services.inference.engines.base import Capabilities, EngineDelta, FinishReason
from tests.conversation.families import families
from tests.services.inference.data_proxy.dialects.talks import TEMPLATE

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "g"}},
]


@pytest.fixture
def codec() -> TextCodec:
    """Words and spaces as tokens, and three special ones; not byte-level."""
    words = ["[UNK]", "a", "b", "▁a", "▁b", "▁"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "</s>"])
    return TextCodec(tokenizer, template=None, end_ids=[], max_positions=None)


def test_parsers_by_name() -> None:
    parsers = load_parsers("qwen", "deepseek-r1", None)
    assert parsers.tools is not None and parsers.tools.name == "hermes"
    assert parsers.reasoning is not None and parsers.reasoning.always


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
WITH_TOOLS = "{{ tools | tojson }}<tool_call>" + PLAIN


@pytest.mark.parametrize("is_list", [True, False], ids=["tokenizer_config.json", "additional_chat_templates"])
def test_chat_with_tools_uses_template_named_tool_use(tmp_path: Path, is_list: bool) -> None:
    from transformers import AutoTokenizer

    folder = families()["qwen3"].write_folder(tmp_path / "model")
    if is_list:
        (folder / "chat_template.jinja").unlink()
        templates = [{"name": name, "template": text} for name, text in (("default", PLAIN), ("tool_use", WITH_TOOLS))]
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": templates}))
    else:
        (folder / "chat_template.jinja").write_text(PLAIN)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS)
    codec = load_codec(str(folder))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "a"}]
    for tools in ([], TOOLS):
        parsers = load_parsers(None, None, WITH_TOOLS)
        read = read_chat(Fields({"messages": messages, "tools": tools}), codec, Capabilities(), parsers)
        wanted = tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, tokenize=False
        )
        assert read.chat is not None and read.chat.text() == wanted
        assert prompt_tokens(tokenizer, messages, tools) == read.chat.token_ids(None).tolist()


def test_parsers_are_detected_from_template() -> None:
    parsers = load_parsers(None, None, TEMPLATE)
    assert parsers.tools is not None and parsers.tools.name == "hermes" and parsers.reasoning is None


def test_whole_answer_parser_covers_tools_and_reasoning() -> None:
    for parsers in (load_parsers("gpt-oss", None, None), load_parsers(None, "gpt-oss", TEMPLATE)):
        assert parsers.tools is not None and parsers.tools.name == "gpt_oss" and parsers.reasoning is None
    for tools, reasoning in (("gpt-oss", "qwen3"), ("hermes", "gpt_oss")):
        with pytest.raises(UsageFault, match="reads tool calls and reasoning"):
            load_parsers(tools, reasoning, None)


def test_whole_answer_format_is_parsed_without_tools() -> None:
    use = read_tool_use(Fields({}), Template(TEMPLATE, {}), load_parsers("gpt_oss", None, None), Capabilities())
    reader = ResponseParsing(None, use).new_reader("")
    assert reader.push("<|channel|>final<|message|>Hi") == (Content("Hi"),)


@pytest.mark.parametrize("template", [None, "{{ messages }}", TEMPLATE])
def test_parsers_none_disable_parsing(template: str | None) -> None:
    assert load_parsers("none", "none", template) == Parsers()


def test_unknown_parser_is_refused_at_the_start(talking_tokenizer: Path) -> None:
    argv = ["--model", "m", "--engine", "embedded", "--engine-url", "http://127.0.0.1:9", "--port", "0"]
    module = ["-m", "areal.services.inference.data_proxy"]
    result = subprocess.run(
        [sys.executable, *module, *argv, "--tokenizer-path", str(talking_tokenizer), "--tool-call-parser", "hermse"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert '"hermse" is not a tool-call parser (did you mean "hermes"?)' in result.stderr
    with pytest.raises(UsageFault):
        load_parsers(None, "qwen4", None)


def test_markers_stay_visible_as_special_tokens(codec: TextCodec) -> None:
    ids = codec.encode("a [TOOL_CALLS]", add_special_tokens=False)[:-1]
    mark, end = codec.special_id("[TOOL_CALLS]"), codec.special_id("</s>")
    assert mark is not None and end is not None
    tokens = [*ids, mark, *ids, end]
    stream = codec.stream(shown={"[TOOL_CALLS]"})
    shown = stream.push(tokens) + stream.flush()
    assert shown.count("[TOOL_CALLS]") == 1 and "</s>" not in shown
    one_by_one = codec.stream(shown={"[TOOL_CALLS]"})
    assert "".join(one_by_one.push([token]) for token in tokens) + one_by_one.flush() == shown
    hidden = codec.stream()
    assert "[TOOL_CALLS]" not in hidden.push(tokens) + hidden.flush()


def test_markers_of_byte_level_tokenizers_stay_visible(talking_tokenizer: Path) -> None:
    tokenizer = Tokenizer.from_file(str(talking_tokenizer / "tokenizer.json"))
    tokenizer.add_special_tokens(["<tool_call>", "</tool_call>"])
    codec = TextCodec(tokenizer, template=None, end_ids=[], max_positions=None)
    form = load_parsers("hermes", None, None).tools
    reading = ResponseParsing(None, ToolUse(TOOLS, form))
    ids = codec.encode('<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>', add_special_tokens=False)
    choice = Choice(0, codec.stream(shown=reading.markers), (), reading.new_reader(""))
    logprobs, versions = (0.0,) * len(ids), (0,) * len(ids)
    update = choice.push(EngineDelta(0, tuple(ids), logprobs, versions, None, FinishReason.STOP, ids[-1]))
    assert [type(piece) for piece in update.pieces[:2]] == [CallStart, CallArguments]
    assert choice.reply.content == "" and choice.reply.calls[0].arguments == "{}"


def test_single_call_ends_choice_at_completing_token(talking_tokenizer: Path) -> None:
    codec = TextCodec(
        Tokenizer.from_file(str(talking_tokenizer / "tokenizer.json")), template=None, end_ids=[], max_positions=None
    )
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    ids = tuple(codec.encode(call + call, add_special_tokens=False))
    reading = ResponseParsing(None, ToolUse(TOOLS, load_parsers("hermes", None, None).tools, one_call=True))
    choice = Choice(0, codec.stream(), (), reading.new_reader(""))
    update = choice.push(EngineDelta(0, ids, (0.0,) * len(ids), (0,) * len(ids)))
    assert update.finish_reason is FinishReason.STOP and len(choice.reply.calls) == 1
    assert codec.decode(choice.token_ids).startswith(call) and len(choice.token_ids) < len(ids)


def test_grammar_engine_holds_forced_arguments_to_schema() -> None:
    fields = Fields({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}})
    parsers = load_parsers("hermes", None, None)
    use = read_tool_use(fields, Template(TEMPLATE, {}), parsers, Capabilities(response_format=True))
    assert use.response_format == {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "object"}}}
    assert use.primer.endswith('"arguments":')


def test_forced_arguments_in_other_markup_are_unconstrained() -> None:
    fields = Fields({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}})
    parsers = load_parsers("qwen3_coder", None, None)
    use = read_tool_use(fields, Template(TEMPLATE, {}), parsers, Capabilities(response_format=True))
    assert use.response_format is None and use.primer == "<tool_call>\n<function=f>\n"


@pytest.mark.parametrize(
    ("parser", "body"),
    [
        ("mistral", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ("none", {"tools": TOOLS, "tool_choice": "required"}),
        ("none", {"tools": TOOLS, "parallel_tool_calls": False}),
    ],
)
def test_rejects_tool_choice_unsupported_by_format(parser: str, body: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match="is not supported"):
        read_tool_use(Fields(body), Template(TEMPLATE, {}), load_parsers(parser, None, None), Capabilities())


@pytest.mark.parametrize("more", [{"tool_choice": "required"}, {"parallel_tool_calls": False}])
def test_tools_without_parser_are_refused_naming_setting(more: dict[str, Any]) -> None:
    body = {"tools": TOOLS, **more}
    with pytest.raises(ApiError, match=r"set spec\.toolCallParser"):
        read_tool_use(Fields(body), Template(TEMPLATE, {}), load_parsers("none", None, None), Capabilities())


def test_tools_unsupported_by_template_are_refused() -> None:
    with pytest.raises(ApiError, match="does not support tools"):
        template = Template("{{ messages }}", {})
        read_tool_use(Fields({"tools": TOOLS}), template, load_parsers("hermes", None, None), Capabilities())


def test_tools_without_parser_reach_template_unparsed() -> None:
    use = read_tool_use(Fields({"tools": TOOLS}), Template(TEMPLATE, {}), Parsers(), Capabilities())
    assert use.shown == TOOLS and use.form is None
    assert ResponseParsing(None, use).new_reader("").push("<tool_call>") == (Content("<tool_call>"),)


def test_final_versions_replace_delta_versions(talking_tokenizer: Path) -> None:
    codec = TextCodec(
        Tokenizer.from_file(str(talking_tokenizer / "tokenizer.json")), template=None, end_ids=[], max_positions=None
    )
    for stops in ((), ("never",)):
        choice = Choice(0, codec.stream(), stops)
        choice.push(EngineDelta(0, (70,), (-0.5,), (7,)))
        last = EngineDelta(0, (71,), (-0.5,), (7,), None, FinishReason.LENGTH, all_versions=(6, 7))
        choice.push(last)
        assert choice.versions == [6, 7]
