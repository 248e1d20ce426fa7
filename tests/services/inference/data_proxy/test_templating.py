from __future__ import annotations

import pytest

from areal.services.inference.data_proxy.messages import read_messages, read_tools
from areal.services.inference.data_proxy.templating import ChatTemplate
from areal.services.web.errors import ApiError
from tests.services.tokenizer_folder import CHATML

TEMPLATE = ChatTemplate(CHATML, {"eos_token": "<|im_end|>"})
USER = {"role": "user", "content": "hi"}


def test_template_renders_as_the_model_was_trained() -> None:
    assert TEMPLATE.render([USER], None, {}) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert TEMPLATE.render([USER], None, {"add_generation_prompt": False}).endswith("<|im_end|>\n")


def test_template_variables_reach_it() -> None:
    assert TEMPLATE.render([USER], None, {"enable_thinking": False}).endswith("<think></think>")


def test_template_writes_tools_as_plain_json() -> None:
    tools = [{"type": "function", "function": {"name": "f<x>", "description": "a & b é"}}]
    assert '"f<x>", "description": "a & b é"' in TEMPLATE.render([USER], tools, {})


def test_template_that_refuses_is_the_callers_mistake() -> None:
    with pytest.raises(ApiError, match="a tool cannot come first") as caught:
        TEMPLATE.render([{"role": "tool", "content": "x"}], None, {})
    assert caught.value.status == 400


def test_template_knows_which_variables_it_uses() -> None:
    assert TEMPLATE.uses("tools") and not TEMPLATE.uses("reasoning_effort")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_template_cannot_reach_into_python(source: str) -> None:
    with pytest.raises(ApiError) as caught:
        ChatTemplate(source, {}).render([USER], None, {})
    assert caught.value.status == 400


def test_template_cannot_change_the_messages() -> None:
    with pytest.raises(ApiError):
        ChatTemplate("{{ messages.append(1) }}", {}).render([USER], None, {})


def test_template_dialect_of_models_is_spoken() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y')|length }}"
    )
    assert ChatTemplate(source, {}).render([USER, USER], None, {}) == "hi4"


def test_messages_with_text_parts_become_text() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert read_messages([message], TEMPLATE) == [{"role": "user", "content": "a\nb"}]


def test_messages_of_developers_become_system_where_the_template_knows_no_other() -> None:
    assert read_messages([{"role": "developer", "content": "x"}], TEMPLATE)[0]["role"] == "system"
    knowing = ChatTemplate("{{ 'developer' }}", {})
    assert read_messages([{"role": "developer", "content": "x"}], knowing)[0]["role"] == "developer"


def test_messages_tool_calls_reach_the_template_with_decoded_arguments() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = read_messages([{"role": "assistant", "content": None, "tool_calls": [call]}], TEMPLATE)[0]
    assert message["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert message["content"] == ""


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "king", "content": "x"}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "content": "x", "tool_calls": 7}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_messages_that_are_none_are_refused_by_name(messages: object, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_messages(messages, TEMPLATE)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(("tools", "param"), [(7, "tools"), ([7], "tools[0].function"), ([{}], "tools[0].function")])
def test_tools_that_are_none_are_refused_by_name(tools: object, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_tools(tools)
    assert (caught.value.status, caught.value.param) == (400, param)
