"""A run around its models: when to save, to recover, to evaluate; what is logged; the data sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from areal.api.config.marks import Absent, Inert
from areal.api.config.numbers import COUNT, PORT, check_numbers

Mode = Literal["online", "offline", "disabled"]


@dataclass
class _Timer:
    """Fires when any of its periods has passed; None never does."""

    experiment_name: str = ""
    trial_name: str = ""
    fileroot: str = ""
    freq_epochs: Annotated[int | None, COUNT] = None
    freq_steps: Annotated[int | None, COUNT] = None
    freq_secs: Annotated[int | None, COUNT] = None

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass
class SaverConfig(_Timer):
    mode: Annotated[Literal["auto", "sync", "async"], Inert("a model is written down before the next step begins")] = (
        "auto"
    )


@dataclass
class EvaluatorConfig(_Timer):
    eval_before_train: bool = False


@dataclass
class RecoverConfig(_Timer):
    """``auto`` and ``on``: a run that finds a checkpoint of itself goes on from it. ``off`` is ``disabled``."""

    mode: Literal["disabled", "off", "on", "auto", "fault", "resume"] = "disabled"
    retries: Annotated[int, Inert("the job's restart policy says it")] = 3
    no_save_optim: Annotated[bool, Absent("a checkpoint has the optimizer's state")] = False
    no_load_optim: Annotated[bool, Absent("a checkpoint has the optimizer's state")] = False

    @property
    def enabled(self) -> bool:
        return self.mode not in ("disabled", "off")


@dataclass
class CheckpointerConfig(_Timer):
    """AReaL's older place of how often ``recover`` writes."""


@dataclass
class WandBConfig:
    mode: Mode = "disabled"
    wandb_base_url: Annotated[str, Absent("set WANDB_BASE_URL in the job's environment")] = ""
    wandb_api_key: Annotated[str, Absent("set WANDB_API_KEY in the job's environment")] = field(default="", repr=False)
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
            raise ValueError("space_id is of mode online: mode local writes to this machine")


@dataclass
class PrometheusConfig:
    """``/metrics`` of the trainer. Port 0 takes a free one. ``key_file``: the key that is asked for beyond loopback
    [default: the key of the service that rollouts are sampled from]."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, PORT] = 0
    key_file: str = ""

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass
class StatsLoggerConfig:
    """Trackers beside ``metrics.jsonl``, which is always written."""

    experiment_name: str = ""
    trial_name: str = ""
    fileroot: str = ""
    wandb: WandBConfig = field(default_factory=WandBConfig)
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)


@dataclass
class PerfTracerConfig:
    experiment_name: str = ""
    trial_name: str = ""
    fileroot: str = ""
    enabled: bool = False
    save_interval: int = 1
    profile_steps: list[int] | None = None
    session_tracer: dict[str, Any] | None = None


@dataclass
class TrainDatasetConfig:
    """``path``: a folder or file here, or a name on the Hugging Face hub. ``type``: ``rl`` (prompts), ``sft``
    (prompts with answers), ``rw`` (chosen and rejected). ``max_length`` in tokens: longer rows are left out."""

    path: str = ""
    type: str = ""
    batch_size: Annotated[int, COUNT] = 1
    shuffle: bool = True
    drop_last: bool = True
    max_length: Annotated[int | None, COUNT] = None
    split: str | None = None
    pin_memory: Annotated[bool, Inert("rows are prompts, not tensors")] = False
    num_workers: Annotated[int, Inert("rows are read where they are used")] = 0
    scheduling_spec: Annotated[Any, Inert("rows are read where they are used")] = None

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass
class ValidDatasetConfig(TrainDatasetConfig):
    shuffle: Annotated[bool, Inert("all of it is evaluated")] = False
    drop_last: Annotated[bool, Inert("all of it is evaluated")] = False
    split: str | None = "test"


DatasetConfig = TrainDatasetConfig
