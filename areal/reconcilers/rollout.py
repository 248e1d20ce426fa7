"""Replace replicas that are no longer what is wanted: new beside old where there is room, old before new where there
is none. Pure.

Nothing is stopped before its successor is routed and it is drained itself, unless the strategy, or a machine with no
room for two, says so; and then the plan says so too.
"""

from __future__ import annotations

from collections.abc import Sequence

from areal.errors import NoCapacity
from areal.reconcilers.components import Action
from areal.reconcilers.model_work import ModelWork
from areal.reconcilers.observed import ObservedRun
from areal.reconcilers.plan import Verb
from areal.reconcilers.replicas import PROXY, Replica


def replace_all(work: ModelWork, replicas: Sequence[Replica], last: tuple[int, ...]) -> tuple[int, ...]:
    """Ops that replace ``replicas``; the last of them."""
    if not replicas:
        return last
    if work.strategy.type == "Recreate":
        work.downtime(f"all {len(replicas)} replicas stop before their successors start (strategy Recreate)")
        return _recreate(work, replicas, last)
    if work.strategy.type == "BlueGreen":
        _require_second_set(work, replicas)
        return _surge(work, replicas, last)
    left = list(replicas)
    while left:
        size = _surge_size(work, left)
        batch = left[:size] if size else _given_up(work, left)
        last = _surge(work, batch, last) if size else _recreate(work, batch, last)
        left = [replica for replica in left if replica not in batch]
    return last


def _require_second_set(work: ModelWork, replicas: Sequence[Replica]) -> None:
    need = work.need * sum(1 for replica in replicas if replica.new_engine)
    work.require_gpus(need, f": blue-green needs {need} spare GPUs for a second set", "use strategy: {type: Rolling}")


def _surge_size(work: ModelWork, left: Sequence[Replica]) -> int:
    """How many successors may run beside the old ones now; 0: something has to go first."""
    declared = work.strategy.max_surge
    if not work.need or not any(replica.new_engine for replica in left):
        return min(len(left), 1 if declared == "auto" else int(declared))
    room = work.gpus.available // work.need
    return min(len(left), room, room if declared == "auto" else int(declared))


def _given_up(work: ModelWork, left: Sequence[Replica]) -> list[Replica]:
    """The replicas that make room for their own successors: those that do not serve anyway, else as few as may be.

    Raises NoCapacity when that would be the only one, and nobody has allowed it.
    """
    broken = [replica for replica in left if not replica.serves]
    if broken:
        return broken
    unavailable = max(1, work.strategy.max_unavailable)
    if work.count > 1:
        work.downtime(f"capacity during the rollout is {work.count - unavailable}/{work.count}: no spare GPU")
    elif work.policy.allow_downtime or work.strategy.max_unavailable:
        work.downtime("the only replica stops before its successor starts: no spare GPU")
    else:
        raise NoCapacity(
            f"{work.ref}: a rolling update of one replica needs {work.need} spare GPUs; {work.gpus.available} are free",
            hint="use strategy: {type: Recreate} or --allow-downtime to stop the old replica first",
        )
    return list(left[:unavailable])


def _surge(work: ModelWork, batch: Sequence[Replica], last: tuple[int, ...]) -> tuple[int, ...]:
    """New beside old: start, warm, route in, soak, then drain and stop the old ones. Until they are drained the old
    ones go on with the sessions that they have; a data proxy that stops leaves them to the others."""
    cause = f"replaced: {_cause(batch)}"
    new, warm = _successors(work, batch, last or work.recorded, beside=True)
    old = [run.uid for run in _old_proxies(batch) if run.uid in work.routed]
    switch = work.strategy.type == "BlueGreen"  # one change of the table: from then on only the new set is picked
    work.routed = [*work.routed, *new]
    work.cordoned = old if switch else []
    needs: tuple[int, ...] = (work.route(f"successors are warm: {_cause(batch)}", (*warm, *last)),)
    needs = _soak(work, new, needs, switch=switch)
    needs = work.drain(old, needs, cause)
    if old:
        work.routed, work.cordoned = [uid for uid in work.routed if uid not in old], []
        needs = (work.route("the old ones are drained", needs),)
    return _retire(work, batch, needs, cause)


def _soak(work: ModelWork, new: Sequence[str], needs: tuple[int, ...], *, switch: bool) -> tuple[int, ...]:
    seconds = max(work.strategy.min_ready_seconds, work.strategy.keep_old_seconds if switch else 0.0)
    if not seconds:
        return needs
    soaked = work.build.add(
        Verb.SOAK, work.ref, "routes", "must stay ready", needs=needs, runs=new, args={"seconds": seconds}
    )
    return (soaked,)


def _recreate(work: ModelWork, batch: Sequence[Replica], last: tuple[int, ...]) -> tuple[int, ...]:
    """Old before new: drain, stop, start. There is no room for both, or the user asked for it."""
    cause = f"makes room: {_cause(batch)}"
    needs = last or work.recorded
    old = [run.uid for run in _old_proxies(batch) if run.uid in work.routed]
    if old:
        needs = work.drain(old, needs, cause)
        work.routed = [uid for uid in work.routed if uid not in old]
        needs = (work.route(cause, needs),)
    needs = _retire(work, batch, needs, cause)
    new, warm = _successors(work, batch, needs, beside=False)
    work.routed += new
    return (work.route("successors are warm", warm),)


def _successors(
    work: ModelWork, batch: Sequence[Replica], needs: tuple[int, ...], *, beside: bool
) -> tuple[list[str], tuple[int, ...]]:
    """Start the new engines (where they change) and data proxies: the proxies; the ops after which they are warm."""
    new: list[str] = []
    warmed: list[int] = []
    flag = {"successor": True} if beside else {}
    for replica in batch:
        engine_run, ready = "", tuple[int, ...]()
        if replica.engine is not None and replica.engine_component is not None:
            replaced = replica.engine.action is Action.REPLACE
            engine = work.start(replica.engine_component, replica.engine, needs, flag if replaced else None)
            engine_run, ready = engine.run, engine.ready
        args = {**({"engine": engine_run} if engine_run else {}), **flag}
        proxy = work.start(replica.proxy_component, replica.proxy, needs, args, ready)
        warmed += work.warm(replica, proxy.run, (*ready, *proxy.ready))
        new.append(proxy.run)
    return new, tuple(warmed)


def _retire(work: ModelWork, batch: Sequence[Replica], needs: tuple[int, ...], cause: str) -> tuple[int, ...]:
    """Stop the old data proxies, then the old engines."""
    last = work.stop_all(_old_proxies(batch), cause, (*needs, *work.service.synced))
    return work.stop_all([replica.old_engine for replica in batch if replica.old_engine], cause, last)


def _old_proxies(batch: Sequence[Replica]) -> list[ObservedRun]:
    return [run for replica in batch for run in replica.old_proxies]


def _cause(batch: Sequence[Replica]) -> str:
    first = batch[0]
    decisive = next(decision for decision in reversed(first.decisions) if decision.action is Action.REPLACE)
    return decisive.cause or f"{PROXY} replaced"
