"""What every ``areal inf`` verb that changes something does with its manifests: print them, or apply them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from areal.cli.acting import acting, approver, finish, timeout_s
from areal.cli.dryrun import print_manifests
from areal.cli.invocation import Invocation
from areal.cli.output.emit import write
from areal.resources.kinds import Ref

if TYPE_CHECKING:
    from areal.reconcilers.requests import ApplyRequest
    from areal.state.records import StoredObject


def converge(
    cli: Invocation,
    manifests: Sequence[Mapping[str, Any]],
    *,
    what: str,
    dry_run: str | None = None,
    force: bool = False,
    timeout: float | None = None,
) -> int:
    """Apply ``manifests`` as one request. ``force`` replaces what cannot be changed and takes fields in conflict."""
    if dry_run and (dry_run == "client" or not cli.format.is_table):
        print_manifests(cli, manifests, "(dry run)")
        return 0
    request = _request(cli, manifests, force, timeout)
    if dry_run:
        return _plan(cli, request)
    from areal.reconcilers.apply import apply

    if force:
        cli.yes = True
    with acting(cli) as context:
        outcome = apply(context, request, approver(cli, what))
    return finish(cli, outcome, interrupted=context.interrupted.is_set())


def _request(
    cli: Invocation, manifests: Sequence[Mapping[str, Any]], force: bool, timeout: float | None
) -> ApplyRequest:
    from areal.reconcilers.requests import ApplyRequest, Source

    return ApplyRequest(
        source=Source(manifests=tuple(manifests)),
        replace=force,
        force_conflicts=force,
        allow_downtime=force,
        timeout_s=timeout if timeout is not None else timeout_s(cli),
    )


def _plan(cli: Invocation, request: ApplyRequest) -> int:
    from areal.reconcilers.apply import diff

    with acting(cli) as context:
        plan = diff(context, request)
    write(plan.to_text() or "no difference")
    return 0


def recorded(cli: Invocation, ref: Ref) -> StoredObject | None:
    from areal.state.objects import ObjectStore

    return ObjectStore(cli.home).get(ref)


def as_recorded(found: StoredObject) -> dict[str, Any]:
    """The manifest that the object was last applied from, to be changed by flags and applied again."""
    from areal.cli.view import manifest

    layer = next((layer for layer in found.layers if layer.manager == "apply"), None)
    return {**manifest(found), "spec": dict(layer.spec) if layer else {}}


def laid_over(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    from areal.resources.tree import merge

    merged: dict[str, Any] = merge(dict(base), dict(patch))
    return merged


def given(ctx: click.Context, *names: str) -> bool:
    """Whether any of these flags was written on the command line."""
    from click.core import ParameterSource

    return any(ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in names)
