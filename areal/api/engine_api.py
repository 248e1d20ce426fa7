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
    """The engine that ``arun_episode`` gets. Workflows either sample from it with token ids, or start recorded sessions
    for clients of an OpenAI or Anthropic base URL."""

    base_url: str

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """Return one sample. Each token has its log-probability and the version of the weights that sampled it. If the
        weights are updated meanwhile, the sample has tokens of two versions. Raises ClientError."""

    async def start_sessions(self, count: int = 1) -> AsyncGroup:
        """Start recorded sessions for this episode. The calls with a session's key can be exported as training rows."""

    def get_version(self) -> int:
        """Return the version of the weights that the trainer published last."""


class NonFinite(ArealError):
    """The loss or the gradient is NaN or infinite. It is raised before the optimizer step, so nothing has changed."""


class CheckpointUnreadable(ArealError):
    """The engine cannot load a checkpoint: it is damaged, or belongs to another model or another parameter layout."""


@dataclass(frozen=True)
class Update:
    """The result of an optimizer step. ``loss``: weighted mean over all micro-batches. ``grad_norm``: L2 norm of the
    whole gradient before clipping. ``learning_rate``: the rate of this step. ``micro_batches``: of this rank."""

    loss: float
    grad_norm: float
    learning_rate: float
    micro_batches: int


@runtime_checkable
class VisionEngine(Protocol):
    """A train engine that also trains on prompts with images."""

    def see_images(self, images: Mapping[int, Sequence[bytes]], batch: Batch) -> None:
        """Set the images of the following batches. ``images`` int64 [B] is a column of the batches and contains the
        numbers of images, 0 for none. ``batch`` contains the rows of all following batches. Raises UsageFault for
        images that the model does not support, and for prompts whose images are missing."""


class TrainEngine(Protocol):
    """A model, its optimizer and its ranks. Trainers use an engine only through this contract.

    ``actor.backend: NAME:d4`` names the engine. ``areal.training.engines.open_engine`` opens it on every rank with
    ``factory(config, ranks, total_steps)``: the ``TrainEngineConfig`` of one model, the ``areal.training.ranks.Ranks``
    of the run, and the number of optimizer steps in the learning rate's schedule. Another package registers its factory
    in ``areal.resources.kinds.TRAIN_ENGINES`` or as an entry point of the group ``areal.train_engines``.

    **Batches** are mappings of tensors with B rows. ``input_ids`` int64 [B, T] is padded on the right;
    ``attention_mask`` bool [B, T] is True for real tokens, ``loss_mask`` [B, T] for trained ones. Other columns are [B,
    T] or [B]. Tensors may be on the CPU: the engine moves them to its device as needed. It calls functions with
    micro-batches on that device, cut to their longest row. Data-parallel ranks get different rows. With
    ``config.mb_spec.granularity`` n, n neighboring rows stay in one micro-batch, in their order.

    **Outputs**: functions get the ``TokenOutputs`` of a micro-batch, never logits. An engine computes logits only for
    the tokens of ``loss_mask`` (without this column: for all real tokens), a part at a time. If the batch has a column
    ``token_temperatures`` float32 [B, T], each token's logits are divided by its temperature. With ``config.is_critic``
    the model has a value head, and the outputs are its values at every real token.

    **Ranks** that form one data-parallel rank (``Ranks.layout``: tensor, pipeline, context parallel) get the same rows.
    Every method returns the same on all of them, and functions are called on each of them with the same outputs.

    **Normalization** is done only by the engine: ``loss_fn`` returns the mean of a micro-batch, ``loss_weight_fn`` its
    weight (tokens, sequences, pairs), and every micro-batch of every rank contributes ``mean * weight / total weight``.
    The gradient is therefore the same for one rank and N ranks, and for one micro-batch and many. A micro-batch of
    weight 0 contributes nothing, whatever its loss is.

    Every rank calls every method, in the same order, because any of them may be a collective.
    """

    config: TrainEngineConfig
    total_steps: int  # optimizer steps of the learning rate's schedule; a trainer may change it before the first
    steps: int
    """Number of optimizer steps, 0 in a new engine. It is saved in checkpoints and determines the learning rate."""
    version: int
    """Weight version that is served, 0 in a new engine. The trainer sets it; it is saved in checkpoints."""

    @property
    def is_trained(self) -> bool:
        """Whether the engine has an optimizer (``config.optimizer``). A reference has none: no checkpoint has it."""

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding. Every token id is smaller."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation (``config.dtype``), in which weights are also published and saved."""

    def train_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: WeightFn) -> Update:
        """Make one optimizer step with this rank's rows: learning rate schedule, gradient, clipping to
        ``gradient_clipping``, update. ``steps`` increases by one. Raises, before anything has changed, NonFinite if the
        loss or gradient is NaN or infinite, and UsageFault if the engine is not trained."""

    def eval_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: WeightFn) -> float:
        """Return the loss as ``train_batch`` computes it, over all ranks, but without gradients and without dropout."""

    def forward(self, batch: Batch, of: Callable[[TokenOutputs, Any], torch.Tensor]) -> torch.Tensor:
        """Return the results of ``of(outputs, micro-batch)``, which are [b, t] or [b], for every row of ``batch`` in
        order: [B, T] padded with zeros, or [B], on the engine's device. No gradients, no dropout."""

    def next_token_logprobs(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities of the token after ``input_ids`` [T], float32 [V] on the CPU, at temperature 1."""

    def named_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor) of every weight, as in a Hugging Face checkpoint of the model, always in the same
        order. Tensors are gathered from all ranks, LoRA adapters are merged into their base weights, and a tied head is
        omitted. The dtype is that of the master weights, or ``dtype``. Every rank must consume all of them. Each tensor
        is valid until the next one is requested, and may be on any device."""

    def save_model(self, folder: Path, tokenizer: str = "") -> None:
        """Write a Hugging Face folder that ``from_pretrained`` reads, in ``dtype``. The first rank replaces ``folder``,
        whole or not at all. ``tokenizer``: copied from a folder or the hub. Raises OSError on the first rank."""

    def save_checkpoint(self, folder: Path) -> None:
        """Write everything that a resumed run needs into ``folder``, which belongs to this engine and does not exist
        yet: weights, optimizer, ``steps``, ``version`` and torch's random state. Any number of ranks can read it. File
        names of rank N begin with ``__N_``; other files are the first rank's. Raises OSError."""

    def load_checkpoint(self, folder: Path) -> None:
        """Read a folder of ``save_checkpoint``, with any number of ranks. After CheckpointUnreadable, load another."""
