"""How turns know which one they continue, and names that say where."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.http.errors import ApiError
from areal.services.http.messages import idempotency_key
from areal.services.inference.recorder import session as names
from areal.services.inference.recorder.records import (
    CallIdentity,
    CallInFlight,
    CallsInFlight,
    check_call_id,
    digest_conversation,
    pack,
    prefix_digests,
    read_retry_count,
    token_digest,
    unpack,
    version_runs,
)
from areal.services.journal import keys
from areal.services.journal.storage import CorruptRecord

ASSISTANT = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    "echoed",
    [
        {"role": "assistant", "content": "yes", "refusal": None, "annotations": []},
        {"content": "yes", "role": "assistant", "tool_calls": None},
        {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
    ],
)
def test_reworded_answer_has_same_digest(echoed: dict[str, Any]) -> None:
    asked = [{"role": "user", "content": "is it?"}]
    assert digest_conversation([*asked, echoed]).answered == (digest_conversation(asked).after(ASSISTANT),)


@pytest.mark.parametrize(
    "other", [{"role": "assistant", "content": "yes "}, {"role": "user", "content": "yes"}, {"role": "assistant"}]
)
def test_different_answer_has_different_digest(other: dict[str, Any]) -> None:
    assert digest_conversation([ASSISTANT]).whole != digest_conversation([other]).whole


def test_tool_call_arguments_may_be_text_or_decoded() -> None:
    def call(arguments: object) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": arguments}}]}

    assert digest_conversation([call('{"a": 1}')]) == digest_conversation([call({"a": 1})])
    assert digest_conversation([call('{"a": 1}')]) != digest_conversation([call({"a": 2})])
    assert digest_conversation([call("no json")]) == digest_conversation([call("no json")])


@given(st.lists(st.integers(0, 2**31 - 1), max_size=30), st.lists(st.integers(0, 40), max_size=6))
def test_token_prefix_digests_match_tokens(tokens: list[int], lengths: list[int]) -> None:
    found = prefix_digests(array("i", tokens), lengths)
    assert found == {length: token_digest(array("i", tokens[:length])) for length in lengths if length <= len(tokens)}


@given(st.lists(st.integers(0, 3)))
def test_version_runs_round_trip(versions: list[int]) -> None:
    data = pack({"shared": 0, "versions": version_runs(versions)}, array("i"), array("i"), array("f"))
    assert unpack(data, "it").versions().tolist() == versions


@given(st.data())
def test_any_changed_byte_of_a_record_is_noticed(data: st.DataObject) -> None:
    packed = pack({"shared": 0, "versions": [(1, 2)]}, array("i", [1, 2]), array("i", [3]), array("f", [0.5]))
    place = data.draw(st.integers(0, len(packed) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    damaged = packed[:place] + bytes([packed[place] ^ bit]) + packed[place + 1 :]
    with pytest.raises(CorruptRecord, match="the thing"):
        unpack(damaged, "the thing")
    with pytest.raises(CorruptRecord):
        unpack(packed[:place], "it")


@given(st.text(min_size=1, max_size=40), st.integers(0, 10**9 - 1))
def test_session_name_round_trips_for_any_task_id(task: str, number: int) -> None:
    name = names.SessionName(task, keys.new_tag(), number)
    assert names.SessionName.parse(str(name)) == name


def test_names_contain_journal_tag() -> None:
    tag = keys.new_tag()
    assert keys.tag_of_key(keys.new_session_key(tag)) == tag
    assert names.tag_of_answer(names.new_answer_id("chatcmpl-", tag)) == tag
    assert names.tag_of_answer(names.new_answer_id("chatcmpl-", tag) + "-3") == tag
    for parsed in (names.GroupName(tag, 1, 2), names.ExportName(tag, 3, "0123abcd"), names.LeaseName(tag, 4, 5)):
        assert type(parsed).parse(str(parsed)) == parsed


@pytest.mark.parametrize("text", ["", "my-own-key", "sk-short", "sk-aaaaaaaa-", "sk-AAAAAAAA-" + "x" * 43])
def test_foreign_keys_have_no_tag(text: str) -> None:
    assert keys.tag_of_key(text) is None
    assert names.SessionName.parse(text) is None


def test_answer_id_without_a_journal_has_no_tag() -> None:
    assert names.tag_of_answer(names.new_answer_id("chatcmpl-", None)) is None


# -- retries

SESSION = ("aaaaaaaa", 1)
FIRST = CallIdentity(SESSION, b"x" * 16, call_id="c")


@contextlib.contextmanager
def leading(flights: CallsInFlight, call: CallIdentity) -> Iterator[CallInFlight]:
    flight = flights.begin(call)
    try:
        yield flight
    finally:
        flights.end(flight)


@pytest.mark.parametrize(
    ("second", "waits"),
    [
        (FIRST, False),  # two samples
        (replace(FIRST, retry=True), True),
        (replace(FIRST, retry=True, digest=b"y" * 16), False),
        (replace(FIRST, retry=True, session=("aaaaaaaa", 2)), False),
        (replace(FIRST, idempotency=b"other"), False),
        (replace(FIRST, again=True), True),  # a relay's next attempt
        (replace(FIRST, again=True, call_id="another"), False),
        (replace(FIRST, again=True, call_id="another", retry=True), True),
    ],
)
async def test_only_same_body_retry_in_session_waits(second: CallIdentity, waits: bool) -> None:
    flights = CallsInFlight()
    with leading(flights, FIRST):
        task = asyncio.create_task(flights.join(second), name="second")
        await asyncio.sleep(0)
        assert task.done() is not waits
    await task
    assert len(flights) == 0


async def test_same_idempotency_key_waits_and_other_body_is_422() -> None:
    flights = CallsInFlight()
    keyed = replace(FIRST, idempotency=b"k")
    with leading(flights, keyed):
        task = asyncio.create_task(flights.join(keyed), name="second")
        await asyncio.sleep(0)
        assert not task.done()
        with pytest.raises(ApiError) as caught:
            await flights.join(replace(keyed, digest=b"y" * 16))
        assert caught.value.status == 422
    await task


async def test_followers_of_failed_leader_run_one_by_one() -> None:
    flights, keyed, ran = CallsInFlight(), replace(FIRST, idempotency=b"k"), []

    async def call(number: int) -> None:
        await flights.join(keyed)
        with leading(flights, keyed):
            await asyncio.sleep(0.01)
            ran.append(number)
            raise RuntimeError

    await asyncio.gather(*(call(number) for number in range(3)), return_exceptions=True)
    assert sorted(ran) == [0, 1, 2]


async def test_follower_gets_place_of_its_leader_record() -> None:
    flights = CallsInFlight()
    with leading(flights, FIRST):
        with leading(flights, FIRST) as newest:
            task = asyncio.create_task(flights.join(replace(FIRST, retry=True)), name="retry")
            await asyncio.sleep(0)
            newest.recorded = 7
        assert await task == 7


def test_retry_counts_keys_and_call_ids_are_validated() -> None:
    assert [check_call_id(text) for text in (None, "c", "\udcff", "c" * 65)] == [None, "c", None, None]
    assert [read_retry_count(text) for text in (None, "0", "1", "-1", "x", "２")] == [False, False, True] + [False] * 3
    assert idempotency_key({}) is None
    for text in ("", "x" * 256, "a\nb"):
        with pytest.raises(ApiError):
            idempotency_key({"Idempotency-Key": text})
