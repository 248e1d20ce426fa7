import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.training.data.batches import minibatches, shared_groups


@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=12), st.integers(1, 4))
def test_shared_groups_are_whole_and_everybody_has_one(groups, ranks) -> None:
    lengths = [length for group in groups for length in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    if len(groups) < ranks:
        with pytest.raises(ValueError, match="too few"):
            shared_groups(lengths, numbers, ranks)
        return
    shares = shared_groups(lengths, numbers, ranks)
    assert sorted(row for share in shares for row in share) == list(range(len(lengths)))
    assert all(shares)
    owners = [{numbers[row] for row in share} for share in shares]
    assert sum(map(len, owners)) == len(groups)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 6))
def test_minibatches_have_every_row_once(lengths, count) -> None:
    parts = minibatches(lengths, count)
    assert len(parts) == min(count, len(lengths))
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
