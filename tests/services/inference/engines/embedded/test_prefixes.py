"""What is kept is found, bounded and never kept twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from areal.services.inference.engines.embedded.scheduler import PrefixCache, common_prefix

from .support import STEADY

TOKENS = st.lists(st.integers(0, 1), max_size=12)


def reference(one: list[int], other: list[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


@given(TOKENS, TOKENS, st.integers(1, 5))
@settings(STEADY)
def test_common_prefix_of_any_lists_equals_reference(one: list[int], other: list[int], shortest: int) -> None:
    expected = reference(one, other)
    assert common_prefix(one, other, shortest) == (expected if expected >= shortest else 0)


@given(st.lists(TOKENS, max_size=25), TOKENS)
@settings(STEADY, max_examples=300)
def test_prefixes_of_any_history_find_the_longest_and_keep_the_bound(added: list[list[int]], wanted: list[int]) -> None:
    prefixes = PrefixCache(capacity=30, shortest=3)
    model: dict[int, list[int]] = {}
    for tokens in added:
        number, dropped = prefixes.add(tokens)
        for each in dropped:
            del model[each]
        if number is not None:
            model[number] = tokens
        assert sum(map(len, model.values())) == prefixes.size <= 30
        held = list(model.values())
        assert not any(a is not b and reference(a, b) == len(a) for a in held for b in held)
    number, length = prefixes.find(wanted)
    best = max((reference(tokens, wanted) for tokens in model.values()), default=0)
    assert length == (best if best >= 3 else 0)
    assert length == 0 or reference(model[number], wanted) == length


def test_prefixes_when_full_drop_the_least_recently_used() -> None:
    prefixes = PrefixCache(capacity=9, shortest=3)
    numbers = [prefixes.add([start] * 3)[0] for start in (1, 2, 3)]
    prefixes.find([1, 1, 1, 5])
    assert prefixes.add([4] * 3)[1] == [numbers[1]]


def test_clear_names_everything_kept() -> None:
    prefixes = PrefixCache(capacity=9, shortest=3)
    numbers = [prefixes.add([start] * 3)[0] for start in (1, 2)]
    assert prefixes.clear() == numbers
    assert prefixes.find([1, 1, 1]) == (0, 0)
    assert prefixes.size == 0
