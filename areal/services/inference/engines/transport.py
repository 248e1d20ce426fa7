"""The HTTP side of every engine's client: errors by their cause, and responses parsed into deltas.

All events of one read become one delta per choice, so that steps that arrive together cost little more than one.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import urlencode

import orjson

from areal.dataclasses import dataclass, field
from areal.http.client import CallFailed, HttpClient, Lines, NotConnected, Window, event_payloads
from areal.services.inference.engines import base

T = TypeVar("T")


def typed(data: Mapping[str, object], name: str, kind: type[T]) -> T | None:
    """Return the value under ``name``; None if it is of another type."""
    value = data.get(name)
    return value if isinstance(value, kind) else None


_UNKNOWN = "unknown"


def version_label(version: int) -> str:
    """Return ``version`` in the form in which vLLM and SGLang store it."""
    return _UNKNOWN if version == base.UNKNOWN_VERSION else str(version)


def weight_version(text: object) -> int | None:
    """Return vLLM's or SGLang's weight version. Their "default", before one is set, is 0. None for other texts."""
    if text in (None, "default"):
        return 0
    if text == _UNKNOWN:
        return base.UNKNOWN_VERSION
    return int(text) if isinstance(text, str | int) and str(text).isdecimal() else None


def known_version(version: object) -> int:
    """Return ``weight_version``, or ``UNKNOWN_VERSION`` if it is not a number."""
    number = weight_version(version)
    return base.UNKNOWN_VERSION if number is None else number


def _versions_in(spans: Sequence[Mapping[str, Any]], first: int, count: int) -> tuple[int, ...]:
    """Return the weight versions of ``count`` tokens from number ``first`` on; unknown outside of the spans."""
    if spans[-1]["start"] <= first and first + count <= spans[-1]["end"]:
        return (known_version(spans[-1]["version"]),) * count
    versions = [base.UNKNOWN_VERSION] * count
    for span in spans:
        for number in range(max(span["start"], first), min(span["end"], first + count)):
            versions[number - first] = known_version(span["version"])
    return tuple(versions)


@dataclass
class EventVersions:
    """The weight versions of an answer's tokens, event by event. ``seen``: number of tokens of each choice so far.

    An event of several tokens may have tokens from before and from after an update. If its version differs from that of
    the previous event (for the first event: from the version when the call ``began``, None if unknown), the versions of
    its tokens are unknown until the exact spans at the end of the answer.
    """

    began: int | None = None
    seen: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)

    def read(self, index: int, count: int, version: int, spans: Any) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the versions of an event's ``count`` tokens; where ``spans`` correct earlier ones, all."""
        first = self.seen.get(index, 0)
        total = self.seen[index] = first + count
        if spans:
            return _versions_in(spans, first, count), _versions_in(spans, 0, total) if first else None
        at_first = None if self.began == base.UNKNOWN_VERSION else self.began  # nothing is sampled while it is unknown
        mixed = count > 1 and self.last.get(index, at_first) not in (version, None)
        self.last[index] = version
        return (base.UNKNOWN_VERSION if mixed else version,) * count, None


_SMOOTH_S = 0.05  # a reader sees no pause
_MOST_AT_ONCE = 16


@dataclass
class Pace:
    """The speed at which the engine sampled the tokens of the last answer. It includes the time in the queue, so a busy
    engine seems slower, and its events are smaller."""

    token_s: float = _SMOOTH_S

    @property
    def interval(self) -> int:
        """The number of tokens in an event."""
        return min(_MOST_AT_ONCE, max(1, int(_SMOOTH_S / self.token_s)))

    def learn(self, latency_s: float, tokens: int) -> None:
        if latency_s > 0 and tokens:
            self.token_s = latency_s / tokens


def adapters_of(listed: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the adapters in ``/v1/models``: entries with a parent."""
    return tuple(entry["id"] for entry in listed.get("data") or () if entry.get("parent"))


def sampling_fields(call: base.EngineCall) -> dict[str, Any]:
    """Return the sampling parameters that differ from their defaults, as JSON."""
    sampling = call.sampling.changed()
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {str(token): bias for token, bias in sampling["logit_bias"].items()}
    return sampling


def weight_source(source: str | base.Broadcast) -> dict[str, object]:
    return {"path": source} if isinstance(source, str) else {"group": source.group, "layout": source.layout}


ReadObject = Callable[[dict[str, object]], Iterable[base.EngineDelta]]
"""The deltas in one JSON object of an answer. Raises EngineFailed for a failure that it reports."""

MISREAD = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""Raised by reading an answer in which a field is missing or of another type."""


def malformed_answer(error: Exception) -> base.EngineFailed:
    return base.EngineFailed(f"the engine's answer is malformed: {type(error).__name__}: {str(error)[:200]}")


class JsonLines:
    """Reads an answer with one JSON object per line."""

    def __init__(self, read: ReadObject) -> None:
        self._read = read
        self._lines = Lines()

    def feed(self, part: bytes) -> Iterable[base.EngineDelta]:
        """Return the deltas that ``part`` completes. Raises EngineFailed after the deltas before the failure."""
        if not self._lines.is_line(part):
            return self._deltas(self._lines.feed(part))
        try:
            return merged([*self._read(orjson.loads(part))])
        except MISREAD as error:
            raise malformed_answer(error) from error

    def _deltas(self, payloads: Iterable[bytes]) -> Iterator[base.EngineDelta]:
        deltas: list[base.EngineDelta] = []
        failure: base.EngineError | None = None
        try:
            for payload in payloads:
                deltas += self._read(orjson.loads(payload))
        except base.EngineError as error:
            failure = error
        except MISREAD as error:
            failure = malformed_answer(error)
        yield from merged(deltas)
        if failure is not None:
            raise failure

    def end(self) -> Iterable[base.EngineDelta]:
        """Return the last deltas, at the body's end. Raises EngineFailed for an incomplete answer."""
        return ()


class JsonEvents(JsonLines):
    """Reads server-sent events with a JSON object each, until ``[DONE]``."""

    def __init__(self, read: ReadObject) -> None:
        super().__init__(read)
        self._done = False

    def feed(self, part: bytes) -> Iterable[base.EngineDelta]:
        payloads = []
        for payload in event_payloads(self._lines.feed(part)):
            self._done = self._done or payload == b"[DONE]"
            if not self._done:
                payloads.append(payload)
        return self._deltas(payloads)

    def end(self) -> Iterable[base.EngineDelta]:
        if not self._done:
            raise base.EngineFailed("the engine's stream was cut")
        return ()


def check_event(data: Mapping[str, object]) -> None:
    """Raise EngineFailed for an error event, EngineRefused for one of the request, which may follow status 200."""
    if "error" not in data:
        return
    error = data["error"] if isinstance(data["error"], Mapping) else {"message": data["error"]}
    code, message = error.get("code"), str(error.get("message") or error)
    if isinstance(code, int) and 400 <= code < 500 and code != 429:
        raise base.EngineRefused(message)
    raise base.EngineFailed(f"the engine failed: {message}")


def merged(deltas: Sequence[base.EngineDelta]) -> Iterable[base.EngineDelta]:
    """Return one delta per choice."""
    if len(deltas) < 2:
        return deltas
    of_choice: dict[int, list[base.EngineDelta]] = {}
    for delta in deltas:
        parts = of_choice.setdefault(delta.index, [])
        if not parts or parts[-1].finish_reason is None:  # what comes after the end is dropped
            parts.append(delta)
    return [_joined(parts) if len(parts) > 1 else parts[0] for parts in of_choice.values()]


def _joined(parts: Sequence[base.EngineDelta]) -> base.EngineDelta:
    last = parts[-1]
    tops = None if last.top_logprobs is None else [part.top_logprobs or () for part in parts]
    return base.EngineDelta(
        index=last.index,
        token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
        logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
        versions=tuple(chain.from_iterable(part.versions for part in parts)),
        top_logprobs=None if tops is None else tuple(chain.from_iterable(tops)),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        after_first_s=parts[0].after_first_s,
        all_versions=last.all_versions,
    )


WINDOW_S = 0.02  # 50 events a second are a smooth text
_CONTROL_S = 5.0
COMMAND_S = 120.0
LOAD_S = 1800.0  # weights of any size, from any disk
_NEVER_BEGAN = frozenset({429, 503})
NO_SUCH_ROUTE = frozenset({404, 405, 501})
_MOST_ERROR_BYTES = 65536
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


GenerateRequest = tuple[str, Mapping[str, object], JsonLines]
"""Path, body and reader of the answer. The body's ``stream``: whether the answer comes in parts."""


class EngineClient(ABC):
    """The client of the engine at ``url``. The caller watches generations, which have no time limit."""

    no_route = "this engine has no {path}"  # the message of EngineUnsupported

    def __init__(self, http: HttpClient, url: str, headers: Mapping[str, str], capabilities: base.Capabilities) -> None:
        self.capabilities = capabilities
        self._http = http
        self._url = url.rstrip("/")
        self._headers = headers
        self._window = Window(WINDOW_S)
        self._calls: Counter[str] = Counter()  # generations under way, by path
        self._whole_calls = 0  # those of them that answer once, at their end
        self._logprobs_known = False
        self._generates = False  # whether it has generated since it was found, or since its last update of weights

    @abstractmethod
    def _request(self, call: base.EngineCall) -> GenerateRequest: ...

    @abstractmethod
    async def set_version(self, version: int) -> None: ...

    @abstractmethod
    async def version(self) -> int | None: ...

    @contextlib.asynccontextmanager
    async def _replacing_weights(self, version: int) -> AsyncIterator[str]:
        """Set the version of the engine's weights around an update: ``version`` after the block, and the previous
        version if the engine refuses the weights. In between, and after any other failure, the version is unknown, also
        for clients that query the engine. Yields the label that the update may set, so that a successor of this process
        does not find an unfinished update. Raises EngineError."""
        self._generates = False
        before, has_labels = await self.version(), True
        try:
            await self.set_version(base.UNKNOWN_VERSION)
        except base.EngineUnsupported:
            has_labels = False
        try:
            yield version_label(base.UNKNOWN_VERSION if has_labels else version)
        except (base.EngineRefused, base.EngineUnsupported):
            if has_labels:
                await self._label_weights(before or 0)
            raise
        except BaseException:
            with contextlib.suppress(base.EngineError):  # the command may have set another one
                await self.set_version(base.UNKNOWN_VERSION)
            raise
        await self._label_weights(version)

    async def _label_weights(self, version: int) -> None:
        try:
            await self.set_version(version)
        except (base.EngineRefused, base.EngineUnsupported) as error:
            if await self.version() != version:  # the update may have set it
                raise base.EngineFailed(f"the engine does not take the version of its weights: {error}") from error

    def point_to(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._forget_engine()

    async def stream_to(self, call: base.EngineCall, sink: base.DeltaSink, flowing: base.OnFlow) -> None:
        """Pass deltas to ``sink`` in a callback of the loop, merged over a short window; whole answers at their end."""
        path, body, reader = self._request(call)
        is_whole, data = not body["stream"], orjson.dumps(body, default=array.tolist)  # prompts may be arrays

        def feed(part: bytes) -> None:
            for delta in reader.feed(part):
                sink(delta)

        self._calls[path] += 1
        self._whole_calls += is_whole
        try:
            async with self._http.call("POST", self._url, path, self._headers, data) as answer:
                if answer.status != 200:
                    error = b""
                    while len(error) < _MOST_ERROR_BYTES and (part := await answer.part()):
                        error += part
                    raise _failure(answer.status, error)
                if is_whole:
                    feed(await answer.whole() + b"\n")
                    return
                flowing(answer)
                await answer.stream_to(feed, window=self._window)
                for delta in reader.end():
                    sink(delta)
        except NotConnected as error:
            raise base.EngineUnavailable("the engine does not answer") from error
        except CallFailed as error:
            raise base.EngineFailed("the connection to the engine broke") from error
        finally:
            self._calls[path] -= 1
            self._whole_calls -= is_whole

    def _flush(self) -> None:
        """Deliver all deltas that have arrived, of all generations."""
        self._window.end()

    async def _control(self, path: str, body: Mapping[str, object]) -> None:
        """Send a short best-effort call: abort."""
        with contextlib.suppress(CallFailed, TimeoutError):
            await self._http.fetch(
                "POST", self._url, path, timeout_s=_CONTROL_S, headers=self._headers, body=orjson.dumps(body)
            )

    async def _command(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        if_missing: str | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float = COMMAND_S,
    ) -> dict[str, Any]:
        """Run a control and return its JSON object. Raises EngineUnsupported with ``if_missing`` without the route."""
        where = f"{path}?{urlencode(params)}" if params else path
        data = orjson.dumps(body or {})
        try:
            answer = await self._http.fetch(
                "POST", self._url, where, timeout_s=timeout_s, headers=self._headers, body=data
            )
        except NotConnected as error:
            raise base.EngineUnavailable("the engine does not answer") from error
        except (CallFailed, TimeoutError) as error:
            raise base.EngineFailed(f"the engine did not answer to {path}: {error!r}") from error
        if answer.status in NO_SUCH_ROUTE:
            raise base.EngineUnsupported(if_missing or self.no_route.format(path=path))
        if answer.status != 200:
            raise _failure(answer.status, answer.body)
        return answer.object()

    async def _get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return status and JSON object, empty if the body is not one. Status 0: no answer."""
        try:
            answer = await self._http.fetch("GET", self._url, path, timeout_s=_CONTROL_S, headers=self._headers)
        except (CallFailed, TimeoutError):
            return 0, {}
        return answer.status, answer.object()

    def _silent(self, name: str, path: str, status: int) -> str:
        """Return why the engine is not ready. A silent one may restart with other settings, and its first weights."""
        if status == 0:
            self._forget_engine()
        return f"{name} is not ready: {path} answered {status or 'nothing'}"

    def _forget_engine(self) -> None:
        """Discard all information about the engine process, because another process may answer from now on."""
        self._logprobs_known = self._generates = False

    async def _generation_problem(self, expected: base.LogprobsMode, name: str) -> str | None:
        """Return the reason why the engine does not generate, or None. This is checked once per process, together with
        the mode of its log-probabilities, and once after each weight update, unless calls are running, whose progress
        is sufficient. The engine must not be paused."""
        if not self._logprobs_known:
            problem = await base.logprobs_problem(self, expected, name)
            self._logprobs_known = problem is None
        elif self._generates or self._calls.total():
            return None
        else:
            problem = await base.generation_problem(self, name)
        self._generates = problem is None
        return problem


def _failure(status: int, body: bytes) -> base.EngineFailed | base.EngineRefused | base.EngineUnavailable:
    text, code, param = read_error(body)
    if not text and status in _PHRASES:
        text = _PHRASES[status]
    if status in _NEVER_BEGAN:
        return base.EngineUnavailable(f"the engine takes no requests now: {text}")
    if 400 <= status < 500 and status not in (401, 403, 404, 405):
        return base.EngineRefused(text, code, param)
    return base.EngineFailed(f"the engine answered {status}: {text}" + "; its log has the cause" * (status >= 500))


def key_refused(engine: str, status: int) -> base.EngineState | None:
    """Return the state of an engine that refused its key with ``status``; None for other statuses."""
    if status not in (401, 403):
        return None
    what = f"{engine} does not take the key, or wants one: it answered {status}"
    return base.EngineState(not_ready=what, advice="name the one of its --api-key in engineApiKeyFrom")


def read_error(body: bytes) -> tuple[str, str | None, str | None]:
    """Return message and code of an error body in any of the usual forms."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")[:500], None, None
    inner = data.get("error", data) if isinstance(data, dict) else data
    if not isinstance(inner, dict):
        return str(inner)[:500], None, None
    code, param = typed(inner, "code", str), typed(inner, "param", str)
    return str(inner.get("message", inner.get("detail", "")))[:500], code, param
