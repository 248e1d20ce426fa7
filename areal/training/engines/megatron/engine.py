"""The Megatron engine. The last pipeline stage computes outputs and losses; the other stages call the same functions
with its outputs, which are two numbers for each token.

Megatron averages gradients over data and context ranks and over micro-batches, so losses are multiplied by these
numbers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.alloc_mode import train_backend
from areal.api.config.training import megatron_faults
from areal.api.engine_api import LossFn, TokenOutputs, Update, WeightFn
from areal.errors import UsageFault
from areal.hub import model_folder
from areal.training.batches import Batch, select, to_device
from areal.training.engines import configured_settings
from areal.training.engines.base import EngineBase, Parts, share_of
from areal.training.engines.huggingface import dtype_by_name
from areal.training.engines.megatron import model as building
from areal.training.engines.megatron.names import Weight, architecture, split, unshard, weights
from areal.training.ranks import Ranks, require_layout

if TYPE_CHECKING:
    from areal.api.cli_args import MegatronEngineConfig, TrainEngineConfig
    from areal.training.engines.megatron.modules import Vocabulary

OutputFn = Callable[["TokenOutputs", int], Tensor]
"""(outputs, number of the micro-batch) -> a loss or other result."""
HeadFn = Callable[[Tensor, "Tensor | None", int], Tensor]
"""(states after the last layer, ``slices_of`` the rows, number of the micro-batch) -> a loss."""


def choose_algorithms(settings: MegatronEngineConfig) -> None:
    """Make torch use deterministic algorithms if the settings require it. Where there is none, torch warns."""
    if settings.use_deterministic_algorithms:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


class MegatronEngine(EngineBase):
    def __init__(self, config: TrainEngineConfig, ranks: Ranks, total_steps: int = 1) -> None:
        from transformers import AutoConfig

        super().__init__(config, ranks, total_steps)
        self.part = replace(train_backend(config.backend, str(ranks.layout)), data=ranks.data_size)
        if fault := next(megatron_faults(config), None):
            raise UsageFault(str(fault)) from fault
        require_layout(ranks, self.part, "the model's")
        choose_algorithms(config.megatron)
        folder = model_folder(config.path)
        about = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        self._configs = [about, _generation(folder, about)]
        self.architecture = architecture(about)
        building.check(self.architecture, self.part)
        self.groups = building.join_groups(ranks, self.part)
        built = building.build(self.architecture, self.part, config, self.groups)
        self._parameters = building.parameters(built, self.architecture, self.part, self.groups)
        with contextlib.ExitStack() as stack:
            read = building.reader(folder, about, stack, from_scratch=config.init_from_scratch)
            building.load(self._parameters, self.architecture, self.groups, read)
        self._built = built
        self.model: Any = built
        if config.optimizer is not None:
            self.model, self.optimizer = wrap(built, config, self.groups)
        self._restore_mode()

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocabulary

    def _pass(self, micros: Sequence[Batch], at_end: HeadFn, *, backward: bool = False) -> None:
        """Run the pass. The last stage calls ``at_end`` for every micro-batch; with ``backward`` it returns a loss
        whose gradient is added."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def step(numbers: Iterator[int], model: Any) -> tuple[Tensor, Callable[..., Any]]:
            number = next(numbers)
            hidden, order = self._hidden(model, micros[number]["input_ids"])

            def result(hidden: Tensor, **_: Any) -> Any:
                found = at_end(hidden, order, number)
                # Megatron divides by the number of micro-batches, and by that of data-parallel ranks.
                return (found * (self.ranks.data_size * len(micros)), None) if backward else None

            return hidden, result

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(range(len(micros))),
            model=[self.model],
            num_microbatches=len(micros),
            seq_length=max(micro["input_ids"].shape[1] for micro in micros),
            micro_batch_size=max(len(micro["input_ids"]) for micro in micros),
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )

    def _run(self, micros: Sequence[Batch], of: OutputFn, *, backward: bool = False) -> list[Tensor]:
        """Return the detached result of ``of`` for every micro-batch; with ``backward`` it is a loss, whose gradient is
        added. Earlier stages call it with the last stage's outputs."""
        results: list[Tensor] = []
        seen: list[TokenOutputs] = []

        def at_end(hidden: Tensor, order: Tensor | None, number: int) -> Tensor:
            from areal.training.engines.megatron.modules import token_outputs

            outputs = token_outputs(self._all_positions(hidden), self._vocabulary, micros[number], order)
            found = of(outputs, number)
            results.append(found.detach())
            seen.append(outputs)
            return found

        self._pass(micros, at_end, backward=backward)
        for number, micro in enumerate(micros if self.part.pipeline > 1 else ()):
            own = torch.stack([seen[number].logprobs, seen[number].entropies]).detach() if seen else None
            shared = self._from_last_stage(own, (2, *micro["input_ids"].shape))
            if own is None:
                with torch.no_grad():
                    results.append(of(TokenOutputs.of_policy(*shared), number))
        return results

    def _from_last_stage(self, value: Tensor | None, shape: tuple[int, ...]) -> Tensor:
        """Return the last stage's ``value``, float32, on every stage."""
        group = self.groups.pp
        whole = torch.empty(shape, device=self.ranks.device) if value is None else value.contiguous()
        if group.size() > 1:
            dist.broadcast(whole, src=dist.get_global_rank(group, group.size() - 1), group=group)
        return whole

    def _hidden(self, model: Any, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output of this rank's stage for the rows ``ids`` [b, t], and their ``slices_of`` with context
        parallelism.

        Rows are padded to a length that the ranks divide evenly. Attention is causal, so no token attends to padding.
        """
        from areal.training.engines.megatron.modules import slices_of

        context = self.part.context
        unit = self.part.tensor * (2 * context if context > 1 else 1)
        ids = torch.nn.functional.pad(ids, (0, -ids.shape[1] % unit))
        order = slices_of(ids.shape[1], context).to(ids.device) if context > 1 else None
        mine = ids if order is None else ids[:, order[self.groups.cp.rank()]]
        return model(input_ids=mine, position_ids=None, attention_mask=None), order

    @property
    def _vocabulary(self) -> Vocabulary:
        from areal.training.engines.megatron.modules import Vocabulary

        return Vocabulary.of(self._built, self.vocab_size, self.groups)

    def _all_positions(self, hidden: Tensor) -> Tensor:
        """Gather the rows that tensor-parallel ranks divide between layers."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        if self.part.tensor == 1:
            return hidden
        group = self.groups.tp  # the head's gradients are the same on all of its ranks
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)

    def _results(
        self, batch: Mapping[str, Tensor], parts: Parts, of: Callable[[TokenOutputs, Batch], Tensor]
    ) -> list[Tensor]:
        micros = [self._micro(batch, part) for part, _ in parts]
        return self._run(micros, lambda outputs, number: of(outputs, micros[number]))

    @torch.no_grad()
    def next_token_logprobs(self, input_ids: Tensor) -> Tensor:
        found: list[Tensor] = []

        def at_end(hidden: Tensor, order: Tensor | None, number: int) -> Tensor:
            from areal.training.engines.megatron.modules import whole_rows

            states = self._all_positions(hidden)
            if order is not None:
                states = whole_rows(states, order, self.groups.cp, shared=True)
            found.append(self._vocabulary.logits(states[len(input_ids) - 1, 0]).float())
            return found[-1]

        with self._evaluating():
            self._pass([{"input_ids": input_ids[None].to(self.ranks.device)}], at_end)
        logits = self._from_last_stage(
            found[0] if found else None, (building.padded_vocabulary(self.architecture, self.part),)
        )
        return torch.log_softmax(logits[: self.vocab_size], -1).cpu()

    def train_batch(self, batch: Mapping[str, Tensor], loss_fn: LossFn, loss_weight_fn: WeightFn) -> Update:
        settings, rate = self._schedule()
        for group in self.optimizer.param_groups:  # Megatron leaves these factors to the caller
            group["lr"], group["weight_decay"] = rate, settings.weight_decay * group["wd_mult"]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        cut = self._micro_batches(batch)
        micros = [self._micro(batch, part) for part, _ in cut]
        shares = self._shares(zip(micros, (real for _, real in cut), strict=True), loss_weight_fn)

        def part_of_loss(outputs: TokenOutputs, number: int) -> Tensor:
            return share_of(loss_fn(outputs, micros[number]), shares[number]).float()

        parts = self._run(micros, part_of_loss, backward=True)
        loss = float(self.ranks.all_sum(torch.stack(parts).double().sum()))
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        self._check_finite(loss, norm)
        clip_gradients(self.optimizer, settings.gradient_clipping, norm)
        self.optimizer.step_with_ready_grads()
        self.steps += 1
        return Update(loss, norm, rate, len(micros))

    @torch.no_grad()
    def named_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        for weight in weights(self.architecture):
            if weight.is_tied:
                continue
            whole = self._gathered(weight)
            for name, part in zip(weight.hf_names, split(weight, whole), strict=True):
                yield name, part.to(dtype) if dtype is not None else part

    def _gathered(self, weight: Weight) -> Tensor:
        """Return the whole weight, on every rank: gathered over tensor-parallel ranks, then broadcast by its owners."""
        mine = self._parameters.get(weight.name)
        group = building.tensor_group(weight, self.groups)
        if mine is not None:
            shards = [mine.detach()]
            if group.size() > 1 and weight.shard_dim is not None:
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
        """Return (group, its rank that has the weight), first among expert ranks, then among stages."""
        model, part = self.architecture, self.part
        last = part.pipeline - 1
        stage = last if weight.name.startswith(("decoder.final", "output_layer")) else 0
        if weight.layer is not None:
            stage = weight.layer // (model.layers // part.pipeline)
        owners = [(self.groups.pp, stage)]
        if weight.expert is not None:
            owners.insert(0, (self.groups.ep, weight.expert // (model.experts // part.expert)))
        return owners

    def _saved_configs(self) -> Sequence[Any]:
        return self._configs

    def save_checkpoint(self, folder: Path) -> None:
        from areal.training.engines.megatron.checkpoint import write

        write(self._state(is_loading=False), folder, is_first=self.ranks.is_first)

    def load_checkpoint(self, folder: Path) -> None:
        from areal.training.engines.megatron.checkpoint import read

        state = read(self._state(is_loading=True), folder, len(sub_optimizers(self.optimizer)))
        self._built.load_state_dict(state["model"])
        if has_moments(self.config):
            load_states(self.optimizer, state["optimizer"])
        self.steps, self.version = state["steps"], state["version"]
        torch.set_rng_state(state["random"])

    def _state(self, *, is_loading: bool) -> dict[str, object]:
        from areal.training.engines.megatron.checkpoint import METADATA

        metadata = {**METADATA, "dp_cp_group": self.groups.dp_cp}
        model = self._built.sharded_state_dict(metadata=metadata)
        state: dict[str, Any] = {"model": model}
        if has_moments(self.config):
            state["optimizer"] = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        if not is_loading:
            state |= {"steps": self.steps, "version": self.version, "random": torch.get_rng_state()}
            state["optimizers"] = len(sub_optimizers(self.optimizer))
        return state

    def _micro(self, batch: Mapping[str, Tensor], part: Sequence[int]) -> Batch:
        return to_device(select(batch, part), self.ranks.device)

    def _restore_mode(self) -> None:
        self.model.train(self.optimizer is not None)


def _generation(folder: Path, about: Any) -> Any:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").exists():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(about)


def has_moments(config: TrainEngineConfig) -> bool:
    """Return whether the optimizer is Adam. Megatron's distributed optimizer then divides its moments over
    data-parallel ranks, each of which reduces a share of the gradients."""
    return config.optimizer is not None and config.optimizer.type != "sgd"


def ddp_config(config: TrainEngineConfig) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.grad_reduce_dtype == "float32",
        overlap_grad_reduce=config.megatron.ddp.overlap_grad_reduce,
        use_distributed_optimizer=has_moments(config),
    )


def wrap(built: Any, config: TrainEngineConfig, groups: Any) -> tuple[Any, Any]:
    """Return the model in DistributedDataParallel, and its optimizer. Raises UsageFault."""
    from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

    given = config.optimizer
    assert given is not None
    if given.type not in ("adam", "adamw", "sgd"):
        raise UsageFault(f"unknown optimizer {given.type!r}: it is one of adam, adamw, sgd")
    dtype, is_adam = dtype_by_name(config.dtype), has_moments(config)
    model = DistributedDataParallel(built.config, ddp_config(config), built, pg_collection=groups)
    model.broadcast_params()
    settings = OptimizerConfig(
        optimizer="adam" if is_adam else "sgd",
        lr=given.lr,
        weight_decay=given.weight_decay,
        adam_beta1=given.beta1,
        adam_beta2=given.beta2,
        adam_eps=given.eps,
        sgd_momentum=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        clip_grad=given.gradient_clipping,
        use_distributed_optimizer=is_adam,
    )
    overrides = get_standard_config_overrides(settings)  # vectors are not decayed
    optimizer = get_megatron_optimizer(settings, [model], overrides)
    for part in sub_optimizers(optimizer) if is_adam else ():
        _make_moments(part)
    built.config.no_sync_func = model.no_sync
    built.config.finalize_model_grads_func = finalize_model_grads
    return model, optimizer


def sub_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers of the dense parameters and of the experts."""
    every = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in every if not part.is_stub_optimizer]


def _make_moments(part: Any) -> None:
    """Initialize the moments before the first step, for checkpoints that are saved or loaded before it."""
    part.init_state_fn(part.optimizer)
    if not isinstance(part.optimizer, torch.optim.AdamW):
        return
    for state in part.optimizer.state.values():
        state["step"] = torch.tensor(0.0)
    put = part._set_main_param_and_optimizer_states

    def put_but_step(parameter: Any, tensors: dict[str, object]) -> None:
        # megatron-core 0.16 does not read torch's step from a checkpoint, but expects it here.
        put(parameter, {**part._get_main_param_and_optimizer_states(parameter), **tensors})

    part._set_main_param_and_optimizer_states = put_but_step


def load_states(optimizer: Any, state: Any) -> None:
    """Load into initialized moments. megatron-core loads one step tensor for all parameters; each increments it."""
    with configured_settings([part.optimizer for part in sub_optimizers(optimizer)]):
        optimizer.load_state_dict(state)
    for part in sub_optimizers(optimizer):
        for each in part.optimizer.state.values():
            if "step" in each:
                each["step"] = each["step"].clone()


@torch.no_grad()
def clip_gradients(optimizer: Any, max_norm: float, norm: float) -> None:
    """Scale gradients of norm ``norm`` to at most ``max_norm`` (0: no limit)."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    for part in sub_optimizers(optimizer) if max_norm > 0 else ():
        clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm, norm)
