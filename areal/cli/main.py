"""Entry point of ``areal``: parse, call one verb, turn what it raises into one message and an exit code.

Imports nothing but click, the options and the static tree: this is the cost of ``areal --help`` and of completion.
"""

from __future__ import annotations

import gc
import io
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from areal.cli.options import Invocation, global_options
from areal.cli.tree import ROOT, Branch, Leaf
from areal.interrupt import STATUS, is_interrupt
from areal.terminal import guarded

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


# -- groups that import a command when it is used

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
        from areal.errors import did_you_mean

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


_BROKEN_PIPE = 141
_COMPLETE = "_AREAL_COMPLETE"


@click.group(cls=LazyGroup, table=ROOT, context_settings=CONTEXT_SETTINGS)
@global_options
def cli() -> None:
    """kubectl for LLM reinforcement learning, with no cluster and no daemon underneath.

    Write resources in YAML; `areal apply` makes the processes agree with them.
    """


def main() -> int:
    """The console script. The process ends here, so the collector is told that nothing is left to look at: the
    interpreter's last collections would cost a short command a tenth of its time."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            # A name that the terminal cannot show, half a surrogate pair of an answer: no reason to fail.
            utf8 = stream.encoding.lower() in ("utf-8", "utf8")
            stream.reconfigure(errors="backslashreplace" if utf8 else "replace")
    status = run()
    gc.freeze()
    return status


def run(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status (docs/reference/cli.md)."""
    with guarded():
        return _run(args)


def _run(args: Sequence[str] | None) -> int:
    invocation = Invocation()
    instruction = os.environ.get(_COMPLETE)
    if instruction:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {"obj": invocation}, "areal", _COMPLETE, instruction)
    try:
        status = _invoke(list(sys.argv[1:] if args is None else args), invocation)
        sys.stdout.flush()
    except click.Abort:
        return STATUS
    except BrokenPipeError:
        # The reader of our pipe left: the interpreter's last flush must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every failure becomes a message and a status
        if isinstance(error, KeyboardInterrupt) or is_interrupt(error):
            invocation.say("interrupted")
            return STATUS
        from areal.cli.output import report

        return report(error, invocation)
    return status


def _invoke(args: list[str], invocation: Invocation) -> int:
    """Not ``cli.main``: that one turns a closed pipe into exit status 1."""
    try:
        with cli.make_context("areal", args, obj=invocation) as ctx:
            result = cli.invoke(ctx)
    except click.exceptions.Exit as done:
        return done.exit_code
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
