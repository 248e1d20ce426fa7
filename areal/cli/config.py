"""``areal config``, ``areal completion`` and ``areal version``."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from areal import __version__
from areal.cli.objects import complete, home_of
from areal.cli.options import (
    DEFAULTS,
    LOCAL,
    Invocation,
    common,
    parse_format,
    parse_seconds,
    pass_invocation,
    print_options,
    read_config,
    stack,
)
from areal.cli.output import Column, emit_one, emit_rows, field, to_yaml, write
from areal.cli.remote import checked_url
from areal.errors import NotFound, UsageFault, did_you_mean
from areal.resources.kinds import check_name

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def config_text(config: Mapping[str, object]) -> str:
    """Return the configuration as YAML in block style, without empty sections."""
    kept = {key: value for key, value in config.items() if value not in ({}, None)}
    return to_yaml([kept]) if kept else ""


def check_default(name: str, value: str) -> None:
    """Raise UsageFault for a value that ``defaults.<name>`` cannot hold."""
    if name not in DEFAULTS:
        raise UsageFault(f'no default "{name}"{did_you_mean(name, DEFAULTS)}', hint=f"defaults: {', '.join(DEFAULTS)}")
    if name == "output":
        parse_format(value)
    elif name == "service":
        check_name(value)
    else:
        try:
            parse_seconds(value)
        except ValueError:
            raise UsageFault(f'"{value}" is not a duration', hint="write 90, 90s, 5m, 2h or 1d") from None


_CONTEXTS = (
    Column("CURRENT", lambda row: "*" if row["current"] else ""),
    field("NAME", "name"),
    field("GATEWAY", "gateway"),
    field("KEY-FILE", "apiKeyFile", wide=True),
)


def _complete_defaults(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(name, help=text) for name, text in DEFAULTS.items() if name.startswith(incomplete)]


_context_name = click.argument(
    "name",
    shell_complete=complete(lambda ctx: [LOCAL, *(read_config(f"{home_of(ctx)}/config.yaml").get("contexts") or {})]),
)
_default_name = click.argument("name", shell_complete=_complete_defaults)
_speaking = stack(common, pass_invocation)


@click.command()
@print_options
def view(cli: Invocation) -> None:
    """Print the configuration as it is read."""
    emit_one(cli, cli.config, name=str(cli.home.config), text=lambda: config_text(cli.config))
    if not cli.config:
        cli.info(f"nothing is configured in {cli.home.config}")


@click.command()
@print_options
def get_contexts(cli: Invocation) -> None:
    """List contexts. 'local' is this machine's own state and always there."""
    current = cli.context
    rows = [
        {"name": name, "current": name == current, "gateway": at.get("gateway"), "apiKeyFile": at.get("apiKeyFile")}
        for name, at in {LOCAL: {}, **cli.contexts}.items()
    ]
    emit_rows(cli, rows, _CONTEXTS, name=lambda row: str(row["name"]))


@click.command()
@print_options
def current_context(cli: Invocation) -> None:
    """Print the current context's name."""
    name = cli.context
    emit_one(cli, {"name": name}, name=name, text=lambda: name)


@click.command()
@_context_name
@_speaking
def use_context(cli: Invocation, name: str) -> None:
    """Make NAME the current context; 'local' is this home."""
    if name != LOCAL and name not in cli.contexts:
        raise _no_context(cli, name)
    with _changed(cli, f"context {name} is current") as config:
        config["currentContext"] = name
        if name == LOCAL:
            del config["currentContext"]


@click.command()
@_context_name
@click.option("--gateway", required=True, metavar="URL", help="URL of the remote gateway.")
@click.option("--api-key-file", metavar="FILE", help="File on this machine that holds its key.")
@_speaking
def set_context(cli: Invocation, name: str, gateway: str, api_key_file: str | None) -> None:
    """Add or change the context NAME: a remote gateway that read verbs then ask."""
    if check_name(name) == LOCAL:
        raise UsageFault("'local' always means this home", hint="choose another name")
    context = {"gateway": checked_url(gateway)}
    if api_key_file:
        context["apiKeyFile"] = api_key_file
    message = f"context {name} is {context['gateway']}; make it current with `areal config use-context {name}`"
    with _changed(cli, message) as config:
        config.setdefault("contexts", {})[name] = context


@click.command()
@_context_name
@_speaking
def delete_context(cli: Invocation, name: str) -> None:
    """Remove the context NAME."""
    if name not in cli.contexts:
        raise _no_context(cli, name)
    with _changed(cli, f"context {name} is removed") as config:
        del config["contexts"][name]
        if config.get("currentContext") == name:
            del config["currentContext"]


@click.command("set")
@_default_name
@click.argument("value")
@_speaking
def set_(cli: Invocation, name: str, value: str) -> None:
    """Set the default NAME (output, service, timeout, lockTimeout) to VALUE."""
    check_default(name, value)
    with _changed(cli, f"{name} is {value}") as config:
        config.setdefault("defaults", {})[name] = value


@click.command()
@_default_name
@_speaking
def unset(cli: Invocation, name: str) -> None:
    """Remove the default NAME."""
    known = cli.config.get("defaults", {})
    if name not in known:
        raise NotFound(f'no default "{name}" is set{did_you_mean(name, known)}')
    with _changed(cli, f"{name} is not set any more") as config:
        del config["defaults"][name]


@click.command()
@print_options
def path(cli: Invocation) -> None:
    """Print where the configuration file is."""
    where = str(cli.home.config)
    emit_one(cli, {"path": where}, name=where, text=lambda: where)


def _no_context(cli: Invocation, name: str) -> NotFound:
    known = [*cli.contexts, LOCAL]
    return NotFound(f'no context "{name}"{did_you_mean(name, known)}', hint=f"there are: {', '.join(known)}")


@contextmanager
def _changed(cli: Invocation, message: str) -> Iterator[dict[str, Any]]:
    """Yield a copy of the configuration to change in place. At the end, writes it and prints ``message``."""
    from areal.state.files import write_atomic

    config = copy.deepcopy(dict(cli.config))
    yield config
    cli.home.ensure()
    write_atomic(cli.home.config, config_text(config))
    write(message)


SHELLS = ("bash", "zsh", "fish")

_INSTALL = {
    "bash": 'add to ~/.bashrc: eval "$(areal completion bash)"',
    "zsh": 'add to ~/.zshrc: eval "$(areal completion zsh)"',
    "fish": "areal completion fish > ~/.config/fish/completions/areal.fish",
}


@click.command()
@click.argument("shell", required=False, type=click.Choice(SHELLS))
@print_options
def completion(cli: Invocation, shell: str | None) -> None:
    """Print the completion script of SHELL (default: the shell you are in)."""
    chosen = shell or os.environ.get("SHELL", "").rpartition("/")[2]
    if chosen not in SHELLS:
        raise UsageFault(
            f"no completion for the shell {chosen or '(unknown)'!r}", hint=f"name one of {', '.join(SHELLS)}"
        )
    script = _script(chosen)
    emit_one(cli, {"shell": chosen, "script": script}, name=chosen, text=lambda: script)
    if cli.format.is_table and not cli.quiet and os.isatty(1):
        cli.info(_INSTALL[chosen])


def _script(shell: str) -> str:
    from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

    class _Bash(BashComplete):
        @staticmethod
        def _check_version() -> None:
            """Skips click's check of the first bash on PATH: another bash may read the script."""

    root = click.get_current_context().find_root().command
    makers: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": ZshComplete, "fish": FishComplete}
    script = makers[shell](root, {}, "areal", "_AREAL_COMPLETE").source()
    return script.replace('string split ","', 'string split -m 1 ","')  # click's cuts a description at its first comma


@click.command()
@print_options
def version(cli: Invocation) -> None:
    """Print the version of areal and of the Python that runs it."""
    python = ".".join(str(part) for part in sys.version_info[:3])
    document = {"version": __version__, "python": python, "platform": sys.platform}
    emit_one(cli, document, name=f"areal/{__version__}", text=lambda: f"areal {__version__}")
