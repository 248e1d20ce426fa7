"""Bodies of control requests: callers send these dataclasses as JSON, services read them with ``read_body``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypedDict
from urllib.parse import urlsplit

from areal.dataclasses import dataclass, field
from areal.wire.fields import Count, NonNegativeInt, Range, Share, Valid
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


NonEmptyText: TypeAlias = Annotated[
    str, Valid("must be a text, not an empty one", lambda text: text != "" and "\0" not in text)
]
WeightVersion: TypeAlias = Annotated[int, Range(0, 2**63 - 1)]
Seed: TypeAlias = Annotated[int, Range(*WHOLE_RANGES["seed"])]


IDEMPOTENCY_KEY = "Idempotency-Key"
"""A caller's name for one request: a repetition with the same name is answered and has no other effect."""
_LONGEST_IDEMPOTENCY_KEY = 255
IDEMPOTENCY_KEY_PROBLEM = f"must be 1 to {_LONGEST_IDEMPOTENCY_KEY} printable characters"


def is_idempotency_key(key: str) -> bool:
    return 1 <= len(key) <= _LONGEST_IDEMPOTENCY_KEY and key.isprintable()


IdempotencyKey: TypeAlias = Annotated[str, Valid(IDEMPOTENCY_KEY_PROBLEM, is_idempotency_key)]


# Weight updates: from trainers to their weight-update gateway.


def _is_http_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        named = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket without its other, a port that is not a number
        return False
    more = parts.username or parts.path.strip("/") or parts.query or parts.fragment
    return parts.scheme == "http" and named and not more


HttpUrl: TypeAlias = Annotated[str, Valid("must be an address like http://host:port", _is_http_url)]
_ARE_URLS = Valid(
    "must be a list of addresses like http://host:port, not an empty one",
    lambda urls: urls and all(map(_is_http_url, urls)),
)
HttpUrls: TypeAlias = Annotated[tuple[str, ...], _ARE_URLS]
_NAMES_PAIR = Valid("must be a text, not an empty one, without a slash", lambda name: name and "/" not in name)


@dataclass(frozen=True, kw_only=True)
class ConnectTrainer:
    """The two sides of a pair. The inference side is a gateway and a ``model`` of it, or fixed workers."""

    pair_name: Annotated[str, _NAMES_PAIR]
    mode: Literal["disk", "shm", "xccl", "awex"] = "disk"
    train_worker_urls: HttpUrls
    inference_worker_urls: HttpUrls | None = None
    inference_gateway_url: HttpUrl | None = None
    model: str | None = None


@dataclass(frozen=True, kw_only=True)
class UpdateWeights:
    """``published``: what the trainer has staged as this version; without it, the trainer is asked."""

    pair_name: str
    version: WeightVersion
    inference_gateway_url: HttpUrl | None = None
    published: PublishedVersion | None = None


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
    worker_addr: HttpUrl


@dataclass(frozen=True, kw_only=True)
class LeftWeights:
    """Weights that workers load if they start after the trainer has ended."""

    path: NonEmptyText
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
    world_size: Annotated[int, Range(2, 2**31 - 1)]
    group_form: str | None = None


@dataclass(frozen=True, kw_only=True)
class ConnectPair:
    """``gateway``: address of the weight-update gateway. ``offer``: the proof that both sides see one folder
    (``FolderOffer``), or the process group that ``rank`` joins (``GroupOffer``)."""

    pair_name: NonEmptyText
    mode: Literal["disk", "shm", "xccl"]
    offer: Mapping[str, Any]
    rank: int | None = None
    gateway: NonEmptyText | None = None


@dataclass(frozen=True, kw_only=True)
class FolderOffer:
    """``mark`` is a file below ``root`` that holds ``word``."""

    root: NonEmptyText
    mark: NonEmptyText
    word: NonEmptyText


@dataclass(frozen=True, kw_only=True)
class GroupOffer:
    host: NonEmptyText
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

    pair_name: NonEmptyText
    version: WeightVersion
    source: WeightSource = field(default_factory=WeightSource)
    verify: bool = False
    gateway: str | None = None
    writer: str | None = None


@dataclass(frozen=True, kw_only=True)
class FolderSource:
    path: NonEmptyText


@dataclass(frozen=True, kw_only=True)
class CheckWeights:
    probe: ProbeOfWeights


@dataclass(frozen=True, kw_only=True)
class DisconnectPair:
    """``left``: the trainer is done, and these weights remain (null: none)."""

    pair_name: NonEmptyText
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
    stream_interval: Count = 1
    seeds: tuple[int, ...] | None = None
    image_data: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScoreTokens:
    input_ids: Any
    top_logprobs: Annotated[int, Range(*WHOLE_RANGES["top_logprobs"])] = 0
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadWeights:
    """Serve the weights in the folder ``path``, or those that were ``staged`` as ``version``."""

    path: NonEmptyText | None = None
    version: WeightVersion | None = None
    staged: bool = False


@dataclass(frozen=True, kw_only=True)
class StageWeights:
    """Stage the weights in the folder ``path``, or the tensors of ``layout`` that a process ``group`` broadcasts."""

    path: NonEmptyText | None = None
    version: WeightVersion
    group: NonEmptyText | None = None
    layout: Any = None  # read where the tensors arrive


@dataclass(frozen=True, kw_only=True)
class JoinGroup:
    name: NonEmptyText
    host: NonEmptyText
    port: int
    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True)
class LeaveGroup:
    name: NonEmptyText


@dataclass(frozen=True, kw_only=True)
class LoadAdapter:
    name: NonEmptyText
    path: NonEmptyText


@dataclass(frozen=True, kw_only=True)
class UnloadAdapter:
    name: NonEmptyText


# Sessions.

_NAMES_TASK = Valid(
    "must be a string of 1 to 256 printable characters", lambda task: 1 <= len(task) <= 256 and task.isprintable()
)
_IS_KEY = Valid("must be 8 to 512 printable ASCII characters without spaces", _SESSION_KEY.fullmatch)
_ARE_SESSIONS = Valid(
    f"must be different session ids, {MAX_EXPORTED} at most",
    lambda ids: len(ids) <= MAX_EXPORTED and len(set(ids)) == len(ids),
)


@dataclass(frozen=True, kw_only=True)
class StartSession:
    """``api_key``: the key that the first session is to have. ``online``: its trajectories are offered to leases.
    ``seed``: calls that have none of their own are sampled with seeds derived from it, the number of the session in the
    group, the prompt, and how often the session has sampled that prompt. ``default_seed``: the same, where the engine
    samples as fast with a seed."""

    task_id: Annotated[str, _NAMES_TASK]
    group_size: Annotated[int, Range(1, MAX_GROUP)] = 1
    api_key: Annotated[str, _IS_KEY] | None = None
    model: str | None = None
    online: bool = True
    seed: Seed | None = None
    default_seed: Seed | None = None


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

    session_ids: Annotated[tuple[str, ...], _ARE_SESSIONS] = ()
    group_id: str | None = None
    trajectory_id: NonNegativeInt | None = None
    discount: Share = 1.0
    style: Literal["individual", "concat"] = "individual"
    remove_session: bool = True
    format: Literal["json", "npz"] = "json"
    reward: float | None = None
    dry_run: bool = False


# External models.

_IS_EXTERNAL_KEY = Valid(
    "has characters that no key has", lambda key: key.isascii() and key.isprintable() and " " not in key
)


@dataclass(frozen=True, kw_only=True)
class RegisterExternal:
    """``model``: the provider's name of the model, ``name`` ours; each defaults to the other."""

    name: str | None = None
    model: str | None = None
    url: str | None = None
    api_key: Annotated[str, _IS_EXTERNAL_KEY] | None = None
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

    version: WeightVersion
    force: bool = False

    def conflict(self, served: int | None, where: str) -> str | None:
        """Return why the version cannot be set ``where`` the version ``served`` is; None if it can."""
        if self.force or served is None or self.version >= served:
            return None
        return f"{where} is at version {served}, above {self.version}: a version only grows, but with force: true"


# The router's control routes.


def _is_address(text: str) -> bool:
    try:
        return bool(worker_base_url(text))
    except ValueError:
        return False


ModelName: TypeAlias = Annotated[str, Valid(_NOT_ALLOWED, _MODEL_NAME.fullmatch)]
WorkerId: TypeAlias = Annotated[str, Valid(_NOT_ALLOWED, _WORKER_ID.fullmatch)]
WorkerAddress: TypeAlias = Annotated[str, Valid(f"must be {_ADDRESS}", _is_address)]
_ARE_ADDRESSES = Valid(f"must be a list of addresses, each {_ADDRESS}", lambda addrs: all(map(_is_address, addrs)))
_DIFFER = Valid(
    "has two workers with the same worker_id",
    lambda workers: len({worker.worker_id for worker in workers}) == len(workers),
)


@dataclass(frozen=True, kw_only=True)
class _AddressedWorker:
    worker_addr: WorkerAddress

    @cached_property
    def addr(self) -> str:
        return worker_base_url(self.worker_addr)


@dataclass(frozen=True, kw_only=True)
class RegisterWorker(_AddressedWorker):
    worker_id: WorkerId | None = None
    model: ModelName | None = None


@dataclass(frozen=True, kw_only=True)
class RenewLease(_AddressedWorker):
    """A data proxy's registration, sent with its /ready report. ``expected``, ``external`` and ``readiness`` count
    until somebody declares the model. ``held``: it gets no calls until it is declared."""

    worker_id: WorkerId
    model: ModelName
    expected: Count = 1
    external: bool = False
    readiness: Readiness = DEFAULT_READINESS
    held: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelWorker(_AddressedWorker):
    """``cordoned``: it gets nothing new."""

    worker_id: WorkerId
    cordoned: bool = False


@dataclass(frozen=True, kw_only=True)
class RegisterModel:
    """``workers`` are all that the model has. ``expected``: how many of them have to be known before it is served."""

    model: ModelName
    workers: Annotated[tuple[ModelWorker, ...], _DIFFER]
    expected: NonNegativeInt | None = None
    external: bool = False
    readiness: Readiness | None = None


@dataclass(frozen=True, kw_only=True)
class PublishModel:
    """At the gateway: data proxies that already run serve ``model``. With a ``url`` they first register that external
    API, whose name for the model is ``provider_model``."""

    model: NonEmptyText
    data_proxy_addrs: Annotated[tuple[str, ...], _ARE_ADDRESSES] = ()
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
    model: NonEmptyText


@dataclass(frozen=True, kw_only=True)
class RemoveModel:
    """Names the model by ``model``, or by ``name``."""

    model: ModelName | None = None
    name: ModelName | None = None


@dataclass(frozen=True, kw_only=True)
class NameWorker:
    """Names a worker by its id or its address. ``stopping``: the worker goes away after it has drained."""

    worker_id: WorkerId | None = None
    worker_addr: WorkerAddress | None = None
    stopping: bool = False


@dataclass(frozen=True, kw_only=True)
class RouteCall:
    """A session, by its id, its key or the key's digest, or a model."""

    session_id: str | None = None
    api_key: str | None = None
    api_key_digest: str | None = None
    model: ModelName | None = None


@dataclass(frozen=True, kw_only=True)
class ConfigureRouter:
    """New settings of a router. Absent ones stay as they are."""

    strategy: Strategy | None = None
    limits: Mapping[str, object] = field(default_factory=dict)


def is_target(text: str) -> bool:
    match = _TARGET.fullmatch(text)
    return match is not None and int(match[2]) <= 65535


_ARE_LABELS = Valid(
    "must be texts, each named as Prometheus names labels",
    lambda labels: all(_LABEL.fullmatch(name) and len(text) <= _LONGEST_LABEL for name, text in labels.items()),
)


def scrape_target(url: str, job: str, **labels: str | None) -> dict[str, object]:
    """Return the service at ``url``, which has /metrics, as an entry of Prometheus' HTTP service discovery."""
    known = {name: value for name, value in labels.items() if value}
    return {"targets": [urlsplit(url).netloc.rpartition("@")[2]], "labels": {"job": f"areal-{job}", **known}}


@dataclass(frozen=True, kw_only=True)
class RegisterTarget:
    """A target for Prometheus to scrape, kept for ``ttl_seconds``; 0 removes it."""

    target: Annotated[str, Valid("must be host:port", is_target)]
    labels: Annotated[Mapping[str, str], _ARE_LABELS] | None = None
    ttl_seconds: Annotated[float, Range(0, 3600)] = 60.0
