"""``areal delete``."""

from __future__ import annotations

import click

from areal.cli import options
from areal.cli.acting import acting, approver, finish, require_approval, timeout_s
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.options import Seconds
from areal.cli.source import SourceFlags, source_options
from areal.cli.targets import complete_targets, parse_refs, select
from areal.errors import NotFound, UsageFault
from areal.resources.kinds import Ref


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME | KIND NAME]...", shell_complete=complete_targets)
@source_options
@click.option("-l", "--selector", metavar="SELECTOR", help="Of one kind, the objects with these labels.")
@click.option("--grace", type=Seconds(), metavar="TIME", help="Between SIGTERM and SIGKILL  [default: the object's].")
@click.option("--cascade", is_flag=True, help="Also delete what refers to the object.")
@click.option("--wait/--no-wait", default=True, help="Return when everything is gone  [default: wait].")
@click.option("--ignore-not-found", is_flag=True, help="An object that is not there is no error.")
@options.yes
@options.timeout("10m")
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def delete(
    cli: Invocation,
    targets: tuple[str, ...],
    source: SourceFlags,
    selector: str | None,
    grace: float | None,
    cascade: bool,
    wait: bool,
    ignore_not_found: bool,
) -> int:
    """Stop an object's processes, everything in their sessions, and forget the object."""
    if bool(targets) == (not source.is_empty):
        raise UsageFault("name the objects to delete, or give their manifests with -f", hint="areal delete model/qwen")
    require_approval(cli, "delete")
    refs = _refs(cli, targets, source, selector)
    if ignore_not_found:
        refs = [ref for ref in refs if _exists(cli, ref)]
    if not refs:
        cli.say("nothing to delete")
        return 0
    from areal.reconcilers.operations import delete as remove

    with acting(cli) as context:
        outcome = remove(
            context,
            refs,
            grace_s=grace,
            cascade=cascade,
            wait=wait,
            timeout_s=timeout_s(cli),
            approve=approver(cli, "delete"),
        )
    return finish(cli, outcome, interrupted=context.interrupted.is_set())


def _refs(cli: Invocation, targets: tuple[str, ...], source: SourceFlags, selector: str | None) -> list[Ref]:
    if not source.is_empty:
        resources = source.require("delete").render().resources
        return [Ref(item.kind, item.name) for item in reversed(resources)]
    if selector is not None:
        return select(cli.home, targets, selector)
    refs = parse_refs(targets)
    return list(dict.fromkeys(refs))


def _exists(cli: Invocation, ref: Ref) -> bool:
    from areal.cli.targets import stored

    try:
        stored(cli.home, ref)
    except NotFound:
        return False
    return True
