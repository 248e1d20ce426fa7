"""Any other causal language model, computed by transformers: the fallback of architectures the own decoder lacks.

One sequence at a time, each with the cache its architecture wants, so that sliding windows, mixed layers and the like
are right without being known here. Slower than the own decoder by design; correct is what it is for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from areal.errors import ArealError
from areal.services.inference.engines.embedded.finite import is_finite
from areal.services.inference.engines.embedded.lora import Adapter
from areal.services.inference.engines.embedded.runner import Adapters
from areal.services.inference.engines.embedded.spans import Span
from areal.services.inference.engines.embedded.spill import Spill, return_freed_memory
from areal.services.inference.engines.embedded.steps import Copy, Move
from areal.services.weight_update.arrival import Arrival

_DEFAULT_POSITIONS = 4096  # where a configuration sets no bound


class TransformersRunner:
    keeps_prefixes = False

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self._dtype = dtype
        self._model = _load(folder, dtype).to(device)
        text = self._model.config.get_text_config()
        self.vocab_size = int(text.vocab_size)
        self.max_positions = int(getattr(text, "max_position_embeddings", None) or _DEFAULT_POSITIONS)
        self._caches: list[Any] = []
        self._spill: Spill | None = None
        self._last_only = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        size = sum(parameter.numel() for parameter in self._model.parameters())
        name = type(self._model).__name__
        self.description = f"transformers {name}, {size} parameters, {str(dtype).removeprefix('torch.')} on {device}"

    def position_bytes(self) -> int:
        text = self._model.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return int(text.num_hidden_layers * 2 * heads * dim * self._dtype.itemsize)

    def reserve(self, rows: int, width: int) -> None:
        self._caches += [None] * (rows - len(self._caches))

    def copy(self, copy: Copy) -> None:
        # Without kept prefixes there are only moves of a row that is left, so the cache itself can change hands.
        assert isinstance(copy, Move)
        self._caches[copy.target], self._caches[copy.source] = self._caches[copy.source], None

    def prefill(
        self, tokens: Sequence[Sequence[int]], starts: Sequence[int], first_row: int, adapters: Adapters = ()
    ) -> Tensor:
        logits = []
        for offset, (new, start) in enumerate(zip(tokens, starts, strict=True)):
            row = first_row + offset
            if start == 0:
                self._caches[row] = None
            logits.append(self._forward(row, torch.tensor([list(new)], device=self.device), start))
        return torch.stack(logits)

    def decode(self, tokens: Tensor, positions: Tensor, spans: Sequence[Span], adapters: Adapters = ()) -> Tensor:
        starts = positions.tolist()
        return torch.stack([self._forward(row, tokens[row].view(1, 1), start) for row, start in enumerate(starts)])

    @torch.inference_mode()
    def _forward(self, row: int, tokens: Tensor, start: int) -> Tensor:
        """Logits [vocab] after the last of ``tokens`` [1, time], which stand from position ``start`` on."""
        options: dict[str, Any] = {"logits_to_keep": 1} if self._last_only else {}
        mask = torch.ones(1, start + tokens.shape[1], dtype=torch.int64, device=self.device)
        output = self._model(
            input_ids=tokens, attention_mask=mask, past_key_values=self._caches[row], use_cache=True, **options
        )
        self._caches[row] = output.past_key_values
        logits: Tensor = output.logits[0, -1, : self.vocab_size].float()
        return logits

    def prepare(self, folder: Path, arrival: Arrival | None = None) -> Callable[[], object]:
        if arrival is not None:
            arrival.wait_all()
        new = _load(folder, self._dtype, like=self._model).state_dict()
        for name, current in self._model.state_dict().items():
            if name not in new or new[name].shape != current.shape:
                raise ArealError(f"{folder}: {name} is missing or of another shape")
            if not is_finite(new[name]):
                raise ArealError(f"{folder}: {name} holds values that are not finite")
        return lambda: self._install(new)

    def forget(self) -> None:
        """Nothing is held."""

    def read_adapter(self, name: str, folder: Path) -> Adapter:
        raise ArealError("LoRA adapters are computed by the own decoder only, which does not know this architecture")

    @torch.inference_mode()
    def release(self) -> None:
        spill = Spill(self.device)
        try:
            for name, parameter in self._model.named_parameters():
                spill.put(name, parameter.data)
        except ArealError:
            spill.close()
            raise
        self._spill = spill
        for parameter in self._model.parameters():
            parameter.data = parameter.data.new_empty(0)
        self._caches = []
        return_freed_memory(self.device)

    @torch.inference_mode()
    def restore(self) -> None:
        assert self._spill is not None
        parameters = dict(self._model.named_parameters())
        for name, values in self._spill.tensors():
            parameters[name].data = values.to(self.device, copy=True)
        self._spill.close()
        self._spill = None

    @torch.inference_mode()
    def _install(self, new: dict[str, Tensor]) -> None:
        for name, current in self._model.state_dict().items():
            current.copy_(new[name])


def _load(path: Path, dtype: torch.dtype, like: Any = None) -> Any:
    """The model in evaluation mode; ``like`` another, whose weights may come as one file. Raises ArealError unless it
    is all there and nothing else."""
    library: Any = transformers  # its annotations say less than it does
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    options = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
    try:
        if like is not None and path.is_file():
            tensors = load(path.read_bytes())  # a copy: the file is written again
            model, report = type(like).from_pretrained(None, config=like.config, state_dict=tensors, **options)
        elif path.is_dir():
            config = None if like is None else like.config
            model, report = library.AutoModelForCausalLM.from_pretrained(path, config=config, **options)
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
