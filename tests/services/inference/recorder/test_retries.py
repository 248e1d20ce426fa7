"""Retries wait for the call that they repeat; deliberate repetitions do not."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from areal.services.http.errors import ApiError
from areal.services.inference.recorder.records import (
    CallIdentity,
    CallsInFlight,
    check_idempotency_key,
    read_retry_count,
)

SESSION = ("aaaaaaaa", 1)
FIRST = CallIdentity(SESSION, b"x" * 16)


@pytest.mark.parametrize(
    ("second", "waits"),
    [
        (FIRST, False),  # two samples
        (replace(FIRST, retry=True), True),
        (replace(FIRST, retry=True, digest=b"y" * 16), False),
        (replace(FIRST, retry=True, session=("aaaaaaaa", 2)), False),
        (replace(FIRST, idempotency=b"other"), False),
    ],
)
async def test_only_a_retry_of_the_same_body_in_the_same_session_waits(second: CallIdentity, waits: bool) -> None:
    flights = CallsInFlight()
    with flights.leading(FIRST):
        task = asyncio.create_task(flights.join(second), name="second")
        await asyncio.sleep(0)
        assert task.done() is not waits
    await task
    assert len(flights) == 0


async def test_same_idempotency_key_waits_and_another_body_under_it_is_422() -> None:
    flights = CallsInFlight()
    keyed = replace(FIRST, idempotency=b"k")
    with flights.leading(keyed):
        task = asyncio.create_task(flights.join(keyed), name="second")
        await asyncio.sleep(0)
        assert not task.done()
        with pytest.raises(ApiError) as caught:
            await flights.join(replace(keyed, digest=b"y" * 16))
        assert caught.value.status == 422
    await task


async def test_followers_of_a_failed_leader_go_on_one_after_another() -> None:
    flights, keyed, ran = CallsInFlight(), replace(FIRST, idempotency=b"k"), []

    async def call(number: int) -> None:
        await flights.join(keyed)
        with flights.leading(keyed):
            await asyncio.sleep(0.01)
            ran.append(number)
            raise RuntimeError

    await asyncio.gather(*(call(number) for number in range(3)), return_exceptions=True)
    assert sorted(ran) == [0, 1, 2]


async def test_follower_is_told_where_its_leader_is_recorded_whoever_else_flies() -> None:
    flights = CallsInFlight()
    with flights.leading(FIRST):
        with flights.leading(FIRST) as newest:
            task = asyncio.create_task(flights.join(replace(FIRST, retry=True)), name="retry")
            await asyncio.sleep(0)
            newest.recorded = 7
        assert await task == 7


def test_retry_counts_and_keys_are_read_strictly() -> None:
    assert [read_retry_count(text) for text in (None, "0", "1", "-1", "x", "２")] == [False, False, True] + [False] * 3
    assert check_idempotency_key(None) is None
    for text in ("", "x" * 256, "a\nb"):
        with pytest.raises(ApiError):
            check_idempotency_key(text)
