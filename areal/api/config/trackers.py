"""Settings of the trackers that get a run's metrics, ``stats_logger``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from areal.api.config.fields import PORT, NotSupported, check_numbers
from areal.errors import FieldError

Mode = Literal["online", "offline", "disabled"]


@dataclass
class WandBConfig:
    mode: Mode = "disabled"
    wandb_base_url: Annotated[str, NotSupported("set WANDB_BASE_URL in the job's environment")] = ""
    wandb_api_key: Annotated[str, NotSupported("set WANDB_API_KEY in the job's environment")] = field(
        default="", repr=False
    )
    entity: str | None = None
    project: str | None = None
    name: str | None = None
    job_type: str | None = None
    group: str | None = None
    notes: str | None = None
    tags: list[str] | None = None
    config: dict[str, Any] | None = None
    id_suffix: str | None = None


@dataclass
class SwanlabConfig:
    mode: Literal["disabled", "cloud", "online", "local", "offline"] = "disabled"  # cloud: the older name of online
    project: str | None = None
    name: str | None = None
    config: dict[str, Any] | None = None
    logdir: str | None = None
    api_key: str | None = field(default=None, repr=False)


@dataclass
class TensorBoardConfig:
    path: str | None = None


@dataclass
class TrackioConfig:
    """``online``: to the Hugging Face Space ``space_id`` (or TRACKIO_SPACE_ID); ``local``: to this machine."""

    mode: Literal["disabled", "online", "local"] = "disabled"
    project: str | None = None
    name: str | None = None
    space_id: str | None = None

    def __post_init__(self) -> None:
        if self.space_id and self.mode == "local":
            raise FieldError("space_id", "needs mode online: mode local writes to this machine")


@dataclass
class PrometheusConfig:
    """``/metrics`` of the trainer. Port 0 selects a free port. ``key_file``: the key that requests from other machines
    need [default: the key of the service that rollouts are sampled from]."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, PORT] = 0
    key_file: str = ""

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass
class StatsLoggerConfig:
    """Trackers that get the metrics in addition to ``metrics.jsonl``, which is always written."""

    experiment_name: str = ""
    trial_name: str = ""
    fileroot: str = ""
    wandb: WandBConfig = field(default_factory=WandBConfig)
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)
