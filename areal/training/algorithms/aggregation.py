"""From losses of tokens to one loss: which mean it is.

The engine normalises over all micro-batches and ranks: ``mean`` is over one micro-batch, ``weight`` says how much that
mean counts. So every mode is the same however a batch is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from areal.training.algorithms.sequences import masked_mean, sequence_sums

AggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class Aggregation:
    """``mode``, by verl's names:

    token-mean               sum over all tokens / tokens                               (DAPO, arXiv 2503.14476)
    seq-mean-token-mean      mean over sequences of the mean over their tokens          (GRPO, arXiv 2402.03300)
    seq-mean-token-sum       mean over sequences of the sum over their tokens           (REINFORCE, RLOO)
    seq-mean-token-sum-norm  the same / ``scale``, a constant                           (Dr.GRPO, arXiv 2503.20783)

    A sequence without a token in the mask does not count.
    """

    mode: AggMode = "token-mean"
    scale: float = 1.0

    def mean(self, per_token: Tensor, mask: Tensor) -> Tensor:
        """``per_token`` and ``mask`` [B, T] -> a scalar; 0 where the mask is empty."""
        if self.mode == "token-mean":
            return masked_mean(per_token, mask)
        if self.mode == "seq-mean-token-mean":
            of_sequences = masked_mean(per_token, mask, dim=1)[:, 0]
        else:
            of_sequences = sequence_sums(per_token, mask)
        mean = masked_mean(of_sequences, mask.any(1))
        return mean / self.scale if self.mode == "seq-mean-token-sum-norm" else mean

    def weight(self, mask: Tensor) -> Tensor:
        """How many tokens, or sequences, ``mean`` is over: a scalar."""
        return mask.sum() if self.mode == "token-mean" else mask.any(1).sum()
