"""What a configuration runs, and how long a step takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from areal.api.cli_args import GRPOConfig, PPOActorConfig
from areal.api.config.experiment import PPOConfig
from areal.api.config.training import OptimizerConfig, TrainEngineConfig
from areal.dataclasses import replace
from areal.errors import UsageFault
from areal.estimate import runs
from areal.estimate.memory import Served
from areal.estimate.runs import DEVICES, Reader, batch_of, forward_flops, roles, run_of, step_time
from areal.resources.backend import Part
from tests.estimate.test_memory import SHAPE

H100 = DEVICES["h100"]


def reader(tree: Mapping[str, Any]) -> Reader:
    def get(key: str, default: Any = None) -> Any:
        node: Any = tree
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        return node

    return get


GRPO = {
    "trainer": {"type": "grpo"},
    "train_dataset": {"batch_size": 32},
    "gconfig": {"n_samples": 8, "max_new_tokens": 1024},
    "rollout": {"max_head_offpolicyness": 2, "max_concurrent_rollouts": 64},
    "actor": {"path": "m", "ppo_n_minibatches": 1, "mb_spec": {"max_tokens_per_mb": 16384}},
}


FOUR = Part("fsdp", data=4)


def of(tree: Mapping[str, Any], part: Part = FOUR) -> runs.Run:
    get = reader(tree)
    batch = batch_of(get, 256, None)
    return run_of(get, dict.fromkeys(roles(get), SHAPE), part, batch, 1, on_cpu=False)


def test_defaults_match_configuration() -> None:
    engine, optimizer = TrainEngineConfig(), OptimizerConfig()
    for name, value in runs.DEFAULTS.items():
        holder: Any = optimizer if name.startswith("optimizer.") else engine
        assert getattr(holder, name.removeprefix("optimizer.")) == value, name
    config = GRPOConfig()
    assert (config.gconfig.n_samples, config.gconfig.max_new_tokens) == (runs.N_SAMPLES, runs.MAX_NEW_TOKENS)
    assert (PPOActorConfig().ppo_n_minibatches, config.train_dataset.batch_size) == (runs.N_MINIBATCHES, runs.BATCH)
    assert config.rollout.max_head_offpolicyness == 0 and PPOConfig().async_training is True


@pytest.mark.parametrize(
    ("tree", "wanted"),
    [
        ({"trainer": {"type": "sft"}, "model": {"path": "m"}}, {"model": "m"}),
        ({"trainer": {"type": "rw"}, "model": {"path": "m"}}, {"model": "m"}),
        ({"trainer": {"type": "sft"}, "actor": {"path": "m"}}, {"actor": "m"}),
        ({"trainer": {"type": "dpo"}, "actor": {"path": "m"}}, {"actor": "m", "ref": "m"}),
        ({"trainer": {"type": "grpo"}, "actor": {"path": "m"}}, {"actor": "m"}),
        ({"trainer": {"type": "grpo"}, "actor": {"path": "m"}, "ref": {"path": "r"}}, {"actor": "m", "ref": "r"}),
        ({"trainer": {"type": "ppo"}, "actor": {"path": "m"}, "critic": {"path": "c"}}, {"actor": "m", "critic": "c"}),
    ],
)
def test_estimated_models_are_those_trainer_loads(tree: Mapping[str, Any], wanted: Mapping[str, str]) -> None:
    assert roles(reader(tree)) == wanted


@pytest.mark.parametrize("kind", ["null", "grop"])
def test_other_trainer_type_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UsageFault, match=rf"trainer.type is {kind!r}"):
        roles(reader({"trainer": {"type": kind}}))


def test_micro_batches_respect_limit_with_at_least_one_row() -> None:
    [model] = of(GRPO).models
    assert model.micro_tokens == 16384
    assert model.micro_batches == -(-32 * 8 * (256 + 1024) // 4 // 16384)
    short = {**GRPO, "actor": {"path": "m", "mb_spec": {"max_tokens_per_mb": 100}}}
    assert of(short).models[0].micro_tokens == 256 + 1024
    without = {**GRPO, "actor": {"path": "m", "ppo_n_minibatches": 1}}
    assert of(without).models[0].micro_tokens == 32 * 8 * (256 + 1024) // 4 and of(without).models[0].micro_batches == 1


def test_pair_counts_as_two_rows() -> None:
    get = reader({"trainer": {"type": "dpo"}, "train_dataset": {"batch_size": 8, "max_length": 512}, "actor": {}})
    batch = batch_of(get, 128, None)
    assert batch.samples == 16 and batch.longest == 512


def test_dataset_rows_are_bounded_by_longest() -> None:
    tree = {"trainer": {"type": "sft"}, "model": {"path": "m"}, "train_dataset": {"batch_size": 8, "max_length": 100}}
    batch = batch_of(reader(tree), 256, 5000)
    assert batch.longest == 100 and batch.answer <= batch.longest


def test_reference_of_dpo_has_the_settings_of_the_actor() -> None:
    tree = {**GRPO, "trainer": {"type": "dpo"}, "actor": {"path": "m", "mb_spec": {"max_tokens_per_mb": 2048}}}
    actor, reference = of(tree).models
    assert (actor.micro_tokens, reference.micro_tokens, reference.trained) == (2048, 2048, 0)


def test_agent_answer_length_is_required_if_unset() -> None:
    get = reader({**GRPO, "gconfig": {"n_samples": 8}})
    with pytest.raises(UsageFault, match="how long the agents' answers are"):
        batch_of(get, 256, None, by_agents=True)
    assert batch_of(get, 256, 100, by_agents=True).longest == 256 + 200
    assert batch_of(get, 256, 100).longest == 256 + runs.MAX_NEW_TOKENS
    assert batch_of(reader(GRPO), 256, None, by_agents=True).longest == 256 + 1024


@pytest.mark.parametrize(
    ("prompt", "bound", "whole", "expected"),
    [
        (None, None, None, (256, 256 + 1024)),
        (None, 4096, None, (256, 4096 + 1024)),
        (None, 4096, 4500, (256, 4500)),
        (None, 100, None, (100, 100 + 1024)),
        (None, None, 3072, (256, 3072)),
        (None, None, 1100, (256, 1100)),
        (512, 4096, None, (512, 512 + 1024)),
    ],
)
def test_longest_row_has_the_longest_prompt_that_is_kept(
    prompt: int | None, bound: int | None, whole: int | None, expected: tuple[int, int]
) -> None:
    tree = {**GRPO, "gconfig": {"max_new_tokens": 1024, "max_tokens": whole}, "train_dataset": {"max_length": bound}}
    batch = batch_of(reader(tree), prompt, None)
    assert (batch.prompt, batch.longest) == expected


def test_proximal_pass_is_counted_where_it_is_made() -> None:
    for method, epochs, passes in (
        ("recompute", 1, 1), ("loglinear", 1, 0), ("reuse_train_logp", 1, 0), ("reuse_train_logp", 2, 1)
    ):  # fmt: skip
        actor = {**GRPO["actor"], "use_decoupled_loss": True, "prox_logp_method": method}  # type: ignore[dict-item]
        assert len(of({**GRPO, "actor": {**actor, "ppo_epochs": epochs}}).passes) == passes
    assert len(of({**GRPO, "actor": {**GRPO["actor"], "recompute_logprob": True}}).passes) == 1  # type: ignore[dict-item]


def test_each_model_has_its_own_layout_of_the_ranks() -> None:
    critics: tuple[dict[str, str], ...] = ({"backend": "fsdp:d4"}, {}, {"backend": "fsdp"})
    tree = {**GRPO, "trainer": {"type": "ppo"}}
    layouts = [
        str(of({**tree, "critic": each | {"path": "m"}}, Part("megatron", data=4)).models[1].part) for each in critics
    ]
    assert layouts == ["fsdp:d4", "megatron:d4", "megatron:d4"]


def test_adapters_are_the_trained_parameters() -> None:
    tree = {**GRPO, "actor": {"path": "m", "use_lora": True, "lora_rank": 8}}
    assert of(tree).models[0].trained == SHAPE.adapters(8, ())
    with pytest.raises(UsageFault, match="adapters of lm_head"):
        of({**GRPO, "actor": {"path": "m", "use_lora": True, "target_modules": ["lm_head"]}})


def test_batch_flops_are_two_per_parameter_plus_attention() -> None:
    batch = of(GRPO).batch
    attention = 2 * SHAPE.layers * SHAPE.query_width * (256 + 512)
    assert forward_flops(SHAPE, batch) == batch.tokens * (2 * SHAPE.active + attention)


def test_step_time_is_maximum_if_async_else_sum() -> None:
    served = Served(SHAPE, Part("sglang", data=4), 0.85, 1280)
    at_once = step_time(of(GRPO), served, H100)
    assert at_once.whole == max(at_once.rollout, at_once.training + at_once.update)
    synchronous = {**GRPO, "rollout": {"max_head_offpolicyness": 0, "max_concurrent_rollouts": 64}}
    after = step_time(of(synchronous), served, H100)
    assert after.whole == pytest.approx(after.rollout + after.training + after.update)


def test_more_devices_are_faster_and_checkpointing_slower() -> None:
    one, four = (step_time(of(GRPO, Part("fsdp", data=ranks)), None, H100).training for ranks in (1, 4))
    assert one == pytest.approx(4 * four)
    again = {**GRPO, "actor": {**GRPO["actor"], "gradient_checkpointing": True}}  # type: ignore[dict-item]
    assert step_time(of(again), None, H100).training == pytest.approx(4 / 3 * four)
    twice = {**GRPO, "actor": {**GRPO["actor"], "ppo_epochs": 2}}  # type: ignore[dict-item]
    assert step_time(of(twice), None, H100).training == pytest.approx(2 * four)
    run = replace(of(GRPO), concurrent=4096)
    few, many = (step_time(run, Served(SHAPE, Part("sglang", data=n), 0.85, 1280), H100).rollout for n in (1, 4))
    assert many < few


def test_training_seconds_are_flops_at_35_percent_of_peak() -> None:
    """``6P`` a token and attention, and ``2P`` for each further pass (docs/estimate.md)."""
    run = of({**GRPO, "actor": {**GRPO["actor"], "recompute_logprob": True}})  # type: ignore[dict-item]
    forward = 256 * (256 + 512) * (2 * SHAPE.active + 2 * SHAPE.layers * SHAPE.query_width * (256 + 512))
    time = step_time(run, None, H100)
    assert time.training == pytest.approx((3 + 1) * forward / (0.35 * 989e12 * 4))
    assert (time.rollout, time.update, time.whole) == (0.0, 0.0, time.training)


def test_update_seconds_are_weights_at_two_gigabytes_a_second() -> None:
    time = step_time(of(GRPO), Served(SHAPE, Part("sglang"), 0.85, 1280), H100)
    assert time.update == pytest.approx(2 * SHAPE.parameters / 2e9)


@pytest.mark.parametrize(
    ("part", "concurrent", "running"),
    [
        (Part("sglang"), 64, 64),
        (Part("sglang"), 4096, 512),  # at most two steps' samples
        (Part("sglang"), 0, 256),  # a step's samples
        (Part("sglang", data=4), 64, 16),
        (Part("sglang", data=4), 1, 1),
        (Part("sglang", tensor=2), 64, 64),
        (Part("sglang", tensor=2, pipeline=2), 64, 64),
    ],
)
@pytest.mark.parametrize("flops", [989e12, 1e12])
def test_rollout_seconds_are_reads_or_operations_and_the_prefill(
    part: Part, concurrent: int, running: int, flops: float
) -> None:
    """A token of all running sequences takes a pass over weights and caches at 0.6 of the bandwidth, or its operations
    at 0.4 of the peak if these take longer (docs/estimate.md)."""
    device = H100._replace(flops=flops)
    served = Served(SHAPE, part, 0.85, 1280)
    time = step_time(replace(of(GRPO), concurrent=concurrent), served, device)
    ranks, samples, prompt, answer = part.tensor * part.pipeline, 32 * 8, 256, 512
    read = (2 * SHAPE.parameters / ranks + running * served.token_bytes * (prompt + answer / 2)) / (0.6 * 3350e9)
    compute = 2 * SHAPE.active * running / (0.4 * flops * ranks)
    prefill = 2 * SHAPE.active * samples * prompt / (0.4 * flops * ranks * part.data)
    assert time.rollout == pytest.approx(samples / part.data * answer / running * max(read, compute) + prefill)
    assert (compute > read) == (flops == 1e12)


def test_full_cache_bounds_the_running_sequences() -> None:
    small = Served(SHAPE, Part("sglang"), 0.85, 1280, cache=40 * 1280 * Served(SHAPE, FOUR, 0.85, 1).token_bytes)
    bounded, free = (step_time(replace(of(GRPO), concurrent=each), small, H100).rollout for each in (256, 30))
    assert bounded == pytest.approx(free), "a quarter of the cache is the prefixes'"


@pytest.mark.parametrize(
    ("tree", "concurrent"),
    [
        ({"max_concurrent_rollouts": 64}, 64 * 8),
        ({"max_concurrent_rollouts": 64, "consumer_batch_size": 16}, 64 * 8),
        ({"consumer_batch_size": 16}, 16 * 8),
        ({}, 8),
    ],
)
def test_concurrent_samples_are_of_concurrent_prompts(tree: dict[str, int], concurrent: int) -> None:
    assert of({**GRPO, "rollout": tree}).concurrent == concurrent


@pytest.mark.parametrize(
    ("async_training", "staleness", "at_once"),
    [(None, 2, True), (None, 1, True), (None, 0, False), (True, 1, True), (False, 2, False)],
)
def test_rollout_and_training_overlap_if_staleness_is_allowed(
    async_training: bool | None, staleness: int, at_once: bool
) -> None:
    tree = {**GRPO, "rollout": {"max_head_offpolicyness": staleness}}
    assert of(tree if async_training is None else {**tree, "async_training": async_training}).at_once is at_once
    assert of({key: value for key, value in GRPO.items() if key != "rollout"}).at_once is False


def test_configuration_of_a_model_decides_its_bytes() -> None:
    plain = of(GRPO).models[0]
    assert (plain.compute, plain.master, plain.reduce, plain.moments, plain.checkpointing) == (2, 4, 4, 2, False)
    actor = {"path": "m", "dtype": "float32", "optimizer_dtype": "bfloat16", "grad_reduce_dtype": "float16"}
    actor |= {"optimizer": {"type": "sgd"}, "gradient_checkpointing": True, "ppo_epochs": 3, "ppo_n_minibatches": 2}  # type: ignore[dict-item]
    run = of({**GRPO, "trainer": {"type": "ppo"}, "actor": actor, "critic": {"path": "c"}, "ref": {"path": "r"}})
    model, critic, reference = run.models
    assert (model.compute, model.master, model.reduce, model.moments, model.checkpointing) == (4, 2, 2, 0, True)
    assert (model.epochs, critic.epochs) == (3, 3), "the critic's are those of the actor unless it has its own"
    assert (critic.is_critic, critic.trained) == (True, SHAPE.critic_parameters)
    assert (reference.is_critic, reference.trained) == (False, 0)
    assert run.passes == (critic, reference)


def test_reward_model_is_a_critic_and_micro_batches_have_a_limit_on_a_cpu() -> None:
    tree = {"trainer": {"type": "rw"}, "model": {"path": "m"}, "train_dataset": {"batch_size": 64, "max_length": 512}}
    get = reader(tree)
    batch = batch_of(get, 256, None)
    on_cpu, on_gpu = (run_of(get, {"model": SHAPE}, FOUR, batch, 1, on_cpu=each).models[0] for each in (True, False))
    assert (on_cpu.is_critic, on_cpu.trained) == (True, SHAPE.critic_parameters)
    assert (on_cpu.micro_tokens, on_cpu.micro_batches) == (2048, 8)
    assert (on_gpu.micro_tokens, on_gpu.micro_batches) == (2 * 64 * 512 // 4, 1)


@pytest.mark.parametrize(
    ("kind", "bound", "prompt", "answer", "wanted"),
    [
        ("sft", None, None, None, (8, 256, 256 + 512, 256)),
        ("sft", None, 100, None, (8, 100, 100 + 200, 100)),
        ("sft", None, 100, 50, (8, 100, 100 + 100, 50)),
        ("sft", 512, None, None, (8, 256, 512, 128)),
        ("sft", 512, 100, 30, (8, 100, 512, 30)),
        ("sft", 512, 600, None, (8, 511, 512, 1)),
        ("dpo", 512, None, None, (16, 256, 512, 128)),
        ("rw", 512, None, None, (16, 256, 512, 128)),
    ],
)
def test_rows_of_a_data_set_have_a_prompt_and_an_answer(
    kind: str, bound: int | None, prompt: int | None, answer: int | None, wanted: tuple[int, ...]
) -> None:
    tree = {"trainer": {"type": kind}, "train_dataset": {"batch_size": 8, "max_length": bound}}
    batch = batch_of(reader(tree), prompt, answer)
    assert (batch.samples, batch.prompt, batch.longest, batch.answer) == wanted
    assert batch.tokens == batch.samples * (batch.prompt + batch.answer)


def test_sampled_answers_are_half_of_the_longest_unless_given() -> None:
    short = {**GRPO, "gconfig": {"max_new_tokens": 1}}
    assert [batch_of(reader(tree), 10, None).answer for tree in (GRPO, short)] == [512, 1]
    assert [batch_of(reader(GRPO), 10, answer).answer for answer in (300, 5000)] == [300, 1024]
    defaults = batch_of(reader({"trainer": {"type": "ppo"}}), None, None)
    assert (defaults.samples, defaults.minibatches, defaults.longest) == (1, 4, 256 + 16384)


def test_proximal_pass_of_m2_is_always_made() -> None:
    actor = {**GRPO["actor"], "use_decoupled_loss": True, "prox_logp_method": "loglinear"}  # type: ignore[dict-item]
    counts = [len(of({**GRPO, "actor": {**actor, "m2_threshold": bound}}).passes) for bound in (None, 0.04)]
    assert counts == [0, 1]
