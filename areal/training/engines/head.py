"""The language model's head, fused with the outputs that a loss needs: the log-probability of each target token and the
entropy of its distribution. Logits are computed for target tokens only, one part at a time, and recomputed in the
backward pass, as flash attention does with its scores. A [B, T, V] tensor never exists.

A part has at most 1 / ``_SHARE`` of the tokens, each with two rows of float32 logits, so the memory besides weights and
their gradients is about an eighth of all logits in float32. A head that is sharded over the vocabulary needs two
all-reduces for each part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal.dataclasses import dataclass
from areal.training.engines.huggingface import base_model

_SHARE = 16  # parts of a micro-batch
_LEAST, _MOST = 1 << 20, 1 << 26  # logits of a part: between 4 and 256 MiB of float32


@dataclass(frozen=True)
class Targets:
    """The tokens whose outputs are needed. ``places`` [N]: indices among all computed tokens; ``ids`` [N]: the tokens
    after them; ``temperatures`` [N]: float32, above 0; None means 1."""

    places: Tensor
    ids: Tensor
    temperatures: Tensor | None = None


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    temperatures: Tensor | None = None,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies, float32 [N]. ``hidden`` [N, H], ``weight`` [V, H] of its dtype, ``ids``
    and ``temperatures`` [N]. With ``group``, ``weight`` is this rank's shard of the vocabulary, from token ``first``
    on; all other inputs, outputs and gradients are the same on its ranks."""
    return _Statistics.apply(hidden, weight, ids, temperatures, first, group)  # type: ignore[no-untyped-call]


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        temperatures: Tensor | None,
        first: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden)
        logprobs, entropies, norms = torch.empty(3, count, dtype=torch.float32, device=hidden.device)
        for part in _parts(count, len(weight)):
            logits = _logits(hidden, weight, temperatures, part)
            most = logits.amax(1)
            if group is not None:
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
            logits.sub_(most[:, None])
            where, own = _columns(ids[part], first, len(weight))
            of_target = torch.where(own, logits.gather(1, where[:, None])[:, 0], 0.0)
            exponents = logits.exp()
            sums = torch.stack([of_target, exponents.sum(1), torch.einsum("nv,nv->n", exponents, logits)])
            if group is not None:
                dist.all_reduce(sums, group=group)
            of_target, total, weighted = sums
            logprobs[part] = of_target - total.log()
            entropies[part] = total.log() - weighted / total
            norms[part] = most + total.log()
        ctx.save_for_backward(hidden, weight, ids, temperatures, norms, entropies)
        ctx.first, ctx.group = first, group
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, temperatures, norms, entropies = ctx.saved_tensors
        of_logprobs, of_entropies = grads
        if of_logprobs is None:
            of_logprobs = torch.zeros_like(norms)
        if of_entropies is not None and not bool(of_entropies.any()):  # the loss does not use entropies
            of_entropies = None
        to_hidden = torch.zeros_like(hidden)
        # Sums of many parts are kept in float32, whatever the dtype of the weights.
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _parts(len(hidden), len(weight)):
            logits = _logits(hidden, weight, temperatures, part).sub_(norms[part, None])
            if of_entropies is None:
                grad = logits.exp_().mul_(-of_logprobs[part, None])
            else:  # dH / dz_j = -p_j (log p_j + H)
                grad = logits.exp()
                logits.add_(entropies[part, None]).mul_(-of_entropies[part, None])
                grad.mul_(logits.sub_(of_logprobs[part, None]))
            where, own = _columns(ids[part], ctx.first, len(weight))
            grad.scatter_add_(1, where[:, None], (of_logprobs[part] * own)[:, None])
            if temperatures is not None:
                grad.div_(temperatures[part, None])
            cast = grad.to(weight.dtype)
            to_hidden[part] = cast @ weight
            if to_weight is not None and weight.dtype == torch.float32:
                to_weight.addmm_(cast.T, hidden[part])
            elif to_weight is not None:
                to_weight.add_(cast.T @ hidden[part])
        if ctx.group is not None:
            dist.all_reduce(to_hidden, group=ctx.group)
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None, None, None


def _parts(count: int, vocabulary: int) -> list[slice]:
    rows = max(-(-count // _SHARE), _LEAST // vocabulary)
    rows = max(1, min(rows, _MOST // vocabulary))
    return [slice(start, start + rows) for start in range(0, count, rows)]


def _logits(hidden: Tensor, weight: Tensor, temperatures: Tensor | None, part: slice) -> Tensor:
    logits = (hidden[part] @ weight.T).float()
    return logits if temperatures is None else logits.div_(temperatures[part, None])


def _columns(ids: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the row of each id in this shard of the vocabulary, and whether the shard has it."""
    own = (ids >= first) & (ids < first + count)
    return torch.where(own, ids - first, 0), own


class Head(nn.Module):
    """Replaces a model's ``lm_head`` and keeps its weight. While ``targets`` is set the output is not logits but [N,
    2]: the log-probability and the entropy of each target."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.targets: Targets | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        weight, group, first = self.weight, None, 0
        if hasattr(weight, "device_mesh"):  # a DTensor, sharded over the vocabulary
            from torch.distributed.tensor import DTensor
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            assert isinstance(weight, DTensor)
            mesh = weight.device_mesh
            _, (first, _) = compute_local_shape_and_global_offset(weight.shape, mesh, weight.placements)
            group, weight = mesh.get_group(), weight.to_local()  # type: ignore[assignment]
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        hidden, weight = hidden.to(dtype), weight.to(dtype)  # type: ignore[assignment]
        if self.targets is None:
            local = nn.functional.linear(hidden, weight)
            return local if group is None else _all_columns(local, self.weight.shape[0], group)
        chosen = hidden.flatten(0, 1).index_select(0, self.targets.places)
        found = token_statistics(chosen, weight, self.targets.ids, self.targets.temperatures, first, group)
        return torch.stack(found, -1)


def _all_columns(local: Tensor, vocabulary: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather the logits of the whole vocabulary, without a gradient."""
    size = dist.get_world_size(group)
    widest = -(-vocabulary // size)
    padded = nn.functional.pad(local, (0, widest - local.shape[-1])).contiguous()
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts, -1)[..., :vocabulary]


def install_head(model: Any) -> Head | None:
    """Replace the model's head by a ``Head``. Returns None and changes nothing if the head is not a plain linear layer,
    or the model changes its logits (soft caps, scales, biases)."""
    base: Any = base_model(model)
    plain = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if type(plain) is not nn.Linear or plain.bias is not None:
        return None
    seen: list[Tensor] = []
    handle = plain.register_forward_hook(lambda module, inputs, output: seen.append(output))
    was_training = model.training
    try:
        with torch.no_grad():
            ids = torch.arange(2, device=plain.weight.device)[None] % len(plain.weight)
            logits = model.eval()(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
        model.train(was_training)
    if len(seen) != 1 or not torch.equal(seen[0], logits):
        return None
    head = Head(plain.weight)
    base.set_output_embeddings(head)
    return head
