"""Models and data that do not go together are refused before the first update, by their names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from areal.api.cli_args import GRPOConfig, PPOActorConfig, SFTConfig, TrainDatasetConfig, TrainEngineConfig
from areal.errors import NotFound, UsageFault
from areal.training.trainers.offline import SFTTrainer
from areal.training.trainers.ppo import PPOTrainer
from tests.training.trainers.reversing import MODEL, engine, experiment, prompts, solved


def _trainer(tmp_path: Path, rows: list[dict[str, list[int]]], model: Path = MODEL) -> SFTTrainer:
    data = TrainDatasetConfig(batch_size=4)
    actor = TrainEngineConfig(**engine(path=str(model)))
    return SFTTrainer(SFTConfig(**experiment(tmp_path, total_train_steps=1), train_dataset=data, model=actor), rows)


def test_model_folder_without_weights_is_named(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(NotFound, match=r"model has no weights \(\*\.safetensors\)") as caught:
        _trainer(tmp_path, solved(4), tmp_path / "model")
    assert "init_from_scratch" in str(caught.value.hint)


@pytest.mark.parametrize("config", [None, {"model_type": "no_such"}])
def test_non_model_folder_is_one_line_error(tmp_path: Path, config: dict[str, str] | None) -> None:
    (tmp_path / "model").mkdir()
    if config is not None:
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotFound, match=r"model is not a model folder: ") as caught:
        _trainer(tmp_path, solved(4), tmp_path / "model")
    assert "\n" not in caught.value.message


def test_vision_language_model_is_refused_by_its_type(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2_vl"}))
    with pytest.raises(UsageFault, match="no AutoModelForCausalLM of the model type qwen2_vl") as caught:
        _trainer(tmp_path, solved(4), tmp_path / "model")
    assert "vision-language models are trained by fsdp, as policies: idefics3" in str(caught.value.hint)


def test_untrained_model_is_reported_before_service_starts(tmp_path: Path) -> None:
    data = TrainDatasetConfig(batch_size=4)
    actor = PPOActorConfig(**engine(optimizer=None))
    config = GRPOConfig(**experiment(tmp_path, total_train_steps=1), train_dataset=data, actor=actor)
    with pytest.raises(UsageFault, match="is to be trained, and its optimizer is null"):
        PPOTrainer(config, prompts(4))


@pytest.mark.parametrize("name", ["loss_fn", "advantage_fn", "gae_lambda"])
@pytest.mark.parametrize(("message", "fault"), [("math:pi", "cannot be called"), ("nowhere:f", "there is no module")])
def test_custom_non_function_is_refused_before_first_rollout(
    tmp_path: Path, name: str, message: str, fault: str
) -> None:
    actor = PPOActorConfig(**engine(**{name: message}))
    config = GRPOConfig(
        **experiment(tmp_path, total_train_steps=1), train_dataset=TrainDatasetConfig(batch_size=4), actor=actor
    )
    with pytest.raises(UsageFault, match=rf"actor\.{name}.*{fault}"):
        PPOTrainer(config, prompts(4))


def test_unknown_token_is_reported_with_the_tokenizers_name(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 5, 99], "loss_mask": [0, 1, 1]}] * 4
    with _trainer(tmp_path, rows) as trainer, pytest.raises(UsageFault, match=r"token 99, .* has 16") as caught:
        trainer.train()
    assert "tokenizer_path" in str(caught.value.hint)
