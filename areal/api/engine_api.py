"""Contracts of the inference engine, which workflows sample from, and the train engine, which trainers update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from areal.errors import ArealError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from areal.api.config.training import TrainEngineConfig
    from areal.api.io_struct import ModelRequest, ModelResponse
    from areal.client.inference import AsyncGroup

Batch = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class TokenOutputs:
    """The model's outputs for a micro-batch, float32 [b, t]. ``logprobs`` and ``entropies`` (nats) of token t are of
    the distribution of token t given the tokens before it, at its temperature; they are 0 and without a gradient for
    tokens outside ``loss_mask`` and for the first token of a row. ``values`` are a critic's; its ``logprobs`` are 0."""

    logprobs: torch.Tensor
    entropies: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of_critic(cls, values: torch.Tensor) -> TokenOutputs:
        nothing = values.new_zeros(()).expand_as(values)
        return cls(nothing, nothing, values)

    @classmethod
    def of_policy(cls, logprobs: torch.Tensor, entropies: torch.Tensor) -> TokenOutputs:
        return cls(logprobs, entropies, logprobs.new_zeros(()).expand_as(logprobs))


LossFn = Callable[["TokenOutputs", Any], "torch.Tensor"]
"""(model outputs, micro-batch) -> the mean loss of the micro-batch, a scalar with a gradient."""
WeightFn = Callable[[Any], "torch.Tensor"]
"""micro-batch -> the weight of its mean loss: the number of tokens, sequences or pairs."""


class InferenceEngine(Protocol):
    """The engine of ``arun_episode``: tokens in, tokens out, or recorded sessions for clients of a base URL."""

    base_url: str

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Return one sample, each token with its log-probability and the version of the weights that sampled it. A
        weight update on the way is survived: the answer then has tokens of two versions. Raises ClientError."""
        ...

    async def start_sessions(self, count: int = 1) -> AsyncGroup:
        """Return recorded sessions for this episode; what is sampled with their keys can be exported."""
        ...

    def get_version(self) -> int:
        """Return the version of the newest weights that the trainer has published."""
        ...


class NonFinite(ArealError):
    """The loss or gradient is NaN or infinite. Raised before the optimizer step: weights and moments are intact."""


class CheckpointUnreadable(ArealError):
    """The engine cannot load a checkpoint: it is damaged, or of another model or parameter layout."""


@dataclass(frozen=True)
class Update:
    """The result of an optimizer step. ``loss``: weighted mean over the micro-batches of all ranks. ``grad_norm``: norm
    of the whole gradient before clipping. ``learning_rate``: of this step. ``micro_batches``: number on this rank."""

    loss: float
    grad_norm: float
    learning_rate: float
    micro_batches: int


@runtime_checkable
class VisionEngine(Protocol):
    """A train engine that also trains on prompts with images."""

    def see_images(self, images: Mapping[int, Sequence[bytes]], batch: Batch) -> None:
        """Take the images of the batches to come, by the numbers in their column ``images`` int64 [B], where 0 is none.
        ``batch`` is the whole of them. Raises UsageFault for images that the model cannot see, and for prompts that
        lack theirs."""
        ...


class TrainEngine(Protocol):
    """A model, its optimizer and its ranks. Trainers know an engine by this contract alone.

    ``actor.backend: NAME:d4`` names the engine, which ``areal.training.engines.open_engine`` opens on every rank as
    ``factory(config, ranks, total_steps)``: the ``TrainEngineConfig`` of one model, the ``areal.training.ranks.Ranks``
    of the run, and the number of optimizer steps that the learning rate's schedule spans. Another package registers its
    factory in ``areal.resources.kinds.TRAIN_ENGINES`` or as an entry point of the group ``areal.train_engines``.

    **Batches** are mappings of tensors with B rows. ``input_ids`` int64 [B, T] is padded on the right;
    ``attention_mask`` bool [B, T] is True for real tokens, ``loss_mask`` [B, T] for those that are trained on. Other
    columns are [B, T] or [B]. Tensors may be on the CPU: the engine moves what it needs to its device, and passes
    micro-batches on that device, cut to their longest row, to the functions that it is given. Data-parallel ranks get
    different rows. With ``config.mb_spec.granularity`` n, n neighboring rows stay in one micro-batch, in their order.

    **Outputs** that the functions get are ``TokenOutputs`` of a micro-batch, never logits: an engine makes those for
    the tokens of ``loss_mask`` alone (all real tokens where there is none), a part at a time. ``token_temperatures``
    float32 [B, T], where there is such a column, divide the logits of each token. With ``config.is_critic`` the
    model has a value head, and the outputs are its values at every real token.

    **Ranks** that are one data-parallel rank (``Ranks.layout``: tensor, pipeline, context parallel) get the same rows,
    and every method gives the same on all of them; functions are called on each of them, with the same outputs.

    **Normalization** is the engine's alone: ``loss_fn`` gives the mean of a micro-batch, ``loss_weight_fn`` how much
    that mean counts (tokens, sequences, pairs), and every micro-batch of every rank counts ``mean * weight / total
    weight``. So one rank and N ranks, one micro-batch and many, give the same gradient. A micro-batch of weight 0 adds
    nothing, whatever its loss is.

    Every rank calls every method, in the same order: any of them may be a collective.
    """

    config: TrainEngineConfig
    total_steps: int  # optimizer steps of the learning rate's schedule; a trainer may change it before the first
    steps: int
    """Number of optimizer steps, 0 in a new engine. It is saved in checkpoints and determines the learning rate."""
    version: int
    """Weight version that is served, 0 in a new engine. The trainer sets it; it is saved in checkpoints."""

    @property
    def is_trained(self) -> bool:
        """Whether it has an optimizer (``config.optimizer``); a reference has none, and is not in checkpoints."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: every token id is smaller."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation (``config.dtype``); weights are published and saved in it."""
        ...

    def train_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: WeightFn) -> Update:
        """Return one optimizer step over this rank's rows: schedule, gradient, clipping to ``gradient_clipping``, step;
        ``steps`` grows by one. Raises NonFinite before the step where loss or gradient is NaN or infinite, and
        UsageFault where the engine is not trained; then nothing has changed."""
        ...

    def eval_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: WeightFn) -> float:
        """Return the loss as ``train_batch`` would have it, over all ranks; without gradients and without dropout."""
        ...

    def forward(self, batch: Batch, of: Callable[[TokenOutputs, Any], torch.Tensor]) -> torch.Tensor:
        """``of(outputs, micro-batch)``, which is [b, t] or [b], for every row of ``batch`` in its order: [B, T] padded
        with zeros, or [B], on the engine's device. Without gradients and without dropout."""
        ...

    def next_token_logprobs(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities, float32 [V] on the CPU, of the token after ``input_ids`` [T], at temperature 1. Engines
        that serve the weights are compared with them."""
        ...

    def named_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of every weight as in a Hugging Face checkpoint of the model, in the same order each
        time: gathered from all ranks, adapters merged into what they adapt, a tied head left out. In the dtype of the
        master weights, or cast to ``dtype``. Every rank consumes all of it; each tensor is valid until the next one is
        asked for, and may be on any device."""
        ...

    def save_model(self, folder: Path, tokenizer: str = "") -> None:
        """Write a Hugging Face folder that ``from_pretrained`` reads, in ``dtype``, whole or absent: what ``folder``
        held is replaced. The first rank writes. ``tokenizer``: a folder or an id of the hub whose tokenizer goes along.
        Raises OSError on the first rank."""
        ...

    def save_checkpoint(self, folder: Path) -> None:
        """Write everything that a resumed run needs into ``folder``, which is this engine's own and does not exist yet:
        weights, optimizer, ``steps``, ``version`` and torch's random state. Any number of ranks can read it. File names
        of rank N begin with ``__N_``; others are the first rank's. Raises OSError where the disk fails."""
        ...

    def load_checkpoint(self, folder: Path) -> None:
        """Read what ``save_checkpoint`` wrote, by whatever number of ranks. Raises CheckpointUnreadable; the engine is
        then to be given up or loaded from another checkpoint."""
        ...
