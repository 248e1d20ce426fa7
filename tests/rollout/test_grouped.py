"""Groups of episodes of one prompt."""

from __future__ import annotations

from typing import Any

import pytest

from areal.api.io_struct import ModelResponse
from areal.api.workflow_api import RolloutWorkflow
from areal.rollout.tensors import RewardedResponse, row
from areal.rollout.workflows import GroupedWorkflow


class Engines:
    """Gives each member of a group an engine of its own: its number."""

    def for_group(self, size: int) -> list[int]:
        return list(range(size))


class Member(RolloutWorkflow):
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        if engine in data.get("failing", ()):
            raise ConnectionError(f"member {engine}")
        return None if engine in data.get("rejected", ()) else row([engine], [1], [0.0], [0], [0], 1.0)


class Together(Member):
    """Samples groups of two itself."""

    def can_group(self, engine: Any, size: int) -> bool:
        return size == 2

    async def arun_group(self, engine: Any, data: dict[str, Any], size: int) -> list[RewardedResponse | Exception]:
        answers = [ModelResponse([70 + n], [5] * n, [-1.0] * n, [3] * n, "stop") for n in range(size)]
        given: list[RewardedResponse | Exception] = [RewardedResponse(each, 1.0) for each in answers]
        return [ConnectionError("first"), *given[1:]] if data.get("failing") else given


async def test_members_have_the_engines_of_one_group() -> None:
    group = await GroupedWorkflow(Member(), 3).arun_episode(Engines(), {"rejected": [1]})
    assert group is not None and group["input_ids"].tolist() == [[0], [2]]
    assert group["sample_ids"].tolist() == [0, 2]
    assert await GroupedWorkflow(Member(), 2).arun_episode(Engines(), {"rejected": [0, 1]}) is None


async def test_workflow_that_samples_groups_is_asked_where_it_can() -> None:
    together = await GroupedWorkflow(Together(), 2).arun_episode(Engines(), {})
    assert together is not None and together["input_ids"].tolist() == [[70, 0], [71, 5]]
    apart = await GroupedWorkflow(Together(), 3).arun_episode(Engines(), {})
    assert apart is not None and apart["input_ids"].tolist() == [[0], [1], [2]]


@pytest.mark.parametrize("workflow", [Member(), Together()])
async def test_failed_member_fails_a_whole_group_and_is_missing_in_another(workflow: RolloutWorkflow) -> None:
    data = {"failing": [0]}
    with pytest.raises(ConnectionError):
        await GroupedWorkflow(workflow, 2).arun_episode(Engines(), data)
    short = await GroupedWorkflow(workflow, 2, whole=False).arun_episode(Engines(), data)
    assert short is not None and short["sample_ids"].tolist() == [1]


async def test_samples_that_are_left_out_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    group = GroupedWorkflow(Member(), 3, whole=False)
    for _ in range(5):
        await group.arun_episode(Engines(), {"failing": [1]})
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [1, 2, 4]
    assert "member 1" in caplog.text
