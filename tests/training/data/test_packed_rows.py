"""A packed batch is the padded one: each token sees the tokens that it saw, at their positions."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.training.data.batches import Batch
from areal.training.data.packing import Cost, Fold, PackedRows, filled, pack, plan

FREE_PAIRS = Cost(token=1, pair=0)
DEAR_PAIRS = Cost(token=1, pair=10**6)

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


def seen(rows: PackedRows, place: int) -> list[tuple[int, int]]:
    """Position and token of all that the token at ``place`` sees, in order."""
    row, column = divmod(place, rows.input_ids.shape[1])
    where = rows.mask[row, 0, column].nonzero()[:, 0]
    return sorted(zip(rows.positions[row, where].tolist(), rows.input_ids[row, where].tolist(), strict=True))


tokens = st.integers(1, 3)
prompts = st.lists(tokens, min_size=1, max_size=5)
answers = st.lists(tokens, max_size=6)


@given(st.lists(st.tuples(prompts, st.lists(answers, min_size=1, max_size=5)), min_size=1, max_size=5), st.booleans())
def test_packed_every_token_sees_what_it_saw(groups: list[tuple[list[int], list[list[int]]]], last: bool) -> None:
    given = [(prompt, answer) for prompt, group in groups for answer in group]
    batch = batch_of(given)
    rows = pack(batch, FREE_PAIRS, last=last)
    if rows is None:
        return
    assert rows.input_ids.numel() < 0.9 * batch["input_ids"].numel()
    for row, (prompt, answer) in enumerate(given):
        whole = prompt + answer
        wanted = len(whole) if last else max(len(prompt), len(whole) - 1) if answer else len(whole) - (not last)
        for position in range(wanted):
            place = int(rows.places[row, position])
            assert seen(rows, place) == list(enumerate(whole[: position + 1]))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60))
def test_filled_has_each_once_and_no_row_longer_than_the_longest(sizes: list[int]) -> None:
    rows = filled(sizes)
    assert sorted(number for row in rows for number in row) == list(range(len(sizes)))
    assert max(sum(sizes[number] for number in row) for row in rows) == max(sizes)


def test_plan_of_a_group_has_its_prompt_once() -> None:
    layout = plan([b"a"] * 4, [6] * 4, [2] * 4, 8, FREE_PAIRS)
    assert layout == ((Fold(6, (0, 1, 2, 3), (2, 2, 2, 2)),),)


def test_plan_where_pairs_are_dear_leaves_the_batch_alone() -> None:
    assert plan([b"a"] * 4, [2] * 4, [30] * 4, 32, DEAR_PAIRS) is None


def test_plan_between_the_two_folds_some_of_a_group() -> None:
    """Eight answers beside their prompt would attend over a row that is too long, four do not."""
    layout = plan([b"a"] * 8, [100] * 8, [100] * 8, 200, Cost(token=1000, pair=1))
    assert layout is not None
    assert {len(fold.members) for row in layout for fold in row} == {4}


def test_plan_of_ragged_rows_fills_rows_up() -> None:
    layout = plan([b""] * 5, [0] * 5, [10, 2, 3, 5, 9], 10, Cost(token=100, pair=1))
    assert layout is not None
    assert sum(len(fold.members) for row in layout for fold in row) == 5
    assert len(layout) == 3


def test_plan_of_rows_that_are_all_alike_in_length_and_share_nothing_is_none() -> None:
    assert plan([bytes([n]) for n in range(4)], [3] * 4, [5] * 4, 8, Cost(token=100, pair=1)) is None


def test_packed_without_the_column_that_tells_prompts_is_none() -> None:
    batch = batch_of([([1, 2], [3])] * 4)
    del batch["loss_mask"]
    assert pack(batch, FREE_PAIRS, last=False) is None
