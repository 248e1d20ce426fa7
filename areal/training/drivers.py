"""The built-in drivers, one for each trainer type. Workflow and reward come from the configuration.

Trainers are imported after the configuration and the data are loaded, so that their errors do not wait for torch.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from areal.api.cli_args import (
    DPOConfig,
    GenerationHyperparameters,
    GRPOConfig,
    PPOConfig,
    RWConfig,
    SFTConfig,
    load_expr_config,
)
from areal.api.config.experiment import BaseExperimentConfig
from areal.dataset.files import Rows
from areal.errors import UsageFault
from areal.loading import load_attr
from areal.reward.functions import Parameters, check_columns
from areal.rollout.workflows import WORKFLOWS, configured_workflow

_log = logging.getLogger(__name__)


def grpo(args: Sequence[str]) -> None:
    """Run online reinforcement learning with group baselines."""
    _online(load_expr_config(args, GRPOConfig)[0])


def ppo(args: Sequence[str]) -> None:
    """Run online reinforcement learning, with a critic if the configuration has one."""
    _online(load_expr_config(args, PPOConfig)[0])


def evaluate(args: Sequence[str]) -> None:
    """Sample and reward the validation set, without training."""
    config = load_expr_config(args, PPOConfig)[0]
    workflow = _workflow(config)
    rows = _rows(config, None, "valid", processor=_processor(workflow))
    _check_rows(workflow, rows)
    from areal.training.trainers.rollouts import Evaluation

    with Evaluation(config, rows) as evaluation:
        evaluation.run(**workflow)


def sft(args: Sequence[str]) -> None:
    """Run supervised fine-tuning."""
    _offline(args, SFTConfig, "SFTTrainer", "sft")


def rw(args: Sequence[str]) -> None:
    """Train a reward model on preferences."""
    _offline(args, RWConfig, "RWTrainer", "rw")


def dpo(args: Sequence[str]) -> None:
    """Run direct preference optimization."""
    _offline(args, DPOConfig, "DPOTrainer", "rw")


def _offline(args: Sequence[str], config_type: type[BaseExperimentConfig], trainer: str, rows: str) -> None:
    config = load_expr_config(args, config_type)[0]
    tokenizer = _tokenizer(config)
    datasets = [_rows(config, tokenizer, which, rows) for which in ("train", "valid")]
    from areal.training.trainers import offline

    with getattr(offline, trainer)(config, *datasets) as run:
        run.train()


def _online(config: PPOConfig) -> None:
    workflow = _workflow(config)
    read = partial(_rows, config, None, processor=_processor(workflow))
    train = None if config.is_online and not config.train_dataset.path else read("train")
    valid = read("valid")
    _check_rows(workflow, train, valid)
    from areal.training.trainers.ppo import PPOTrainer

    with PPOTrainer(config, train, valid) as run:
        run.train(**workflow)


def _processor(workflow: Mapping[str, Any]) -> Any:
    """Return the image processor that the workflow is constructed with."""
    return workflow.get("workflow_kwargs", {}).get("processor")


def _workflow(config: PPOConfig) -> dict[str, Any]:
    """Return the keyword arguments of ``train``. The workflow's parameters ``tokenizer``, ``processor``, ``gconfig``,
    ``reward_fn`` and ``reward_weights`` come from the configuration; ``workflow_kwargs`` override them. Raises
    UsageFault."""
    is_default = config.workflow == PPOConfig.workflow
    if config.is_online and is_default:
        return {}  # users have the conversations
    agent = config.rollout.agent or config.rollout.openai
    named = agent.agent_cls_path if agent is not None and is_default else ""
    chosen = named or configured_workflow(config.workflow, PPOConfig.workflow, os.environ)
    workflow = WORKFLOWS.resolve(chosen)
    takes = inspect.signature(workflow).parameters if inspect.isclass(workflow) else {}
    common: dict[str, object] = {
        "tokenizer": config.tokenizer_path,
        "processor": config.tokenizer_path,
        "gconfig": config.gconfig,
        "reward_fn": config.reward_fn,
        "reward_weights": config.reward_weights,
    }
    kwargs = {name: value for name, value in common.items() if name in takes and value} | dict(config.workflow_kwargs)
    for name in ("reward_fn", "reward_weights"):
        if common[name] and name not in kwargs:
            raise UsageFault(f"the workflow {chosen} takes no {name}", hint=f"leave {name} out")
    reward = takes.get("reward_fn")
    if reward is not None and reward.default is reward.empty and "reward_fn" not in kwargs:
        raise UsageFault(
            "no reward is configured", hint="reward_fn=module:function, such as areal.reward.gsm8k:gsm8k_reward_fn"
        )
    if "gconfig" not in takes and (names := _changed_sampling(config)):
        _log.warning("%s: no effect, as the workflow %s takes no gconfig: it says itself how it samples", names, chosen)
    evaluated = {**kwargs, "gconfig": config.eval_gconfig} if "gconfig" in takes else kwargs
    return {"workflow": chosen, "workflow_kwargs": kwargs, "eval_workflow_kwargs": evaluated}


def _check_rows(workflow: Mapping[str, Any], *datasets: Any) -> None:
    """Raise UsageFault, before an engine starts, for a reward that does not reward single responses, and for a row that
    lacks a column which the reward requires. areal's workflows pass a row's columns to the reward; the arguments of
    user-defined workflows are not known here."""
    found = WORKFLOWS.resolve(workflow["workflow"]) if workflow else None
    reward = workflow.get("workflow_kwargs", {}).get("reward_fn")
    if not reward or not str(getattr(found, "__module__", "")).startswith("areal."):
        return
    given = reward if isinstance(reward, list | tuple) else [reward]
    rewards = [Parameters.of(load_attr(each, "reward") if isinstance(each, str) else each) for each in given]
    for function in rewards:
        function.check_types()
    for rows in datasets:
        if isinstance(rows, Rows):
            check_columns(rewards, rows, rows.place)


def _changed_sampling(config: PPOConfig) -> str:
    """Return the settings of ``gconfig`` and ``eval_gconfig`` that differ from their defaults, by name."""
    gconfig, evaluated, plain = config.gconfig, config.eval_gconfig, GenerationHyperparameters()
    found = [f"gconfig.{name}" for name in _changed_fields(gconfig, plain)]
    found += [f"eval_gconfig.{name}" for name in _changed_fields(evaluated or gconfig, gconfig)]
    return ", ".join(found)


def _changed_fields(one: GenerationHyperparameters, other: GenerationHyperparameters) -> list[str]:
    names = [each.name for each in fields(one) if each.name != "n_samples"]
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def _tokenizer(config: BaseExperimentConfig) -> Any:
    from areal.dataset.tokenizers import load_hf_tokenizer

    return load_hf_tokenizer(config.tokenizer_path)


def _rows(config: BaseExperimentConfig, tokenizer: Any, which: str, kind: str = "rl", processor: Any = None) -> Any:
    from areal.dataset import get_custom_dataset
    from areal.dataset.loading import DEFAULT_SPLITS

    dataset = config.train_dataset if which == "train" else config.valid_dataset
    if dataset is None or not dataset.path:
        if which == "train":
            raise UsageFault("the data set has no path", hint="train_dataset.path=FILE")
        return None
    if tokenizer is None and (dataset.max_length is not None or dataset.chat_template_kwargs):
        tokenizer = _tokenizer(config)
    split = dataset.split or DEFAULT_SPLITS[f"{which}_dataset"]
    return get_custom_dataset(split, dataset, tokenizer, processor, type=dataset.type or kind)
