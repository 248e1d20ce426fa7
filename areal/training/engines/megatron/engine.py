"""The Megatron engine. A pipeline's last stage has the outputs: there alone losses are computed, and passed on.

Megatron averages gradients over data and context ranks and over micro-batches; what it is given is multiplied by as
much, so that a micro-batch counts by its weight. Every rank of a replica has the same rows, and the whole outputs of
them: logits are gathered from tensor-parallel ranks, and rows from context-parallel ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.alloc_mode import train_backend
from areal.api.config.training import megatron_faults
from areal.api.engine_api import LossFn, NonFinite, Update, WeightFn
from areal.errors import UsageFault
from areal.hub import model_folder
from areal.training.batches import Batch, common_cut, lengths, select, to_device
from areal.training.engines import cut_of, learning_rate
from areal.training.engines.huggingface import dtype_by_name, write_model
from areal.training.engines.megatron import model as building
from areal.training.engines.megatron.layout import check, join_groups
from areal.training.engines.megatron.names import Weight, architecture, parted, unshard, weights
from areal.training.engines.megatron.optimizer import clip, parts_of, trained
from areal.training.ranks import Ranks, require_layout

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig

Of = Callable[[Tensor, int], Tensor]
"""(outputs, number of the micro-batch) -> what is wanted of them."""


class MegatronEngine:
    """See ``areal.api.engine_api.TrainEngine``."""

    def __init__(self, config: TrainEngineConfig, ranks: Ranks, total_steps: int = 1) -> None:
        from transformers import AutoConfig

        self.config, self.ranks, self.total_steps = config, ranks, total_steps
        self.steps = self.version = 0
        self.part = replace(train_backend(config.backend, str(ranks.layout)), data=ranks.data_size)
        if fault := next(megatron_faults(config), None):
            raise UsageFault(fault)
        require_layout(ranks, self.part, "the model's")
        folder = model_folder(config.path)
        about = AutoConfig.from_pretrained(folder)
        self._configs = [about, _generation(folder, about)]
        self.architecture = architecture(about)
        check(self.architecture, self.part)
        self.groups = join_groups(ranks, self.part)
        built = building.build(self.architecture, self.part, config, self.groups)
        self._parameters = building.parameters(built, self.architecture, self.part, self.groups)
        with contextlib.ExitStack() as stack:
            read = building.reader(folder, about, stack, from_scratch=config.init_from_scratch)
            building.load(self._parameters, self.architecture, self.groups, read)
        self._built = built
        self.model: Any = built
        self.optimizer: Any = None
        if config.optimizer is not None:
            self.model, self.optimizer = trained(built, config, self.groups)
        self._leave_evaluation()

    @property
    def is_trained(self) -> bool:
        return self.optimizer is not None

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocabulary

    @property
    def dtype(self) -> torch.dtype:
        return dtype_by_name(self.config.dtype)

    # -- passes

    def _run(self, micros: Sequence[Batch], of: Of, *, backward: bool) -> list[Tensor]:
        """``of`` of every micro-batch, on the last stage; none on the others. ``backward``: it is a loss."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def step(numbers: Iterator[int], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            number = next(numbers)
            outputs = self._outputs(model, micros[number])

            def result(outputs: Tensor, non_loss_data: bool = False) -> Any:
                found = of(outputs, number)
                return found if non_loss_data else (found * self._averaged(len(micros)), found.detach())

            return outputs, result

        widest = max(micro["input_ids"].shape[1] for micro in micros)
        found: list[Tensor] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(range(len(micros))),
            model=[self.model],
            num_microbatches=len(micros),
            seq_length=widest,
            micro_batch_size=max(len(micro["input_ids"]) for micro in micros),
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )
        return found

    def _averaged(self, micro_batches: int) -> int:
        return self.ranks.data_size * micro_batches

    def _outputs(self, model: Any, micro: Batch) -> Tensor:
        """Logits [b, t, V] on the last stage; what the next one takes on the others.

        Rows are padded on the right and attention is causal: no token sees padding. Rows are made as long as the ranks
        can share evenly.
        """
        from areal.training.engines.megatron.modules import slices_of, whole_rows

        ids, context = micro["input_ids"], self.part.context
        length, unit = ids.shape[1], self.part.tensor * (2 * context if context > 1 else 1)
        ids = torch.nn.functional.pad(ids, (0, -length % unit))
        order = slices_of(ids.shape[1], context).to(ids.device) if context > 1 else None
        mine = ids if order is None else ids[:, order[self.groups.cp.rank()]]
        outputs: Tensor = model(input_ids=mine, position_ids=None, attention_mask=None)
        if not self._is_last_stage:
            return outputs
        if order is not None:
            outputs = whole_rows(outputs.transpose(0, 1), order, self.groups.cp, shared=True).transpose(0, 1)
        return outputs[:, :length, : self.vocab_size]

    @property
    def _is_last_stage(self) -> bool:
        return bool(self.groups.pp.rank() == self.part.pipeline - 1)

    def _from_last_stage(self, value: Tensor | None) -> Tensor:
        """The last stage's ``value`` on every stage."""
        group = self.groups.pp
        if group.size() == 1:
            assert value is not None
            return value
        source = dist.get_global_rank(group, group.size() - 1)
        about: list[Any] = [None if value is None else (value.shape, value.dtype)]
        dist.broadcast_object_list(about, src=source, group=group, device=self.ranks.device)
        shape, dtype = about[0]
        whole = torch.empty(shape, dtype=dtype, device=self.ranks.device) if value is None else value.contiguous()
        dist.broadcast(whole, src=source, group=group)
        return whole

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Tensor], of: Callable[[Tensor, Batch], Tensor]) -> Tensor:
        cut = self._cut(batch)
        micros = [self._micro(batch, part) for part, _ in cut]
        with self._evaluating():
            results = self._run(micros, lambda outputs, number: of(outputs, micros[number]), backward=False)
        whole: Tensor | None = None
        for (part, counts), result in zip(cut, results, strict=False):
            if whole is None:
                shape = batch["attention_mask"].shape[: result.dim()]
                whole = torch.zeros(shape, dtype=result.dtype, device=result.device)
            if counts and result.dim() > 1:
                whole[part, : result.shape[1]] = result
            elif counts:
                whole[part] = result
        return self._from_last_stage(whole)

    @torch.no_grad()
    def next_token_logprobs(self, input_ids: Tensor) -> Tensor:
        micro = {"input_ids": input_ids[None].to(self.ranks.device)}
        with self._evaluating():
            found = self._run([micro], lambda outputs, _: torch.log_softmax(outputs[0, -1].float(), -1), backward=False)
        return self._from_last_stage(found[0] if found else None).cpu()

    # -- updates

    def train_batch(self, batch: Mapping[str, Tensor], loss_fn: LossFn, loss_weight_fn: WeightFn) -> Update:
        if self.optimizer is None or self.config.optimizer is None:
            raise UsageFault(
                f"the model {self.config.path} is to be trained, and its optimizer is null",
                hint="actor.optimizer={lr: 1e-5}; a model that is trained needs one",
            )
        rate = learning_rate(self.config.optimizer, self.steps, self.total_steps)
        for group in self.optimizer.param_groups:  # of their factors Megatron leaves the use to the caller
            group["lr"], group["weight_decay"] = rate, self.config.optimizer.weight_decay * group["wd_mult"]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        cut = self._cut(batch)
        micros = [self._micro(batch, part) for part, _ in cut]
        shares = [loss_weight_fn(micro).double() * real for micro, (_, real) in zip(micros, cut, strict=True)]
        total = self.ranks.all_sum(torch.stack(shares).sum()).clamp(min=1e-12)

        def part_of_loss(outputs: Tensor, number: int) -> Tensor:
            loss, share = loss_fn(outputs, micros[number]).double(), shares[number] / total
            return torch.where(share > 0, loss * share, loss * 0.0).float()

        parts = self._run(micros, part_of_loss, backward=True)
        loss = self._summed(parts)
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not (torch.isfinite(loss) and norm < float("inf")):
            raise NonFinite(
                f"update {self.steps + 1} of {self.config.path}: loss {float(loss):g}, gradient norm {norm:g}; "
                "stopped before the optimizer's step, the weights are those of the update before",
                hint="a lower learning rate, gradient_clipping, or float32; the last checkpoint is intact",
            )
        clip(self.optimizer, self.config.optimizer.gradient_clipping, norm)
        self.optimizer.step_with_ready_grads()
        self.steps += 1
        return Update(float(loss), norm, rate, len(micros))

    def _summed(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of what the last stages have, over data-parallel ranks."""
        mine = torch.stack([part.double() for part in parts]).sum(0) if parts else None
        return self.ranks.all_sum(self._from_last_stage(mine))

    @torch.no_grad()
    def eval_batch(self, batch: Mapping[str, Tensor], loss_fn: LossFn, loss_weight_fn: WeightFn) -> float:
        cut = self._cut(batch)
        micros = [self._micro(batch, part) for part, _ in cut]

        def weighted(outputs: Tensor, number: int) -> Tensor:
            weight = loss_weight_fn(micros[number]).double() * cut[number][1]
            return torch.stack([loss_fn(outputs, micros[number]).double() * weight, weight])

        with self._evaluating():
            found = self._run(micros, weighted, backward=False)
        loss, total = self._summed(found)
        return float(loss / total.clamp(min=1e-12))

    # -- weights

    @torch.no_grad()
    def named_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for weight in weights(self.architecture):
            if weight.copied:
                continue
            whole = self._gathered(weight)
            for name, part in zip(weight.theirs, parted(weight, whole), strict=True):
                yield name, part.to(dtype) if dtype is not None else part

    def _gathered(self, weight: Weight) -> Tensor:
        """On every rank: from the tensor-parallel ranks that share it, then from the stage or the expert rank of it."""
        mine = self._parameters.get(weight.ours)
        group = building.tensor_group(weight, self.groups)
        if mine is not None:
            shards = [mine.detach()]
            if group.size() > 1 and weight.cut is not None:
                shards = [torch.empty_like(mine) for _ in range(group.size())]
                dist.all_gather(shards, mine.detach().contiguous(), group=group)
            whole = unshard(weight, shards).contiguous()
        else:
            whole = torch.empty(weight.shape, dtype=self.dtype, device=self.ranks.device)
        for group, owner in self._owners(weight):
            if group.size() > 1:
                dist.broadcast(whole, src=dist.get_global_rank(group, owner), group=group)
        return whole

    def _owners(self, weight: Weight) -> list[tuple[Any, int]]:
        """(group, its rank that has the weight): first among expert ranks, then among stages."""
        model, part = self.architecture, self.part
        last = part.pipeline - 1
        stage = last if weight.ours.startswith(("decoder.final", "output_layer")) else 0
        if weight.layer is not None:
            stage = weight.layer // (model.layers // part.pipeline)
        owners = [(self.groups.pp, stage)]
        if weight.expert is not None:
            owners.insert(0, (self.groups.ep, weight.expert // (model.experts // part.expert)))
        return owners

    def save_model(self, folder: Path, tokenizer: str = "") -> None:
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self.named_tensors(self.dtype)}
        if self.ranks.is_first:
            write_model(tensors, self._configs, folder, tokenizer)

    # -- checkpoints

    def save_checkpoint(self, folder: Path) -> None:
        from areal.training.engines.megatron.checkpoint import write

        write(self._state(is_loading=False), folder, is_first=self.ranks.is_first)

    def load_checkpoint(self, folder: Path) -> None:
        from areal.training.engines.megatron.checkpoint import read

        state = read(self._state(is_loading=True), folder, len(parts_of(self.optimizer)))
        self._built.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.version = state["steps"], state["version"]
        torch.set_rng_state(state["random"])

    def _state(self, *, is_loading: bool) -> dict[str, Any]:
        from areal.training.engines.megatron.checkpoint import METADATA

        told = {**METADATA, "dp_cp_group": self.groups.dp_cp}
        model = self._built.sharded_state_dict(metadata=told)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=told)
        state = {"model": model, "optimizer": optimizer}
        if not is_loading:
            state |= {"steps": self.steps, "version": self.version, "random": torch.get_rng_state()}
            state["optimizers"] = len(parts_of(self.optimizer))
        return state

    # -- micro-batches and modes

    def _micro(self, batch: Mapping[str, Tensor], part: Sequence[int]) -> Batch:
        return to_device(select(batch, part), self.ranks.device)

    def _cut(self, batch: Mapping[str, Tensor]) -> list[tuple[list[int], bool]]:
        return common_cut(lengths(batch), cut_of(self.config.mb_spec, None), self.ranks.all_max)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        try:
            yield
        finally:
            self._leave_evaluation()

    def _leave_evaluation(self) -> None:
        self.model.train(self.optimizer is not None)


def _generation(folder: Path, about: Any) -> Any:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(about)
