"""Plan the replicas of an object, (engine, data proxy) each, behind a router. Pure.

In order: restore routes that the router lost; start missing replicas side by side, and route them when all are warm;
drain and stop superfluous ones; replace changed ones, new beside old if there is room. No replica is stopped before its
successor is routed and it is drained itself, unless the strategy says so or there is no room for two; the plan then
says so, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from areal.errors import NoCapacity
from areal.reconcilers.kinds.replicas import PROXY, Extras, Replica, ReplicaWork, extras_of, not_replaced, with_callers
from areal.reconcilers.observe import ObservedRun, Seen
from areal.reconcilers.plan import FEWER_REPLICAS, Drift, SettleRoutes, SoakRuns, Verb
from areal.reconcilers.planning import Action, stoppable, unseen
from areal.wire.routing import Snapshot


def replace_all(work: ReplicaWork, replicas: Sequence[Replica], last: tuple[int, ...]) -> tuple[int, ...]:
    """Plan the replacement of ``replicas`` after the ops ``last``. Return the last ops."""
    if not replicas:
        return last
    if work.strategy.type == "Recreate":
        work.downtime(f"all {len(replicas)} replicas stop before their successors start (strategy Recreate)")
        return _recreate(work, replicas, last)
    if work.strategy.type == "BlueGreen":
        need = work.need * _new_engines(replicas)
        message = f": blue-green needs {need} spare GPUs for a second set"
        work.require_gpus(need, message, "use strategy: {type: Rolling}")
        return _surge(work, replicas, last)
    for starts_engine in (False, True):  # those that need no GPUs first
        left = {replica.index: replica for replica in replicas if replica.new_engine is starts_engine}
        while left:
            size = _surge_size(work, starts_engine)
            batch = list(islice(left.values(), size)) if size else _first_to_stop(work, left.values())
            last = _surge(work, batch, last) if size else _recreate(work, batch, last)
            for replica in batch:
                del left[replica.index]
    return last


def _surge_size(work: ReplicaWork, starts_engine: bool) -> int:
    """Return the number of successors that can start now beside the old replicas; 0: an old one has to stop first."""
    declared = work.strategy.max_surge
    if not starts_engine or not work.need or work.queues:
        return 1 if declared == "auto" else int(declared)
    room = work.gpus.available // work.need
    return room if declared == "auto" else min(room, int(declared))


def _first_to_stop(work: ReplicaWork, left: Collection[Replica]) -> list[Replica]:
    """Return the replicas that stop before their successors start: those that do not serve, or else
    ``max_unavailable``.

    Raises NoCapacity if that is the only replica and downtime is not allowed.
    """
    broken = [replica for replica in left if not replica.serves]
    if broken:
        return broken
    unavailable = max(1, work.max_unavailable)
    if work.count > 1:
        work.downtime(f"capacity during the rollout is {work.count - unavailable}/{work.count}: no spare GPU")
    elif work.policy.allow_downtime or work.max_unavailable:
        work.downtime("the only replica stops before its successor starts: no spare GPU")
    else:
        raise NoCapacity(
            f"{work.ref}: a rolling update of one replica needs {work.need} spare GPUs; {work.gpus.available} are free",
            hint="use strategy: {type: Recreate} or --allow-downtime to stop the old replica first",
        )
    return list(islice(left, unavailable))


def _surge(work: ReplicaWork, batch: Sequence[Replica], last: tuple[int, ...]) -> tuple[int, ...]:
    """Replace a batch with new beside old: start, warm up, route, soak, then drain and stop the old replicas. They keep
    their sessions until they are drained; a data proxy that stops leaves its sessions to the others."""
    cause = f"replaced: {_cause(batch)}"
    new, warm = _start_successors(work, batch, last or work.before_start, beside=True)
    old = _routed_of(work, _old_proxies(batch))
    switch = work.strategy.type == "BlueGreen"  # one change of the table: from then on only the new set is picked
    work.routed = [*work.routed, *new]
    work.cordoned = old if switch else []
    needs: tuple[int, ...] = (work.route(f"successors are warm: {_cause(batch)}", (*warm, *last)),)
    seconds = max(work.strategy.min_ready_seconds, work.strategy.keep_old_seconds if switch else 0.0)
    if seconds:
        soak = SoakRuns(seconds)
        needs = (work.build.add(Verb.SOAK, work.ref, "routes", "must stay ready", needs=needs, runs=new, args=soak),)
    needs = work.drain(old, needs, cause)
    if old:
        work.routed, work.cordoned = _without(work.routed, old), []
        needs = (work.route("the old ones are drained", needs),)
    return _retire(work, batch, needs, cause)


def _recreate(work: ReplicaWork, batch: Sequence[Replica], last: tuple[int, ...]) -> tuple[int, ...]:
    """Replace a batch with old before new: drain, stop, start. There is no room for both, or the user chose it."""
    cause = f"makes room: {_cause(batch)}"
    needs = last or work.recorded
    old = _routed_of(work, _old_proxies(batch))
    if old:
        needs = work.drain(old, needs, cause)
        work.routed = _without(work.routed, old)
        needs = (work.route(cause, needs),)
    needs = _retire(work, batch, needs, cause)
    new, warm = _start_successors(work, batch, needs, beside=False)
    work.routed += new
    return (work.route("successors are warm", warm),)


def _start_successors(
    work: ReplicaWork, batch: Sequence[Replica], needs: tuple[int, ...], *, beside: bool
) -> tuple[list[str], tuple[int, ...]]:
    """Start the successors. Return the new data proxies, and the ops after which they are warm."""
    new: list[str] = []
    warmed: list[int] = []
    for replica in batch:
        proxy, ready = work.start_replica(replica, needs, successor=beside)
        warmed += work.warm(replica, proxy, ready)
        new.append(proxy)
    return new, tuple(warmed)


def _retire(work: ReplicaWork, batch: Sequence[Replica], needs: tuple[int, ...], cause: str) -> tuple[int, ...]:
    """Stop the old data proxies, then the old engines."""
    last = work.stop_all(_old_proxies(batch), cause, (*needs, *work.service.synced))
    return work.stop_all([replica.old_engine for replica in batch if replica.old_engine], cause, last)


def _routed_of(work: ReplicaWork, proxies: Sequence[ObservedRun]) -> list[str]:
    routed = set(work.routed)
    return [run.uid for run in proxies if run.uid in routed]


def _without(routed: Sequence[str], removed: Collection[str]) -> list[str]:
    removed = set(removed)
    return [uid for uid in routed if uid not in removed]


def _old_proxies(batch: Sequence[Replica]) -> list[ObservedRun]:
    return [run for replica in batch for run in replica.old_proxies]


def _cause(batch: Sequence[Replica]) -> str:
    first = batch[0]
    decisive = next(decision for decision in reversed(first.decisions) if decision.action is Action.REPLACE)
    return decisive.cause


def open_replicas(work: ReplicaWork) -> None:
    """Plan the first half: decide about each replica, and route to those that serve if the router lost them. A neighbor
    is only routed. Nothing is done behind a router that cannot be observed."""
    if work.service.router_unseen or (work.routes_only and (work.suspended or not work.table_lost)):
        work.routes_only = True
        return
    if work.routes_only:
        work.routed = [run.uid for run in _proxies(work) if run.is_live and run.seen is Seen.READY]
    else:
        work.replicas = with_callers([work.replica(index) for index in range(work.count)], work.runs)
        work.extras = extras_of(work.runs, work.replicas)
        if not work.table_readable:
            work.replicas, work.extras = [not_replaced(replica) for replica in work.replicas], Extras()
        work.routed = _routed_now(work)
    if work.routed and work.table_readable and (cause := _lost_routes(work)):
        work.restored = (work.route(cause, work.recorded),)


def close_replicas(work: ReplicaWork) -> None:
    """Plan the second half: start missing replicas, stop superfluous ones, replace outdated ones. Raises NoCapacity."""
    if work.routes_only:
        return
    work.notes.cannot_see(work.ref, [run for run in unseen(work.runs) if run.replica >= work.count])
    work.sweep()
    fresh = [replica for replica in work.replicas if not replica.replaced]
    replaced = [replica for replica in work.replicas if replica.replaced]
    early, late, last = work.extras.early, work.extras.late, work.restored
    new = _new_engines(fresh)
    if early and new * work.need > work.gpus.available:
        if any(run.seen is Seen.READY for run in early):
            work.downtime(f"superfluous replicas stop before the {work.count} wanted ones are ready: no spare GPU")
        last, early = _remove(work, early, last, "makes room"), ()
    work.require_gpus(
        new * work.need, f" needs {new * work.need} GPUs for {new} new replica{'s' if new > 1 else ''}", FEWER_REPLICAS
    )
    last = _start_missing(work, fresh, last)
    if any(replica.proxy.action is Action.DEFER for replica in fresh):
        return  # the superfluous replicas serve until the new ones do: the next pass continues
    if not all(replica.serves for replica in replaced):
        early, late = (), (*early, *late)  # until all is replaced they may be all that serves
    last = _remove(work, early, last, _extra_cause(work))
    last = replace_all(work, replaced, last)
    last = _remove(work, late, last, _extra_cause(work))
    _forget_routes(work, last)


def _proxies(work: ReplicaWork) -> tuple[ObservedRun, ...]:
    return work.observed.of(work.ref, PROXY)


def _routed_now(work: ReplicaWork) -> list[str]:
    """Return the data proxies that serve: the initial routed set. A routed one that cannot be observed stays in it."""
    ours = [replica.live_proxy for replica in work.replicas if replica.live_proxy is not None]
    serving = [run.uid for run in ours if run.uid in work.known or run.seen is Seen.READY]
    unsure = work.service.needs_sync  # relays may still pick workers that the router does not know
    others = [
        run.uid
        for run in _proxies(work)
        if run.may_live and (run.uid in work.known or (unsure and run.seen is Seen.READY))
    ]
    return list(dict.fromkeys([*serving, *others]))


def _lost_routes(work: ReplicaWork) -> str:
    """Return why the router needs the current routes at once; "" if it does not."""
    missing = _without(work.routed, work.known)
    extra = sorted(_without(list(work.known), work.routed))
    if missing:
        message = f"{len(missing)} of {len(work.routed)} replicas are not in the router's table"
        return _note_drift(work, "route-missing", message)
    if extra:
        return _note_drift(work, "route-extra", f"the router knows workers that are not ours: {', '.join(extra)}")
    wanted = {run.uid for run in _proxies(work) if run.replica < work.count and run.is_live}
    draining = [uid for uid in work.routed if work.known[uid] in ("draining", "cordoned") and uid in wanted]
    if draining:
        return "a drain was interrupted"
    serving = {run.uid for run in _proxies(work) if run.seen is Seen.READY}
    dead = [uid for uid in work.routed if work.known[uid] == "dead" and uid in serving and not work.routes_only]
    if dead:
        message = f"{len(dead)} of {len(work.routed)} replicas are ready, and the router does not hear from them"
        return _note_drift(work, "route-dead", message)
    is_current = work.entry is None or work.entry.readiness == work.readiness
    return "" if is_current else "probes.readiness changed"


def _note_drift(work: ReplicaWork, kind: str, message: str) -> str:
    """Note drift, unless this plan itself restarts the router. Return the cause of the op."""
    if work.service.table is not None:
        work.notes.drift.append(Drift(work.ref, kind, "routes", message))
    return f"{kind}: {message}"


def _new_engines(replicas: Sequence[Replica]) -> int:
    return sum(1 for replica in replicas if replica.new_engine)


def _start_missing(work: ReplicaWork, replicas: Sequence[Replica], last: tuple[int, ...]) -> tuple[int, ...]:
    """Start missing processes of slots that need no replacement, and route to them when all are warm."""
    ready: list[int] = []
    joining: list[str] = []
    warm: list[int] = []
    routed = set(work.routed)
    for replica in replicas:
        proxy, mine = work.start_replica(replica, work.before_start)
        ready += mine
        stays_out = replica.proxy.action in (Action.LEAVE, Action.DEFER) or not work.table_readable
        if proxy not in routed and not stays_out:
            joining.append(proxy)
            warm += work.warm(replica, proxy, mine)
    if not joining:
        return work.build.barrier(work.ref, "what runs already is ready", (*last, *ready))
    work.routed += joining
    return (work.route("new replicas are ready", (*last, *ready, *warm)),)


def _extra_cause(work: ReplicaWork) -> str:
    return "suspended" if work.suspended else f"not one of {work.count} replicas"


def _remove(work: ReplicaWork, runs: Sequence[ObservedRun], last: tuple[int, ...], cause: str) -> tuple[int, ...]:
    """Drain, unroute and stop ``runs``."""
    if not runs:
        return last
    needs = (*(last or work.recorded), *work.service.synced)
    proxies = [run for run in runs if run.state.spec.component == PROXY]
    routed = _routed_of(work, proxies)
    if routed and work.service.router:
        needs = work.drain(routed, needs, cause)
        work.routed = _without(work.routed, routed)
        needs = (work.route(cause, needs) if work.routed else work.unroute(cause, needs, declared=not work.count),)
    needs = work.stop_all(proxies, cause, (*needs, *work.service.gateway_stopped))
    return work.stop_all([run for run in runs if run.state.spec.component != PROXY], cause, needs)


def _forget_routes(work: ReplicaWork, last: tuple[int, ...]) -> None:
    """Declare at the router that an object has no replicas, even if its processes ended by themselves."""
    has_none = work.entry is not None and not work.entry.workers
    if work.count or work.routed or not isinstance(work.service.table, Snapshot) or has_none:
        return  # runs that cannot be observed are in ``routed``
    if not any(op.verb is Verb.UNROUTE for op in work.build.ops_of(work.ref)):
        work.unroute(_extra_cause(work), last or work.recorded, declared=True)


def settle(work: ReplicaWork) -> None:
    """Wait until the gateway lists the object."""
    changed = [op.id for op in work.build.ops_of(work.ref) if op.verb in (Verb.ROUTE, Verb.AWAIT)]
    if not changed or not work.routed or not work.count:
        return
    if work.service.gateway_unseen or not work.table_readable:
        return
    needs = (*changed, *work.service.gateway_ready, *work.service.router_ready)
    args = SettleRoutes(work.service.ref, work.trainer)
    work.build.add(Verb.SETTLE, work.ref, "routes", "users ask the gateway", needs=needs, args=args)


def end_replicas(work: ReplicaWork, needs: tuple[int, ...]) -> int:
    """Delete an object: drain and unroute while the service stays, then stop, forget, erase. Return the last op.

    The router's ops are in ``after``, not ``needs``: a router that does not answer must not prevent the deletion.
    """
    cause, runs = work.end_cause, stoppable(work.runs)
    after: tuple[int, ...] = ()
    if work.service.router and not work.service.is_deleted:
        proxies = [run.uid for run in runs if run.state.spec.component == PROXY and run.is_live]
        seconds = work.policy.drain_s(work.drain_s)
        drains = work.drain(proxies, (), cause, seconds=seconds)
        after = (work.unroute(cause, work.service.synced, after=drains),)
    return work.erase(stop_replicas(work, needs, after), after)


def stop_replicas(work: ReplicaWork, needs: tuple[int, ...], after: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Stop all data proxies, then all engines."""
    runs, last = stoppable(work.runs), needs
    for name in (PROXY, work.engine_name):
        stops = work.stop_component(name, runs, work.end_cause, last, work.policy.grace, after)
        last = work.build.barrier(work.ref, work.end_cause, stops)
    return last
