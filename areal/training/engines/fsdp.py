"""The FSDP2 engine: Hugging Face models, sharded by ``torch.distributed.fsdp.fully_shard``, from 1 to N ranks.

FSDP averages gradients over data-parallel ranks, so ``_backward`` multiplies by their number. Checkpoints are written
by torch.distributed.checkpoint as one shard for each rank, which any number of ranks can read."""

from __future__ import annotations

import contextlib
import copy
import errno
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from areal.api.engine_api import CheckpointUnreadable, LossFn, TokenOutputs, Update, WeightFn
from areal.errors import UsageFault
from areal.training.algorithms.losses import token_outputs
from areal.training.batches import Batch, PackedRows, pack, select, target_mask, to_device
from areal.training.engines import configured_settings
from areal.training.engines.base import EngineBase, Parts, share_of
from areal.training.engines.head import Targets, install_head
from areal.training.engines.huggingface import (
    base_model,
    checkpoint_tensors,
    clip_gradients,
    load_model,
    make_optimizer,
    prepare_packing,
    set_training,
    shard_model,
)
from areal.training.engines.vision import TrainedImages, is_vision_model
from areal.training.ranks import Ranks

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig

# On a CPU several small micro-batches are as fast as a large one, and group rows of similar length with less padding.
_CPU_TOKENS = 2048

_COUNTERS = "engine"
_TORCH_WRITERS = ("inline_container", "PytorchStreamWriter")


class FSDPEngine(EngineBase):
    def __init__(self, config: TrainEngineConfig, ranks: Ranks, total_steps: int = 1) -> None:
        super().__init__(config, ranks, total_steps)
        if ranks.device.type == "cpu":
            self.default_tokens = _CPU_TOKENS
        model = load_model(config, ranks)
        self._images = TrainedImages(model, config.path) if is_vision_model(model) else None
        if self._images is not None and ranks.group is not None:
            raise UsageFault(
                f"fsdp trains the vision-language model {config.path} on one rank, and there are {ranks.size}",
                hint="backend: fsdp:d1",
            )
        self._packs = self._images is None and prepare_packing(model)
        # None: the model computes the logits of all tokens.
        self._head = None if config.is_critic else install_head(model)
        self.model = shard_model(model, config, ranks)
        if config.optimizer is not None:
            self.optimizer = make_optimizer(self.model, config.optimizer)
        self._restore_mode()

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    def see_images(self, images: Mapping[int, Sequence[bytes]], batch: Mapping[str, Tensor]) -> None:
        if self._images is not None:
            self._images.see(images, batch)
        elif images:
            raise UsageFault(f"{self.config.path} is trained on prompts with images, and has no vision tower")

    def outputs(self, batch: Mapping[str, Tensor], packed: PackedRows | None = None) -> TokenOutputs:
        """Return the outputs of ``batch``; ``packed``: its rows, packed. Rows that are not packed need no attention
        mask: a causal model never attends to the padding on the right, and attention is several times as fast without
        one."""
        if self._images is not None:
            self._images.check(batch)
        if self.config.is_critic:
            values = self._run(batch, packed)
            return TokenOutputs.of_critic((packed.unpacked(values) if packed else values)[..., 0].float())
        if self._head is None:
            logits = self._run(batch, packed)
            return token_outputs(packed.unpacked(logits) if packed else logits, batch)
        wanted = target_mask(batch)
        rows, columns = wanted.nonzero(as_tuple=True)
        places = packed.places[rows, columns - 1] if packed else rows * wanted.shape[1] + columns - 1
        temperatures = batch.get("token_temperatures")
        divisors = None if temperatures is None else temperatures[rows, columns].float()
        self._head.targets = Targets(places, batch["input_ids"][rows, columns], divisors)
        try:
            found = self._run(batch, packed)
        finally:
            self._head.targets = None
        whole = torch.zeros(*wanted.shape, 2, dtype=found.dtype, device=found.device).index_put((rows, columns), found)
        return TokenOutputs.of_policy(whole[..., 0], whole[..., 1])

    def _run(self, batch: Mapping[str, Tensor], packed: PackedRows | None) -> Tensor:
        """Return the output of the model's head for every computed token."""
        with self._precision():
            if self._images is not None and "images" in batch:
                return self.model(inputs_embeds=self._images.embedded(self.model, batch), use_cache=False).logits
            if packed is None:
                return self.model(input_ids=batch["input_ids"], use_cache=False).logits
            inputs = {"input_ids": packed.input_ids, "position_ids": packed.positions, "packed": packed}
            return self.model(**inputs, use_cache=False).logits

    def _micro(self, batch: Mapping[str, Tensor], part: Sequence[int]) -> tuple[Batch, PackedRows | None]:
        """Return the rows ``part`` of the batch, on the rank's device."""
        chosen, device = select(batch, part), self.ranks.device
        rows = pack(chosen, last=self.config.is_critic) if self._packs else None
        return to_device(chosen, device), rows.to(device) if rows is not None else None

    def _results(
        self, batch: Mapping[str, Tensor], parts: Parts, of: Callable[[TokenOutputs, Batch], Tensor]
    ) -> Iterator[Tensor]:
        for part, _ in parts:
            micro, packed = self._micro(batch, part)
            yield of(self.outputs(micro, packed), micro)

    @torch.no_grad()
    def next_token_logprobs(self, input_ids: Tensor) -> Tensor:
        ids = input_ids[None].to(self.ranks.device)
        return torch.log_softmax(self._run({"input_ids": ids}, None)[0, -1].float(), -1).cpu()

    def train_batch(self, batch: Mapping[str, Tensor], loss_fn: LossFn, loss_weight_fn: WeightFn) -> Update:
        settings, rate = self._schedule()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        micros = [(*self._micro(batch, part), real) for part, real in self._micro_batches(batch)]
        shares = self._shares([(micro, real) for micro, _, real in micros], loss_weight_fn)
        losses = [
            self._backward(micro, packed, loss_fn, share, last=number == len(micros) - 1)
            for number, ((micro, packed, _), share) in enumerate(zip(micros, shares, strict=True))
        ]
        norm = float(clip_gradients(self.optimizer, settings.gradient_clipping, self.ranks.group))
        loss = float(self.ranks.all_sum(torch.stack(losses).sum()))
        self._check_finite(loss, norm)
        self.optimizer.step()
        self.steps += 1
        return Update(loss, norm, rate, len(micros))

    def _backward(
        self, micro: Batch, packed: PackedRows | None, loss_fn: LossFn, share: Tensor, *, last: bool
    ) -> Tensor:
        """Add the micro-batch's gradient, and return its part of the loss. A share of 0 still runs both passes, because
        the other ranks' collectives wait for them."""
        if self.ranks.group is not None:  # gradients are reduced once, with the last micro-batch
            self.model.set_requires_gradient_sync(last)
        part = share_of(loss_fn(self.outputs(micro, packed), micro), share)
        (part * self.ranks.data_size).float().backward()  # type: ignore[no-untyped-call]
        return part.detach()

    def named_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        model: Any = base_model(self.model)
        tied = bool(getattr(model.config, "tie_word_embeddings", False))
        merged = _merged_adapters(model) if self.config.use_lora else {}
        for name, tensor in model.state_dict().items():
            plain = name.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")
            if ".lora_" in name or ".original_module." in name or (tied and plain == "lm_head.weight"):
                continue
            whole = _gathered(tensor)
            if plain in merged:
                whole = whole + merged[plain].to(whole.dtype)
            for saved, part in checkpoint_tensors(model, plain, whole.detach()):
                yield saved, part.to(dtype) if dtype is not None else part

    def _saved_configs(self) -> Sequence[Any]:
        model: Any = base_model(self.model)
        generation = getattr(model, "generation_config", None)
        about = copy.deepcopy(model.config)
        about.dtype = self.dtype  # the file's dtype, not the master weights'
        return [about, *([generation] if generation is not None else [])]

    def save_checkpoint(self, folder: Path) -> None:
        try:
            with _no_process_group_expected():
                save(self._state(), checkpoint_id=folder, no_dist=self.ranks.group is None)
        except CheckpointException as error:
            disk_error = next(filter(None, (_disk_error(cause) for cause, _ in error.failures.values())), None)
            if disk_error is None:
                raise
            raise disk_error from None  # one sentence for a full disk, not the stacks of all ranks

    def load_checkpoint(self, folder: Path) -> None:
        state = self._state()
        try:
            with _no_process_group_expected():
                load(state, checkpoint_id=folder, no_dist=self.ranks.group is None)
        except CheckpointException as error:
            failure = next((cause for cause, _ in error.failures.values()), error)
            raise CheckpointUnreadable(f"{type(failure).__name__}: {failure}") from error
        optimizers, moments = self._optimizers(), state.get("optim", {})
        with configured_settings(optimizers):
            set_state_dict(self.model, optimizers, model_state_dict=state["model"], optim_state_dict=moments)
        counters = state[_COUNTERS]
        self.steps, self.version = int(counters["steps"]), int(counters["version"])
        torch.set_rng_state(counters["random"].cpu())  # the same on all ranks

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self._optimizers())
        counters = {
            "steps": torch.tensor(self.steps),
            "version": torch.tensor(self.version),
            "random": torch.get_rng_state(),
        }
        return {"model": model, _COUNTERS: counters} | ({"optim": optimizer} if self.is_trained else {})

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [] if self.optimizer is None else [self.optimizer]

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        if self.ranks.group is not None or self.dtype == torch.float32:
            return contextlib.nullcontext()  # FSDP's own policy casts
        return torch.autocast(self.ranks.device.type, dtype=self.dtype)

    def _restore_mode(self) -> None:
        if self.optimizer is not None:
            set_training(self.model, self.config)
        else:
            self.model.eval()


def _gathered(tensor: Tensor) -> Tensor:
    """Return the full tensor, on every rank."""
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor


def _merged_adapters(model: nn.Module) -> dict[str, Tensor]:
    """Return B A * scale of every adapted layer, by weight name."""
    deltas: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        get_delta = getattr(module, "get_delta_weight", None)
        if get_delta is not None:
            for adapter in module.active_adapters:
                deltas[f"{name}.weight"] = _gathered(get_delta(adapter).detach())
    return deltas


@contextlib.contextmanager
def _no_process_group_expected() -> Iterator[None]:
    """Suppress torch's warning that a run of one process has no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def _disk_error(error: BaseException) -> OSError | None:
    """Return the OSError behind a failed write. On a full disk torch's writer raises a RuntimeError without one."""
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, OSError):
            return reason
        reason = reason.__cause__ or reason.__context__
    if isinstance(error, RuntimeError) and any(word in str(error) for word in _TORCH_WRITERS):
        return OSError(errno.EIO, f"a file could not be written whole ({error})")  # another rank's error has no cause
    return None
