"""What every ``areal inf`` verb that changes something does with its manifests: print them, or apply them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal.cli.acting import acting, approver, timeout_s
from areal.cli.dryrun import print_manifests
from areal.cli.invocation import Invocation
from areal.cli.output.emit import show
from areal.resources.kinds import Ref

if TYPE_CHECKING:
    from areal.reconcilers.context import Context, Outcome
    from areal.reconcilers.requests import ApplyRequest
    from areal.state.records import StoredObject


def preview(
    cli: Invocation, manifests: Sequence[Mapping[str, Any]], dry_run: str, *, force: bool = False, anew: str = ""
) -> int:
    """``--dry-run``: the plan as text, or with -o the manifests that the flags stand for."""
    if dry_run == "client" or not cli.format.is_table:
        print_manifests(cli, manifests, "(dry run)")
        return 0
    from areal.reconcilers.apply import diff

    with acting(cli) as context:
        plan = diff(context, _request(cli, manifests, force, None, anew))
    show(plan.to_text() or "no difference")
    return 0


def converge(
    cli: Invocation,
    context: Context,
    manifests: Sequence[Mapping[str, Any]],
    *,
    what: str,
    force: bool = False,
    timeout: float | None = None,
    anew: str = "",
) -> Outcome:
    """Apply ``manifests`` as one request. ``force`` replaces what cannot be changed and takes fields in conflict.
    ``anew``: the uid of what is replaced in any case."""
    from areal.reconcilers.apply import apply

    cli.yes = cli.yes or force or bool(anew)
    return apply(context, _request(cli, manifests, force, timeout, anew), approver(cli, what))


def _request(
    cli: Invocation, manifests: Sequence[Mapping[str, Any]], force: bool, timeout: float | None, anew: str
) -> ApplyRequest:
    from areal.reconcilers.requests import ApplyRequest, Source

    return ApplyRequest(
        source=Source(manifests=tuple(manifests)),
        replace=force,
        anew=(anew,) if anew else (),
        force_conflicts=force,
        allow_downtime=force,
        timeout_s=timeout if timeout is not None else timeout_s(cli),
    )


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
