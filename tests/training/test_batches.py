"""Batches: selected, cut over ranks and micro-batches, and packed: each token sees what it saw in the padded batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import UsageFault
from areal.rollout.tensors import concat_padded_tensors
from areal.training.batches import (
    Batch,
    MicroBatches,
    lengths,
    micro_batches,
    minibatches,
    pack,
    paired_batch,
    partition,
    put_rows,
    select,
    split_groups,
    split_rows,
    synchronized_micro_batches,
    target_mask,
    token_batch,
    trim,
)


def _batch(*texts: str) -> dict[str, torch.Tensor]:
    width = max(map(len, texts))
    ids = torch.tensor([[ord(c) for c in text.ljust(width, "\0")] for text in texts])
    return {"input_ids": ids, "attention_mask": ids != 0, "versions": torch.zeros_like(ids), "rewards": ids[:, 0]}


def test_concat_pads_each_column_with_its_padding() -> None:
    got = concat_padded_tensors([_batch("ab"), _batch("wxyz")])
    assert lengths(got) == [2, 4]
    assert got["input_ids"].shape == (2, 4)
    assert got["versions"].tolist() == [[0, 0, -1, -1], [0, 0, 0, 0]]
    assert got["rewards"].tolist() == [ord("a"), ord("w")]


def test_concat_of_different_columns_names_them() -> None:
    with pytest.raises(ValueError, match="rewards"):
        concat_padded_tensors([_batch("a"), {"attention_mask": torch.ones(1, 1)}])


def test_select_trims_to_selected_width() -> None:
    got = select(_batch("abcd", "xy", "z"), [2, 1])
    assert got["input_ids"].tolist() == [[ord("z"), 0], [ord("x"), ord("y")]]


def test_trimmed_empty_batch_keeps_one_column() -> None:
    assert trim({"attention_mask": torch.zeros(2, 5)})["attention_mask"].shape == (2, 1)


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def _all(bins: list[list[int]], count: int) -> bool:
    return sorted(n for members in bins for n in members) == list(range(count))


@given(LENGTHS, st.integers(1, 120), st.booleans(), st.sampled_from(["ffd", "kk"]))
def test_micro_batches_respect_limit_and_hold_every_row_once(lengths, limit, padded, algorithm) -> None:
    bins = micro_batches(lengths, MicroBatches(max_tokens=limit, padded=padded, algorithm=algorithm))
    assert _all(bins, len(lengths))
    for members in bins:
        inside = [lengths[n] for n in members]
        cost = max(inside) * len(inside) if padded else sum(inside)
        assert cost <= limit or len(members) == 1


def test_kk_micro_batches_are_even_and_ffd_ones_few() -> None:
    lengths = [9, 8, 7, 6, 5, 4, 3, 2]
    few, even = (
        micro_batches(lengths, MicroBatches(max_tokens=20, algorithm=algorithm)) for algorithm in ("ffd", "kk")
    )
    sums = [[sum(lengths[n] for n in members) for members in bins] for bins in (few, even)]
    assert max(sums[1]) - min(sums[1]) < max(sums[0]) - min(sums[0])


@given(LENGTHS, st.integers(1, 8), st.integers(1, 4), st.integers(1, 10))
def test_micro_batch_count_covers_need_of_all_ranks(lengths, count, divisor, at_least) -> None:
    bins = micro_batches(lengths, MicroBatches(count=count, divisor=divisor), at_least)
    assert _all(bins, len(lengths))
    assert all(bins)
    wanted = -(-max(count, at_least) // divisor) * divisor
    assert len(bins) == min(wanted, len(lengths))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 6))
def test_partition_gap_is_at_most_longest_row(lengths, parts) -> None:
    sets = partition(lengths, parts)
    assert len(sets) == parts
    assert sum(map(bool, sets)) == min(parts, len(lengths)), "a row without tokens is one, too"
    assert _all(sets, len(lengths))
    sums = [sum(lengths[n] for n in members) for members in sets]
    assert max(sums) - min(sums) <= max(lengths)


def test_partition_of_nothing_gives_empty_parts() -> None:
    assert [partition([], parts) for parts in (1, 3)] == [[[]], [[], [], []]]


@pytest.mark.parametrize(
    ("lengths", "parts", "sums"),
    [
        ([6, 6, 5, 5, 4, 4], 3, [10, 10, 10]),
        ([8, 7, 6, 5, 4, 3], 3, [11, 11, 11]),
        ([7, 6, 5, 4, 3, 2, 1], 3, [9, 9, 10]),
        ([12, 11, 10, 9, 8, 7, 6, 5], 4, [17, 17, 17, 17]),
        ([4, 5, 6, 7, 8], 2, [14, 16]),
        ([40, 1, 1, 1, 37, 1, 1], 2, [41, 41]),
        ([7, 7], 3, [0, 7, 7]),
    ],
)
def test_partition_evens_out_the_sums(lengths: list[int], parts: int, sums: list[int]) -> None:
    sets = partition(lengths, parts)
    assert sorted(sum(lengths[n] for n in members) for members in sets) == sums
    assert all(members == sorted(members) for members in sets)


def test_partition_beats_round_robin() -> None:
    sums = sorted(sum([8, 7, 6, 5, 4][n] for n in members) for members in partition([8, 7, 6, 5, 4], 2))
    assert sums == [14, 16]


@given(st.integers(1, 4), st.integers(1, 3), st.data())
def test_spread_is_even_and_keeps_groups_together(ranks, group, data) -> None:
    each = data.draw(st.integers(1, 5))
    count = ranks * group * each
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    shares = split_rows(lengths, ranks, group)
    assert _all(shares, count)
    for share in shares:
        assert len(share) == group * each
        for start in range(0, len(share), group):
            assert share[start] % group == 0
            assert share[start : start + group] == list(range(share[start], share[start] + group))


def test_spread_evens_out_the_tokens() -> None:
    assert split_rows([9, 8, 1, 2], 2) == [[0, 2], [1, 3]]
    assert split_rows([9, 1, 8, 1, 1, 1, 2, 1], 2, group=2) == [[0, 1, 4, 5], [2, 3, 6, 7]]


@pytest.mark.parametrize("group", [1, 0, -1])
def test_indivisible_spread_is_an_error(group: int) -> None:
    with pytest.raises(ValueError, match=f"3 rows in groups of {group} cannot be shared equally by 2 ranks"):
        split_rows([1, 2, 3], 2, group)


@pytest.mark.parametrize(
    ("limits", "bins"),
    [
        (MicroBatches(), [[0, 1, 2]]),
        (MicroBatches(max_tokens=11), [[0, 1], [2]]),
        (MicroBatches(max_tokens=11, padded=False), [[0, 1, 2]]),
        (MicroBatches(max_tokens=10), [[0, 1], [2]]),
        (MicroBatches(max_tokens=9), [[0], [1, 2]]),
        (MicroBatches(max_tokens=8, padded=False), [[0, 1], [2]]),
        (MicroBatches(count=2), [[0], [1, 2]]),
    ],
)
def test_micro_batches_are_filled_up_to_the_limit(limits: MicroBatches, bins: list[list[int]]) -> None:
    assert sorted(micro_batches([5, 3, 3], limits)) == bins


@pytest.mark.parametrize(("most", "repeated"), [(1, 0), (2, 0), (3, 1), (4, 2)])
def test_ranks_take_equally_many_steps(most: int, repeated: int) -> None:
    """A rank with two rows beside one that has more: it repeats its first row, which then counts for nothing."""
    steps = synchronized_micro_batches([4, 2], MicroBatches(), lambda mine: max(mine, most))
    assert sorted(row for rows, counts in steps if counts for row in rows) == [0, 1]
    assert [rows for rows, counts in steps if not counts] == [[0]] * repeated
    assert len(steps) == most
    pairs = synchronized_micro_batches([4, 4, 2, 2], MicroBatches(granularity=2), lambda mine: 3)
    assert pairs[-1] == ([0, 1], False)


def test_results_of_a_micro_batch_are_put_into_their_rows() -> None:
    whole, flags = torch.zeros(3, 4), torch.zeros(3)
    put_rows(whole, [2, 0], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    put_rows(flags, [2, 0], torch.tensor([5.0, 6.0]))
    assert whole.tolist() == [[3, 4, 0, 0], [0, 0, 0, 0], [1, 2, 0, 0]]
    assert flags.tolist() == [6, 0, 5]


def test_target_tokens_are_those_of_the_loss_or_all_but_the_first() -> None:
    there, trained = torch.tensor([[1, 1, 1, 0]]), torch.tensor([[1, 0, 1, 0]])
    assert target_mask({"attention_mask": there, "loss_mask": trained}).tolist() == [[False, False, True, False]]
    assert target_mask({"attention_mask": there}).tolist() == [[False, True, True, False]]
    assert there.tolist() == [[1, 1, 1, 0]], "the batch stays as it is"


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(2, 3), st.integers(1, 100))
def test_grouped_micro_batches_keep_neighbours_together(sizes, granularity, limit) -> None:
    lengths = [size for size in sizes for _ in range(granularity)]
    bins = micro_batches(lengths, MicroBatches(granularity=granularity, max_tokens=limit))
    assert _all(bins, len(lengths))
    for members in bins:
        assert all(members[n] % granularity == n % granularity for n in range(len(members)))
        assert max(lengths[n] for n in members) * len(members) <= limit or len(members) == granularity


@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=12), st.integers(1, 4))
def test_shared_groups_are_whole_and_every_rank_has_one(groups, ranks) -> None:
    lengths = [length for group in groups for length in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    if len(groups) < ranks:
        with pytest.raises(ValueError, match="too few"):
            split_groups(lengths, numbers, ranks)
        return
    shares = split_groups(lengths, numbers, ranks)
    assert sorted(row for share in shares for row in share) == list(range(len(lengths)))
    assert all(shares)
    owners = [{numbers[row] for row in share} for share in shares]
    assert sum(map(len, owners)) == len(groups)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 6))
def test_minibatches_have_every_row_once(lengths, count) -> None:
    parts = minibatches(lengths, count)
    assert len(parts) == min(count, len(lengths))
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))


Row = tuple[list[int], list[int]]  # prompt, answer


def batch_of(rows: list[Row]) -> Batch:
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    there, answered = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids)
    for row, (prompt, answer) in enumerate(rows):
        length = len(prompt) + len(answer)
        ids[row, :length] = torch.tensor(prompt + answer)
        there[row, :length] = True
        answered[row, len(prompt) : length] = 1
    return {"input_ids": ids, "attention_mask": there, "loss_mask": answered}


tokens = st.integers(1, 3)
prompts = st.lists(tokens, min_size=1, max_size=5)
answers = st.lists(tokens, max_size=6)


@given(st.lists(st.tuples(prompts, st.lists(answers, min_size=1, max_size=5)), min_size=1, max_size=5), st.booleans())
def test_packed_tokens_are_unique_and_found_by_every_row(
    groups: list[tuple[list[int], list[list[int]]]], last: bool
) -> None:
    given = [(prompt, answer) for prompt, group in groups for answer in group]
    batch = batch_of(given)
    rows = pack(batch, last=last)
    if rows is None:
        return
    width = batch["input_ids"].shape[1]
    assert rows.input_ids.numel() < 0.9 * batch["input_ids"].numel()
    used = set()
    for row, (prompt, answer) in enumerate(given):
        whole = prompt + answer
        wanted = len(whole) if last else max(len(prompt), len(whole) - 1) if answer else len(whole) - 1
        places = rows.places[row, :wanted]
        used |= set(places.tolist())
        assert rows.input_ids.flatten()[places].tolist() == whole[:wanted]
        assert rows.positions.flatten()[places].tolist() == list(range(wanted))
        assert rows.unpacked(rows.input_ids[..., None])[row, :wanted, 0].tolist() == whole[:wanted]
        if rows.mask is not None:  # each token attends to those before it in its row
            size = rows.mask.shape[-1]
            tree, inside, seen = places // size, places % size, torch.zeros(wanted, size, dtype=torch.bool)
            for position in range(wanted):
                seen[position, inside[: position + 1]] = True
            assert torch.equal(rows.mask[tree, 0, inside], seen)
        for place in places.tolist():  # a row that has what came before it
            home, position = divmod(int(rows.homes[place]), width)
            assert (given[home][0] + given[home][1])[: position + 1] == whole[: position + 1]
            assert int(rows.places[home, position]) == place
    assert rows.mask is not None or used == set(range(rows.input_ids.numel()))


def test_packed_group_shares_its_prompt() -> None:
    rows = pack(batch_of([([1, 2, 3, 1, 2, 3], [n % 3, 1, 2]) for n in range(4)]), last=False)
    assert rows is not None and rows.input_ids.numel() == 6 + 4 * 2


def test_short_trees_have_a_mask_and_long_ones_are_one_row() -> None:
    short = pack(batch_of([([n, 2, 3, 1, 2, 3], [m % 3, 1, 2]) for n in range(2) for m in range(4)]), last=False)
    assert short is not None and short.mask is not None and short.mask.shape == (2, 1, 14, 14)
    long = pack(batch_of([([1] * 20, [n % 3] * 20) for n in range(8)]), last=False)
    assert long is not None and long.mask is None and long.input_ids.shape == (1, 172), (
        "a mask hides most of its scores"
    )


def test_equal_rows_without_shared_prompt_are_not_packed() -> None:
    assert pack(batch_of([([n], [1] * 20) for n in range(4)]), last=False) is None


def test_rows_that_share_a_tenth_of_their_tokens_are_not_packed() -> None:
    rows = batch_of([([1], [1, 1, 1, 1]), ([1], [2, 2, 2, 2])])
    assert pack(rows, last=True) is None, "9 of 10 tokens are distinct"
    packed = pack(rows, last=False)
    assert packed is not None and packed.input_ids.numel() == 7


def test_rows_without_loss_mask_are_not_packed() -> None:
    batch = batch_of([([1, 2], [3])] * 4)
    del batch["loss_mask"]
    assert pack(batch, last=False) is None


def test_token_rows_are_padded_and_first_token_is_untrained() -> None:
    batch = token_batch([{"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}, {"input_ids": [8], "loss_mask": [1]}], 9)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert batch["attention_mask"].tolist() == [[True] * 3, [True, False, False]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [False] * 3]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2], "loss_mask": [1]}, "row 1 of the batch has 2 tokens and a mask of 1"),
        ({"input_ids": [], "loss_mask": []}, "row 1 of the batch has 0 tokens"),
        ({"input_ids": [1]}, "row 1 of the batch has no loss_mask"),
    ],
)
def test_row_without_loss_mask_is_named(row: dict[str, list[int]], message: str) -> None:
    with pytest.raises(UsageFault, match=message):
        token_batch([{"input_ids": [1], "loss_mask": [1]}, row])


def test_pair_uses_common_prefix_as_prompt() -> None:
    rows: list[dict[str, Any]] = [
        {"chosen_ids": [1, 2, 3, 4], "rejected_ids": [1, 2, 5]},
        {"chosen_ids": [1, 2, 3, 4], "rejected_ids": [1, 2, 3, 4]},
        {"chosen_ids": [1, 2, 3], "rejected_ids": [1, 2, 3, 4]},
        {"chosen_ids": [1, 2, 3, 4], "rejected_ids": [1, 2, 3, 5], "prompt_length": 1},
    ]
    trained = [[place for place, on in enumerate(row) if on] for row in paired_batch(rows)["loss_mask"].tolist()]
    assert trained == [[2, 3], [2], [3], [3], [2], [2, 3], [1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen_ids": [1, 2]}, "row 0 of the batch has no rejected_ids"),
        ({"chosen_ids": [], "rejected_ids": [1, 2]}, "row 0 of the batch has no chosen_ids"),
        ({"chosen_ids": [1], "rejected_ids": [1, 2]}, "row 0 of the batch has an answer of one token"),
    ],
)
def test_pair_without_two_answers_is_named(row: dict[str, list[int]], message: str) -> None:
    with pytest.raises(UsageFault, match=message):
        paired_batch([row])
