"""Engine contracts: what a workflow samples from, and what a trainer updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from areal.api.io_struct import ModelRequest, ModelResponse
    from areal.client.sessions import AsyncGroup

Batch = Mapping[str, "torch.Tensor"]
LossFn = Callable[["torch.Tensor", Any], "torch.Tensor"]
"""(outputs of the model, micro-batch) -> the mean loss of the micro-batch."""
WeightFn = Callable[[Any], "torch.Tensor"]
"""micro-batch -> how much its mean counts: tokens, sequences, pairs."""


class InferenceEngine(Protocol):
    """What ``arun_episode`` is given. Tokens in, tokens out, or recorded sessions for clients of a base URL."""

    base_url: str

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        """One sample, each token with its log-probability and the version of the weights that sampled it. A weight
        update on the way is survived: the answer then has tokens of two versions. Raises ClientError."""
        ...

    async def start_sessions(self, count: int = 1) -> AsyncGroup:
        """Recorded sessions for this episode; what is sampled with their keys can be exported."""
        ...

    def get_version(self) -> int:
        """Of the newest weights that the trainer has published."""
        ...


class TrainEngine(Protocol):
    """A model, its optimizer and its ranks. The engine alone owns normalisation: ``loss_fn`` gives a micro-batch's
    mean, ``loss_weight_fn`` its weight, and every micro-batch of every rank counts ``mean * weight / total``."""

    steps: int
    version: int

    def train_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: WeightFn) -> Any:
        """One optimizer step over this rank's rows. Raises before the step where loss or gradient is no number."""
        ...

    def eval_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: WeightFn) -> float: ...

    def forward(self, batch: Batch, of: Callable[[torch.Tensor, Any], torch.Tensor]) -> torch.Tensor:
        """``of(outputs, micro-batch)`` for every row, in the batch's order, without gradients."""
        ...
