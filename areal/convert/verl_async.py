"""verl's asynchronous trainers, ``one_step_off_policy`` and ``fully_async_policy``.

Trainer and engine have separate GPUs. Sampling is one step ahead, or fills a queue of samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from areal.convert.drafts import Draft, Fate
from areal.convert.rules import SPEED, Framework, Rule, alike, ignored, joint, number, period, refused, to, whole
from areal.convert.verl import finish
from areal.convert.verl_keys import ACTOR, ALIASES, DEFAULTS, ROLLOUT, RULES, SWITCHES

_APART: Mapping[str, Rule] = {
    **RULES,
    "rollout.nnodes": joint("Model backend", whole(1)),
    "rollout.n_gpus_per_node": joint("Model backend", whole(1)),
}
_APART_DEFAULTS = {**DEFAULTS, "rollout.nnodes": 1, "rollout.n_gpus_per_node": 8}
_QUEUE: Mapping[str, Rule] = {
    **_APART,
    **alike(ignored("ppo_mini_batch_size and async_training say it"), "data.train_batch_size data.gen_batch_size"),
    "rollout.total_rollout_steps": joint("total_train_steps", whole(1), neutral=(None,)),
    "rollout.total_epochs": to("total_train_epochs", whole(1)),
    "rollout.test_freq": to("evaluator.freq_steps", period),
    "rollout.n": ignored(f"{ROLLOUT}.n is used"),
    "trainer.total_epochs": ignored("rollout.total_epochs is used"),
    "trainer.test_freq": ignored("rollout.test_freq is used"),
    "trainer.total_training_steps": ignored("rollout.total_rollout_steps is used"),
    "async_training.staleness_threshold": joint("rollout.max_head_offpolicyness", number),
    **alike(
        joint("train_dataset.batch_size", whole(1)), "trigger_parameter_sync_step require_batches", "async_training"
    ),
    "async_training.partial_rollout": ignored("a generation goes on with new weights always"),
    "async_training.compute_prox_log_prob": joint("actor.recompute_logprob"),
    "async_training.use_rollout_log_probs": joint("actor.recompute_logprob"),
    "async_training.use_trainer_do_validate": SPEED,
    "async_training.use_dynamic_resource_scheduling": refused("the GPUs stay where they are", False),
    "async_training.*": ignored("it is of use_dynamic_resource_scheduling"),
    "async_training.checkpoint_engine.*": SPEED,
    f"{ACTOR}.use_rollout_log_probs": ignored("it is async_training.use_rollout_log_probs"),
    "actor_rollout_ref.checkpoint_engine": SPEED,
}
_QUEUE_DEFAULTS = {
    **{key: value for key, value in _APART_DEFAULTS.items() if _QUEUE[key].fate is Fate.MAPPED},
    "rollout.total_epochs": 10,
    "rollout.total_rollout_steps": 100,
    "rollout.test_freq": 1,
    "async_training.staleness_threshold": 0.1,
    "async_training.trigger_parameter_sync_step": 4,
    "async_training.require_batches": 1,
    "async_training.use_rollout_log_probs": True,
    "async_training.compute_prox_log_prob": False,
}


def _finish_one_step_off(draft: Draft) -> None:
    draft.set("rollout.max_head_offpolicyness", 1)
    finish(draft)


def _finish_queue(draft: Draft) -> None:
    """Set what depends on several keys of ``fully_async_policy``. A step is the data between two weight updates."""
    values, syncs = draft.values, "async_training.trigger_parameter_sync_step"
    minibatches = draft.number(syncs) * draft.number("async_training.require_batches")
    batch = minibatches * draft.number(f"{ACTOR}.ppo_mini_batch_size")
    draft.set("train_dataset.batch_size", batch)
    if draft.is_given(syncs):
        draft.mark(syncs, Fate.MAPPED, f"{batch} prompts between two pushes are a step", "train_dataset.batch_size")
    if (total := values.get("rollout.total_rollout_steps")) is not None:
        draft.set("total_train_steps", max(1, int(total) // batch))
    key = "async_training.staleness_threshold"
    stale = float(values[key])
    draft.set("rollout.max_head_offpolicyness", math.ceil(stale))
    if stale % 1:
        note = f"verl bounds the share of stale samples; here each may be {math.ceil(stale)} version old"
        draft.mark(key, Fate.LOSSY, note, "rollout.max_head_offpolicyness")
    engines = values["async_training.use_rollout_log_probs"] and not values["async_training.compute_prox_log_prob"]
    values = {key: value for key, value in values.items() if key != "data.gen_batch_size"}
    draft.values = {**values, "algorithm.rollout_correction.bypass_mode": engines}
    finish(draft)


ONE_STEP_OFF = Framework(
    "verl's one_step_off_policy",
    _APART,
    {**_APART_DEFAULTS, "algorithm.rollout_correction.bypass_mode": True},
    _finish_one_step_off,
    aliases=ALIASES,
    switches=SWITCHES,
)
FULLY_ASYNC = Framework(
    "verl's fully_async_policy", _QUEUE, _QUEUE_DEFAULTS, _finish_queue, aliases=ALIASES, switches=SWITCHES
)
