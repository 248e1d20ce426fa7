"""Click groups that import a command only when it is used."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from areal.cli.tree import Branch, Leaf

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

CONTEXT_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class LazyGroup(click.Group):
    """A group over a static table. Listing, help and completion of names read the table and import nothing."""

    def __init__(self, *args: Any, table: Mapping[str, Leaf | Branch], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        if isinstance(entry, Branch):
            text = f"{entry.help}\n\n{entry.text}".strip()
            return LazyGroup(name=cmd_name, table=entry.table, help=text, context_settings=CONTEXT_SETTINGS)
        return load(cmd_name, entry)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if ctx.resilient_parsing or args[0] in self.table or args[0].startswith("-"):
            return super().resolve_command(ctx, args)
        from areal.resources.suggest import did_you_mean

        raise click.UsageError(f'no such command "{args[0]}"{did_you_mean(args[0], self.table)}', ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit(0)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, entry in self.table.items():
            sections.setdefault(entry.section, []).append((name, entry.help))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        names = [
            CompletionItem(name, help=entry.help) for name, entry in self.table.items() if name.startswith(incomplete)
        ]
        return names + click.Command.shell_complete(self, ctx, incomplete)


def load(name: str, leaf: Leaf) -> click.Command:
    """Import the command behind ``leaf``. Its short help is the table's, so the two cannot disagree."""
    module_name, attribute = leaf.target.split(":")
    __import__(module_name)
    command = getattr(sys.modules[module_name], attribute)
    assert isinstance(command, click.Command), f"{leaf.target} is not a click command"
    command.name = name
    command.short_help = leaf.help
    return command
