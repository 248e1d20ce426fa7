"""OpenRLHF's keys, verl's SFT trainers and AReaL's own configurations: what they become."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from areal.convert.areal import TRAINERS, trainer_of
from areal.convert.areal import convert as convert_areal
from areal.convert.drafts import Draft, Fate
from areal.convert.rules import convert
from areal.convert.sources import SOURCES, read_keys
from areal.dataset.loading import get_custom_dataset
from areal.reconcilers.kinds.job_config import checked
from tests.convert.test_verl import fates, loaded

OPENRLHF, VERL = SOURCES["openrlhf"].trainers, SOURCES["verl"].trainers
BASE = {
    "actor.model_name_or_path": "org/model",
    "data.prompt_dataset": "org/rows",
    "data.apply_chat_template": True,
    "reward.remote_url": "score.py",
}


def ppo(**changes: Any) -> Draft:
    return convert(OPENRLHF["ppo"], {**BASE, **changes})


def test_openrlhf_ppo_converts_to_equal_ppo(tmp_path: Path) -> None:
    config = loaded(ppo(), tmp_path)
    assert (config.train_dataset.batch_size, config.actor.ppo_n_minibatches) == (1024, 8)
    assert config.critic is not None and config.critic.optimizer is not None and config.ref is not None
    assert (config.critic.optimizer.lr, config.critic.eps_clip, config.actor.kl_ctl) == (9e-6, 0.5, 0.01)
    optimizer = config.actor.optimizer
    assert optimizer is not None
    assert (optimizer.lr, optimizer.beta2, optimizer.lr_scheduler_type, optimizer.min_lr_ratio) == (
        1e-6,
        0.95,
        "cosine",
        0.1,
    )
    assert config.recover.mode == "disabled" and config.rollout.max_head_offpolicyness == 0


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        # a schedule of transformers: min_lr_ratio is of cosine_with_min_lr, and constant has no warm-up
        ({"actor.lr_scheduler": "cosine"}, {"actor.optimizer.min_lr_ratio": 0.0}),
        ({"actor.lr_scheduler": "constant"}, {"actor.optimizer.warmup_steps_proportion": 0.0}),
        (
            {"train.max_epochs": 2},
            {"actor.ppo_epochs": 2, "critic.ppo_epochs": 2},
        ),
        (
            {"critic.lr_scheduler": "linear"},
            {"critic.optimizer.min_lr_ratio": 0.0, "actor.optimizer.min_lr_ratio": 0.1},
        ),
        # gamma is 1 where there is a baseline, and rewards are clipped after it
        (
            {"algo.advantage.estimator": "rloo", "algo.advantage.gamma": 0.9},
            {"actor.discount": 1.0, "actor.reward_clip": 1e9},
        ),
        (
            {"algo.advantage.estimator": "reinforce", "algo.advantage.gamma": 0.9},
            {"actor.discount": 0.9, "actor.reward_clip": 10.0},
        ),
        # flags of one or two versions
        ({"use_kl_estimator_k3": True}, {"actor.kl_estimator": "k3"}),
        (
            {"use_icepop": True, "algo.advantage.is_correction_enable": True},
            {"actor.rejection_sampling.action": "mask", "actor.rejection_sampling.level": "token"},
        ),
        # the ratio is to the log-probabilities of the trainer, or of the engine where gspo is corrected
        ({}, {"actor.recompute_logprob": True, "actor.use_decoupled_loss": False}),
        (
            {"algo.advantage.is_correction_enable": True},
            {"actor.recompute_logprob": False, "actor.use_decoupled_loss": True},
        ),
        (
            {"algo.advantage.is_correction_enable": True, "actor.policy_loss_type": "gspo"},
            {"actor.recompute_logprob": False, "actor.use_decoupled_loss": False},
        ),
    ],
)
def test_settings_keep_their_meaning_in_openrlhf(given: dict[str, Any], meant: dict[str, Any], tmp_path: Path) -> None:
    config = loaded(ppo(**{"rollout.n_samples_per_prompt": 8, **given}), tmp_path)
    assert {key: attrgetter(key)(config) for key in meant} == meant


def test_filter_of_groups_by_their_mean_is_lossy() -> None:
    key = "algo.dynamic_filtering_range"
    assert key in fates(ppo(**{key: [0.2, 0.8]}), Fate.LOSSY) and key in fates(ppo(**{key: [0, 1]}), Fate.IGNORED)


@pytest.mark.parametrize(
    ("estimator", "reward", "advantage"),
    [
        ("group_norm", ("group", "group"), None),
        ("dr_grpo", ("group", None), None),
        ("reinforce_baseline", ("group", None), ("batch", "batch")),
        ("reinforce", None, ("batch", "batch")),
    ],
)
def test_openrlhf_estimators_convert_to_norms(estimator: str, reward: Any, advantage: Any) -> None:
    actor = ppo(**{"algo.advantage.estimator": estimator, "rollout.n_samples_per_prompt": 8}).config["actor"]
    norms = (actor.get("reward_norm"), actor.get("adv_norm"))
    assert [each and (each["mean_level"], each["std_level"]) for each in norms] == [reward, advantage]


def test_older_openrlhf_names_are_accepted_and_shown_as_given() -> None:
    older = {
        "pretrain": "org/model",
        "prompt_data": "org/rows",
        "apply_chat_template": True,
        "remote_rm_url": "score.py",
        "actor_learning_rate": 5e-7,
        "init_kl_coef": 1e-3,
        "use_kl_loss": True,
        "advantage_estimator": "group_norm",
        "n_samples_per_prompt": 8,
        "zero_stage": 3,
        "vllm_num_engines": 4,
        "colocate_all_models": True,
        "bf16": True,
    }
    draft = convert(OPENRLHF["ppo"], older)
    added = {"data.input_key", "actor.policy_loss_type"}  # defaults: rows.py reads one, the other was another one
    assert {each.key for each in draft.entries} == {*older, *added}
    assert not fates(draft, Fate.REFUSED)
    newer: dict[str, Any] = {"actor.adam.lr": 5e-7, "algo.kl.init_coef": 1e-3, "algo.kl.use_loss": True}
    newer |= {"algo.advantage.estimator": "group_norm", "rollout.n_samples_per_prompt": 8}
    assert draft.config == ppo(**newer, **{"vllm.num_engines": 4, "train.colocate_all": True}).config


def test_older_key_of_policy_and_critic_is_both(tmp_path: Path) -> None:
    given = {"lr_warmup_ratio": 0.0, "max_norm": 0.5, "l2": 0.1, "advantage_estimator": "gae"}
    config = loaded(ppo(**given), tmp_path)
    assert config.critic is not None and not config.actor.value_bootstrap
    for optimizer in (config.actor.optimizer, config.critic.optimizer):
        assert optimizer is not None
        found = (optimizer.warmup_steps_proportion, optimizer.gradient_clipping, optimizer.weight_decay)
        assert found == (0.0, 0.5, 0.1)
    without = ppo(critic_learning_rate=9e-6, advantage_estimator="rloo")
    assert fates(without, Fate.IGNORED)["critic_learning_rate"] == "rloo has no critic"


def test_openrlhf_reward_function_is_called_with_its_signature(tmp_path: Path) -> None:
    score = tmp_path / "score.py"
    score.write_text(
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    return {'rewards': [float(q == p + l) for q, p, l in zip(queries, prompts, labels, strict=True)]}\n"
    )
    draft = ppo(**{"reward.remote_url": str(score), "data.label_key": "truth"})
    names: dict[str, Any] = {}
    exec(draft.files["reward.py"], names)
    assert [names["reward"]("q", answer, [], [], truth="42") for answer in ("42", "41")] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("key", "value", "fate"),
    [
        ("reward.remote_url", "http://localhost:5000", Fate.REFUSED),
        ("reward.remote_url", "", Fate.REFUSED),
        ("train.agent_func_path", "agent.py", Fate.REFUSED),
        ("train.batch_size", 100, Fate.REFUSED),
        ("reward.clip_range", [0, 5], Fate.REFUSED),
        ("algo.advantage.estimator", "remax", Fate.REFUSED),
        ("data.prompt_probs", "0.5,0.5", Fate.REFUSED),
        ("data.prompt_probs", 1.0, Fate.IGNORED),
        ("actor.optim", "muon", Fate.REFUSED),
        ("data.max_samples", 100, Fate.LOSSY),
        ("data.apply_chat_template", False, Fate.LOSSY),
        ("ds.ring_attn_size", 2, Fate.LOSSY),
        ("ds.zero_stage", 3, Fate.IGNORED),
        ("data.prompt_dataset", "org/a,org/b", Fate.MAPPED),
        ("data.prompt_dataset", "org/a@main", Fate.REFUSED),
        ("data.input_key", "context_messages", Fate.MAPPED),
        ("actor.adam.lrr", 1e-6, Fate.REFUSED),
        ("logger.wandb.key", "$WANDB_API_KEY", Fate.IGNORED),
        ("pretrain_data", "org/web", Fate.REFUSED),
        ("perf", True, Fate.IGNORED),
        ("eval.steps", 10, Fate.IGNORED),  # there is no eval.dataset
    ],
)
def test_openrlhf_key_is_listed_with_its_fate(key: str, value: Any, fate: Fate) -> None:
    assert key in fates(ppo(**{key: value}), fate)


def test_default_that_older_versions_had_otherwise_is_lossy() -> None:
    critic = {"critic.value_clip", "algo.advantage.lambd"}
    assert not critic & fates(ppo(), Fate.LOSSY).keys()
    draft = ppo(prompt_max_len=512, n_samples_per_prompt=2)
    assert critic <= fates(draft, Fate.LOSSY).keys() and draft.config["gconfig"]["max_new_tokens"] == 1024
    given = {"value_clip": 0.2, "lambd": 0.95, "bf16": True}
    assert fates(ppo(**given), Fate.LOSSY).keys() == {"actor.policy_loss_type"}
    assert not critic & fates(ppo(bf16=True, advantage_estimator="rloo"), Fate.LOSSY).keys()


def test_micro_batches_have_rows_of_full_length() -> None:
    bounds = {"ppo": 4 * 2048, "sft": 4 * 2048, "dpo": 4 * 2 * 512, "rm": 4 * 2 * 512}
    for trainer, bound in bounds.items():
        rows = {"model.model_name_or_path": "org/model", "data.dataset": "org/rows"}
        draft = ppo() if trainer == "ppo" else convert(OPENRLHF[trainer], rows)
        assert draft.config["actor"]["mb_spec"]["max_tokens_per_mb"] == bound
    assert ppo(**{"train.micro_batch_size": 2}).config["actor"]["mb_spec"]["max_tokens_per_mb"] == 2 * 2048


@pytest.mark.parametrize("trainer", ["sft", "dpo", "rm"])
def test_prompts_without_a_template_are_lossy(trainer: str) -> None:
    rows = {"model.model_name_or_path": "org/model", "data.dataset": "org/rows", "data.input_template": None}
    for applies, fate in ((True, Fate.IGNORED), (False, Fate.LOSSY)):
        draft = convert(OPENRLHF[trainer], {**rows, "data.apply_chat_template": applies})
        assert "data.input_template" in fates(draft, fate)


def test_renamed_columns_are_read_by_job_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"ask": [{"role": "user", "content": "2+2"}], "messages": [], "label": "4"}\n')
    draft = ppo(**{"data.prompt_dataset": f"{rows},{rows}", "data.input_key": "ask"})
    assert draft.config["train_dataset"]["path"] == "rows:train"
    (tmp_path / "rows.py").write_text(draft.files["rows.py"])
    monkeypatch.syspath_prepend(str(tmp_path))
    found = get_custom_dataset("train", _dataset(draft, "rl"))
    assert [row["messages"][0]["content"] for row in found] == ["2+2", "2+2"]
    assert found[0]["label"] == "4"


def _dataset(draft: Draft, kind: str) -> Any:
    from areal.api.cli_args import TrainDatasetConfig

    return TrainDatasetConfig(path=draft.config["train_dataset"]["path"], type=kind)


def test_verl_sft_trainers_have_own_defaults_and_columns() -> None:
    keys: dict[str, Any] = {
        "data.train_files": "a.parquet",
        "model.partial_pretrain": "org/model",
        "data.prompt_key": "extra_info",
    }
    keys |= {"data.prompt_dict_keys": ["question"], "data.response_key": "extra_info"}
    draft = convert(VERL["fsdp_sft"], {**keys, "data.response_dict_keys": ["answer"], "nproc_per_node": 4})
    assert not fates(draft, Fate.REFUSED)
    assert "extra_info.question" in draft.files["rows.py"]
    actor = draft.config["actor"]
    assert (actor["backend"], actor["optimizer"]["lr"], actor["optimizer"]["lr_scheduler_type"]) == (
        "fsdp:d4",
        1e-5,
        "cosine",
    )
    draft = convert(VERL["sft"], {"data.train_files": ["a.parquet", "b.parquet"], "model.path": "org/model"})
    assert draft.config["train_dataset"]["path"] == ["a.parquet", "b.parquet"]
    assert (draft.config["train_dataset"]["train_on"], draft.config["actor"]["optimizer"]["lr"]) == ("assistant", 1e-3)


def test_verl_sft_conversations_of_other_columns_are_renamed() -> None:
    keys = {"data.train_files": "a.parquet", "model.path": "org/model"}
    renamed = convert(VERL["sft"], {**keys, "data.messages_key": "chat", "data.tools_key": "functions"})
    assert "{'messages': 'chat', 'tools': 'functions'}" in renamed.files["rows.py"]
    older = {
        "data.multiturn.enable": True,
        "data.multiturn.messages_key": "prompt",
        "data.multiturn.tools_key": "tools",
    }
    draft = convert(VERL["fsdp_sft"], {**keys, **older})
    assert "{'messages': 'prompt'}" in draft.files["rows.py"] and not fates(draft, Fate.REFUSED)
    assert "rows.py" not in convert(VERL["sft"], {**keys, "data.messages_key": "messages"}).files


def test_areal_config_keeps_keys_and_lists_ineffective_ones() -> None:
    document = {
        "experiment_name": "e",
        "trial_name": "t",
        "gconfig": {"n_samples": 2},
        "actor": {"path": "org/model", "optimizer": {"lr": 1e-5}, "eps_clipp": 0.2},
        "train_dataset": {"path": "org/rows", "type": "rl", "pin_memory": True},
        "teacher": {"path": "org/teacher"},
    }
    trainer = trainer_of(document)
    draft = convert_areal(document, trainer, checked)
    assert trainer in TRAINERS
    refused = fates(draft, Fate.REFUSED)
    assert "eps_clip" in refused["actor.eps_clipp"] and "distillation" in refused["teacher.path"]
    assert "reward_fn" in refused
    assert "not tensors" in fates(draft, Fate.IGNORED)["train_dataset.pin_memory"]
    assert "eps_clipp" not in draft.config["actor"] and draft.config["trainer"] == {"type": "grpo"}


def test_areal_config_without_a_model_or_with_further_files_is_refused() -> None:
    document = {"experiment_name": "e", "trial_name": "t", "gconfig": {}, "defaults": ["base", "_self_"]}
    refused = fates(convert_areal(document, "grpo", checked), Fate.REFUSED)
    assert refused["actor.path"] == "no model is named: add actor.path=NAME"
    assert refused["defaults"] == "Hydra's list of files is not read: write their keys here"


def test_areal_key_with_a_warning_is_kept() -> None:
    document = {
        "experiment_name": "e",
        "trial_name": "t",
        "gconfig": {"top_p": 0.9, "n_samples": 2},
        "actor": {"path": "org/model", "optimizer": {"lr": 1e-5}},
        "train_dataset": {"path": "org/rows", "type": "rl"},
        "reward_fn": "areal.reward.gsm8k:gsm8k_reward_fn",
    }
    draft = convert_areal(document, "grpo", checked)
    assert "gconfig.top_p" in fates(draft, Fate.MAPPED) and draft.config["gconfig"]["top_p"] == 0.9


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        ("--include localhost:0,1,2,3", "fsdp:d4"),
        ("--include=localhost:4 --master_port 1", "fsdp:d1"),
        ("--include worker-0:0,1@worker-1:0,1", "fsdp:d4"),
        ("--include worker-0@worker-1:0,1", "fsdp:d8"),  # all of a host
        ("--num_gpus 2", "fsdp:d2"),
    ],
)
def test_gpus_that_deepspeed_includes_train(launcher: str, backend: str) -> None:
    given = f"deepspeed {launcher} --module openrlhf.cli.train_dpo --pretrain org/model --dataset rows.jsonl"
    found = read_keys("openrlhf", None, given, {}, "run.sh")
    assert convert(SOURCES["openrlhf"].trainers["dpo"], found.keys).config["actor"]["backend"] == backend
    ppo = given.replace("train_dpo", "train_ppo").replace("--dataset", "--prompt_data")
    found = read_keys("openrlhf", None, ppo, {}, "run.sh")
    gpus = int(backend.removeprefix("fsdp:d"))
    assert (
        convert(SOURCES["openrlhf"].trainers["ppo"], found.keys).config["actor"]["backend"]
        == f"fsdp:d{max(1, gpus - gpus // 2)}"
    )
