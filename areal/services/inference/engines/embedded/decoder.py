"""The Llama family's decoder (Llama, Mistral, Qwen2, Qwen3) over rows of a KV cache.

Weights come in by ``install`` alone, one fused buffer of the layout at a time, at start and under a running engine
alike. Per layer and step: one product for q, k and v, one in-place rotation, one write into the cache, one attention,
one product and sum for the output, and the same for the gated MLP. Grouped queries of a decode step enter attention as
queries of one sequence, since they see the same keys: no key is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.services.inference.engines.embedded.lora import Deltas
from areal.services.inference.engines.embedded.matrix import Matrix, MatrixForms
from areal.services.inference.engines.embedded.model_config import ModelConfig, Rope, buffer_shapes

# -- rotary position embedding
#
# Unit complex numbers (RoFormer, arXiv:2104.09864), with linear and Llama 3 scaling.


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angle per position of each rotary pair, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return frequencies / rope.parameters["factor"]
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between blended by where they lie."""
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    factor, context = rope.parameters["factor"], rope.parameters["original_max_position_embeddings"]
    waves = 2 * math.pi / frequencies
    blend = (context / waves - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(waves > context / low, frequencies / factor, frequencies)
    between = (waves <= context / low) & (waves >= context / high)
    return torch.where(between, blended, stretched)


def rotations(rope: Rope, head_dim: int, positions: int) -> Tensor:
    """exp(i * position * frequency), [positions, head_dim / 2] complex64."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return torch.polar(torch.ones_like(angles), angles)


_STEP = 64  # positions


class KVCache:
    """Keys and values of all rows: one tensor a layer, [rows, 2 * kv_heads, positions, head_dim], keys first.

    The tensors grow by doubling within a bound on rows * positions, and never shrink; a layer is grown at a time, so
    that growing costs one layer's memory extra. What lies beyond a sequence's cached length is masked garbage.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, limit: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows = 0
        self.width = 0
        self._limit = limit  # rows * positions
        self._heads, self._dim = 2 * kv_heads, head_dim
        self._dtype, self._device = dtype, device
        self.layers: list[Tensor] = [self._empty(0, 0) for _ in range(layers)]

    def reserve(self, rows: int, width: int) -> None:
        """Make room for a rectangle; what is cached stays."""
        if rows <= self.rows and width <= self.width:
            return
        rows, width = self._grown(rows, width)
        for index, old in enumerate(self.layers):
            kept_rows, kept_width = min(self.rows, rows), min(self.width, width)
            new = self._empty(rows, width)
            new[:kept_rows, :, :kept_width] = old[:kept_rows, :, :kept_width]
            self.layers[index] = new
        self.rows, self.width = rows, width

    def release(self) -> None:
        """Forget all."""
        self.rows = self.width = 0
        self.layers = [self._empty(0, 0) for _ in self.layers]

    def spread(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """The first positions of each source row, to its target row; all are read before any is written."""
        if len(sources) == 1:
            for layer in self.layers:
                layer[targets[0], :, :length] = layer[sources[0], :, :length]
            return
        source, target = torch.tensor([sources, targets], device=self._device)
        for layer in self.layers:
            positions = layer.narrow(2, 0, length)
            positions.index_copy_(0, target, positions.index_select(0, source))

    def read(self, row: int, length: int) -> list[Tensor]:
        """A copy of a row's first positions, layer by layer."""
        return [layer[row, :, :length].clone() for layer in self.layers]

    def write(self, row: int, values: list[Tensor], length: int) -> None:
        """The first positions of what ``read`` gave, into a row."""
        for layer, held in zip(self.layers, values, strict=True):
            layer[row, :, :length] = held[:, :length]

    def _grown(self, rows: int, width: int) -> tuple[int, int]:
        """At least the requested size, and twice the present one where the bound allows; the other side gives way."""
        width = -(-width // _STEP) * _STEP if rows * -(-width // _STEP) * _STEP <= self._limit else width
        grown_rows = max(rows, self.rows if rows <= self.rows else 2 * self.rows)
        grown_width = max(width, self.width if width <= self.width else 2 * self.width)
        if grown_rows * grown_width <= self._limit:
            return grown_rows, grown_width
        if rows * grown_width <= self._limit:
            return min(grown_rows, self._limit // grown_width), grown_width
        return rows, min(grown_width, max(width, self._limit // rows))

    def _empty(self, rows: int, width: int) -> Tensor:
        # Zeros, because a masked score of garbage may be NaN, and NaN survives a mask.
        return torch.zeros(rows, self._heads, width, self._dim, dtype=self._dtype, device=self._device)


_MATRICES = {"qkv", "output", "gate_up", "down", "head"}


@dataclass(frozen=True)
class DecoderLayer:
    """One layer's weights."""

    index: int
    input_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Matrix
    gate_up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None


@dataclass(frozen=True)
class PrefillShape:
    """Where a padded batch [batch, time] goes: consecutive rows, each from its own start.

    ``valid`` are the flat indices of tokens that are no padding; ``rows`` and ``positions`` say where each is cached.
    ``mask`` [batch, 1, time, width] is None when every sequence starts at 0: then causal attention within the batch
    is all there is, and padding on the right is never seen.
    """

    first_row: int
    offsets: Tensor  # [batch, time] positions, for the rotation
    valid: Tensor
    rows: Tensor
    positions: Tensor
    mask: Tensor | None
    width: int


@dataclass(frozen=True)
class DecodePart:
    """Rows start:stop of a decode step, which look at ``width`` positions of the cache. Where they are not all as long,
    ``rows`` and ``positions`` say where each one's new position is, and ``mask`` [rows, 1, 1, width] is -inf after it.
    """

    start: int
    stop: int
    width: int
    rows: Tensor | None = None
    positions: Tensor | None = None
    mask: Tensor | None = None

    def write(self, store: Tensor, new: Tensor) -> None:
        """``new`` [batch, 2 * kv_heads, head_dim] is that of all parts."""
        own = new[self.start : self.stop]
        if self.rows is None:
            store[self.start : self.stop, :, self.width - 1] = own
        else:
            store[self.rows, :, self.positions] = own


class LlamaDecoder:
    """``deltas``, where a step has them, say what LoRA adapters add to the projections of which rows."""

    def __init__(self, config: ModelConfig, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype, self.device = dtype, device
        self._tensors: dict[str, Tensor] = {}
        self._matrices: dict[str, Matrix] = {}
        for name, shape in buffer_shapes(config).items():
            if name.rpartition(".")[2] in _MATRICES:
                self._matrices[name] = Matrix(shape, dtype, device)
            else:
                self._tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        if config.tied:
            self._matrices["head"] = Matrix((config.vocab_size, config.hidden_size), dtype, device)
        self._head = self._matrices["head"]
        self._embed_is_borrowed = False  # or may be: then it is not written
        self._layers = [self._layer(index) for index in range(config.layers)]
        self._rotations = rotations(config.rope, config.head_dim, max_positions).to(device)

    def install(self, name: str, values: Tensor) -> None:
        """Give a buffer of the layout its values, which are copied; a tied head follows its embedding."""
        if name in self._matrices:
            self._matrices[name].assign(values)
        elif name == "embed" and (self._embed_is_borrowed or not self._tensors["embed"].numel()):
            self._tensors["embed"] = values.to(self.device, self.dtype, copy=True)
            self._embed_is_borrowed = False
        else:
            self._tensors[name].copy_(values)
        if name == "embed" and self.config.tied:
            self._head.adopt(self._head.forms(self._tensors["embed"], borrowed=True))

    def stage(self, name: str, values: Tensor, *, borrowed: bool = False) -> Iterator[tuple[str, Tensor | MatrixForms]]:
        """What ``adopt`` takes to give a buffer these values; by any thread. They are copied, but for those that are
        ``borrowed``, which stay what they are for as long as we compute with them."""
        if name in self._matrices:
            yield name, self._matrices[name].forms(values, borrowed=borrowed)
        elif name == "embed":
            kept = values.to(self.device, self.dtype, copy=not borrowed)
            yield name, kept
            if self.config.tied:
                yield "head", self._head.forms(kept, borrowed=True)
        else:
            yield name, values.to(self.device, self.dtype, copy=True)

    @torch.inference_mode()
    def adopt(self, new: Mapping[str, Tensor | MatrixForms]) -> list[object]:
        """Compute with these from now on: what is large changes hands, what is small is copied. What was in use is
        returned, to be freed off the engine's thread."""
        old: list[object] = []
        for name, held in new.items():
            if isinstance(held, MatrixForms):
                old.append(self._matrices[name].adopt(held))
            elif name == "embed":
                old.append(self._tensors[name])
                self._tensors[name], self._embed_is_borrowed = held, True
            else:
                self._tensors[name].copy_(held)
        return old

    @property
    def reorders(self) -> bool:
        """Whether it computes with weights in another order than theirs."""
        return any(matrix.reorders for matrix in self._matrices.values())

    def large(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that hold nearly all of the memory: what ``release`` drops and ``install`` takes back."""
        yield "embed", self._tensors["embed"]
        for name, matrix in self._matrices.items():
            if not (name == "head" and self.config.tied):
                yield name, matrix.values()

    def release(self) -> None:
        self._tensors["embed"] = self._tensors["embed"].new_empty(0)
        for matrix in self._matrices.values():
            matrix.release()

    def _layer(self, index: int) -> DecoderLayer:
        tensors = {
            name.rpartition(".")[2]: held for name, held in self._tensors.items() if name.startswith(f"{index}.")
        }
        return DecoderLayer(
            index=index,
            input_norm=tensors["input_norm"],
            qkv=self._matrices[f"{index}.qkv"],
            qkv_bias=tensors.get("qkv_bias"),
            qk_norm=tensors.get("qk_norm"),
            output=self._matrices[f"{index}.output"],
            output_bias=tensors.get("output_bias"),
            post_norm=tensors["post_norm"],
            gate_up=self._matrices[f"{index}.gate_up"],
            gate_up_bias=tensors.get("gate_up_bias"),
            down=self._matrices[f"{index}.down"],
            down_bias=tensors.get("down_bias"),
        )

    def prefill(
        self, cache: KVCache, tokens: Tensor, shape: PrefillShape, last: Tensor, deltas: Deltas | None = None
    ) -> Tensor:
        """Compute ``tokens`` [batch, time] into the cache; logits [batch, vocab] float32 at flat indices ``last``."""
        batch, time = tokens.shape
        hidden = F.embedding(tokens.view(-1), self._tensors["embed"])
        angles = self._rotations[shape.offsets.view(-1)].unsqueeze(1)
        for layer, store in zip(self._layers, cache.layers, strict=True):
            qkv = self._qkv(layer, hidden, angles, deltas)
            queries, new = self._split(qkv)
            store[shape.rows, :, shape.positions] = new[shape.valid]
            if shape.mask is None:
                keys_values = new.view(batch, time, -1, self.config.head_dim).transpose(1, 2)
            else:
                keys_values = store[shape.first_row : shape.first_row + batch, :, : shape.width]
            keys, values = keys_values.chunk(2, dim=1)
            attended = F.scaled_dot_product_attention(
                queries.view(batch, time, self.config.heads, -1).transpose(1, 2),
                self._repeat(keys),
                self._repeat(values),
                attn_mask=shape.mask,
                is_causal=shape.mask is None,
            )
            hidden = self._close(layer, hidden, attended.transpose(1, 2).reshape(batch * time, -1), deltas)
        return self._logits(hidden[last])

    def decode(
        self,
        cache: KVCache,
        tokens: Tensor,
        positions: Tensor,
        parts: Sequence[DecodePart],
        deltas: Deltas | None = None,
    ) -> Tensor:
        """One position more for rows 0..batch-1, which ``parts`` hold in order; logits [batch, vocab] float32.

        ``tokens`` and ``positions`` [batch].
        """
        hidden = F.embedding(tokens, self._tensors["embed"])
        angles = self._rotations[positions].unsqueeze(1)
        for layer, store in zip(self._layers, cache.layers, strict=True):
            queries, new = self._split(self._qkv(layer, hidden, angles, deltas))
            attended = [self._attend(part, store, queries, new) for part in parts]
            hidden = self._close(layer, hidden, attended[0] if len(parts) == 1 else torch.cat(attended), deltas)
        return self._logits(hidden)

    def _attend(self, part: DecodePart, store: Tensor, queries: Tensor, new: Tensor) -> Tensor:
        """[rows, heads * head_dim] of a part, whose new keys and values are written."""
        part.write(store, new)
        own = slice(part.start, part.stop)
        keys, values = store[own, :, : part.width].chunk(2, dim=1)
        grouped = queries[own].view(part.stop - part.start, self.config.kv_heads, -1, self.config.head_dim)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=part.mask).flatten(1)

    def _qkv(self, layer: DecoderLayer, hidden: Tensor, angles: Tensor, deltas: Deltas | None) -> Tensor:
        """[tokens, heads + 2 * kv_heads, head_dim], queries and keys normed where the model does so, and rotated."""
        config = self.config
        normed = torch.rms_norm(hidden, (config.hidden_size,), layer.input_norm, config.norm_eps)
        projected = layer.qkv.project(normed, layer.qkv_bias)
        if deltas is not None:
            deltas.add(f"{layer.index}.qkv", normed, projected)
        qkv = projected.view(hidden.shape[0], -1, config.head_dim)
        rotary = qkv[:, : config.heads + config.kv_heads]
        source = rotary
        if layer.qk_norm is not None:
            source = torch.rms_norm(rotary, (config.head_dim,), None, config.norm_eps).mul_(layer.qk_norm)
        self._rotate(source, angles, rotary)
        return qkv

    def _rotate(self, source: Tensor, angles: Tensor, target: Tensor) -> None:
        """Rotate each adjacent pair of ``source`` [tokens, heads, head_dim] into ``target``, in float32."""
        shape = (*source.shape[:-1], self.config.head_dim // 2, 2)
        if self.dtype == torch.float32:
            torch.mul(torch.view_as_complex(source.view(shape)), angles, out=torch.view_as_complex(target.view(shape)))
        else:
            pairs = torch.view_as_complex(source.float().view(shape))
            target.view(shape).copy_(torch.view_as_real(pairs * angles))

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [tokens, heads, head_dim], and keys with values [tokens, 2 * kv_heads, head_dim]."""
        return qkv[:, : self.config.heads], qkv[:, self.config.heads :]

    def _repeat(self, keys: Tensor) -> Tensor:
        groups = self.config.heads // self.config.kv_heads
        return keys if groups == 1 else keys.repeat_interleave(groups, dim=1)

    def _close(self, layer: DecoderLayer, hidden: Tensor, attended: Tensor, deltas: Deltas | None) -> Tensor:
        """What follows attention: its output projection and the gated MLP, each added to the residual stream."""
        config = self.config
        hidden = layer.output.project_onto(hidden, attended, layer.output_bias)
        if deltas is not None:
            deltas.add(f"{layer.index}.output", attended, hidden)
        normed = torch.rms_norm(hidden, (config.hidden_size,), layer.post_norm, config.norm_eps)
        gate_up = layer.gate_up.project(normed, layer.gate_up_bias)
        if deltas is not None:
            deltas.add(f"{layer.index}.gate_up", normed, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        inner = F.silu(gate).mul_(up)
        hidden = layer.down.project_onto(hidden, inner, layer.down_bias)
        if deltas is not None:
            deltas.add(f"{layer.index}.down", inner, hidden)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = torch.rms_norm(hidden, (self.config.hidden_size,), self._tensors["norm"], self.config.norm_eps)
        return self._head.project(normed).float()
