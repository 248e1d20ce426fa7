"""Values that workflows, engines and trainers exchange."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, Literal, Self
from uuid import uuid4

from areal.api.config.rollout import GenerationHyperparameters

StopReason = Literal["length", "stop", "tool_calls", "abort"]


@dataclass
class ModelRequest:
    """A request for one sample of a prompt of token ids. ``image_data``: encoded images, as bytes or base64, one for
    each placeholder of the prompt. ``tokenizer`` and ``processor`` may be passed along; sampling needs neither."""

    input_ids: list[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    rid: str = field(default_factory=lambda: uuid4().hex)
    metadata: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    image_data: list[Any] | None = None
    processor: Any = None

    def copy(self) -> Self:
        return replace(self, input_ids=list(self.input_ids))


@dataclass(frozen=True)
class ModelResponse:
    """One sample. The lists of ``output_`` have equal lengths and include the token that ended the answer.
    ``temperature`` is that of sampling and log-probabilities, 0 for a greedy answer. ``latency`` is in seconds.
    ``images``: the number of the prompt's images by ``areal.dataset.images.images_key``; 0 for none."""

    input_tokens: list[int]
    output_tokens: list[int]
    output_logprobs: list[float]
    output_versions: list[int]
    stop_reason: StopReason
    latency: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    text: str = ""
    tokenizer: Any = field(default=None, repr=False)
    temperature: float = 1.0
    images: int = 0

    def __post_init__(self) -> None:
        if not len(self.output_tokens) == len(self.output_logprobs) == len(self.output_versions):
            lengths = len(self.output_tokens), len(self.output_logprobs), len(self.output_versions)
            raise ValueError(f"tokens, log-probabilities and versions must have equal lengths: {lengths}")

    @property
    def input_len(self) -> int:
        return len(self.input_tokens)

    @property
    def output_len(self) -> int:
        return len(self.output_tokens)


@dataclass(frozen=True)
class FinetuneSpec:
    """The length of a run. ``train_batch_size`` is in rows of the data set."""

    total_train_epochs: int
    dataset_size: int
    train_batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches. A last, smaller batch is left out, unless it is the only one."""
        return max(1, self.dataset_size // self.train_batch_size)

    @property
    def total_train_steps(self) -> int:
        return self.total_train_epochs * self.steps_per_epoch


@dataclass(frozen=True)
class StepInfo:
    """The position of a step in a run. All counts begin at 0."""

    epoch: int
    epoch_step: int
    global_step: int
    steps_per_epoch: int

    def next(self) -> StepInfo:
        last = self.epoch_step == self.steps_per_epoch - 1
        return StepInfo(
            self.epoch + last, 0 if last else self.epoch_step + 1, self.global_step + 1, self.steps_per_epoch
        )


@dataclass(frozen=True)
class WeightUpdateMeta:
    """The transport of weights to the inference engines. ``path``: of ``disk``, the folder of all versions."""

    type: Literal["disk", "shm", "xccl", "awex"] = "xccl"
    path: str | None = None
    version: int | None = None
    weight_chunked_mem_mb: int = 1024
    use_lora: bool = False
    lora_name: str = ""
    clear_checkpoint_after_load: bool = True

    def with_version(self, version: int) -> WeightUpdateMeta:
        path = None if self.path is None else str(PurePath(self.path) / f"weight_update_v{version}")
        return replace(self, version=version, path=path)

    @classmethod
    def from_disk(cls, path: str, **more: Any) -> WeightUpdateMeta:
        return cls(type="disk", path=path, **more)
