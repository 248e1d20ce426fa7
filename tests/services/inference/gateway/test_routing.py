from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from areal.services.http.errors import ApiError
from areal.services.http.service import Metrics
from areal.services.inference.gateway.relay import Admission
from areal.services.inference.gateway.routing import LiveTable
from areal.services.inference.router.picking import CallKey
from areal.wire.routing import CORDONED, DEAD, DRAINING, READY, GatewayLimits, ModelEntry, Snapshot, WorkerEntry


def table(serial: int = 0, expected: int = 1, **states: str) -> Snapshot:
    workers = tuple(WorkerEntry(name, f"http://{name}:1", state) for name, state in states.items())
    return Snapshot("e", serial, True, models={"m": ModelEntry("m", workers, expected)})


def live(snapshot: Snapshot) -> LiveTable:
    live_table = LiveTable(GatewayLimits())
    live_table.apply(snapshot)
    return live_table


def routable(live_table: LiveTable, *, even_suspects: bool = False) -> set[str]:
    return {worker.id for worker in live_table.routable("m", even_suspects=even_suspects)}


async def test_only_ready_workers_of_a_published_model_are_routable() -> None:
    assert routable(live(table(a=READY, b=DRAINING, c=DEAD))) == {"a"}
    assert routable(live(table(expected=3, a=READY, b=READY))) == set()


async def test_session_call_goes_to_journal_holder() -> None:
    states = {"a": READY, "b": READY, "c": DRAINING, "d": CORDONED}
    workers = tuple(WorkerEntry(name, f"http://{name}:1", state, (f"tag-{name}",)) for name, state in states.items())
    live_table = live(Snapshot("e", 0, True, models={"m": ModelEntry("m", workers)}))

    def holders(tag: str, *, even_suspects: bool = True) -> list[str]:
        return [each.id for each in live_table.routable("m", even_suspects=even_suspects, tag=tag)]

    assert [holders(f"tag-{name}") for name in "abcde"] == [["a"], ["b"], [], ["d"], []]
    live_table.suspect("http://a:1")
    assert (holders("tag-a"), holders("tag-a", even_suspects=False)) == (["a"], [])


async def test_suspect_is_used_only_when_no_other_is_ready() -> None:
    live_table = live(table(a=READY, b=READY))
    live_table.suspect("http://a:1")
    assert routable(live_table) == {"b"}
    live_table.suspect("http://b:1")
    assert routable(live_table) == set()
    assert routable(live_table, even_suspects=True) == {"a", "b"}


async def test_suspicion_ends_with_successful_call() -> None:
    live_table = live(table(a=READY, b=READY))
    live_table.suspect("http://a:1")
    live_table.trust("http://a:1")
    assert routable(live_table) == {"a", "b"}


async def test_suspicion_ends_when_router_reports_worker_back() -> None:
    live_table = live(table(0, a=READY, b=READY))
    live_table.suspect("http://a:1")
    live_table.apply(table(1, a=READY, b=READY))
    assert routable(live_table) == {"b"}  # the router has not noticed anything yet
    live_table.apply(table(2, a=DEAD, b=READY))
    live_table.apply(table(3, a=READY, b=READY))
    assert routable(live_table) == {"a", "b"}


@pytest.mark.parametrize("strategy", ["auto", "prefix", "least_loaded", "round_robin"])
async def test_retry_picks_another_worker_from_cached_list(strategy: str) -> None:
    live_table = live(replace(table(a=READY, b=READY, c=READY), strategy=strategy))
    admission = Admission(live_table, Metrics().gauge("queued", "Queued.", ()))
    key = CallKey(1.0, b"beginning")
    seen = {(await admission.worker("m", key, {"http://a:1"}, 0.0)).id for _ in range(50)}
    assert seen and seen <= {"b", "c"}
    live_table.suspect("http://a:1")
    listed, lists = live_table.routable("m", even_suspects=True), list[object]()

    def pick(_: object, workers: Sequence[WorkerEntry], *rest: object) -> WorkerEntry:
        lists.append(workers)
        return workers[0]

    admission._picker.pick = pick  # type: ignore[assignment,method-assign]
    await admission.worker("m", key, {"http://a:1"}, 0.0)
    assert lists == [listed] and lists[0] is listed


async def test_waiters_wake_at_the_next_table() -> None:
    live_table = live(table(0))
    waiting = asyncio.create_task(live_table.changed(60.0), name="waiting")
    await asyncio.sleep(0)
    live_table.apply(table(1, a=READY))
    await asyncio.wait_for(waiting, 5)


async def test_omitted_model_is_400_among_several() -> None:
    live_table = live(table(a=READY))
    only = live_table.resolve(None)
    assert only is not None and only.name == "m"
    assert live_table.resolve("other") is None
    models = {name: ModelEntry(name) for name in ("x", "y")}
    live_table.apply(Snapshot("e", 1, True, models=models))
    with pytest.raises(ApiError, match="x, y"):
        live_table.resolve(None)


async def test_table_limits_override_defaults() -> None:
    live_table = LiveTable(GatewayLimits(max_body_bytes=5))
    live_table.apply(Snapshot("e", 0, True, limits={"request_timeout_seconds": 9}))
    assert live_table.limits == GatewayLimits(max_body_bytes=5, request_timeout_seconds=9.0)


def recording(
    *workers: WorkerEntry, orphans: tuple[str, ...] = (), synced: bool = True, learning: bool = False
) -> LiveTable:
    models = {"m": ModelEntry("m", workers, orphans=orphans)}
    return live(Snapshot("e", 0, synced, models=models, learning=learning))


async def test_journals_map_to_model_without_server() -> None:
    table = recording(WorkerEntry("a", "http://a:1", DEAD, ("aaaaaaaa",)), orphans=("oooooooo",))
    assert [table.model_of_journal(tag) for tag in ("aaaaaaaa", "oooooooo", "xxxxxxxx")] == ["m", "m", None]
    assert table.records


@pytest.mark.parametrize("engine", ["a", "z"])
async def test_journal_of_shared_data_proxy_belongs_to_engine_model(engine: str) -> None:
    worker = WorkerEntry("w", "http://w:1", READY, ("aaaaaaaa",))
    models = {name: ModelEntry(name, (worker,), external=name == "friend") for name in sorted((engine, "friend"))}
    assert live(Snapshot("e", 0, True, models=models)).model_of_journal("aaaaaaaa") == engine


async def test_unknown_journal_is_unowned_once_all_have_answered() -> None:
    heard, unheard = WorkerEntry("a", "http://a:1"), WorkerEntry("b", "http://b:1", heard=False)
    assert recording(heard).all_heard
    assert not recording(heard, unheard).all_heard
    assert recording().all_heard
    assert not recording(synced=False).all_heard  # a router that just started
    assert recording(heard, synced=False).all_heard
    assert not recording(heard, learning=True).all_heard  # a router that lost its table: others may come


async def test_cordoned_worker_gets_only_its_sessions() -> None:
    workers = (
        WorkerEntry("a", "http://a", CORDONED, journals=("old",)),
        WorkerEntry("b", "http://b", READY, journals=("new",)),
        WorkerEntry("c", "http://c", DRAINING, journals=("gone",)),
    )
    live_table = live(Snapshot("e", 1, True, models={"m": ModelEntry("m", workers)}))
    assert routable(live_table) == {"b"}
    for journal, addr in (("old", {"http://a"}), ("new", {"http://b"}), ("gone", set()), ("none", set())):
        found = live_table.routable("m", even_suspects=True, tag=journal)
        assert {worker.addr for worker in found} == addr


async def test_trusted_workers_are_cached_until_trust_changes() -> None:
    live_table = live(table(a=READY, b=READY, c=READY))
    live_table.suspect("http://a:1")
    first = live_table.routable("m", even_suspects=True)
    assert live_table.routable("m", even_suspects=True) is first
    live_table.suspect("http://b:1")
    assert routable(live_table) == {"c"}
    listed = live_table.routable("m", even_suspects=True)
    live_table.suspect("http://b:1")
    assert live_table.routable("m", even_suspects=True) is listed, "calls that fail together"
    live_table.trust("http://b:1")
    assert routable(live_table) == {"b", "c"}
    live_table.apply(table(1, a=READY, c=READY))
    assert routable(live_table) == {"c"}


@pytest.mark.parametrize(("worker", "serves"), [("a", True), ("b", True), ("c", False), ("unknown", False)])
async def test_worker_alive_to_router_is_serving(worker: str, serves: bool) -> None:
    live_table = live(table(a=READY, b=DRAINING, c=DEAD))
    assert live_table.is_serving("m", f"http://{worker}:1") is serves
    assert not live_table.is_serving("another", f"http://{worker}:1")
