"""The invocation, the value of -o, config.yaml, and the options that many commands share.

A shared option on the root or on the command sets an attribute of the ``Invocation`` (the last one wins), and is not
passed to the command. ``areal --help`` imports this module, so it imports only click.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal.state.home import Home


FORMATS = ("table", "wide", "json", "yaml", "name", "jsonl")
_JSONPATH = "jsonpath="


class Format(NamedTuple):
    kind: str  # one of FORMATS, "jsonpath", or a verb's own
    expression: str = ""  # of a jsonpath

    @property
    def is_table(self) -> bool:
        return self.kind in ("table", "wide")


def parse_format(text: str, extra: tuple[str, ...] = ()) -> Format:
    if (expression := text.removeprefix(_JSONPATH)) != text and expression:
        from areal.resources.jsonpath import compile_template

        compile_template(expression)
        return Format("jsonpath", expression)
    if text in (*FORMATS, *extra):
        return Format(text)
    from areal.errors import UsageFault, did_you_mean

    choices = (*FORMATS, *extra, "jsonpath=EXPR")
    raise UsageFault(f'no output format "{text}"{did_you_mean(text, choices)}', hint=f"one of {', '.join(choices)}")


#     currentContext: cluster
#     defaults: {output: wide, service: rl, timeout: 20m, lockTimeout: 30s}
#     contexts:
#       cluster: {gateway: "http://10.0.0.5:8080", apiKeyFile: ~/.keys/cluster}

LOCAL = "local"  # the context of this home
_SECTIONS = ("currentContext", "defaults", "contexts")
DEFAULTS = {
    "output": "format of every command that prints data",
    "service": "inference service of `areal inf` verbs",
    "timeout": "how long mutating commands wait",
    "lockTimeout": "how long to wait for an object that another command holds",
}


def read_config(path: str) -> dict[str, Any]:
    """Return the file as a map; empty for an absent file. Raises ArealError if it is unreadable or invalid."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise _config_error(f"cannot read {path}: {error}", "move it away, or choose another --home") from error
    import yaml

    try:
        found = yaml.safe_load(text)
        return _checked(path, {} if found is None else found)
    except yaml.YAMLError as error:
        raise _config_error(f"{path} is not YAML: {' '.join(str(error).split())}", f"correct {path}") from error


def _checked(path: str, config: Any) -> dict[str, object]:
    if not isinstance(config, dict):
        raise _config_error(f"{path} does not hold a map", f"correct {path}")
    for section, known in (("", _SECTIONS), ("defaults", tuple(DEFAULTS))):
        part = config.get(section) or {} if section else config
        if not isinstance(part, dict):
            raise _config_error(f"{path}: {section} does not hold a map", f"correct {path}")
        for key in part:
            if key not in known:
                from areal.errors import did_you_mean

                where = f"{section}." if section else ""
                raise _config_error(f"{path}: unknown field {where}{key}{did_you_mean(str(key), known)}")
    contexts = config.get("contexts") or {}
    if not isinstance(contexts, dict) or not all(isinstance(item, dict) for item in contexts.values()):
        raise _config_error(f"{path}: contexts does not hold a map of maps", f"correct {path}")
    return config


def _config_error(message: str, hint: str | None = None) -> Exception:
    from areal.errors import ArealError

    return ArealError(message, hint=hint)


class Invocation:
    """The shared flags as given (None: not given), and values derived from them on first use."""

    def __init__(self) -> None:
        self.home_flag: str | None = None
        self.context_flag: str | None = None
        self.gateway_flag: str | None = None
        self.key_file_flag: str | None = None
        self.format_flag: Format | None = None
        self.timeout_s: float | None = None
        self.lock_timeout_flag: float | None = None
        self.quiet = False
        self.verbose = 0
        self.debug = False
        self.yes = False
        self.failed = 1  # the exit status of an unexpected failure of the command
        self._home: Home | None = None
        self._config: Mapping[str, object] | None = None

    @property
    def home(self) -> Home:
        if self._home is None:
            from areal.state.home import Home

            self._home = Home.resolve(self.home_flag)
            if self._home.root.exists() and not self._home.root.is_dir():
                from areal.errors import ArealError

                raise ArealError(
                    f"{self._home.root} is not a folder", hint="choose a home with --home DIR or AREAL_HOME"
                )
        return self._home

    @property
    def config(self) -> Mapping[str, Any]:
        """``config.yaml`` of the home; empty for an absent file."""
        if self._config is None:
            path = f"{home_path(self.home_flag)}/config.yaml"
            if not os.path.exists(path):  # noqa: PTH110 - before every command; pathlib would cost more than the check
                return {}
            self._config = read_config(path)
        return self._config

    @property
    def context(self) -> str:
        """The name of the context that is selected."""
        return str(self.context_flag or self.config.get("currentContext") or LOCAL)

    @property
    def contexts(self) -> Mapping[str, Mapping[str, Any]]:
        """The remote gateways of ``config.yaml``, by name."""
        return self.config.get("contexts") or {}

    def default(self, name: str) -> Any:
        """Return a default that the user has set in ``config.yaml``, or None."""
        return (self.config.get("defaults") or {}).get(name)

    @property
    def format(self) -> Format:
        if self.format_flag is not None:
            return self.format_flag
        return parse_format(str(self.default("output") or "table"))

    @property
    def lock_timeout_s(self) -> float:
        if self.lock_timeout_flag is not None:
            return self.lock_timeout_flag
        return self._default_seconds("lockTimeout", 0.0)

    def deadline_s(self, default: float = 600.0, *, flagged: bool = False) -> float:
        """Return ``--timeout``, else the user's default, else ``default``, in seconds. ``flagged``: ``default`` is from
        a flag of the command and takes precedence over the user's default."""
        if self.timeout_s is not None:
            return self.timeout_s
        return default if flagged else self._default_seconds("timeout", default)

    def _default_seconds(self, name: str, otherwise: float) -> float:
        given = self.default(name) or otherwise
        try:
            return parse_seconds(given)
        except ValueError:
            where = f"{home_path(self.home_flag)}/config.yaml: defaults.{name}"
            raise _config_error(f'{where}: "{given}" is not a duration', "write 90, 90s, 5m") from None

    def info(self, text: str) -> None:
        """Print a hint or progress to stderr, unless -q is given."""
        if not self.quiet:
            sys.stdout.flush()
            click.echo(text, err=True)

    def detail(self, text: str) -> None:
        """Print details to stderr if -v is given."""
        if self.verbose:
            self.info(text)


def home_path(flag: str | None) -> str:
    """Return the state folder without importing ``Home``. ``Home.resolve`` returns the same, but raises errors."""
    return os.path.expanduser(flag or os.environ.get("AREAL_HOME") or "~/.areal")  # noqa: PTH111


def interactive() -> bool:
    """Return whether a user can answer questions: stdin and stderr are terminals."""
    return sys.stdin.isatty() and sys.stderr.isatty()


pass_invocation = click.make_pass_decorator(Invocation, ensure=True)


F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=click.Command)
Decorator = Callable[[F], F]

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}  # "ms" before "s"


def parse_seconds(value: object) -> float:
    """Parse ``90``, ``90s``, ``1.5m``, ``2h``, ``1d`` or ``500ms`` into seconds. Raises ValueError."""
    text = str(value).strip()
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    seconds = float(text.removesuffix(unit)) * _UNITS.get(unit, 1.0)
    if not 0 <= seconds < float("inf"):
        raise ValueError("negative or not finite")
    return seconds


class Seconds(click.ParamType[float]):
    name = "duration"

    def __init__(self, *, positive: bool = False) -> None:
        self.positive = positive

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = parse_seconds(value)
        except ValueError:
            self.fail(f"{value!r} is not a duration; write 90, 90s, 5m, 2h or 1d", param, ctx)
        if self.positive and not seconds:
            self.fail(f"{value} is no time at all; leave the option out for its default", param, ctx)
        return seconds


class NonEmptyText(click.types.StringParamType):
    """A text that is not empty. The empty value of an unset shell variable would select the default: the service
    ``default``, or the working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if not value:
            self.fail("it is empty; is a variable of the shell not set?", param, ctx)
        return super().convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        metavar = param.metavar or ""
        kind = "file" if "FILE" in metavar or metavar == "PATH" else "dir" if "DIR" in metavar else None
        return [CompletionItem(incomplete, type=kind)] if kind else []


def refuse_empty(command: C) -> C:
    """Make the options of ``command`` refuse an empty name or path. Texts, arguments and --set may be empty."""
    for option in command.params:
        if option.type is click.STRING and option.metavar not in ("TEXT", "ARGS", "WORDS", "PATH=VALUE"):
            option.type = NonEmptyText()
    return command


def take_equals(command: C) -> C:
    """Make ``command`` read ``-f=FILE`` as ``-f FILE``, as kubectl does."""
    make = type(command).make_parser

    def make_parser(ctx: click.Context) -> Any:
        parser = make(command, ctx)
        parser._long_opt.update(parser._short_opt)  # what click splits at =
        return parser

    command.make_parser = make_parser  # type: ignore[method-assign]
    return command


class FiniteRange(click.FloatRange):
    """A range of numbers that excludes infinity and NaN, which click accepts."""

    def _describe_range(self) -> str:
        return super()._describe_range() if self.min is not None or self.max is not None else "finite"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class Variable(click.ParamType[tuple[str, str]]):
    """Read ``NAME=VALUE`` as a pair; for ``NAME`` alone, the value is that of this process's environment."""

    name = "variable"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        name, equals, text = value.partition("=")
        if not (name.isascii() and name.isidentifier()):
            self.fail(f"{value!r} is not NAME or NAME=VALUE", param, ctx)
        if not equals and name not in os.environ:
            self.fail(f"{name} is not set here; write {name}=VALUE", param, ctx)
        return name, text if equals else os.environ[name]


class OutputType(click.ParamType[Format]):
    name = "format"

    def __init__(self, *extra: str) -> None:
        self.extra = extra

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Format:
        return parse_format(value, self.extra)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in (*FORMATS, *self.extra, "jsonpath=") if name.startswith(incomplete)]


def env_option(who: str) -> Decorator[Any]:
    help_text = f"A variable of {who}; NAME alone takes its present value. May be repeated."
    return click.option("--env", type=Variable(), multiple=True, metavar="NAME[=VALUE]", help=help_text)


def _shared(*names: str, attribute: str, **settings: Any) -> Decorator[Any]:
    def store(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if param.name is not None and ctx.get_parameter_source(param.name) is not ParameterSource.DEFAULT:
            setattr(ctx.ensure_object(Invocation), attribute, value)

    return click.option(*names, callback=store, expose_value=False, **settings)


def _format_callback(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value is None or value is False:
        return
    invocation = ctx.ensure_object(Invocation)
    chosen = Format("json") if value is True else value
    if invocation.format_flag not in (None, chosen):
        raise click.UsageError("--json and -o name different formats; give one of them", ctx)
    invocation.format_flag = chosen


def stack(*decorators: Decorator[Any]) -> Decorator[Any]:
    """Combine decorators so that --help lists their options in the order written."""

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

common = stack(_home, _context, _quiet, _verbose, _debug)
"""Options of every command."""

global_options = stack(common, _version)

yes = _shared("-y", "--yes", attribute="yes", is_flag=True, help="Approve destructive changes; needed off a terminal.")

lock_timeout = _shared(
    "--lock-timeout",
    attribute="lock_timeout_flag",
    type=Seconds(),
    metavar="TIME",
    help="Wait this long for an object that another command holds  [default: 0, name the holder].",
)

remote = stack(
    _shared("--gateway", attribute="gateway_flag", metavar="URL", help="Ask a remote gateway [AREAL_GATEWAY]."),
    _shared(
        "--api-key-file",
        attribute="key_file_flag",
        metavar="FILE",
        help="File holding the gateway's key [AREAL_API_KEY holds the key itself].",
    ),
)


def timeout(
    default: str = "", what: str = "Give up waiting after this long (exit 7)", *, positive: bool = False
) -> Decorator[Any]:
    """Add ``--timeout``. ``positive`` rejects 0, for commands that wait for the response to one request."""
    text = f"{what}  [default: {default}]." if default else f"{what}."
    return _shared("--timeout", attribute="timeout_s", type=Seconds(positive=positive), metavar="TIME", help=text)


def output(*extra: str, dest: str | None = "--output") -> Decorator[Any]:
    """Add ``-o`` and ``--json``. ``extra``: formats of this command only; ``dest`` None: the command has its own
    --output."""
    return stack(
        click.option(
            *(["-o", dest] if dest else ["-o"]),
            "output_format",
            type=OutputType(*extra),
            metavar="FORMAT",
            callback=_format_callback,
            expose_value=False,
            help=f"{', '.join((*FORMATS, *extra))} or jsonpath=EXPR.",
        ),
        click.option("--json", is_flag=True, callback=_format_callback, expose_value=False, help="Same as -o json."),
    )


def gather(name: str, flags: Any, options: Sequence[Decorator[Any]]) -> Decorator[Any]:
    """Add ``options`` and pass their values to the command as ``name=flags(...)``. ``flags`` is a NamedTuple."""

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def with_flags(*args: Any, **given: Any) -> Any:
            values = {field: given.pop(field) for field in flags._fields if field in given}
            return function(*args, **given, **{name: flags(**values)})

        return stack(*options)(with_flags)

    return decorate


_FLAG_NAMES = {"files": "-f", "recursive": "-R", "overlay": "-k", "sets": "--set", "values_files": "--values"}


def refuse_flags(why: str, *groups: Any) -> None:
    """Raise UsageFault for flags that are given and have no effect. ``groups``: NamedTuples of ``gather``, or maps."""
    flags = (
        (_FLAG_NAMES.get(name, f"--{name.replace('_', '-')}"), value)
        for group in groups
        for name, value in (group if isinstance(group, dict) else group._asdict()).items()
    )
    if given := [flag for flag, value in flags if value]:
        from areal.errors import UsageFault

        raise UsageFault(f"{', '.join(given)} cannot be used {why}")


def duration(name: str, default: str, help: str) -> Decorator[Any]:
    """Return an option of a time above 0."""
    return click.option(
        name, type=Seconds(positive=True), default=default, show_default=True, metavar="TIME", help=help
    )


def style_option(help: str) -> Decorator[Any]:
    """Return the option of the rows that an export has."""
    return click.option(
        "--style", type=click.Choice(["individual", "concat"]), default="individual", show_default=True, help=help
    )


def confidence_option(help: str) -> Decorator[Any]:
    level = FiniteRange(0.5, 0.9999)
    return click.option("--confidence", type=level, default=0.95, show_default=True, metavar="SHARE", help=help)


def was_given(name: str) -> bool:
    """Return whether the option is on the command line."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def only_with(flag: str, *names: str) -> Decorator[Any]:
    """Refuse the options ``names`` where the option ``flag`` is not given: they would have no effect."""

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            ctx = click.get_current_context()
            spelled = {option.name: option.opts[-1] for option in ctx.command.params}
            if not ctx.params[flag] and (idle := next(filter(was_given, names), None)):
                raise click.UsageError(f"{spelled[idle]} cannot be used without {spelled[flag]}", ctx)
            return function(*args, **given)

        return checked

    return decorate


def watch_options(help: str = "Refresh until Ctrl-C.") -> Decorator[Any]:
    return stack(
        click.option("-w", "--watch", is_flag=True, help=help),
        duration("--interval", "2s", "Between refreshes."),
        only_with("watch", "interval"),
    )


def read_options(*formats: str) -> Decorator[Any]:
    """Add the options of a command that reads, and pass the invocation. Must be the last decorator."""
    return stack(remote, output(*formats), common, pass_invocation)


print_options = stack(output(), common, pass_invocation)
"""Adds the options of a command that only prints, and passes the invocation. Must be the last decorator."""


def change_options(deadline: Decorator[Any] | None = None, *, destructive: bool = False) -> Decorator[Any]:
    """Add the options of a mutating command, and pass the invocation. Must be the last decorator."""
    options = (deadline or timeout("10m"), lock_timeout, print_options)
    return stack(yes, *options) if destructive else stack(*options)


def stop_options(function: Any) -> Any:
    """Add ``--grace`` and ``--force``, passed as ``grace``: seconds, or None for the grace of the object."""

    @functools.wraps(function)
    def with_grace(*args: Any, grace: float | None, force: bool, **given: Any) -> Any:
        if force and grace is not None:
            raise click.UsageError("--force and --grace exclude each other")
        return function(*args, grace=0.0 if force else grace, **given)

    text = "Between SIGTERM and SIGKILL  [default: the object's]."
    return stack(
        click.option("--grace", type=Seconds(), metavar="TIME", help=text),
        click.option("--force", is_flag=True, help="No grace: SIGKILL at once."),
    )(with_grace)
