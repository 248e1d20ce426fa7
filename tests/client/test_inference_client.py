"""The SDK's inference clients against a data proxy that records."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest

from areal.client import (
    AsyncInferenceClient,
    Blame,
    CallerError,
    ConnectionLost,
    DeadlineExceeded,
    InferenceClient,
    NotReady,
    RetryPolicy,
    ServiceError,
    StateConflict,
    Unauthorized,
    UnknownName,
    Unreachable,
)
from tests.client.conftest import Place
from tests.services.processes import engine_calls, release, script

HELLO = [{"role": "user", "content": "Hello"}]
AT_ONCE = RetryPolicy(attempts=1)


@pytest.fixture
def client(place: Place) -> Iterator[InferenceClient]:
    with InferenceClient(place.proxy.url, place.key, model="tiny", timeout_s=20) as client:
        yield client


@pytest.fixture
async def aclient(place: Place) -> AsyncIterator[AsyncInferenceClient]:
    async with AsyncInferenceClient(place.proxy.url, place.key, model="tiny", timeout_s=20) as client:
        yield client


def test_two_turn_episode_exports_engine_output(place: Place, client: InferenceClient) -> None:
    session = client.start_session("task")
    first = session.chat(HELLO)
    answer = first["choices"][0]["message"]
    session.chat([*HELLO, answer, {"role": "user", "content": "And?"}])
    assert not session.reward(0.25, first["id"]).trajectory_ready
    assert session.reward(1.0).ready_transition
    rows = session.export(style="concat", discount=0.5)

    seen = [call["body"]["input_ids"] for call in engine_calls(place.engine)]
    assert len(rows) == 1
    assert rows.columns["input_ids"][0, : len(seen[1])].tolist() == seen[1]
    assert rows.columns["loss_mask"].dtype == np.int64
    client.acknowledge(rows)


def test_npz_and_json_exports_are_equal(client: InferenceClient) -> None:
    session = client.start_session("task")
    session.chat(HELLO)
    session.reward(0.5)
    packed = session.export(remove_session=False)
    plain = session.export(remove_session=False, format="json")
    assert packed.export_id == plain.export_id
    assert packed.rows == plain.rows
    for name, column in packed.numpy().items():
        assert column.dtype == plain.columns[name].dtype
        assert np.array_equal(column, plain.columns[name])
    assert packed.torch()["logprobs"].dtype.itemsize == 4


def test_group_has_one_session_per_member(client: InferenceClient) -> None:
    group = client.start_group("task", 3)
    for number, session in enumerate(group.sessions):
        session.chat(HELLO)
        session.reward(float(number))
    assert group.export().columns["original_rewards"].tolist() == [0.0, 1.0, 2.0]
    assert len({session.api_key for session in group.sessions}) == 3


def test_stream_yields_chunks_and_closing_cancels_generation(place: Place, client: InferenceClient) -> None:
    script(place.engine, gate=1, text="one two three")
    with client.stream_chat(HELLO) as chunks:
        assert next(chunks)["choices"][0]["delta"]["role"] == "assistant"
    assert engine_calls(place.engine, until="cancelled")


def test_stream_whole_text(client: InferenceClient) -> None:
    with client.stream_chat(HELLO, temperature=0.5) as chunks:
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == "Hello there, friend!"


def test_completion_of_token_ids_returns_token_ids(client: InferenceClient) -> None:
    choice = client.complete([5, 6, 7], max_tokens=3, return_token_ids=True, logprobs=0)["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert len(choice["token_ids"]) == len(choice["versions"]) == len(choice["logprobs"]["token_logprobs"]) == 3


def test_online_trajectories_are_lent_until_acknowledged(client: InferenceClient) -> None:
    session = client.start_session("task", online=True)
    session.chat(HELLO)
    session.reward(0.5)
    leases = client.lend(limit=8, wait_s=10)
    assert [(lease.session_id, lease.trajectory_id) for lease in leases] == [(session.session_id, 0)]
    assert leases[0].trajectories.columns["rewards"].tolist() == [0.5]
    client.acknowledge_leases(leases)
    assert client.lend() == []


def test_sessions_are_listed_across_pages(client: InferenceClient) -> None:
    started = {client.start_session("task").session_id for _ in range(3)}
    assert started <= {session["session_id"] for session in client.sessions(page=2)}


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        (lambda c: c.chat(HELLO, model="none"), UnknownName, "model_not_found"),
        (lambda c: c.chat(HELLO, n=0), CallerError, "invalid_value"),
        (lambda c: c.chat(HELLO, key="unknown-key-1"), Unauthorized, None),
        (lambda c: c.export(["absent"]), UnknownName, "session_not_found"),
        (lambda c: c.export([c.start_session("task").session_id]), NotReady, None),
        (lambda c: c.set_reward(1e300, key=c.start_session("task").api_key), CallerError, "invalid_value"),
    ],
    ids=["model", "field", "key", "session", "not-ready", "reward"],
)
def test_caller_error_is_not_retried(
    client: InferenceClient, call: Callable[[InferenceClient], object], error: type[CallerError], code: str | None
) -> None:
    with pytest.raises(error) as caught:
        call(client)
    assert caught.value.blame is Blame.CALLER
    assert code is None or caught.value.code == code
    assert caught.value.request_id


def test_different_reward_on_sealed_trajectory_is_conflict(client: InferenceClient) -> None:
    session = client.start_session("task")
    session.chat(HELLO)
    assert session.reward(1.0).trajectory_ready
    assert session.reward(1.0).ready_transition  # the same answer again
    with pytest.raises(StateConflict):
        session.reward(0.0)


def test_nan_is_refused_before_sending(client: InferenceClient) -> None:
    session = client.start_session("task")
    session.chat(HELLO)
    for call in (
        lambda: client.set_reward(math.nan),
        lambda: session.export(reward=math.nan),
        lambda: session.chat(HELLO, metadata={"scores": [math.inf]}),
    ):
        with pytest.raises(CallerError, match="Out of range float"):
            call()


async def test_failing_engine_is_service_error(place: Place, aclient: AsyncInferenceClient) -> None:
    script(place.engine, fail=500)
    with pytest.raises(ServiceError) as caught:
        await aclient.chat(HELLO)
    assert caught.value.blame is Blame.SERVICE


async def test_slow_call_is_ended_with_deadline_error(place: Place, aclient: AsyncInferenceClient) -> None:
    script(place.engine, gate=1)
    with pytest.raises(DeadlineExceeded) as caught:
        await aclient.chat(HELLO, timeout_s=0.3)
    assert caught.value.blame is Blame.INFRASTRUCTURE
    release(place.engine)


async def test_unreachable_address_has_hint() -> None:
    async with AsyncInferenceClient("http://127.0.0.1:1", retry=AT_ONCE) as client:
        with pytest.raises(Unreachable) as caught:
            await client.models()
    assert "127.0.0.1:1" in caught.value.message
    assert caught.value.hint


async def test_wait_ready_reports_missing_model(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncInferenceClient(place.proxy.url, place.key, model="other") as client:
        with pytest.raises(DeadlineExceeded, match="'other' is not served"):
            await client.wait_ready(2.0)
    assert [record.message for record in caplog.records if "'other' is not served" in record.message] == [
        f"waiting for {place.proxy.url}, 2 s at most: model 'other' is not served; there is ['tiny']"
    ]


async def test_lost_answer_of_recorded_chat_is_retried_once(place: Place) -> None:
    """A front that drops the connection after the first answer: the retry gets that very answer."""
    dropped: list[Any] = []
    async with _dropping_front(place.proxy.port, dropped) as front:
        async with AsyncInferenceClient(front, place.key, model="tiny", timeout_s=20) as client:
            session = await client.start_session("task")
            dropped.append("next")
            answer = await session.chat(HELLO)
            await session.reward(1.0, answer["id"])
            assert len(await session.export()) == 1
    assert dropped == []
    assert len(engine_calls(place.engine)) == 1


async def test_lost_answer_of_start_is_not_retried(place: Place) -> None:
    dropped = ["next"]
    async with _dropping_front(place.proxy.port, dropped) as front:
        async with AsyncInferenceClient(front, place.key) as client:
            with pytest.raises(ConnectionLost):
                await client.start_session("task")


async def test_many_calls_at_once_share_the_pool(aclient: AsyncInferenceClient) -> None:
    answers = await asyncio.gather(*(aclient.chat(HELLO, store=False) for _ in range(40)))
    assert len({answer["id"] for answer in answers}) == 40


def test_blocking_client_is_thread_safe_and_closes_twice(place: Place) -> None:
    client = InferenceClient(place.proxy.url, place.key)
    found: list[list[str]] = []
    threads = [threading.Thread(target=lambda: found.append(client.models())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    client.close()
    assert found == [["tiny"]] * 4
    with pytest.raises(RuntimeError, match="closed"):
        client.models()


@contextlib.asynccontextmanager
async def _dropping_front(port: int, dropped: list[str]) -> AsyncIterator[str]:
    """Relays bytes to a port; while ``dropped`` has an entry, the next connection's answer is swallowed whole."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while request := await reader.read(65536):
                up_writer.write(request)
                answer = await up_reader.read(65536)
                if dropped:
                    dropped.pop()
                    return
                writer.write(answer)
                await writer.drain()
        finally:
            for each in (up_writer, writer):
                each.close()
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
