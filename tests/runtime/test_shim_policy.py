"""The restart decision as a pure function: generated histories hold its promises."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.runtime.backends.base import RestartPolicy
from areal.runtime.shim.policy import CRASHLOOP, FINISHED, RESTART, Exit, RestartBudget, RestartDecision

from .support import unhurried


def budget(**changes: object) -> RestartBudget:
    return RestartBudget(asdict(RestartPolicy(**changes)))  # type: ignore[arg-type]


def exited(code: int | None = 1, signal: int | None = None) -> Exit:
    return Exit(code, signal, 0.0, f"exited {code}")


def delays(decisions: list[RestartDecision]) -> list[float]:
    return [decision.delay_s for decision in decisions]


def test_first_restart_is_immediate_then_delays_double() -> None:
    history = budget(jitter=0.0, budget_count=100)

    decisions = [history.decide(exited(), 1.0, float(number), 0.5) for number in range(8)]

    assert delays(decisions) == [0, 10, 20, 40, 80, 160, 300, 300]


def test_usual_budget_lasts_five_minutes_of_quick_deaths() -> None:
    history, now = budget(jitter=0.0), 0.0
    while (decision := history.decide(exited(), 0.0, now, 0.5)).action == RESTART:
        now += decision.delay_s

    assert now == 310


def test_never_healthy_component_is_given_up_despite_intervals() -> None:
    history = budget(jitter=0.0)
    decisions = [history.decide(exited(), 900.0, at * 1200.0, 0.5, healthy_s=0.0) for at in range(7)]

    assert [decision.action for decision in decisions] == [RESTART] * 6 + [CRASHLOOP]
    assert decisions[-1].reason == "7 starts in a row ended before it was healthy: exited 1"


def test_component_healthy_between_deaths_restarts_forever() -> None:
    history = budget(jitter=0.0)
    healthy = [30.0, *[0.0] * 5] * 10

    assert {history.decide(exited(), 900.0, at * 1200.0, 0.5, each).action for at, each in enumerate(healthy)} == {
        RESTART
    }


def test_back_off_grows_when_engine_dies_after_slow_starts() -> None:
    history = budget(jitter=0.0)
    decisions = [history.decide(exited(), 900.0, at * 1200.0, 0.5, healthy_s=60.0) for at in range(8)]

    assert delays(decisions) == [0, 10, 20, 40, 80, 160, 300, 300]
    assert history.decide(exited(), 1500.0, 12000.0, 0.5, healthy_s=600.0).delay_s == 0


@pytest.mark.parametrize(("spread", "delay_s"), [(0.0, 8.0), (0.5, 10.0), (0.75, 11.0)])
def test_jitter_spreads_delays_evenly_around_the_backoff(spread: float, delay_s: float) -> None:
    history = budget(jitter=0.2)
    assert history.decide(exited(), 1.0, 0.0, spread).delay_s == 0, "the first one waits for nothing"

    assert history.decide(exited(), 1.0, 1.0, spread).delay_s == pytest.approx(delay_s)


@pytest.mark.parametrize(
    ("ran_s", "healthy_s", "delay_s"),
    [(600.0, None, 0), (599.9, None, 20), (9000.0, 599.9, 20), (1.0, 600.0, 0), (9000.0, 600.0, 0)],
)
def test_delay_resets_after_ten_healthy_minutes(ran_s: float, healthy_s: float | None, delay_s: float) -> None:
    history = budget(jitter=0.0, budget_count=100)
    history.decide(exited(), 1.0, 0.0, 0.5)
    history.decide(exited(), 1.0, 1.0, 0.5)

    assert history.decide(exited(), ran_s, 1000.0, 0.5, healthy_s).delay_s == delay_s


def test_restarts_over_budget_within_window_are_crash_loop() -> None:
    history = budget(budget_count=2, budget_window_s=100.0)

    actions = [history.decide(exited(), 1.0, at, 0.5).action for at in (0.0, 10.0, 20.0)]

    assert actions == [RESTART, RESTART, CRASHLOOP]


def test_restarts_outside_window_do_not_count() -> None:
    history = budget(budget_count=2, budget_window_s=100.0)

    actions = [history.decide(exited(), 1.0, at, 0.5).action for at in (0.0, 60.0, 100.0, 180.0)]

    assert actions == [RESTART] * 4


def test_unhealthy_starts_are_counted_anew_after_a_healthy_one() -> None:
    history = budget(jitter=0.0)
    healthy = [0.0, 0.0, 30.0, *[29.9] * 7]
    actions = [history.decide(exited(), 900.0, at * 1200.0, 0.5, each).action for at, each in enumerate(healthy)]
    assert actions == [RESTART] * 9 + [CRASHLOOP]


@pytest.mark.parametrize(
    ("count", "window_s", "message"),
    [
        (1, 60.0, "1 restart within 60 s were"),
        (2, 364 * 86400.0, "2 restarts within 3.14496e+07 s were"),
        (2, 365 * 86400.0, "2 restarts were"),
    ],
)
def test_crash_loop_reports_restart_count_and_reason(count: int, window_s: float, message: str) -> None:
    history = budget(budget_count=count, budget_window_s=window_s)
    decisions = [history.decide(exited(), 1.0, 0.0, 0.5) for _ in range(count + 1)]
    assert decisions[-1].reason == f"{message} not enough: exited 1"


def test_forgive_resets_budget_and_delay() -> None:
    history = budget(budget_count=1, jitter=0.0)
    history.decide(exited(), 1.0, 0.0, 0.5)

    history.reset()

    decision = history.decide(exited(), 1.0, 1.0, 0.5)
    assert (decision.action, decision.delay_s) == (RESTART, 0)
    assert history.decide(exited(), 1.0, 2.0, 0.5).action == CRASHLOOP


def test_forgive_counts_starts_that_were_never_healthy_anew() -> None:
    history = budget(budget_count=2, budget_window_s=1.0)
    actions = []
    for at in range(6):
        actions.append(history.decide(exited(), 9.0, at * 10.0, 0.5, healthy_s=0.0).action)
        if at == 1:
            history.reset()
    assert actions == [RESTART] * 4 + [CRASHLOOP] * 2


@pytest.mark.parametrize(
    ("policy", "exit", "action"),
    [
        ("Always", exited(0), RESTART),
        ("Always", exited(1), RESTART),
        ("OnFailure", exited(0), FINISHED),
        ("OnFailure", exited(1), RESTART),
        ("OnFailure", exited(None, 9), RESTART),
        ("Never", exited(0), FINISHED),
        ("Never", exited(None, 9), FINISHED),
    ],
)
def test_policy_decides_whether_an_exit_is_followed_by_a_start(policy: str, exit: Exit, action: str) -> None:
    assert budget(policy=policy).decide(exit, 1.0, 0.0, 0.5).action == action


def test_on_failure_treats_declared_codes_as_success() -> None:
    assert budget(policy="OnFailure", success_exit_codes=(0, 7)).decide(exited(7), 1.0, 0.0, 0.5).action == FINISHED


lives = st.tuples(st.floats(0, 2000), st.floats(0, 0.999))


@unhurried
@given(st.lists(lives, max_size=60), st.integers(0, 6), st.floats(1, 3000), st.floats(0, 1))
def test_any_history_respects_budget_and_bounds(
    histories: list[tuple[float, float]], count: int, window_s: float, jitter: float
) -> None:
    history = budget(budget_count=count, budget_window_s=window_s, jitter=jitter)
    now = 0.0
    restarts: list[float] = []
    for ran_s, spread in histories:
        now += ran_s
        decision = history.decide(exited(), ran_s, now, spread)
        recent = [at for at in restarts if now - at < window_s]
        assert (decision.action == CRASHLOOP) == (len(recent) >= count)
        if decision.action == CRASHLOOP:
            return
        at_once = not restarts or ran_s >= 600
        assert (decision.delay_s == 0) if at_once else (10 * (1 - jitter) <= decision.delay_s <= 300 * (1 + jitter))
        restarts.append(now)
        now += decision.delay_s


@pytest.mark.parametrize("policy", ["Always", "OnFailure"])
def test_final_exit_code_is_not_restarted(policy: str) -> None:
    history = budget(policy=policy, final_exit_codes=(2,))
    assert history.decide(exited(2), 1.0, 0.0, 0.5).action == FINISHED
    assert history.decide(exited(1), 1.0, 0.0, 0.5).action == RESTART
    assert history.decide(exited(None, 2), 1.0, 0.0, 0.5).action == RESTART, "killed by signal 2"
