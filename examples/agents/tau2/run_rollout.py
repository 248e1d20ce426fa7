"""Episodes of tau2-bench in batches, without training:

    python -m examples.agents.tau2.run_rollout --config examples/agents/tau2/rollout.yaml \\
        econfig.domain=airline,retail train_dataset.batch_size=8 max_batches=3
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean

from areal.api.cli_args import AgentServiceConfig, GRPOConfig, load_expr_config
from areal.client import AgentController
from areal.errors import ArealError, UsageFault
from examples.agents.tau2.domains import load_domain
from examples.agents.tau2.workflow import Tau2EnvConfig, User, play, sampling_of

MAX_BATCHES = "AREAL_MAX_BATCHES"


@dataclass
class RolloutConfig(GRPOConfig):
    """``agents`` is the agent service: one to start, or by its ``gateway_addr`` one that is there. A batch has
    ``train_dataset.batch_size`` tasks, each ``gconfig.n_samples`` times. ``max_batches`` None: the environment's
    AREAL_MAX_BATCHES, else those of one epoch. ``output``: a file for the episodes, a JSON object a line."""

    econfig: Tau2EnvConfig = field(default_factory=Tau2EnvConfig)
    agents: AgentServiceConfig = field(default_factory=AgentServiceConfig)
    max_batches: int | None = None
    output: str = ""


@dataclass(frozen=True)
class Episode:
    """``reward`` None: it failed, and ``failure`` says why. ``trajectories``: rows for a trainer."""

    domain: str
    task: str
    reward: float | None = None
    ended: str = ""
    messages: int = 0
    trajectories: int = 0
    failure: str = ""


async def episode(controller: AgentController, user: User, config: RolloutConfig, domain: str, task: str) -> Episode:
    """One session. Whatever fails is this episode's failure, and no other's."""
    try:
        started = await controller.start_session(f"{domain}/{task}"[:256])
        session = started["session_id"]
        try:
            played = await play(
                lambda text, metadata: controller.step(text, session, metadata=metadata),
                user,
                domain,
                task,
                max_steps=config.econfig.max_steps,
                sampling=sampling_of(config.gconfig),
            )
            exported = await controller.export_trajectory(session, reward=played.reward)
        finally:
            await controller.close_session(session)
    except Exception as error:  # noqa: BLE001 - the boundary between episodes
        return Episode(domain, task, failure=f"{type(error).__name__}: {error}")
    rows = len(exported.token_rows)
    return Episode(domain, task, played.reward, played.ended, len(played.conversation), rows)


async def batches(controller: AgentController, config: RolloutConfig) -> list[Episode]:
    user, found = User(config.econfig), list[Episode]()
    try:
        for number, tasks in enumerate(_batches(config)):
            runs = (episode(controller, user, config, *each) for each in tasks)
            found += (done := await asyncio.gather(*runs))
            print(f"batch {number}\n{report(done)}", flush=True)
            _write(config.output, done)
    finally:
        await user.close()
    return found


def _batches(config: RolloutConfig) -> Iterator[list[tuple[str, str]]]:
    wanted = set(config.econfig.tasks)
    tasks = [
        (domain, task)
        for domain in config.econfig.domain.split(",")
        for task in load_domain(domain).tasks()
        if not wanted or task in wanted
    ]
    if not tasks:
        raise UsageFault(f"econfig.domain={config.econfig.domain} has none of the tasks {sorted(wanted)}")
    size = config.train_dataset.batch_size
    limit = config.max_batches or _max_batches() or -(-len(tasks) // size)
    shuffled = random.Random(config.seed)
    order = (task for _ in itertools.count() for task in shuffled.sample(tasks, len(tasks)))
    for _ in range(limit):
        yield [task for task in itertools.islice(order, size) for _ in range(config.gconfig.n_samples)]


def _max_batches() -> int | None:
    given = os.environ.get(MAX_BATCHES)
    if not given:
        return None
    if not given.isdecimal() or int(given) < 1:
        raise UsageFault(f"{MAX_BATCHES}={given} is not a number of batches")
    return int(given)


def report(episodes: Sequence[Episode]) -> str:
    """By domain: the mean is of the episodes that have a reward."""
    domains = defaultdict(list)
    for each in episodes:
        domains[each.domain].append(each)
    lines = [f"{'DOMAIN':<16} EPISODES FAILED REWARD"]
    for domain, own in sorted(domains.items()):
        rewards = [each.reward for each in own if each.reward is not None]
        shown = f"{mean(rewards):.3f}" if rewards else "-"
        lines.append(f"{domain:<16} {len(own):>8} {len(own) - len(rewards):>6} {shown:>6}")
    failures = (f"  {each.domain}/{each.task} failed: {each.failure}" for each in episodes if each.failure)
    return "\n".join((*lines, *failures))


def _write(output: str, episodes: Sequence[Episode]) -> None:
    if output:
        with Path(output).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(each)) + "\n" for each in episodes)


def main(argv: list[str]) -> int:
    """1 where every episode failed."""
    try:
        config, _ = load_expr_config(argv, RolloutConfig)
        for domain in config.econfig.domain.split(","):
            load_domain(domain)  # before anything is started
        with AgentController(config.agents) as controller:
            episodes = asyncio.run(batches(controller, config))
    except ArealError as error:
        print(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    print(f"all\n{report(episodes)}")
    return 0 if any(each.reward is not None for each in episodes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
