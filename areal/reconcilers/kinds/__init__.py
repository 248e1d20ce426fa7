"""The kinds that can be reconciled: each has a controller, imported when it is first asked for."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from areal.resources.kinds import KINDS, Ref, load

if TYPE_CHECKING:
    from areal.reconcilers.kinds.base import KindController
    from areal.state.records import StoredObject


def controller_of(kind: str) -> KindController:
    return _controller(kind, KINDS[kind].controller)


def controllers() -> list[KindController]:
    """Of all kinds, those that others refer to first."""
    return [controller_of(info.kind) for info in sorted(KINDS.values(), key=lambda info: info.order)]


def host_of(item: StoredObject) -> str | None:
    """The object that ``item`` is attached to."""
    return controller_of(item.kind).host(item.spec)


def started_again_by(ref: Ref) -> str:
    """The command that starts an object again once it has failed for good."""
    return f"areal {'restart' if controller_of(ref.kind).runs_to_completion else 'reconcile'} {ref}"


@cache
def _controller(kind: str, path: str) -> KindController:
    controller: KindController = load(path)(kind)
    return controller
