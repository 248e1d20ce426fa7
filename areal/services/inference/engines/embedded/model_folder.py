"""A model folder: configuration, end tokens, tensors, and the decoder's buffer that each tensor fills.

``parse`` raises ``UnsupportedArchitecture`` for a part that areal's own decoder lacks, so that the caller can fall back
to transformers. Both generations of field names are read: ``rope_theta`` + ``rope_scaling`` + ``torch_dtype`` and
``rope_parameters`` + ``dtype``.

A missing tensor, a wrong shape or a truncated file is found from headers, before torch is imported or anything loaded.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.dataclasses import dataclass, field
from areal.errors import ArealError
from areal.files import parse_json

if TYPE_CHECKING:
    from torch import Tensor

    from areal.services.weight_transfer.memory import MemoryLease

_QKV_BIAS = {"llama": False, "mistral": False, "qwen2": True, "qwen3": False}  # if attention_bias is not given
_ROPE_TYPES = ("default", "linear", "llama3")
INDEX = "model.safetensors.index.json"
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_MOST_MAPPED = 2  # a trainer alternates between two files


class UnsupportedArchitecture(Exception):
    """areal's own decoder does not support this architecture; the message names the missing part."""


@dataclass(frozen=True)
class Rope:
    """The rotary embedding: its base, and the type of its scaling with the parameters of that type."""

    theta: float
    type: str = "default"
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-like decoder. ``dtype`` is the checkpoint's, as a torch name (``bfloat16``)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: Rope
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str


def read_config(folder: Path) -> dict[str, object]:
    """Return the content of ``folder/config.json``. Raises ArealError if it is missing or not a JSON object."""
    if not folder.is_dir():
        raise ArealError(f"model folder {folder} does not exist", hint="give the folder that holds config.json")
    path = folder / "config.json"
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArealError(f"{folder} is not a model folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ArealError(f"cannot read {path}: {error}") from error
    if not isinstance(raw, dict):
        raise ArealError(f"{path} is not a JSON object")
    return raw


def parse(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the decoder's shape. Raises UnsupportedArchitecture for a model that only transformers can run, and
    ArealError for a missing field."""
    model_type = raw.get("model_type")
    if model_type not in _QKV_BIAS:
        raise UnsupportedArchitecture(f"model_type {model_type!r}")
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedArchitecture(f"hidden_act {raw['hidden_act']!r}")
    if raw.get("quantization_config"):
        raise UnsupportedArchitecture("quantized weights")
    if raw.get("use_sliding_window", model_type == "mistral") and raw.get("sliding_window"):
        raise UnsupportedArchitecture("sliding window attention")
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        bias = bool(raw.get("attention_bias", _QKV_BIAS[model_type]))
        return ModelConfig(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            rope=_rope(raw),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=True if model_type == "qwen2" else bias,
            output_bias=False if model_type == "qwen2" else bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=model_type == "qwen3",
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )
    except KeyError as missing:
        raise ArealError(f"config.json of this {model_type} model lacks {missing}") from None


def _rope(raw: Mapping[str, Any]) -> Rope:
    """Read ``rope_parameters``, or the older ``rope_theta`` beside ``rope_scaling``."""
    given: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if raw.get("partial_rotary_factor", 1.0) != 1.0 or given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedArchitecture("partial rotary embedding")
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in _ROPE_TYPES:
        raise UnsupportedArchitecture(f"rope scaling {kind!r}")
    theta = given.get("rope_theta") or raw.get("rope_theta") or 10000.0
    numbers = {name: float(value) for name, value in given.items() if isinstance(value, int | float)}
    return Rope(theta=float(theta), type=kind, parameters=numbers)


def end_tokens(folder: Path, config: Mapping[str, object]) -> frozenset[int]:
    """Return the ids of all end tokens in config.json, generation_config.json and the tokenizer's files: instruction
    models often name the end of a turn in one file and the end of the text in another."""
    found = _ids(config.get("eos_token_id")) | _ids(_read(folder / "generation_config.json").get("eos_token_id"))
    text = _read(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(text, dict):  # a serialized AddedToken
        text = text.get("content")
    for token in _read(folder / "tokenizer.json").get("added_tokens") or []:
        if text is not None and token.get("content") == text:
            found |= _ids(token.get("id"))
    return frozenset(found)


def _ids(value: Any) -> set[int]:
    if isinstance(value, int):
        return {value}
    return {each for each in value if isinstance(each, int)} if isinstance(value, list) else set()


def _read(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a safetensors file. ``dtype``: the format's name (F32, BF16, ...). ``size``: bytes."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    size: int


@dataclass(frozen=True)
class TensorReader:
    """Reads tensors by name, mapped from their file without a copy. ``leases``: on files in memory, which keep a writer
    from changing them. ``in_memory``: all files are in memory."""

    read: Callable[[str], Tensor]
    leases: tuple[MemoryLease, ...]
    in_memory: bool  # whether all files are in memory

    def end(self) -> None:
        for lease in self.leases:
            lease.end()


@dataclass(frozen=True)
class WeightFiles:
    folder: Path
    entries: Mapping[str, TensorEntry]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.size for entry in self.entries.values())

    @contextmanager
    def reader(self, maps: MappedWeights | None = None) -> Iterator[TensorReader]:
        """Open the files for reading; ``maps`` maps those in memory. Their leases outlive the block unless it fails.
        Raises ArealError for a file that is being written."""
        from safetensors import safe_open

        with ExitStack() as stack, ExitStack() as failing:
            opened: dict[Path, Callable[[str], Tensor]] = {}
            leases: list[MemoryLease] = []
            for file in {entry.file for entry in self.entries.values()}:
                held = maps.open(file) if maps is not None else None
                if held is None:
                    opened[file] = stack.enter_context(safe_open(file, framework="pt")).get_tensor
                else:
                    opened[file] = held[0].__getitem__
                    leases.append(held[1])
                    failing.callback(held[1].end)
            in_memory = len(leases) == len(opened)
            yield TensorReader(lambda name: opened[self.entries[name].file](name), tuple(leases), in_memory)
            failing.pop_all()


def open_checkpoint(folder: Path) -> WeightFiles:
    """Read the headers of all files in ``folder``, which may be a file. Raises ArealError naming a file that is
    missing, truncated or not safetensors."""
    from safetensors import SafetensorError, safe_open

    entries: dict[str, TensorEntry] = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    if name in entries:
                        both = f"{entries[name].file.name} and in {file.name}"
                        raise ArealError(f"tensor {name} is both in {both} of {folder}")
                    piece = tensors.get_slice(name)
                    shape, dtype = tuple(piece.get_shape()), str(piece.get_dtype())
                    entries[name] = TensorEntry(file, shape, dtype, math.prod(shape) * _WIDTHS.get(dtype, 1))
        except (SafetensorError, OSError) as error:
            raise ArealError(f"cannot read {file}: {error}") from error
    return WeightFiles(folder, entries)


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ArealError(f"cannot read {index}: {error!r}") from error
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ArealError(f"{folder} holds no weights: no *.safetensors file", hint="save it with safe_serialization")
    for file in files:
        if not file.is_file():
            raise ArealError(f"{index.name} names {file.name}, which {folder} does not hold")
    return files


class MappedWeights:
    """Mappings of weights in a trainer's memory, used by one thread at a time.

    A file is mapped once, because the page faults of a new mapping cost twice as much as a copy. A mapping is kept
    until ``forget``, or until others replace it. It keeps the memory alive, even if the trainer is gone.

    If matrices need no reordering, the engine computes with mapped memory. Each file is therefore opened with a lease,
    which its reader ends after the last use; until then no one writes to the file. Mappings are read-only, so that a
    write by mistake is a SIGSEGV, and does not change what other engines serve.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[int, int, bytes], dict[str, Tensor]] = OrderedDict()

    def open(self, file: Path) -> tuple[Mapping[str, Tensor], MemoryLease] | None:
        """Return the tensors by name, and the lease. None for a file on a disk, where inode numbers are reused. Raises
        ArealError while the file is written."""
        from areal.services.weight_transfer.memory import MemoryLease, header_of, is_memory_file, views

        if not is_memory_file(file):
            return None
        try:
            lease = MemoryLease(file)
        except BlockingIOError as error:
            raise ArealError(f"{file} is being written") from error
        about = os.fstat(lease.fileno)
        with os.fdopen(os.dup(lease.fileno), "rb") as opened:
            header = header_of(opened)
        key = (about.st_dev, about.st_ino, header)
        if key not in self._held:
            mapping = mmap.mmap(lease.fileno, about.st_size, access=mmap.ACCESS_READ)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                self._held[key] = views(header, mapping)
        self._held.move_to_end(key)
        while len(self._held) > _MOST_MAPPED:
            self._held.popitem(last=False)
        return self._held[key], lease

    def forget(self) -> None:
        self._held.clear()


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values are finite. Their minimum and maximum are checked, which is faster than
    torch.isfinite."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    low, high = tensor.aminmax()
    return bool(low.isfinite()) and bool(high.isfinite())


class Form(Enum):
    PLAIN = auto()
    ROTARY = auto()  # rows are heads of rotary pairs, to be interleaved
    ROTARY_EACH = auto()  # one head's vector, interleaved and repeated for every row of the target


@dataclass(frozen=True)
class BufferSlice:
    """A tensor of a checkpoint: ``source`` [shape] fills rows ``start:stop`` of the buffer ``target``."""

    source: str
    shape: tuple[int, ...]
    target: str
    start: int
    stop: int
    form: Form = Form.PLAIN


def buffer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every buffer of the decoder by name. A tied head has no buffer."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in buffer_slices(config):
        rows = piece.stop if piece.target not in shapes else max(piece.stop, shapes[piece.target][0])
        shapes[piece.target] = (rows, *(piece.shape if piece.form is Form.ROTARY_EACH else piece.shape[1:]))
    return shapes


def buffer_slices(config: ModelConfig) -> tuple[BufferSlice, ...]:
    """Return every tensor that the decoder needs, with its shape and its place in a buffer.

    The decoder fuses q, k and v into one matrix, gate and up into another, and stores each rotary pair (i, i + D/2) of
    a head as neighbors (2i, 2i + 1), so that a rotation is one complex product. Scores are unchanged, because q and k
    are permuted alike. No other code knows the tensor names of a checkpoint.
    """
    pieces: list[BufferSlice] = []

    def add(target: str, *sources: tuple[str, int], inner: int | None, form: Form = Form.PLAIN) -> None:
        """Add a tensor. ``sources``: name and rows of each, in order. ``inner``: the columns of a matrix."""
        start = 0
        for source, rows in sources:
            rotates = form is not Form.PLAIN and ".v_proj." not in source
            shape = (rows,) if inner is None else (rows, inner)
            pieces.append(BufferSlice(source, shape, target, start, start + rows, form if rotates else Form.PLAIN))
            start += rows

    def add_linear(target: str, *sources: tuple[str, int], inner: int, bias: bool, form: Form = Form.PLAIN) -> None:
        add(target, *((f"{name}.weight", rows) for name, rows in sources), inner=inner, form=form)
        if bias:
            add(f"{target}_bias", *((f"{name}.bias", rows) for name, rows in sources), inner=None, form=form)

    vocab, hidden, mlp, dim = config.vocab_size, config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.heads * dim, config.kv_heads * dim
    add("embed", ("model.embed_tokens.weight", vocab), inner=hidden)
    add("norm", ("model.norm.weight", hidden), inner=None)
    if not config.tied:
        add("head", ("lm_head.weight", vocab), inner=hidden)
    for layer in range(config.layers):
        at, of = f"{layer}.", f"model.layers.{layer}."
        heads = ((f"{of}self_attn.q_proj", queries), (f"{of}self_attn.k_proj", keys), (f"{of}self_attn.v_proj", keys))
        add(at + "input_norm", (of + "input_layernorm.weight", hidden), inner=None)
        add_linear(at + "qkv", *heads, inner=hidden, bias=config.qkv_bias, form=Form.ROTARY)
        add_linear(at + "output", (of + "self_attn.o_proj", hidden), inner=queries, bias=config.output_bias)
        add(at + "post_norm", (of + "post_attention_layernorm.weight", hidden), inner=None)
        gated = ((of + "mlp.gate_proj", mlp), (of + "mlp.up_proj", mlp))
        add_linear(at + "gate_up", *gated, inner=hidden, bias=config.mlp_bias)
        add_linear(at + "down", (of + "mlp.down_proj", hidden), inner=mlp, bias=config.mlp_bias)
        if config.qk_norm:
            q_norm, k_norm, target = of + "self_attn.q_norm.weight", of + "self_attn.k_norm.weight", at + "qk_norm"
            rows = config.heads + config.kv_heads
            pieces.append(BufferSlice(q_norm, (dim,), target, 0, config.heads, Form.ROTARY_EACH))
            pieces.append(BufferSlice(k_norm, (dim,), target, config.heads, rows, Form.ROTARY_EACH))
    return tuple(pieces)


def check(pieces: Sequence[BufferSlice], checkpoint: WeightFiles, *, tied: bool) -> None:
    """Raise ArealError unless the checkpoint has exactly the layout's tensors, in their shapes.

    Additional tensors are refused too, because they belong to another model, of which a part would be loaded silently.
    """
    shapes = {name: entry.shape for name, entry in checkpoint.entries.items()}
    missing = [piece.source for piece in pieces if piece.source not in shapes]
    if missing:
        raise ArealError(f"{checkpoint.folder} lacks {_some(missing)}")
    wrong = [
        f"{piece.source} is {list(shapes[piece.source])}, config.json makes it {list(piece.shape)}"
        for piece in pieces
        if shapes[piece.source] != piece.shape
    ]
    if wrong:
        raise ArealError(f"{checkpoint.folder}: {_some(wrong)}")
    extra = sorted(set(shapes) - {piece.source for piece in pieces} - ({"lm_head.weight"} if tied else set()))
    extra = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]
    if extra:
        raise ArealError(f"{checkpoint.folder} holds tensors this model does not have: {_some(extra)}")


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more
