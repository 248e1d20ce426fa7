"""Configurations from files and command lines: what is read, and how faults are reported."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.api import cli_args
from areal.api.cli_args import (
    BaseExperimentConfig,
    ConfigError,
    DPOConfig,
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    PPOActorConfig,
    SFTConfig,
    load_expr_config,
)
from areal.api.config.fields import build
from areal.errors import FieldError, NotFound, UsageFault
from areal.wire.fields import Faults

AREAL = Path(__file__).parents[1] / "drivers" / "gsm8k_grpo.yaml"
SMALL = "experiment_name: e\ntrial_name: t\n"


@dataclass
class Checked(GRPOConfig):
    level: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level >= 3:
            raise FieldError("level", "must be below 3")
        if self.name:
            raise ValueError(f"the name {self.name} is taken")


def load(tmp_path: Path, text: str, *overrides: str, cls: type[Any] = GRPOConfig) -> Any:
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    config, _ = load_expr_config(["--config", str(file), *overrides], cls)
    return config


def faults(tmp_path: Path, text: str, *overrides: str, cls: type = GRPOConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides, cls=cls)
    return str(caught.value).replace(str(tmp_path), "")


def test_areal_file_loads_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config, file = load_expr_config(["driver.py", "--config", str(AREAL)], GRPOConfig)
    assert file == str(AREAL)
    assert config.actor.optimizer is not None
    assert (config.actor.optimizer.lr, config.actor.optimizer.eps) == (1.7e-5, 1e-8)
    assert config.rollout.consumer_batch_size == config.rollout.max_concurrent_rollouts == 256
    assert config.tokenizer_path == config.rollout.tokenizer_path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.sglang.mem_fraction_static == 0.8
    assert config.actor.rejection_sampling is not None and config.actor.rejection_sampling.upper == 5.0
    assert config.ref is not None and config.ref.optimizer is None
    assert config.gconfig.n_samples > 1 and config.eval_gconfig == config.gconfig.new(n_samples=1)
    assert any("gsm8k_grpo.yaml:119: train_dataset.pin_memory: has no effect" in message for message in caplog.messages)


def test_top_level_values_are_inherited(tmp_path: Path) -> None:
    config = load(tmp_path, SMALL + "cluster: {fileroot: /runs}\nsaver: {freq_steps: 1}\nactor: {path: m}\n")
    assert (config.saver.experiment_name, config.saver.trial_name, config.saver.fileroot) == ("e", "t", "/runs")
    assert config.rollout.fileroot == "/runs"
    assert config.tokenizer_path == "m"


def test_shared_part_is_copied_per_configuration() -> None:
    saver = cli_args.SaverConfig()
    configs = [
        cli_args.SFTConfig(
            experiment_name="e", trial_name="t", cluster=cli_args.ClusterSpecConfig(fileroot=root), saver=saver
        )
        for root in ("/one", "/two")
    ]
    assert [config.saver.fileroot for config in configs] == ["/one", "/two"] and saver == cli_args.SaverConfig()
    assert all(config.actor is config.model for config in configs)


def test_interpolation_sees_the_defaults_of_the_class(tmp_path: Path) -> None:
    config = load(tmp_path, SMALL + "actor: {group_size: '${gconfig.n_samples}'}\n", "gconfig.n_samples=8")
    assert config.actor.group_size == 8
    assert load(tmp_path, SMALL + "seed: ${gconfig.n_samples}\n").seed == 1


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("actor.optimizer.lr=3e-4", lambda c: c.actor.optimizer.lr == 3e-4),
        ("gconfig.stop=[a, b]", lambda c: c.gconfig.stop == ["a", "b"]),
        ("+sglang.attention_backend=fa3", lambda c: c.sglang.attention_backend == "fa3"),
        ("++sglang.dtype=half", lambda c: c.sglang["dtype"] == "half"),
        ("valid_dataset=null", lambda c: c.valid_dataset is None),
        ("~train_dataset.path", lambda c: c.train_dataset.path == ""),
        ("~train_dataset.path=openai/gsm8k", lambda c: c.train_dataset.path == ""),
        ("trial_name=7", lambda c: c.trial_name == "7"),
        ("rollout.scheduling_spec.0.gpu=2", lambda c: c.rollout.scheduling_spec[0].gpu == 2),
        ("trainer.type=null", lambda c: c.trainer.type == "null"),
        ("trainer.grpo.actor.path=mine", lambda c: c.actor.path == "mine"),
        ("min_required_servers=17", lambda c: c.rollout.min_required_servers == 17),
        ("shutdown_server_on_exit=False", lambda c: c.rollout.shutdown_server_on_exit is False),
        ("allocation_mode=sglang.d16p1m1+d32p1m1", lambda c: c.allocation_mode == "sglang.d16p1m1+d32p1m1"),
    ],
)
def test_override_changes_one_key(override: str, read) -> None:
    argv = ["--config", str(AREAL), override]
    if override.startswith("rollout.scheduling_spec"):
        argv.insert(2, "rollout.scheduling_spec=[{gpu: 1}]")
    config, _ = load_expr_config(argv, GRPOConfig)
    assert read(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actor: {optimiser: 1}\n", '/config.yaml:3: actor.optimiser: there is no such key (did you mean "opt'),
        ("actor:\n  optimizer:\n    lr: fast\n", "/config.yaml:5: actor.optimizer.lr: must be a number, not 'fast'"),
        ("seed: 1.5\n", "/config.yaml:3: seed: must be a whole number, not 1.5"),
        ("seed: true\n", "/config.yaml:3: seed: must be a whole number, not True"),
        ("actor: {dtype: bf16}\n", "must be one of float32, bfloat16, float16, not 'bf16'"),
        ("actor: [1]\n", "/config.yaml:3: actor: must be a map, not a list"),
        ("gconfig:\n  temperature: -1\n", "/config.yaml:4: gconfig.temperature: must be from 0 to 2"),
        ("actor: {backend: 'megatron:t2', use_lora: true}\n", "use_lora: is not supported by the megatron engine"),
        ("actor: {megatron: {async_save: true}}\n", "actor.megatron.async_save: is not supported"),
        ("allocation_mode: fsdp:p2\n", "fsdp has no pipeline parallelism"),
        ("allocation_mode: fsdp:d4\nactor: {backend: fsdp}\n", "actor.backend: fsdp alone is one device, and"),
        ("actor: {backend: 'fsdp:d2c2'}\n", "/config.yaml:3: actor.backend: is fsdp:d2c2, and fsdp has data"),
        ("actor: {use_lora: true, backend: 'fsdp:t2'}\n", "actor.use_lora: does not work with backend fsdp:d1t2"),
        ("rollout: {backend: 'fsdp:d2'}\n", "/config.yaml:3: rollout.backend: column 1: unknown engine"),
        ("recover: {no_save_optim: true}\n", "/config.yaml:3: recover.no_save_optim: is not supported"),
        ("seed: ${sed}\n", "Interpolation key 'sed' not found"),
        ("seed: [\n", "/config.yaml:4:1: "),
        ("seed: 1\nseed: 2\n", "/config.yaml:4:1: found duplicate key seed"),
    ],
)  # fmt: skip
def test_fault_names_file_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    assert message in faults(tmp_path, SMALL + text)


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    text = faults(tmp_path, "seed: x\nactor: {nope: 1}\n")
    assert [line.split(": ")[1] for line in text.splitlines()] == [
        "seed",
        "actor.nope",
        "experiment_name",
        "trial_name",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.optimizr.lr=1", 'there is no key actor.optimizr.lr (did you mean "actor.optimizer"?)'),
        ("actor.optimizer.lr=fast", "command line, actor.optimizer.lr=fast: actor.optimizer.lr: must be a number"),
        ("seed", "'seed' has no value: write seed=value"),
        ("=1", "'=1' is no override"),
        ("~nothing", "~nothing: the file has no such key"),
        ("~trial_name=other", "~trial_name: the file says 't' there"),
        ("seed.x=1", "there is no key seed.x"),
        ("+trial_name.x=1", "trial_name is 't', it has no keys"),
        ("+unknown=1", "command line, +unknown=1: unknown: there is no such key"),
        ("~actor.optimizer.lrr", '~actor.optimizer.lrr: the file has no such key (did you mean "actor.optimizer.lr"?)'),
        ("trial_name=${actor.pth}", "command line, trial_name=${actor.pth}: trial_name: Interpolation key 'actor.pth'"),
        ("trial_name=${actor.pth}", 'not found (did you mean "actor.path"?)'),
        ("trial_name=${actor", "command line: the value '${actor' is no YAML: quote it"),
        ("total_train_steps=0", "total_train_steps: must be at least 1, not 0"),
        ("actor.ppo_n_minibatches=0", "ppo_n_minibatches: must be at least 1, not 0"),
    ],
)
def test_bad_override_is_quoted(tmp_path: Path, override: str, message: str) -> None:
    assert message in faults(tmp_path, SMALL, override)


@pytest.mark.parametrize(("word", "mode"), [("off", "off"), ("on", "on"), ("'off'", "off"), ("auto", "auto")])
def test_yaml_boolean_words_are_read_as_recover_mode(tmp_path: Path, word: str, mode: str) -> None:
    assert load(tmp_path, SMALL + f"recover: {{mode: {word}}}\n").recover.mode == mode
    assert load(tmp_path, SMALL, f"recover.mode={word}").recover.mode == mode


def test_missing_file_and_missing_flag_have_distinct_errors(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no configuration file"):
        load_expr_config(["--config", str(tmp_path / "none.yaml")], GRPOConfig)
    with pytest.raises(UsageFault, match="nothing is configured: --config FILE"):
        load_expr_config([], GRPOConfig)


def test_driver_fields_are_read(tmp_path: Path) -> None:
    @dataclass
    class Tool:
        retries: int = 1

    @dataclass
    class Mine(BaseExperimentConfig):
        turns: int = 2

    config = load(tmp_path, SMALL + "turns: 4\n", cls=Mine)
    assert config.turns == 4


class Speed(Enum):
    FAST = "fast"
    SLOW = "slow"


@dataclass
class Server:
    url: str
    port: int = 80


@dataclass
class Own(GRPOConfig):
    """Types that drivers' own configurations have."""

    anything: object = None
    bare: list = field(default_factory=list)
    pair: tuple[int, str] = (1, "x")
    numbers: tuple[int, ...] = ()
    names: set[str] = field(default_factory=set)
    more: Sequence[dict[str, float]] = ()
    folder: Path = Path()
    speed: Speed = Speed.FAST
    server: Server | None = None
    hook: Callable[[], None] | None = None


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("anything={a: [1]}", {"a": [1]}),
        ("bare=[1, a]", [1, "a"]),
        ("pair=[2, y]", (2, "y")),
        ("numbers=[1, 2]", (1, 2)),
        ("names=[a, b, a]", {"a", "b"}),
        ("more=[{a: 1}]", [{"a": 1.0}]),
        ("folder=/x", Path("/x")),
        ("speed=slow", Speed.SLOW),
        ("speed=SLOW", Speed.SLOW),
        ("server={url: u}", Server("u")),
        ("server.url=v", Server("v")),
    ],
)
def test_driver_types_are_read(tmp_path: Path, override: str, value: object) -> None:
    assert getattr(load(tmp_path, SMALL, override, cls=Own), override.partition("=")[0].partition(".")[0]) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pair: [1]\n", "/config.yaml:3: pair: must be a list of 2, not a list"),
        ("pair: [1, {}]\n", "/config.yaml:3: pair.1: must be text, not a map"),
        ("speed: slwo\n", "/config.yaml:3: speed: must be one of fast, slow, not 'slwo' (did you mean \"slow\"?)"),
        ("server: {port: 1}\n", "/config.yaml:3: server.url: is needed"),
        ("names: [a, [b]]\n", "/config.yaml:3: names.1: must be text, not a list"),
        ("hook: print\n", "/config.yaml:3: hook: is of type Callable, which no configuration file can say"),
    ],
)
def test_fault_in_driver_types_is_named(tmp_path: Path, text: str, message: str) -> None:
    assert faults(tmp_path, SMALL + text, cls=Own) == message


def test_driver_class_error_has_place_of_its_field(tmp_path: Path) -> None:
    assert faults(tmp_path, SMALL + "level: 3\n", cls=Checked) == "/config.yaml:3: level: must be below 3"
    assert faults(tmp_path, SMALL + "name: level\n", cls=Checked) == "/config.yaml: the name level is taken"


def test_sft_takes_model_or_actor(tmp_path: Path) -> None:
    for name in ("model", "actor"):
        config = load(tmp_path, SMALL + f"{name}: {{path: m, backend: 'fsdp:d2'}}\n", cls=SFTConfig)
        assert config.model.path == config.actor.path == config.tokenizer_path == "m"
    assert "give one of them" in faults(tmp_path, SMALL + "model: {path: a}\nactor: {path: b}\n", cls=SFTConfig)


@pytest.mark.parametrize("old", ["behave", "behav"])
def test_old_importance_weight_cap_maps_to_rejection_sampling(old: str) -> None:
    def capped(mode: str) -> PPOActorConfig:
        given: dict[str, Any] = {f"{old}_imp_weight_cap": 3.0, f"{old}_imp_weight_mode": mode}
        return PPOActorConfig(**given)

    found = capped("sequence_truncate").rejection_sampling
    assert found is not None and (found.level, found.action, found.upper) == ("sequence", "clamp", 3.0)
    assert capped("disabled").rejection_sampling is None
    with pytest.raises(ValueError, match="must be one of token_mask"):
        capped("mask")


def test_older_spellings_map_to_new_ones(tmp_path: Path) -> None:
    text = """
actor: {weight_update_mode: nccl, group_reward_norm: true, adv_norm: true}
checkpointer: {freq_epochs: 2, freq_steps: 3}
recover: {mode: auto, freq_steps: 5}
"""
    config = load(tmp_path, SMALL + text)
    batch, group = cli_args.NormConfig(), cli_args.NormConfig("group", std_level="group")
    assert config.actor.weight_update_mode == "xccl"
    assert (config.actor.reward_norm, config.actor.adv_norm) == (group, batch)
    assert (config.recover.mode, config.recover.freq_epochs, config.recover.freq_steps) == ("auto", 2, 5)
    assert load(tmp_path, SMALL + "actor: {adv_norm: false}\n").actor.adv_norm is None
    assert load(tmp_path, SMALL + "actor: {group_adv_norm: false}\n").actor.adv_norm == batch
    assert load(tmp_path, SMALL + "actor: {adv_norm: false, group_adv_norm: false}\n").actor.adv_norm is None
    assert load(tmp_path, SMALL + "actor: {adv_norm: true, group_adv_norm: true}\n").actor.adv_norm == group


def test_explicit_kl_penalty_requires_reference(tmp_path: Path) -> None:
    reply = faults(tmp_path, SMALL + "actor:\n  kl_ctl: 0.05\n")
    assert reply.startswith("/config.yaml:4: actor.kl_ctl: 0.05 charges for the distance from a reference model, and")
    assert faults(tmp_path, SMALL, "actor.kl_ctl=1").startswith("command line, actor.kl_ctl=1: actor.kl_ctl: 1 charges")
    nested = "trainer:\n  grpo:\n    actor: {kl_ctl: 0.1}\n"
    assert faults(tmp_path, SMALL + nested).startswith("/config.yaml:5: actor.kl_ctl: ")
    assert load(tmp_path, SMALL + "actor: {kl_ctl: 0.05}\nref: {}\n").actor.kl_ctl == 0.05
    assert load(tmp_path, SMALL + "actor: {kl_ctl: 0}\n").ref is None
    assert load(tmp_path, SMALL).ref is None, "as AReaL's files have it, where the default has no effect"


def test_fault_in_areal_lite_nesting_has_its_line(tmp_path: Path) -> None:
    text = "trainer:\n  grpo:\n    gconfig: {n_samples: 0}\n"
    assert faults(tmp_path, SMALL + text).startswith("/config.yaml:5: gconfig.n_samples: must be at least 1")
    reply = faults(tmp_path, SMALL, "+trainer.grpo.kl_ctl=1")
    assert reply == "command line, +trainer.grpo.kl_ctl=1: kl_ctl: there is no such key"


def test_defaults_match_what_drivers_rely_on() -> None:
    generation, rollout, dpo = GenerationHyperparameters(), InferenceEngineConfig(), DPOConfig()
    assert (generation.max_new_tokens, generation.max_tokens, generation.temperature) == (16384, 32768, 1.0)
    assert (rollout.max_head_offpolicyness, rollout.request_timeout, rollout.request_retries) == (0, 3600, 3)
    assert dpo.actor.beta == 0.1
    assert generation.new(n_samples=4).n_samples == 4 and generation.n_samples == 1


CLASSES = [getattr(cli_args, name) for name in cli_args.__all__ if dataclasses.is_dataclass(getattr(cli_args, name))]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_default_is_valid_for_its_type(cls: type) -> None:
    """What a class says by itself can be written down and read again, and is the same."""
    faults_, default = Faults(), cls()
    again = build(cls, dataclasses.asdict(default), faults_, ("part",))
    assert faults_.found == [] and faults_.ineffective == []
    assert again == default


FIELDS = st.sampled_from([each.name for each in dataclasses.fields(InferenceEngineConfig)])
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(FIELDS, st.recursive(PLAIN, st.lists), max_size=6))
def test_builder_accepts_any_value(values: dict[str, object]) -> None:
    found = Faults()
    config = build(InferenceEngineConfig, values, found, ("rollout",))
    assert (config is None) == bool(found.found)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["seed", "gconfig.stop", "actor.path", "+sglang.x", "~seed"]), st.text())
def test_any_override_gives_config_or_known_error(key: str, value: str) -> None:
    try:
        load_expr_config(["--config", str(AREAL), f"{key}={value}"], GRPOConfig)
    except (ConfigError, UsageFault) as error:
        assert str(error)


NAMES = ("experiment_name=e", "trial_name=t")


def test_overrides_alone_are_a_configuration() -> None:
    config, file = load_expr_config([*NAMES, "actor.path=m", "gconfig.n_samples=4"], GRPOConfig)
    assert (config.experiment_name, config.actor.path, config.gconfig.n_samples, file) == ("e", "m", 4, "")
    with pytest.raises(ConfigError, match=r"there is no key gconfig\.n_sample"):
        load_expr_config([*NAMES, "gconfig.n_sample=4"], GRPOConfig)
    with pytest.raises(ConfigError, match=r"command line, gconfig\.n_samples=0"):
        load_expr_config([*NAMES, "gconfig.n_samples=0"], GRPOConfig)
    with pytest.raises(ConfigError, match="experiment_name"):
        load_expr_config(["actor.path=m"], GRPOConfig)


@pytest.mark.parametrize(
    "word", ["gconfig.lora_name=my-adapter", "rollout.lora_name=my-adapter", "enable_offload=true"]
)
def test_setting_without_effect_is_accepted_with_warning(word: str, caplog: pytest.LogCaptureFixture) -> None:
    load_expr_config([*NAMES, word], GRPOConfig)
    assert f"command line, {word}: {word.partition('=')[0]}: has no effect: " in caplog.text


def test_clip_may_be_zero_but_not_negative() -> None:
    assert load_expr_config([*NAMES, "actor.eps_clip=0"], GRPOConfig)[0].actor.eps_clip == 0
    with pytest.raises(ConfigError, match="must not be negative"):
        load_expr_config([*NAMES, "actor.eps_clip=-0.1"], GRPOConfig)
