"""The engine's promises: one gradient whatever the layout, nothing changed by a loss that is not a number, checkpoints
for any number of ranks, adapters merged into what is published."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from areal.api.cli_args import MicroBatchSpec
from areal.api.engine_api import NonFinite, TokenOutputs
from areal.errors import ArealError, NotFound, UsageFault
from areal.training.batches import Batch
from areal.training.checkpoints import Checkpoints
from areal.training.engines.fsdp import FSDPEngine
from areal.training.engines.huggingface import PACKED, decoder_layers
from areal.training.ranks import one_process
from tests.training.engines.models import (
    AGGREGATIONS,
    STILL,
    VOCABULARY,
    batch,
    config,
    policy_batch,
    policy_gradient,
    save_model,
    sft,
    tokens,
)

ALONE = one_process("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "untied")


def _engine(model: Path, **changes) -> FSDPEngine:
    return FSDPEngine(config(model, **changes), ALONE, total_steps=4)


def _weights(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_tensors()}


def test_missing_weight_is_refused_except_critic_head(model: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(NotFound, match=r"the weights in .* lack lm_head\.weight"):
        _engine(tmp_path / "model")
    assert _engine(tmp_path / "model", is_critic=True)


@pytest.mark.parametrize("spec", [MicroBatchSpec(n_mbs=3), MicroBatchSpec(max_tokens_per_mb=40)])
def test_train_batch_in_micro_batches_matches_whole_step(model: Path, spec: MicroBatchSpec) -> None:
    whole, parts = _engine(model), _engine(model, mb_spec=spec)
    first, second = (engine.train_batch(batch(), sft, tokens) for engine in (whole, parts))
    assert second.micro_batches > first.micro_batches == 1
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    for name, tensor in _weights(whole).items():
        torch.testing.assert_close(_weights(parts)[name], tensor, rtol=1e-4, atol=1e-5)


def test_train_batch_matches_manual_torch_step(model: Path) -> None:
    from transformers import LlamaForCausalLM

    engine = _engine(model)
    reference = LlamaForCausalLM.from_pretrained(model)
    data = batch()
    logits = reference(input_ids=data["input_ids"], attention_mask=data["attention_mask"]).logits
    labels = torch.where(data["loss_mask"], data["input_ids"], -100)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    update = engine.train_batch(data, sft, tokens)
    assert update.loss == pytest.approx(loss.item(), rel=1e-5)
    assert update.grad_norm == pytest.approx(norm.item(), rel=1e-4)


def groups(prompts: int = 4, samples: int = 8) -> Batch:
    """Groups of samples of one prompt each, as a step of GRPO has them: long prompts, short answers."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (prompts, 1, 10), generator=generator).expand(-1, samples, -1).flatten(0, 1)
    answers = torch.randint(1, VOCABULARY, (prompts * samples, 6), generator=generator)
    sizes = torch.randint(11, 17, (prompts * samples, 1), generator=generator)
    steps = torch.arange(16)
    mask = steps < sizes
    return {
        "input_ids": torch.cat([ids, answers], 1) * mask,
        "attention_mask": mask,
        "loss_mask": mask & (steps >= 10),
    }


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"use_lora": True}])
@pytest.mark.parametrize("is_masked", [True, False])
def test_packed_rows_match_logits_and_gradient_of_padded_rows(
    model: Path, changes: dict[str, Any], is_masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal.training.batches._MASKED", 1 << 22 if is_masked else 0)
    batch, whole, padded = groups(), _engine(model, **changes), _engine(model, **changes)
    padded._packs = False
    padded.model.load_state_dict(whole.model.state_dict())
    (micro, packed), (_, none) = whole._micro(batch, range(32)), padded._micro(batch, range(32))
    assert packed is not None and none is None and (packed.mask is not None) is is_masked
    assert packed.input_ids.numel() < batch["input_ids"].numel() / 2
    found, wanted = whole.outputs(micro, packed), padded.outputs(micro)
    torch.testing.assert_close(found.logprobs, wanted.logprobs)
    torch.testing.assert_close(found.entropies, wanted.entropies)
    ours, theirs = whole.train_batch(batch, sft, tokens), padded.train_batch(batch, sft, tokens)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-4)


def test_packed_critic_has_value_of_last_token(model: Path) -> None:
    batch, whole, padded = groups(), _engine(model, is_critic=True), _engine(model, is_critic=True)
    padded._packs = False
    padded.model.load_state_dict(whole.model.state_dict())
    assert whole._micro(batch, range(32))[1] is not None
    values, wanted = (each.forward(batch, lambda outputs, micro: outputs.values) for each in (whole, padded))
    there = batch["attention_mask"]
    torch.testing.assert_close(values[there], wanted[there])


def test_model_with_a_sliding_window_is_never_packed(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    shape: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    about = MistralConfig(vocab_size=VOCABULARY, num_key_value_heads=2, sliding_window=4, **shape)
    MistralForCausalLM(about).save_pretrained(tmp_path)
    assert _engine(tmp_path)._micro(groups(), range(32))[1] is None


@pytest.fixture(scope="module")
def two_ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have written what they did."""
    folder = tmp_path_factory.mktemp("two_ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--log-dir=/dev/null"]
    launcher = [sys.executable, *torchrun, str(Path(__file__).with_name("two_ranks.py"))]
    done = subprocess.run(
        [*launcher, str(model), str(folder)], env=environment, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.extended
def test_loss_agg_mode_gradient_is_equal_on_one_and_two_ranks(model: Path, two_ranks: Path) -> None:
    """Two rows, one of them left out, and six; in micro-batches."""
    theirs = torch.load(two_ranks / "gradients.pt")
    alone = _engine(model, optimizer=STILL)
    for mode in AGGREGATIONS:
        ours = policy_gradient(alone, policy_batch(), mode)
        assert any(bool(grad.abs().max() > 1e-3) for grad in ours.values())
        for name, grad in ours.items():
            torch.testing.assert_close(theirs[mode, "float32"][name], grad, rtol=1e-3, atol=1e-5)


def test_grad_reduce_dtype_sets_dtype_of_gradient_reduction(two_ranks: Path) -> None:
    """``grad_reduce_dtype``: float32 and bfloat16."""
    found = torch.load(two_ranks / "gradients.pt")
    exact, rounded = (found["token-mean", dtype]["lm_head.weight"] for dtype in ("float32", "bfloat16"))
    assert torch.equal(rounded, rounded.bfloat16().float()) and not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=1e-3)


def test_two_ranks_match_one_rank_and_resume_each_other(model: Path, two_ranks: Path) -> None:
    seen = json.loads((two_ranks / "seen.json").read_text())
    alone = _engine(model)
    updates = [alone.train_batch(batch(), sft, tokens) for _ in range(2)]
    assert [update.grad_norm for update in updates] == pytest.approx(seen["norms"], rel=1e-4)
    assert [update.loss for update in updates] == pytest.approx(seen["losses"], rel=1e-5)
    assert alone.eval_batch(batch(), sft, tokens) == pytest.approx(seen["eval"], rel=1e-4)

    resumed = _engine(model)
    newest = Checkpoints(two_ranks / "checkpoints").newest()
    assert newest is not None
    resumed.load_checkpoint(newest.folder / "actor")
    assert resumed.steps == 2
    saved = _weights(_engine(two_ranks / "model"))
    for name, tensor in _weights(resumed).items():
        torch.testing.assert_close(tensor, saved[name], rtol=0, atol=0)
    after = [engine.train_batch(batch(seed=1), sft, tokens).loss for engine in (alone, resumed)]
    assert after[0] == pytest.approx(after[1], rel=1e-4)
    final = [_weights(engine) for engine in (alone, resumed)]
    for name, tensor in final[0].items():  # the moments came back too
        torch.testing.assert_close(final[1][name], tensor, rtol=1e-3, atol=1e-4)


def test_non_finite_loss_changes_nothing(model: Path) -> None:
    engine = _engine(model)
    engine.train_batch(batch(), sft, tokens)
    before = _weights(engine)
    with pytest.raises(NonFinite, match=r"update 2 of .*: loss nan, .*stopped before the optimizer's step"):
        engine.train_batch(batch(), lambda outputs, micro: sft(outputs, micro) * torch.nan, tokens)
    assert engine.steps == 1
    for name, tensor in _weights(engine).items():
        assert torch.equal(tensor, before[name])


def test_forward_order_is_independent_of_micro_batches(model: Path) -> None:
    def of(outputs: TokenOutputs, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        return outputs.logprobs

    whole = _engine(model).forward(batch(), of)
    parts = _engine(model, mb_spec=MicroBatchSpec(max_tokens_per_mb=20)).forward(batch(), of)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


def test_checkpoint_without_space_fails_and_keeps_previous(model: Path, tmp_path: Path) -> None:
    engine, checkpoints = _engine(model), Checkpoints(tmp_path)
    with checkpoints.writing(1, ALONE) as (folder, _):
        engine.save_checkpoint(folder / "actor")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(ArealError, match="checkpoint of step 2 cannot be written"):
            with checkpoints.writing(2, ALONE) as (folder, _):
                engine.save_checkpoint(folder / "actor")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_single_rank_checkpoint_restores_rng(model: Path, tmp_path: Path) -> None:
    engine = _engine(model)
    engine.train_batch(batch(), sft, tokens)
    engine.version = 7
    engine.save_checkpoint(tmp_path / "shards")
    drawn = torch.rand(3)
    other = _engine(model)
    other.load_checkpoint(tmp_path / "shards")
    assert (other.steps, other.version) == (1, 7)
    assert torch.equal(torch.rand(3), drawn)


def test_lora_trains_adapters_and_publishes_merged_weights(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    engine = _engine(model, use_lora=True, lora_rank=4, lora_alpha=8)
    before = _weights(engine)
    engine.train_batch(batch(), sft, tokens)
    loss = engine.eval_batch(batch(), sft, tokens)
    changed = {name for name, tensor in _weights(engine).items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all("_proj" in name for name in changed)
    engine.save_model(tmp_path)
    assert _engine(tmp_path).eval_batch(batch(), sft, tokens) == pytest.approx(loss, rel=1e-4)


def test_lora_reward_model_is_saved_with_trained_head(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    engine = _engine(model, use_lora=True, is_critic=True)
    engine.save_model(tmp_path)
    with torch.no_grad():
        wanted = engine.forward(batch(), lambda outputs, micro: outputs.values)
        again = _engine(tmp_path, is_critic=True).forward(batch(), lambda outputs, micro: outputs.values)
    torch.testing.assert_close(again, wanted, rtol=1e-4, atol=1e-5)
    assert not [name for name in _weights(engine) if "modules_to_save" in name or "original_module" in name]


@pytest.mark.parametrize(("module", "tied"), [("embed_tokens", False), ("embed_tokens", True), ("lm_head", True)])
def test_unsaveable_adapters_are_refused(model: Path, tmp_path: Path, module: str, tied: bool) -> None:
    pytest.importorskip("peft")
    folder = save_model(tmp_path / "tied", tied=True) if tied else model
    with pytest.raises(UsageFault, match=r"adapters of .* are not supported"):
        _engine(folder, use_lora=True, target_modules=["q_proj", module])


def test_critic_head_adds_no_unconfigured_dropout(model: Path, tmp_path: Path) -> None:
    engine = _engine(model, is_critic=True, disable_dropout=False)
    assert [each.p for each in engine.model.modules() if isinstance(each, torch.nn.Dropout) if each.p] == []
    about = json.loads((model / "config.json").read_text())
    folder = save_model(tmp_path / "dropout")
    (folder / "config.json").write_text(json.dumps({**about, "classifier_dropout": 0.25}))
    engine = _engine(folder, is_critic=True, disable_dropout=False)
    assert [each.p for each in engine.model.modules() if isinstance(each, torch.nn.Dropout) if each.p] == [0.25]


def test_saved_config_matches_weight_dtype(model: Path, tmp_path: Path) -> None:
    from safetensors import safe_open

    engine = _engine(model, dtype="bfloat16")
    engine.save_model(tmp_path / "saved")
    about = json.loads((tmp_path / "saved" / "config.json").read_text())
    with safe_open(tmp_path / "saved" / "model.safetensors", "pt") as file:
        (stored,) = {str(file.get_tensor(name).dtype) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert (f"torch.{about['dtype']}", about["use_cache"]) == (stored, True) == ("torch.bfloat16", True)


def test_models_from_scratch_with_same_seed_are_equal(model: Path) -> None:
    one, other = (_weights(_engine(model, init_from_scratch=True)) for _ in range(2))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_adapters_are_on_target_modules(model: Path) -> None:
    pytest.importorskip("peft")
    engine = _engine(model, use_lora=True, target_modules=["q_proj"])
    trained = [name for name, parameter in engine.model.named_parameters() if parameter.requires_grad]
    assert trained and all(".q_proj.lora_" in name for name in trained)


def test_target_modules_may_be_all_and_unknown_ones_are_refused(model: Path) -> None:
    pytest.importorskip("peft")
    every, default = (_engine(model, use_lora=True, target_modules=given) for given in (["all-linear"], []))
    assert list(_weights(every)) == list(_weights(default))
    with pytest.raises(UsageFault, match=r"target_modules \['query'\] do not fit LlamaForCausalLM"):
        _engine(model, use_lora=True, target_modules=["query"])


def test_path_selects_trained_weights(model: Path, tmp_path: Path) -> None:
    ours, theirs = _weights(_engine(model)), _weights(_engine(save_model(tmp_path, seed=1)))
    assert not torch.equal(ours["lm_head.weight"], theirs["lm_head.weight"])


def test_dtype_is_for_compute_and_optimizer_dtype_for_storage(model: Path) -> None:
    for compute, kept in (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")):
        engine = _engine(model, dtype=compute, optimizer_dtype=kept)
        engine.train_batch(batch(), sft, tokens)
        assert engine.optimizer is not None
        states = [each["exp_avg"].dtype for each in engine.optimizer.state.values()]
        weights = [parameter.dtype for parameter in engine.model.parameters()]
        assert {*states, *weights} == {getattr(torch, kept)}
        assert engine._run(batch(), None).dtype == getattr(torch, compute)


def test_attn_impl_reaches_model(model: Path) -> None:
    plain, eager = _engine(model), _engine(model, attn_impl="eager")
    found = [engine.model.config._attn_implementation for engine in (plain, eager)]
    assert found == [PACKED, "eager"]
    torch.testing.assert_close(eager._run(batch(), None), plain._run(batch(), None), rtol=1e-4, atol=1e-5)


def test_tied_weights_are_published_once(tmp_path: Path) -> None:
    engine = _engine(save_model(tmp_path, tied=True))
    names = list(_weights(engine))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def with_dropout(folder: Path, kind: str) -> Path:
    """A model with dropout everywhere that its kind has it."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    made: Any = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=48, attention_dropout=0.5)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)),
        "opt": lambda: OPTForCausalLM(
            OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=32, dropout=0.5, attention_dropout=0.5, layerdrop=0.5)
        ),
    }[kind]()
    made.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_disable_dropout_keeps_gradient_checkpointing(tmp_path: Path, kind: str, checkpointing: bool) -> None:
    engine = _engine(with_dropout(tmp_path, kind), disable_dropout=True, gradient_checkpointing=checkpointing)
    before = engine.forward(batch(), lambda outputs, micro: outputs.logprobs)
    (layer, *_) = decoder_layers(engine.model)
    ran = []
    layer.register_forward_hook(lambda *_: ran.append("forward"))
    inside = next(module for module in layer.modules() if isinstance(module, torch.nn.LayerNorm | LlamaRMSNorm))
    inside.register_forward_hook(lambda *_: ran.append("inside"))

    def loss(outputs: TokenOutputs, micro: Batch) -> torch.Tensor:
        wanted = before[: len(micro["input_ids"]), : micro["input_ids"].shape[1]]
        got = outputs.logprobs
        torch.testing.assert_close(got * micro["loss_mask"], wanted * micro["loss_mask"], rtol=1e-4, atol=1e-5)
        return sft(outputs, micro)

    engine.train_batch(batch(), loss, tokens)
    assert ran.count("inside") == (2 if checkpointing else 1)  # computed again in the backward pass


def test_dropout_is_active_unless_disabled(tmp_path: Path) -> None:
    engine, seen = _engine(with_dropout(tmp_path, "llama")), list[float]()

    def loss(outputs: TokenOutputs, micro: Batch) -> torch.Tensor:
        found = sft(outputs, micro)
        seen.append(found.item())
        return found * 0.0

    engine.eval_batch(batch(), sft, tokens)  # evaluates, and goes back to training
    for _ in range(2):
        engine.train_batch(batch(), loss, tokens)
    assert len(set(seen)) == 2


def test_missing_model_folder_is_named() -> None:
    with pytest.raises(NotFound, match="no model folder /nowhere"):
        _engine(Path("/nowhere"))


def test_experts_are_published_in_hugging_face_layout(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes, **heads, **experts)).save_pretrained(
        tmp_path / "model"
    )
    written = load_file(tmp_path / "model" / "model.safetensors")
    engine = FSDPEngine(config(tmp_path / "model"), one_process("cpu"))

    published = {name: tensor.clone() for name, tensor in engine.named_tensors()}
    engine.save_model(tmp_path / "saved")

    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in written
    for found in (published, load_file(tmp_path / "saved" / "model.safetensors")):
        assert found.keys() == written.keys()
        assert all(torch.equal(tensor, written[name]) for name, tensor in found.items())
