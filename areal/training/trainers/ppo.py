"""PPO and its relatives (GRPO without a critic), on rollouts that come while it trains.

A step, top to bottom: take a batch; ask the reference, the critic and, for decoupled PPO, ourselves; estimate
advantages; update on minibatches, ``ppo_epochs`` times; have the new weights served. The first rank speaks with the
rollout controller and the weight-update gateway; every data-parallel rank trains on its share of the groups.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from areal.api.algorithm_api import AdvantageFn, LossFn
from areal.api.cli_args import PPOConfig, PPOCriticConfig
from areal.api.engine_api import TokenOutputs, Update
from areal.errors import UsageFault
from areal.loading import load_function
from areal.rollout.controller import RolloutController
from areal.rollout.dump import episodes_of, remove_steps, write_step
from areal.services.weight_update.publisher import TrainerPair
from areal.training import stopping
from areal.training.algorithms.actor import ActorLoss, add_second_moment_mask, rows_with_gradient
from areal.training.algorithms.advantages import AuxiliaryOutputs, KLController, prepare
from areal.training.algorithms.losses import masked_mean, value_loss
from areal.training.batches import Batch, lengths, minibatches, select, split_groups
from areal.training.frontier import Frontier
from areal.training.metrics import Metrics, labels
from areal.training.services import connect_pair, is_probed, own_service, publish
from areal.training.trainers.base import Trainer
from areal.training.trainers.rollouts import PromptStream, RolloutBatch, RolloutSource, Sampling, number_rows

_log = logging.getLogger(__name__)

Filter = Callable[[Any], bool]


class PPOTrainer(Trainer):
    """``train`` samples from the service that ``config.rollout`` (or the environment) names, which goes on after the
    run. Where none is named and the configuration lays out an engine, the run has one of its own."""

    config: PPOConfig

    def __init__(
        self,
        config: PPOConfig,
        train_dataset: Sequence[Any] | None = None,
        valid_dataset: Sequence[Any] | None = None,
        *,
        loss_fn: LossFn | None = None,
        advantage_fn: AdvantageFn | None = None,
    ) -> None:
        """``loss_fn`` and ``advantage_fn``: of one's own, instead of ``actor.loss_fn`` and ``actor.advantage_fn``."""
        self._loss_fn, self._advantage_fn = loss_fn, advantage_fn
        super().__init__(config, train_dataset, valid_dataset)

    def _open(self) -> None:
        config = self.config
        for key, why in config.training_faults():
            raise UsageFault(f"{'.'.join(key)}: {why}")
        if self.train_dataset is None and config.is_online:
            if config.total_train_steps is None:
                raise UsageFault("online training has no rows that could end it", hint="total_train_steps=N")
            self.train_dataset = [{}] * config.train_dataset.batch_size  # each stands for a conversation to wait for
        coefficients = {name: getattr(config.actor, name) for name in ("kl_ctl", "kl_loss_coef")}
        uncharged = [name for name, value in coefficients.items() if value and config.ref is None]
        for name in uncharged:
            setattr(config.actor, name, 0.0)  # also in the configuration that the run's folder shows
        super()._open()
        if self.ranks.is_first:
            for name in uncharged:
                _log.warning(
                    "no KL penalty: actor.%s is %g, and there is no ref to be near to", name, coefficients[name]
                )
        self._check_batch_size()
        self.actor = self.add_engine("actor", config.actor, config.actor.ppo_n_minibatches * config.actor.ppo_epochs)
        self.critic = None
        if config.critic is not None:
            self.critic_epochs = config.critic.ppo_epochs or config.actor.ppo_epochs
            updates = config.critic.ppo_n_minibatches * self.critic_epochs
            self.critic = self.add_engine("critic", config.critic, updates)
        self.reference = None
        if config.ref is not None:
            reference = copy.deepcopy(config.ref)
            reference.optimizer, reference.path = None, reference.path or config.actor.path
            self.reference = self.add_engine("ref", reference)
        self.frontier = Frontier()
        self.loss = ActorLoss(config.actor, loss_fn=self._loss_fn)
        for name in ("advantage_fn", "gae_lambda"):  # told now, not after the first rollouts
            if (said := getattr(config.actor, name)) and isinstance(said, str):
                load_function(said, f"actor.{name}")
        self.kl_controller = KLController(config.actor.kl_target, config.actor.kl_horizon)
        self.rollout: RolloutController | None = None
        self.pair: TrainerPair | None = None

    def _check_batch_size(self) -> None:
        """``train_dataset.batch_size`` prompts a step, each with ``gconfig.n_samples`` answers."""
        config, batch = self.config, self.config.train_dataset.batch_size
        if config.rollout.consumer_batch_size == 1:
            config.rollout.consumer_batch_size = batch
        if config.rollout.consumer_batch_size != batch:
            raise UsageFault(
                f"rollout.consumer_batch_size is {config.rollout.consumer_batch_size} and train_dataset.batch_size "
                f"{batch}: a step trains on one batch",
                hint="leave consumer_batch_size out",
            )
        if not (config.async_training and (config.trainer is None or config.trainer.async_training)):
            config.rollout.max_head_offpolicyness = 0
        if batch < (parts := self.ranks.data_size):
            raise UsageFault(f"a batch of {batch} prompts is too small for {parts} ranks: each needs one")

    # -- rollouts

    def train(
        self,
        workflow: Any = None,
        eval_workflow: Any = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        eval_workflow_kwargs: Mapping[str, Any] | None = None,
        dynamic_filter_fn: Filter | str | None = None,
        total_epochs: int | None = None,
    ) -> None:
        """``workflow``: an instance, a class, or ``module:name``; ``dynamic_filter_fn``: which trajectories are worth
        training on, of those that ``actor.dynamic_sampling`` leaves."""
        if total_epochs is not None and self.config.total_train_steps is None:
            self.total_steps = total_epochs * self.steps_per_epoch
            self.progress.total = self.total_steps
        accept = (
            _both(has_reward_spread, dynamic_filter_fn) if self.config.actor.dynamic_sampling else dynamic_filter_fn
        )
        group = self.config.gconfig.n_samples
        self._sampling = Sampling(workflow, workflow_kwargs, accept, group, self.config.dynamic_bs)
        self._evaluation = (eval_workflow or workflow, eval_workflow_kwargs or workflow_kwargs)
        if self.ranks.is_first:
            self.stack.enter_context(own_service(self.config, self.folder))
            controller = RolloutController(
                self.config.rollout,
                seed=self.config.seed,
                dump_folder=self.folder.trajectories,
                drop_incomplete_group=self.config.gconfig.drop_incomplete_group,
            )
            self.rollout = self.stack.enter_context(controller)
            if self.metrics_url is not None:
                self.rollout.register_scrape_target(urlsplit(self.metrics_url).netloc, labels(self.config))
            mode = self.config.weight_update_mode or self.config.actor.weight_update_mode
            service = self.rollout.service()
            pair = connect_pair(mode, self.folder, self.config.actor.path, service, self.rollout.current_address)
            self.pair = self.stack.enter_context(pair)
        self.run()

    def recover(self) -> bool:
        """Also has our weights served: whatever the service has, it is not known to be these. Versions only grow: what
        an attempt before us published after its newest checkpoint were other weights than those to come."""
        resumed = super().recover()
        served = self.ranks.broadcast(self._served_before(resumed) if self.rollout is not None else None)
        if self.ranks.is_first:
            remove_steps(self.folder.trajectories, after=self.step if resumed else -1)
        self._first_version = version_to_publish(self.actor.version, served)
        self._publish(torch.arange(1, 9) % self.actor.vocab_size, self._first_version)
        if self.rollout is not None:
            prompts = PromptStream(self._needed(self.train_dataset, "train_dataset"), self.order, self.frontier)
            self.source = RolloutSource(
                self.rollout,
                prompts,
                self._sampling,
                least=self.ranks.data_size,
                temperature=self.config.gconfig.temperature,
            )
        return resumed

    def state(self) -> dict[str, Any]:
        return {"prompts": self.frontier.state(), "kl_factor": self.kl_controller.factor}

    def restore(self, state: dict[str, Any]) -> None:
        self.frontier = Frontier.restored(state["prompts"])
        self.kl_controller.factor = state.get("kl_factor", 1.0)

    # -- a step

    def train_step(self) -> Metrics:
        with self.timings.of("rollout"):
            taken: RolloutBatch | None = self.ranks.broadcast(self._take())
        if taken is None:
            raise stopping.Stopped
        parts = split_groups(lengths(taken.batch), taken.groups.tolist(), self.ranks.data_size)
        share = parts[self.ranks.data_rank]
        with self.timings.of("prepare"):
            batch = self._prepared(select(taken.batch, share), taken.groups[share])
        metrics = self._divergence(batch)
        with self.timings.of("train"):
            metrics |= self._update(batch)
        with self.timings.of("weights"):
            length = int(taken.batch["attention_mask"][0].sum())
            probe = taken.batch["input_ids"][0, : max(1, length - 1)]  # a prompt and its answer but for the last token
            metrics |= self._publish(probe, self.actor.version + 1)
        self._write(share, batch)
        if self.ranks.is_first:
            self.source.consumed(taken.positions)
            metrics |= self.source.counts() | {"version": float(self.actor.version)}
        return taken.metrics | metrics

    def _write(self, share: Sequence[int], batch: Batch) -> None:
        """The step's trajectories with their advantages, where ``rollout.dump_to_file`` asks for them."""
        if not self.config.rollout.dump_to_file:
            return
        parts = self.ranks.data_gather((share, mean_advantages(batch)))
        advantages = dict(pair for rows, means in parts for pair in zip(rows, means, strict=True))
        if self.ranks.is_first:
            in_order = [advantages[row] for row in range(len(advantages))]
            self.source.write(self.folder.trajectories, self.step + 1, in_order)

    def _take(self) -> RolloutBatch | None:
        """The first rank's batch, for all; None where it was told to stop, and on the others."""
        if not self.ranks.is_first:
            return None
        try:
            with stopping.interruptible():
                return self.source.take()
        except stopping.Stopped:
            return None

    def _prepared(self, batch: Batch, groups: Tensor) -> Batch:
        """Adds advantages, and the log-probabilities of the reference and the proximal policy where they are used."""
        config = self.config.actor
        reference = self.reference.forward(batch, _logprobs) if self.reference is not None else None
        values, after = self._values(batch) if self.critic is not None else (None, None)
        auxiliary = AuxiliaryOutputs(_cpu(reference), _cpu(values), _cpu(after))
        if values is not None:
            batch = {**batch, "old_values": values.cpu()}
        if self._recomputes():
            batch = {**batch, "proximal": self.actor.forward(batch, _logprobs).cpu()}
        factor = self.kl_controller.factor
        batch = prepare(
            batch, groups, config, auxiliary, self._summed, kl_factor=factor, advantage_fn=self._advantage_fn
        )
        if config.m2_threshold is not None:
            batch = add_second_moment_mask(batch, config.m2_threshold, self.ranks.data_gather)
        return batch

    def _summed(self, sums: Tensor) -> Tensor:
        return self.ranks.all_sum(sums.to(self.ranks.device)).cpu()

    def _divergence(self, batch: Batch) -> Metrics:
        """The KL divergence from the reference, where there is one; it sets the coefficient of the next step."""
        if "kl" not in batch:
            return {}
        mask = batch["loss_mask"].bool()
        sums = torch.stack([batch["kl"][mask].sum(), mask.sum(), torch.tensor(len(mask))]).double()
        total, tokens, sequences = self._summed(sums).tolist()
        kl, config = total / max(tokens, 1.0), self.config.actor
        self.loss.kl_factor = self.kl_controller.factor
        metrics = {"ref_kl": kl, "kl_coef": (config.kl_ctl or config.kl_loss_coef) * self.kl_controller.factor}
        self.kl_controller.update(kl, int(sequences))
        return metrics

    def _recomputes(self) -> bool:
        """Whether the proximal policy needs a forward pass: not where the update's own first pass is it."""
        config = self.config.actor
        if config.use_decoupled_loss:
            first_only = config.ppo_n_minibatches * config.ppo_epochs == 1
            reused = config.prox_logp_method == "reuse_train_logp" and first_only
            if config.m2_threshold is not None:
                return True
            return not reused and config.prox_logp_method != "loglinear"
        return config.recompute_logprob

    def _values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert self.critic is not None
        every = self.critic.forward(batch, lambda outputs, micro: outputs.values)
        last = batch["attention_mask"].sum(1, keepdim=True).to(every.device) - 1
        return _before(every), every.gather(1, last)[:, 0]

    def _update(self, batch: Batch) -> Metrics:
        config, updates = self.config.actor, []
        self.loss.version = self.actor.version
        for part in self._minibatches(batch, config.ppo_n_minibatches) * config.ppo_epochs:
            updates.append(self._updated(select(batch, part)))
        metrics = {
            "loss": sum(update.loss for update in updates) / len(updates),
            "grad_norm": max(update.grad_norm for update in updates),
            "lr": updates[-1].learning_rate,
        }
        names, sums = self.loss.pop_sums()
        totals = self.ranks.all_sum(sums)
        means = (totals[:-1] / totals[-1].clamp(min=1)).tolist()
        metrics |= dict(zip(names, means, strict=True))
        metrics["trained_share"] = self.loss.share
        return metrics | (self._update_critic(batch) if self.critic is not None else {})

    def _updated(self, batch: Batch) -> Update:
        """Zero-advantage rows are skipped but stay in the denominator."""
        chosen = select(batch, rows_with_gradient(batch, self.config.actor, own_loss=self._loss_fn is not None))
        counts = torch.stack([self.loss.weight(chosen), self.loss.weight(batch)]).double().to(self.ranks.device)
        taught, given = self.ranks.all_sum(counts).tolist()
        self.loss.share = taught / max(given, 1.0)
        return self.actor.train_batch(chosen, self.loss, self.loss.weight)

    def _minibatches(self, batch: Batch, count: int) -> list[list[int]]:
        """Every rank makes as many steps as the one with the fewest rows."""
        fewest = -self.ranks.all_max(-len(minibatches(lengths(batch), count)))
        return minibatches(lengths(batch), fewest)

    def _update_critic(self, batch: Batch) -> Metrics:
        assert self.critic is not None and self.config.critic is not None
        loss = critic_loss(self.config.critic)
        parts = self._minibatches(batch, self.config.critic.ppo_n_minibatches)
        updates = [
            self.critic.train_batch(select(batch, part), loss, lambda micro: micro["loss_mask"].sum())
            for part in parts * self.critic_epochs
        ]
        return {
            "critic/loss": sum(update.loss for update in updates) / len(updates),
            "critic/grad_norm": max(update.grad_norm for update in updates),
        }

    def _served_before(self, resumed: bool) -> int | None:
        """The highest version that anything may have sampled from: what a server has, and what an attempt before us was
        about to publish. Servers that were killed with it know nothing of that."""
        assert self.rollout is not None
        told = [self.rollout.served_version()]
        if resumed or self.folder.attempt > 1:
            told.append(self.folder.published_version())
        return max((version for version in told if version is not None), default=None)

    def _publish(self, sample: Tensor, version: int) -> Metrics:
        """Publish the actor's weights as ``version``, which rollouts are sampled from then on."""
        if self.rollout is not None:
            self.folder.note_version(version)
        probed = sample if is_probed(version, self._first_version) else None
        delivered = publish(self.actor, self.pair, version, probed)
        self.actor.version = version
        if self.rollout is None or delivered is None:
            return {}
        self.rollout.set_version(version)
        return {"weights/ms": delivered.duration_ms, "weights/paused_ms": delivered.paused_ms}

    # -- evaluation

    def evaluate(self) -> Metrics:
        """Mean reward over the validation set, sampled from the weights that are served."""
        if not self.valid_dataset:
            return {}
        metrics: Metrics = {}
        if self.rollout is not None:
            workflow, kwargs = self._evaluation
            rows, samples = number_rows(self.valid_dataset), 1
            if self.config.eval_gconfig is not None:
                samples = self.config.eval_gconfig.n_samples
            given = self.rollout.run_batch(rows, workflow, kwargs, group_size=samples, is_eval=True)
            if self.config.rollout.dump_to_file:
                episodes = [every for each in given for every in episodes_of(each, self.rollout.model, step=self.step)]
                write_step(self.folder.trajectories, self.step, episodes, is_eval=True)
            rewards = torch.cat([each.trajectory["rewards"].float() for each in given] or [torch.tensor([math.nan])])
            metrics = {"reward/mean": float(rewards.mean()), "rollouts": float(len(rewards))}
        told: Metrics = self.ranks.broadcast(metrics)
        return told


def _logprobs(outputs: TokenOutputs, micro: Batch) -> Tensor:
    return outputs.logprobs


def critic_loss(config: PPOCriticConfig) -> Callable[[TokenOutputs, Batch], Tensor]:
    """The critic's loss: its mean over tokens, from its values, ``old_values`` and ``returns``."""

    def loss(outputs: TokenOutputs, micro: Batch) -> Tensor:
        values, mask = _before(outputs.values), micro["loss_mask"].bool()
        return masked_mean(value_loss(values, micro["old_values"], micro["returns"], mask, config.eps_clip), mask)

    return loss


def version_to_publish(ours: int, served: int | None) -> int:
    """Of our weights, which were ``ours`` when they were saved (0 in a run that begins), to a service whose servers
    have at most ``served``: the same number never means two weights."""
    return ours if served is None or served <= ours else served + 1


def mean_advantages(batch: Mapping[str, Tensor]) -> list[float | None]:
    """The mean of each row over the tokens that are trained on; None where there are none."""
    mask = batch["loss_mask"].bool()
    sums, counts = torch.where(mask, batch["advantages"], 0.0).sum(1).tolist(), mask.sum(1).tolist()
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def _before(values: Tensor) -> Tensor:
    """Shift values right: the value after token t - 1 is that of the state in which token t is chosen."""
    return torch.nn.functional.pad(values[:, :-1], (1, 0))


def _cpu(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.float().cpu()


def has_reward_spread(trajectory: Mapping[str, Tensor]) -> bool:
    """Whether the rewards of a group differ. A group without a spread has no gradient (dynamic sampling)."""
    return bool(trajectory["rewards"].max() > trajectory["rewards"].min())


def _both(one: Filter, other: Filter | str | None) -> Filter:
    if other is None:
        return one
    also: Filter = load_function(other, "dynamic_filter_fn") if isinstance(other, str) else other
    return lambda trajectory: one(trajectory) and bool(also(trajectory))
