"""Lines of one process, and of many in order of time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal.cli.logs import Line, merged, not_yet_shown
from areal.runtime.backends.base import Phase, RunSpec, RunState
from areal.runtime.logs import TimedLine

TIMES = st.lists(st.integers(0, 20), max_size=10).map(sorted)
WORDS = st.lists(st.sampled_from("abc"), max_size=8)


def process(uid: str) -> RunState:
    return RunState(RunSpec(uid, "Model/x", "engine", 0, ()), Phase.RUNNING)


@given(st.lists(TIMES, min_size=1, max_size=4))
def test_merge_orders_by_time_and_keeps_process_order(streams: list[list[int]]) -> None:
    written = {
        f"p{number}": [TimedLine(float(at), f"{number}.{index}") for index, at in enumerate(times)]
        for number, times in enumerate(streams)
    }
    found = list(merged([(process(uid), lines) for uid, lines in written.items()]))
    assert [line.at for line in found] == sorted(line.at for line in found)
    for uid, lines in written.items():
        assert [line.text for line in found if line.process.spec.uid == uid] == [line.text for line in lines]


def test_lines_carry_their_process() -> None:
    state = process("p")
    assert list(merged([(state, [TimedLine(1.0, "x")])])) == [Line(1.0, state, "x")]


@given(WORDS, WORDS, st.integers(0, 8))
def test_follow_repeats_and_loses_no_line(before: list[str], after: list[str], opened_at: int) -> None:
    """The follower opens at some line of what is then read; it gives everything from there on."""
    opened_at = min(opened_at, len(before))
    polled = before[opened_at:] + after
    left = not_yet_shown(before, polled)
    assert polled[len(polled) - len(left) :] == left
    assert len(left) <= len(after) or before[opened_at:] == []


def test_overlap_of_distinct_lines_is_exact() -> None:
    assert not_yet_shown(["a", "b", "c"], ["b", "c", "d"]) == ["d"]
    assert not_yet_shown(["a", "b"], ["c"]) == ["c"]
    assert not_yet_shown([], ["a"]) == ["a"]
