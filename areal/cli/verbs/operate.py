"""``areal scale``, ``restart``, ``suspend``, ``resume``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from areal.cli import options
from areal.cli.acting import acting, finish, timeout_s
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.targets import complete_names, complete_targets, one_ref, parse_refs
from areal.errors import ArealError

if TYPE_CHECKING:
    from areal.reconcilers.context import Outcome
    from areal.resources.kinds import Ref

_targets = click.argument(
    "targets", nargs=-1, required=True, metavar="KIND/NAME | KIND NAME", shell_complete=complete_targets
)


@click.command()
@_targets
@click.option("--replicas", type=click.IntRange(min=0), required=True, metavar="N", help="How many there shall be.")
@click.option("--model", metavar="NAME", shell_complete=complete_names("Model"), help="Which model of a service.")
@click.option("--current", type=click.IntRange(min=0), metavar="N", help="Only when N is the present number (exit 5).")
@click.option("--force-conflicts", is_flag=True, help="Take the field when another layer holds it.")
@options.timeout("10m")
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def scale(
    cli: Invocation,
    targets: tuple[str, ...],
    replicas: int,
    model: str | None,
    current: int | None,
    force_conflicts: bool,
) -> int:
    """Set the number of replicas. A later apply of a manifest that says another number is a conflict."""
    ref = one_ref(targets)
    from areal.reconcilers import operations

    with acting(cli) as context:
        outcome = operations.scale(
            context,
            ref,
            replicas,
            model=model,
            current=current,
            force=force_conflicts,
            timeout_s=timeout_s(cli),
        )
    return finish(cli, outcome, interrupted=context.interrupted.is_set())


@click.command()
@_targets
@options.timeout("10m")
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def restart(cli: Invocation, targets: tuple[str, ...]) -> int:
    """Restart an object's processes: the new beside the old, then the old drains, where there is room."""
    return _each(cli, targets, "restart")


@click.command()
@_targets
@options.timeout("10m")
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def suspend(cli: Invocation, targets: tuple[str, ...]) -> int:
    """Stop an object's processes and keep the object; `areal resume` starts them again."""
    return _each(cli, targets, "suspend")


@click.command()
@_targets
@options.timeout("10m")
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def resume(cli: Invocation, targets: tuple[str, ...]) -> int:
    """Start a suspended object again."""
    return _each(cli, targets, "resume")


def _each(cli: Invocation, targets: tuple[str, ...], verb: str) -> int:
    """One after the other; what fails on one object is reported beside what was done to the others."""
    refs = parse_refs(targets)
    from areal.reconcilers import operations

    operation = {"restart": operations.restart, "suspend": operations.suspend, "resume": operations.resume}[verb]
    outcomes = []
    with acting(cli) as context:
        for ref in refs:
            try:
                outcomes.append(operation(context, ref, timeout_s=timeout_s(cli)))
            except ArealError as error:
                if len(refs) == 1:
                    raise
                outcomes.append(_failed(ref, error))
            if context.interrupted.is_set():
                break
    return finish(cli, together(outcomes), interrupted=context.interrupted.is_set())


def _failed(ref: Ref, error: ArealError) -> Outcome:
    from areal.reconcilers.context import ObjectOutcome, Outcome

    return Outcome(
        (ObjectOutcome(str(ref), "failed", error.message, error.exit_code, error),), exit_code=error.exit_code
    )


def together(outcomes: list[Outcome]) -> Outcome:
    """Several outcomes as one, with the status that the exit table gives them; of an object, what was done last."""
    from areal.errors import worst_exit
    from areal.reconcilers.context import Outcome

    objects = {item.ref: item for outcome in outcomes for item in outcome.objects if item.action == "unchanged"}
    objects.update({item.ref: item for outcome in outcomes for item in outcome.objects if item.action != "unchanged"})
    return Outcome(
        objects=tuple(objects.values()),
        notes=tuple(note for outcome in outcomes for note in outcome.notes),
        exit_code=worst_exit([outcome.exit_code for outcome in outcomes]),
        addresses={ref: url for outcome in outcomes for ref, url in outcome.addresses.items()},
    )
