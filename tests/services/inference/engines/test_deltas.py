"""From an answer's bytes to deltas, however the bytes were cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.inference.engines.base import UNKNOWN_VERSION, EngineDelta, EngineFailed, FinishReason
from areal.services.inference.engines.embedded_client import read_delta
from areal.services.inference.engines.transport import EventVersions, JsonEvents, JsonLines, check_event, merged

STEPS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 99), min_size=1, max_size=3)), max_size=12)
CUTS = st.lists(st.integers(0, 2000), max_size=8)


def line(index: int, ids: list[int], finish: str | None = None) -> dict[str, Any]:
    return {
        "index": index,
        "token_ids": ids,
        "logprobs": [-0.5] * len(ids),
        "versions": [3] * len(ids),
        "finish_reason": finish,
    }


def read(data: dict[str, Any]) -> tuple[EngineDelta]:
    check_event(data)
    return (read_delta(data),)


def parts_of(body: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    return [body[start:end] for start, end in pairwise(places)]


def by_choice(deltas: list[EngineDelta]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for delta in deltas:
        assert len(delta.token_ids) == len(delta.logprobs) == len(delta.versions)
        found.setdefault(delta.index, []).extend(delta.token_ids)
    return found


@given(STEPS, CUTS)
def test_tokens_are_emitted_once_for_any_chunking(steps: list[tuple[int, list[int]]], cuts: list[int]) -> None:
    body = b"".join(orjson.dumps(line(index, ids)) + b"\n" for index, ids in steps)
    events = (
        b"".join(b"data: " + orjson.dumps(line(index, ids)) + b"\n\n" for index, ids in steps) + b"data: [DONE]\n\n"
    )
    wanted: dict[int, list[int]] = {}
    for index, ids in steps:
        wanted.setdefault(index, []).extend(ids)
    for reader, text in ((JsonLines(read), body), (JsonEvents(read), events)):
        assert by_choice([delta for part in parts_of(text, cuts) for delta in reader.feed(part)]) == wanted
        reader.end()


def test_one_read_gives_one_delta_per_choice() -> None:
    deltas = [read_delta(line(0, [1])), read_delta(line(1, [2])), read_delta(line(0, [3], "stop"))]
    (first, second) = merged(deltas)
    assert (first.index, first.token_ids, first.finish_reason) == (0, (1, 3), FinishReason.STOP)
    assert (second.index, second.token_ids, second.finish_reason) == (1, (2,), None)


def test_deltas_after_choice_end_are_dropped() -> None:
    (only,) = merged([read_delta(line(0, [1], "length")), read_delta(line(0, [2]))])
    assert only.token_ids == (1,) and only.finish_reason is FinishReason.LENGTH


def test_top_logprobs_stay_aligned_with_tokens() -> None:
    deltas = [read_delta({**line(0, [n]), "top_logprobs": [[[n, -0.5], [n + 1, -1.0]]]}) for n in (1, 5)]
    (only,) = merged(deltas)
    assert only.top_logprobs == (((1, -0.5), (2, -1.0)), ((5, -0.5), (6, -1.0)))


@pytest.mark.parametrize("bad", [b"{}", b"nonsense", b'{"index": 0, "token_ids": 7}', b'{"error": {"message": "oom"}}'])
def test_unreadable_line_fails_after_preceding_deltas(bad: bytes) -> None:
    deltas = iter(JsonLines(read).feed(orjson.dumps(line(0, [1])) + b"\n" + bad + b"\n"))
    assert next(deltas).token_ids == (1,)
    with pytest.raises(EngineFailed, match=r"is malformed|oom"):
        next(deltas)


@pytest.mark.parametrize("bad", [b"{}", b"nonsense", b'{"index": 0, "token_ids": 7}', b'{"error": {"message": "oom"}}'])
def test_single_unreadable_line_fails(bad: bytes) -> None:
    reader = JsonLines(read)
    assert not list(reader.feed(b"\n"))
    assert by_choice(list(reader.feed(orjson.dumps(line(0, [1])) + b"\n"))) == {0: [1]}
    assert not list(reader.feed(bad[:1]))
    with pytest.raises(EngineFailed, match=r"is malformed|oom"):
        list(reader.feed(bad[1:] + b"\n"))
    with pytest.raises(EngineFailed, match=r"is malformed|oom"):
        list(reader.feed(bad + b"\n"))


def test_events_without_end_are_truncated_stream() -> None:
    reader = JsonEvents(read)
    assert list(reader.feed(b"data: " + orjson.dumps(line(0, [1])) + b"\n\n"))
    with pytest.raises(EngineFailed, match="cut"):
        reader.end()


@pytest.mark.parametrize(
    ("began", "count", "label", "versions"),
    [(1, 2, 2, UNKNOWN_VERSION), (1, 1, 2, 2), (2, 2, 2, 2), (None, 2, 2, 2), (UNKNOWN_VERSION, 2, 2, 2)],
)
def test_first_event_spanning_version_change_has_no_version(
    began: int | None, count: int, label: int, versions: int
) -> None:
    assert EventVersions(began).read(0, count, label, None) == ((versions,) * count, None)
