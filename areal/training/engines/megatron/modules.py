"""Parts of a decoder layer that Megatron has only with Transformer Engine or Apex: a norm that knows sequence
parallelism, and attention by torch's kernels, which context-parallel ranks share."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class RMSNorm(nn.RMSNorm):
    """Called as Megatron calls its norms."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Attention(nn.Module):
    """Causal attention over rows that are padded on the right, of this rank's heads.

    With context parallelism a rank has the queries of two slices of each row (``slices_of``), and gathers the keys and
    values of all: they are few where heads share them.
    """

    def __init__(self, config: Any, layer_number: int, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self.group = pg_collection.cp
        self.dropout = float(config.attention_dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **_: Any) -> Tensor:
        """[s, b, heads, size] and [s, b, groups, size] of this rank -> [s, b, heads * size]."""
        mask: Tensor | None = None
        if self.group.size() > 1:
            order = slices_of(len(query) * self.group.size(), self.group.size()).to(query.device)
            key, value = (whole_rows(each, order, self.group, shared=False) for each in (key, value))
            mask = order[self.group.rank()][:, None] >= torch.arange(len(key), device=query.device)
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        found = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return found.permute(2, 0, 1, 3).flatten(2).contiguous()


class Router(TopKRouter):  # type: ignore[misc]
    """The scores of experts in float32. Megatron's own are Transformer Engine's, and an error without it."""

    def gating(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input.float(), self.weight.float())


def slices_of(length: int, ranks: int) -> Tensor:
    """The places in a row that each context-parallel rank has: [ranks, length / ranks]. Of twice as many slices as
    there are ranks each has one from the front and one from the back, so that they have as much to attend to."""
    slices = torch.arange(length).view(2 * ranks, -1)
    return torch.stack([torch.cat([slices[rank], slices[-1 - rank]]) for rank in range(ranks)])


def whole_rows(mine: Tensor, order: Tensor, group: Any, *, shared: bool) -> Tensor:
    """[s / ranks, ...] of each rank -> [s, ...] in the order of the row. ``shared``: every rank computes the same from
    it, else gradients of all are added."""
    mine = mine.contiguous()
    every = gather_from_sequence_parallel_region(mine, tensor_parallel_output_grad=not shared, group=group)
    whole: Tensor = every.index_select(0, order.flatten().argsort())
    return whole
