"""What a client is handed: everything once, in order, first and last tokens at once, the rest in fewer wakes."""

from __future__ import annotations

import asyncio

from areal.services.inference.engines.embedded.requests import Streams
from areal.services.inference.engines.embedded.scheduler import Finish, TokenSequence

from .support import make_sequence


def produce(sequence: TokenSequence, *tokens: int, finish: Finish | None = None) -> None:
    for token in tokens:
        sequence.output.append(token)
        sequence.logprobs.append(-1.0)
        sequence.versions.append(0)
        sequence.produced += 1
    sequence.finish = finish


def streams() -> Streams:
    return Streams(asyncio.get_running_loop())


async def test_stepwise_stream_yields_every_token_once() -> None:
    opened, sequence = streams(), make_sequence([1])
    stream = opened.open([sequence], whole=False)
    received: list[int] = []
    finishes: list[Finish | None] = []

    async def consume() -> None:
        while not stream.ended:
            for delta in await stream.next():
                received.extend(delta.token_ids)
                finishes.append(delta.finish_reason)

    consuming = asyncio.create_task(consume(), name="consume")
    for step in range(500):
        last = step == 499
        produce(sequence, step, finish=Finish.LENGTH if last else None)
        await asyncio.to_thread(opened.progress, step == 0 or last)
    await asyncio.wait_for(consuming, 10)
    assert received == list(range(500))
    assert finishes == [None] * (len(finishes) - 1) + [Finish.LENGTH]
    assert len(finishes) < 500


async def test_first_and_last_token_wake_reader_before_flush() -> None:
    opened, sequence, other = streams(), make_sequence([1]), make_sequence([1], index=1)
    stream, idle = opened.open([sequence], whole=False), opened.open([other], whole=False)
    for tokens, finish in (((5,), None), ((6, 7), Finish.STOP)):
        produce(sequence, *tokens, finish=finish)
        opened.progress(True)
        (delta,) = await asyncio.wait_for(stream.next(), 5)
        assert delta.token_ids == list(tokens)
    assert stream.ended
    assert not idle.has_news()


async def test_whole_stream_wakes_once_all_sequences_ended() -> None:
    opened = streams()
    pair = [make_sequence([1], index=index) for index in range(2)]
    stream = opened.open(pair, whole=True)
    produce(pair[0], 1, 2, finish=Finish.STOP)
    assert not stream.is_due()
    produce(pair[1], 3, finish=Finish.LENGTH)
    opened.progress(True)
    deltas = await asyncio.wait_for(stream.next(), 5)
    assert [(delta.index, delta.token_ids) for delta in deltas] == [(0, [1, 2]), (1, [3])]
    assert stream.ended


async def test_settle_returns_once_known_tokens_are_read() -> None:
    opened, sequence = streams(), make_sequence([1])
    stream = opened.open([sequence], whole=False)
    taken: list[int] = []

    async def consume() -> None:
        while True:
            deltas = await stream.next()
            await asyncio.sleep(0)
            taken.extend(token for delta in deltas for token in delta.token_ids)

    consuming = asyncio.create_task(consume(), name="consume")
    await asyncio.sleep(0)
    produce(sequence, 1, 2, 3)
    await opened.settle(10)
    assert taken == [1, 2, 3]
    consuming.cancel()


async def test_settle_gives_up_on_idle_reader_after_deadline() -> None:
    opened, sequence = streams(), make_sequence([1])
    opened.open([sequence], whole=False)
    produce(sequence, 1)
    await asyncio.wait_for(opened.settle(0.01), 5)


async def test_whole_stream_records_first_token_time() -> None:
    opened, sequence = streams(), make_sequence([1])
    stream = opened.open([sequence], whole=True)
    assert stream.first_at is None
    produce(sequence, 1)
    opened.progress(True)
    await asyncio.sleep(0)
    first_at = stream.first_at
    assert first_at is not None
    produce(sequence, 2, finish=Finish.LENGTH)
    opened.progress(True)
    await asyncio.wait_for(stream.next(), 5)
    assert stream.first_at == first_at


async def test_stream_with_interval_waits_for_that_many_tokens() -> None:
    opened, sequence = streams(), make_sequence([1])
    stream = opened.open([sequence], whole=False, interval=4)
    received: list[list[int]] = []

    async def consume() -> None:
        while not stream.ended:
            received.extend(delta.token_ids for delta in await stream.next())

    consuming = asyncio.create_task(consume(), name="consume")
    await asyncio.sleep(0)
    produce(sequence, 1)
    opened.progress(True)
    await asyncio.sleep(0.01)
    assert received == [[1]], "the first token is sent at once"
    produce(sequence, 2, 3, 4)
    assert not stream.has_news()
    produce(sequence, 5)
    assert stream.has_news()
    produce(sequence, 6)
    await opened.settle(10)
    assert received == [[1], [2, 3, 4, 5, 6]], "a pause waits for no interval"
    produce(sequence, 7, finish=Finish.STOP)
    opened.progress(True)
    await asyncio.wait_for(consuming, 10)
    assert received[-1] == [7]


async def test_steps_do_not_wake_loop_without_reader() -> None:
    opened = streams()
    patient, eager = make_sequence([1]), make_sequence([2])
    opened.open([patient], whole=True)
    woken: list[object] = []
    loop = asyncio.get_running_loop()
    threadsafe, later = loop.call_soon_threadsafe, loop.call_later
    loop.call_soon_threadsafe = lambda *given, **more: woken.append(given) or threadsafe(*given, **more)  # type: ignore[method-assign,func-returns-value]
    loop.call_later = lambda *given, **more: woken.append(given) or later(*given, **more)  # type: ignore[method-assign,func-returns-value]
    for token in range(100):
        produce(patient, token)
        opened.progress(False)
        await asyncio.sleep(0)
    assert len(woken) == 1
    stream = opened.open([eager], whole=False)
    for token in (5, 6):
        produce(eager, token)
        opened.progress(False)
        (delta,) = await asyncio.wait_for(stream.next(), 5)
        assert delta.token_ids == [token]
