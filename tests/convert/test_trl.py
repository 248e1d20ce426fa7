"""TRL's keys: what they become, and that the result is a configuration of this project."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from areal.api.cli_args import TrainDatasetConfig
from areal.convert.drafts import Draft, Fate
from areal.convert.reading import Unread
from areal.convert.rules import Framework, NotLiteral, convert
from areal.convert.sources import SOURCES, read_keys
from areal.dataset.loading import get_custom_dataset
from tests.cli.conftest import Areal
from tests.convert.test_verl import fates, loaded

TRL = SOURCES["trl"].trainers
BASE = {"model_name_or_path": "org/model", "dataset_name": "org/rows", "reward_funcs": ["my.rewards.right"]}
ROWS = {"model_name_or_path": "org/model", "dataset_name": "org/rows"}


def online(trainer: str = "grpo", **changes: Any) -> Draft:
    return convert(TRL[trainer], {**BASE, **changes})


def offline(trainer: str, **changes: Any) -> Draft:
    return convert(TRL[trainer], {**ROWS, **changes})


def test_completion_sizes_become_prompts_and_minibatches(tmp_path: Path) -> None:
    draft = online(
        num_processes=4,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        steps_per_generation=8,
        num_iterations=2,
        max_steps=800,
        save_steps=80,
    )
    config = loaded(draft, tmp_path)
    # A generation has 4 * 8 * 8 completions, an update 4 * 8 * 2; a step of ours is 4 minibatches, twice.
    assert (config.train_dataset.batch_size, config.gconfig.n_samples) == (32, 8)
    assert (config.actor.ppo_n_minibatches, config.actor.ppo_epochs) == (4, 2)
    assert (config.total_train_steps, config.saver.freq_steps) == (100, 10)


@pytest.mark.parametrize(
    ("trainer", "given", "meant"),
    [
        # constant of transformers has no warm-up: that is constant_with_warmup
        (
            "grpo",
            {"lr_scheduler_type": "constant", "warmup_steps": 5, "max_steps": 10},
            {"actor.optimizer.warmup_steps_proportion": 0.0, "actor.optimizer.lr_scheduler_type": "constant"},
        ),
        (
            "grpo",
            {"lr_scheduler_type": "constant_with_warmup", "warmup_ratio": 0.1},
            {"actor.optimizer.warmup_steps_proportion": 0.1},
        ),
        # the ratio is to the log-probabilities of the trainer, and rewards are not clipped
        ("grpo", {}, {"actor.recompute_logprob": True, "actor.use_decoupled_loss": False, "actor.reward_clip": 1e9}),
        ("grpo", {"use_vllm": True}, {"actor.recompute_logprob": False, "actor.use_decoupled_loss": True}),
        ("rloo", {"reward_clip_range": [-5, 5]}, {"actor.reward_clip": 5.0, "actor.recompute_logprob": True}),
    ],
)
def test_settings_keep_their_meaning_in_trl(
    trainer: str, given: dict[str, Any], meant: dict[str, Any], tmp_path: Path
) -> None:
    config = loaded(online(trainer, **given), tmp_path)
    assert {key: attrgetter(key)(config) for key in meant} == meant


def test_trl_defaults_are_included(tmp_path: Path) -> None:
    config = loaded(online(), tmp_path)
    actor = config.actor
    assert actor.optimizer is not None
    assert (actor.optimizer.lr, actor.optimizer.lr_scheduler_type, actor.optimizer.weight_decay) == (1e-6, "linear", 0)
    assert (actor.loss_agg_mode, actor.kl_loss_coef, actor.kl_ctl, actor.dtype) == ("token-mean", 0, 0, "bfloat16")
    assert config.ref is None and config.gconfig.max_new_tokens == 512
    assert (config.train_dataset.batch_size, config.seed, config.total_train_epochs) == (1, 42, 3)
    assert actor.reward_norm is not None and (actor.reward_norm.std_level, actor.reward_norm.eps) == ("group", 1e-4)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss_type": "grpo"}, {"loss_agg_mode": "seq-mean-token-mean"}),
        ({"loss_type": "dr_grpo", "scale_rewards": False}, {"loss_agg_mode": "seq-mean-token-sum-norm"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"use_cispo_loss": True, "eps_clip_higher": 4.0}),
        ({"loss_type": "sapo", "sapo_temperature_neg": 1.1}, {"use_sapo_loss": True, "sapo_tau_neg": 1.1}),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo"}, {"importance_sampling_level": "sequence"}),
        ({"beta": 0.04}, {"kl_loss_coef": 0.04, "kl_loss_type": "k3", "kl_ctl": 0.0}),
        ({"delta": 4.0, "epsilon_high": 0.28}, {"c_clip": 4.0, "eps_clip_higher": 0.28}),
        ({"use_peft": True, "lora_target_modules": ["q_proj"], "lora_dropout": 0.0}, {"target_modules": ["q_proj"]}),
        ({"use_cpu": True}, {"dtype": "float32"}),
        ({"use_vllm": True}, {"use_decoupled_loss": True}),
    ],
)
def test_trl_objective_converts_to_equal_objective(changes: Any, expected: Any, tmp_path: Path) -> None:
    draft = online(**changes)
    loaded(draft, tmp_path)
    assert {name: draft.config["actor"][name] for name in expected} == expected


def test_vllm_correction_converts_to_decoupled_loss() -> None:
    actor = online(use_vllm=True, vllm_importance_sampling_mode="token_truncate").config["actor"]
    assert actor["rejection_sampling"] == {"level": "token", "action": "clamp", "upper": 3.0, "lower": None}
    assert "rejection_sampling" not in online(use_vllm=False).config["actor"]


def test_trl_rloo_leaves_one_out_and_lists_differences(tmp_path: Path) -> None:
    draft = online("rloo")
    assert loaded(draft, tmp_path).actor.kl_ctl == 0.05
    assert draft.config["actor"]["reward_norm"]["mean_leave1out"]
    assert "baseline" in fates(draft, Fate.LOSSY)["beta"]


def test_trl_gpus_are_divided_unless_server_is_separate() -> None:
    draft = online(num_processes=8, use_vllm=True, vllm_tensor_parallel_size=2)
    assert (draft.backend, draft.config["actor"]["backend"]) == ("vllm:d2t2", "fsdp:d4")
    draft = online(num_processes=8, use_vllm=True, vllm_mode="server")
    assert (draft.backend, draft.config["actor"]["backend"]) == ("vllm:d1", "fsdp:d8")
    assert offline("sft", num_processes=8).backend == ""


def test_trl_offline_trainers_convert(tmp_path: Path) -> None:
    from areal.api.cli_args import DPOConfig, RWConfig, SFTConfig, load_expr_config

    sizes = {"num_processes": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8}
    for trainer, kind in (("sft", SFTConfig), ("dpo", DPOConfig), ("reward", RWConfig)):
        draft = offline(trainer, **sizes, eval_strategy="epoch")
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(draft.config))
        config: Any = load_expr_config(["--config", str(tmp_path / "config.yaml")], kind)[0]
        assert (config.train_dataset.batch_size, config.train_dataset.drop_last) == (64, False)
        assert config.valid_dataset is not None and config.evaluator.freq_epochs == 1
        assert "left out" in fates(draft, Fate.LOSSY)["truncation_mode"]
        assert "truncation_mode" not in fates(offline(trainer, max_length=None), Fate.LOSSY)
    assert offline("dpo", loss_type=["ipo"]).config["actor"]["loss_type"] == "ipo"
    assert offline("sft", assistant_only_loss=True).config["train_dataset"]["train_on"] == "assistant"


def test_micro_batches_are_those_of_a_device() -> None:
    lengths: dict[str, Any] = {"max_completion_length": 100, "max_prompt_length": 28}
    config = online(**lengths, per_device_train_batch_size=8, beta=0.1).config
    assert {config[model]["mb_spec"]["max_tokens_per_mb"] for model in ("actor", "ref")} == {8 * 128}
    assert offline("dpo", max_length=64).config["actor"]["mb_spec"]["max_tokens_per_mb"] == 8 * 2 * 64


def test_unknown_process_count_is_lossy() -> None:
    assert "num_processes=N" in fates(offline("sft"), Fate.LOSSY)["num_processes"]
    for more in ({"num_processes": 1}, {"use_cpu": True}, {"config_file": "zero3.yaml"}):
        assert "num_processes" not in fates(offline("sft", **more), Fate.LOSSY)


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun --nproc_per_node=4 --nnodes 2",
        "deepspeed --num_gpus=4 --num_nodes 2",
        "accelerate launch --num_processes 8",
    ],
)
def test_every_launcher_tells_the_number_of_processes(launcher: str) -> None:
    script = f"{launcher} src/grpo.py --model_name_or_path m --dataset_name d --per_device_train_batch_size 8"
    trainer, keys, *_ = read_keys("trl", None, script, {}, "run.sh")
    draft = convert(TRL[trainer], {**keys, "reward_funcs": ["my.rewards.right"]})
    assert (draft.config["train_dataset"]["batch_size"], draft.config["actor"]["backend"]) == (8, "fsdp:d4")
    assert not fates(draft, Fate.REFUSED) and "num_processes" not in fates(draft, Fate.LOSSY)


def test_yaml_no_strategy_disables_evaluation_and_saving() -> None:
    for value in ("no", False):
        draft = offline("sft", eval_strategy=value, save_strategy=value)
        assert not fates(draft, Fate.REFUSED)
        assert not {"valid_dataset", "evaluator", "saver"} & set(draft.config)


@pytest.mark.parametrize("sign", ["max_prompt_length", "torch_dtype", "vllm_device"])
def test_default_that_older_versions_had_otherwise_is_lossy(sign: str) -> None:
    older: dict[str, Any] = {sign: {"max_prompt_length": 512, "torch_dtype": "bfloat16"}.get(sign, "auto")}
    defaults = {"beta", "loss_type", "temperature", "max_completion_length"}
    assert not defaults & fates(online(), Fate.LOSSY).keys()
    assert defaults <= fates(online(**older), Fate.LOSSY).keys()
    given: dict[str, Any] = {"beta": 0.0, "loss_type": "grpo", "temperature": 1.0, "max_completion_length": 256}
    assert not defaults & fates(online(**older, **given), Fate.LOSSY).keys()
    size = "per_device_train_batch_size"  # of completions, which were prompts: then it may be less than a group
    for rows, fate in ((8, Fate.MAPPED), (4, Fate.LOSSY)):
        older[size] = rows
        assert size in fates(online(num_processes=2, **older), fate)


def test_engine_settings_of_older_versions_are_kept() -> None:
    draft = online(vllm_device="auto", vllm_max_model_len=4608, vllm_dtype="float16", use_liger_loss=True)
    assert (draft.engine_args["max-model-len"], draft.engine_args["dtype"]) == (4608, "float16")
    assert not fates(draft, Fate.REFUSED)


def test_mean_over_tokens_of_each_forward_pass_is_lossy() -> None:
    for passes, fate in ((1, Fate.MAPPED), (2, Fate.LOSSY)):
        rows = 8 // passes
        given = {"loss_type": "bnpo", "per_device_train_batch_size": rows, "gradient_accumulation_steps": passes}
        assert "loss_type" in fates(convert(TRL["grpo"], {**BASE, **given}), fate)


@pytest.mark.parametrize(
    ("trainer", "key", "value", "fate"),
    [
        ("grpo", "loss_type", "vespo", Fate.REFUSED),
        ("grpo", "resume_from_checkpoint", "out/checkpoint-10", Fate.LOSSY),
        ("grpo", "reward_model_name_or_path", "org/rm", Fate.REFUSED),
        ("grpo", "reward_funcs", ["get_soft_overlong_punishment"], Fate.REFUSED),
        ("grpo", "reward_funcs", ["accuracy_reward"], Fate.LOSSY),
        ("grpo", "reward_funcs", [], Fate.REFUSED),
        ("grpo", "reward_weights", [1.0, 0.5], Fate.REFUSED),
        ("grpo", "dataset_name", "", Fate.REFUSED),
        ("grpo", "model_name_or_path", "", Fate.REFUSED),
        ("grpo", "per_device_train_batch_size", 12, Fate.REFUSED),
        ("grpo", "num_train_epochs", 0.5, Fate.REFUSED),
        ("grpo", "max_prompt_length", 256, Fate.LOSSY),
        ("grpo", "optim", "rmsprop", Fate.REFUSED),
        ("grpo", "optim", "paged_adamw_8bit", Fate.LOSSY),
        ("grpo", "warmup_steps", 10, Fate.LOSSY),
        ("grpo", "lr_scheduler_type", "polynomial", Fate.REFUSED),
        ("grpo", "config_file", "zero3.yaml", Fate.LOSSY),
        ("grpo", "trust_remote_code", True, Fate.REFUSED),
        ("grpo", "fp16", True, Fate.REFUSED),
        ("grpo", "num_generation", 4, Fate.REFUSED),
        ("grpo", "push_to_hub", True, Fate.IGNORED),
        ("sft", "packing", True, Fate.LOSSY),
        ("sft", "completion_only_loss", False, Fate.REFUSED),
        ("sft", "dataset_text_field", "content", Fate.REFUSED),
        ("dpo", "loss_type", "hinge", Fate.REFUSED),
        ("dpo", "rpo_alpha", 1.0, Fate.REFUSED),
        ("reward", "center_rewards_coefficient", 0.01, Fate.REFUSED),
    ],
)
def test_trl_key_without_counterpart_is_listed_with_reason(trainer: str, key: str, value: Any, fate: Fate) -> None:
    assert fates(
        convert(TRL[trainer], {**BASE, key: value} if trainer in ("grpo", "rloo") else {**ROWS, key: value}), fate
    )[key]


def test_trl_reward_functions_are_called_with_their_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "converted_scores.py").write_text(
        "def right(prompts, completions, solution, **kwargs):\n"
        "    return [float(each[0]['content'] == truth) for each, truth in zip(completions, solution, strict=True)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    draft = online(reward_funcs=["converted_scores.right", "think_format_reward"], reward_weights=[1.0, 0.5])
    assert draft.config["reward_fn"] == ["reward:right", "reward:think_format_reward"]
    assert draft.config["reward_weights"] == [1.0, 0.5]
    names: dict[str, Any] = {}
    exec(draft.files["reward.py"], names)
    row = {"messages": [{"role": "user", "content": "q"}], "solution": "42"}
    assert [names["right"]("q", answer, [], [], **row) for answer in ("42", "41")] == [1.0, 0.0]
    scores = [names["think_format_reward"]("q", text, [], []) for text in ("<think>a</think>b", "b", "<think>a")]
    assert scores == [1.0, 0.0, 0.0]


def test_docstring_command_is_read_and_trainer_must_be_known() -> None:
    command = "accelerate launch --num_processes 2 \\\n  examples/scripts/gspo.py \\\n  --beta 0.0"
    text = f'r"""\npip install trl\n\n{command}\n"""\n'
    assert read_keys("trl", None, text, {}, "gspo.py")[:2] == ("grpo", {"num_processes": 2, "beta": 0.0})
    with pytest.raises(Exception, match="which trainer reads it") as caught:
        read_keys("trl", None, "learning_rate: 1e-6", {}, "c.yaml")
    assert "--trainer grpo, rloo, sft, dpo, reward" in caught.value.hint  # type: ignore[attr-defined]
    assert read_keys("trl", "sft", "learning_rate: 1e-6", {}, "c.yaml")[:2] == ("sft", {"learning_rate": 1e-6})


def test_files_of_a_command_are_read_beside_it(areal: Areal, tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text("num_processes: 4\ndistributed_type: DEEPSPEED\n")
    (tmp_path / "sft.yaml").write_text("model_name_or_path: org/model\ndataset_name: org/rows\nlearning_rate: 1e-4\n")
    command = "accelerate launch --config_file zero3.yaml trl/scripts/sft.py --config sft.yaml --learning_rate 3e-4"
    (tmp_path / "run.sh").write_text(command)
    ran = areal("convert", str(tmp_path / "run.sh"), "--from", "trl", "--out", str(tmp_path / "job"), "--allow-lossy")
    assert ran.code == 0, ran.err
    config = yaml.safe_load((tmp_path / "job" / "config.yaml").read_text())
    assert (config["train_dataset"]["batch_size"], config["actor"]["backend"]) == (32, "fsdp:d4")
    assert config["actor"]["optimizer"]["lr"] == 3e-4
    assert "num_processes is known" in ran.out
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run.sh").write_text(command.replace("sft.yaml", "../sft.yaml"))
    assert "org/model" in areal("convert", str(tmp_path / "scripts" / "run.sh"), "--from", "trl").out
    (tmp_path / "run.sh").write_text(command.replace("sft.yaml", "gone.yaml"))
    absent = areal("convert", str(tmp_path / "run.sh"), "--from", "trl")
    assert absent.code == 4 and "there is no file gone.yaml" in absent.err and "add config=FILE" in absent.err
    given = areal("convert", str(tmp_path / "run.sh"), "--from", "trl", f"config={tmp_path / 'sft.yaml'}")
    assert "org/model" in given.out
    here = "NAME=small\ncat > made.yaml <<EOF\nmodel_name_or_path: org/$NAME\ndataset_name: org/rows\nEOF\n"
    (tmp_path / "run.sh").write_text(f"{here}trl sft --config made.yaml\n")
    assert "org/small" in areal("convert", str(tmp_path / "run.sh"), "--from", "trl").out
    refused = areal("convert", str(tmp_path / "sft.yaml"), "--from", "trl")
    assert refused.code != 0 and "--trainer grpo, rloo, sft, dpo, reward" in refused.err


def every_key() -> list[tuple[str, str, str]]:
    return [
        (source, trainer, key)
        for source, of in SOURCES.items()
        for trainer, each in of.trainers.items()
        for key in each.rules
    ]


@pytest.mark.parametrize(
    "trainer", [each for of in SOURCES.values() for each in of.trainers.values()], ids=lambda of: of.name
)
def test_every_framework_default_is_usable(trainer: Framework) -> None:
    for key, value in trainer.defaults.items():
        entry, _ = trainer.rules[key].entry(key, value)
        assert trainer.rules[key].fate is not Fate.MAPPED or entry.fate is Fate.MAPPED or value is None, key


@given(
    at=st.sampled_from(every_key()),
    value=st.one_of(st.none(), st.booleans(), st.integers(-2, 4), st.floats(), st.text(), st.lists(st.text())),
)
def test_any_framework_key_is_converted_or_listed(at: tuple[str, str, str], value: Any) -> None:
    source, trainer, key = at
    draft = convert(SOURCES[source].trainers[trainer], {key: value})
    assert [each.key for each in draft.entries].count(key) == 1


CODE = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
raise RuntimeError("never run")
MODEL, TOKENS = "unused", 1
PATH = "Qwen/Qwen2.5-0.5B"
rate = 1e-6
rate *= 2
data = load_dataset("trl-lib/DeepMath-103K", split="train")
args = GRPOConfig(
    "out", learning_rate=rate, num_generations=8, beta=-0.0, bf16=True, max_completion_length=2 * 128,
    gradient_accumulation_steps=2, num_train_epochs=made("1"), weight_decay=float("0.5"), **more
)
GRPOTrainer(model=PATH, reward_funcs=[accuracy_reward], args=args, train_dataset=data, peft_config=LoraConfig(r=16),
    processing_class=tokenizer, eval_dataset=data["test"], rollout_func=mine)
"""


def test_config_in_code_is_read_without_running_it() -> None:
    trainer, keys, *_ = read_keys("trl", None, CODE, {}, "train.py")
    draft = convert(SOURCES["trl"].trainers[trainer], {**keys, "num_processes": 1})
    found = {each.key: each for each in draft.entries}
    assert trainer == "grpo" and draft.config["actor"]["path"] == "Qwen/Qwen2.5-0.5B"
    assert draft.config["gconfig"]["n_samples"] == 8 and draft.config["gconfig"]["max_new_tokens"] == 256
    assert draft.config["actor"]["lora_rank"] == 16 and draft.config["actor"]["optimizer"]["weight_decay"] == 0.5
    assert draft.config["train_dataset"]["path"] == "trl-lib/DeepMath-103K"
    refused = {key: each.note for key, each in found.items() if each.fate is Fate.REFUSED}
    assert refused == {
        "learning_rate": "train.py:13: not a literal: add KEY=VALUE",
        "num_train_epochs": "train.py:14: not a literal: add KEY=VALUE",
        "**more": "train.py:14: not a literal: add KEY=VALUE",
        "rollout_func": "train.py:17: not a literal: add KEY=VALUE",
    }
    assert (found["processing_class"].fate, found["eval_dataset"].fate) == (Fate.LOSSY, Fate.IGNORED)
    given = convert(SOURCES["trl"].trainers[trainer], {**keys, "num_processes": 1, "learning_rate": 2e-6})
    assert given.config["actor"]["optimizer"]["lr"] == 2e-6


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("SFTConfig(seed=1)\nSFTConfig(seed=2)", "several configurations, in the lines 1, 2"),
        ("SFTConfig(seed=1)\nSFTTrainer('a')\nSFTTrainer('b')", "several trainers, in the lines 2, 3"),
        ("\nSFTConfig(seed=", r"^train\.py:2: not a Python script: '\(' was never closed$"),
        ("SFTConfig()", "no command"),
    ],
)
def test_script_without_single_configuration_is_an_error(code: str, message: str) -> None:
    with pytest.raises(Unread, match=message):
        read_keys("trl", None, code, {}, "train.py")


@pytest.mark.parametrize(
    "first", ["def score(completions, **row): ...", "from .rewards import score", "from .. import best as score"]
)
def test_script_function_as_reward_is_refused_with_override(first: str) -> None:
    code = f"{first}\nGRPOConfig(seed=1)\nGRPOTrainer('org/m', reward_funcs=score)"
    trainer, keys, *_ = read_keys("trl", None, code, {}, "train.py")
    (found,) = (each for each in convert(SOURCES["trl"].trainers[trainer], keys).entries if each.key == "reward_funcs")
    assert found.fate is Fate.REFUSED and found.note.startswith("train.py:3: a function of the script")
    assert keys["model_name_or_path"] == "org/m"


ARGUMENTS = """
@dataclass
class Ours:
    beta: float = 0.04
    epsilon: float = field(default=0.1, metadata={"help": "bound"})
    max_steps: int = 10
    delta: float

def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="org/model")
    parser.add_argument("--lr", "--learning-rate", dest="rate", default=2e-6)
    parser.add_argument("--num-generations", type=int, default=4)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--temperature", type=float, required=True)
    return parser.parse_args()

def main(args):
    model = AutoModelForCausalLM.from_pretrained(args.model, torch_dtype=torch.bfloat16, device_map="auto")
    rows = load_dataset("json", data_files="rows.jsonl")
    config = GRPOConfig(
        beta=ours.beta, epsilon=ours.epsilon, delta=ours.delta, max_steps=ours.max_steps, learning_rate=args.rate,
        num_generations=args.num_generations, max_completion_length=64 if args.short else 128,
        temperature=args.temperature, top_p=other.top_p,
    )
    GRPOTrainer(model=model, args=config, train_dataset=rows["test"], reward_funcs=accuracy_reward)

args = parsed()
(ours,) = HfArgumentParser(Ours).parse_args_into_dataclasses()
ours.max_steps = 20
main(args)
"""
MEANT = {
    "beta": 0.04, "epsilon": 0.1, "learning_rate": 2e-6, "num_generations": 4, "max_completion_length": 128,
    "model_name_or_path": "org/model", "dtype": "bfloat16", "dataset_name": "rows.jsonl", "dataset_train_split": "test",
}  # fmt: skip


@pytest.mark.parametrize("notebook", [False, True])
def test_arguments_of_a_script_have_their_defaults(notebook: bool) -> None:
    text, name = ARGUMENTS, "train.py"
    if notebook:
        cells = [{"cell_type": "markdown", "source": "# GRPO"}, {"cell_type": "code", "source": ["!pip install trl\n"]}]
        cells.append({"cell_type": "code", "source": ARGUMENTS.splitlines(keepends=True)})
        text, name = json.dumps({"cells": cells}), "train.ipynb"
    trainer, keys, *_ = read_keys("trl", None, text, {}, name)
    assert trainer == "grpo" and {key: keys[key] for key in MEANT} == MEANT
    unknown = ("delta", "max_steps", "temperature", "top_p")  # no default, assigned later, required, of another object
    assert all(isinstance(keys[key], NotLiteral) for key in unknown)
    assert fates(convert(TRL["grpo"], keys), Fate.IGNORED)["device_map"]


def test_notebook_without_cells_is_an_error() -> None:
    for text in ("{", "[]", '{"cells": [{}]}'):
        with pytest.raises(Unread, match=r"train\.ipynb: not a notebook"):
            read_keys("trl", None, text, {}, "train.ipynb")


TWO = "accelerate launch sft.py --seed 1\naccelerate launch src/mine.py --beta 0.1 --model_name m\n"


def test_trainer_selects_the_command_of_a_script() -> None:
    code = "SFTConfig(seed=1)\nGRPOConfig(seed=2)"
    assert read_keys("trl", "grpo", code, {}, "train.py")[:2] == ("grpo", {"seed": 2})
    assert read_keys("trl", None, TWO, {}, "run.sh")[:2] == ("sft", {"seed": 1})
    both = TWO + "python grpo.py --seed 2\n"
    assert read_keys("trl", None, both, {}, "run.sh")[:2] == ("grpo", {"seed": 2})
    assert read_keys("trl", "sft", both, {}, "run.sh")[:2] == ("sft", {"seed": 1})


def test_script_of_its_own_is_named_and_read_with_a_trainer() -> None:
    own = TWO.splitlines()[1]
    with pytest.raises(Unread) as caught:
        read_keys("trl", None, own, {}, "run.sh")
    named = "--trainer NAME, one of grpo, rloo, sft, dpo, reward"
    assert caught.value.hint == f"it runs src/mine.py: convert that file, or add {named}"
    # a flag may be abbreviated
    assert read_keys("trl", "grpo", own, {}, "run.sh")[:2] == ("grpo", {"beta": 0.1, "model_name_or_path": "m"})
    with pytest.raises(Unread) as caught:
        read_keys("verl", None, "export N=2\nbash examples/run.sh\n", {}, "run.sh")
    assert caught.value.hint == "it runs examples/run.sh: convert that file"


def test_yaml_file_before_the_flags_is_the_configuration() -> None:
    given = "accelerate launch src/mine.py recipes/dpo.yaml --beta 0.1"
    assert read_keys("trl", "dpo", given, {}, "run.sh").keys == {"config": "recipes/dpo.yaml", "beta": 0.1}


def test_line_selects_one_of_several_commands_and_the_others_are_listed() -> None:
    script = "trl sft --seed 1\ntrl sft \\\n  --seed 2\ntrl dpo --seed 3\n"
    last, first = (read_keys("trl", None, script, {}, "run.sh", line) for line in (None, 3))
    assert (last.keys, last.command) == ({"seed": 3}, "trl dpo (line 4)")
    assert (first.trainer, first.keys, first.command) == ("sft", {"seed": 2}, "trl sft (lines 2-3)")
    (others,) = first.beside
    assert others.value == ["trl sft (line 1)", "trl dpo (line 4)"] and others.fate is Fate.IGNORED
    assert others.note == "trl sft (lines 2-3) is read; --line N reads another"
    assert not read_keys("trl", None, "trl sft --seed 1", {}, "run.sh").beside
    with pytest.raises(Unread, match="no command at line 9 runs a trainer") as caught:
        read_keys("trl", None, script, {}, "run.sh", 9)
    assert caught.value.hint == "its commands: trl sft (line 1), trl sft (lines 2-3), trl dpo (line 4)"
    with pytest.raises(Unread, match="a YAML file has none"):
        read_keys("trl", "sft", "seed: 1", {}, "run.yaml", 1)


def test_line_of_a_docstring_is_that_of_the_file() -> None:
    for mark in ("r", ""):
        text = f'# licence\n{mark}"""\ntrl sft \\\n  --seed 1\n\ntrl sft --seed 2\n"""\nimport trl\n'
        assert read_keys("trl", None, text, {}, "sft.py").command == "trl sft (line 6)"
        assert read_keys("trl", None, text, {}, "sft.py", 4)[:3] == ("sft", {"seed": 1}, "trl sft (lines 3-4)")


def test_line_selects_one_of_several_configurations_in_code() -> None:
    code = """if full:
    args = SFTConfig(seed=1)
    trainer = SFTTrainer("org/one", args=args)
else:
    trainer = SFTTrainer("org/two", args=SFTConfig(seed=2))
"""
    with pytest.raises(Unread, match="several configurations, in the lines 2, 5") as caught:
        read_keys("trl", None, code, {}, "train.py")
    assert caught.value.hint == "add --line N, or --trainer NAME, or keep the one that is to be converted"
    for line, keys in (
        (2, {"seed": 1, "model_name_or_path": "org/one"}),
        (5, {"seed": 2, "model_name_or_path": "org/two"}),
    ):
        assert read_keys("trl", None, code, {}, "train.py", line).keys == keys


def test_model_wrapped_in_adapters_by_script_is_refused_with_line() -> None:
    code = "model = peft.get_peft_model(model, made())\nargs = GRPOConfig(seed=1)\nGRPOTrainer(model, args=args)"
    _, keys, *_ = read_keys("trl", None, code, {}, "train.py")
    assert "train.py:1: adapters made by the script" in fates(convert(TRL["grpo"], keys), Fate.REFUSED)["use_peft"]


@pytest.mark.parametrize(
    "adapters",
    ["model, r=32, lora_alpha=64, random_state=1, loftq_config=None", "model, LoraConfig(r=32, lora_alpha=64)"],
)
def test_only_model_of_a_script_and_its_adapters_are_read(adapters: str) -> None:
    code = f"""model, tokenizer = FastLanguageModel.from_pretrained(model_name="org/model", load_in_4bit=True)
model = get_peft_model({adapters})
GRPOTrainer(model=model, args=GRPOConfig(num_generations=4, per_device_train_batch_size=4))"""
    trainer, keys, *_ = read_keys("trl", None, code, {}, "train.py")
    draft = convert(TRL[trainer], {**keys, **BASE, "model_name_or_path": keys["model_name_or_path"]})
    assert draft.config["actor"]["path"] == "org/model" and not fates(draft, Fate.REFUSED)
    assert (draft.config["actor"]["lora_rank"], draft.config["actor"]["lora_alpha"]) == (32, 64)
    assert "bfloat16" in fates(draft, Fate.LOSSY)["load_in_4bit"]


def test_adapters_in_code_use_peft_defaults() -> None:
    given = "lora_alpha=4, bias='none', init_lora_weights=True, inference_mode=False, task_type='CAUSAL_LM'"
    code = f"GRPOConfig(seed=1)\nGRPOTrainer('org/m', peft_config=LoraConfig({given}))"
    trainer, keys, *_ = read_keys("trl", None, code, {}, "train.py")
    draft = convert(SOURCES["trl"].trainers[trainer], keys)
    assert (draft.config["actor"]["lora_rank"], draft.config["actor"]["lora_alpha"]) == (8, 4)
    assert not {"lora_dropout", "bias"} & {each.key for each in draft.entries if each.fate is not Fate.MAPPED}
    _, other, *_ = read_keys("trl", None, code.replace("'none'", "'all'"), {}, "train.py")
    (refused,) = (each for each in convert(SOURCES["trl"].trainers[trainer], other).entries if each.key == "bias")
    assert refused.fate is Fate.REFUSED


@pytest.mark.parametrize("made", ["args = GRPOConfig", "args: GRPOConfig = GRPOConfig", "args = (other := GRPOConfig"])
def test_field_assigned_later_by_script_is_refused_with_line(made: str) -> None:
    name = "other" if ":=" in made else "args"
    code = f"{made}(seed=1, beta=0.1){')' * (':=' in made)}\n{name}.beta = 0.2\n{name}.num_generations *= 2"
    trainer, keys, *_ = read_keys("trl", None, code, {}, "train.py")
    entries = convert(SOURCES["trl"].trainers[trainer], keys).entries
    notes = {each.key: each.note for each in entries if each.fate is Fate.REFUSED}
    assert notes["beta"] == "train.py:2: assigned by the script: add KEY=VALUE"
    assert notes["num_generations"] == "train.py:3: assigned by the script: add KEY=VALUE"
    assert keys["seed"] == 1


@pytest.mark.parametrize(
    ("key", "value", "path"),
    [
        ("datasets", [{"path": "a/b", "name": "c", "split": "s"}, {"path": "d/e"}], ["a/b:c:s", "d/e:train"]),
        (
            "dataset_mixture",
            {
                "datasets": [{"id": "a/b", "config": "c", "split": "s", "columns": ["messages"], "weight": 1.0}],
                "seed": 0,
            },
            "a/b:c:s",
        ),
    ],
)
def test_data_sets_of_a_mixture_are_a_list(key: str, value: Any, path: Any) -> None:
    draft = convert(TRL["sft"], {"model_name_or_path": "org/model", key: value, "eval_strategy": "steps"})
    assert draft.config["train_dataset"]["path"] == path
    assert key in fates(draft, Fate.MAPPED)
    assert "valid_dataset" not in draft.config


@pytest.mark.parametrize(
    ("given", "fate", "note"),
    [
        ({"datasets": [{"id": "a/b", "weight": 0.5}]}, Fate.REFUSED, "parts of data sets"),
        ({"datasets": [{"weight": 1}]}, Fate.REFUSED, "has a path"),
        ({"datasets": [{"id": "a/b"}], "test_split_size": 100}, Fate.LOSSY, "set aside"),
    ],
)
def test_parts_of_a_mixture_are_not_lost_in_silence(given: dict[str, Any], fate: Fate, note: str) -> None:
    draft = convert(TRL["dpo"], {"model_name_or_path": "org/model", "dataset_mixture": given})
    assert note in fates(draft, fate)["dataset_mixture"]


@pytest.mark.parametrize(
    ("made", "template", "fate"),
    [
        ("AutoTokenizer.from_pretrained(NAME)", "", Fate.IGNORED),
        ("AutoTokenizer.from_pretrained('org/other')", "", Fate.LOSSY),
        ("AutoTokenizer.from_pretrained(NAME)", "tokens.chat_template = 'x'", Fate.LOSSY),
        ("mine(NAME)", "", Fate.LOSSY),
    ],
)
def test_tokenizer_of_the_model_itself_loses_nothing(made: str, template: str, fate: Fate) -> None:
    code = f"""
NAME = "org/model"
tokens = {made}
{template}
SFTTrainer(model=NAME, args=SFTConfig("out", seed=1), train_dataset=load_dataset("org/rows"), processing_class=tokens)
"""
    read = read_keys("trl", None, code, {}, "run.py")
    assert "processing_class" in fates(convert(TRL[read.trainer], read.keys), fate)


def test_settings_in_a_class_or_a_dictionary_of_the_script_are_read() -> None:
    code = """
@dataclass
class Config:
    lr: float = 1e-5
    beta: float = 0.1
    epochs: int = field(default=2)
    length: int = field(default=512)
class Sizes:
    batch = 4
    steps = 2
class Computed:
    seed = 1
    def __init__(self): self.seed = 2
LIMITS = {"tokens": 64, "moved": 1}
LIMITS["moved"] = 2
TEMPERATURE: float = 0.7
config, other = Config(beta=0.2), 1
cfg = Config(beta=0.2)
cfg.epochs = 5
GRPOConfig("out", learning_rate=cfg.lr, beta=cfg.beta, num_train_epochs=cfg.epochs, seed=Computed.seed,
    per_device_train_batch_size=Sizes.batch, gradient_accumulation_steps=Sizes.steps * 2,
    max_completion_length=LIMITS["tokens"], max_prompt_length=cfg.length, num_generations=LIMITS["moved"],
    temperature=TEMPERATURE)
"""
    keys = read_keys("trl", None, code, {}, "run.py").keys
    unknown = {key for key, value in keys.items() if isinstance(value, NotLiteral)}
    assert unknown == {"num_train_epochs", "seed", "num_generations"}
    assert {key: value for key, value in keys.items() if key not in unknown} == {
        "output_dir": "out", "learning_rate": 1e-5, "beta": 0.2, "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4, "max_completion_length": 64, "temperature": 0.7,
        "max_prompt_length": 512,
    }  # fmt: skip


@pytest.mark.parametrize("asked", ["2+2", [{"role": "user", "content": "2+2"}]])
def test_system_prompt_is_the_first_message_of_each_row(
    asked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": asked, "solution": "4"}) + "\n")
    given = {"system_prompt": "Be brief.", "dataset_prompt_column": "problem"}
    draft = online(dataset_name=str(tmp_path / "rows.jsonl"), **given)
    assert not fates(draft, Fate.REFUSED)
    (tmp_path / "own_rows.py").write_text(draft.files["rows.py"])
    monkeypatch.syspath_prepend(str(tmp_path))
    (row,) = get_custom_dataset("train", TrainDatasetConfig(path="own_rows:train", type="rl"))
    assert row["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}]
    assert row["solution"] == "4"
    assert online(system_prompt="Be brief.").config["train_dataset"]["path"] == "rows:train"
