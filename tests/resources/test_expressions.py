"""The expression language: values with their types, faults with their columns, and no way to hang or grow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.resources.expressions import MAX_DEPTH, EnvironmentVariables, ExpressionError, Scope, parse_template
from areal.resources.operations import FUNCTIONS, MAX_NODES, MAX_TEXT

_VALUES = {
    "n": 3,
    "ratio": 0.5,
    "name": "qwen",
    "empty": "",
    "nothing": None,
    "yes": True,
    "list": [1, 2, 3],
    "models": [{"name": "a", "size": 7}, {"name": "b", "size": 32}],
    "max-len": 4096,
    "big": "x" * 60_000,
}
_ENV = {"HOME": "/root", "OPENAI_API_KEY": "sk-1", "TOKENIZER_PATH": "/t"}


def _scope(**names: Any) -> Scope:
    return Scope(_VALUES, EnvironmentVariables(_ENV), "prod", **names)


def _evaluate(text: str, **names: Any) -> Any:
    return parse_template(text).evaluate(_scope(**names))


def _value(expression: str) -> Any:
    return _evaluate(f"${{{{ {expression} }}}}")


def _fault(text: str) -> ExpressionError:
    with pytest.raises(ExpressionError) as caught:
        _evaluate(text)
    return caught.value


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1", 1),
        ("1.5e1", 15.0),
        ("'a'", "a"),
        ('"it\'s"', "it's"),
        (r"'a\nb\'c'", "a\nb'c"),
        ("true", True),
        ("null", None),
        ("1 == 1.0 and 1 != true and [0] != [false]", True),
        ("true in [1] or 1 not in [1.0]", False),
        ("values.n", 3),
        ("values['max-len']", 4096),
        ("values.list[0]", 1),
        ("values.list[-1]", 3),
        ("values.models[1].size", 32),
        ("values.list", [1, 2, 3]),
        ("env.HOME", "/root"),
        ("env['TOKENIZER_PATH']", "/t"),
        ("profile", "prod"),
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("-values.n", -3),
        ("8 / 2", 4),
        ("7 / 2", 3.5),
        ("7 // 2", 3),
        ("7 % 4", 3),
        ("2 - 3 - 4", -5),
        ("values.ratio * 2", 1.0),
        ("'a' + 'b'", "ab"),
        ("values.list + [4]", [1, 2, 3, 4]),
        ("[]", []),
        ("[1, 'a', [true]]", [1, "a", [True]]),
        ("values.n == 3", True),
        ("values.n != 3", False),
        ("1 < 2", True),
        ("'b' >= 'a'", True),
        ("1 == '1'", False),
        ("2 in values.list", True),
        ("4 not in values.list", True),
        ("'we' in values.name", True),
        ("'name' in values.models[0]", True),
        ("true and false or true", True),
        ("!values.yes", False),
        ("not values.empty", True),
        ("values.yes && values.n", 3),
        ("values.empty || 'fallback'", "fallback"),
        ("1 if values.n > 5 else 2", 2),
        ("1 if false else 2 if false else 3", 3),
        ("1 if true else 2 | string", "1"),
        ("join([values.n | string, 'a'])", "3,a"),
        ("values.models[0 | abs].name", "a"),
        ("join(['x', join(['y', values.name | upper])])", "x,y,QWEN"),
        ("default(values.if.lambda, 1)", 1),
        ("profile == 'prod'", True),
        ("default(values.absent, 1)", 1),
        ("default(values.absent.deep.er, 1)", 1),
        ("default(values.nothing, 1)", 1),
        ("default(values.n, 1)", 3),
        ("default(env.ABSENT, 'x')", "x"),
        ("default(values.list[9], 'x')", "x"),
        ("values.absent | default(2) | string", "2"),
        ("values.name | upper", "QWEN"),
        ("lower('ABC')", "abc"),
        ("join(values.list, '-')", "1-2-3"),
        ("join(['a', 1, true])", "a,1,true"),
        ("split('a,b')", ["a", "b"]),
        ("trim('  a ')", "a"),
        ("replace('a.b', '.', '-')", "a-b"),
        ("basename('Qwen/Qwen3-8B')", "Qwen3-8B"),
        ("len(values.list)", 3),
        ("len(values.name)", 4),
        ("int('12')", 12),
        ("int(3.9)", 3),
        ("float('1e-3')", 0.001),
        ("string(1.5)", "1.5"),
        ("string(true)", "true"),
        ("min(3, 1, 2)", 1),
        ("max(values.list)", 3),
        ("abs(-2)", 2),
        ("round(2.567, 1)", 2.6),
        ("round(2.5)", 2),
        ("floor(2.9)", 2),
        ("ceil(2.1)", 3),
        ("range(3)", [0, 1, 2]),
        ("range(2, 4)", [2, 3]),
        ("keys(values.models[0])", ["name", "size"]),
        ("startswith('abc', 'a')", True),
        ("endswith('abc', 'a')", False),
        ("json(values.models[0])", '{"name": "a", "size": 7}'),
        ("'}}'", "}}"),
    ],
)
def test_expression_alone_keeps_its_type(expression: str, value: Any) -> None:
    found = _value(expression)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("m-${{ values.n }}", "m-3"),
        ("${{ values.name }}-${{ values.ratio }}", "qwen-0.5"),
        ("${{ true }}!", "true!"),
        ("$${{ values.n }}", "${{ values.n }}"),
        ("a $${{ b }} ${{ 1 }}", "a ${{ b }} 1"),
        ("${actor.lr}", "${actor.lr}"),
        ("plain", "plain"),
        ("${{values.n}}", 3),
        ("${{\n  values.n\n}}", 3),
    ],
)
def test_text_around_expressions_makes_text(text: str, value: Any) -> None:
    assert _evaluate(text) == value


def test_item_and_index_exist_in_a_template() -> None:
    assert _evaluate("${{ item.name }}-${{ index }}", item={"name": "a"}, index=2) == "a-2"


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("${{ values.nam }}", 12, 'values.nam is not set (did you mean "name"?)'),
        ("x ${{ vals.n }}", 7, 'unknown name "vals" (did you mean "values"?): values, env, item or profile'),
        ("${{ item }}", 5, '"item" exists only inside the template of a "generate"'),
        ("${{ lowr('A') }}", 5, 'unknown function "lowr" (did you mean "lower"?)'),
        ("${{ lower() }}", 5, "usage: lower(text)"),
        ("${{ default(1) }}", 5, "usage: default(value, fallback)"),
        ("${{ lower(1) }}", 5, "lower: needs text, got an integer"),
        ("${{ values.n.x }}", 14, "values.n is an integer, which has no items"),
        ("${{ values.list['a'] }}", 16, "a list is looked up by an integer, not by text"),
        ("${{ values.list[9] }}", 16, "values.list[9] is not set: the list has 3 items"),
        ("${{ values[1] }}", 11, "a map is looked up by text, not by an integer"),
        ("${{ 'a' + 1 }}", 9, '"+": cannot add text and an integer; use string()'),
        ("${{ true + 1 }}", 10, '"+": needs a number, got a boolean'),
        ("${{ 'a' * 1000000000 }}", 9, '"*": needs a number, got text'),
        ("${{ 1 / 0 }}", 7, '"/": division by zero'),
        ("${{ 1 < 'a' }}", 7, '"<": needs a number, got text'),
        ("${{ 9000000000000000000 }}", 5, "the number has more than 18 digits"),
        ("${{ 999999999999999999 * 1000 }}", 24, '"*": the result does not fit in 64 bits'),
        ("${{ 1e308 * 10 }}", 11, '"*": the result is not a finite number'),
        ("${{ env }}", 5, "name a variable: env.NAME"),
        ("${{ env.ABSENT }}", 9, "the environment variable ABSENT is not set"),
        (
            "${{ env.OPENAI_API_KEY }}",
            9,
            "env.OPENAI_API_KEY looks like a secret",
        ),
        ("${{ values.n", 1, '"${{" without "}}"'),
        ("${{ }}", 5, "expected a value, found the end"),
        ("${{ 1 + }}", 9, "expected a value, found the end"),
        ("${{ (1 }}", 8, 'expected ")", found the end'),
        ("${{ 1 2 }}", 7, 'expected "}}", found "2"'),
        ("${{ 'a }}", 5, "an unfinished string is not part of an expression"),
        ("${{ a.__class__ }}", 5, 'unknown name "a"'),
        ("${{ values.__class__ }}", 12, "values.__class__ is not set"),
        ("${{ values.n; 1 }}", 13, '";" is not part of an expression'),
        ("x${{ values.list }}", 13, "a list has no text; use join() or json()"),
        ("x${{ null }}", 6, "null has no text; use default()"),
        ("${{ values.empty | split('') }}", 20, "split: the separator is empty"),
        ("${{ int('x') }}", 5, 'int: "x" is not an integer'),
        ("${{ min([]) }}", 5, "min: the list is empty"),
        ("${{ values.n | string + 'x' }}", 16, 'expected a function after "|"'),
        ("${{ values.n | 3 }}", 16, 'expected a function, found "3"'),
        ("${{ values.n. }}", 15, "expected a name, found the end"),
        ("${{ (1] }}", 7, 'expected ")", found "]"'),
        ("${{ 1, 2 }}", 6, 'expected "}}", found ","'),
        ("${{ (1, 2) }}", 5, "a list is written [a, b]"),
        ("${{ 1 < 2 < 3 }}", 5, "comparisons cannot be chained: join them by and"),
        ("${{ 'a' 'b' }}", 9, 'expected "}}", found "\'b\'"'),
        ("${{ values.n(1) }}", 5, 'unexpected "values"'),
        ("${{ min(*values.list) }}", 9, 'expected a value, found "*"'),
        ("${{ values[1:2] }}", 13, '":" is not part of an expression'),
        ("${{ 1 if 2 }}", 5, '"if" needs an "else"'),
        ("${{ 1 + (1 not 2) }}", 10, 'cannot be read from "1" on'),
        ("${{ lambda }}", 5, 'unknown name "lambda"'),
    ],
)
def test_expression_fault_names_column(text: str, column: int, message: str) -> None:
    fault = _fault(text)
    assert message in fault.message
    assert fault.column == column


@pytest.mark.parametrize(
    "expression",
    [
        "range(1000000000)",
        "values.big + values.big",
        "replace(values.big, 'x', values.big)",
        "join([values.big, values.big])",
        "json([values.big, values.big])",
        "split(values.big, 'x') | len",
        "range(20000) + range(20000)",
        "[range(15000), range(15000)]",
        "int('" + "9" * 40 + "')",
        "round(1, 400)",
        "(" * 100 + "1" + ")" * 100,
        "-" * 100 + "1",
        "!" * 100 + "true",
        " + ".join(["1"] * 100),
        "values" + "[0]" * 100,
        "1 | string" + " | upper" * 100,
        "1 if true else " * 100 + "1",
        "'" + "a" * 3000 + "'",
    ],
)
def test_bomb_is_refused_before_expansion(expression: str) -> None:
    assert isinstance(_fault(f"${{{{ {expression} }}}}"), ExpressionError)


def test_text_made_of_many_expressions_is_bounded() -> None:
    assert "longer than" in _fault("${{ values.big }}${{ values.big }}").message


def test_environment_records_variables_read() -> None:
    env = EnvironmentVariables(_ENV)
    scope = Scope({}, env)
    parse_template("${{ default(env.ABSENT, env.HOME) }}").evaluate(scope)
    assert env.read == {"HOME": "/root"}


_WORDS = [
    *("values", "env", "item", "index", "profile", "default", *FUNCTIONS, "if", "else", "and", "or", "not", "in"),
    *("true", "null", "n", "name", "list", "models", "big", "HOME", "1", "0", "2.5", "1e300", "999999999999999999"),
    *("'a'", "''", '"x"', "(", ")", "[", "]", ",", ".", "|", "+", "-", "*", "/", "//", "%", "==", "!=", "<", ">=", "!"),
]


def _trees() -> st.SearchStrategy[str]:
    """Expressions that parse, deep and mixed in their types."""
    leaf = st.sampled_from(
        [
            "values.n",
            "values.big",
            "values.list",
            "values.models",
            "values",
            "env.HOME",
            "item",
            "'a'",
            "2",
            "1e300",
            "null",
        ]
    )

    def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        operators = st.sampled_from(["+", "-", "*", "/", "//", "%", "==", "<", "in", "and", "or"])
        binary = st.tuples(inner, operators, inner).map(lambda parts: f"({' '.join(parts)})")
        call = st.tuples(st.sampled_from([*FUNCTIONS, "default"]), st.lists(inner, min_size=1, max_size=3)).map(
            lambda parts: f"{parts[0]}({', '.join(parts[1])})"
        )
        index = st.tuples(inner, inner).map(lambda parts: f"{parts[0]}[{parts[1]}]")
        return binary | call | index | st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]")

    return st.recursive(leaf, grow, max_leaves=12)


def _size(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(_size, value))
    return 1 + sum(map(_size, value.values())) if isinstance(value, dict) else 1


@settings(max_examples=300)
@given(_trees() | st.lists(st.sampled_from(_WORDS), max_size=14).map(" ".join) | st.text(max_size=60))
def test_any_expression_gives_bounded_json_or_column(expression: str) -> None:
    text = f"${{{{ {expression} }}}}"
    try:
        value = _evaluate(text, item={"name": "a", "deep": [1, [2]]}, index=0)
    except ExpressionError as error:
        assert 1 <= error.column <= len(text) + 1
        assert error.message
    else:
        assert _size(value) <= MAX_NODES
        assert not isinstance(value, str) or len(value) <= 2 * MAX_TEXT
        assert value is None or isinstance(value, (str, int, float, bool, list, dict))


@given(st.text(max_size=80))
def test_any_scalar_text_is_a_template_or_a_fault(text: str) -> None:
    try:
        parse_template(text)
    except ExpressionError as error:
        assert "${{" in text and 1 <= error.column <= len(text) + 1


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"max", "min"}))  # those take as many as there are
def test_wrong_argument_count_shows_usage(name: str) -> None:
    usages = [part.partition("(")[2] for part in FUNCTIONS[name].usage.split("), ")]
    most = max(usage.count(", ") + 1 for usage in usages)
    least = min(usage.count(", ") + 1 - usage.count(" = ") for usage in usages)
    for count in (least - 1, most + 1):
        with pytest.raises(ExpressionError, match=f"usage: {name}\\("):
            _value(f"{name}({', '.join(['1'] * count)})")


@pytest.mark.parametrize(
    ("expression", "path"),
    [
        ("values.models[0].name", ("models", 0, "name")),
        ('values["max-len"]', ("max-len",)),
        ("values.models[n].name", ("models",)),
        ("values", ()),
    ],
)
def test_expression_reads_are_full_literal_paths(expression: str, path: tuple[str | int, ...]) -> None:
    assert parse_template(f"${{{{ {expression} }}}}").reads == {("values", *path)}


def test_parentheses_are_accepted_up_to_the_bound() -> None:
    deepest = MAX_DEPTH - 1

    assert _value("(" * deepest + "1" + ")" * deepest) == 1
    with pytest.raises(ExpressionError, match=f"more than {MAX_DEPTH} deep"):
        _value("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH)
