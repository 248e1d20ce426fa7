"""Bodies of control requests: callers send these dataclasses as JSON, services read them with ``read_body``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING
from functools import cached_property
from typing import Any, Literal, NotRequired, TypedDict
from urllib.parse import urlsplit

from areal.dataclasses import dataclass, field
from areal.wire.fields import bounded
from areal.wire.routing import DEFAULT_READINESS, Readiness, Strategy, worker_base_url
from areal.wire.sampling import WHOLE_RANGES

MAX_GROUP = 1024
MAX_EXPORTED = 4096  # sessions in one export
_MODEL_NAME = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._:/]{0,199}")
_WORKER_ID = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._]{0,127}")
_ADDRESS = "host:port or http://host:port: a host and a port, nothing else"
_NOT_ALLOWED = "has characters or a length that is not allowed"
_TARGET = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_LABEL = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]{0,63}")
_LONGEST_LABEL = 200
_SESSION_KEY = re.compile(r"[!-~]{8,512}")


def checked(problem: str, valid: Callable[[Any], object], default: Any = MISSING) -> Any:
    """Return a field whose value is refused with ``problem`` unless it is ``valid``."""
    return field(default=default, metadata={"problem": problem, "valid": valid})


def text(default: Any = MISSING) -> Any:
    return checked("must be a text, not an empty one", lambda value: value != "" and "\0" not in value, default)


IDEMPOTENCY_KEY = "Idempotency-Key"
"""A caller's name for one request: a repetition with the same name is answered and has no other effect."""
_LONGEST_IDEMPOTENCY_KEY = 255
IDEMPOTENCY_KEY_PROBLEM = f"must be 1 to {_LONGEST_IDEMPOTENCY_KEY} printable characters"


def is_idempotency_key(key: str) -> bool:
    return 1 <= len(key) <= _LONGEST_IDEMPOTENCY_KEY and key.isprintable()


def idempotency_key() -> Any:
    return checked(IDEMPOTENCY_KEY_PROBLEM, is_idempotency_key, None)


# Weight updates: from trainers to their weight-update gateway.


def _is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket without its other, a port that is not a number
        return False
    more = parts.username or parts.path.strip("/") or parts.query or parts.fragment
    return parts.scheme == "http" and named and not more


def http_url(default: Any = MISSING) -> Any:
    return checked("must be an address like http://host:port", _is_http_url, default)


def http_urls(default: Any = MISSING) -> Any:
    valid = lambda urls: urls and all(map(_is_http_url, urls))  # noqa: E731
    return checked("must be a list of addresses like http://host:port, not an empty one", valid, default)


@dataclass(frozen=True, kw_only=True)
class ConnectTrainer:
    """The two sides of a pair. The inference side is a gateway and a ``model`` of it, or fixed workers."""

    pair_name: str = checked("must be a text, not an empty one, without a slash", lambda name: name and "/" not in name)
    mode: Literal["disk", "shm", "xccl", "awex"] = "disk"
    train_worker_urls: tuple[str, ...] = http_urls()
    inference_worker_urls: tuple[str, ...] | None = http_urls(None)
    inference_gateway_url: str | None = http_url(None)
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateWeights:
    pair_name: str
    version: int = bounded(0, 2**63 - 1)
    inference_gateway_url: str | None = http_url(None)


@dataclass(frozen=True)
class UpdateResult:
    """An update, as the weight-update gateway answers it. ``paused_ms``: the longest pause of generation. ``bytes``:
    the weights that each worker took."""

    version: int
    duration_ms: float
    paused_ms: float
    bytes: int


@dataclass(frozen=True, kw_only=True)
class NamePair:
    pair_name: str


@dataclass(frozen=True, kw_only=True)
class JoinPair:
    """A data proxy whose engine has started requests the published weights."""

    pair_name: str
    worker_addr: str = http_url()


@dataclass(frozen=True, kw_only=True)
class LeftWeights:
    """Weights that workers load if they start after the trainer has ended."""

    path: str = text()
    version: int | None = None


@dataclass(frozen=True, kw_only=True)
class EndPair:
    """``left``: null for none. Without it, workers that start wait for another trainer."""

    pair_name: str
    left: LeftWeights | Literal["unknown"] | None = "unknown"


# Weight updates: from the weight-update gateway to the trainer's endpoint, and to the data proxies of a pair.


@dataclass(frozen=True, kw_only=True)
class OfferWeights:
    """``world_size``: the trainer and its workers. ``group_form``: the form of the process group."""

    pair_name: str
    world_size: int = bounded(2, 2**31 - 1)
    group_form: str | None = None


@dataclass(frozen=True, kw_only=True)
class ConnectPair:
    """``gateway``: address of the weight-update gateway. ``offer``: the proof that both sides see one folder
    (``FolderOffer``), or the process group that ``rank`` joins (``GroupOffer``)."""

    pair_name: str = text()
    mode: Literal["disk", "shm", "xccl"]
    offer: Mapping[str, Any]
    rank: int | None = None
    gateway: str | None = text(None)


@dataclass(frozen=True, kw_only=True)
class FolderOffer:
    """``mark`` is a file below ``root`` that holds ``word``."""

    root: str = text()
    mark: str = text()
    word: str = text()


@dataclass(frozen=True, kw_only=True)
class GroupOffer:
    host: str = text()
    port: Any = None  # the engine checks the rest
    world_size: Any = None
    backend: Any = None


class WeightSource(TypedDict, total=False):
    """``path`` of a folder with weights, or ``layout`` of their broadcast."""

    path: str
    layout: Any


class ProbeOfWeights(TypedDict):
    """``expected``: log-probabilities by token after ``input_ids``. ``tolerance``: in nats."""

    input_ids: list[int]
    expected: dict[str, float]
    tolerance: float


class PublishedVersion(TypedDict):
    """``probe``: what an engine with these weights must compute."""

    source: WeightSource
    bytes: int
    probe: NotRequired[ProbeOfWeights]


@dataclass(frozen=True, kw_only=True)
class WeightOrder:
    """One version of a pair's weights. ``verify``: the engine only says whether it would refuse them. ``writer``: the
    job, or the folder of the run, that trained them."""

    pair_name: str = text()
    version: int = bounded(0, 2**63 - 1)
    source: WeightSource = field(default_factory=WeightSource)
    verify: bool = False
    gateway: str | None = None
    writer: str | None = None


@dataclass(frozen=True, kw_only=True)
class FolderSource:
    path: str = text()


@dataclass(frozen=True, kw_only=True)
class CheckWeights:
    probe: ProbeOfWeights


@dataclass(frozen=True, kw_only=True)
class DisconnectPair:
    """``left``: the trainer is done, and these weights remain (null: none)."""

    pair_name: str = text()
    gateway: str | None = None
    left: LeftWeights | Literal["unknown"] | None = "unknown"


# Weights and adapters: from a data proxy to its embedded engine.


@dataclass(frozen=True, kw_only=True)
class GenerateTokens:
    """``input_ids``: of one prompt, or of several, which are in the vocabulary. ``stream_interval``: new tokens for
    which a line of a stream waits. ``seeds``: one for each prompt. ``image_data``: images of the one prompt, base64."""

    input_ids: Any
    sampling: Mapping[str, object] = field(default_factory=dict)
    adapter: str | None = None
    response_format: Mapping[str, Any] | None = None
    request_id: str | None = None
    stream: bool = False
    stream_interval: int = field(default=1, metadata={"least": 1})
    seeds: tuple[int, ...] | None = None
    image_data: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScoreTokens:
    input_ids: Any
    top_logprobs: int = bounded(*WHOLE_RANGES["top_logprobs"], 0)
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadWeights:
    """Serve the weights in the folder ``path``, or those that were ``staged`` as ``version``."""

    path: str | None = text(None)
    version: int | None = bounded(0, 2**63 - 1, None)
    staged: bool = False


@dataclass(frozen=True, kw_only=True)
class StageWeights:
    """Stage the weights in the folder ``path``, or the tensors of ``layout`` that a process ``group`` broadcasts."""

    path: str | None = text(None)
    version: int = bounded(0, 2**63 - 1)
    group: str | None = text(None)
    layout: Any = None  # read where the tensors arrive


@dataclass(frozen=True, kw_only=True)
class JoinGroup:
    name: str = text()
    host: str = text()
    port: int
    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True)
class LeaveGroup:
    name: str = text()


@dataclass(frozen=True, kw_only=True)
class LoadAdapter:
    name: str = text()
    path: str = text()


@dataclass(frozen=True, kw_only=True)
class UnloadAdapter:
    name: str = text()


# Sessions.


@dataclass(frozen=True, kw_only=True)
class StartSession:
    """``api_key``: the key that the first session is to have. ``online``: its trajectories are offered to leases.
    ``seed``: calls that have none of their own are sampled with seeds derived from it, the number of the session in the
    group, the prompt, and how often the session has sampled that prompt. ``default_seed``: the same, where the engine
    samples as fast with a seed."""

    task_id: str = checked(
        "must be a string of 1 to 256 printable characters", lambda task: 1 <= len(task) <= 256 and task.isprintable()
    )
    group_size: int = bounded(1, MAX_GROUP, 1)
    api_key: str | None = checked(
        "must be 8 to 512 printable ASCII characters without spaces", lambda key: _SESSION_KEY.fullmatch(key), None
    )
    model: str | None = None
    online: bool = True
    seed: int | None = bounded(*WHOLE_RANGES["seed"], None)
    default_seed: int | None = bounded(*WHOLE_RANGES["seed"], None)


LARGEST_F32 = 3.4028234663852886e38
"""Rewards are float32 in a training row."""


@dataclass(frozen=True, kw_only=True)
class SetReward:
    reward: Any = None  # checked where it is recorded
    interaction_id: str | None = None
    session_id: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class Rewarded:
    """The result of a reward. ``interaction_count``: the number of interactions in the trajectory.
    ``ready_transition``: this reward made the trajectory ready."""

    message: str
    interaction_count: int
    session_id: str
    trajectory_id: int
    interaction_id: str
    trajectory_ready: bool
    ready_transition: bool


@dataclass(frozen=True, kw_only=True)
class EndSession:
    """Ends one session, or all of a group."""

    session_id: str | None = None
    group_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class ExportTrajectories:
    """``group_id`` alone stands for all its sessions. ``trajectory_id`` null: every ready one. ``reward`` is given
    first, to the last interaction of the one session that is named, whose trajectory is ready then. ``dry_run``: the
    answer tells whether it could be exported."""

    session_ids: tuple[str, ...] = checked(
        f"must be different session ids, {MAX_EXPORTED} at most",
        lambda ids: len(ids) <= MAX_EXPORTED and len(set(ids)) == len(ids),
        (),
    )
    group_id: str | None = None
    trajectory_id: int | None = field(default=None, metadata={"least": 0})
    discount: float = bounded(0, 1, 1.0)
    style: Literal["individual", "concat"] = "individual"
    remove_session: bool = True
    format: Literal["json", "npz"] = "json"
    reward: float | None = None
    dry_run: bool = False


# External models.


@dataclass(frozen=True, kw_only=True)
class RegisterExternal:
    """``model``: the provider's name of the model, ``name`` ours; each defaults to the other."""

    name: str | None = None
    model: str | None = None
    url: str | None = None
    api_key: str | None = checked(
        "has characters that no key has", lambda key: key.isascii() and key.isprintable() and " " not in key, None
    )
    api: Literal["openai", "anthropic"] = "openai"
    allow_private: bool = False
    dry_run: bool = False

    @property
    def names(self) -> tuple[str, str] | None:
        """Our name and the provider's; None unless ours can be one."""
        name, model = self.name or self.model or "", self.model or self.name or ""
        return (name, model) if _MODEL_NAME.fullmatch(name) else None


@dataclass(frozen=True, kw_only=True)
class SetVersion:
    """``version`` of the weights that sample next. It only grows, unless ``force`` sets it back."""

    version: int = bounded(0, 2**63 - 1)
    force: bool = False

    def conflict(self, served: int | None, where: str) -> str | None:
        """Return why the version cannot be set ``where`` the version ``served`` is; None if it can."""
        if self.force or served is None or self.version >= served:
            return None
        return f"{where} is at version {served}, above {self.version}: a version only grows, but with force: true"


# The router's control routes.


def model_name(default: Any = MISSING) -> Any:
    return checked(_NOT_ALLOWED, _MODEL_NAME.fullmatch, default)


def worker_id(default: Any = MISSING) -> Any:
    return checked(_NOT_ALLOWED, _WORKER_ID.fullmatch, default)


def worker_addr(default: Any = MISSING) -> Any:
    return checked(f"must be {_ADDRESS}", _is_address, default)


def _is_address(text: str) -> bool:
    try:
        return bool(worker_base_url(text))
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class _AddressedWorker:
    worker_addr: str = worker_addr()

    @cached_property
    def addr(self) -> str:
        return worker_base_url(self.worker_addr)


@dataclass(frozen=True, kw_only=True)
class RegisterWorker(_AddressedWorker):
    worker_id: str | None = worker_id(None)
    model: str | None = model_name(None)


@dataclass(frozen=True, kw_only=True)
class RenewLease(_AddressedWorker):
    """A data proxy's registration, sent with its /ready report. ``expected``, ``external`` and ``readiness`` count
    until somebody declares the model. ``held``: it gets no calls until it is declared."""

    worker_id: str = worker_id()
    model: str = model_name()
    expected: int = field(default=1, metadata={"least": 1})
    external: bool = False
    readiness: Readiness = DEFAULT_READINESS
    held: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelWorker(_AddressedWorker):
    """``cordoned``: it gets nothing new."""

    worker_id: str = worker_id()
    cordoned: bool = False


@dataclass(frozen=True, kw_only=True)
class RegisterModel:
    """``workers`` are all that the model has. ``expected``: how many of them have to be known before it is served."""

    model: str = model_name()
    workers: tuple[ModelWorker, ...] = checked(
        "has two workers with the same worker_id",
        lambda workers: len({worker.worker_id for worker in workers}) == len(workers),
    )
    expected: int | None = field(default=None, metadata={"least": 0})
    external: bool = False
    readiness: Readiness | None = None


@dataclass(frozen=True, kw_only=True)
class PublishModel:
    """At the gateway: data proxies that already run serve ``model``. With a ``url`` they first register that external
    API, whose name for the model is ``provider_model``."""

    model: str = text()
    data_proxy_addrs: tuple[str, ...] = checked(
        f"must be a list of addresses, each {_ADDRESS}", lambda addrs: all(map(_is_address, addrs)), ()
    )
    url: str | None = None
    api_key: str | None = None
    provider_model: str | None = None
    api: Literal["openai", "anthropic"] = "openai"
    allow_private: bool = False

    @property
    def addrs(self) -> list[str]:
        return list(dict.fromkeys(map(worker_base_url, self.data_proxy_addrs)))

    @property
    def external(self) -> RegisterExternal | None:
        """The external API, as the data proxies register it."""
        if not self.url:
            return None
        return RegisterExternal(
            name=self.model,
            model=self.provider_model or self.model,
            url=self.url,
            api_key=self.api_key,
            api=self.api,
            allow_private=self.allow_private,
        )


@dataclass(frozen=True, kw_only=True)
class NameModel:
    model: str = text()


@dataclass(frozen=True, kw_only=True)
class RemoveModel:
    """Names the model by ``model``, or by ``name``."""

    model: str | None = model_name(None)
    name: str | None = model_name(None)


@dataclass(frozen=True, kw_only=True)
class NameWorker:
    """Names a worker by its id or its address. ``stopping``: the worker goes away after it has drained."""

    worker_id: str | None = worker_id(None)
    worker_addr: str | None = worker_addr(None)
    stopping: bool = False


@dataclass(frozen=True, kw_only=True)
class RouteCall:
    """A session, by its id, its key or the key's digest, or a model."""

    session_id: str | None = None
    api_key: str | None = None
    api_key_digest: str | None = None
    model: str | None = model_name(None)


@dataclass(frozen=True, kw_only=True)
class ConfigureRouter:
    """New settings of a router. Absent ones stay as they are."""

    strategy: Strategy | None = None
    limits: Mapping[str, object] = field(default_factory=dict)


def is_target(text: str) -> bool:
    match = _TARGET.fullmatch(text)
    return match is not None and int(match[2]) <= 65535


def scrape_target(url: str, job: str, **labels: str | None) -> dict[str, object]:
    """Return the service at ``url``, which has /metrics, as an entry of Prometheus' HTTP service discovery."""
    known = {name: value for name, value in labels.items() if value}
    return {"targets": [urlsplit(url).netloc.rpartition("@")[2]], "labels": {"job": f"areal-{job}", **known}}


@dataclass(frozen=True, kw_only=True)
class RegisterTarget:
    """A target for Prometheus to scrape, kept for ``ttl_seconds``; 0 removes it."""

    target: str = checked("must be host:port", is_target)
    labels: Mapping[str, str] | None = checked(
        "must be texts, each named as Prometheus names labels",
        lambda labels: all(_LABEL.fullmatch(name) and len(text) <= _LONGEST_LABEL for name, text in labels.items()),
        None,
    )
    ttl_seconds: float = bounded(0, 3600, 60.0)
