from areal.api.cli_args import SaverConfig
from areal.training.trainers.base import Timer


def _fired(timer: Timer, times: list[float], ends: frozenset[int] = frozenset()) -> list[int]:
    return [n for n, now in enumerate(times, 1) if timer.due(epoch_ended=n in ends, now=now)]


def test_due_every_three_steps() -> None:
    assert _fired(Timer(SaverConfig(freq_steps=3)), [0.0] * 7) == [3, 6]


def test_due_at_the_end_of_epochs() -> None:
    assert _fired(Timer(SaverConfig(freq_epochs=2)), [0.0] * 6, frozenset({2, 3, 5, 6})) == [3, 6]


def test_due_after_seconds_outside_any_process_group() -> None:
    assert _fired(Timer(SaverConfig(freq_secs=10)), [0, 5, 11, 12, 20, 21.5]) == [3, 6]


def test_first_due_timer_resets_all() -> None:
    assert _fired(Timer(SaverConfig(freq_steps=3, freq_secs=10)), [0, 10, 11, 12, 13]) == [2, 5]


def test_timer_without_frequency_is_never_due() -> None:
    assert Timer(SaverConfig()).is_disabled
    assert _fired(Timer(SaverConfig()), [0.0, 1e9], frozenset({1, 2})) == []


def test_restored_timer_continues_counting() -> None:
    timer = Timer(SaverConfig(freq_steps=3))
    _fired(timer, [0.0] * 2)
    resumed = Timer(SaverConfig(freq_steps=3))
    resumed.restore(timer.state())
    assert _fired(resumed, [50.0]) == [1]
