"""``areal reconcile``: heal drift, once or in the foreground."""

from __future__ import annotations

import click

from areal.cli import options
from areal.cli.acting import acting, finish
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.options import Seconds
from areal.cli.targets import complete_targets, parse_refs
from areal.errors import ArealError


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME]...", shell_complete=complete_targets)
@click.option("-w", "--watch", is_flag=True, help="Stay in the foreground and go on until Ctrl-C.")
@click.option("--interval", type=Seconds(), default="10s", show_default=True, metavar="TIME", help="Between rounds.")
@options.yes
@options.timeout("10m")
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def reconcile(cli: Invocation, targets: tuple[str, ...], watch: bool, interval: float) -> int:
    """Compare what is recorded with what is alive, and heal the difference; no manifests are read."""
    from areal.reconcilers.reconcile import reconcile_once

    refs = tuple(parse_refs(targets)) or None
    with acting(cli) as context:
        if not watch:
            outcome = reconcile_once(context, refs)
        else:
            cli.say(f"watching every {interval:g} s; Ctrl-C ends it")
            while not context.interrupted.is_set():
                try:
                    done = reconcile_once(context, refs)
                except ArealError as error:
                    from areal.cli.failures import report

                    report(error, cli)
                else:
                    changed = [item for item in done.objects if item.action != "unchanged"]
                    if changed or done.notes:
                        finish(cli, done)
                context.interrupted.wait(interval)
            return 130
    return finish(cli, outcome, interrupted=context.interrupted.is_set())
