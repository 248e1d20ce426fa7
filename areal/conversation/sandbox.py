"""The sandbox of chat templates: Jinja, with a limit on the work and the memory of each rendering.

Jinja's immutable sandbox denies access to Python's objects. In addition, the generated code charges each operation to a
budget (``areal.conversation.budget``). Features that no chat template needs, and whose cost is unknown, are removed:
``lipsum``, ``|urlize``, ``|wordwrap``, methods of numbers.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.tests import TESTS
from jinja2.utils import Namespace

from areal.conversation import budget
from areal.conversation.budget import NODE, Meter, TakesLonger, TemplateLimit, meter, refuse, sized, text_of, weighed

_MOST_SOURCE = 2**20  # characters of a template


class CompiledTemplate:
    """A compiled chat template. The constructor raises ``jinja2.TemplateSyntaxError``."""

    def __init__(self, source: str) -> None:
        if len(source) > _MOST_SOURCE:
            raise jinja2.TemplateSyntaxError(f"it has more than {_MOST_SOURCE} characters", 1)
        environment = _new_environment()
        try:
            tree = environment.parse(source)
            self.names: Collection[str] = meta.find_undeclared_variables(tree)
            self._template = environment.from_string(_with_ticks(tree, environment))
        except jinja2.TemplateSyntaxError:
            raise
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:  # Python's own, of nested expressions
            raise jinja2.TemplateSyntaxError(f"it is nested too deeply: {error}", 1) from error
        self._template.root_render_func.__globals__.update(_NAMES_IN_CODE)
        self._template.globals = dict(self._template.globals)  # a plain dict: each rendering copies it

    def render(self, values: Mapping[str, object]) -> str:
        """Render with these variables, within the budget in use. Raises ``jinja2.TemplateError``, TakesLonger."""
        used = Meter(budget.budget_in_use(), values)
        token = budget.use_meter(used)
        try:
            return self._template.render(values)
        except (jinja2.TemplateError, TakesLonger):
            raise
        except RecursionError as error:
            raise TemplateLimit("its macros call each other too deeply") from error
        except Exception as error:  # a template can raise anything, which means that it refuses the input
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}"[:1000]) from error
        finally:
            budget.restore_meter(token)
            used.close()


# Code with payments.

_CHAIN = 8  # operands of one sum that is paid for at its end
_SMALL = 256  # characters of a sum that the pass of its loop has paid for
_NAMES_IN_CODE: Mapping[str, object] = {
    "str": text_of,
    "plain_text": str,
    "pay_tick": budget.tick,
    "pay_sized": sized,
    "pay_weighed": weighed,
    "pay_compared": budget.compared,
    "pay_joined": budget.joined,
}


class _PayingCode(CodeGenerator):
    """Generates the code of a template with charges. ``_NAMES_IN_CODE``: the functions that the code calls."""

    def _paid(self, function: str, node: nodes.Node, frame: Frame) -> None:
        self.write(f"{function}(")
        self.visit(node, frame)
        self.write(")")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("(piece if type(piece := ")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(") is plain_text else str(piece))")

    @optimizeconst
    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        operands: list[nodes.Expr] = [node.right]
        first = node.left
        while isinstance(first, nodes.Add) and len(operands) < _CHAIN:
            operands.insert(0, first.right)
            first = first.left
        operands.insert(0, first)
        is_text = any(isinstance(each, nodes.Const) and isinstance(each.value, str) for each in operands)
        self.write("(total if len(total := " if is_text else "pay_sized(")
        for number, operand in enumerate(operands):
            self.write(" + " if number else "")
            self.visit(operand, frame)
        self.write(f") < {_SMALL} else pay_sized(total))" if is_text else ")")

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("pay_joined((")
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")

    @optimizeconst
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("pay_sized(" if is_slice else "")
        super().visit_Getitem(node, frame)
        self.write(")" if is_slice else "")

    @optimizeconst
    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        operands = [node.expr, *(each.expr for each in node.ops)]
        if sum(not _is_constant(each) for each in operands) < 2:
            super().visit_Compare(node, frame)  # a comparison with a constant ends with the constant
            return
        self.write("(")
        for number, (operand, following) in enumerate(zip(operands, [*node.ops, None], strict=True)):
            if number:
                self.write(f" {_COMPARISONS[node.ops[number - 1].op]} ")
            if following is None or _is_constant(operand):
                self.visit(operand, frame)
            elif following.op in ("in", "notin"):
                self.write("pay_compared(")
                self.visit(operand, frame)
                self.write(", ")
                self.visit(following.expr, frame)
                self.write(")")
            else:
                self._paid("pay_weighed", operand, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._literal(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        self._literal(super().visit_Tuple, node, frame)

    def _literal(self, visit: Callable[[Any, Frame], None], node: nodes.Tuple | nodes.List, frame: Frame) -> None:
        made = getattr(node, "ctx", "load") == "load" and not _is_constant(node)
        self.write("pay_sized(" if made else "")
        visit(node, frame)
        self.write(")" if made else "")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("pay_sized({")
        for item in node.items:
            self._paid("pay_weighed", item.key, frame)  # its hash reads all of it
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("})")


_COMPARISONS = {
    "eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in", "notin": "not in",
}  # fmt: skip


def _is_constant(node: nodes.Node) -> bool:
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const)


def _with_ticks(tree: nodes.Template, environment: jinja2.Environment) -> nodes.Template:
    """Insert a charge at the start of each pass of a loop, and of each call of a macro or block."""
    if next(tree.find_all(nodes.EvalContextModifier), None) is not None:
        raise jinja2.TemplateSyntaxError("a chat template has no use for autoescape", 1)
    for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))):
        assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block)
        size = sum(1 for part in node.body for _ in part.find_all(nodes.Node))
        sums = sum(1 for part in node.body for _ in part.find_all(nodes.Add))
        node.body.insert(0, nodes.ExprStmt(_tick(NODE * (4 + size) + _SMALL * sums)))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(_tick(4 * NODE), node.test)
            node.test.set_lineno(node.lineno).set_environment(environment)
        node.body[0].set_lineno(node.lineno).set_environment(environment)
    return tree


def _tick(units: int) -> nodes.Expr:
    name: nodes.InternalName = object.__new__(nodes.InternalName)  # as ``Parser.free_identifier`` makes it
    nodes.Node.__init__(name, f"pay_tick({units})", lineno=1)
    return name


_FREE_FILTERS = ("count", "d", "default", "first", "last", "length")  # read the top of a value and make nothing
_SHALLOW_FILTERS = ("attr", "items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr")
_DEEP_TESTS = (
    "in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le",
    "lower", "upper",
)  # fmt: skip
_GLOBALS = ("range", "dict", "cycler", "joiner")
_DICT_NAMES = frozenset(dir(dict))
_LOOP_NAMES = frozenset(("index", "index0", "first", "last", "length", "previtem", "nextitem", "cycle", "revindex"))
_MISSING = object()


def _new_environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControls])
    given = {**environment.filters, "tojson": to_json}
    paying = (*_SHALLOW_FILTERS, *budget.DEEP_FILTERS, *budget.BEFORE_FILTER)
    environment.filters = {name: given[name] for name in _FREE_FILTERS}
    environment.filters |= {name: _paying(name, given[name]) for name in paying}
    environment.filters["sum"] = _sum
    environment.tests |= {name: _paying_test(TESTS[name]) for name in _DEEP_TESTS}
    environment.globals = {name: environment.globals[name] for name in _GLOBALS}
    environment.globals |= {"namespace": _Namespace, "raise_exception": _raise, "strftime_now": _now}
    return environment


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment, with short ways to some attributes: keys of objects, methods of texts, counters of loops."""

    code_generator_class = _PayingCode
    intercepted_binops = frozenset(budget.BEFORE_OPERATION)
    concat = staticmethod(budget.concat)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget.BEFORE_OPERATION[operator](left, right)
        return sized(self.binop_table[operator](left, right))

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_NAMES:
            found = obj.get(attribute, _MISSING)
            return found if found is not _MISSING else self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in budget.LINEAR_METHODS) or (kind is LoopContext and attribute in _LOOP_NAMES):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(argument) is tuple:  # its hash reads all of it
            weighed(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format = super().wrap_str_format(value)
        if format is None:
            return None

        def paying(*args: Any, **named: Any) -> str:
            budget.pay_format(value.__self__, *args, **named)
            return str(sized(format(*args, **named)))

        return paying

    def call(__self, __context: Context, __obj: Any, *args: Any, **named: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = __obj.__name__
            if name in budget.LINEAR_METHODS:
                return sized(__obj(*args))
            if name not in budget.BEFORE_METHOD:
                raise SecurityError(f"no chat template needs the method {name} of a text")
            budget.BEFORE_METHOD[name](owner, *args, **_given(named))
        elif type(owner) is dict and __obj.__name__ == "get" and args and type(args[0]) is str:
            return __obj(*args)
        elif isinstance(owner, int | float | bytes):
            raise SecurityError("no chat template needs a method of a number or of bytes")
        elif not isinstance(__obj, Macro):
            for value in (*args, *_given(named).values()):
                weighed(value)
        return sized(super().call(__context, __obj, *args, **named))


def _given(named: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of a template's call, without those that Jinja adds."""
    return {name: value for name, value in named.items() if name not in ("_loop_vars", "_block_vars")}


def _paying(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with a charge."""
    before, is_deep = budget.BEFORE_FILTER.get(name), name in budget.DEEP_FILTERS

    def pay(value: Any, rest: tuple[Any, ...], named: Mapping[str, object]) -> Any:
        if isinstance(value, Iterator) and (before or is_deep):
            value = list(value)  # it gives each item only once
        if before is not None:
            before(value, *rest, **named)
        elif is_deep:
            weighed(value)
        elif isinstance(value, str):
            meter().pay(6 * NODE * len(value))  # a list of its characters
        return value

    def paying(value: Any, *rest: Any, **named: Any) -> Any:
        if type(value) is not str or not is_deep:
            value = pay(value, rest, named)
        return sized(filter(value, *rest, **named))

    def paying_with(own: Any, value: Any, *rest: Any, **named: Any) -> Any:
        return sized(filter(own, pay(value, rest, named), *rest, **named))

    mark = getattr(filter, "jinja_pass_arg", None)  # a filter whose first argument is Jinja's own
    if mark is None:
        return paying
    paying_with.jinja_pass_arg = mark  # type: ignore[attr-defined]
    return paying_with


def _paying_test(test: Any) -> Callable[..., Any]:
    return lambda value, *others: test(budget.compared(value, *others), *others)


@jinja2.pass_environment
def _sum(environment: jinja2.Environment, values: Any, attribute: str | None = None, start: Any = 0) -> Any:
    numbers = weighed(list(values if attribute is None else map(make_attrgetter(environment, attribute), values)))
    if not all(isinstance(number, int | float) for number in (*numbers, start)):
        raise TypeError("sum takes numbers")
    return sized(sum(numbers, start))


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON. Jinja's own filter escapes HTML, which would change the prompt."""
    if (indent, separators) != (None, None) and budget.magnitude(indent) * budget.magnitude(separators) > 10_000:
        refuse("tojson has an indentation or separators that are too long")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateError(text_of(message)[:1000])


def _now(form: str) -> str:
    if len(form) > 100 or budget.WIDE.search(form):
        refuse("a form of a date is too long")
    return datetime.datetime.now().strftime(form)


class _Namespace(Namespace):
    """A namespace as in transformers: names must not begin with an underscore, and its text omits the contents."""

    def __init__(*args: Any, **named: Any) -> None:
        self, given = args[0], dict(*args[1:], **named)
        for name in given:
            _check_name(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name[:80]!r}: it begins with an underscore")


class _Generation(Extension):
    """``{% generation %}``, which marks tokens for training. Its body is a scope, as in transformers."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
