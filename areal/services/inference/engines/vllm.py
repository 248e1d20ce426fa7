"""vLLM's token routes: ``/inference/v1/generate`` if it reports spans of weight versions, else ``/v1/completions``.

The end of an answer of ``/inference/v1/generate`` (``--enable-scale-out``, from 0.32 on) has ``weight_versions``, exact
spans of its tokens. Whole answers therefore need no event per token, and events of a stream may have several tokens
(``stream_interval`` of the request). The progress of whole answers is the token counter in ``/metrics``. Without it
(``--disable-log-stats``), and on older servers, all answers are streams of ``/v1/completions``, which returns token ids
with the extra parameters ``return_token_ids`` and ``return_tokens_as_token_ids``. Answers with ``top_logprobs`` use
this route too: of ``n`` alternatives, the other route omits the last one if the sampled token is not among them.

``/v1/completions`` does not report which weights sampled a token, so the client records tokens with the version that is
set when they arrive, 0 before the first. This is exact across a pause, which returns only when earlier tokens have
arrived. vLLM also stores the version (``/weight_info``), for the data proxy's successor. A closed connection aborts its
request.

Pausing (mode ``keep``: requests stop and continue), versions, weights and sleeping are routes of vLLM's development
mode. Weights are loaded by areal's extension of its workers (``vllm_plugin``), from a folder or a process group: vLLM's
own reload silently keeps the old head if the head is tied to the embedding.

Log-probabilities depend on ``--logprobs-mode``. With ``processed_logprobs``, which areal sets, they include the
temperature, filters, penalties and grammars. With ``raw_logprobs``, vLLM's default, they include only grammars.
``logprobs_problem`` finds the mode. Log-probabilities of a prompt (not in streams) are always of softmax(logits).

vLLM raises temperatures below 0.01 to 0.01, and samples only one greedy choice: further ones are copies of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from areal.dataclasses import dataclass, field
from areal.http.client import CallFailed, HttpClient
from areal.http.headers import unique_id
from areal.services.inference.engines import base, transport
from areal.wire.sampling import SamplingParams

_WIRE_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_QUIET_S = 0.1  # without an event after a pause, all earlier ones have arrived
_SETTLE_S = 5.0
_WORKERS_S = 120.0
_GIVE_UP_S = 5.0
_LOOK_AGAIN_S = 0.02
_NEWS_S = 5.0
_COMPLETIONS = "/v1/completions"
_GENERATE = "/inference/v1/generate"
_GENERATED = re.compile(rb"^vllm:generation_tokens_total\{[^}]*\} ([0-9.e+]+)", re.MULTILINE)


_PROCESSED = base.LogprobsMode(before_filters=False, before_penalties=False, before_grammars=False)
_LOWEST_TEMPERATURE = 0.01


class VllmClient(transport.EngineClient):
    group_form = "plain"
    no_route = "this vLLM has no {path}: start it with VLLM_SERVER_DEV_MODE=1 (sleeping: and --enable-sleep-mode)"

    def __init__(self, http: HttpClient, url: str, headers: Mapping[str, str]) -> None:
        capabilities = base.Capabilities(
            response_format=True, prompt_logprobs=True, lowest_temperature=_LOWEST_TEMPERATURE, logprobs=_PROCESSED
        )
        super().__init__(http, url, headers, capabilities)
        self._model: str | None = None  # vLLM's name of the model, from /v1/models
        self._version: int | None = None
        self._answered = 0.0  # when the last whole answer ended
        self._knows_whole = False  # whether ``capabilities.whole_answers`` was determined
        self._event = asyncio.Event()
        self._pace = transport.Pace()

    async def score(self, prompt: Sequence[int], top: int, adapter: str | None = None) -> base.PromptLogprobs:
        body = {
            "model": adapter or self._served(),
            "prompt": list(prompt),
            "prompt_logprobs": top,
            "max_tokens": 1,
            "temperature": 1.0,
        }
        missing = f"this vLLM serves no {body['model']}"
        answer = await self._command(_COMPLETIONS, body, if_missing=missing, timeout_s=transport.LOAD_S)
        choices = answer.get("choices")
        return read_prompt(choices[0].get("prompt_logprobs") if choices else None, prompt, top)

    def _served(self) -> str:
        if self._model is None:
            raise base.EngineUnavailable("vLLM has not reported yet which model it serves")
        return self._model

    def _request(self, call: base.EngineCall) -> transport.GenerateRequest:
        alike = range(call.sampling.n) if call.sampling.greedy and call.sampling.n > 1 else ()
        read_one: Callable[[Mapping[str, Any], int], base.EngineDelta]
        if self.capabilities.whole_answers and not call.sampling.top_logprobs:
            route, body = _GENERATE, spans_body(call, self._served(), self._pace.interval)
            read_one = SpannedChoices(self._pace, versions=transport.EventVersions(self._version)).read
        else:
            route, body = _COMPLETIONS, wire_body(call, self._served())
            read_one = partial(read_choice, call)

        def read(data: dict[str, Any]) -> list[base.EngineDelta]:
            transport.check_event(data)
            self._event.set()
            if not body["stream"]:
                self._answered = time.monotonic()
            version = base.UNKNOWN_VERSION if self._version is None else self._version
            deltas = [read_one(choice, version) for choice in data.get("choices", ())]
            return [replace(delta, index=index) for delta in deltas for index in alike] if alike else deltas

        return route, body, transport.JsonEvents(read) if body["stream"] else transport.JsonLines(read)

    def point_to(self, url: str) -> None:
        super().point_to(url)
        self._model = None

    def _forget_engine(self) -> None:
        super()._forget_engine()
        self._version = None
        self._knows_whole = self.capabilities.whole_answers = False

    async def abort(self, request_id: str) -> None:
        """Do nothing: closing the connection has aborted the request."""

    async def state(self) -> base.EngineState:
        about = await asyncio.gather(*map(self._get, ("/health", "/v1/models", "/is_paused")))
        (status, _), (status_listed, listed), (_, pausing) = about
        if status != 200:
            return base.EngineState(not_ready=self._silent("vLLM", "/health", status))
        if (refused := transport.key_refused("vLLM", status_listed)) is not None:
            return refused
        served = next((model for model in listed.get("data") or () if not model.get("parent")), None)
        if served is None:
            return base.EngineState(not_ready="vLLM lists no model")
        self._model = served["id"]
        if self._version is None:  # an earlier data proxy may have set one
            status, labelled = await self._get("/weight_info")
            if status != 200 and status not in transport.NO_SUCH_ROUTE:
                return base.EngineState(not_ready=self._silent("vLLM", "/weight_info", status))
            self._version = transport.weight_version(labelled.get("weight_version"))
        paused = transport.typed(pausing, "is_paused", bool)
        if paused is not True and (problem := await self._generation_problem(_PROCESSED, "vLLM")) is not None:
            return base.EngineState(not_ready=problem)
        if not self._knows_whole and paused is not True:
            await self._learn_whole_answers()
        return base.EngineState(
            not_ready=None,
            version=self._version,
            generated=await self._progress(),
            max_model_len=transport.typed(served, "max_model_len", int),
            root=transport.typed(served, "root", str),
            paused=paused,
            adapters=transport.adapters_of(listed),
        )

    async def _learn_whole_answers(self) -> None:
        call = base.EngineCall(
            unique_id("whole_"), ((1,),), SamplingParams(max_new_tokens=1, temperature=0.0), stream=False
        )
        body = spans_body(call, self._served(), 1)
        try:
            answer = await self._command(_GENERATE, body)
        except (base.EngineUnsupported, base.EngineRefused):
            answer = {}
        except base.EngineError:  # asked again
            return
        choices = answer.get("choices") or [{}]
        has_spans = bool(choices[0].get("weight_versions"))
        self.capabilities.whole_answers = has_spans and await self._generated() is not None
        self._knows_whole = True

    async def _progress(self) -> int | None:
        """Return the number of tokens sampled so far. Asked only while whole answers run and none has just ended."""
        if not self._whole_calls or time.monotonic() - self._answered < _NEWS_S:
            return None
        return await self._generated()

    async def _generated(self) -> int | None:
        try:
            answer = await self._http.fetch("GET", self._url, "/metrics", timeout_s=_SETTLE_S, headers=self._headers)
        except (CallFailed, TimeoutError):
            return None
        counts = [float(count) for count in _GENERATED.findall(answer.body)]
        return int(sum(counts)) if counts else None

    async def pause(self) -> None:
        """Pause generation, and clear the prefix cache, which is invalid for new weights."""
        await self._command("/pause", params={"mode": "keep"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while self._calls[_COMPLETIONS]:
                    self._event.clear()
                    async with asyncio.timeout(_QUIET_S):
                        await self._event.wait()

    async def resume(self) -> None:
        await self._command("/resume")

    async def set_version(self, version: int) -> None:
        self._flush()  # tokens that have arrived belong to the old version
        self._version = version
        with contextlib.suppress(base.EngineUnsupported):  # an older vLLM stores no version
            body = {"new_version": transport.version_label(version)}
            await self._command("/update_weight_version", body)

    async def version(self) -> int | None:
        return self._version

    async def load_weights(self, folder: str, version: int) -> None:
        async with self._replacing_weights(version):
            _check_refusals(await self._call_workers("areal_load_weights", {"path": folder}, transport.LOAD_S))

    async def stage_weights(self, source: str | base.Broadcast, version: int) -> None:
        await self._run_on_workers("areal_stage", {"version": version, **transport.weight_source(source)})

    async def load_staged(self, version: int) -> None:
        async with self._replacing_weights(version):
            _check_refusals(await self._call_workers("areal_load_staged", {"version": version}, transport.LOAD_S))

    async def forget_weights(self) -> None:
        await self._call_workers("areal_forget", {})

    async def join_group(self, name: str, place: Mapping[str, object]) -> None:
        numbers = {"rank": place["rank"], "size": place["world_size"]}
        await self._run_on_workers(
            "areal_join", {"name": name, "host": place["host"], "port": place["port"], **numbers}
        )

    async def leave_group(self, name: str) -> None:
        await self._call_workers("areal_forget", {"group": name})

    async def _run_on_workers(self, method: str, order: Mapping[str, object]) -> None:
        """Run a long operation on the workers during generation; poll until it is done. Cancelled with its caller."""
        try:
            states = await self._call_workers(method, order)
            async with asyncio.timeout(transport.LOAD_S):
                while "running" in states and not any(map(_failure_of, states)):
                    await asyncio.sleep(_LOOK_AGAIN_S)
                    states = await self._call_workers("areal_state", {})
        except BaseException:
            with contextlib.suppress(base.EngineError, TimeoutError):
                await self._call_workers("areal_forget", {}, _GIVE_UP_S)
            raise
        if failures := [why for state in states if (why := _failure_of(state))]:
            raise base.EngineRefused(f"the weights were not taken, the old ones serve on: {failures[0]}")

    async def _call_workers(
        self, method: str, order: Mapping[str, object], timeout_s: float = _WORKERS_S
    ) -> list[str | None]:
        body = {"method": method, "kwargs": order}
        answer = await self._command("/collective_rpc", body, timeout_s=timeout_s)
        results = answer.get("results")
        if not isinstance(results, list) or not results:
            raise base.EngineFailed(f"vLLM's workers did not answer to {method}: {answer}")
        return [None if each in (None, "None") else str(each) for each in results]

    async def release_memory(self) -> None:
        await self._command("/sleep", params={"level": "1"})

    async def restore_memory(self) -> None:
        await self._command("/wake_up")


def _check_refusals(results: list[str | None]) -> None:
    refusals = [each for each in results if each is not None]
    if refusals and len(refusals) < len(results):
        raise base.EngineFailed(f"some of vLLM's workers have the new weights and others the old ones: {refusals[0]}")
    if refusals:
        raise base.EngineRefused(f"the weights were not loaded, the old ones serve on: {refusals[0]}")


def _failure_of(state: str | None) -> str | None:
    return state.removeprefix("failed: ") if state is not None and state.startswith("failed: ") else None


def _sampling(call: base.EngineCall) -> dict[str, object]:
    sampling = {_WIRE_NAMES.get(name, name): value for name, value in transport.sampling_fields(call).items()}
    sampling.pop("top_logprobs", None)
    if call.sampling.greedy:
        sampling.pop("n", None)
    # Also our defaults: vLLM reads the absent ones from the model's generation_config.json.
    shaping = ("temperature", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "top_p", "top_k")
    sampling |= {name: getattr(call.sampling, name) for name in shaping}
    return {**sampling, "logprobs": call.sampling.top_logprobs, "skip_special_tokens": False}


def spans_body(call: base.EngineCall, model: str, interval: int) -> dict[str, object]:
    """Return the body of a call of ``/inference/v1/generate``, with events of at least ``interval`` tokens."""
    sampling = {**_sampling(call), "detokenize": False}
    if call.stream:
        sampling["stream_interval"] = max(call.stream_interval, interval)
    if (wanted := call.response_format) is not None:
        match wanted["type"]:
            case "json_object":
                sampling["structured_outputs"] = {"json_object": True}
            case "json_schema":
                schema = (wanted.get("json_schema") or {}).get("schema") or {"type": "object"}
                sampling["structured_outputs"] = {"json": schema}
            case name:
                sampling["structured_outputs"] = {name: wanted[name]}
    return {
        "model": call.adapter or model,
        "token_ids": call.prompt,
        "sampling_params": sampling,
        "stream": call.stream,
        "request_id": call.request_id,
    }


def wire_body(call: base.EngineCall, model: str) -> dict[str, Any]:
    body = {
        **_sampling(call),
        "model": call.adapter or model,
        "prompt": call.prompt,
        "stream": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "request_id": call.request_id,
    }
    wanted = call.response_format
    if wanted is not None and wanted["type"] in ("regex", "choice", "grammar"):
        body["structured_outputs"] = {wanted["type"]: wanted[wanted["type"]]}
    elif wanted is not None:
        body["response_format"] = dict(wanted)
    return body


def read_choice(call: base.EngineCall, choice: Mapping[str, Any], version: int) -> base.EngineDelta:
    """Return a choice of a chunk, sampled by weights ``version``. Requests have no stop strings, so if a choice ended
    with "stop", its last token stopped it."""
    ids = tuple(choice.get("token_ids") or ())
    logprobs = choice.get("logprobs") or {}
    finish = choice.get("finish_reason")
    reason = None if finish is None else base.FinishReason.read(finish)
    wanted = call.sampling.top_logprobs
    return base.EngineDelta(
        index=choice["index"],
        token_ids=ids,
        logprobs=tuple(logprobs.get("token_logprobs") or ())[: len(ids)],
        versions=(version,) * len(ids),
        top_logprobs=_tops(logprobs.get("top_logprobs") or (), wanted) if wanted else None,
        finish_reason=reason,
        stop_token_id=ids[-1] if reason is base.FinishReason.STOP and ids else None,
    )


@dataclass
class SpannedChoices:
    """Parses the choices of ``/inference/v1/generate``, of a whole answer or of events. For a whole answer,
    ``after_first_s`` is an estimate, which assumes that all tokens took equally long."""

    pace: transport.Pace
    began: float = field(default_factory=time.monotonic)
    versions: transport.EventVersions = field(default_factory=transport.EventVersions)

    def read(self, choice: Mapping[str, Any], version: int) -> base.EngineDelta:
        """Return the deltas of an object. ``version``: the version of tokens that arrive now."""
        index, ids = choice["index"], tuple(choice.get("token_ids") or ())
        entries = (choice.get("logprobs") or {}).get("content") or ()
        finish = choice.get("finish_reason")
        reason = None if finish is None else base.FinishReason.read(finish)
        versions, all_versions = self.versions.read(index, len(ids), version, choice.get("weight_versions"))
        total, latency = self.versions.seen[index], time.monotonic() - self.began
        if reason is not None:
            self.pace.learn(latency, total)
        return base.EngineDelta(
            index=index,
            token_ids=ids,
            logprobs=tuple(each["logprob"] for each in entries),
            versions=versions,
            finish_reason=reason,
            stop_token_id=ids[-1] if reason is base.FinishReason.STOP and ids else None,
            after_first_s=latency * (1 - 1 / total) if reason is not None and ids and total == len(ids) else 0.0,
            all_versions=all_versions,
        )


def read_prompt(entries: Any, prompt: Sequence[int], top: int) -> base.PromptLogprobs:
    """Return the scores in ``prompt_logprobs``, with the ``top`` most likely tokens at each position."""
    reported = [{int(token): about["logprob"] for token, about in (entry or {}).items()} for entry in entries or ()]
    if len(reported) != len(prompt) or any(
        token not in each for token, each in zip(prompt[1:], reported[1:], strict=True)
    ):
        raise base.EngineFailed(
            f"vLLM returned log-probabilities of {len(reported)} tokens, not those of the prompt's {len(prompt)}"
        )
    ranked = [sorted(each.items(), key=lambda item: -item[1])[:top] for each in reported[1:]]
    return base.PromptLogprobs(
        tuple(each[token] for token, each in zip(prompt[1:], reported[1:], strict=True)), tuple(map(tuple, ranked))
    )


def _tops(entries: Any, wanted: int) -> tuple[base.TopLogprobs, ...]:
    """Return the ``wanted`` most likely tokens at each position. vLLM adds the sampled one if it is not among them."""
    named = (
        ((int(name.removeprefix("token_id:")), value) for name, value in (entry or {}).items()) for entry in entries
    )
    return tuple(tuple(sorted(each, key=lambda item: -item[1])[:wanted]) for each in named)
