"""``fsdp:d1t2`` and ``fsdp:d2t2`` against ``fsdp:d1`` on the same batch, in processes of torchrun; and refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal.client.command import free_port
from areal.errors import UsageFault
from areal.resources.backend import Part
from areal.training.batches import trim
from areal.training.engines.fsdp import FSDPEngine
from areal.training.engines.huggingface import apply_tensor_parallelism, copies_of_shards
from areal.training.ranks import Ranks, one_process
from tests.training.engines.models import STILL, batch, config, policy_batch, policy_gradient, save_model, sft, tokens


def run(model: Path, out: Path, layout: str, processes: int, agents: int = 1) -> dict[str, Any]:
    """What the ranks found; ``agents`` torchruns are as many nodes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--log-dir=/dev/null"]
    script = [str(Path(__file__).with_name("tensor_ranks.py")), str(model), str(out), layout]
    if agents == 1:
        words = [[*torchrun, "--standalone", *script]]
    else:
        port = free_port()
        words = [
            [*torchrun, f"--nnodes={agents}", f"--node-rank={n}", f"--master-port={port}", *script]
            for n in range(agents)
        ]
    started = [subprocess.Popen(each, env=environment, stderr=subprocess.PIPE, text=True) for each in words]
    ends = [(each.communicate(timeout=170)[1], each.returncode) for each in started]
    assert all(status == 0 for _, status in ends), "\n".join(output for output, _ in ends)
    found: dict[str, Any] = torch.load(out / "found.pt")
    return found


def compare(model: Path, found: dict[str, Any], out: Path, *, shared: bool) -> None:
    """``shared``: the ranks had all rows, not a part of them."""
    alone = FSDPEngine(config(model), one_process("cpu"), total_steps=4)
    still = FSDPEngine(config(model, optimizer=STILL), one_process("cpu"))
    gradients = policy_gradient(still, policy_batch(), "token-mean")
    assert found["gradients"].keys() == gradients.keys()
    for name, grad in gradients.items():
        torch.testing.assert_close(found["gradients"][name], grad, rtol=1e-5, atol=1e-5, msg=name)
    entropies = still.forward(batch(), lambda outputs, micro: outputs.entropies)
    torch.testing.assert_close(found["entropies"], entropies, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["next"], still.next_token_logprobs(torch.tensor([3, 1, 4])), rtol=1e-5, atol=1e-5)
    updates = [alone.train_batch(batch(), sft, tokens) for _ in range(2)]
    assert [each.loss for each in updates] == pytest.approx([loss for loss, _ in found["updates"]], rel=1e-5)
    assert [each.grad_norm for each in updates] == pytest.approx([norm for _, norm in found["updates"]], rel=1e-4)
    evaluated = alone.eval_batch(batch(seed=1), sft, tokens)
    assert (found["eval"], found["resumed"]) == pytest.approx((evaluated, evaluated), rel=1e-5)
    saved = FSDPEngine(config(out / "model"), one_process("cpu"))
    assert saved.eval_batch(batch(seed=1), sft, tokens) == pytest.approx(evaluated, rel=1e-5)
    resumed = FSDPEngine(config(model), one_process("cpu"), total_steps=4)
    resumed.load_checkpoint(out / "checkpoints" / "step_2" / "actor")
    after = [each.train_batch(batch(seed=2), sft, tokens).loss for each in (alone, resumed)] + [
        each.eval_batch(batch(seed=2), sft, tokens) for each in (alone, resumed)
    ]
    assert after[0] == pytest.approx(after[1], rel=1e-5) and after[2] == pytest.approx(after[3], rel=1e-4)
    if shared:
        critic = FSDPEngine(config(model, is_critic=True), one_process("cpu"))
        weights = {**critic.model.state_dict(), "score.weight": found["score"]}
        critic.model.load_state_dict(weights)
        rows = trim(batch())
        values, there = critic.forward(rows, lambda outputs, micro: outputs.values), rows["attention_mask"]
        torch.testing.assert_close(found["values"][there], values[there], rtol=1e-5, atol=1e-5)


@pytest.mark.extended
def test_two_tensor_parallel_ranks_match_one_on_qwen3(tmp_path: Path) -> None:
    model = save_model(tmp_path / "start", kind="qwen3")
    compare(model, run(model, tmp_path, "fsdp:d1t2", 2), tmp_path, shared=True)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", False), ("qwen2", True), ("llama", False)])
def test_two_by_two_ranks_match_one_rank(tmp_path: Path, kind: str, tied: bool) -> None:
    model = save_model(tmp_path / "start", kind=kind, tied=tied)
    compare(model, run(model, tmp_path, "fsdp:d2t2", 4), tmp_path, shared=False)


@pytest.mark.slow
def test_two_nodes_with_shard_copies_match_one_rank(tmp_path: Path) -> None:
    """Two agents of torchrun, as on two machines."""
    model = save_model(tmp_path / "start", kind="qwen3")
    compare(model, run(model, tmp_path, "fsdp:d4", 2, agents=2), tmp_path, shared=False)


def ranks_of(data: int, nodes: int, tensor: int = 1) -> Ranks:
    return Ranks(0, data * tensor, torch.device("cpu"), layout=Part("fsdp", data, tensor), nodes=nodes)


def test_shards_are_copied_to_each_node_if_memory_allows() -> None:
    assert copies_of_shards(ranks_of(4, 1), state=10, memory=1000) == 1
    assert copies_of_shards(ranks_of(16, 2), state=800, memory=300) == 2
    assert copies_of_shards(ranks_of(16, 2), state=801, memory=300) == 1, "a third of the memory of 8 ranks"
    assert copies_of_shards(ranks_of(8, 2, tensor=2), state=800, memory=300) == 2


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"model_type": "gpt2"}, "fsdp has no tensor parallelism for gpt2: only for llama, qwen2, qwen3"),
        (
            {"num_key_value_heads": 2},
            "the model's num_key_value_heads 2 cannot be divided over 4 tensor-parallel ranks",
        ),
    ],
)
def test_indivisible_model_is_refused(about: dict[str, Any], message: str) -> None:
    sizes = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48}
    with pytest.raises(UsageFault, match=message):
        model, mesh = SimpleNamespace(config=SimpleNamespace(**(sizes | about))), SimpleNamespace(size=lambda: 4)
        apply_tensor_parallelism(model, mesh)  # type: ignore[arg-type]
