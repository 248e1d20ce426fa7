"""Options that many verbs share, as decorators. They write into the ``Invocation`` and reach no verb's signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from areal.cli.invocation import Invocation

if TYPE_CHECKING:
    from areal.cli.output.formats import Format

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(value: object) -> float:
    """``90``, ``90s``, ``1.5m``, ``2h``, ``1d``, ``500ms`` as seconds; ValueError for anything else."""
    text = str(value).strip()
    for unit in sorted(_UNITS, key=len, reverse=True):
        if text.endswith(unit):
            return _positive(float(text[: -len(unit)]) * _UNITS[unit])
    return _positive(float(text))


def _positive(seconds: float) -> float:
    if not 0 <= seconds < float("inf"):
        raise ValueError("negative or not finite")
    return seconds


class Seconds(click.ParamType[float]):
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return parse_seconds(value)
        except ValueError:
            self.fail(f"{value!r} is not a duration; write 90, 90s, 5m, 2h or 1d", param, ctx)


class OutputType(click.ParamType["Format"]):
    name = "format"

    def __init__(self, *extra: str) -> None:
        self.extra = extra

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Format:
        from areal.cli.output.formats import parse_format

        return parse_format(value, self.extra)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        from areal.cli.output.formats import FORMATS

        return [CompletionItem(name) for name in (*FORMATS, *self.extra, "jsonpath=") if name.startswith(incomplete)]


def _store(attribute: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if param.name is not None and ctx.get_parameter_source(param.name) is not ParameterSource.DEFAULT:
            setattr(ctx.ensure_object(Invocation), attribute, value)

    return callback


def _shared(*names: str, attribute: str, **settings: Any) -> Decorator[Any]:
    return click.option(*names, callback=_store(attribute), expose_value=False, **settings)


def _format_callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is None or value is False:
        return
    from areal.cli.output.formats import Format

    invocation = ctx.ensure_object(Invocation)
    chosen = Format("json") if value is True else value
    if invocation.format_flag not in (None, chosen):
        raise click.UsageError("--json and -o name different formats; give one of them", ctx)
    invocation.format_flag = chosen


def _stack(*decorators: Decorator[Any]) -> Decorator[Any]:
    """Apply decorators so that --help lists them in the order written."""

    def decorate(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


_quiet = _shared("-q", "--quiet", attribute="quiet", is_flag=True, help="No progress and no hints.")
_verbose = _shared("-v", "--verbose", attribute="verbose", count=True, help="Say more on stderr.")
_debug = _shared("--debug", attribute="debug", is_flag=True, help="Show a traceback when something fails.")
_home = _shared("--home", attribute="home_flag", metavar="DIR", help="State folder [AREAL_HOME, ~/.areal].")
_context = _shared("--context", attribute="context_flag", metavar="NAME", help="A context of config.yaml, or 'local'.")


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from areal import __version__

        click.echo(f"areal {__version__}")
        ctx.exit(0)


_version = click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)

global_options = _stack(_home, _context, _quiet, _verbose, _debug, _version)

common = _stack(_home, _context, _quiet, _verbose, _debug)
"""On every verb."""

yes = _shared("-y", "--yes", attribute="yes", is_flag=True, help="Approve what is destructive; needed off a terminal.")

lock_timeout = _shared(
    "--lock-timeout",
    attribute="lock_timeout_flag",
    type=Seconds(),
    metavar="TIME",
    help="Wait this long for an object that another command holds  [default: 0, say who holds it].",
)

remote = _stack(
    _shared("--gateway", attribute="gateway_flag", metavar="URL", help="Ask a remote gateway [AREAL_GATEWAY]."),
    _shared(
        "--api-key-file",
        attribute="key_file_flag",
        metavar="FILE",
        help="File holding the gateway's key [AREAL_API_KEY holds the key itself].",
    ),
)


def timeout(default: str = "", what: str = "Give up waiting after this long (exit 7)") -> Decorator[Any]:
    suffix = f"  [default: {default}]." if default else "."
    return _shared("--timeout", attribute="timeout_s", type=Seconds(), metavar="TIME", help=what + suffix)


def output(*extra: str, dest: str | None = "--output") -> Decorator[Any]:
    """``-o`` and ``--json``. ``extra`` formats are the verb's own; no ``dest`` where the verb has its own --output."""
    listed = ", ".join(("table", "wide", "json", "yaml", "name", "jsonl", *extra)) + " or jsonpath=EXPR"
    return _stack(
        click.option(
            *(["-o", dest] if dest else ["-o"]),
            "output_format",
            type=OutputType(*extra),
            metavar="FORMAT",
            callback=_format_callback,
            expose_value=False,
            help=f"{listed}.",
        ),
        click.option("--json", is_flag=True, callback=_format_callback, expose_value=False, help="Same as -o json."),
    )
