"""PPO and its variants (GRPO without a critic), on rollouts that are sampled during training.

A step: take a batch; run the reference, the critic and, for decoupled PPO, the proximal policy; estimate advantages;
update on minibatches, ``ppo_epochs`` times; publish the weights. The first rank talks to the rollout controller and the
weight-update gateway; every data-parallel rank trains on its share of the groups.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor

from areal.api.algorithm_api import AdvantageFn, LossFn
from areal.api.cli_args import PPOConfig, PPOCriticConfig
from areal.api.engine_api import TokenOutputs, Update, VisionEngine
from areal.errors import UsageFault
from areal.loading import load_function
from areal.rollout.controller import RolloutController
from areal.rollout.dump import episodes_of, remove_steps, write_step
from areal.rollout.failures import RolloutsFailed
from areal.services.weight_update.publisher import TrainerPair
from areal.training import stopping
from areal.training.algorithms.actor import ActorLoss, add_second_moment_mask, rows_with_gradient
from areal.training.algorithms.advantages import AuxiliaryOutputs, KLController, clipped_share, prepare
from areal.training.algorithms.losses import masked_mean, value_loss
from areal.training.batches import Batch, lengths, minibatches, select, split_groups
from areal.training.frontier import Frontier
from areal.training.metrics import Metrics, labels
from areal.training.services import connect_pair, is_probed, own_service, publish
from areal.training.trainers.base import Trainer
from areal.training.trainers.rollouts import (
    PromptStream,
    RolloutBatch,
    RolloutSource,
    Sampling,
    Validation,
    number_rows,
    rollout_controller,
    sample_rewards,
)

_log = logging.getLogger(__name__)

Filter = Callable[[Any], bool]


class MinibatchUpdate(NamedTuple):
    """An update. ``weights`` [2]: that of the computed rows, and of all. ``skipped`` [2]: the entropy of the other
    rows' tokens, and their number. It is estimated without a forward pass, by minus the log-probability of each."""

    update: Update
    weights: Tensor
    skipped: Tensor


class PPOTrainer(Trainer):
    """PPO on rollouts. ``train`` samples from the service in ``config.rollout`` (or the environment), which keeps
    running after the run. Without a service, the run starts the configured engine and stops it at its end."""

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
        """Open the run. ``loss_fn`` and ``advantage_fn`` override ``actor.loss_fn`` and ``actor.advantage_fn``."""
        self._loss_fn, self._advantage_fn = loss_fn, advantage_fn
        super().__init__(config, train_dataset, valid_dataset)

    def _open(self) -> None:
        config = self.config
        for key, why in config.training_faults():
            raise UsageFault(f"{'.'.join(key)}: {why}")
        if self.train_dataset is None and config.is_online:
            if config.total_train_steps is None:
                raise UsageFault(
                    "online training has no data set that ends; set the number of steps", hint="total_train_steps=N"
                )
            self.train_dataset = [{}] * config.train_dataset.batch_size  # each row waits for a conversation
        coefficients = {name: getattr(config.actor, name) for name in ("kl_ctl", "kl_loss_coef")}
        without_reference = [name for name, value in coefficients.items() if value and config.ref is None]
        for name in without_reference:
            setattr(config.actor, name, 0.0)  # before the run folder's configuration is written
        super()._open()
        if self.ranks.is_first:
            for name in without_reference:
                _log.warning(
                    "no KL penalty: actor.%s is %g, and there is no ref to be near to", name, coefficients[name]
                )
        self._check_batch_size()
        most = config.train_dataset.batch_size * config.gconfig.n_samples // self.ranks.data_size  # rows to share
        updates = min(config.actor.ppo_n_minibatches, max(1, most)) * config.actor.ppo_epochs
        self.actor = self.add_engine("actor", config.actor, updates)
        self.critic = None
        if config.critic is not None:
            self.critic_epochs = config.critic.ppo_epochs or config.actor.ppo_epochs
            updates = min(config.critic.ppo_n_minibatches, max(1, most)) * self.critic_epochs
            self.critic = self.add_engine("critic", config.critic, updates)
        self.reference = None
        if config.ref is not None:
            self.reference = self.add_reference(config.ref, config.actor.path)
        self.frontier = Frontier()
        self.loss = ActorLoss(config.actor, loss_fn=self._loss_fn)
        for name in ("advantage_fn", "gae_lambda"):  # fails now, not after the first rollouts
            if (function := getattr(config.actor, name)) and isinstance(function, str):
                load_function(function, f"actor.{name}")
        self.kl_controller = KLController(config.actor.kl_target, config.actor.kl_horizon)
        self._has_clipped = False
        self.rollout: RolloutController | None = None
        self.pair: TrainerPair | None = None

    def _check_batch_size(self) -> None:
        """Check that a step has ``train_dataset.batch_size`` prompts, each with ``gconfig.n_samples`` responses."""
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

    def train(
        self,
        workflow: Any = None,
        eval_workflow: Any = None,
        workflow_kwargs: Mapping[str, object] | None = None,
        eval_workflow_kwargs: Mapping[str, object] | None = None,
        dynamic_filter_fn: Filter | str | None = None,
        total_epochs: int | None = None,
    ) -> None:
        """Train to the end of the run. ``workflow``: an instance, a class, or ``module:name``. ``dynamic_filter_fn``
        accepts or rejects trajectories, after ``actor.dynamic_sampling``."""
        if total_epochs is not None and self.config.total_train_steps is None:
            self.set_total_steps(total_epochs * self.steps_per_epoch)
        accept = dynamic_filter_fn
        if self.config.actor.dynamic_sampling:
            accept = _all_of(has_reward_spread, dynamic_filter_fn)
        group = self.config.gconfig.n_samples
        self._sampling = Sampling(workflow, workflow_kwargs, accept, group, self.config.dynamic_bs)
        self._evaluation = (eval_workflow or workflow, eval_workflow_kwargs or workflow_kwargs)
        if self.ranks.is_first:
            self.report_stage("starting an inference service")
            self.stack.enter_context(own_service(self.config, self.folder))
            self.report_stage(f"connecting to the model {self.config.rollout.model or ''}".rstrip())
            self.rollout = self.stack.enter_context(rollout_controller(self.config, self.folder))
            if self.metrics_url is not None:
                self.rollout.register_scrape_target(urlsplit(self.metrics_url).netloc, labels(self.config))
            mode = self.config.weight_update_mode or self.config.actor.weight_update_mode
            service = self.rollout.service()
            pair = connect_pair(mode, self.folder, self.config.actor.path, service, self.rollout.current_address)
            self.pair = self.stack.enter_context(pair)
        self.run()

    def recover(self) -> bool:
        """Resume, and publish the weights, because those of the service are unknown. Versions only increase: a previous
        attempt may have published other weights under the versions after its newest checkpoint."""
        resumed = super().recover()
        served = self.ranks.broadcast(self._highest_version(resumed) if self.rollout is not None else None)
        if self.ranks.is_first:
            remove_steps(self.folder.trajectories, after=self.step if resumed else -1)
        self._first_version = version_to_publish(self.actor.version, served)
        self.report_stage("publishing the weights")
        self._publish(torch.arange(1, 9) % self.actor.vocab_size, self._first_version)
        self.report_stage("sampling the first answers")
        if self.rollout is not None:
            prompts = PromptStream(self._require_rows(self.train_dataset, "train_dataset"), self.order, self.frontier)
            self.source = RolloutSource(
                self.rollout,
                prompts,
                self._sampling,
                min_rollouts=self.ranks.data_size,
                temperature=self.config.gconfig.temperature,
            )
        return resumed

    def state(self) -> dict[str, Any]:
        return {"prompts": self.frontier.state(), "kl_factor": self.kl_controller.factor}

    def restore(self, state: dict[str, Any]) -> None:
        self.frontier = Frontier.restored(state["prompts"])
        self.kl_controller.factor = state.get("kl_factor", 1.0)

    def train_step(self) -> Metrics:
        with self.timings.of("rollout"):
            taken: RolloutBatch | None = self.ranks.broadcast(self._take())
        if taken is None:
            raise stopping.Stopped
        for role, engine in self.engines.items():
            if isinstance(engine, VisionEngine):
                engine.see_images(taken.images, taken.batch)
            elif taken.images:
                raise UsageFault(f"{role}: its engine does not train on prompts with images", hint="backend: fsdp:d1")
        parts = split_groups(lengths(taken.batch), taken.groups.tolist(), self.ranks.data_size)
        share = parts[self.ranks.data_rank]
        with self.timings.of("prepare"):
            batch = self._prepare_batch(select(taken.batch, share), taken.groups[share])
        metrics = self._kl_metrics(batch) | self._clipped_metrics(taken.batch["rewards"])
        with self.timings.of("train"):
            metrics |= self._update(batch)
        with self.timings.of("weights"):
            length = int(taken.batch["attention_mask"][0].sum())
            probe = taken.batch["input_ids"][0, : max(1, length - 1)]  # a sequence without its last token
            metrics |= self._publish(probe, self.actor.version + 1)
        self._write(share, batch)
        if self.ranks.is_first:
            self.source.consumed(taken.positions, self.step + 1)
            assert self.rollout is not None
            self.rollout.acknowledge(self.rollout.spent_leases())
            metrics |= self.source.counts() | {"version": float(self.actor.version)}
        return taken.metrics | metrics

    def _write(self, share: Sequence[int], batch: Batch) -> None:
        """Write the step's trajectories with their advantages, if ``rollout.dump_to_file`` is set."""
        if not self.config.rollout.dump_to_file:
            return
        parts = self.ranks.data_gather((share, mean_advantages(batch)))
        advantages = dict(pair for rows, means in parts for pair in zip(rows, means, strict=True))
        if self.ranks.is_first:
            in_order = [advantages[row] for row in range(len(advantages))]
            self.source.write(self.folder.trajectories, self.step + 1, in_order)

    def _take(self) -> RolloutBatch | None:
        """Return the batch on the first rank; None on the other ranks, and if a stop was requested."""
        if not self.ranks.is_first:
            return None
        try:
            with stopping.interruptible():
                return self.source.take()
        except stopping.Stopped:
            return None
        except RolloutsFailed as error:
            if self.step == 0 and error.is_permanent:  # another attempt would fail in the same way
                error.exit_code = UsageFault.exit_code
            raise

    def _prepare_batch(self, batch: Batch, groups: Tensor) -> Batch:
        """Add advantages, and the log-probabilities of the reference and the proximal policy if they are used."""
        config = self.config.actor
        reference = self.reference.forward(batch, _logprobs) if self.reference is not None else None
        values, after = self._values(batch) if self.critic is not None else (None, None)
        auxiliary = AuxiliaryOutputs(_cpu(reference), _cpu(values), _cpu(after))
        if values is not None:
            batch = {**batch, "old_values": values.cpu()}
        if self._needs_proximal_pass():
            batch = {**batch, "proximal": self.actor.forward(batch, _logprobs).cpu()}
        factor = self.kl_controller.factor
        batch = prepare(
            batch, groups, config, auxiliary, self._sum_over_ranks, kl_factor=factor, advantage_fn=self._advantage_fn
        )
        if config.m2_threshold is not None:
            batch = add_second_moment_mask(batch, config.m2_threshold, self.ranks.data_gather)
        return batch

    def _sum_over_ranks(self, sums: Tensor) -> Tensor:
        return self.ranks.all_sum(sums.to(self.ranks.device)).cpu()

    def _kl_metrics(self, batch: Batch) -> Metrics:
        """Return the KL divergence from the reference, if any, and update the coefficient for the next step."""
        if "kl" not in batch:
            return {}
        mask = batch["loss_mask"].bool()
        sums = torch.stack([batch["kl"][mask].sum(), mask.sum(), torch.tensor(len(mask))]).double()
        total, tokens, sequences = self._sum_over_ranks(sums).tolist()
        kl, config = total / max(tokens, 1.0), self.config.actor
        self.loss.kl_factor = self.kl_controller.factor
        metrics = {"ref_kl": kl, "kl_coef": (config.kl_ctl or config.kl_loss_coef) * self.kl_controller.factor}
        self.kl_controller.update(kl, int(sequences))
        return metrics

    def _clipped_metrics(self, rewards: Tensor) -> Metrics:
        """Return the share of rewards that are clipped, if there are any, and warn of the first ones."""
        if not (share := clipped_share(rewards, self.config.actor)):
            return {}
        if not self._has_clipped:
            self._note(
                f"warning: actor.reward_clip is {self.config.actor.reward_clip:g}, and {share:.0%} of the rewards are "
                f"beyond it (the largest is {float(rewards.abs().max()):g}): they count as equal; raise it, or lower "
                "actor.reward_scaling"
            )
        self._has_clipped = True
        return {"reward/clipped": share}

    def _needs_proximal_pass(self) -> bool:
        """Return whether the proximal log-probabilities need a forward pass before the update."""
        config = self.config.actor
        if not config.use_decoupled_loss:
            return config.recompute_logprob
        method = "recompute" if config.m2_threshold is not None else config.prox_logp_method
        updates = config.ppo_n_minibatches * config.ppo_epochs
        return method != "loglinear" and not (method == "reuse_train_logp" and updates == 1)

    def _values(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert self.critic is not None
        values = self.critic.forward(batch, lambda outputs, micro: outputs.values)
        last = batch["attention_mask"].sum(1, keepdim=True).to(values.device) - 1
        return _state_values(values), values.gather(1, last)[:, 0]

    def _update(self, batch: Batch) -> Metrics:
        config = self.config.actor
        self.loss.version = self.actor.version
        parts = self._minibatches(batch, config.ppo_n_minibatches) * config.ppo_epochs
        done = [self._update_minibatch(select(batch, part), is_first=not number) for number, part in enumerate(parts)]
        updates = [each.update for each in done]
        metrics = _update_metrics(updates) | {"lr": updates[-1].learning_rate}
        names, sums = self.loss.pop_sums()
        totals = self.ranks.all_sum(sums)
        means = (totals[:-1] / totals[-1].clamp(min=1)).tolist()
        metrics |= dict(zip(names, means, strict=True))
        if (mismatch := self.loss.pop_mismatch()) is not None:
            total, tokens = self.ranks.all_sum(mismatch).tolist()
            metrics["mismatch_kl"] = total / max(tokens, 1.0)
        first_epoch = done[: len(done) // config.ppo_epochs]
        skipped, tokens = self._sum_over_ranks(torch.stack([each.skipped for each in first_epoch]).sum(0)).tolist()
        trained = float(totals[-1]) / config.ppo_epochs
        metrics["trained_entropy"] = metrics["entropy"]
        metrics["entropy"] = (metrics["entropy"] * trained + skipped) / max(trained + tokens, 1.0)
        computed, whole = torch.stack([each.weights for each in done]).sum(0).tolist()
        metrics["trained_share"] = computed / max(whole, 1.0)
        return metrics | (self._update_critic(batch) if self.critic is not None else {})

    def _update_minibatch(self, batch: Batch, *, is_first: bool) -> MinibatchUpdate:
        """Update on the rows with a gradient. The others stay in the denominator of the loss."""
        rows = rows_with_gradient(batch, self.config.actor, own_loss=self._loss_fn is not None)
        chosen, others = select(batch, rows), sorted(set(range(len(batch["loss_mask"]))) - set(rows))
        counts = torch.stack([self.loss.weight(chosen), self.loss.weight(batch)]).double().to(self.ranks.device)
        weights = self.ranks.all_sum(counts).cpu()
        self.loss.share = float(weights[0] / weights[1].clamp(min=1.0))
        self.loss.is_first_update = is_first
        logprobs = batch["logprobs"][others]
        known = batch["loss_mask"][others].bool() & torch.isfinite(logprobs)
        skipped = torch.stack([-logprobs[known].sum(), known.sum()]).double()
        return MinibatchUpdate(self.actor.train_batch(chosen, self.loss, self.loss.weight), weights, skipped)

    def _minibatches(self, batch: Batch, count: int) -> list[list[int]]:
        """Return the minibatches. Every rank makes as many steps as the rank with the fewest rows."""
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
        return {f"critic/{name}": value for name, value in _update_metrics(updates).items()}

    def _highest_version(self, resumed: bool) -> int | None:
        """Return the highest version that may have been sampled from: that of a server, or the last update of a
        previous attempt, which servers that were killed with it do not report."""
        assert self.rollout is not None
        versions = [self.rollout.served_version()]
        if resumed or self.folder.attempt > 1:
            versions.append(self.folder.published_version())
        return max((version for version in versions if version is not None), default=None)

    def _publish(self, sample: Tensor, version: int) -> Metrics:
        """Publish the actor's weights as ``version``. Later rollouts are sampled from them."""
        if self.rollout is not None:
            self.folder.note_version(version)
        probed = sample if is_probed(version, self._first_version) else None
        delivered = publish(self.actor, self.pair, version, probed)
        self.actor.version = version
        if self.rollout is None or delivered is None:
            return {}
        self.rollout.set_version(version)
        return {"weights/ms": delivered.duration_ms, "weights/paused_ms": delivered.paused_ms}

    def evaluate(self) -> Metrics:
        """Return the rewards of the validation set with confidence intervals, pass@k and lengths, sampled from the
        served weights."""
        if not self.valid_dataset:
            return {}
        metrics: Metrics = {}
        if self.rollout is not None:
            workflow, kwargs = self._evaluation
            rows, samples = number_rows(self.valid_dataset), 1
            if self.config.eval_gconfig is not None:
                samples = self.config.eval_gconfig.n_samples
            rollouts = self.rollout.run_batch(rows, workflow, kwargs, group_size=samples, is_eval=True)
            if self.config.rollout.dump_to_file:
                model = self.rollout.model
                episodes = [sample for each in rollouts for sample in episodes_of(each, model, step=self.step)]
                write_step(self.folder.trajectories, self.step, episodes, is_eval=True)
            validation = Validation(self.config.evaluator, samples)
            validation.add(rollouts)
            metrics = validation.metrics(len(rows))
            self.progress.info(f"evaluation after step {self.step}: {validation.summary(metrics)}")
        return self.ranks.broadcast(metrics)


def _update_metrics(updates: Sequence[Update]) -> Metrics:
    return {
        "loss": sum(update.loss for update in updates) / len(updates),
        "grad_norm": max(update.grad_norm for update in updates),
    }


def _logprobs(outputs: TokenOutputs, micro: Batch) -> Tensor:
    return outputs.logprobs


def critic_loss(config: PPOCriticConfig) -> Callable[[TokenOutputs, Batch], Tensor]:
    """Return the value loss, averaged over the tokens of the loss mask."""

    def loss(outputs: TokenOutputs, micro: Batch) -> Tensor:
        values, mask = _state_values(outputs.values), micro["loss_mask"].bool()
        return masked_mean(value_loss(values, micro["old_values"], micro["returns"], mask, config.eps_clip), mask)

    return loss


def version_to_publish(own: int, served: int | None) -> int:
    """Return the version for weights that were saved as ``own`` (0 in a new run), if servers have at most ``served``.
    One version never names two sets of weights."""
    return own if served is None or served <= own else served + 1


def mean_advantages(batch: Mapping[str, Tensor]) -> list[float | None]:
    """Return the mean of each row over the tokens of its loss mask; None if that is empty."""
    mask = batch["loss_mask"].bool()
    sums, counts = torch.where(mask, batch["advantages"], 0.0).sum(1).tolist(), mask.sum(1).tolist()
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def _state_values(values: Tensor) -> Tensor:
    """Shift values right: the critic's output at token t - 1 is the value of the state before token t."""
    return torch.nn.functional.pad(values[:, :-1], (1, 0))


def _cpu(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.float().cpu()


def has_reward_spread(trajectory: Mapping[str, Tensor]) -> bool:
    """Return whether the rewards of a group's samples differ: with equal ones it has no gradient (dynamic sampling,
    arXiv 2503.14476). The turns of its only sample are compared with each other."""
    rewards = sample_rewards(trajectory)
    rewards = rewards if len(rewards) > 1 else trajectory["rewards"]
    return bool(rewards.max() > rewards.min())


def _all_of(first: Filter, second: Filter | str | None) -> Filter:
    if second is None:
        return first
    function: Filter = load_function(second, "dynamic_filter_fn") if isinstance(second, str) else second
    return lambda trajectory: first(trajectory) and bool(function(trajectory))
