"""``areal adopt``: take what already runs under management."""

from __future__ import annotations

import click

from areal.cli import options
from areal.cli.acting import acting, finish
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.remote import checked_url
from areal.cli.targets import complete_targets, parse_refs
from areal.errors import UsageFault


@click.command()
@click.argument("target", required=False, metavar="[KIND/NAME]", shell_complete=complete_targets)
@click.option("--pid", type=click.IntRange(min=1), metavar="PID", help="A process of this machine.")
@click.option("--url", metavar="URL", help="An OpenAI-compatible server.")
@click.option("--as", "as_", metavar="KIND/NAME", shell_complete=complete_targets, help="What it becomes.")
@options.timeout("10m")
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def adopt(cli: Invocation, target: str | None, pid: int | None, url: str | None, as_: str | None) -> int:
    """Take a running process or URL under management, without restarting it.

    \b
    areal adopt --url http://10.0.0.7:8000 --as model/qwen
    areal adopt --pid 4711 --as model/qwen
    """
    name = as_ or target
    if name is None or (as_ and target and as_ != target):
        raise UsageFault("say what it becomes: --as KIND/NAME", hint="areal adopt --url URL --as model/NAME")
    if (pid is None) == (url is None):
        raise UsageFault("give one of --pid and --url")
    (ref,) = parse_refs([name])
    address = checked_url(url) if url else None
    from areal.reconcilers import operations

    with acting(cli) as context:
        outcome = operations.adopt(context, ref, pid=pid, url=address)
    return finish(cli, outcome, interrupted=context.interrupted.is_set())
