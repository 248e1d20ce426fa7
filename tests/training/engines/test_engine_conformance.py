"""What every train engine must do (``areal.api.engine_api.TrainEngine``). A new engine joins by its name in
``ENGINES``, registered in the fixture ``registered``; ``megatron`` in a process of its own (``test_megatron``)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api.cli_args import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from areal.api.engine_api import CheckpointUnreadable, NonFinite, TokenOutputs, TrainEngine
from areal.errors import UsageFault
from areal.resources.backend import BackendError
from areal.resources.kinds import TRAIN_ENGINES
from areal.training.algorithms.losses import token_outputs
from areal.training.batches import Batch
from areal.training.engines import open_engine
from areal.training.ranks import one_process
from tests.training.engines.models import VOCABULARY, batch, config, save_model, sft, tokens

ENGINES = os.environ.get("CONFORMING_TRAIN_ENGINES", "fsdp plain").split()
Make = Callable[..., TrainEngine]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRAIN_ENGINES.factories, "plain", "tests.training.engines.plain:PlainEngine")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "untied")


@pytest.fixture(params=ENGINES)
def make(request: pytest.FixtureRequest, model: Path) -> Make:
    def engine(path: Path = model, **changes: Any) -> TrainEngine:
        return open_engine(config(path, backend=f"{request.param}:d1", **changes), one_process("cpu"), total_steps=4)

    return engine


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_tensors()}


def hugging_face(model: Path) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)


def test_new_engine_reports_its_properties(make: Make) -> None:
    engine = make()
    assert (engine.steps, engine.version, engine.is_trained) == (0, 0, True)
    assert (engine.vocab_size, engine.dtype) == (VOCABULARY, torch.float32)


def test_train_batch_matches_manual_torch_step(make: Make, model: Path) -> None:
    engine, reference, data = make(), hugging_face(model), batch()
    logits = reference(input_ids=data["input_ids"], attention_mask=data["attention_mask"].long()).logits
    loss = sft(token_outputs(logits, data), data)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)

    update = engine.train_batch(data, sft, tokens)

    assert update.loss == pytest.approx(loss.item(), rel=1e-5)
    assert update.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert update.micro_batches == 1 and engine.steps == 1
    before = dict(reference.named_parameters())
    for name, tensor in weights(engine).items():  # Adam's first step is the learning rate against the gradient's sign
        grad, moved = before[name].grad, tensor - before[name].detach()
        large = grad.abs() > 1e-5
        assert torch.equal(moved[large].sign(), -grad[large].sign())


def test_learning_rate_follows_schedule_over_steps(make: Make) -> None:
    settings = OptimizerConfig(
        lr=1e-2, lr_scheduler_type="linear", min_lr_ratio=0.0, warmup_steps_proportion=0.0, weight_decay=0.0
    )
    engine = make(optimizer=settings)
    rates = [engine.train_batch(batch(), sft, tokens).learning_rate for _ in range(3)]
    assert rates[0] == pytest.approx(1e-2) and rates == sorted(rates, reverse=True) and rates[2] < rates[0]


def test_updates_lower_loss_and_eval_batch_changes_nothing(make: Make) -> None:
    engine = make()
    first = engine.eval_batch(batch(), sft, tokens)
    assert engine.eval_batch(batch(), sft, tokens) == pytest.approx(first, rel=1e-6) and engine.steps == 0
    losses = [engine.train_batch(batch(), sft, tokens).loss for _ in range(4)]
    assert losses[0] == pytest.approx(first, rel=1e-5)
    assert engine.eval_batch(batch(), sft, tokens) < losses[1] < losses[0]


@pytest.mark.parametrize("spec", [MicroBatchSpec(n_mbs=3), MicroBatchSpec(max_tokens_per_mb=40)])
def test_micro_batches_match_whole_batch(make: Make, spec: MicroBatchSpec) -> None:
    whole, parts = (make(**changes).train_batch(batch(), sft, tokens) for changes in ({}, {"mb_spec": spec}))
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_zero_weight_rows_add_nothing(make: Make) -> None:
    few = {name: column[:5] for name, column in batch().items()}
    masked = batch()
    masked["loss_mask"][5:] = False
    ours, theirs = (make(mb_spec=MicroBatchSpec(n_mbs=2)).train_batch(rows, sft, tokens) for rows in (few, masked))
    assert (theirs.loss, theirs.grad_norm) == pytest.approx((ours.loss, ours.grad_norm), rel=1e-5)


def test_granularity_keeps_neighbors_in_one_micro_batch(make: Make) -> None:
    seen: list[Tensor] = []

    def pairs(outputs: TokenOutputs, micro: Batch) -> Tensor:
        seen.append(micro["number"])
        return sft(outputs, micro)

    rows = {**batch(), "number": torch.arange(8)}
    make(mb_spec=MicroBatchSpec(n_mbs=3, granularity=2)).eval_batch(rows, pairs, tokens)
    for numbers in seen:
        assert torch.equal(numbers[0::2] + 1, numbers[1::2]) and bool((numbers[0::2] % 2 == 0).all())


@pytest.mark.parametrize("spec", [MicroBatchSpec(), MicroBatchSpec(max_tokens_per_mb=20)])
def test_forward_gives_every_row_in_order(make: Make, model: Path, spec: MicroBatchSpec) -> None:
    data, engine = batch(), make(mb_spec=spec)
    data["token_temperatures"] = torch.where(torch.arange(16) > 5, 0.7, 1.0).expand(8, -1)
    with torch.no_grad():
        wanted = token_outputs(hugging_face(model)(data["input_ids"]).logits, data)
    mask = data["attention_mask"]

    of_tokens = engine.forward(data, lambda out, micro: out.logprobs)
    entropies = engine.forward(data, lambda out, micro: out.entropies)
    of_rows = engine.forward(data, lambda out, micro: micro["attention_mask"].sum(1).float())

    assert of_tokens.shape == mask.shape and not of_tokens.requires_grad
    torch.testing.assert_close(of_tokens, wanted.logprobs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(entropies, wanted.entropies, rtol=1e-4, atol=1e-5)
    assert torch.equal(of_rows, mask.sum(1).float())


def test_non_finite_loss_changes_nothing(make: Make) -> None:
    engine = make()
    engine.train_batch(batch(), sft, tokens)
    before = weights(engine)
    with pytest.raises(NonFinite, match="update 2 of"):
        engine.train_batch(batch(), lambda outputs, micro: sft(outputs, micro) * torch.nan, tokens)
    assert engine.steps == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())


def test_engine_without_optimizer_can_only_evaluate(make: Make) -> None:
    engine = make(optimizer=None)
    assert not engine.is_trained and engine.eval_batch(batch(), sft, tokens) > 0
    with pytest.raises(UsageFault):
        engine.train_batch(batch(), sft, tokens)


def test_checkpoint_restores_weights_optimizer_and_rng(make: Make, tmp_path: Path) -> None:
    engine, resumed = make(), make()
    engine.train_batch(batch(), sft, tokens)
    engine.version = 7
    engine.save_checkpoint(tmp_path / "checkpoint")
    drawn = torch.rand(3)

    resumed.load_checkpoint(tmp_path / "checkpoint")

    assert (resumed.steps, resumed.version) == (1, 7)
    assert torch.equal(torch.rand(3), drawn)
    for each in (engine, resumed):
        each.train_batch(batch(seed=1), sft, tokens)
    for name, tensor in weights(engine).items():  # with the moments of before
        torch.testing.assert_close(weights(resumed)[name], tensor)


def test_resumed_engine_uses_configured_optimizer_settings(make: Make, tmp_path: Path) -> None:
    engine = make()
    engine.train_batch(batch(), sft, tokens)
    engine.save_checkpoint(tmp_path / "checkpoint")
    still = make(optimizer=OptimizerConfig(lr=1e-2, warmup_steps_proportion=0.0, weight_decay=0.0, eps=1e9))

    still.load_checkpoint(tmp_path / "checkpoint")
    still.train_batch(batch(seed=1), sft, tokens)

    for name, tensor in weights(engine).items():  # a large epsilon divides the step, and nothing decays
        torch.testing.assert_close(weights(still)[name], tensor)


def test_damaged_checkpoint_is_refused(make: Make, tmp_path: Path) -> None:
    engine = make()
    engine.save_checkpoint(tmp_path / "checkpoint")
    for path in (tmp_path / "checkpoint").rglob("*"):
        if path.is_file() and path.name != ".metadata":
            path.write_bytes(b"x")
    with pytest.raises(CheckpointUnreadable):
        make().load_checkpoint(tmp_path / "checkpoint")


@pytest.mark.parametrize("tied", [False, True])
def test_named_tensors_match_hugging_face_checkpoint(make: Make, tmp_path: Path, tied: bool) -> None:
    from safetensors.torch import load_file

    written = load_file(save_model(tmp_path, tied=tied) / "model.safetensors")
    engine = make(tmp_path)

    found = weights(engine)

    assert set(found) == set(written)
    assert all(torch.equal(tensor, written[name]) for name, tensor in found.items())
    assert [name for name, _ in engine.named_tensors()] == list(found)
    assert {tensor.dtype for _, tensor in engine.named_tensors(torch.bfloat16)} == {torch.bfloat16}


def test_next_token_logprobs_match_forward_pass(make: Make, model: Path) -> None:
    ids = torch.tensor([3, 1, 4, 1, 5])
    with torch.no_grad():
        wanted = torch.log_softmax(hugging_face(model)(ids[None]).logits[0, -1], -1)
    found = make().next_token_logprobs(ids)
    assert (found.dtype, found.device.type) == (torch.float32, "cpu") and not found.requires_grad
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_saved_model_replaces_old_one_and_loads(make: Make, tmp_path: Path) -> None:
    engine, folder = make(), tmp_path / "model"
    engine.train_batch(batch(), sft, tokens)
    folder.mkdir()
    (folder / "leftover").touch()
    shutil.copytree(Path("examples/reverse_digits/model"), tmp_path / "tokenizer")

    engine.save_model(folder, str(tmp_path / "tokenizer"))

    assert not (folder / "leftover").exists() and (folder / "tokenizer.json").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("model")] == ["model"]
    assert make(folder).eval_batch(batch(), sft, tokens) == pytest.approx(engine.eval_batch(batch(), sft, tokens))


def test_unknown_engine_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match='backend column 1: unknown engine "nowhere"'):
        TrainEngineConfig(path="m", backend="nowhere:d1")
    for changes, reported in (
        ({"use_lora": True}, "use_lora is not supported by the megatron engine"),
        ({"is_critic": True}, "is_critic is not supported by the megatron engine"),
        ({"freeze_vision_tower": True}, "freeze_vision_tower is not supported by the megatron engine"),
        ({"attn_impl": "eager"}, "attn_impl eager"),
        ({"dtype": "float16"}, "dtype float16"),
    ):
        with pytest.raises(ValueError, match=reported):
            TrainEngineConfig(path="m", backend="megatron:d1", **changes)
    with pytest.raises(BackendError):
        open_engine(TrainEngineConfig(path="m"), one_process("cpu"), allocation_mode="nowhere:d1")


@pytest.fixture
def entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "areal_plain-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-plain\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[areal.train_engines]\nother = tests.training.engines.plain:PlainEngine\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield


def test_engine_of_an_entry_point_is_opened_by_its_name(model: Path, entry_point: None) -> None:
    assert open_engine(config(model, backend="other:d1"), one_process("cpu")).vocab_size == VOCABULARY
