"""The Llama family's decoder (Llama, Mistral, Qwen2, Qwen3) over rows of a KV cache.

Weights are set by ``install``, or by ``stage`` and ``adopt``, one fused buffer of the layout at a time. Per layer and
step: one product for q, k and v, one in-place rotation, one write into the cache, one attention, one product and sum
for the output, and the same for the gated MLP. A decode step passes grouped queries to attention as queries of one
sequence, since they see the same keys, so that no key is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from areal.dataclasses import dataclass
from areal.services.inference.engines.embedded.linear import Deltas, Matrix, MatrixForms
from areal.services.inference.engines.embedded.model_folder import ModelConfig, Rope, buffer_shapes

_STEP = 64  # positions by which rows grow
_MOST_RUNS = 32  # with more runs of equal lengths, lengths are rounded to multiples of ``_COARSE``
_COARSE = 32
_MATRICES = {"qkv", "output", "gate_up", "down", "head"}


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the angle per position of each rotary pair, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return frequencies / rope.parameters["factor"]
    if rope.type != "llama3":
        return frequencies
    # Long waves are stretched by the factor, short ones kept, those between interpolated.
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    factor, context = rope.parameters["factor"], rope.parameters["original_max_position_embeddings"]
    waves = 2 * math.pi / frequencies
    blend = (context / waves - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(waves > context / low, frequencies / factor, frequencies)
    between = (waves <= context / low) & (waves >= context / high)
    return torch.where(between, blended, stretched)


def rotations(rope: Rope, head_dim: int, positions: int) -> Tensor:
    """Return exp(i * position * frequency) (RoFormer, arXiv:2104.09864), [positions, head_dim / 2] complex64."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return torch.polar(torch.ones_like(angles), angles)


class KVCache:
    """Keys and values of all rows: one tensor a layer, [rows, 2 * kv_heads, positions, head_dim], keys first.

    The tensors grow by doubling within a bound on rows * positions, and never shrink. Layers grow one at a time, so
    that this takes one layer's memory extra. Positions beyond a sequence's cached length hold garbage, which is masked.
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
        """Make room for a rectangle, keeping its contents."""
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
        """Free all rows."""
        self.rows = self.width = 0
        self.layers = [self._empty(0, 0) for _ in self.layers]

    def spread(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first positions of each source row to its target row; all are read before any is written."""
        if len(sources) == 1:
            for layer in self.layers:
                layer[targets[0], :, :length] = layer[sources[0], :, :length]
            return
        source, target = torch.tensor([sources, targets], device=self._device)
        for layer in self.layers:
            positions = layer.narrow(2, 0, length)
            positions.index_copy_(0, target, positions.index_select(0, source))

    def read(self, row: int, length: int) -> list[Tensor]:
        """Return a copy of a row's first positions, layer by layer."""
        return [layer[row, :, :length].clone() for layer in self.layers]

    def write(self, row: int, values: list[Tensor], length: int) -> None:
        """Write the first positions of a copy by ``read`` into a row."""
        for layer, held in zip(self.layers, values, strict=True):
            layer[row, :, :length] = held[:, :length]

    def _grown(self, rows: int, width: int) -> tuple[int, int]:
        """Return the size to grow to: the dimensions that must grow are doubled, if the bound allows."""
        width = -(-width // _STEP) * _STEP if rows * -(-width // _STEP) * _STEP <= self._limit else width
        grown_rows = max(rows, self.rows if rows <= self.rows else 2 * self.rows)
        grown_width = max(width, self.width if width <= self.width else 2 * self.width)
        if grown_rows * grown_width <= self._limit:
            return grown_rows, grown_width
        if rows * grown_width <= self._limit:
            return min(grown_rows, self._limit // grown_width), grown_width
        return rows, min(grown_width, max(width, self._limit // rows))

    def _empty(self, rows: int, width: int) -> Tensor:
        # Zeros, because garbage may give NaN scores, which survive a mask.
        return torch.zeros(rows, self._heads, width, self._dim, dtype=self._dtype, device=self._device)


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows start:stop. ``width``: the positions of the longest; ``even``: all have the same length."""

    start: int
    stop: int
    width: int
    even: bool

    def grown(self, by: int) -> RowSpan:
        return RowSpan(self.start, self.stop, self.width + by, self.even)

    def cost(self, call: int) -> int:
        """Return the cost in positions that attention reads. A call costs ``call`` positions, a mask half as many."""
        return _cost(self.stop - self.start, self.width, self.even, call)


def _cost(rows: int, width: int, even: bool, call: int) -> int:
    return rows * width + (call if even else call + call // 2)


def cheapest_spans(lengths: Sequence[int], call: int) -> tuple[RowSpan, ...]:
    """Return the cheapest division of rows 0, 1, ... of these lengths into spans. ``call``: as in ``RowSpan.cost``.

    Attention over a span costs as much as if all of its rows were as long as the longest. Each span costs a call, and a
    mask unless its rows have equal lengths. Found by dynamic programming over runs of equal length (of similar length
    if there are many). All rows of a batch grow together, so a division stays the cheapest while the batch is the same.
    """
    runs = _runs(lengths, 1)
    if len(runs) > _MOST_RUNS:
        runs = _runs(lengths, _COARSE)
    least = [0]  # the cost of the runs before each
    last: list[tuple[int, RowSpan]] = []  # the last span of the runs up to each, and where it begins
    for end, final in enumerate(runs, 1):
        width, even, best = 0, True, -1
        for at in range(end - 1, -1, -1):
            run = runs[at]
            even = even and run.even and width in (0, run.width)
            width = max(width, run.width)
            cost = least[at] + _cost(final.stop - run.start, width, even, call)
            if best < 0 or cost < best:
                best, found = cost, (at, run.start, width, even)
        least.append(best)
        begin, start, width, even = found
        last.append((begin, RowSpan(start, final.stop, width, even)))
    spans: list[RowSpan] = []
    end = len(runs)
    while end:
        end, span = last[end - 1]
        spans.append(span)
    return tuple(reversed(spans))


def _runs(lengths: Sequence[int], coarse: int) -> list[RowSpan]:
    """Return neighboring rows of equal length, in units of ``coarse``."""
    runs: list[RowSpan] = []
    start = 0
    for _, group in groupby(lengths, key=lambda length: length // coarse):
        of_run = list(group)
        widest = max(of_run)
        runs.append(RowSpan(start, start + len(of_run), widest, min(of_run) == widest))
        start += len(of_run)
    return runs


@dataclass(frozen=True)
class Projection:
    """A linear layer. ``name``: its buffer."""

    name: str
    matrix: Matrix
    bias: Tensor | None

    def __call__(self, rows: Tensor, deltas: Deltas | None) -> Tensor:
        out = self.matrix.project(rows, self.bias)
        if deltas is not None:
            deltas.add(self.name, rows, out)
        return out

    def add_to(self, residual: Tensor, rows: Tensor, deltas: Deltas | None) -> Tensor:
        """Return ``residual`` plus the output; may overwrite ``residual``."""
        out = self.matrix.project_onto(residual, rows, self.bias)
        if deltas is not None:
            deltas.add(self.name, rows, out)
        return out


@dataclass(frozen=True)
class DecoderLayer:
    input_norm: Tensor
    qkv: Projection
    qk_norm: Tensor | None
    output: Projection
    post_norm: Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class PrefillShape:
    """Cache positions of a padded batch [batch, time] in consecutive rows, each from its own start.

    ``valid``: flat indices of the tokens that are not padding, cached at ``rows`` and ``positions``. ``mask`` [batch,
    1, time, width] is None when every sequence starts at 0: causal attention within the batch then suffices, since
    padding is on the right."""

    first_row: int
    offsets: Tensor  # [batch, time] positions, for the rotation
    valid: Tensor
    rows: Tensor
    positions: Tensor
    mask: Tensor | None
    width: int


@dataclass(frozen=True)
class DecodePart:
    """A span of a decode step's rows. For uneven lengths, ``rows`` and ``positions`` locate each row's new position,
    and ``mask`` [rows, 1, 1, width] is -inf after it."""

    span: RowSpan
    rows: Tensor | None = None
    positions: Tensor | None = None
    mask: Tensor | None = None


class LlamaDecoder:
    """A decoder with fused buffers. ``deltas``: what LoRA adapters add to the projections of some rows of a step."""

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
        self._embed_is_borrowed = False  # borrowed memory must not be written
        self._layers = [self._layer(index) for index in range(config.layers)]
        self._rotations = rotations(config.rope, config.head_dim, max_positions).to(device)

    def _layer(self, index: int) -> DecoderLayer:
        def projection(name: str) -> Projection:
            buffer = f"{index}.{name}"
            return Projection(buffer, self._matrices[buffer], self._tensors.get(f"{buffer}_bias"))

        return DecoderLayer(
            input_norm=self._tensors[f"{index}.input_norm"],
            qkv=projection("qkv"),
            qk_norm=self._tensors.get(f"{index}.qk_norm"),
            output=projection("output"),
            post_norm=self._tensors[f"{index}.post_norm"],
            gate_up=projection("gate_up"),
            down=projection("down"),
        )

    def install(self, name: str, values: Tensor) -> None:
        """Copy ``values`` into a buffer of the layout; a tied head follows its embedding."""
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
        """Yield the input of ``adopt`` for a buffer with these values; in any thread. ``borrowed``: they do not change
        while they are in use, so they need no copy."""
        if name in self._matrices:
            yield name, self._matrices[name].forms(values, borrowed=borrowed)
        elif name == "embed":
            tensor = values.to(self.device, self.dtype, copy=not borrowed)
            yield name, tensor
            if self.config.tied:
                yield "head", self._head.forms(tensor, borrowed=True)
        else:
            yield name, values.to(self.device, self.dtype, copy=True)

    @torch.inference_mode()
    def adopt(self, new: Mapping[str, Tensor | MatrixForms]) -> list[object]:
        """Use these tensors from now on: large ones are taken over, small ones copied. Returns the replaced ones, to be
        freed on another thread than the engine's."""
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
        """Whether a matrix keeps its weight in another memory order."""
        return any(matrix.reorders for matrix in self._matrices.values())

    def large_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers with nearly all of the memory: ``release`` frees them, and ``install`` sets them again."""
        yield "embed", self._tensors["embed"]
        for name, matrix in self._matrices.items():
            if not (name == "head" and self.config.tied):
                yield name, matrix.values()

    def release(self) -> None:
        self._tensors["embed"] = self._tensors["embed"].new_empty(0)
        for matrix in self._matrices.values():
            matrix.release()

    def prefill(
        self, cache: KVCache, tokens: Tensor, shape: PrefillShape, last: Tensor, deltas: Deltas | None = None
    ) -> Tensor:
        """Compute ``tokens`` [batch, time] into the cache. Returns logits [n, vocab] float32 at the flat indices
        ``last`` [n]."""
        config, (batch, time) = self.config, tokens.shape
        groups = config.heads // config.kv_heads
        hidden = F.embedding(tokens.view(-1), self._tensors["embed"])
        angles = self._rotations[shape.offsets.view(-1)].unsqueeze(1)
        for layer, store in zip(self._layers, cache.layers, strict=True):
            queries, new = self._qkv(layer, hidden, angles, deltas)
            store[shape.rows, :, shape.positions] = new[shape.valid]
            if shape.mask is None:
                seen = new.view(batch, time, -1, config.head_dim).transpose(1, 2)
            else:
                seen = store[shape.first_row : shape.first_row + batch, :, : shape.width]
            keys, values = (seen.repeat_interleave(groups, dim=1) if groups > 1 else seen).chunk(2, dim=1)
            attended = F.scaled_dot_product_attention(
                queries.view(batch, time, config.heads, -1).transpose(1, 2),
                keys,
                values,
                attn_mask=shape.mask,
                is_causal=shape.mask is None,
            )
            hidden = self._residual(layer, hidden, attended.transpose(1, 2).reshape(batch * time, -1), deltas)
        return self._logits(hidden[last])

    def decode(
        self,
        cache: KVCache,
        tokens: Tensor,
        positions: Tensor,
        parts: Sequence[DecodePart],
        deltas: Deltas | None = None,
    ) -> Tensor:
        """Compute one token (``tokens`` and ``positions`` [batch]) of rows 0..batch-1, which ``parts`` divide in order.
        Returns logits [batch, vocab] float32."""
        hidden = F.embedding(tokens, self._tensors["embed"])
        angles = self._rotations[positions].unsqueeze(1)
        for layer, store in zip(self._layers, cache.layers, strict=True):
            queries, new = self._qkv(layer, hidden, angles, deltas)
            attended = [self._attend(part, store, queries, new) for part in parts]
            hidden = self._residual(layer, hidden, attended[0] if len(parts) == 1 else torch.cat(attended), deltas)
        return self._logits(hidden)

    def _attend(self, part: DecodePart, store: Tensor, queries: Tensor, new: Tensor) -> Tensor:
        """Write a part's new keys and values. Returns its attention output [rows, heads * head_dim]."""
        span = part.span
        own = slice(span.start, span.stop)
        if part.rows is None:
            store[own, :, span.width - 1] = new[own]
        else:
            store[part.rows, :, part.positions] = new[own]
        keys, values = store[own, :, : span.width].chunk(2, dim=1)
        grouped = queries[own].view(span.stop - span.start, self.config.kv_heads, -1, self.config.head_dim)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=part.mask).flatten(1)

    def _qkv(self, layer: DecoderLayer, hidden: Tensor, angles: Tensor, deltas: Deltas | None) -> tuple[Tensor, Tensor]:
        """Return queries [tokens, heads, head_dim], and keys with values [tokens, 2 * kv_heads, head_dim]. Queries and
        keys are normalized if the model does so, and their adjacent pairs are rotated in float32."""
        config = self.config
        normed = torch.rms_norm(hidden, (config.hidden_size,), layer.input_norm, config.norm_eps)
        qkv = layer.qkv(normed, deltas).view(hidden.shape[0], -1, config.head_dim)
        source = rotary = qkv[:, : config.heads + config.kv_heads]
        if layer.qk_norm is not None:
            source = torch.rms_norm(rotary, (config.head_dim,), None, config.norm_eps).mul_(layer.qk_norm)
        shape = (*rotary.shape[:-1], config.head_dim // 2, 2)
        if self.dtype == torch.float32:
            torch.mul(torch.view_as_complex(source.view(shape)), angles, out=torch.view_as_complex(rotary.view(shape)))
        else:
            pairs = torch.view_as_complex(source.float().view(shape))
            rotary.view(shape).copy_(torch.view_as_real(pairs * angles))
        return qkv[:, : config.heads], qkv[:, config.heads :]

    def _residual(self, layer: DecoderLayer, hidden: Tensor, attended: Tensor, deltas: Deltas | None) -> Tensor:
        """Return the residual stream with the attention's output projection and the gated MLP added."""
        hidden = layer.output.add_to(hidden, attended, deltas)
        normed = torch.rms_norm(hidden, (self.config.hidden_size,), layer.post_norm, self.config.norm_eps)
        gate, up = layer.gate_up(normed, deltas).chunk(2, dim=-1)
        return layer.down.add_to(hidden, F.silu(gate).mul_(up), deltas)

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = torch.rms_norm(hidden, (self.config.hidden_size,), self._tensors["norm"], self.config.norm_eps)
        return self._head.project(normed).float()
