"""Engine clients against servers that speak each engine's documented routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from areal.http.client import HttpClient, Window
from areal.services.inference.engines import open_engine, transport, vllm
from areal.services.inference.engines.base import (
    UNKNOWN_VERSION,
    EngineCall,
    EngineDelta,
    EngineFailed,
    EngineRefused,
    EngineUnavailable,
    FinishReason,
    TokenEngine,
)
from areal.wire.sampling import SamplingParams
from tests.services.inference.engines.deltas import deltas_of
from tests.services.scripted_api import ScriptedApi, scripted_api

CALL = EngineCall(
    "call-1", ((1, 2, 3),), SamplingParams(max_new_tokens=4, temperature=0.5, stop_token_ids=(9,), top_logprobs=2)
)
PLAIN = replace(CALL, sampling=replace(CALL.sampling, top_logprobs=0))
PATHS = {"embedded": "POST /generate", "vllm": "POST /v1/completions", "sglang": "POST /generate"}
SPANS = "POST /inference/v1/generate"
VLLM_MODELS = (200, {"data": [{"id": "/models/tiny", "max_model_len": 77}]})


@pytest.fixture
async def http() -> AsyncIterator[HttpClient]:
    client = HttpClient()
    yield client
    client.close()


@pytest.fixture
async def api() -> AsyncIterator[ScriptedApi]:
    async with scripted_api() as api:
        api.replies |= {"GET /health": (200, {}), "GET /v1/models": VLLM_MODELS, "GET /model_info": (200, {})}
        yield api


async def engine(kind: str, http: HttpClient, url: str) -> TokenEngine:
    client = open_engine(kind, http, url, {"Authorization": "Bearer k"})
    await client.state()  # as a data proxy does before it sends anything
    return client


async def collect(client: TokenEngine, call: EngineCall = CALL) -> list[EngineDelta]:
    return [delta async for delta in deltas_of(client, call)]


def tokens_of(deltas: list[EngineDelta]) -> list[tuple[int, float, int]]:
    """Each with its log-probability and version, however many came at once."""
    return [each for one in deltas for each in zip(one.token_ids, one.logprobs, one.versions, strict=True)]


async def test_vllm_requests_and_reads_token_ids(http: HttpClient, api: ScriptedApi) -> None:
    api.replies["POST /v1/completions"] = [
        {"choices": [_vllm_choice([5], finish=None)]},
        {"choices": [_vllm_choice([9], finish="stop")]},
        {"choices": [], "usage": {}},
        "[DONE]",
    ]
    deltas = await collect(await engine("vllm", http, api.url))
    assert tokens_of(deltas) == [(5, -0.5, 0), (9, -0.5, 0)]
    assert deltas[0].top_logprobs is not None and deltas[0].top_logprobs[0] == ((5, -0.5), (6, -1.0))
    assert deltas[-1].finish_reason is FinishReason.STOP and deltas[-1].stop_token_id == 9
    body = api.bodies("POST /v1/completions")[-1]
    assert body["model"] == "/models/tiny" and body["prompt"] == [1, 2, 3] and body["stream"] is True
    assert body["return_token_ids"] is True and body["return_tokens_as_token_ids"] is True
    assert (body["max_tokens"], body["temperature"], body["logprobs"], body["stop_token_ids"]) == (4, 0.5, 2, [9])


def _vllm_choice(ids: list[int], finish: str | None) -> dict[str, Any]:
    top = [{f"token_id:{token}": -0.5, f"token_id:{token + 1}": -1.0, f"token_id:{token + 2}": -9.0} for token in ids]
    logprobs = {"tokens": [], "token_logprobs": [-0.5] * len(ids), "top_logprobs": top}
    return {"index": 0, "text": "", "token_ids": ids, "logprobs": logprobs, "finish_reason": finish}


async def test_vllm_tokens_before_update_keep_old_version(
    http: HttpClient, api: ScriptedApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, updated, deltas = asyncio.Event(), asyncio.Event(), asyncio.Event(), list[EngineDelta]()

    class Noting(Window):
        def wait(self, action: Callable[[], None]) -> None:
            super().wait(action)
            second.set()

    def sink(delta: EngineDelta) -> None:
        deltas.append(delta)
        first.set()

    monkeypatch.setattr(transport, "Window", lambda seconds: Noting(3600.0))
    client = await engine("vllm", http, api.url)
    api.replies["POST /v1/completions"] = [
        {"choices": [_vllm_choice([5], finish=None)]},
        first.wait,
        {"choices": [_vllm_choice([6], finish=None)]},
        updated.wait,
        {"choices": [_vllm_choice([9], finish="stop")]},
        "[DONE]",
    ]
    pouring = asyncio.create_task(client.stream_to(CALL, sink, lambda flow: None), name="pour")
    async with asyncio.timeout(10):
        await second.wait()
        await client.set_version(3)
        updated.set()
        await pouring
    assert tokens_of(deltas) == [(5, -0.5, 0), (6, -0.5, 0), (9, -0.5, 3)]


@pytest.mark.parametrize(("kind", "route"), [("vllm", "/weight_info"), ("sglang", "/server_info")])
async def test_engine_without_version_settings_is_not_ready(
    http: HttpClient, api: ScriptedApi, kind: str, route: str
) -> None:
    """vLLM without its label would be at version 0, and SGLang without its interval would send token by token."""
    about = (200, {"weight_version": "7", "model_path": "/models/tiny", "stream_interval": 1})
    token = _sglang_event([5], 1, {"type": "length"})
    api.replies |= {"GET /model_info": about, f"GET {route}": (500, {})}
    api.replies["POST /v1/completions"] = [{"choices": [_vllm_choice([5], finish="stop")]}, "[DONE]"]
    api.replies["POST /generate"] = [token, "[DONE]"]
    client = open_engine(kind, http, api.url, {})
    assert route in ((await client.state()).not_ready or "")
    api.replies[f"GET {route}"] = about
    state = await client.state()
    assert (state.not_ready, state.version) == (None, 7)


async def test_vllm_reports_context_and_model(http: HttpClient, api: ScriptedApi) -> None:
    api.replies["POST /v1/completions"] = [{"choices": [_vllm_choice([5], finish="stop")]}, "[DONE]"]
    state = await open_engine("vllm", http, api.url, {}).state()
    assert state.not_ready is None and state.max_model_len == 77
    api.replies["GET /v1/models"] = (200, {"data": []})
    assert (await open_engine("vllm", http, api.url, {}).state()).not_ready


@pytest.mark.parametrize("cumulative", [True, False])
async def test_sglang_events_are_read_cumulative_or_incremental(
    http: HttpClient, api: ScriptedApi, cumulative: bool
) -> None:
    ids = [5, 6, 9]
    events: list[Any] = []
    for count in range(1, 4):
        shown = ids[:count] if cumulative else ids[count - 1 : count]
        finish = {"type": "stop", "matched": 9} if count == 3 else None
        events.append(_sglang_event(shown, count, finish))
    api.replies["POST /generate"] = [*events, "[DONE]"]
    deltas = await collect(await engine("sglang", http, api.url))
    assert tokens_of(deltas) == [(5, -0.5, 7), (6, -0.5, 7), (9, -0.5, 7)]
    assert deltas[0].top_logprobs is not None and deltas[0].top_logprobs[0] == ((5, -0.5), (6, -1.0))
    assert deltas[-1].finish_reason is FinishReason.STOP and deltas[-1].stop_token_id == 9
    body = api.bodies("POST /generate")[-1]
    assert body["rid"] == "call-1" and body["input_ids"] == [1, 2, 3] and body["top_logprobs_num"] == 2
    assert body["sampling_params"] | {"max_new_tokens": 4, "stop_token_ids": [9]} == body["sampling_params"]


async def test_sglang_tokens_listed_early_are_emitted_once(http: HttpClient, api: ScriptedApi) -> None:
    events = [_sglang_event([5, 6], 1, None), _sglang_event([5, 6, 9], 2, None)]
    api.replies["POST /generate"] = [*events, _sglang_event([5, 6, 9], 3, {"type": "stop", "matched": 9}), "[DONE]"]
    deltas = await collect(await engine("sglang", http, api.url))
    assert [token for token, _, _ in tokens_of(deltas)] == [5, 6, 9]


async def test_sglang_final_version_spans_are_applied(http: HttpClient, api: ScriptedApi) -> None:
    last = _sglang_event([5, 6, 9], 3, {"type": "length"})
    spans = [{"version": "6", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 3}]
    last["meta_info"]["weight_versions"] = spans
    api.replies["POST /generate"] = [last, "[DONE]"]
    assert [version for _, _, version in tokens_of(await collect(await engine("sglang", http, api.url)))] == [6, 6, 7]


async def test_sglang_final_spans_correct_event_versions(http: HttpClient, api: ScriptedApi) -> None:
    last = _sglang_event([5, 6, 9], 3, {"type": "length"})
    last["meta_info"]["weight_versions"] = [
        {"version": "6", "start": 0, "end": 2},
        {"version": "7", "start": 2, "end": 3},
    ]
    client = await engine("sglang", http, api.url)
    sent = asyncio.Event()
    api.replies["POST /generate"] = [_sglang_event([5], 1, None), sent.wait, last, "[DONE]"]
    deltas: list[EngineDelta] = []
    async for delta in deltas_of(client, CALL):
        deltas.append(delta)
        sent.set()
    assert deltas[0].versions == (7,) and deltas[-1].versions == (6, 7)
    assert deltas[-1].all_versions == (6, 6, 7)


async def test_sglang_with_spans_returns_whole_answers_unstreamed(http: HttpClient, api: ScriptedApi) -> None:
    whole = [_sglang_event([5, 6], 2, {"type": "length"}), _sglang_event([9], 1, {"type": "stop", "matched": 9})]
    client = await engine("sglang", http, api.url)
    quiet = replace(CALL, stream=False)
    for spans in ([], [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}]):
        for answer in whole:
            answer["meta_info"] |= {"weight_versions": spans, "e2e_latency": 0.5}
        api.replies["POST /generate"] = [whole[0], "[DONE]"]
        await collect(client, quiet)  # of an older server a stream
        assert api.bodies("POST /generate")[-1]["stream"] is True
    api.replies["POST /generate"] = (200, whole)
    first, second = await collect(client, quiet)
    assert api.bodies("POST /generate")[-1]["stream"] is False
    assert (first.index, first.token_ids, first.versions, first.after_first_s) == (0, (5, 6), (6, 7), 0.25)
    assert (second.index, second.token_ids, second.finish_reason) == (1, (9,), FinishReason.STOP)
    api.replies["POST /generate"] = [whole[0], "[DONE]"]
    await collect(client)
    assert api.bodies("POST /generate")[-1]["stream"] is True


async def test_sglang_empty_answer_keeps_span_support(http: HttpClient, api: ScriptedApi) -> None:
    client = await engine("sglang", http, api.url)
    ends, empty = _sglang_event([5], 1, {"type": "length"}), _sglang_event([], 0, {"type": "abort"})
    ends["meta_info"]["weight_versions"] = [{"version": "7", "start": 0, "end": 1}]
    for answer in (ends, empty):
        api.replies["POST /generate"] = [answer, "[DONE]"]
        await collect(client)
        assert client.capabilities.whole_answers is True


async def test_sglang_with_spans_sets_stream_interval_to_50_ms(http: HttpClient, api: ScriptedApi) -> None:
    client = await engine("sglang", http, api.url)
    ends = _sglang_event([5, 6], 2, {"type": "length"})
    for latency, interval in ((0.02, None), (0.02, 5), (1.0, 5), (1.0, 1), (1e-4, 1), (1e-4, 16)):
        ends["meta_info"] |= {"weight_versions": [{"version": "7", "start": 0, "end": 2}], "e2e_latency": latency}
        api.replies["POST /generate"] = [ends, "[DONE]"]
        await collect(client)
        assert api.bodies("POST /generate")[-1]["sampling_params"].get("stream_interval") == interval
    await collect(client, replace(CALL, stream_interval=32))
    assert api.bodies("POST /generate")[-1]["sampling_params"]["stream_interval"] == 32


async def test_sglang_event_across_update_has_no_version_until_end(http: HttpClient, api: ScriptedApi) -> None:
    first, second = _sglang_event([5], 1, None), _sglang_event([5, 6, 7], 3, None)
    third, last = _sglang_event([5, 6, 7, 8, 9], 5, None), _sglang_event([5, 6, 7, 8, 9, 4], 6, {"type": "length"})
    for event in (second, third, last):
        event["meta_info"]["weight_version"] = "8"
    last["meta_info"]["weight_versions"] = [
        {"version": "7", "start": 0, "end": 2},
        {"version": "8", "start": 2, "end": 6},
    ]
    api.replies["POST /generate"] = [_sglang_event([5], 1, {"type": "length"}), "[DONE]"]
    client = await engine("sglang", http, api.url)
    read, turns = list[EngineDelta](), [asyncio.Event() for _ in range(3)]
    events = [first, turns[0].wait, second, turns[1].wait, third, turns[2].wait, last, "[DONE]"]
    api.replies["POST /generate"] = events
    async for delta in deltas_of(client, CALL):
        read.append(delta)
        if len(read) <= len(turns):
            turns[len(read) - 1].set()
    unknown = (UNKNOWN_VERSION,) * 2
    assert [delta.versions for delta in read] == [(7,), unknown, (8, 8), (8,)]
    assert read[-1].all_versions == (7, 7, 8, 8, 8, 8)


async def test_sglang_first_token_time_is_used_when_reported(http: HttpClient, api: ScriptedApi) -> None:
    client = await engine("sglang", http, api.url)
    whole = _sglang_event([5, 6], 2, {"type": "length"})
    spans = [{"version": "7", "start": 0, "end": 2}]
    whole["meta_info"] |= {"weight_versions": spans, "e2e_latency": 0.5, "first_token_latency": 0.4}
    api.replies["POST /generate"] = [whole, "[DONE]"]
    (delta,) = await collect(client)
    assert delta.after_first_s == pytest.approx(0.1)


async def test_vllm_with_spans_returns_whole_answers_unstreamed(http: HttpClient, api: ScriptedApi) -> None:
    def choice(index: int, ids: list[int], finish: str) -> dict[str, Any]:
        tops = [[{"token_id": token, "logprob": -0.5}, {"token_id": 1, "logprob": -0.1}] for token in ids]
        content = [
            {"token_id": token, "logprob": -0.5, "top_logprobs": top} for token, top in zip(ids, tops, strict=True)
        ]
        spans = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": len(ids)}]
        return {"index": index, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish} | {
            "weight_versions": spans if len(ids) > 1 else spans[:1]
        }

    route = SPANS
    streamed = [{"choices": [_vllm_choice([5], finish="stop")]}, "[DONE]"]
    api.replies["POST /v1/completions"] = streamed
    quiet = replace(CALL, stream=False)
    spans, counts = choice(0, [5, 6], "length"), b'# HELP x\nvllm:generation_tokens_total{engine="0"} 1.0\n'
    answer, silent = (200, {"choices": [spans, choice(1, [9], "stop")]}), (200, b"# HELP x\n")  # --disable-log-stats
    for refusal in ((404, {}), (403, {"error": {"message": "--enable-scale-out"}}), answer):
        api.replies |= {route: refusal, "GET /metrics": silent if refusal is answer else (200, counts)}
        client = await engine("vllm", http, api.url)
        await client.state()
        await collect(client, quiet)
        assert api.got[-1][0] == "POST /v1/completions"
    api.replies["GET /metrics"] = (200, counts)
    client = await engine("vllm", http, api.url)
    await client.state()
    await collect(client, quiet)
    assert api.got[-1][0] == "POST /v1/completions"  # since the other one leaves an alternative out
    first, second = await collect(client, replace(quiet, sampling=replace(CALL.sampling, top_logprobs=0)))
    body = api.bodies(route)[-1]
    assert (body["token_ids"], body["stream"], body["model"]) == ([1, 2, 3], False, "/models/tiny")
    sampling = {"max_tokens": 4, "temperature": 0.5, "logprobs": 0, "stop_token_ids": [9], "detokenize": False}
    assert sampling.items() <= body["sampling_params"].items()
    assert tokens_of([first]) == [(5, -0.5, 6), (6, -0.5, 7)]
    assert 0 < first.after_first_s < 10
    assert (second.index, second.finish_reason, second.stop_token_id) == (1, FinishReason.STOP, 9)


def _spanned(ids: list[int], spans: list[tuple[str, int, int]] | None = None) -> dict[str, Any]:
    """An event of ``/inference/v1/generate``, the last one where it has spans."""
    content = [{"token_id": each, "logprob": -0.5, "top_logprobs": []} for each in ids]
    choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": None}
    if spans is not None:
        named = [{"version": version, "start": start, "end": end} for version, start, end in spans]
        choice |= {"finish_reason": "length", "weight_versions": named}
    return {"choices": [choice]}


async def vllm_with_spans(http: HttpClient, api: ScriptedApi) -> TokenEngine:
    api.replies["POST /v1/completions"] = [{"choices": [_vllm_choice([5], finish="stop")]}, "[DONE]"]
    api.replies["GET /metrics"] = (200, b'vllm:generation_tokens_total{engine="0"} 1.0\n')
    api.replies[SPANS] = (200, _spanned([5], [("default", 0, 1)]))
    client = await engine("vllm", http, api.url)
    assert client.capabilities.whole_answers
    return client


async def test_vllm_with_spans_streams_batched_tokens_with_versions(http: HttpClient, api: ScriptedApi) -> None:
    client = await vllm_with_spans(http, api)
    updated = asyncio.Event()
    last = _spanned([4], [("6", 0, 2), ("7", 2, 5)])
    api.replies[SPANS] = [_spanned([5]), updated.wait, _spanned([6, 7, 8]), last, "[DONE]"]
    await client.set_version(6)
    read = list[EngineDelta]()
    async for delta in deltas_of(client, replace(PLAIN, stream_interval=16)):
        read.append(delta)
        await client.set_version(7)
        updated.set()
    assert read[0].versions == (6,) and read[-1].all_versions == (6, 6, 7, 7, 7)
    assert UNKNOWN_VERSION in [version for delta in read[1:] for version in delta.versions] or len(read) == 2
    body = api.bodies(SPANS)[-1]
    assert body["stream"] is True and body["sampling_params"]["stream_interval"] == 16
    api.replies[SPANS] = [last, "[DONE]"]
    await collect(client, PLAIN)
    assert api.bodies(SPANS)[-1]["sampling_params"]["stream_interval"] > 1  # as many as it sampled in 50 ms


@pytest.mark.parametrize(
    ("wanted", "sent"),
    [
        ({"type": "json_object"}, {"json_object": True}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}},
            {"json": {"type": "array"}},
        ),
        ({"type": "choice", "choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ],
)
async def test_vllm_with_spans_gets_structured_outputs_in_sampling(
    http: HttpClient, api: ScriptedApi, wanted: dict[str, Any], sent: dict[str, Any]
) -> None:
    client = await vllm_with_spans(http, api)
    await collect(client, replace(PLAIN, stream=False, response_format=wanted))
    assert api.bodies(SPANS)[-1]["sampling_params"]["structured_outputs"] == sent


async def test_vllm_with_spans_pauses_without_draining_streams(http: HttpClient, api: ScriptedApi) -> None:
    """An update takes no 100 ms for a silence in streams whose versions the spans tell."""
    client = await vllm_with_spans(http, api)
    resumed = asyncio.Event()
    last = _spanned([6], [("0", 0, 2)])
    api.replies |= {SPANS: [_spanned([5]), resumed.wait, last, "[DONE]"], "POST /pause": (200, {})}
    reading = deltas_of(client, PLAIN)
    await anext(reading)
    began = asyncio.get_running_loop().time()
    await client.pause()
    assert asyncio.get_running_loop().time() - began < vllm._QUIET_S
    resumed.set()
    assert [delta.token_ids async for delta in reading] == [(6,)]


def _sglang_event(ids: list[int], completion_tokens: int, finish: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "output_ids": ids,
        "meta_info": {
            "completion_tokens": completion_tokens,
            "weight_version": "7",
            "finish_reason": finish,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "output_top_logprobs": [[[-0.5, token, None], [-1.0, token + 1, None]] for token in ids],
        },
    }


async def test_sglang_finish_by_abort_and_by_length_are_distinct(http: HttpClient, api: ScriptedApi) -> None:
    for kind, reason in (("length", FinishReason.LENGTH), ("abort", FinishReason.ABORT)):
        api.replies["POST /generate"] = [_sglang_event([5], 1, {"type": kind}), "[DONE]"]
        deltas = await collect(await engine("sglang", http, api.url))
        assert deltas[-1].finish_reason is reason and deltas[-1].stop_token_id is None


async def test_sglang_batching_steps_without_spans_is_not_ready(http: HttpClient, api: ScriptedApi) -> None:
    api.replies["POST /generate"] = [_sglang_event([5], 1, {"type": "length"}), "[DONE]"]
    for interval, ready in ((1, True), (8, False)):
        api.replies["GET /server_info"] = (200, {"stream_interval": interval})
        state = await open_engine("sglang", http, api.url, {}).state()
        assert (state.not_ready is None, state.fault is None) == (ready, ready)
    assert state.not_ready and "--stream-interval 8" in state.not_ready and "--stream-interval 1" in str(state.fault)
    spans = _sglang_event([5], 1, {"type": "length"})
    spans["meta_info"]["weight_versions"] = [{"version": "7", "start": 0, "end": 1}]
    api.replies["POST /generate"] = [spans, "[DONE]"]
    assert (await open_engine("sglang", http, api.url, {}).state()).not_ready is None


async def test_sglang_does_not_promise_a_seed_and_aborts_by_id(http: HttpClient, api: ScriptedApi) -> None:
    client = await engine("sglang", http, api.url)
    assert "seed" not in client.capabilities.sampling_fields
    api.replies["POST /abort_request"] = (200, {})
    await client.abort("call-1")
    assert api.bodies("POST /abort_request") == [{"rid": "call-1"}]


async def test_response_format_reaches_supporting_engines(http: HttpClient, api: ScriptedApi) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}
    call = EngineCall("c", ((1,),), SamplingParams(), response_format=wanted)
    api.replies["POST /generate"] = api.replies["POST /v1/completions"] = ["[DONE]"]
    await collect(await engine("sglang", http, api.url), call)
    assert api.bodies("POST /generate")[-1]["sampling_params"]["json_schema"] == '{"type":"array"}'
    await collect(await engine("vllm", http, api.url), call)
    assert api.bodies("POST /v1/completions")[-1]["response_format"] == wanted


@pytest.mark.parametrize("kind", ["embedded", "vllm", "sglang"])
@pytest.mark.parametrize(
    ("status", "error"),
    [(400, EngineRefused), (422, EngineRefused), (503, EngineUnavailable), (500, EngineFailed), (401, EngineFailed)],
)
async def test_engine_refusal_is_classified_by_responsible_party(
    http: HttpClient, api: ScriptedApi, kind: str, status: int, error: type[Exception]
) -> None:
    api.replies[PATHS[kind]] = (status, {"error": {"message": "because", "code": "odd"}})
    with pytest.raises(error, match="because") as caught:
        await collect(await engine(kind, http, api.url))
    if isinstance(caught.value, EngineRefused):
        assert caught.value.code == "odd"


@pytest.mark.parametrize("kind", ["embedded", "vllm", "sglang"])
async def test_unreachable_engine_is_unavailable(http: HttpClient, kind: str) -> None:
    client = open_engine(kind, http, "http://127.0.0.1:9", {})
    assert (await client.state()).not_ready
    with pytest.raises(EngineUnavailable):
        await collect(client)
    await client.abort("call-1")  # a failure of no call


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_truncated_or_erroneous_stream_fails(http: HttpClient, api: ScriptedApi, kind: str) -> None:
    for events in ([], [{"error": {"message": "boom"}}]):
        api.replies[PATHS[kind]] = events
        with pytest.raises(EngineFailed):
            await collect(await engine(kind, http, api.url))


@pytest.mark.parametrize("kind", ["embedded", "vllm", "sglang"])
async def test_engine_is_called_with_configured_key(http: HttpClient, api: ScriptedApi, kind: str) -> None:
    api.replies[PATHS[kind]] = (503, {})
    with pytest.raises(EngineUnavailable):
        await collect(await engine(kind, http, api.url))
    assert {headers.get("Authorization") for _, _, headers in api.got} == {"Bearer k"}


def test_wire_sampling_has_only_non_default_fields() -> None:
    assert SamplingParams().changed() == {}
    assert SamplingParams(seed=0, n=2).changed() == {"seed": 0, "n": 2}
