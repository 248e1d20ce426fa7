"""Prompts that are asked for at about the same moment, and in the same way, as one call.

Most of what a short answer costs is its call: a step of sixteen groups that answer a handful of tokens each is sixteen
calls or one. A long answer is asked for alone: the call of many would last as long as the longest of them, and only
the router's choice of a replica for each keeps replicas evenly busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from areal.client.errors import CallerError
from areal.client.inference import AsyncInferenceClient

MOST_CHOICES = 128  # of one call
_MOMENT_S = 0.002
_SHORT_ANSWER = 32  # tokens
_SHORT_PROMPT = 512

Choices = list[dict[str, Any]]


def prompts_a_call(waiting: int, choices: int, replicas: int) -> int:
    """How many of ``waiting`` prompts, each with so many ``choices``, go with one call: every replica has its share."""
    share = -(-waiting // max(1, replicas))
    return max(1, min(share, MOST_CHOICES // choices))


def is_short(prompt_tokens: int, max_tokens: int) -> bool:
    return prompt_tokens <= _SHORT_PROMPT and max_tokens <= _SHORT_ANSWER


@dataclass(frozen=True)
class _Asked:
    prompt: Sequence[int]
    choices: asyncio.Future[Choices] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Gathering:
    """``replicas``: how many servers the model had when it was last asked; 0 where nobody says, and then every prompt
    is asked for alone."""

    def __init__(self, client: AsyncInferenceClient, replicas: int = 0) -> None:
        self._client = client
        self._replicas = replicas
        self._waiting: dict[bytes, list[_Asked]] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def complete(self, prompt: Sequence[int], *, n: int = 1, max_tokens: int, **fields: Any) -> Choices:
        """The ``n`` choices of one prompt, counted from 0. Raises ClientError."""
        options = {**fields, "n": n, "max_tokens": max_tokens}
        if not (self._replicas and is_short(len(prompt), max_tokens)):
            return await self._alone(prompt, options)
        asked, way = _Asked(prompt), orjson.dumps(options, option=orjson.OPT_SORT_KEYS)
        if (others := self._waiting.get(way)) is not None:
            others.append(asked)
        else:
            self._waiting[way] = [asked]
            asyncio.get_running_loop().call_later(_MOMENT_S, self._ask, way, options)
        return await asked.choices

    async def _alone(self, prompt: Sequence[int], options: dict[str, Any]) -> Choices:
        answer = await self._client.complete(prompt, **options)
        choices: Choices = answer["choices"]
        return choices

    def _ask(self, way: bytes, options: dict[str, Any]) -> None:
        waiting = [asked for asked in self._waiting.pop(way) if not asked.choices.done()]
        size = prompts_a_call(len(waiting), options["n"], self._replicas)
        for first in range(0, len(waiting), size):
            together = waiting[first : first + size]
            task = asyncio.create_task(self._call(together, options), name=f"prompts-{len(together)}")
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            for asked in together:
                asked.choices.add_done_callback(_ender(task, together))

    async def _call(self, together: Sequence[_Asked], options: dict[str, Any]) -> None:
        try:
            answer = await self._client.complete([list(asked.prompt) for asked in together], **options)
        except CallerError:  # one of them, and not the others
            await asyncio.gather(*(self._answer_alone(asked, options) for asked in together))
        except Exception as error:  # noqa: BLE001 (those who asked get it)
            for asked in together:
                if not asked.choices.done():
                    asked.choices.set_exception(error)
        else:
            _hand_out(together, answer["choices"], options["n"])

    async def _answer_alone(self, asked: _Asked, options: dict[str, Any]) -> None:
        try:
            choices = await self._alone(asked.prompt, options)
        except Exception as error:  # noqa: BLE001 (whoever asked gets it)
            if not asked.choices.done():
                asked.choices.set_exception(error)
        else:
            if not asked.choices.done():
                asked.choices.set_result(choices)

    async def close(self) -> None:
        """Whoever still waits is cancelled."""
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)


def _ender(task: asyncio.Task[None], together: Sequence[_Asked]) -> Callable[[asyncio.Future[Choices]], None]:
    """A call that nobody waits for any more ends."""

    def end(_: asyncio.Future[Choices]) -> None:
        if all(asked.choices.cancelled() for asked in together):
            task.cancel()

    return end


def _hand_out(together: Sequence[_Asked], choices: Choices, each: int) -> None:
    for number, asked in enumerate(together):
        mine = choices[number * each : (number + 1) * each]
        for index, choice in enumerate(mine):
            choice["index"] = index
        if not asked.choices.done():
            asked.choices.set_result(mine)
