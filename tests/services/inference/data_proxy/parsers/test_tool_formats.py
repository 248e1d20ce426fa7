"""Calls as models really write them, well and badly."""

from __future__ import annotations

import pytest

from areal.services.dialects import CallArguments, CallEnd, CallStart, Content, Reply
from areal.services.inference.data_proxy.parsers.reader import ResponseReader, Tools
from areal.services.inference.data_proxy.parsers.registry import tool_format
from tests.services.inference.data_proxy.parsers.reading import WRITERS, calls_of, new_reader, read

ROME = '{"city": "Rome"}'
M3 = "]<]minimax[>["
HERMES_ROME = f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>'


def content_and_calls(reply: Reply) -> tuple[str, list[tuple[str, str]]]:
    return reply.content, [(call.name, call.arguments) for call in reply.calls]


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f"I look.\n{HERMES_ROME}", "I look.", [("get_weather", ROME)]),
        ("hermes", f"{HERMES_ROME}\nDone.", "\nDone.", [("get_weather", ROME)]),
        ("hermes", f"{HERMES_ROME}\n{HERMES_ROME}\n", "", [("get_weather", ROME)] * 2),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        (
            "hermes",
            '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>',
            "",
            [("f", '{"a": 1}')],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>', "",
         [("f", '{"a": "</tool_call>"}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}</tool_call>', "",
         [("f", "{}"), ("g", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut off he', "", [("f", '{"a": "cut off he')]),
        ("hermes", "<tool_call>no json</tool_call> after", "<tool_call>no json</tool_call> after", []),
        ("hermes", '<tool_call>{"name": "f', '<tool_call>{"name": "f', []),
        ("hermes", "if a <tool", "if a <tool", []),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
         '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": "\\ud800"}</tool_call>', "", [("f", '"\\ud800"')]),
        ("hermes", '<tool_call>{"arguments": ' + "[" * 9999 + "]" * 9999 + ', "name": "f"}</tool_call>', "",
         [("f", "[" * 9999 + "]" * 9999)]),
        ("pythonic", "[get_weather(city='\\ud800')]", "", [("get_weather", '{"city": "\'\\\\ud800\'"}')]),
        ("pythonic", "[get_weather(where=" + "[" * 50_000 + "]" * 50_000 + ")]", "",
         [("get_weather", '{"where": "' + "[" * 50_000 + "]" * 50_000 + '"}')]),
        ("jamba", '<tool_calls>[\n{"name": "f", "arguments": {}}\n]</tool_calls>', "", [("f", "{}")]),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]', "", [("f", "{}")]),
        ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ROME}, "id": "abcdefghi"}}]', "",
         [("get_weather", ROME)]),
        ("mistral", f"Sure.[TOOL_CALLS]get_weather[CALL_ID]abc123def[ARGS]{ROME}", "Sure.", [("get_weather", ROME)]),
        ("mistral", f"[TOOL_CALLS]get_weather{ROME}", "", [("get_weather", ROME)]),
        ("mistral", "[TOOL_CALLS] what?", "[TOOL_CALLS] what?", []),
        ("llama3_json", f'{{"name": "get_weather", "parameters": {ROME}}}', "", [("get_weather", ROME)]),
        ("llama3_json", f'<|python_tag|>{{"name": "other", "parameters": {ROME}}}', "", [("other", ROME)]),
        ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
        ("llama3_json", ' [1] as they say', " [1] as they say", []),
        ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', "", [("now", "{}")]),
        ("pythonic", "[now()]", "", [("now", "{}")]),
        ("pythonic", "[get_weather(city='Rome', days=-2), now()]", "",
         [("get_weather", '{"city": "Rome", "days": -2}'), ("now", "{}")]),
        ("pythonic", "[get_weather(exact=true, where=None)]", "", [("get_weather", '{"exact": true, "where": null}')]),
        ("pythonic", "[get_weather(city=Rome)]", "", [("get_weather", '{"city": "Rome"}')]),
        ("pythonic", "[get_weather(where={'a': [1, (2, 3)]})]", "", [("get_weather", '{"where": {"a": [1, [2, 3]]}}')]),
        ("pythonic", "[1] says it", "[1] says it", []),
        ("pythonic", "[other()]", "[other()]", []),
        ("pythonic", "[get_weather('Rome')]", "'Rome')]", [("get_weather", "{}")]),
        ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [("now", "{}")]),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nNew\nYork\n</parameter>\n<parameter=days>\n3\n"
            "</parameter>\n</function>\n</tool_call>",
            "",
            [("get_weather", '{"city": "New\\nYork", "days": 3}')],
        ),
        ("qwen3_coder", "<function=now>\n</function>\n</tool_call>", "", [("now", "{}")]),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\n123\n</parameter>\n</function>", "",
         [("get_weather", '{"city": "123"}')]),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=units>\n123\n</parameter>\n</function>", "",
         [("get_weather", '{"units": "123"}')]),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=exact>\nTrue\n</parameter>\n</function>", "",
         [("get_weather", '{"exact": true}')]),
        ("qwen3_coder", "<tool_call>\n<function=get_weather>\n<parameter=city>\nRo", "",
         [("get_weather", '{"city": "Ro')]),
        ("qwen3_coder", "<tool_call> is how they call", "<tool_call> is how they call", []),
        ("qwen3_coder", "<tool_call>\n<function=f\n(x)>", "<tool_call>\n<function=f\n(x)>", []),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="now">\n</invoke>\n<invoke name="get_weather">\n'
            '<parameter name="city">Rome</parameter>\n</invoke></minimax:tool_call>',
            "",
            [("now", "{}"), ("get_weather", ROME)],
        ),
        ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>", "",
         [("get_weather", ROME)]),
        ("glm45", "<tool_call>now</tool_call>", "", [("now", "{}")]),
        ("glm45", "<tool_call>not a name</tool_call>!", "<tool_call>not a name</tool_call>!", []),
        (
            "deepseek_v3",
            "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
            f"{ROME}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "Let me see.",
            [("get_weather", ROME)],
        ),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\nno json<｜tool▁call▁end｜>",
         "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\nno json<｜tool▁call▁end｜>", []),
        ("deepseek_v32", '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">\n1\n</｜DSML｜parameter>'
         "</｜DSML｜invoke>", "", [("f", '{"a": "\\n1\\n"}')]),
        ("minimax_m2", '<invoke name="f"><parameter name="a">\n1\n</parameter></invoke>', "", [("f", '{"a": 1}')]),
        ("minimax_m2", '<invoke name="get_weather"><parameter name="city">\na\n\n</parameter></invoke>', "",
         [("get_weather", '{"city": "\\na\\n\\n"}')]),
        ("seed_oss", "<function=get_weather><parameter=city>a\n</parameter></function>", "",
         [("get_weather", '{"city": "a\\n"}')]),
        ("llama3_json", '[{"name": "get_weather", "arguments": {}}, {"name": "now", "arguments": {}}]', "",
         [("get_weather", "{}"), ("now", "{}")]),
        ("jamba", '<tool_calls>\n{"name": "now", "arguments": {}}\n{"name": "f", "arguments": {}}\n</tool_calls>', "",
         [("now", "{}"), ("f", "{}")]),
        ("olmo3", "So:\n<function_calls>\nget_weather(city='Rome', exact=true)\nnow()\n</function_calls>", "So:",
         [("get_weather", '{"city": "Rome", "exact": true}'), ("now", "{}")]),
        ("olmo3", "<function_calls>\nother()\n</function_calls>", "<function_calls>\nother()\n</function_calls>", []),
        ("functiongemma", "<start_function_call>call:f{a:<escape>x,{<escape>,b:{c:[1,true]}}<end_function_call>", "",
         [("f", '{"a": "x,{", "b": {"c": [1, true]}}')]),
        ("deepseek_v31", f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ROME}<｜tool▁call▁end｜>", "",
         [("get_weather", ROME)]),
        ("apertus", 'So. <|tools_prefix|>[{"now": {}}, {"f": {"a": 1}}]<|tools_suffix|>', "So.",
         [("now", "{}"), ("f", '{"a": 1}')]),
        ("apertus", '<|tools_prefix|>[{"f": {"a": "x', "", [("f", '{"a": "x')]),
        ("apertus", "<|tools_prefix|>[{now: 1}]<|tools_suffix|>", "<|tools_prefix|>[{now: 1}]<|tools_suffix|>", []),
        ("gigachat3", f'So.<|function_call|>{{"name": "get_weather", "arguments": {ROME}}}', "So.",
         [("get_weather", ROME)]),
        ("gigachat3", "<|function_call|>now", "<|function_call|>now", []),
        ("hy_v3", "<tool_calls>\n<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>", "", [("now", "{}")]),
        (
            "hy_v3",
            "So.<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
            "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource><arg_value></arg_value:opensource>\n"
            "</tool_call:opensource>\n</tool_calls:opensource>",
            "So.",
            [("get_weather", '{"city": "<arg_value>"}')],
        ),
        ("hy_v3", "<tool_call:opensource>no name<tool_sep:opensource></tool_call:opensource>!",
         "<tool_call:opensource>no name<tool_sep:opensource></tool_call:opensource>!", []),
        ("minicpm5", '<function name="f"><param name="a"><![CDATA[</param>\n]]></param><param name="b">True</param>'
         "</function>", "", [("f", '{"a": "</param>\\n", "b": true}')]),
        ("hy_v3", "A <tool_calls> tag and </tool_calls>.", "A <tool_calls> tag and </tool_calls>.", []),
        ("hy_v3", "<tool_calls>\n<tool_call>a b</tool_call>", "<tool_calls>\n<tool_call>a b</tool_call>", []),
        ("minicpm5", "<function name=''>", "<function name=''>", []),
        ("qwen3_coder", "<function=get_weather>\n<parameter=where>\n{'a': [True]}\n</parameter>\n</function>", "",
         [("get_weather", '{"where": {"a": [true]}}')]),
        (
            "minimax_m3",
            f'So.{M3}<tool_call>\n{M3}<invoke name="get_weather">{M3}<city><b>{M3}</city>{M3}<where>{M3}<a>{M3}<item>1'
            f"{M3}</item>{M3}<item>{M3}<where>x{M3}</where>{M3}</item>{M3}</a>{M3}</where>{M3}</invoke>\n{M3}</tool_call>",
            "So.",
            [("get_weather", '{"city": "<b>", "where": {"a": [1, {"where": "x"}]}}')],
        ),
        ("minimax_m3", f'{M3}<invoke name="get_weather">{M3}<where>{M3}</where>{M3}</invoke>{M3}<invoke name="now">'
         f"{M3}</invoke>{M3}</tool_call>!", "!", [("get_weather", '{"where": {}}'), ("now", "{}")]),
        ("minimax_m3", f'{M3}<invoke name="get_weather">{M3}<where>{M3}<a>1', "", [("get_weather", '{"where": ')]),
        ("minimax_m3", f"{M3}<tool_call>now{M3}</tool_call>", f"{M3}<tool_call>now{M3}</tool_call>", []),
        ("hermes", '<tool_call>{"function": "f", "arguments": {"a": 1}}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\":\n1}"}</tool_call>', "", [("f", '{"a":\n1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}</tool_call>', "",
         [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "]}\\"]}"}}</tool_call>', "",
         [("f", '{"a": "]}\\"]}"}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1, {"a": [2]}]}</tool_call>', "",
         [("f", '[1, {"a": [2]}]')]),
        ("hermes", '<tool_call>{"name": "f", "index": 0, "arguments": 5}</tool_call>', "", [("f", "5")]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"', '<tool_call>{"arguments": {"a": 1}, "name": "f"',
         []),
        *(("hermes", text, text, []) for text in (
            '<tool_call>{"name": "", "arguments": {}}</tool_call>',
            '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
            '<tool_call>{"name": "f", "index": }</tool_call>',
            '<tool_call>{"name" "f"}</tool_call>',
            '<tool_call>{name: "f"}</tool_call>',
            '<tool_call>{"arguments": {}}</tool_call>',
            "<tool_call>{}</tool_call>",
        )),
        ("llama3_json", '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {"a": 1}}', "",
         [("now", "{}"), ("now", '{"a": 1}')]),
        ("llama3_json", '{"id": "x", "name": "now", "parameters": {}}', "", [("now", "{}")]),
        ("llama3_json", '{"why": "x", "name": "now", "parameters": {}}',
         '{"why": "x", "name": "now", "parameters": {}}', []),
        ("mistral", '[TOOL_CALLS][{"id": 7, "name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}', "", [("f", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ("mistral", "[TOOL_CALLS]f[ARGS] {}[TOOL_CALLS]g[ARGS]{}", "", [("f", "{}"), ("g", "{}")]),
        ("phi4_mini_json", f'Hm: functools[{{"name": "f", "arguments": {ROME}}}] Done.', "Hm: Done.", [("f", ROME)]),
        ("phi4_mini_json", "functools[1] is no call", "functools[1] is no call", []),
        ("apertus", '<|tools_prefix|>[{"f": {"a": 1}},\n {"now": {}}]<|tools_suffix|>\n', "",
         [("f", '{"a": 1}'), ("now", "{}")]),
        ("apertus", '<|tools_prefix|>[{"": {}}]<|tools_suffix|>', '<|tools_prefix|>[{"": {}}]<|tools_suffix|>', []),
        ("apertus", '<|tools_prefix|>[{"f": 5}]<|tools_suffix|>', '<|tools_prefix|>[{"f": 5}]<|tools_suffix|>', []),
        ("kimi_k2", "<|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>", "", [("now", "{}")]),
        ("kimi_k2", "<|tool_call_begin|>functions.now:0<|tool_call_end|>",
         "<|tool_call_begin|>functions.now:0<|tool_call_end|>", []),
        ("hermes", " \n ", " \n ", []),
        ("hermes", f" \n {HERMES_ROME} \n ", "", [("get_weather", ROME)]),
        ("hermes", f"a \n {HERMES_ROME} b ", "a b", [("get_weather", ROME)]),
    ],
)  # fmt: skip
def test_text_parses_into_content_and_calls(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert content_and_calls(read(new_reader(name), [text])) == (content, calls)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["string", "null"]}, "02134", '"02134"'),
        ({"type": ["string", "null"]}, "12345", '"12345"'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "true", '"true"'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '"a"', '"\\"a\\""'),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[5]", "[5]"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/x"}]}, "5", "5"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", "5"),
        ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}, "5", '"5"'),
        ({"allOf": [{"$ref": "#/$defs/Unit"}], "default": "5"}, "5", '"5"'),
        ({"$ref": "#/$defs/Size"}, "5", "5"),
        ({"$ref": "#/$defs/Loop"}, "5", "5"),
        ({"$ref": "#/$defs/a~1b~0c"}, "5", '"5"'),
        ({"anyOf": [{"type": "string"}, {}]}, "5", "5"),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "5", '"5"'),
        ({"enum": ["1", "x"]}, "1", '"1"'),
        ({"type": "string", "enum": [1, 2]}, "1", '"1"'),
        ({"enum": [None, "x"]}, "1", '"1"'),
        ({"enum": [True, "x"]}, "true", "true"),
        ({"enum": [1, "x"]}, "1", "1"),
        ({"type": "string"}, "null", '"null"'),
        ({}, "5", "5"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
def test_value_has_a_type_of_the_schema(name: str, schema: object, text: str, value: str) -> None:
    answers = {
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "glm45": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    }
    named = {
        "Unit": {"type": "string"},
        "Size": {"enum": [1, "x"]},
        "Loop": {"$ref": "#/$defs/Loop"},
        "a/b~c": {"type": "string"},
    }
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}, "$defs": named}}
    tools = Tools([{"type": "function", "function": function}])
    reader = ResponseReader(parse=tool_format(name).parse, tools=tools, new_id=lambda: "id")
    assert content_and_calls(read(reader, answers[name])) == ("", [("f", f'{{"a": {value}}}')])


def test_nested_values_have_the_types_of_the_schema() -> None:
    ids = {"type": "array", "items": {"type": "string"}}
    place = {"type": "object", "properties": {"zip": {"type": "string"}, "ids": ids}}
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": place}}
    tools = Tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    values = f"{M3}<zip>12{M3}</zip>{M3}<ids>{M3}<item>1{M3}</item>{M3}</ids>"
    text = f'{M3}<invoke name="f">{M3}<a>{values}{M3}</a>{M3}</invoke>'
    reader = ResponseReader(parse=tool_format("minimax_m3").parse, tools=tools, new_id=lambda: "id")
    assert content_and_calls(read(reader, [text])) == ("", [("f", '{"a": {"zip": "12", "ids": ["1"]}}')])


def test_pieces_emit_name_then_arguments_in_order() -> None:
    reader = new_reader("hermes")
    assert reader.push('Hm <tool_call>{"name": "f"') == (Content("Hm"),)
    assert reader.push(', "arguments": {"a"') == (CallStart(0, "id0", "f"), CallArguments(0, '{"a"'))
    assert reader.push(": 1}") == (CallArguments(0, ": 1}"),)
    assert reader.push("}</tool_") == ()
    assert reader.push("call>") == (CallEnd(0),)
    assert reader.flush() == ()


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json", "glm45", "kimi_k2", "pythonic"])
def test_one_call_mode_ignores_later_calls(name: str) -> None:
    reader = new_reader(name, one_call=True)
    reply = read(reader, [WRITERS[name]([("get_weather", {"city": "Rome"}), ("now", {})])])
    assert calls_of(reply) == [("get_weather", {"city": "Rome"})] and reader.done


@pytest.mark.parametrize(("header", "name"), [("functions.now:3", "now"), ("now:0", "now"), ("now", "now")])
def test_kimi_keeps_ids_from_model(header: str, name: str) -> None:
    text = f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert [(call.id, call.name) for call in read(new_reader("kimi_k2"), [text]).calls] == [(header, name)]


def test_ids_of_other_formats_are_made_here() -> None:
    text = '<tool_call>{"id": "abc123def", "name": "now", "arguments": {}}</tool_call>'
    assert [call.id for call in read(new_reader("hermes"), [text, text]).calls] == ["id0", "id1"]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}", ["abc123def"]),
        ('[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "abc123def"}]', ["abc123def"]),
        ('[TOOL_CALLS][{"id": "abc123def", "name": "now", "arguments": {"a": 1}}]', ["abc123def"]),
        (
            '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abc123def"}, '
            '{"name": "now", "arguments": "{}", "id": "ABC123DEF"}]',
            ["abc123def", "ABC123DEF"],
        ),
        ('[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "call_1"}]', ["id0"]),
        ('[TOOL_CALLS][{"name": "now", "arguments": {}, "id": null}]', ["id0"]),
        ('[TOOL_CALLS][{"id": 7, "name": "now", "arguments": {}}]', ["id0"]),
        ('[TOOL_CALLS][{"name": "now", "arguments": {}}]', ["id0"]),
        ('[TOOL_CALLS][{"name": "now", "arguments": {"a', ["id0"]),
        ('[TOOL_CALLS][{"name": "now", "arguments": {"a": 1}, "id": "abc', ["id0"]),
    ],
)
def test_mistral_keeps_id_from_model(text: str, ids: list[str]) -> None:
    for parts in ([text], list(text)):
        assert [call.id for call in read(new_reader("mistral"), parts).calls] == ids


def test_truncated_mistral_call_keeps_partial_arguments() -> None:
    reply = read(new_reader("mistral"), ['[TOOL_CALLS][{"name": "now", "arguments": {"city": "Os'])
    assert [(call.name, call.arguments) for call in reply.calls] == [("now", '{"city": "Os')]


@pytest.mark.parametrize(
    ("name", "primer", "rest"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments":', " {}}\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=now>\n", "</function>\n</tool_call>"),
        ("pythonic", "[now(", ")]"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>", "{}<｜tool▁call▁end｜>"),
    ],
)
def test_text_begun_by_prompt_belongs_to_answer(name: str, primer: str, rest: str) -> None:
    assert content_and_calls(read(new_reader(name, primer=primer), [rest])) == ("", [("now", "{}")])


def test_truncated_call_stays_open() -> None:
    reader = new_reader("hermes")
    reader.push('<tool_call>{"name": "now", "arguments": {"a')
    assert reader.flush() == ()
    whole = new_reader("llama3_json")
    assert whole.push('{"name": "now", "parameters": {}}')[0] == CallStart(0, "id0", "now")
