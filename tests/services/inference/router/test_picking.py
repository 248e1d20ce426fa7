from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.inference.router import picking
from areal.services.inference.router.picking import CallKey, Picker, rendezvous
from areal.wire.routing import WorkerEntry

WORKERS = [WorkerEntry(name, f"http://127.0.0.1:{port}") for port, name in enumerate("abcde", start=20000)]
IDLE = dict.fromkeys((worker.addr for worker in WORKERS), 0.0)


def picks(strategy: str, count: int, key: CallKey, loads: dict[str, float] = IDLE) -> Counter[str]:
    picker = Picker(random.Random(7))
    return Counter(picker.pick(strategy, WORKERS, key, lambda w: loads[w.addr]).id for _ in range(count))


def test_round_robin_is_even() -> None:
    assert set(picks("round_robin", 25, CallKey()).values()) == {5}


def test_least_loaded_picks_fewest_tokens() -> None:
    loads = {**dict.fromkeys(IDLE, 10.0), WORKERS[3].addr: 9.0}
    assert picks("least_loaded", 20, CallKey(), loads) == {"d": 20}


def test_least_loaded_spreads_ties() -> None:
    assert len(picks("least_loaded", 200, CallKey())) == len(WORKERS)


def test_auto_never_picks_more_loaded_of_two() -> None:
    loads = {**IDLE, WORKERS[0].addr: 1e6}
    assert "a" not in picks("auto", 300, CallKey(), loads)


def test_auto_balances_when_picks_add_load() -> None:
    picker, held = Picker(random.Random(1)), dict(IDLE)
    for _ in range(500):
        held[picker.pick("auto", WORKERS, CallKey(), lambda w: held[w.addr]).addr] += 1
    assert max(held.values()) - min(held.values()) <= 8


def test_equal_prefixes_share_worker_and_others_spread() -> None:
    assert len(picks("prefix", 50, CallKey(prefix=b"system prompt"))) == 1
    picker = Picker(random.Random(1))
    spread = {
        picker.pick("prefix", WORKERS, CallKey(prefix=bytes([number])), lambda w: 0.0).id for number in range(100)
    }
    assert spread == {worker.id for worker in WORKERS}


def test_prefix_skips_overloaded_worker() -> None:
    favourite = rendezvous(b"hot", WORKERS)[0]
    loads = {**IDLE, favourite.addr: 1e6}
    assert favourite.id not in picks("prefix", 10, CallKey(prefix=b"hot"), loads)


def test_prefix_without_a_prefix_balances() -> None:
    assert len(picks("prefix", 100, CallKey())) > 1


def test_recorded_conversation_keeps_worker_unless_overloaded() -> None:
    [home] = picks("auto", 20, CallKey(prefix=b"a conversation"))
    busy = {**IDLE, next(worker.addr for worker in WORKERS if worker.id == home): 1e6}
    assert home not in picks("auto", 50, CallKey(prefix=b"a conversation"), busy)


def test_recorded_conversations_spread_evenly() -> None:
    for size in (4, 500):
        pool = [WorkerEntry(str(number), f"http://h:{number}") for number in range(size)]
        picker = Picker(random.Random(1))
        found = {picker.pick("auto", pool, CallKey(prefix=bytes([n]) * 16), lambda w: 0.0).id for n in range(256)}
        assert len(found) > min(size, 100) * 0.7


def loaded(key: bytes, *tokens: float) -> tuple[list[WorkerEntry], dict[str, float]]:
    """Workers in the order in which ``key`` prefers them, and their loads in that order."""
    order = rendezvous(key, WORKERS[: len(tokens)])
    return order, {worker.addr: held for worker, held in zip(order, tokens, strict=True)}


def picked(strategy: str, key: bytes, loads: dict[str, float], count: int = 40) -> set[str]:
    picker, pool = Picker(random.Random(7)), [worker for worker in WORKERS if worker.addr in loads]
    return {picker.pick(strategy, pool, CallKey(prefix=key), lambda w: loads[w.addr]).id for _ in range(count)}


@pytest.mark.parametrize(
    ("loads", "place"),
    [
        ((0, 0, 0, 0, 0), 0),
        ((2730, 0, 0, 0, 0), 0),  # the mean is 546, the limit 2730.5
        ((2731, 0, 0, 0, 0), 1),
        ((5488, 16), 0),  # exactly the limit
        ((5489, 16), 1),
        ((18952, 17048, 0), 1),  # the second has exactly the limit
        ((18953, 17049, 0), 2),
        ((92500, 90000, 0, 90000, 90000), 0),  # the mean is 72500, the limit 92673
        ((93000, 90000, 0, 90000, 90000), 1),
    ],
)
def test_prefix_goes_to_first_preferred_worker_within_the_limit(loads: tuple[float, ...], place: int) -> None:
    order, held = loaded(b"system prompt", *loads)
    assert picked("prefix", b"system prompt", held) == {order[place].id}


@pytest.mark.parametrize(
    ("home", "other", "stays"),
    [(2048, 0, True), (2049, 0, False), (12288, 8192, True), (12289, 8192, False), (0, 8192, True)],
)
def test_conversation_stays_up_to_a_quarter_and_2048_tokens_above_another_worker(
    home: float, other: float, stays: bool
) -> None:
    order, held = loaded(b"a conversation", home, other, other, other)
    expected = {order[0].id} if stays else {worker.id for worker in order[1:]}
    assert picked("auto", b"a conversation", held) == expected


def test_homes_of_prefixes_are_the_same_in_every_release() -> None:
    """Gateways of two releases serve side by side during a rolling update."""
    assert "".join(worker.id for worker in rendezvous(b"a digest of sixteen bytes", WORKERS)) == "dceba"
    pool = [WorkerEntry(str(number), f"http://h:{number}") for number in range(40)]
    homes = [Picker().pick("prefix", pool, CallKey(prefix=bytes([n]) * 16), lambda w: 0.0).id for n in range(6)]
    assert homes == ["9", "30", "9", "30", "3", "22"]


@pytest.mark.parametrize(("size", "candidates"), [(32, 32), (33, 8)])
def test_prefix_has_eight_candidates_in_a_pool_above_32(size: int, candidates: int) -> None:
    pool = [WorkerEntry(str(number), f"http://h:{number}") for number in range(size)]
    found = {
        key: [worker.id for worker in picking._Ring(pool).candidates(key)]
        for key in (b"\0" * 8, b"\xff" * 8, b"system prompt")
    }
    assert {len(set(each)) for each in found.values()} == {candidates}
    assert found[b"\0" * 8] == found[b"\xff" * 8], "the ring is closed"
    for key, part in found.items():
        home = Picker().pick("prefix", pool, CallKey(prefix=key), lambda w: 0.0)
        assert home == rendezvous(key, [worker for worker in pool if worker.id in part])[0]


def test_load_of_an_unknown_worker_is_ignored() -> None:
    picker = Picker(random.Random(1))
    before = picker.pick("least_loaded", WORKERS, CallKey(), lambda w: IDLE[w.addr])
    picker.set_load("http://127.0.0.1:1", 0.0)
    picker.set_load("http://127.0.0.1:1", 5.0)
    assert before in WORKERS
    assert picker.pick("least_loaded", WORKERS, CallKey(), lambda w: IDLE[w.addr]) in WORKERS


def test_new_workers_of_a_pool_are_picked_at_once() -> None:
    picker = Picker(random.Random(1))
    for strategy in ("least_loaded", "prefix", "auto", "round_robin"):
        for pool in (WORKERS[:2], WORKERS[2:], WORKERS[:2]):
            assert picker.pick(strategy, pool, CallKey(prefix=b"beginning"), lambda w: 0.0, "qwen") in pool


@given(st.binary(min_size=1, max_size=16), st.sampled_from(WORKERS))
def test_rendezvous_moves_only_keys_of_removed_worker(key: bytes, left: WorkerEntry) -> None:
    before = rendezvous(key, WORKERS)
    after = rendezvous(key, [worker for worker in WORKERS if worker is not left])
    assert after == [worker for worker in before if worker is not left]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 39), st.integers(1, 50)), max_size=200))
def test_least_loaded_is_exact_for_large_pool(events: list[tuple[bool, int, int]]) -> None:
    pool = [WorkerEntry(str(number), f"http://h:{number}") for number in range(40)]
    held = {worker.addr: 0.0 for worker in pool}
    picker = Picker(random.Random(1))
    for began, place, tokens in events:
        picked = picker.pick("least_loaded", pool, CallKey(), lambda w: held[w.addr])
        assert held[picked.addr] == min(held.values())
        addr = picked.addr if began else pool[place].addr
        held[addr] = held[addr] + tokens if began else 0.0
        picker.set_load(addr, held[addr])


@pytest.mark.parametrize("strategy", ["auto", "prefix", "least_loaded", "round_robin"])
def test_pick_reads_bounded_number_of_workers(strategy: str) -> None:
    pool = [WorkerEntry(str(number), f"http://h:{number}") for number in range(5000)]
    held, asked = {worker.addr: 0.0 for worker in pool}, 0

    def load(worker: WorkerEntry) -> float:
        nonlocal asked
        asked += 1
        return held[worker.addr]

    picker = Picker(random.Random(1))
    picker.pick(strategy, pool, CallKey(prefix=b"first"), load)
    asked = 0
    for number in range(100):
        picked = picker.pick(strategy, pool, CallKey(prefix=bytes([number])), load)
        held[picked.addr] += 100.0 * number
        picker.set_load(picked.addr, held[picked.addr])
    assert asked <= 100 * 20


@given(st.binary(min_size=1, max_size=16), st.integers(0, 299))
def test_prefix_candidates_change_only_near_removed_worker(key: bytes, gone: int) -> None:
    pool = [WorkerEntry(str(number), f"http://h:{number}") for number in range(300)]
    left = [worker for worker in pool if worker is not pool[gone]]
    before = Picker().pick("prefix", pool, CallKey(prefix=key), lambda w: 0.0)
    after = Picker().pick("prefix", left, CallKey(prefix=key), lambda w: 0.0)
    part = list(picking._Ring(pool).candidates(key))
    assert after == before or pool[gone] in part
    assert len(part) == 8


def test_prefixes_spread_evenly_over_any_pool() -> None:
    for size, most in ((8, 1.2), (32, 1.5), (400, 3.5)):
        pool = [WorkerEntry(str(number), f"http://10.0.0.{number}:21001") for number in range(size)]
        picker = Picker(random.Random(1))
        got = Counter(
            picker.pick("prefix", pool, CallKey(prefix=random.Random(number).randbytes(16)), lambda w: 0.0).id
            for number in range(size * 200)
        )
        assert len(got) == size and max(got.values()) < 200 * most


def test_one_prefix_spills_over_in_large_pool() -> None:
    pool = [WorkerEntry(str(number), f"http://h:{number}") for number in range(500)]
    held, picker = {worker.addr: 0.0 for worker in pool}, Picker(random.Random(1))
    for _ in range(5000):
        held[picker.pick("prefix", pool, CallKey(prefix=b"system prompt"), lambda w: held[w.addr]).addr] += 1000.0
    assert max(held.values()) <= 3 * 10_000 and min(held.values()) > 0


@pytest.mark.parametrize("strategy", ["least_loaded", "prefix"])
def test_cached_lists_of_replaced_pools_are_freed(strategy: str) -> None:
    import gc
    import weakref

    class Listed(list[WorkerEntry]):
        pass

    picker, lists = Picker(), []
    for _ in range(10):
        pool = Listed(WorkerEntry(str(number), f"http://h:{number}") for number in range(40))
        lists.append(weakref.ref(pool))
        picker.pick(strategy, pool, CallKey(prefix=b"first"), lambda w: 0.0, "model")
    del pool
    gc.collect()
    assert sum(each() is not None for each in lists) == 1


def test_stale_loads_take_no_memory() -> None:
    pool = [WorkerEntry(str(number), f"http://h:{number}") for number in range(40)]
    held, picker = {worker.addr: 0.0 for worker in pool}, Picker()
    picker.pick("least_loaded", pool, CallKey(), lambda w: held[w.addr])
    [least] = picker._heaps
    for number in range(1, 5000):
        held[pool[3].addr] = number / 4
        picker.set_load(pool[3].addr, number / 4)
        assert max(len(least._heap), len(least._equals)) <= 2 * len(pool) + 64
    assert picker.pick("least_loaded", pool, CallKey(), lambda w: held[w.addr]) is not pool[3]


@given(st.integers(2, 50), st.integers(0, 2**32))
def test_candidates_of_pair_differ(count: int, seed: int) -> None:
    workers = [WorkerEntry(f"w{n}", f"http://h:{n}") for n in range(count)]
    one, other = Picker(random.Random(seed))._random_pair(workers)
    assert one is not other and one in workers and other in workers


def test_pairs_of_candidates_are_equally_likely() -> None:
    workers = [WorkerEntry(f"w{n}", f"http://h:{n}") for n in range(4)]
    picker = Picker(random.Random(1))
    drawn = Counter((one.id, other.id) for one, other in (picker._random_pair(workers) for _ in range(12_000)))
    assert len(drawn) == 12 and all(800 < times < 1200 for times in drawn.values())


@pytest.mark.parametrize("strategy", ["auto", "round_robin", "least_loaded", "prefix"])
@pytest.mark.parametrize("prefix", [None, b"beginning"])
def test_single_worker_is_picked_without_load_or_turn(strategy: str, prefix: bytes | None) -> None:
    def no_load(worker: WorkerEntry) -> float:
        raise AssertionError("the load of the only worker does not matter")

    dice = random.Random(3)
    before, picker = dice.getstate(), Picker(dice)
    for _ in range(2):
        assert picker.pick(strategy, WORKERS[2:3], CallKey(prefix=prefix), no_load) is WORKERS[2]
    assert dice.getstate() == before
    turns = [picker.pick("round_robin", WORKERS[:2], CallKey(), no_load).id for _ in range(3)]
    assert turns == ["a", "b", "a"], "the lone picks took no turn"


def test_picks_are_deterministic_with_given_random() -> None:
    def picks_with(dice: random.Random | None) -> list[str]:
        picker = Picker(dice)
        return [picker.pick("auto", WORKERS, CallKey(), lambda w: 0.0).id for _ in range(64)]

    assert picks_with(random.Random(3)) == picks_with(random.Random(3))
    assert picks_with(None) != picks_with(None)
