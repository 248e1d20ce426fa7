import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.training.data.packing import MicroBatches, micro_batches, partition, spread

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def _all(bins: list[list[int]], count: int) -> bool:
    return sorted(n for members in bins for n in members) == list(range(count))


@given(LENGTHS, st.integers(1, 120), st.booleans(), st.sampled_from(["ffd", "kk"]))
def test_micro_batches_with_a_limit_hold_every_row_once_and_keep_it(lengths, limit, padded, algorithm) -> None:
    bins = micro_batches(lengths, MicroBatches(max_tokens=limit, padded=padded, algorithm=algorithm))
    assert _all(bins, len(lengths))
    for members in bins:
        inside = [lengths[n] for n in members]
        cost = max(inside) * len(inside) if padded else sum(inside)
        assert cost <= limit or len(members) == 1


def test_micro_batches_of_kk_are_of_like_size_and_those_of_ffd_few() -> None:
    lengths = [9, 8, 7, 6, 5, 4, 3, 2]
    few, even = (
        micro_batches(lengths, MicroBatches(max_tokens=20, algorithm=algorithm)) for algorithm in ("ffd", "kk")
    )
    sums = [[sum(lengths[n] for n in members) for members in bins] for bins in (few, even)]
    assert max(sums[1]) - min(sums[1]) < max(sums[0]) - min(sums[0])


@given(LENGTHS, st.integers(1, 8), st.integers(1, 4), st.integers(1, 10))
def test_micro_batches_are_as_many_as_all_ranks_need(lengths, count, divisor, at_least) -> None:
    bins = micro_batches(lengths, MicroBatches(count=count, divisor=divisor), at_least)
    assert _all(bins, len(lengths))
    assert all(bins)
    wanted = -(-max(count, at_least) // divisor) * divisor
    assert len(bins) == min(wanted, len(lengths))


@given(LENGTHS, st.integers(1, 6))
def test_partition_is_never_further_apart_than_the_longest_row(lengths, parts) -> None:
    sets = partition(lengths, parts)
    assert len(sets) == parts
    assert _all(sets, len(lengths))
    sums = [sum(lengths[n] for n in members) for members in sets]
    assert max(sums) - min(sums) <= max(lengths)


def test_partition_beats_taking_turns() -> None:
    sums = sorted(sum([8, 7, 6, 5, 4][n] for n in members) for members in partition([8, 7, 6, 5, 4], 2))
    assert sums == [14, 16]


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_spread_gives_every_rank_as_many_rows_and_keeps_groups_together(ranks, group, data) -> None:
    each = data.draw(st.integers(1, 5))
    count = ranks * group * each
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    shares = spread(lengths, ranks, group)
    assert _all(shares, count)
    for share in shares:
        assert len(share) == group * each
        for start in range(0, len(share), group):
            assert share[start] % group == 0
            assert share[start : start + group] == list(range(share[start], share[start] + group))


def test_spread_what_does_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 rows in groups of 1 cannot be shared equally by 2 ranks"):
        spread([1, 2, 3], 2)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(2, 3), st.integers(1, 100))
def test_micro_batches_of_groups_keep_neighbours_together(sizes, granularity, limit) -> None:
    lengths = [size for size in sizes for _ in range(granularity)]
    bins = micro_batches(lengths, MicroBatches(granularity=granularity, max_tokens=limit))
    assert _all(bins, len(lengths))
    for members in bins:
        assert all(members[n] % granularity == n % granularity for n in range(len(members)))
        assert max(lengths[n] for n in members) * len(members) <= limit or len(members) == granularity
