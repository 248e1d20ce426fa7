"""Replacements for decoder parts that Megatron has only with Transformer Engine or Apex: a norm with sequence
parallelism, and attention by torch's kernels with context parallelism; and a head that computes only the logits of
targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, gather_from_tensor_model_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from areal.api.engine_api import TokenOutputs
from areal.dataclasses import dataclass
from areal.training.batches import target_mask
from areal.training.engines.head import token_statistics


class Decoder(GPTModel):  # type: ignore[misc]
    """Returns the hidden states [s, b, h] of this rank's part of the rows, on every stage."""

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return hidden_states

    @property
    def head(self) -> Tensor:
        """This rank's rows of the head's weight, on the last stage."""
        return self.shared_embedding_or_output_weight() if self.tied else self.output_layer.weight

    @property
    def tied(self) -> bool:
        return bool(self.share_embeddings_and_output_weights)


class RMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` with Megatron's constructor."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class Attention(nn.Module):
    """Causal attention of this rank's heads over rows that are padded on the right.

    With context parallelism a rank has the queries of two slices of each row (``slices_of``), and gathers the keys and
    values of all, which are few with grouped-query attention.
    """

    def __init__(self, config: Any, layer_number: int, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self.group = pg_collection.cp
        self.dropout = float(config.attention_dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **_: Any) -> Tensor:
        """Map [s, b, heads, size] and [s, b, groups, size] of this rank to [s, b, heads * size]."""
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


class ExpertRouter(TopKRouter):  # type: ignore[misc]
    """The scores of experts in float32. Megatron's own router needs Transformer Engine."""

    def gating(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input.float(), self.weight.float())


def slices_of(length: int, ranks: int) -> Tensor:
    """Return the positions in a row of each context-parallel rank: [ranks, length / ranks]. A row has twice as many
    slices as ranks; each rank has one from the front and one from the back, which balances attention."""
    slices = torch.arange(length).view(2 * ranks, -1)
    return torch.stack([torch.cat([slices[rank], slices[-1 - rank]]) for rank in range(ranks)])


def whole_rows(mine: Tensor, order: Tensor, group: Any, *, shared: bool) -> Tensor:
    """Return the rows [s, ...] in their order, of which each rank has [s / ranks, ...]. ``shared``: every rank computes
    the same from them; otherwise the gradients of all ranks are added."""
    mine = mine.contiguous()
    every = gather_from_sequence_parallel_region(mine, tensor_parallel_output_grad=not shared, group=group)
    return every.index_select(0, order.flatten().argsort())


@dataclass(frozen=True)
class Vocabulary:
    """This rank's rows of the head, ``weight`` [n, h], from token ``first`` on, without padding."""

    weight: Tensor
    first: int
    groups: Any

    @classmethod
    def of(cls, decoder: Any, size: int, groups: Any) -> Vocabulary:
        weight = decoder.head
        first = groups.tp.rank() * len(weight)
        return cls(weight[: max(0, size - first)], first, groups)

    def statistics(self, hidden: Tensor, ids: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
        group = self.groups.tp if self.groups.tp.size() > 1 else None
        return token_statistics(hidden, self.weight, ids, temperatures, self.first, group)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of ``hidden`` [..., h], without a gradient."""
        group, local = self.groups.tp, nn.functional.linear(hidden, self.weight)
        if group.size() == 1:
            return local
        sizes = torch.tensor([local.shape[-1]], device=local.device)
        widest = int(gather_from_sequence_parallel_region(sizes, group=group).amax())
        padded = nn.functional.pad(local, (0, widest - local.shape[-1]))
        return gather_from_tensor_model_parallel_region(padded, group=group)


def token_outputs(
    hidden: Tensor, vocabulary: Vocabulary, micro: Mapping[str, Tensor], order: Tensor | None
) -> TokenOutputs:
    """Return the outputs for all rows of ``micro``, on every rank, from this rank's ``hidden`` [s, b, h]. ``order``:
    ``slices_of`` the rows with context parallelism. The state at a token predicts the next one."""
    ids = micro["input_ids"]
    wanted = target_mask(micro)
    length, context = ids.shape[1], vocabulary.groups.cp
    whole = len(hidden) * context.size()

    def mine(columns: Tensor) -> Tensor:
        """Return the columns at the tokens after this rank's: [s, b]."""
        after = nn.functional.pad(columns[:, 1:], (0, whole - length + 1))
        return (after if order is None else after[:, order[context.rank()]]).T

    places = mine(wanted).nonzero(as_tuple=True)
    temperatures = micro.get("token_temperatures")
    divisors = None if temperatures is None else mine(temperatures)[places].float()
    found = torch.stack(vocabulary.statistics(hidden[places], mine(ids)[places], divisors), -1)
    dense = torch.zeros(*hidden.shape[:2], 2, dtype=found.dtype, device=found.device).index_put(places, found)
    if order is not None:
        dense = whole_rows(dense, order, context, shared=True)
    shifted = nn.functional.pad(dense[: length - 1].transpose(0, 1), (0, 0, 1, 0))
    return TokenOutputs.of_policy(shifted[..., 0], shifted[..., 1])
