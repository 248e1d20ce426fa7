"""The contract between a data proxy and a token engine: token ids in, token ids out.

A token engine samples; the data proxy handles text (templates, stop strings, detokenization). ``stream_to`` passes a
delta per flush to a function and returns once each choice has its finish reason. Cancelling it cancels the engine's.

Every sampled token, end-of-text included, is in exactly one delta, with the version of the weights that sampled it and
its log-probability: that of ``softmax(logits / temperature)`` at the call's temperature, before penalties,
``logit_bias``, grammars, top-k, top-p and min-p. A trainer can recompute it from these alone. Temperature 0 is greedy,
with log-probabilities of ``softmax(logits)``. ``Capabilities.logprobs`` tells where an engine deviates.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from areal.dataclasses import dataclass, fields
from areal.services.http.messages import FlowControl
from areal.wire.sampling import GREEDY_BELOW, SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"

    @classmethod
    def read(cls, text: object) -> FinishReason:
        """Return the finish reason in an engine's answer. All reasons other than stop and length are an abort."""
        return cls(text) if text in ("stop", "length") else cls.ABORT


UNKNOWN_VERSION = -1


@dataclass(frozen=True)
class EngineCall:
    """A request for ``sampling.n`` choices of each prompt. Choices are numbered over all prompts in order.

    ``prompts``: several only if the engine has ``many_prompts``. ``request_id``: unique to the call.
    ``response_format``: OpenAI's, or of type ``regex``, ``choice`` or ``grammar`` (EBNF) with a field of that name;
    only if the engine supports it. ``adapter``: one of ``EngineState.adapters``; None is the base model. ``stream``
    false: only the complete answer is needed, and an engine with ``whole_answers`` sends it at once at the end.
    ``stream_interval``: the number of new tokens of a choice for which an event may wait. ``seeds``: one for each of
    several prompts. ``images``: those of the single prompt, in base64, if the engine supports images.
    """

    request_id: str
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    response_format: Mapping[str, Any] | None = None
    adapter: str | None = None
    stream: bool = True
    stream_interval: int = 1
    seeds: Sequence[int] | None = None
    images: Sequence[str] = ()

    @property
    def prompt(self) -> Sequence[int]:
        (prompt,) = self.prompts
        return prompt


TopLogprobs = tuple[tuple[int, float], ...]


@dataclass(slots=True)  # not frozen: there is one for each step of each stream, and freezing doubles its cost
class EngineDelta:
    """New tokens of choice ``index``; each list has one entry per token. ``versions`` are ``UNKNOWN_VERSION`` if the
    engine reports none. ``all_versions``, in the last delta: the versions of the whole choice, if the engine knows them
    better at the end. ``after_first_s``, in the first delta: seconds since the engine sampled the first token."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    after_first_s: float = 0.0
    all_versions: tuple[int, ...] | None = None


@dataclass(frozen=True)
class PromptLogprobs:
    """The log-probability (``softmax(logits)``) of each prompt token but the first, and the most likely tokens."""

    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]


@dataclass(frozen=True)
class EngineState:
    """The state of an engine. ``not_ready``: the reason, or None. ``max_model_len``: of prompt and answer, in tokens.

    ``root``: the model's source. ``paused``: None if unknown. ``adapters``: the LoRA adapters that a call may name.
    ``generated``: tokens sampled since the engine's start, if it reports them; it shows the progress of whole answers.
    ``advice``: what to do if waiting does not help.
    """

    not_ready: str | None
    version: int | None = None
    max_model_len: int | None = None
    root: str | None = None
    paused: bool | None = None
    adapters: tuple[str, ...] = ()
    generated: int | None = None
    advice: str | None = None

    @property
    def fault(self) -> str | None:
        return None if self.advice is None else f"{self.not_ready}; {self.advice}"


@dataclass(frozen=True)
class LogprobsMode:
    """The distribution of an engine's log-probabilities: whether temperature is applied (``tempered``), and whether
    they are computed before top-k, top-p and min-p (``before_filters``), before penalties, ``logit_bias`` and
    ``min_tokens`` (``before_penalties``), and before grammars (``before_grammars``)."""

    tempered: bool = True
    before_filters: bool = True
    before_penalties: bool = True
    before_grammars: bool = True

    def conflict(self, sampling: SamplingParams, *, grammar: bool) -> str | None:
        """Return the first field by which log-probabilities deviate (``response_format``: a grammar), or None."""
        if not self.tempered and sampling.temperature not in (0.0, 1.0):
            return "temperature"
        shaping: tuple[str, ...] = ()
        if not self.before_filters and sampling.temperature > 0:
            shaping += _FILTERS
        if not self.before_penalties:
            shaping += _PENALTIES
        if not self.before_grammars and grammar:
            return "response_format"
        if not shaping:
            return None
        changed = sampling.changed()
        return next((name for name in shaping if name in changed), None)


SAMPLING_FIELDS = frozenset(item.name for item in fields(SamplingParams))
_FILTERS = ("top_p", "top_k", "min_p")
_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_new_tokens")


@dataclass
class Capabilities:
    """The features of an engine beyond plain sampling. Requests for other features are refused with the field's name.

    ``TokenEngine.state`` updates them, because some are known only once the engine runs.
    """

    sampling_fields: frozenset[str] = SAMPLING_FIELDS
    response_format: bool = False
    no_response_format: str = ""  # the reason why not, if known
    images: bool = False
    no_images: str = "this engine takes token ids alone"
    max_top_logprobs: int = 20
    prompt_logprobs: bool = False  # ``PromptScorer``
    many_prompts: bool = False  # in one call
    free_seeds: bool = False  # it samples as fast with a seed as without
    whole_answers: bool = False  # it reports each token's weight version in a whole answer too
    lowest_temperature: float = GREEDY_BELOW  # above 0
    logprobs: LogprobsMode = LogprobsMode()
    swaps_between_steps: bool = False  # staged weights: it need not be paused for that
    vocab_size: int | None = None  # the model's, as its data proxy knows it


class EngineError(Exception):
    """A call to the engine failed."""


class EngineUnavailable(EngineError):
    """The engine did not begin: connection refused, still loading, shutting down. Another replica may be tried."""


class EngineRefused(EngineError):
    """The engine rejects the request; ``code`` and ``param`` are its own error code and field, if it has them."""

    def __init__(self, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class EngineFailed(EngineError):
    """The engine began, and then failed or died. Its output is incomplete."""


class EngineUnsupported(EngineError):
    """The engine does not have this control, or was started without it."""


class WeightsDiffer(EngineFailed):
    """The engine accepted new weights but computes with other ones, so its samples are invalid."""


DeltaSink = Callable[[EngineDelta], None]
OnFlow = Callable[[FlowControl], None]


class TokenGenerator(Protocol):
    capabilities: Capabilities

    async def stream_to(self, call: EngineCall, sink: DeltaSink, flowing: OnFlow) -> None:
        """Run a call, and call ``sink`` with each delta, without a task switch. An exception in ``sink`` ends the call.
        ``flowing`` is called before the first delta of a stream with an object that can pause it. Raises
        EngineUnavailable or EngineRefused before the first delta, EngineFailed at any time.

        A stream that ends before each choice has its finish reason has failed too; the caller must check this.
        """


class TokenEngine(TokenGenerator, Protocol):
    """The client of one engine process."""

    async def abort(self, request_id: str) -> None:
        """Stop the call in the engine. Best effort; never raises EngineError."""

    def point_to(self, url: str) -> None:
        """Use the engine at ``url`` for new calls. Running calls stay at their engine."""

    async def state(self) -> EngineState:
        """Return the engine's state. An engine that does not answer is not ready; never raises EngineError."""

    async def pause(self) -> None:
        """Pause generation. On return no token can be sampled until ``resume``; running calls then continue.

        This and the following controls raise EngineError, EngineUnsupported if the engine does not have the control.
        """

    async def resume(self) -> None:
        """Resume generation. Idempotent, as ``pause`` is."""

    async def set_version(self, version: int) -> None:
        """Set the version that later tokens are recorded with."""

    async def version(self) -> int | None:
        """Return the engine's weight version; None if none was set. Raises EngineUnavailable."""

    async def load_weights(self, folder: str, version: int) -> None:
        """Replace the model's weights in place with those in ``folder``, which the engine can read. Later tokens have
        ``version``. The caller must have paused the engine.

        If the engine refuses the folder (EngineRefused), the old weights and their version stay. An engine that accepts
        weights may still compute with others: see ``check_weights``.
        """

    async def release_memory(self) -> None:
        """Free the device memory of weights and cache. Nothing is generated until ``restore_memory``."""

    async def restore_memory(self) -> None: ...


@runtime_checkable
class PromptScorer(Protocol):
    """An engine that computes the log-probabilities of a prompt's tokens."""

    async def score(self, prompt: Sequence[int], top: int, adapter: str | None = None) -> PromptLogprobs:
        """Return the log-probabilities of the prompt. ``top``: how many likely tokens to report. Raises EngineError."""


@dataclass(frozen=True)
class Broadcast:
    """Weights that rank 0 of the process group ``group`` sends next: the tensors of ``layout``."""

    group: str
    layout: Any


@runtime_checkable
class WeightStager(Protocol):
    """An engine that prepares new weights while it generates, so that the pause is short."""

    async def stage_weights(self, source: str | Broadcast, version: int) -> None:
        """Stage weights; the served ones do not change. Raises EngineError as ``TokenEngine.load_weights`` does."""

    async def load_staged(self, version: int) -> None:
        """Serve the weights that were staged as ``version``; see ``TokenEngine.load_weights``."""

    async def forget_weights(self) -> None:
        """Drop staged weights and their source. Best effort; raises EngineError."""


@runtime_checkable
class WeightVerifier(Protocol):
    """An engine that cannot stage new weights, but can check them in advance."""

    async def verify_weights(self, source: str | Broadcast) -> None:
        """Raise EngineRefused for weights that are missing or do not have the model's shapes."""


@runtime_checkable
class GroupMember(Protocol):
    """An engine that receives weights in a process group (``areal.services.weight_transfer.group``).

    ``group_form``: ``plain`` is a ``BroadcastGroup``, ``named`` a ``NamedGroup``. An engine that does not stage a
    broadcast is a ``GroupReceiver``.
    """

    group_form: str

    async def join_group(self, name: str, place: Mapping[str, object]) -> None:
        """Join a process group, with all members. ``place``: host, port, rank, world_size. Raises EngineError."""

    async def leave_group(self, name: str) -> None:
        """Leave the group. Idempotent."""


@runtime_checkable
class GroupReceiver(Protocol):
    async def receive_weights(self, name: str, layout: Any, version: int) -> None:
        """Load the tensors of ``layout`` that the group's rank 0 broadcasts; see ``load_weights``."""


class Dialect(StrEnum):
    """The protocol of an external API."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


# Flags and environment variables of engines change the distribution of the log-probabilities (vLLM's
# ``--logprobs-mode``, SGLang's ``SGLANG_RETURN_ORIGINAL_LOGPROB``), and no route reports it. So ``logprobs_problem``
# samples single tokens after a short prompt. Between two tokens, log-probabilities of softmax(logits / T) are 1 / T
# times as far apart as those of softmax(logits). Under top-k 1, or a bias that leaves one token, that token's is 0.
#
# Engines have answered 200 to a weight update and continued with a stale copy of a tied head. So the sender of the
# weights makes a plain forward pass over a few tokens, and in ``check_weights`` the engine must give the next token the
# same log-probabilities.

_ALTERNATIVES = 5
_LEAST = 0.1  # nats: a gap or a log-probability below it decides nothing, in bfloat16 at least
_PROMPTS = tuple((first, first + 1, 1) for first in range(1, 9))
_T = 0.5
_BIAS = 100.0
_PROBE_S = 60.0


async def _logprobs_mode(engine: TokenGenerator, expected: LogprobsMode) -> LogprobsMode:
    """Determine the mode from samples. Returns ``expected`` for grammars, which are not sampled, and if no token is
    clearly the most likely one. Raises EngineError. The engine must not be paused."""
    for prompt in _PROMPTS:
        plain = await _likeliest(engine, prompt)
        ranked = sorted(plain, key=plain.__getitem__, reverse=True)
        first, last = ranked[0], ranked[-1]
        gap = plain[first] - plain[last]
        if gap < _LEAST or plain[first] > -_LEAST:
            continue
        tempered = await _likeliest(engine, prompt, temperature=_T)
        filtered = await _likeliest(engine, prompt, top_k=1)
        biased = await _likeliest(engine, prompt, logit_bias={first: _BIAS})
        if not {first, last} <= tempered.keys() or first not in filtered or first not in biased:
            raise EngineFailed("the engine's log-probabilities of one prompt are inconsistent")
        return LogprobsMode(
            tempered=tempered[first] - tempered[last] > gap * (1 + 1 / _T) / 2,
            before_filters=filtered[first] < plain[first] / 2,
            before_penalties=biased[first] < plain[first] / 2,
            before_grammars=expected.before_grammars,
        )
    return expected


async def logprobs_problem(engine: TokenGenerator, expected: LogprobsMode, name: str) -> str | None:
    """Set the engine's ``capabilities.logprobs`` from samples. Returns the reason if that fails, else None."""
    try:
        async with asyncio.timeout(_PROBE_S):
            engine.capabilities.logprobs = await _logprobs_mode(engine, expected)
    except (EngineError, TimeoutError) as error:
        return f"{name}'s log-probabilities could not be checked: {error or 'no answer'}"
    return None


async def generation_problem(engine: TokenGenerator, name: str) -> str | None:
    """Sample one token. Returns the reason if that fails, else None."""
    try:
        async with asyncio.timeout(_PROBE_S):
            sampled, _ = await _next_token(engine, _PROMPTS[0])
    except (EngineError, TimeoutError) as error:
        return f"{name} does not generate: {error or 'no answer'}"
    return None if sampled else f"{name} does not generate: its answer had no token"


async def _likeliest(engine: TokenGenerator, prompt: tuple[int, ...], **sampling: Any) -> Mapping[int, float]:
    """Return the log-probabilities of the most likely next tokens."""
    _, reported = await _next_token(engine, prompt, top_logprobs=_ALTERNATIVES, **sampling)
    if len(reported) < 2:
        raise EngineFailed("the engine gives no log-probabilities of alternatives")
    return reported


async def _next_token(
    engine: TokenGenerator, prompt: tuple[int, ...], **sampling: Any
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the log-probabilities of the sampled token, and of the most likely ones, after ``prompt``."""
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, **sampling)
    call = EngineCall(f"probe-{secrets.token_hex(8)}", (prompt,), params)
    sampled: dict[int, float] = {}
    likeliest: dict[int, float] = {}
    deltas: list[EngineDelta] = []
    await engine.stream_to(call, deltas.append, lambda flow: None)
    for delta in deltas:
        sampled |= dict(zip(delta.token_ids, delta.logprobs, strict=True))
        for entry in delta.top_logprobs or ():
            likeliest |= dict(entry)
    return sampled, likeliest


FLOAT32_TOLERANCE = 1e-3


@dataclass(frozen=True)
class WeightProbe:
    """Log-probabilities after ``input_ids`` from a plain forward pass. ``expected``: by token id, at least for the most
    likely tokens. ``tolerance``: nats, for the precision of the engine."""

    input_ids: tuple[int, ...]
    expected: Mapping[int, float]
    tolerance: float = FLOAT32_TOLERANCE

    def __post_init__(self) -> None:
        if not self.input_ids or not self.expected:
            raise ValueError("a probe needs tokens, and log-probabilities to compare with")


def largest_gap(probe: WeightProbe, reported: Mapping[int, float]) -> float:
    """Return the largest difference in nats over the common tokens; infinite if there are none."""
    common = probe.expected.keys() & reported.keys()
    return max((abs(probe.expected[token] - reported[token]) for token in common), default=float("inf"))


async def check_weights(engine: TokenGenerator, probe: WeightProbe) -> float:
    """Compare the engine's log-probabilities with a plain forward pass, and return the largest difference in nats.
    Raises WeightsDiffer if it exceeds the tolerance. The engine must not be paused."""
    wanted = min(len(probe.expected), engine.capabilities.max_top_logprobs)
    sampled, likeliest = await _next_token(engine, probe.input_ids, temperature=0.0, top_logprobs=wanted)
    reported = sampled | likeliest
    if not reported:
        raise EngineFailed("the engine gave no token to compare its weights by")
    gap = largest_gap(probe, reported)
    if not gap <= probe.tolerance:  # NaN differs
        raise WeightsDiffer(
            f"the engine does not compute with the weights it was given: its log-probabilities are {gap:.3g} nats off "
            f"those of a plain forward pass (tolerance {probe.tolerance:g}); load the weights again, or restart it"
        )
    return gap
