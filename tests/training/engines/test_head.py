"""The head's statistics against torch's own, by values and gradients, whatever the parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api.cli_args import PPOActorConfig
from areal.api.engine_api import TokenOutputs
from areal.training.algorithms.actor import ActorLoss
from areal.training.algorithms.losses import token_outputs
from areal.training.batches import Batch
from areal.training.engines import head
from areal.training.engines.fsdp import FSDPEngine
from areal.training.engines.head import install_head, token_statistics
from areal.training.ranks import one_process
from tests.training.engines.models import STILL, VOCABULARY, config, policy_batch, save_model


@pytest.fixture(autouse=True)
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_LEAST", 1)


def by_torch(hidden: Tensor, weight: Tensor, ids: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
    logits = (hidden @ weight.T).float()
    every = torch.log_softmax(logits if temperatures is None else logits / temperatures[:, None], -1)
    return every.gather(1, ids[:, None])[:, 0], -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_token_statistics_match_torch(count: int, tempered: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    leaves = [(torch.randn(size, 8, generator=generator) / 2).requires_grad_() for size in (count, 19)]
    ids = torch.randint(0, 19, (count,), generator=generator)
    temperatures = torch.rand(count, generator=generator) + 0.5 if tempered else None
    weights = torch.randn(2, count, generator=generator)
    hidden, weight = leaves
    found = token_statistics(hidden, weight, ids, temperatures)
    wanted = by_torch(hidden, weight, ids, temperatures)
    for kinds in ((0,), (1,), (0, 1)):
        ours, theirs = (
            torch.autograd.grad(sum(each[k] @ weights[k] for k in kinds), leaves, retain_graph=True)  # type: ignore[arg-type]
            for each in (found, wanted)
        )
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_bfloat16_token_statistics_accumulate_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).bfloat16() for n in (400, 19))
    ids = torch.randint(0, 19, (400,), generator=generator)
    grads = []
    for each in (token_statistics, by_torch):
        leaf = weight.clone().requires_grad_()
        each(hidden, leaf, ids, None)[0].sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)


def unchunked(engine: FSDPEngine) -> FSDPEngine:
    """The same engine, which makes the logits of all tokens."""
    engine._head = None
    return engine


@pytest.mark.parametrize("changes", [{}, {"entropy_coeff": 0.1}, {"kl_loss_coef": 0.1}])
@pytest.mark.parametrize("tied", [False, True])
def test_update_gradient_matches_full_logits(tmp_path: Path, tied: bool, changes: dict[str, Any]) -> None:
    rows = policy_batch()
    rows["ref_logprobs"] = rows["logprobs"] + 0.1
    rows["token_temperatures"] = torch.full(rows["input_ids"].shape, 0.8)
    model, found = save_model(tmp_path, tied=tied), []
    for change in (lambda engine: engine, unchunked):
        engine = change(FSDPEngine(config(model, optimizer=STILL), one_process("cpu")))
        loss = ActorLoss(PPOActorConfig(**changes))
        update = engine.train_batch(rows, loss, loss.weight)
        grads = {name: each.grad for name, each in engine.model.named_parameters()}
        found.append((update.loss, loss.pop_sums()[1], grads))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-5)
    assert found[0][2].keys() == found[1][2].keys()
    for name, grad in found[0][2].items():
        torch.testing.assert_close(grad, found[1][2][name], rtol=1e-6, atol=1e-6)


def test_update_computes_only_logits_of_trained_tokens(tmp_path: Path) -> None:
    engine = FSDPEngine(config(save_model(tmp_path), optimizer=STILL), one_process("cpu"))
    assert engine._head is not None
    sizes: list[torch.Size] = []
    engine._head.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape))
    rows = policy_batch()
    loss = ActorLoss(PPOActorConfig())
    engine.train_batch(rows, loss, loss.weight)
    assert sizes == [torch.Size([int(rows["loss_mask"].sum()), 2])]


def test_model_transforming_logits_computes_all(tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    shape: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    about = Gemma2Config(vocab_size=VOCABULARY, num_key_value_heads=2, head_dim=16, **shape)
    model = Gemma2ForCausalLM(about)
    assert install_head(model) is None and type(model.lm_head) is torch.nn.Linear
    model.save_pretrained(tmp_path)
    engine, rows = FSDPEngine(config(tmp_path), one_process("cpu")), policy_batch()
    wanted = token_outputs(model(input_ids=rows["input_ids"]).logits, rows)

    def loss(outputs: TokenOutputs, micro: Batch) -> Tensor:
        return outputs.logprobs

    torch.testing.assert_close(engine.forward(rows, loss), wanted.logprobs.detach(), rtol=1e-4, atol=1e-4)
