"""A train engine without shards, micro-batches or packing, as another package would bring one: the contract alone."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.api.cli_args import TrainEngineConfig
from areal.api.engine_api import CheckpointUnreadable, LossFn, NonFinite, TokenOutputs, Update, WeightFn
from areal.errors import UsageFault
from areal.training.algorithms.losses import token_outputs
from areal.training.engines import configured_settings, learning_rate
from areal.training.ranks import Ranks
from areal.training.run_folder import config_files, copy_missing

_FILE = "engine.pt"


class PlainEngine:
    """One process. See ``areal.api.engine_api.TrainEngine``."""

    def __init__(self, config: TrainEngineConfig, ranks: Ranks, total_steps: int) -> None:
        from transformers import AutoModelForCausalLM

        assert ranks.size == 1
        self.config, self.total_steps = config, total_steps
        self.steps = self.version = 0
        self.model: Any = AutoModelForCausalLM.from_pretrained(config.path, dtype=torch.float32).eval()
        self.optimizer = None
        if config.optimizer is not None:
            settings = config.optimizer
            parameters = self.model.parameters()
            self.optimizer = torch.optim.AdamW(parameters, settings.lr, eps=settings.eps, weight_decay=0.0)

    is_trained = property(lambda self: self.optimizer is not None)
    vocab_size = property(lambda self: self.model.config.vocab_size)
    dtype = torch.float32

    def _outputs(self, batch: Mapping[str, Tensor]) -> TokenOutputs:
        logits: Tensor = self.model(batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits
        return token_outputs(logits, batch)

    def train_batch(self, batch: Mapping[str, Tensor], loss_fn: LossFn, loss_weight_fn: WeightFn) -> Update:
        if self.optimizer is None or self.config.optimizer is None:
            raise UsageFault(f"{self.config.path} has no optimizer")
        settings = self.config.optimizer
        rate = learning_rate(settings, self.steps, self.total_steps)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad()
        loss = loss_fn(self._outputs(batch), batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.gradient_clipping or float("inf"))
        if not torch.isfinite(loss) or not torch.isfinite(norm):
            raise NonFinite(f"update {self.steps + 1} of {self.config.path}: loss {loss.item()}")
        self.optimizer.step()
        self.steps += 1
        return Update(loss.item(), norm.item(), rate, 1)

    @torch.no_grad()
    def eval_batch(self, batch: Mapping[str, Tensor], loss_fn: LossFn, loss_weight_fn: WeightFn) -> float:
        return loss_fn(self._outputs(batch), batch).item()

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Tensor], of: Callable[[TokenOutputs, Any], Tensor]) -> Tensor:
        return of(self._outputs(batch), batch)

    @torch.no_grad()
    def next_token_logprobs(self, input_ids: Tensor) -> Tensor:
        return torch.log_softmax(self.model(input_ids[None]).logits[0, -1], -1)

    def named_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        tied = self.model.config.tie_word_embeddings
        for name, tensor in self.model.state_dict().items():
            if not (tied and name == "lm_head.weight"):
                yield name, tensor.detach().to(dtype or tensor.dtype)

    def save_model(self, folder: Path, tokenizer: str = "") -> None:
        partial = folder.with_name(f"{folder.name}.tmp")
        self.model.save_pretrained(partial)
        for path in config_files(Path(self.config.path)):
            shutil.copyfile(path, partial / path.name)
        if tokenizer:
            copy_missing(tokenizer, partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    def save_checkpoint(self, folder: Path) -> None:
        assert self.optimizer is not None
        folder.mkdir(parents=True)
        state = {"steps": self.steps, "version": self.version, "random": torch.get_rng_state()}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, folder / _FILE)

    def load_checkpoint(self, folder: Path) -> None:
        assert self.optimizer is not None
        try:
            state = torch.load(folder / _FILE)
        except (OSError, RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointUnreadable(f"{folder / _FILE} cannot be read: {error}") from error
        self.model.load_state_dict(state["model"])
        with configured_settings([self.optimizer]):
            self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.version = state["steps"], state["version"]
        torch.set_rng_state(state["random"])
