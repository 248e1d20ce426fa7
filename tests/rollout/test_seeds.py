"""The same seed, data and order give the same samples, whatever a run is called."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.client import RolloutController
from areal.training.frontier import DataOrder, Frontier
from areal.training.trainers.rollouts import PromptStream
from areal.workflow.environment import EnvironmentWorkflow
from areal.workflow.multi_turn import MultiTurnWorkflow
from areal.workflow.rlvr import RLVRWorkflow
from tests.client.conftest import Place
from tests.drivers.reversing_env import Asking, Reversing
from tests.reward.rewards import never_right, reverse_reward

GCONFIG = GenerationHyperparameters(max_new_tokens=6, temperature=1.5)
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": text}], "question": text, "answer": text[::-1]}
    for text in ("1234", "5678", "4321", "8765")
]


def one_answer(folder: str) -> Any:
    return RLVRWorkflow(reverse_reward, GCONFIG, folder)


def several_turns(folder: str) -> Any:
    return MultiTurnWorkflow(never_right, GCONFIG, folder, max_turns=3, feedback="9876")


def environment(folder: str) -> Any:
    return EnvironmentWorkflow(Asking, Reversing)


class Calls:
    """A workflow with OpenAI's client."""

    def __init__(self, folder: str) -> None: ...

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        from areal.experimental.openai import ArealOpenAI

        client = ArealOpenAI(engine=engine)
        for _ in range(2):
            await client.chat.completions.create(
                messages=data["messages"], max_completion_tokens=6, temperature=1.5, store=True
            )
        client.set_last_reward(1.0)
        return client.export_interactions()


class Responses(Calls):
    """The same by OpenAI's Responses API."""

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        from areal.experimental.openai import ArealOpenAI

        client = ArealOpenAI(engine=engine)
        for _ in range(2):
            await client.responses.create(input=data["question"], max_output_tokens=6, temperature=1.5)
        client.set_last_reward(1.0)
        return client.export_interactions()


class OwnClient:
    """An agent with a client of its own; its second and third call are made at once."""

    async def run(self, data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **_: Any) -> float:
        import openai

        client = openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=api_key, http_client=http_client)
        asked: dict[str, Any] = {"model": "digits", "max_completion_tokens": 6, "temperature": 1.5}
        first = await client.chat.completions.create(messages=data["messages"], **asked)
        digits: list[Any] = [{"role": "user", "content": text} for text in ("12", "34")]
        await asyncio.gather(*(client.chat.completions.create(messages=[each], **asked) for each in digits))
        return float(len(first.choices))


def own_client(folder: str) -> Any:
    return OwnClient()


def samples(
    place: Place, make: Any, trial: str, seed: int | None = 1, rows: Any = ROWS, group_size: int = 2, **config: Any
) -> list[list[list[int]]]:
    """The token ids of a run with this trial name: of each group, of each row."""
    config = {"consumer_batch_size": len(rows), **config}
    made = InferenceEngineConfig(trial_name=trial, request_timeout=60, setup_timeout=60, **config)
    with RolloutController(
        made, gateway_addr=place.proxy.url, admin_api_key=place.key, model="digits", seed=seed
    ) as controller:
        batch = controller.rollout_batch(list(rows), make(str(place.folder)), group_size=group_size)
    return [sorted(group["input_ids"].tolist()) for group in batch]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("make", [one_answer, several_turns, environment, Calls, Responses, own_client])
def test_samples_are_independent_of_trial_name(digits: Place, make: Any, deterministic: bool) -> None:
    config = {"deterministic_sampling": deterministic}
    first = samples(digits, make, "one", **config)
    assert samples(digits, make, "two", experiment_name="other", **config) == first
    assert samples(digits, make, "one", seed=2, **config) != first
    assert len({str(row) for group in first for row in group}) > len(first)  # members of a group differ


def test_repeated_prompt_has_other_samples_at_each_position(digits: Place) -> None:
    groups = samples(digits, one_answer, "one", rows=[ROWS[0]] * 4, group_size=4)
    assert len({str(group) for group in groups}) == 4
    assert samples(digits, one_answer, "two", rows=[ROWS[0]] * 4, group_size=4) == groups


def test_controller_without_seed_samples_randomly(digits: Place) -> None:
    first = samples(digits, one_answer, "one", seed=None)
    assert samples(digits, one_answer, "one", seed=None) != first


class Seeded(Reversing):
    seeds: ClassVar[list[int | None]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        return super().reset(seed=seed, options=options)


def test_environment_is_seeded_like_answers(digits: Place) -> None:
    def seeds(trial: str, **config: Any) -> list[int | None]:
        Seeded.seeds.clear()
        samples(digits, lambda folder: EnvironmentWorkflow(Asking, Seeded), trial, **config)
        return sorted(Seeded.seeds, key=str)

    first = seeds("one")
    assert seeds("two") == first and len(set(first)) == 2 * len(ROWS) and None not in first
    assert set(seeds("three", seed=None)) == {None}


def test_sampling_seed_is_independent_of_trial_name(digits: Place) -> None:
    def seeded(folder: str) -> Any:
        return RLVRWorkflow(reverse_reward, GCONFIG.new(seed=7), folder)

    first = samples(digits, seeded, "one")
    assert samples(digits, seeded, "two", seed=2) == first


def test_resumed_run_samples_like_uninterrupted_one(digits: Place) -> None:
    order = DataOrder(len(ROWS), shuffle=True)

    def taken(frontier: Frontier, count: int) -> list[Any]:
        stream = iter(PromptStream(ROWS, order, frontier))
        return [next(stream) for _ in range(count)]

    whole = samples(digits, one_answer, "whole", rows=taken(Frontier(), 4))
    frontier = Frontier()
    first = taken(frontier, 2)
    frontier.consume(prompt.position for prompt in first)
    rest = taken(Frontier.restored(frontier.state()), 2)
    assert samples(digits, one_answer, "a", rows=first) + samples(digits, one_answer, "b", rows=rest) == whole


def test_failed_prompt_is_resampled(digits: Place) -> None:
    frontier = Frontier()
    stream = iter(PromptStream(ROWS, DataOrder(len(ROWS), shuffle=False), frontier))
    first = next(stream)
    frontier.fail(first.position)
    again = next(stream)
    assert (again.position, again.tries) == (first.position, 1)
    assert samples(digits, one_answer, "t", rows=[first]) != samples(digits, one_answer, "t", rows=[again])
