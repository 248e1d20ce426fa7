"""SGLang's native ``/generate`` with token ids in and out.

Each event repeats the whole answer so far, or with SGLang's incremental option only the new part:
``completion_tokens`` tells which. The end of an answer has ``weight_versions``, exact spans of its tokens, so that
whole answers need no event per token, and events of a stream may have several (``stream_interval`` of the request): as
many as are sampled in 50 ms. Other events, and older servers, report one ``weight_version``, that of the server when
the event is sent. ``seed`` is not supported: SGLang's ``sampling_seed`` needs the server's deterministic mode, and is
silently dropped without it.

Log-probabilities are tempered, before top-k, top-p and min-p, and after penalties, ``logit_bias`` and grammars; with
``SGLANG_RETURN_ORIGINAL_LOGPROB`` in the server's environment they are not tempered. The mode is determined once the
engine is up (``logprobs_problem``). Prompts are scored (``logprob_start_len`` 0) at temperature 1, where both agree.

A pause uses mode ``retract``: requests return to the queue, and are computed again at ``/continue_generation``. Mode
``in_place`` would keep their cache, and the server could not flush what old weights computed for later prompts. Memory
is released only by a server with ``--enable-memory-saver``.

Routes differ by version, and the server is asked which it has: ``/model_info`` and ``/server_info`` replace
``/get_model_info`` and ``/get_server_info``, which log a warning per call; ``/ready`` (503 while paused) is absent from
0.5.16 and older, as are ``/begin_weight_update`` and ``/end_weight_update``, which later ones require around a
broadcast. ``/health`` samples a token unless the server was started without that: so only if ``/ready`` is 503.

A failed update is HTTP 400, or 200 with ``success: false``, and neither the status nor the version that the server
reports afterwards tells which weights it serves. So a checksum of the weights (``/weights_checker``) is requested
before an update and after one that failed: equal ones are the old weights; in all other cases they are unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from areal.dataclasses import dataclass, field
from areal.errors import ArealError
from areal.http.client import HttpClient
from areal.services.inference.engines import base, transport
from areal.services.inference.engines.embedded.model_folder import open_checkpoint

_log = logging.getLogger(__name__)

_NOT_TAKEN = "the weights were not taken, the old ones serve on"
_NO_STOPS = "SGLang does not stop at stop_token_ids where ignore_eos is set: leave one of them out"
_IDLE_S = 10.0
_LOOK_AGAIN_S = 0.02
_NOT_FLUSHED = "cache was not flushed"  # its message after an update that took place
_INTERVAL = (
    "SGLang was started with --stream-interval %s: tokens sampled before a weight update may come after it, and get the"
    " new weights' version"
)
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_NO_SAVER = "this SGLang cannot release its memory: start it with --enable-memory-saver"


_TEMPERED = base.LogprobsMode(before_penalties=False, before_grammars=False)


class SglangClient(transport.EngineClient):
    group_form = "named"
    no_route = "this SGLang has no {path}: it is too old"

    def __init__(self, http: HttpClient, url: str, headers: Mapping[str, str]) -> None:
        capabilities = base.Capabilities(
            sampling_fields=base.SAMPLING_FIELDS - {"seed"},
            response_format=True,
            prompt_logprobs=True,
            logprobs=_TEMPERED,
        )
        super().__init__(http, url, headers, capabilities)
        self._checksum: str | None = None  # of the weights before an update
        self._verified: str | base.Broadcast | None = None  # the next update, to which ``_checksum`` belongs
        self._shapes: Mapping[str, list[int]] = {}
        self._prefix: str | None = None  # of /model_info and /server_info
        self._interval: int | None = None
        self._pace = transport.Pace()
        self._paused: bool | None = None
        self._version: int | None = None  # as it was set or reported last
        self._has_sessions = True  # /begin_weight_update

    def _request(self, call: base.EngineCall) -> transport.GenerateRequest:
        self._check_tokens(call.prompt)
        has_spans = self.capabilities.whole_answers
        offsets = StreamOffsets(call, self.capabilities, self._pace, transport.EventVersions(self._version))
        body = wire_body(call)
        if has_spans and not call.stream:
            return "/generate", {**body, "stream": False}, transport.JsonLines(offsets.deltas)
        if has_spans:
            body["sampling_params"]["stream_interval"] = max(call.stream_interval, self._pace.interval)
        return "/generate", {**body, "stream": True}, transport.JsonEvents(offsets.deltas)

    def _check_tokens(self, prompt: Sequence[int]) -> None:
        """Refuse a prompt with an id outside the vocabulary, which would end the server."""
        limit = self.capabilities.vocab_size
        if limit is not None and prompt and not 0 <= min(prompt) <= max(prompt) < limit:
            raise base.EngineRefused(f"the prompt has a token id outside the model's vocabulary of {limit}")

    async def score(self, prompt: Sequence[int], top: int, adapter: str | None = None) -> base.PromptLogprobs:
        self._check_tokens(prompt)
        body = {
            **({} if adapter is None else {"lora_path": adapter}),
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 1},
            "stream": False,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top,
        }
        answer = await self._command("/generate", body, timeout_s=transport.LOAD_S)
        return read_prompt(answer.get("meta_info") or {}, prompt, top)

    async def abort(self, request_id: str) -> None:
        await self._control("/abort_request", {"rid": request_id})

    async def state(self) -> base.EngineState:
        status, model = await self._info("model_info")
        if (refused := transport.key_refused("SGLang", status)) is not None:
            return refused
        if status != 200:
            return base.EngineState(not_ready=self._silent("SGLang", "/model_info", status))
        if not await self._is_started():
            return base.EngineState(not_ready="SGLang is starting")
        if not self._paused and (problem := await self._generation_problem(_TEMPERED, "SGLang")) is not None:
            return base.EngineState(not_ready=problem)
        if self._interval is None:  # a round trip through the scheduler
            status, about = await self._info("server_info")
            if status != 200 and status not in transport.NO_SUCH_ROUTE:
                return base.EngineState(not_ready=self._silent("SGLang", "/server_info", status))
            self._interval = about.get("stream_interval", 1)
        if self._interval != 1 and not self.capabilities.whole_answers:  # otherwise each call has its own
            return base.EngineState(not_ready=_INTERVAL % self._interval, advice="start it with --stream-interval 1")
        listed, loads = [answer for _, answer in await asyncio.gather(*map(self._get, ("/v1/models", "/v1/loads")))]
        served: dict[str, Any] = next((entry for entry in listed.get("data") or () if not entry.get("parent")), {})
        self._version = transport.weight_version(model.get("weight_version"))
        # A number that increases while the server generates.
        moments = [load["decode_moments"][0] for load in loads.get("loads") or () if load.get("decode_moments")]
        return base.EngineState(
            not_ready=None,
            version=self._version,
            max_model_len=transport.typed(served, "max_model_len", int),
            root=transport.typed(model, "model_path", str),
            paused=self._paused,
            adapters=transport.adapters_of(listed),
            generated=int(sum(moments)) if moments else None,
        )

    async def _info(self, name: str) -> tuple[int, dict[str, Any]]:
        """Return status and answer of the route ``name``, or of its predecessor if the server lacks it."""
        for prefix in ("/", "/get_") if self._prefix is None else (self._prefix,):
            status, answer = await self._get(f"{prefix}{name}")
            if status == 200:
                self._prefix = prefix
            if status not in transport.NO_SUCH_ROUTE:
                break
        return status, answer

    async def _is_started(self) -> bool:
        """Determine whether the server is paused, which ``/ready`` reports as 503, as it does while it starts."""
        status, _ = await self._get("/ready")
        if status == 200:
            self._paused = False
        elif status == 503 and not self._paused:
            starting, _ = await self._get("/health")
            self._paused = starting != 503
            return self._paused
        return True

    def point_to(self, url: str) -> None:
        super().point_to(url)
        self._shapes = {}

    def _forget_engine(self) -> None:
        super()._forget_engine()
        self._prefix = self._interval = self._paused = self._version = self._verified = None
        self._has_sessions, self.capabilities.whole_answers = True, False

    async def pause(self) -> None:
        await self._command("/pause_generation", {"mode": "retract"})
        self._paused = True

    async def resume(self) -> None:
        await self._command("/continue_generation")
        self._paused = False

    async def set_version(self, version: int) -> None:
        body = {"new_version": transport.version_label(version), "abort_all_requests": False}
        await self._command("/update_weight_version", body)
        self._version = version

    async def version(self) -> int | None:
        status, about = await self._info("model_info")
        if status != 200:
            raise base.EngineUnavailable(f"SGLang answered {status or 'nothing'} to GET /model_info")
        return transport.weight_version(about.get("weight_version"))

    async def verify_weights(self, source: str | base.Broadcast) -> None:
        """Compare shapes with those of the weights that were served first, if that folder can be read here."""
        self._verified = None
        if isinstance(source, base.Broadcast):
            new = {name: list(shape) for name, shape, _ in source.layout}
        else:
            new = await asyncio.to_thread(_shapes_in, Path(source))
        self._checksum = await self._weights_checksum()
        old = await self._served_shapes()
        wrong = [name for name in old if new.get(name) != old[name]] + [name for name in new if old and name not in old]
        if wrong:
            raise base.EngineRefused(f"{_NOT_TAKEN}: {wrong[0]} is {new.get(wrong[0])}, was {old.get(wrong[0])}")
        self._verified = source

    async def _verify_once(self, source: str | base.Broadcast) -> None:
        """Verify what could not be verified during generation; the engine is paused now."""
        if self._verified != source:
            await self.verify_weights(source)
        self._verified = None

    async def _served_shapes(self) -> Mapping[str, list[int]]:
        """Return the shapes of the served tensors; none if their folder could not be read here."""
        if not self._shapes:
            _, about = await self._info("model_info")
            folder = Path(str(about.get("model_path")))
            if await asyncio.to_thread(folder.is_dir):
                self._shapes = await asyncio.to_thread(_shapes_in, folder)
            else:
                _log.warning("the weights of an update are not compared with %s, which is not here", folder)
        return self._shapes

    async def load_weights(self, folder: str, version: int) -> None:
        await self._verify_once(folder)
        body = {"model_path": folder, "abort_all_requests": False, "flush_cache": True}
        async with self._replacing_weights(version) as label:
            await self._update("/update_weights_from_disk", {**body, "weight_version": label})

    async def _update(self, path: str, body: Mapping[str, object]) -> None:
        """Run a weight update. The module's docstring describes what happens after a failed one."""
        try:
            await self._checked_command(path, body)
        except base.EngineRefused as refused:
            if _NOT_FLUSHED not in str(refused):
                raise await self._judged(str(refused)) from refused
            await self._flush_cache()

    async def _judged(self, why: str) -> base.EngineFailed | base.EngineRefused:
        """Return the error of a failed update, which depends on the weights that the server has now."""
        now = await self._weights_checksum()
        if now is None:
            return base.EngineFailed(f"SGLang's update failed, and it does not tell which weights it has: {why}")
        if now == self._checksum:
            return base.EngineRefused(f"{_NOT_TAKEN}: {why}")
        return base.EngineFailed(f"SGLang has some of the new weights and not others: {why}")

    async def _weights_checksum(self) -> str | None:
        """Return the checksum of the weights that the server computes with; None if it does not report one."""
        try:
            answer = await self._command("/weights_checker", {"action": "checksum"})
        except (base.EngineUnsupported, base.EngineRefused):
            return None
        return transport.typed(answer, "per_engine_checksum", str)

    async def _flush_cache(self) -> None:
        try:
            await self._command("/flush_cache")
        except (base.EngineRefused, base.EngineUnsupported) as error:
            raise base.EngineFailed(f"SGLang has the new weights and the cache of the old ones: {error}") from error

    async def join_group(self, name: str, place: Mapping[str, object]) -> None:
        body = {
            "master_address": place["host"],
            "master_port": place["port"],
            "rank_offset": place["rank"],
            "world_size": place["world_size"],
            "group_name": name,
            "backend": place.get("backend") or "gloo",
        }
        await self._checked_command("/init_weights_update_group", body)

    async def receive_weights(self, name: str, layout: Any, version: int) -> None:
        """Check all shapes first: the server loads each tensor as it arrives."""
        await self._verify_once(base.Broadcast(name, layout))
        body = {
            "names": [entry[0] for entry in layout],
            "dtypes": [_DTYPES[entry[2]] for entry in layout],
            "shapes": [entry[1] for entry in layout],
            "group_name": name,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        async with self._replacing_weights(version) as label, self._update_session():
            await self._update("/update_weights_from_distributed", {**body, "weight_version": label})

    @contextlib.asynccontextmanager
    async def _update_session(self) -> AsyncIterator[None]:
        """Open an update session. Servers that have them load broadcast weights inside one, whole at its end."""
        if self._has_sessions:
            try:
                await self._begin_session()
            except base.EngineUnsupported:
                self._has_sessions = False
        try:
            yield
        finally:
            if self._has_sessions:
                try:
                    await self._checked_command("/end_weight_update", {})
                except (base.EngineRefused, base.EngineUnsupported) as error:
                    raise base.EngineFailed(f"SGLang did not finish the new weights: {error}") from error

    async def _begin_session(self) -> None:
        try:
            await self._checked_command("/begin_weight_update", {})
        except base.EngineRefused:  # a data proxy that died left one open
            await self._checked_command("/end_weight_update", {})
            await self._checked_command("/begin_weight_update", {})

    async def leave_group(self, name: str) -> None:
        with contextlib.suppress(
            base.EngineUnsupported, base.EngineRefused
        ):  # an older SGLang keeps the group, or it never joined
            await self._command("/destroy_weights_update_group", {"group_name": name})

    async def _checked_command(self, path: str, body: Mapping[str, object]) -> None:
        """Send a command of weights, whose failure may come with status 200."""
        answer = await self._command(path, body, timeout_s=transport.LOAD_S)
        if answer.get("success") is False:
            raise base.EngineRefused(str(answer.get("message") or answer.get("error_message") or "SGLang refused"))

    async def release_memory(self) -> None:
        """Release the memory. The server exits if it has a request meanwhile, even one that it has just answered. Its
        cache is therefore flushed first, which the server refuses while it has a request."""
        try:
            async with asyncio.timeout(_IDLE_S):
                while not await self._flushes():  # noqa: ASYNC110  # another process's state has no event
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except TimeoutError as error:
            raise base.EngineRefused(
                f"SGLang still has requests after {_IDLE_S:g} s: its memory is not released"
            ) from error
        await self._command("/release_memory_occupation", if_missing=_NO_SAVER)

    async def _flushes(self) -> bool:
        try:
            await self._command("/flush_cache")
        except base.EngineRefused:
            return False
        return True

    async def restore_memory(self) -> None:
        await self._command("/resume_memory_occupation", if_missing=_NO_SAVER)


def wire_body(call: base.EngineCall) -> dict[str, Any]:
    if call.sampling.ignore_eos and call.sampling.stop_token_ids:
        raise base.EngineRefused(_NO_STOPS, "unsupported_by_engine")
    sampling = transport.sampling_fields(call)
    sampling.pop("top_logprobs", None)
    # Also our defaults: the server may have taken others from the model.
    sampling |= {"temperature": call.sampling.temperature, "top_p": call.sampling.top_p}
    sampling |= {"top_k": call.sampling.top_k or -1, "skip_special_tokens": False}
    for name in ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        sampling[name] = getattr(call.sampling, name)
    if call.response_format is not None:
        sampling |= _constraint(call.response_format)
    adapter = {} if call.adapter is None else {"lora_path": call.adapter}
    return {
        **adapter,
        "rid": call.request_id,
        "input_ids": call.prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": call.sampling.top_logprobs,
    }


def _constraint(wanted: Mapping[str, Any]) -> dict[str, str]:
    """Return ``EngineCall.response_format`` as SGLang's sampling parameters."""
    match wanted["type"]:
        case "regex":
            return {"regex": wanted["regex"]}
        case "choice":
            return {"regex": "|".join(f"({re.escape(text)})" for text in wanted["choice"])}
        case "grammar":
            return {"ebnf": wanted["grammar"]}
    schema = (wanted.get("json_schema") or {}).get("schema") or {"type": "object"}
    return {"json_schema": orjson.dumps(schema).decode()}


@dataclass
class StreamOffsets:
    """Parses events and whole answers, and counts the tokens of each choice in earlier events. The end of an answer
    shows whether the server reports spans of versions, so that whole answers may be requested.

    A whole answer contains the time of its first token only if the server runs with ``--enable-metrics``; otherwise
    ``after_first_s`` is an estimate, which assumes that all tokens took equally long.
    """

    call: base.EngineCall
    capabilities: base.Capabilities
    pace: transport.Pace
    versions: transport.EventVersions = field(default_factory=transport.EventVersions)

    def deltas(self, data: Any) -> list[base.EngineDelta]:
        answers = data if isinstance(data, list) else [data]  # a whole answer of several choices
        for answer in answers:
            transport.check_event(answer)
        return [self.read(answer, number) for number, answer in enumerate(answers)]

    def read(self, data: Mapping[str, Any], number: int = 0) -> base.EngineDelta:
        index = data.get("index", number)
        about = data.get("meta_info", {})
        entries = about.get("output_token_logprobs") or []
        tops = about.get("output_top_logprobs") or []
        first, total = self.versions.seen.get(index, 0), about.get("completion_tokens", 0)
        if len(entries) >= total:  # the whole answer so far, and perhaps tokens of the events after this one
            entries, tops = entries[first:total], tops[first:total]
        total = first + len(entries)
        reason = about.get("finish_reason")
        ended = isinstance(reason, Mapping)
        matched = reason.get("matched") if ended else None
        spans = about.get("weight_versions") if ended else None
        latency = about.get("e2e_latency", 0.0)
        if ended and total:  # an answer without tokens has no spans
            self.capabilities.whole_answers = bool(spans)
            self.pace.learn(latency, total)
        version = transport.known_version(about.get("weight_version"))
        versions, all_versions = self.versions.read(index, len(entries), version, spans)
        return base.EngineDelta(
            index=index,
            token_ids=tuple(entry[1] for entry in entries),
            logprobs=_known(entries),
            versions=versions,
            top_logprobs=tuple(map(_top, tops)) if self.call.sampling.top_logprobs else None,
            finish_reason=base.FinishReason.read(reason.get("type")) if ended else None,
            stop_token_id=matched if isinstance(matched, int) else None,
            after_first_s=latency - about.get("first_token_latency", latency / total)
            if ended and total and not first
            else 0.0,
            all_versions=all_versions,
        )


def read_prompt(about: Mapping[str, Any], prompt: Sequence[int], top: int) -> base.PromptLogprobs:
    """Return the scores in ``meta_info``. Entries are [logprob, token id, ...]; the first logprob is null."""
    entries = about.get("input_token_logprobs") or []
    if [entry[1] for entry in entries] != list(prompt):
        raise base.EngineFailed(
            f"SGLang returned log-probabilities of {len(entries)} tokens, not those of the prompt's {len(prompt)}"
        )
    tops = about.get("input_top_logprobs") or [None] * len(entries)
    return base.PromptLogprobs(_known(entries[1:]), tuple(_top(each)[:top] for each in tops[1:]))


def _shapes_in(folder: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in a folder. Raises EngineRefused for a folder without weights."""
    try:
        return {name: list(entry.shape) for name, entry in open_checkpoint(folder).entries.items()}
    except ArealError as error:
        raise base.EngineRefused(f"{_NOT_TAKEN}: {error.message}") from error


def _known(entries: Sequence[Sequence[Any]]) -> tuple[float, ...]:
    """Return a log-probability. SGLang writes null for one that is not finite."""
    logprobs = tuple(entry[0] for entry in entries)
    if None in logprobs:
        token = entries[logprobs.index(None)][1]
        raise base.EngineFailed(
            f"SGLang's log-probability of token {token} is not finite: check the weights and the dtype"
        )
    return logprobs


def _top(entry: Any) -> base.TopLogprobs:
    """Return the most likely tokens, without those of a null log-probability (grammars, ``min_new_tokens``)."""
    return tuple((item[1], item[0]) for item in entry or () if item[0] is not None)
