"""What the built-in drivers make of a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api.cli_args import GRPOConfig, PPOConfig, load_expr_config
from areal.errors import UsageFault
from areal.resources.backend import engine_arguments
from areal.training.drivers import _workflow, grpo
from areal.training.trainers.ppo import PPOTrainer

EXAMPLE = Path(__file__).parents[2] / "examples" / "reverse_digits"
NAMES = ("experiment_name=e", "trial_name=t", f"actor.path={EXAMPLE / 'model'}")
REWARD = "tests.reward.rewards:only_some"


def workflow_of(*words: str) -> dict[str, Any]:
    return _workflow(load_expr_config([*NAMES, *words], GRPOConfig)[0])


def test_multi_turn_workflow_is_built_from_yaml() -> None:
    kwargs = workflow_of(
        "workflow=areal.workflow.multi_turn.MultiTurnWorkflow", f"reward_fn={REWARD}", "workflow_kwargs={max_turns: 2}"
    )["workflow_kwargs"]
    assert kwargs["reward_fn"] == REWARD and kwargs["max_turns"] == 2
    assert kwargs["tokenizer"] == str(EXAMPLE / "model") and kwargs["gconfig"].n_samples == 1


def test_agent_gets_only_parameters_it_accepts() -> None:
    words = ("workflow=areal.workflow.openai.math_agent:MathAgent", "workflow_kwargs={max_turns: 2}")
    assert workflow_of(*words)["workflow_kwargs"] == {"max_turns": 2}
    assert workflow_of(*words, f"reward_fn={REWARD}")["workflow_kwargs"] == {"max_turns": 2, "reward_fn": REWARD}


@pytest.mark.parametrize(
    "workflow", ["areal.workflow.rlvr:RLVRWorkflow", "areal.workflow.multi_turn:MultiTurnWorkflow"]
)
def test_workflow_without_its_reward_is_refused(workflow: str) -> None:
    with pytest.raises(UsageFault, match="no reward is configured"):
        workflow_of(f"workflow={workflow}")


def test_reward_unsupported_by_workflow_is_refused() -> None:
    with pytest.raises(UsageFault, match="takes no reward_fn"):
        workflow_of("workflow=tests.rollout.test_workflows:Mathematician", f"reward_fn={REWARD}")


def test_row_without_reward_column_is_refused_before_start(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": "2", "level": 1}] * 200 + [{"question": "1+2?", "answer": "3", "levels": 1}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "by_level.py").write_text("def right(prompt, completions, level): return 1.0\n")
    data, reward = f"train_dataset.path={tmp_path / 'rows.jsonl'}", f"reward_fn={tmp_path / 'by_level.py'}:right"
    with pytest.raises(UsageFault, match="missing a required argument: 'level'") as caught:
        grpo([*NAMES, data, reward, "total_train_steps=1", f"cluster.fileroot={tmp_path}"])
    assert 'did you mean "levels"' in caught.value.message
    assert caught.value.message.startswith(
        f"{tmp_path / 'rows.jsonl'}:201: the reward right(prompt, completions, level)"
    )


AGENT = "tests.rollout.test_workflows:Mathematician"


def test_configured_agent_is_the_workflow() -> None:
    assert workflow_of(f"+rollout.agent.agent_cls_path={AGENT}")["workflow"] == AGENT
    with pytest.raises(UsageFault, match="takes no reward_fn"):
        workflow_of(f"+rollout.agent.agent_cls_path={AGENT}", f"reward_fn={REWARD}")
    stated = "workflow=areal.workflow.openai.math_agent:MathAgent"
    assert workflow_of(f"+rollout.agent.agent_cls_path={AGENT}", stated)["workflow"] == stated.partition("=")[2]


def test_sampling_unsupported_by_workflow_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    workflow_of(f"workflow={AGENT}", "gconfig.n_samples=4")
    assert not caplog.messages
    workflow_of(f"workflow={AGENT}", "gconfig={temperature: 0.6, stop: [x]}", "eval_gconfig={temperature: 0}")
    assert f"eval_gconfig.temperature: no effect, as the workflow {AGENT} takes no gconfig" in caplog.text
    assert "gconfig.temperature, gconfig.stop, eval_gconfig.temperature" in caplog.text
    caplog.clear()
    workflow_of(f"reward_fn={REWARD}", "gconfig={temperature: 0.6}")
    assert not caplog.messages


ONLINE = ("rollout.agent.mode=online", "train_dataset.batch_size=2")


def test_online_training_needs_no_rows_or_workflow(tmp_path: Path) -> None:
    assert workflow_of(*ONLINE) == {}
    words = (*NAMES, *ONLINE, f"cluster.fileroot={tmp_path}", "actor.dtype=float32", "actor.optimizer.lr=1e-3")
    config, _ = load_expr_config([*words, "total_train_steps=3"], PPOConfig)
    with PPOTrainer(config) as trainer:
        assert trainer.total_steps == 3 and trainer.steps_per_epoch == 1
    config, _ = load_expr_config(words, PPOConfig)
    with pytest.raises(UsageFault, match="no data set that ends"):
        PPOTrainer(config)


def test_trainer_samples_whole_and_varied_groups_if_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``drop_incomplete_group`` and ``dynamic_sampling`` reach the rollouts, beside a filter of one's own."""

    class Asked(Exception):
        pass

    def asked(config: Any, **how: Any) -> Any:
        raise Asked(how)

    monkeypatch.setattr("areal.training.trainers.rollouts.RolloutController", asked)
    same, other = ({"rewards": torch.tensor(each)} for each in ([1.0, 1.0], [0.0, 1.0]))
    for wanted in (True, False):
        flags = (f"gconfig.drop_incomplete_group={wanted}", f"actor.dynamic_sampling={wanted}", "total_train_steps=1")
        words = (
            *NAMES,
            *ONLINE,
            *flags,
            f"cluster.fileroot={tmp_path}",
            "actor.dtype=float32",
            "actor.optimizer.lr=1e-3",
        )
        with PPOTrainer(load_expr_config(words, PPOConfig)[0]) as trainer:
            with pytest.raises(Asked) as caught:
                trainer.train(dynamic_filter_fn=lambda trajectory: bool(trajectory["rewards"][0] < 0.5))
            accept: Any = trainer._sampling.accept
        assert caught.value.args[0]["drop_incomplete_group"] is wanted
        assert accept(other) and not accept(same)
        higher = {"rewards": torch.tensor([0.2, 0.2])}
        assert accept(higher) is not wanted


def test_engine_section_sets_its_flags() -> None:
    words = ("vllm.max_num_seqs=4", "sglang.mem_fraction_static=0.8", "sglang.model_path=elsewhere")
    config, _ = load_expr_config([*NAMES, *words], PPOConfig)
    assert engine_arguments("vllm", config.vllm) == {"max_num_seqs": 4}
    assert engine_arguments("sglang", config.sglang) == {"mem_fraction_static": 0.8}, "its path is areal's to say"
