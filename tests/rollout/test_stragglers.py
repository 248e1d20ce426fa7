"""Heavy tails, by simulation: 2 % of the prompts take forty times as long, and nobody trains on what is too old."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from areal.rollout.staleness import EpisodeSpec, Rollout, StalenessManager, StalenessWindow, is_stale

BATCH, STEP_S, STEPS = 16, 1.0, 300


class Careless(StalenessManager):
    """Takes whatever is finished, however old."""

    def drop_stale(self) -> int:
        return 0


@dataclass
class Simulation:
    """Episodes of 1 to 3 seconds before a trainer whose step takes one; ``slow``: the share of long ones."""

    manager: StalenessManager
    slow: float
    now: float = 0.0
    staleness: list[int] = field(default_factory=list)
    running: list[tuple[float, int, EpisodeSpec, int]] = field(default_factory=list)
    submitted: int = 0

    def seconds(self, number: int) -> float:
        """The prompt's own: it takes as long when it runs again."""
        chance = random.Random(number)
        return chance.uniform(1.0, 3.0) * (40.0 if chance.random() < self.slow else 1.0)

    def feed(self) -> None:
        while len(self.manager.pending) < 2 * BATCH:
            self.manager.submit(EpisodeSpec(self.submitted, {}, None, str(self.submitted)))
            self.submitted += 1
        while (item := self.manager.next_to_run()) is not None:
            heapq.heappush(
                self.running, (self.now + self.seconds(item.number), item.number, item, self.manager.version)
            )

    def end_one(self) -> None:
        end, _, item, head = heapq.heappop(self.running)
        self.now = max(self.now, end)
        self.manager.ended(item, Rollout(item, None, head, self.manager.version))

    def until(self, moment: float) -> None:
        while self.running and self.running[0][0] <= moment:
            self.end_one()
            self.feed()
        self.now = max(self.now, moment)

    def run(self) -> float:
        for step in range(STEPS):
            self.feed()
            while (taken := self.manager.take(BATCH)) is None:
                self.feed()
                self.end_one()
            self.staleness += [self.manager.version - each.head_version for each in taken]
            self.feed()
            self.until(self.now + STEP_S)
            self.manager.set_version(step + 1)
            self.give_up_stale()
        return self.now

    def give_up_stale(self) -> None:
        """As the executor does."""
        manager = self.manager
        if isinstance(manager, Careless):
            return
        for _, _, item, head in self.running:
            if is_stale(manager.window, head, manager.version):
                manager.aborted(item)
        self.running = [each for each in self.running if not is_stale(manager.window, each[3], manager.version)]
        heapq.heapify(self.running)


@pytest.mark.parametrize("eta", [0, 1, 2, 4])
def test_staleness_never_exceeds_its_bound(eta: int) -> None:
    simulation = Simulation(StalenessManager(StalenessWindow(BATCH, eta, 64)), slow=0.02)
    simulation.run()
    assert max(simulation.staleness) <= eta
    assert len(simulation.staleness) == BATCH * STEPS


def test_bound_costs_no_throughput_against_taking_whatever_is_finished() -> None:
    window = StalenessWindow(BATCH, 2, 64)
    careful, careless = Simulation(StalenessManager(window), 0.02), Simulation(Careless(window), 0.02)
    wall, fastest = careful.run(), careless.run()
    assert max(careless.staleness) > 10
    assert wall <= fastest


def test_prompts_that_always_take_too_long_are_abandoned_and_fill_no_window() -> None:
    simulation = Simulation(StalenessManager(StalenessWindow(BATCH, 2, 64)), slow=0.25)
    simulation.run()
    counts = simulation.manager.counts
    assert counts.consumed == BATCH * STEPS
    assert counts.abandoned > 0 and counts.dropped <= 2 * simulation.submitted
    assert simulation.now < 2.5 * STEP_S * STEPS
