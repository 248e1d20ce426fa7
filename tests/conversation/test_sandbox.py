"""A template's work and memory are bounded, whatever it does; and honest templates are not disturbed."""

from __future__ import annotations

import re
import tracemalloc

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.conversation import ConversationError, Template, normalise
from areal.conversation.budget import TakesLonger, TemplateBudget, TemplateLimit
from areal.conversation.sandbox import CompiledTemplate

_NS = "{% set ns = namespace(s='ab', n=3, x=[], y=[], t=(), u=(), d={}) %}"


def _loop(body: str) -> str:
    return f"{_NS}{{% for i in range(90) %}}{body}{{% endfor %}}"


def _set(name: str, expressions: str, then: str = "") -> list[str]:
    """Templates that set a variable 90 times by each of these expressions, which stand between semicolons."""
    return [_loop(f"{{% set ns.{name} = {each} %}}") + then for each in expressions.split("; ")]


def _shown(expressions: str, before: str = "") -> list[str]:
    return [before + f"{{{{ {each} }}}}" for each in re.split(r";\s+", expressions.strip())]


_DEEP = _loop("".join(f"{{% set ns.{v} = {v2} %}}" for v, v2 in (
    ("x", "[ns.x, ns.x]"), ("y", "[ns.y, ns.y]"), ("t", "(ns.t, ns.t)"), ("u", "(ns.u, ns.u)"))))  # fmt: skip
_RANGE = "range(99999)"
LONG = [
    f"{{% for a in {_RANGE} %}}" * 3 + "{% endfor %}" * 3,
    f"{{% for z in {_RANGE} %}}{{% for a in {_RANGE} if false %}}{{% endfor %}}{{% endfor %}}",
    f"{{% for i in {_RANGE} %}}{{% set x = messages|tojson %}}{{% endfor %}}",
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in range(9) recursive %}{% if loop.depth < 90 %}{{ loop(range(9)) }}{% endif %}{% endfor %}",
    "{% set s = 'x' * 80000 %}{{ s in [s ~ 'y'] * 100000 }}",
    *_shown(f"{_RANGE}|select('in', {_RANGE}|list)|list; {_RANGE}|map('string')|map('replace', '', 'aaaaaaaaa')|join; "
            "([[1]] * 99999)|sum(start=[])"),
]  # fmt: skip
BIG = [
    *_shown("""
    'a' * 10**9;  'a' * 10**30;  10**30 * 'a';  [1] * 10**9;  '%1000000000d' % 5;  '%.1000000000f' % 5;
    '%*d' % (10**9, 5);  '%(a)s' * 99999 % {'a': 'b' * 99999};  '%1000000000d'|format(5);  '{:1000000000}'.format(1);
    '{:{}}'.format(1, 10**9);  ('{0}' * 99999).format('b' * 99999);  '{a:>1000000000}'.format_map({'a': 'b'});
    ['{:1000000000}']|map('format', 1)|list;  'a'|center(10**9);  'a'|center(width=10**9);  'a\\n'|indent(10**9);
    [1]|batch(10**9, 0)|list;  [1]|slice(10**9)|list;  1.5|round(10**9, 'ceil');
    ('a' * 99999)|replace('a', 'b' * 99999);  ('a' * 99999)|replace(old='a', new='b' * 99999);
    ([''] * 99999)|join('b' * 99999);  ([''] * 99999)|join(d='b' * 99999);  ('b' * 99999).join([''] * 99999);
    ('a' * 99999).replace('a', 'b' * 99999);  'a'.center(10**9);  'a'.ljust(10**9);  'a'.rjust(10**9);
    'a'.zfill(10**9);  '\\t'.expandtabs(10**9);  '\\t'.expandtabs(tabsize=10**9);  (5).to_bytes(10**9);
    [1]|tojson(indent=10**9);  [1]|tojson(separators=('a' * 10**6, 'b'));  strftime_now('%Y' * 10**6);
    strftime_now('%999999999Y');  2 ** (10**8);  10 ** (10 ** 10);  ('f' * 40000000)|int(base=16) // 3;
    ('a b ' * 39999999).split();  ('a' * 40000000)|list;  ('<' * 9999999)|e|e|e|e|e;  joiner('a' * 10**9)();
    cycler('a' * 10**9).next();  raise_exception('a' * 10**9)"""),
    *_set("s", "ns.s + ns.s; ns.s ~ ns.s; ns.s * 2; (ns.s, ns.s)|join; ns.s|replace('', ns.s); '%s%s' % (ns.s, ns.s)"),
    *_set("s", "'{0}{0}'.format(ns.s); ns.s.join('abc'); ns.s|e ~ '<' ~ ns.s; ns.s + 'c' + ns.s"),
    _loop("{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"),
    _loop("{% macro m() %}{{ ns.s }}{{ ns.s }}{% endmacro %}{% set ns.s = m() %}"),
    *_set("n", "ns.n * ns.n; ns.n ** 3; ns.n ** ns.n"),
    *_set("x", "ns.x + [1] + ns.x; [ns.x] * 2; [ns.x, ns.x]; (ns.x, ns.x); {'a': ns.x, 'b': ns.x}", "{{ ns.x }}"),
    *_set("x", "dict(a=ns.x, b=ns.x); cycler(ns.x, ns.x).items; [1]|batch(3, ns.x)|list", "{{ ns.x }}"),
    *_set("x", "range(2)|map(attribute='q', default=ns.x)|list; [0, 0]|map('default', ns.x, true)|list", "{{ ns.x }}"),
    *_shown("""
    ns.x;  ns.x|tojson;  ns.x|string;  ns.x|upper;  ns.x|join;  ns.x ~ 'a';  '%s' % ns.x;  '{}'.format(ns.x);
    ns.x == ns.y;  ns.x in [ns.y];  [ns.y].index(ns.x);  [ns.y].count(ns.x);  [ns.x, ns.y]|sort;  [ns.x, ns.y]|max;
    ns.x is eq(ns.y);  ns.x is in([ns.y]);  ns.x is upper;  {ns.t: 1};  ns.d[ns.t];  ns.d.get(ns.t);  ns.t in ns.d;
    [ns.t]|unique|list;  raise_exception(ns.x);  ns.t < ns.u;  [ns.x, ns.y]|groupby(0);  {'a': ns.x}.items();
    {'a': ns.x}|items|list;  {'a': ns.x}|dictsort;  [ns.x]|urlencode;  ns.x|trim;  ns.x|e""", _DEEP),
    f"{{% filter upper %}}{{% for i in {_RANGE} %}}{{{{ 'a' * 9999 }}}}{{% endfor %}}{{% endfilter %}}",
    f"{{% macro m() %}}{{% for i in {_RANGE} %}}{{{{ 'a' * 999 + 'b' }}}}{{% endfor %}}{{% endmacro %}}{{{{ m() }}}}",
    f"{{% set s = 'a' * 9999 %}}{{% for i in {_RANGE} %}}{{{{ s }}}}{{% endfor %}}",
]  # fmt: skip
OTHER = [
    *_shown("""
    lipsum(n=100000);  1 / 0;  1 % 0;  10.0 ** 400;  none.x.y;  [1][9].a;  range(10**9);  'a' + 1;
    raise_exception('no');  {}|first + 1;  namespace(_x=1);  'a'.encode('x');  dict(1);  'abc'.nothing()"""),
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ self.x() }}{% block x %}{{ self.x() }}{% endblock %}",
    "{% include 'x' %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
]
MESSAGES = [{"role": "user", "content": "hi there " * 40}]


@pytest.mark.parametrize("source", [*LONG, *BIG])
def test_unbounded_template_is_refused_in_little_memory(source: str) -> None:
    template = CompiledTemplate(source)
    tracemalloc.start()
    try:
        with TemplateBudget(units=2**18).used(), pytest.raises(jinja2.TemplateError) as caught:
            template.render({"messages": MESSAGES})
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
    assert "MemoryError" not in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("source", [*BIG[:8], *LONG[:2], *OTHER])
def test_template_exception_becomes_refusal_of_messages(source: str) -> None:
    template = Template(source, {})
    with (
        TemplateBudget(units=2**20).used(),
        pytest.raises(ConversationError, match=r"refused by the chat template: .") as caught,
    ):
        template.render(normalise(MESSAGES))
    assert caught.value.field == "messages"


_NESTED = "{{ " + "(" * 900 + "1" + ")" * 900 + " }}"
_LOOPS = "{% for i in [1] %}" * 40 + "{% endfor %}" * 40
_ESCAPED = "{% autoescape true %}{% endautoescape %}"


@pytest.mark.parametrize("source", ["{{ 'x'|urlize }}", _NESTED, _LOOPS, _ESCAPED, "x" * (2**20 + 1)])
def test_uncompilable_template_is_a_syntax_error(source: str) -> None:
    with pytest.raises(jinja2.TemplateSyntaxError):
        CompiledTemplate(source)


_STATEMENTS = [
    *(f"{{% set ns.{name} = {each} %}}" for name, expressions in (
        ("s", "ns.s ~ ns.x; ns.s + ns.s; ns.s|replace('a', ns.s); ns.x|string; ns.s[1:]; ns.s|center(ns.n)"),
        ("s", "ns.s.join(ns.s); ns.s|e; '%s%s' % (ns.s, ns.n); ns.s|join(ns.s)"),
        ("x", "[ns.x, ns.s]; ns.x + ns.x; ns.x * 3; ns.x|list; ns.s.split('a'); [ns.d, ns.d]; ns.x[::-1]"),
        ("x", "ns.x|batch(2, ns.s)|list; ns.s|list; [ns.x]|map('string')|list"),
        ("n", "ns.n * 3; ns.n + ns.n; ns.x|length; ns.n ** 2"),
        ("d", "{'a': ns.d, 'b': ns.x}; dict(ns.d, c=ns.x); dict(a=ns.s)"),
    ) for each in expressions.split("; ")),
    *("{{ ns.s }}", "{{ ns.x }}", "{{ ns.d|tojson }}", "{{ m(ns.n) }}"),
    "{% for j in range(99) %}{{ ns.s }}{% endfor %}",
    "{% if ns.x == ns.y %}{% set ns.y = ns.x %}{% endif %}",
]  # fmt: skip


@given(st.lists(st.sampled_from(_STATEMENTS), min_size=1, max_size=5))
def test_growing_template_ends_in_little_memory(statements: list[str]) -> None:
    source = "{% macro m(n) %}{% if n > 0 %}{{ n }}{{ m(n - 1) }}{% endif %}{% endmacro %}" + _loop("".join(statements))
    template = CompiledTemplate(source)
    tracemalloc.start()
    try:
        with TemplateBudget(units=2**19).used():
            assert len(template.render({})) < 2**20
    except jinja2.TemplateError as error:
        assert "MemoryError" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**26


def test_long_conversation_has_budget_by_length() -> None:
    source = "{% for m in messages %}{{ m.role + ': ' + m.content|trim }}{{ m.content.split('</t>')[-1] }}{% endfor %}"
    template = CompiledTemplate(source)
    many = [{"role": "user", "content": "x" * 10_000}] * 200
    with TemplateBudget(units=1000).used():
        assert len(template.render({"messages": many})) == 200 * (6 + 20_000)
    with TemplateBudget(units=1000, of_input=0).used(), pytest.raises(TemplateLimit):
        template.render({"messages": many})


def test_expensive_first_try_is_not_a_refusal() -> None:
    template = Template("{% for m in messages %}{{ m.content + 'x' }}{% endfor %}", {})
    conversation = normalise(MESSAGES)
    with TemplateBudget(units=100, of_input=0, first_try=True).used(), pytest.raises(TakesLonger):
        template.render(conversation)
    assert template.render(conversation) == "hi there " * 40 + "x"


def test_cpu_time_of_rendering_is_bounded() -> None:
    template = CompiledTemplate("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    with TemplateBudget(units=2**50, seconds=0.05).used(), pytest.raises(TemplateLimit, match=r"0\.05 seconds"):
        template.render({})


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages[0]['__class__']['__mro__'] }}",
        "{{ (messages|map(attribute='__class__')|list)[0].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].pop('role') }}",
    ],
)
def test_template_cannot_reach_python_or_change_messages(source: str) -> None:
    conversation = normalise([{"role": "user", "content": "hi"}])
    try:
        text = Template(source, {}).plain(conversation)
    except ConversationError:
        text = ""
    assert not re.search(r"<class|<function|subclass|globals", text)
    assert conversation == normalise([{"role": "user", "content": "hi"}])


def test_renderings_of_one_block_share_time_budget() -> None:
    template = CompiledTemplate("{% for a in range(999) %}{% endfor %}")
    with TemplateBudget(units=2**50, seconds=0.05).used(), pytest.raises(TemplateLimit, match=r"0\.05 seconds"):
        for _ in range(100_000):
            template.render({})
    template.render({})
