"""Do one op of a plan: journal it, do it, journal that it is done. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from areal.errors import ArealError
from areal.reconcilers import process_effects as processes
from areal.reconcilers import route_effects as routes
from areal.reconcilers.hands import Hands
from areal.reconcilers.model_data import dispose_of_data
from areal.reconcilers.model_files import COMMITS
from areal.reconcilers.plan import Op, Verb
from areal.resources.kinds import parse_ref
from areal.state.records import new_uid

Effect = Callable[[Hands, Op, int], None]


def perform(hands: Hands, op: Op) -> None:
    """Raises ArealError when it fails; only a death in the middle leaves the operation open in the journal."""
    number = hands.tx.begin(op.verb.value, ref=op.ref, target=op.target, run=hands.uid(op.run))
    try:
        _EFFECTS[op.verb](hands, op, number)
    except ArealError:
        hands.tx.end(number, failed=True)
        raise
    hands.tx.end(number)


def record(hands: Hands, op: Op, number: int) -> None:
    """Write the object as accepted: who, when, under which revision."""
    target, now = hands.targets[op.ref], time.time()
    layers = tuple(
        layer if layer.at else replace(layer, at=now, actor=layer.actor or hands.ctx.actor)
        for layer in target.object.layers
    )
    stamped = replace(
        target.object,
        uid=target.object.uid or new_uid(),
        created_at=target.object.created_at or now,
        layers=layers,
    )
    stamped = hands.store.add_revision(stamped, actor=hands.ctx.actor, at=now)
    hands.store.put(stamped, keeps=(COMMITS,))  # another op of this plan may have written those
    hands.event(op.ref, "Normal", "Created" if target.action in ("create", "replace") else "Configured", op.cause)


def erase(hands: Hands, op: Op, number: int) -> None:
    """Delete the object, and what its processes recorded, unless that would be a loss."""
    ref = parse_ref(op.ref)
    kept = dispose_of_data(hands.ctx.home, ref) if ref.kind == "Model" else None
    hands.store.delete(ref)
    if kept is not None:
        hands.note(kept)


_EFFECTS: dict[Verb, Effect] = {
    Verb.RECORD: record,
    Verb.SPAWN: processes.spawn,
    Verb.KICK: processes.kick,
    Verb.AWAIT: processes.await_ready,
    Verb.WARM: processes.warm,
    Verb.ROUTE: routes.route,
    Verb.CONFIGURE: routes.configure,
    Verb.SYNC: routes.synced,
    Verb.SETTLE: routes.settle,
    Verb.SOAK: processes.soak,
    Verb.DRAIN: routes.drain,
    Verb.UNROUTE: routes.unroute,
    Verb.STOP: processes.stop,
    Verb.FORGET: processes.forget,
    Verb.ERASE: erase,
}
assert _EFFECTS.keys() == set(Verb)
