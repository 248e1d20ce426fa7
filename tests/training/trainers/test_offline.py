"""Fine-tuning, reward models and DPO each get better at what they are for, and resume where they stood."""

import json
import math
from pathlib import Path
from typing import Literal

import pytest
import torch

from areal.api.cli_args import (
    DPOConfig,
    DPOEngineConfig,
    EvaluatorConfig,
    RecoverConfig,
    RWConfig,
    SaverConfig,
    SFTConfig,
    TrainDatasetConfig,
    TrainEngineConfig,
    load_expr_config,
)
from areal.api.engine_api import NonFinite, TokenOutputs
from areal.errors import UsageFault
from areal.rollout.evaluation import ratio_estimate
from areal.state.job_metrics import steps_of
from areal.training.algorithms.losses import token_outputs
from areal.training.drivers import sft
from areal.training.ranks import Ranks
from areal.training.stopping import Stopped
from areal.training.trainers.offline import DPOTrainer, RWTrainer, SFTTrainer
from tests.hub_standin import files_of, hub_standin
from tests.training.trainers.reversing import MODEL, engine, experiment, optimizer, preferences, solved


def _common(tmp_path: Path, steps: int, **more) -> dict:
    return experiment(
        tmp_path,
        total_train_steps=steps,
        train_dataset=TrainDatasetConfig(batch_size=16),
        evaluator=EvaluatorConfig(freq_steps=steps, eval_before_train=True),
        **more,
    )


def _sft(tmp_path: Path, steps: int, **more) -> SFTTrainer:
    config = SFTConfig(**_common(tmp_path, steps, **more), model=TrainEngineConfig(**engine(optimizer=optimizer(5e-4))))
    return SFTTrainer(config, solved(800), solved(32, first=1000))


def test_sft_learns_and_saves_model(tmp_path: Path) -> None:
    with _sft(tmp_path, 100, saver=SaverConfig(freq_epochs=1)) as trainer:
        trainer.train()
        lines = steps_of(trainer.folder.metrics)
        assert (trainer.folder.models / "step_100" / "tokenizer.json").is_file()
    assert [line["step"] for line in lines] == list(range(101))
    assert all(line["time/eval"] <= line["time/step"] for line in lines[1:] if "time/eval" in line)
    assert lines[100]["eval/loss"] < 0.6 * lines[0]["eval/loss"]
    assert lines[100]["loss"] < lines[1]["loss"]
    assert lines[50]["epoch"] == 1.0


def test_written_config_reproduces_run(tmp_path: Path) -> None:
    with _sft(tmp_path, 3) as trainer:
        trainer.train()
        written, config = trainer.folder.config, trainer.config
    again, _ = load_expr_config(["--config", str(written)], SFTConfig)
    assert again == config
    assert "admin_api_key:" not in written.read_text()


def test_resumed_sft_matches_uninterrupted_run(tmp_path: Path) -> None:
    recover = RecoverConfig(mode="auto", freq_steps=4)
    with _sft(tmp_path / "whole", 9, recover=recover) as whole:
        whole.train()
    with _sft(tmp_path / "cut", 9, recover=recover) as cut:
        take, cut.total_steps = cut.train_step, 9

        def until_six():
            if cut.step == 6:
                raise KeyboardInterrupt
            return take()

        cut.train_step = until_six  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            cut.train()
    with _sft(tmp_path / "cut", 9, recover=recover) as resumed:
        resumed.train()
        steps = [line["step"] for line in steps_of(resumed.folder.metrics)]
    assert steps == list(range(10))
    ends = [dict(trainer.actor.named_tensors()) for trainer in (whole, resumed)]
    assert all((ends[0][name] - ends[1][name]).abs().max() < 1e-6 for name in ends[0])


def test_stop_in_last_step_of_epoch_still_saves_and_evaluates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SFTConfig(
        **experiment(tmp_path, total_train_epochs=3),
        train_dataset=TrainDatasetConfig(batch_size=16),
        evaluator=EvaluatorConfig(freq_epochs=1),
        saver=SaverConfig(freq_epochs=1),
        recover=RecoverConfig(mode="auto"),
        model=TrainEngineConfig(**engine(optimizer=optimizer(5e-4))),
    )
    with SFTTrainer(config, solved(32), solved(16, first=1000)) as first:  # two steps an epoch
        stopped_after = 2
        monkeypatch.setattr("areal.training.stopping.requested", lambda: first.step == stopped_after)
        with pytest.raises(Stopped):
            first.train()
        assert not (first.folder.models / "step_2").exists()
    monkeypatch.undo()
    with SFTTrainer(config, solved(32), solved(16, first=1000)) as again:
        again.train()
        lines = steps_of(again.folder.metrics)
    assert sorted(path.name for path in again.folder.models.iterdir()) == ["step_2", "step_4", "step_6"]
    assert [line["step"] for line in lines if "eval/loss" in line] == [2, 4, 6]
    assert "loss" in lines[1] and len(lines) == 6, "the line of step 2 has both"


def test_run_without_saver_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with _sft(tmp_path, 1):
        assert "no model will be kept: saver.freq_epochs=1" in capsys.readouterr().err


@pytest.mark.extended
def test_reward_model_learns_to_rank_answers(tmp_path: Path) -> None:
    config = RWConfig(**_common(tmp_path, 200), model=TrainEngineConfig(**engine(optimizer=optimizer(1e-3))))
    with RWTrainer(config, preferences(800), preferences(128, first=1000)) as trainer:
        trainer.train()
        lines = steps_of(trainer.folder.metrics)
    assert lines[0]["eval/accuracy"] < 0.6
    assert lines[-1]["eval/accuracy"] > 0.75  # by chance 0.5, of 128 pairs


@pytest.mark.parametrize("kind", ["sigmoid", pytest.param("ipo", marks=pytest.mark.extended)])
def test_dpo_widens_margin_of_chosen_answer(tmp_path: Path, kind: Literal["sigmoid", "ipo"]) -> None:
    actor = DPOEngineConfig(**engine(optimizer=optimizer(5e-4)), loss_type=kind)
    config = DPOConfig(**_common(tmp_path, 20), actor=actor)
    with DPOTrainer(config, preferences(160), preferences(32, first=1000)) as trainer:
        trainer.train()
        lines = steps_of(trainer.folder.metrics)
        reference = dict(trainer.reference.named_tensors())
        assert any((tensor - reference[name]).abs().max() > 1e-4 for name, tensor in trainer.actor.named_tensors())
    share, n, z = lines[-1]["eval/accuracy"], 32, 1.96
    assert share > 0.95
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)  # Wilson's interval
    margin = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    assert lines[-1]["eval/accuracy/low"] == pytest.approx(centre - margin, abs=0.01)
    assert lines[-1]["eval/accuracy/high"] == pytest.approx(min(1.0, centre + margin), abs=0.01)
    assert lines[-1]["eval/loss"] < lines[0]["eval/loss"]
    for line in (lines[0], lines[-1]):
        low, loss, high = (line[f"eval/loss{end}"] for end in ("/low", "", "/high"))
        assert high - loss == pytest.approx(loss - low) and loss <= high


def test_loss_of_evaluation_has_interval_over_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = SFTConfig(
        **experiment(tmp_path),
        train_dataset=TrainDatasetConfig(batch_size=5),
        evaluator=EvaluatorConfig(freq_steps=1, confidence=0.9),
        model=TrainEngineConfig(**engine(optimizer=optimizer(5e-4))),
    )
    rows = [{**row, "loss_mask": [*row["loss_mask"][:-1], number % 3 > 0]} for number, row in enumerate(solved(32))]
    rows += [{**rows[0], "loss_mask": [0] * len(rows[0]["input_ids"])}]  # nothing is learned
    with SFTTrainer(config, solved(16), rows) as trainer:
        found = trainer.evaluate()
        each = [trainer.collate([row]) for row in rows[:-1]]
        lengths = [int(batch["loss_mask"].sum()) for batch in each]
        losses = [
            trainer.actor.eval_batch(batch, trainer.loss, trainer.weight) * n
            for batch, n in zip(each, lengths, strict=True)
        ]
        whole = trainer.actor.eval_batch(trainer.collate(rows), trainer.loss, trainer.weight)
    want = ratio_estimate(losses, lengths, 0.9)
    assert want.low < want.value < want.high
    assert found["loss"] == pytest.approx(whole, rel=1e-5)
    assert [found["loss/low"], found["loss/high"]] == pytest.approx([want.low, want.high], rel=1e-4)
    assert found["perplexity/high"] == pytest.approx(math.exp(want.high), rel=1e-4)
    assert f"loss {want.text()}, perplexity" in capsys.readouterr().err


def test_dpo_uses_configured_reference(tmp_path: Path) -> None:
    other = TrainEngineConfig(**engine(path="", init_from_scratch=True))
    config = DPOConfig(**_common(tmp_path, 1), actor=DPOEngineConfig(**engine()), ref=other)
    with DPOTrainer(config, preferences(16)) as trainer:
        actor, reference = (dict(each.named_tensors()) for each in (trainer.actor, trainer.reference))
    assert any(not torch.equal(tensor, reference[name]) for name, tensor in actor.items())
    assert other.optimizer is not None, "the configuration stays as it was given"


def test_run_length_and_timers_follow_config(tmp_path: Path) -> None:
    config = SFTConfig(
        **_common(tmp_path, 1, total_train_epochs=3, saver=SaverConfig(freq_secs=7)),
        model=TrainEngineConfig(**engine()),
    )
    config.total_train_steps = None
    with SFTTrainer(config, solved(40)) as trainer:
        assert trainer.total_steps == 3 * (40 // 16)
        saves = trainer._timers["save"]
        assert [saves.due(epoch_ended=False, now=now) for now in (0.0, 6.0, 8.0)] == [False, False, True]


def test_label_smoothing_gives_conservative_dpo(tmp_path: Path) -> None:
    actor = DPOEngineConfig(**engine(), label_smoothing=0.2, beta=0.5)
    with DPOTrainer(DPOConfig(**_common(tmp_path, 1), actor=actor), preferences(16)) as trainer:
        micro = trainer.collate(preferences(1))
        mask, generator = micro["loss_mask"], torch.Generator().manual_seed(0)
        logits = torch.randn(2, mask.shape[1], 16, generator=generator)
        logp = torch.log_softmax(logits[:, :-1], -1).gather(2, micro["input_ids"][:, 1:, None])[..., 0]
        micro["reference"] = torch.randn(mask.shape, generator=generator)
        gained = ((logp - micro["reference"][:, 1:]) * mask[:, 1:]).sum(1)
        margin = 0.5 * (gained[0] - gained[1])
        want = -0.8 * torch.nn.functional.logsigmoid(margin) - 0.2 * torch.nn.functional.logsigmoid(-margin)
        assert trainer.loss(token_outputs(logits, micro), micro).item() == pytest.approx(want.item(), rel=1e-5)


def test_pair_that_a_rank_repeats_counts_once(tmp_path: Path) -> None:
    config = RWConfig(**_common(tmp_path, 1), model=TrainEngineConfig(**engine(optimizer=optimizer(1e-3))))
    with RWTrainer(config, preferences(16)) as trainer:
        micro = trainer.collate(preferences(4))
        outputs = TokenOutputs.of_critic(torch.zeros(micro["input_ids"].shape))
        outputs.values[0] = 1.0  # only the first pair is ranked right
        trainer.losses(outputs, micro)
        first = {name: column[:2] for name, column in micro.items()}
        trainer.losses(TokenOutputs.of_critic(outputs.values[:2]), first)
        assert trainer.loss_metrics(0.5) == {"loss": 0.5, "accuracy": 0.25}
        trainer.losses(TokenOutputs.of_critic(outputs.values[:2]), first)
        assert trainer.loss_metrics(0.5)["accuracy"] == 1.0


def test_run_with_non_finite_loss_keeps_checkpoint(tmp_path: Path) -> None:
    recover = RecoverConfig(mode="auto", freq_steps=2)
    with _sft(tmp_path, 6, recover=recover) as trainer:
        loss = trainer.loss

        def broken(outputs, micro):
            return loss(outputs, micro) * (float("nan") if trainer.step == 3 else 1.0)

        trainer.loss = broken  # type: ignore[method-assign]
        with pytest.raises(NonFinite, match="update 4"):
            trainer.train()
        newest = trainer.checkpoints.newest()
    assert newest is not None
    assert newest.state()["step"] == 2


@pytest.mark.parametrize("ranks", [2, 5])
def test_last_row_counts_once_on_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    with _sft(tmp_path, 1) as trainer:
        batch, counted = trainer.collate(solved(1)), 0
        for rank in range(ranks):
            trainer.ranks = Ranks(rank, ranks, torch.device("cpu"))
            counted += int(trainer.weight(trainer.rank_rows(batch)))
        assert counted == int(trainer.weight(batch)) > 0


def test_rows_without_a_mask_are_named(tmp_path: Path) -> None:
    config = SFTConfig(**_common(tmp_path, 1), model=TrainEngineConfig(**engine()))
    with SFTTrainer(config, [{"input_ids": [1, 2]}] * 16) as trainer, pytest.raises(UsageFault, match="no loss_mask"):
        trainer.train()


def test_batch_larger_than_dataset_is_an_error(tmp_path: Path) -> None:
    config = SFTConfig(**_common(tmp_path, 1), model=TrainEngineConfig(**engine()))
    with pytest.raises(UsageFault, match="a batch of 16 is more than the 5 rows"):
        SFTTrainer(config, solved(5))


def test_missing_dataset_is_an_error(tmp_path: Path) -> None:
    config = SFTConfig(**_common(tmp_path, 1), model=TrainEngineConfig(**engine()))
    with pytest.raises(UsageFault, match="needs a train_dataset"):
        SFTTrainer(config, [])


def test_sft_of_ids_of_the_hub_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": text, "answer": text[::-1]} for text in ("1234", "5678", "9012", "3456")]
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with hub_standin() as standin:
        monkeypatch.setenv("HF_ENDPOINT", standin.url)
        standin.repository("org/reverse").push(files_of(MODEL), "model")
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        standin.repository("org/digits", "dataset").push({"train.jsonl": lines.encode()}, "rows")
        words = ["experiment_name=e", "trial_name=t", f"cluster.fileroot={tmp_path}", "total_train_steps=2"]
        words += ["model.path=org/reverse", "model.dtype=float32", "tokenizer_path=org/reverse"]
        words += ["train_dataset.path=org/digits:train", "train_dataset.batch_size=4", "model.optimizer.lr=1e-3"]
        sft(words)
    lines_ = steps_of(tmp_path / "runs" / "e" / "t" / "metrics.jsonl")
    assert [line["step"] for line in lines_] == [1, 2] and lines_[1]["loss"] < lines_[0]["loss"]
