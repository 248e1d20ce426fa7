"""The fallback runner: transformers computes causal language models that areal's own decoder does not support.

It computes one sequence at a time with the cache of its architecture. Sliding windows, mixed layers and the like are
therefore correct without support here, but slower. A model whose cache gives other results than a plain forward pass is
refused when it is loaded.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from areal.dataset.vision import VISION_MODELS, Pixels, embeddings, image_features
from areal.errors import ArealError
from areal.services.inference.engines.embedded.decoder import RowSpan
from areal.services.inference.engines.embedded.linear import Adapter
from areal.services.inference.engines.embedded.model_folder import is_finite
from areal.services.inference.engines.embedded.runner import Adapters, PartImages, WeightOffload, return_freed_memory
from areal.services.inference.engines.embedded.scheduler import Copy, Move
from areal.services.weight_transfer.memory import TransferProgress

_DEFAULT_POSITIONS = 4096  # if the configuration has none
_CACHES = ("past_key_values", "cache_params", "state")  # the cache's name, by architecture
_CHECKED = (5, 4, 8)  # tokens of the check: two parts of a prompt, and a decoded answer
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}  # nats, over the likeliest tokens
_LIKELIEST = 10
# These rotations depend on the sequence's present length, so that its cached beginning would have to change.
_ROPES_BY_LENGTH = ("longrope", "dynamic")
_logger = logging.getLogger(__name__)


class TransformersRunner:
    keeps_prefixes = False

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self._dtype = dtype
        self.model = _load(folder, dtype).to(device)
        text = self.model.config.get_text_config()
        self.vocab_size = int(text.vocab_size)
        self.max_positions = _max_positions(text)
        self._caches: list[Any] = []
        self._vectors: WeakKeyDictionary[Pixels, Tensor] = WeakKeyDictionary()  # by the present weights
        self._offload: WeightOffload | None = None
        self._parameters = inspect.signature(self.model.forward).parameters
        self._cache_name = next((name for name in _CACHES if name in self._parameters), _CACHES[0])
        self._one_by_one = False  # whether later parts of a prompt are computed token by token
        self._check()
        size = sum(parameter.numel() for parameter in self.model.parameters())
        name = type(self.model).__name__
        self.description = f"transformers {name}, {size} parameters, {str(dtype).removeprefix('torch.')} on {device}"

    def position_bytes(self) -> int:
        text = self.model.config.get_text_config()
        all_heads = getattr(text, "num_attention_heads", None)
        if not isinstance(all_heads, int):  # a recurrent model, whose state does not grow
            return int(text.num_hidden_layers * 2 * text.hidden_size * self._dtype.itemsize)
        heads = getattr(text, "num_key_value_heads", None)
        heads = heads if isinstance(heads, int) else all_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // all_heads
        return int(text.num_hidden_layers * 2 * heads * dim * self._dtype.itemsize)

    def reserve(self, rows: int, width: int) -> None:
        self._caches += [None] * (rows - len(self._caches))

    def copy(self, copy: Copy) -> None:
        # Without prefix copies there are only moves from rows that are vacated, so the cache object is moved.
        assert isinstance(copy, Move)
        self._caches[copy.target], self._caches[copy.source] = self._caches[copy.source], None

    def prefill(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        first_row: int,
        adapters: Adapters = (),
        images: Sequence[PartImages | None] = (),
    ) -> Tensor:
        logits = []
        for offset, (new, start) in enumerate(zip(tokens, starts, strict=True)):
            row, shown = first_row + offset, images[offset] if images else None
            if start == 0:
                self._caches[row] = None
            ids = torch.tensor([list(new)], device=self.device)
            parts = torch.split(ids, 1, dim=1) if start and self._one_by_one else (ids,)
            for place, part in enumerate(parts):
                last = self._forward(row, part, start + place, shown)
                if shown is not None:
                    shown = shown.after(part[0].tolist())
            logits.append(last)
        return torch.stack(logits)

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], adapter: Adapter | None = None) -> Iterator[Tensor]:
        output = self.model(input_ids=torch.tensor([list(tokens)], device=self.device), use_cache=False)
        yield output.logits[0, :, : self.vocab_size].float()

    def decode(self, tokens: Tensor, positions: Tensor, spans: Sequence[RowSpan], adapters: Adapters = ()) -> Tensor:
        starts = positions.tolist()
        return torch.stack([self._forward(row, tokens[row].view(1, 1), start) for row, start in enumerate(starts)])

    @torch.inference_mode()
    def _forward(self, row: int, tokens: Tensor, start: int, images: PartImages | None = None) -> Tensor:
        """Return logits [vocab] after the last of ``tokens`` [1, time], whose first position is ``start``."""
        end = start + tokens.shape[1]
        options: dict[str, object] = {"logits_to_keep": 1} if "logits_to_keep" in self._parameters else {}
        if "position_ids" in self._parameters:
            options["position_ids"] = torch.arange(start, end, device=self.device).unsqueeze(0)
        if self._cache_name == "past_key_values":  # recurrent states take no mask
            options["attention_mask"] = torch.ones(1, end, dtype=torch.int64, device=self.device)
        options[self._cache_name] = self._caches[row]
        inputs = {"input_ids": tokens} if images is None else {"inputs_embeds": self._embedded(tokens, images)}
        output = self.model(**inputs, use_cache=True, **options)
        self._caches[row] = output[self._cache_name]
        return output.logits[0, -1, : self.vocab_size].float()

    def _embedded(self, tokens: Tensor, images: PartImages) -> Tensor:
        """Return the inputs [1, time, hidden size] for a part of a prompt with images."""
        pixels = images.pixels
        if pixels not in self._vectors:
            self._vectors[pixels] = image_features(self.model, [pixels], self.device)[0]
        left = self._vectors[pixels][images.used :]
        count = min(len(left), int((tokens == pixels.token_id).sum()))
        return embeddings(self.model, tokens, [left[:count]], pixels.token_id)

    def _check(self) -> None:
        """Compare decoding with the cache with a plain forward pass. Raises ArealError naming the architecture."""
        name, tolerance = type(self.model).__name__, _TOLERANCES[self._dtype]
        gap, reason = math.inf, ""
        for one_by_one in (False, True):
            self._one_by_one, reason = one_by_one, ""
            try:
                gap = self._largest_gap()
            except _CANNOT as error:
                reason = f": {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
                continue
            finally:
                self._caches.clear()
            if gap <= tolerance:  # NaN is not
                return
        fault = f"decoding with its cache fails{reason}"
        if not reason:
            fault = (
                f"its tokens decoded with the cache have log-probabilities {gap:.3g} nats off those of a plain forward "
                f"pass (tolerance {tolerance:g}): it would sample from another model"
            )
        raise ArealError(
            f"{name} cannot be served: {fault}",
            hint="another release of transformers may differ; vllm or sglang may have this architecture",
        )

    @torch.inference_mode()
    def _largest_gap(self) -> float:
        """Return the largest gap in nats over the likeliest tokens, at each position after the first part."""
        first, second = _CHECKED[:2]
        ids = [(7 * place + 3) % self.vocab_size for place in range(min(sum(_CHECKED), self.max_positions))]
        self.reserve(1, len(ids))
        begun = [self.prefill([ids[:first]], [0], 0)[0], self.prefill([ids[first : first + second]], [first], 0)[0]]
        for place in range(first + second, len(ids)):
            begun.append(self._forward(0, torch.tensor([[ids[place]]], device=self.device), place))
        decoded = torch.stack(begun).log_softmax(-1)
        whole = self.model(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0]
        plain = whole[:, : self.vocab_size].float().log_softmax(-1)[[first - 1, *range(first + second - 1, len(ids))]]
        likeliest = plain.topk(min(_LIKELIEST, self.vocab_size), dim=-1).indices
        return float((decoded - plain).gather(1, likeliest).abs().max())

    def prepare(self, folder: Path, arrival: TransferProgress | None = None) -> Callable[[], object]:
        if arrival is not None:
            arrival.wait_all()
        new = _load(folder, self._dtype, like=self.model).state_dict()
        for name, current in self.model.state_dict().items():
            if name not in new or new[name].shape != current.shape:
                raise ArealError(f"{folder}: {name} is missing or of another shape")
            if not is_finite(new[name]):
                raise ArealError(f"{folder}: {name} holds values that are not finite")

        @torch.inference_mode()
        def install() -> None:
            for name, current in self.model.state_dict().items():
                current.copy_(new[name])
            self._vectors.clear()

        return install

    def forget(self) -> None:
        """Do nothing: sources are not kept."""

    def read_adapter(self, name: str, folder: Path) -> Adapter:
        raise ArealError("LoRA adapters are computed by the own decoder only, which does not know this architecture")

    @torch.inference_mode()
    def release(self) -> None:
        weights = ((name, parameter.data) for name, parameter in self.model.named_parameters())
        self._offload = WeightOffload(weights, self.device)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.new_empty(0)
        self._caches = []
        self._vectors.clear()
        return_freed_memory(self.device)

    @torch.inference_mode()
    def restore(self) -> None:
        assert self._offload is not None
        parameters = dict(self.model.named_parameters())
        for name, values in self._offload.tensors():
            parameters[name].data = values.to(self.device, copy=True)
        self._offload.close()
        self._offload = None


# Errors of models that cannot decode with their cache, or lack a kernel for it.
_CANNOT = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def _max_positions(config: Any) -> int:
    """Return the longest sequence, within the length at which its rotation would change."""
    most = getattr(config, "max_position_embeddings", None)
    longest = most if isinstance(most, int) and most > 0 else _DEFAULT_POSITIONS
    rope = getattr(config, "rope_parameters", None) or {}
    for each in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if each.get("rope_type") in _ROPES_BY_LENGTH:
            original = each.get("original_max_position_embeddings") or longest
            if original < longest:
                kind = each["rope_type"]
                _logger.warning("%s rotates longer sequences differently: up to %d tokens are served", kind, original)
                longest = int(original)
    return longest


def _load(path: Path, dtype: torch.dtype, like: Any = None) -> Any:
    """Return the model in evaluation mode. ``like``: another model of the same configuration, for weights in one file.
    Raises ArealError for missing, additional or mismatched tensors."""
    library: Any = transformers  # its annotations are incomplete
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    options = {"dtype": dtype, "local_files_only": True, "output_loading_info": True, "trust_remote_code": False}
    try:
        if like is not None and path.is_file():
            tensors = load(path.read_bytes())  # a copy: the file is written again
            model, report = type(like).from_pretrained(None, config=like.config, state_dict=tensors, **options)
        elif path.is_dir():
            config = None if like is None else like.config
            about = library.AutoConfig.from_pretrained(path, trust_remote_code=False) if config is None else config
            sees = about.model_type in VISION_MODELS
            loader = library.AutoModelForImageTextToText if sees else library.AutoModelForCausalLM
            model, report = loader.from_pretrained(path, config=about, **options)
        else:
            raise ArealError(f"model folder {path} does not exist")
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ArealError(f"transformers cannot load {path}: {reason}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise ArealError(
                f"{path} does not fit its config.json: {kind.replace('_', ' ')} {sorted(report[kind])[:3]}"
            )
    model.eval()
    return model
