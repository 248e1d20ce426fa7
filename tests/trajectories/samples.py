"""Episodes for tests: made by hand, small, with a branch."""

from __future__ import annotations

from typing import Any

from areal.trajectories.record import Episode, Interaction


def interaction(
    name: str,
    prompt: list[int],
    answer: list[int],
    *,
    parent: str | None = None,
    reward: float | None = None,
    logprob: float = -0.5,
    version: int = 3,
    **more: Any,
) -> Interaction:
    before, after = len(prompt), len(answer)
    return Interaction(
        interaction_id=name,
        parent_id=parent,
        session_id="s-0",
        model="tiny",
        finish_reason="stop",
        rewarded=reward is not None,
        reward=reward or 0.0,
        original_reward=reward or 0.0,
        input_ids=prompt + answer,
        loss_mask=[0] * before + [1] * after,
        logprobs=[0.0] * before + [logprob] * after,
        versions=[-1] * before + [version] * after,
        turn_ids=[-1] * before + [0] * after,
        **more,
    )


def branched(name: str = "0-0", reward: float | None = 1.0) -> Episode:
    """A turn that two others continue, the second of which goes on."""
    first = interaction("a", [1, 2], [3])
    second = interaction("b", [1, 2, 3, 4], [5], parent="a", reward=0.0, version=4)
    third = interaction("c", [1, 2, 3, 6], [7], parent="a", logprob=-4.0)
    fourth = interaction("d", [1, 2, 3, 6, 7, 8], [9], parent="c", reward=reward)
    example = {"question": "how?", "answer": 7}
    return Episode(name, (first, second, third, fourth), 0, 0, reward, "said", 1.25, "exp-1", example)


def external() -> Episode:
    messages = [{"role": "user", "content": "<b>hi</b>"}]
    row = Interaction(
        "x", None, "s-1", 0, "gpt", "stop", messages=messages, response={"role": "assistant", "content": "ho"}
    )
    return Episode("1-0", (row,), 1, 0)
