"""``areal config``: contexts and defaults, in ``config.yaml`` of the home."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from areal.cli import options
from areal.cli.configfile import DEFAULTS, check_default, config_text, write_config
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.output.emit import emit_one, emit_rows, write
from areal.cli.output.table import Column, field
from areal.cli.remote import LOCAL, checked_url
from areal.errors import NotFound, UsageFault
from areal.resources.kinds import check_name
from areal.resources.suggest import did_you_mean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_CONTEXTS = (
    Column("CURRENT", lambda row: "*" if row["current"] else ""),
    field("NAME", "name"),
    field("GATEWAY", "gateway"),
    field("KEY-FILE", "apiKeyFile", wide=True),
)


def _complete_contexts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from areal.cli.configfile import read_config
    from areal.cli.targets import home_of

    names = [LOCAL, *(read_config(os.path.join(home_of(ctx), "config.yaml")).get("contexts") or {})]  # noqa: PTH118
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _complete_defaults(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(name, help=text) for name, text in DEFAULTS.items() if name.startswith(incomplete)]


_context_name = click.argument("name", shell_complete=_complete_contexts)


@click.command()
@options.output()
@options.common
@pass_invocation
def view(cli: Invocation) -> None:
    """Print the configuration as it is read."""
    emit_one(cli, cli.config, name=str(cli.home.config), text=lambda: config_text(cli.config))
    if not cli.config:
        cli.say(f"nothing is configured in {cli.home.config}")


@click.command()
@options.output()
@options.common
@pass_invocation
def get_contexts(cli: Invocation) -> None:
    """List contexts. 'local' is this machine's own state and always there."""
    current = _current(cli)
    rows = [{"name": LOCAL, "current": current == LOCAL, "gateway": None, "apiKeyFile": None}]
    for name, context in _contexts(cli).items():
        rows.append(
            {
                "name": name,
                "current": name == current,
                "gateway": context.get("gateway"),
                "apiKeyFile": context.get("apiKeyFile"),
            }
        )
    emit_rows(cli, rows, _CONTEXTS, name=lambda row: str(row["name"]))


@click.command()
@options.output()
@options.common
@pass_invocation
def current_context(cli: Invocation) -> None:
    """Print the current context's name."""
    name = _current(cli)
    emit_one(cli, {"name": name}, name=name, text=lambda: name)


@click.command()
@_context_name
@options.common
@pass_invocation
def use_context(cli: Invocation, name: str) -> None:
    """Make NAME the current context; 'local' is this home."""
    if name != LOCAL and name not in _contexts(cli):
        raise _no_context(cli, name)
    config = _copy(cli)
    config["currentContext"] = name
    if name == LOCAL:
        del config["currentContext"]
    _save(cli, config, f"context {name} is current")


@click.command()
@_context_name
@click.option("--gateway", required=True, metavar="URL", help="URL of the remote gateway.")
@click.option("--api-key-file", metavar="FILE", help="File on this machine that holds its key.")
@options.common
@pass_invocation
def set_context(cli: Invocation, name: str, gateway: str, api_key_file: str | None) -> None:
    """Add or change the context NAME: a remote gateway that read verbs then ask."""
    if check_name(name) == LOCAL:
        raise UsageFault("'local' always means this home", hint="choose another name")
    context = {"gateway": checked_url(gateway)}
    if api_key_file:
        context["apiKeyFile"] = api_key_file
    config = _copy(cli)
    config.setdefault("contexts", {})[name] = context
    _save(
        cli, config, f"context {name} is {context['gateway']}; make it current with `areal config use-context {name}`"
    )


@click.command()
@_context_name
@options.common
@pass_invocation
def delete_context(cli: Invocation, name: str) -> None:
    """Remove the context NAME."""
    if name not in _contexts(cli):
        raise _no_context(cli, name)
    config = _copy(cli)
    del config["contexts"][name]
    if config.get("currentContext") == name:
        del config["currentContext"]
    _save(cli, config, f"context {name} is removed")


@click.command("set")
@click.argument("name", shell_complete=_complete_defaults)
@click.argument("value")
@options.common
@pass_invocation
def set_(cli: Invocation, name: str, value: str) -> None:
    """Set the default NAME (output, service, timeout, lockTimeout) to VALUE."""
    config = _copy(cli)
    config.setdefault("defaults", {})[name] = check_default(name, value)
    _save(cli, config, f"{name} is {value}")


@click.command()
@click.argument("name", shell_complete=_complete_defaults)
@options.common
@pass_invocation
def unset(cli: Invocation, name: str) -> None:
    """Remove the default NAME."""
    config = _copy(cli)
    if name not in config.get("defaults", {}):
        raise NotFound(f'no default "{name}" is set{did_you_mean(name, config.get("defaults", {}))}')
    del config["defaults"][name]
    _save(cli, config, f"{name} is not set any more")


@click.command()
@options.output()
@options.common
@pass_invocation
def path(cli: Invocation) -> None:
    """Print where the configuration file is."""
    where = str(cli.home.config)
    emit_one(cli, {"path": where}, name=where, text=lambda: where)


def _current(cli: Invocation) -> str:
    return str(cli.context_flag or cli.config.get("currentContext") or LOCAL)


def _contexts(cli: Invocation) -> Mapping[str, Mapping[str, Any]]:
    return cli.config.get("contexts") or {}


def _no_context(cli: Invocation, name: str) -> NotFound:
    known = [*_contexts(cli), LOCAL]
    return NotFound(f'no context "{name}"{did_you_mean(name, known)}', hint=f"there are: {', '.join(known)}")


def _copy(cli: Invocation) -> dict[str, Any]:
    return copy.deepcopy(dict(cli.config))


def _save(cli: Invocation, config: Mapping[str, Any], said: str) -> None:
    cli.home.ensure()
    write_config(str(cli.home.config), config)
    write(said)
