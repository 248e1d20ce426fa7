"""The Megatron engine on CPUs, with real ranks over gloo (``megatron_on_cpu``): any layout computes, trains, saves and
resumes what FSDP does on one rank with the same batch."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.api.cli_args import MegatronDDPConfig, MegatronEngineConfig
from areal.errors import UsageFault
from areal.resources.backend import Part
from areal.training.engines import open_engine
from areal.training.engines.fsdp import FSDPEngine
from areal.training.engines.megatron.names import architecture
from areal.training.ranks import one_process
from tests.training.engines.megatron_ranks import GRADIENT, file_name
from tests.training.engines.models import batch, config, save_family, sft, tokens

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason="megatron-core is not installed: pip install -e '.[megatron]'"
)
ALONE = one_process("cpu")
TIED = {"Qwen2"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: save_family(folder / name, name, tied=name in TIED) for name in ("Llama", "Qwen2", "Qwen3", "Qwen3Moe")
    }


def run_ranks(count: int, layouts: dict[str, Path], out: Path) -> dict[str, dict[str, Any]]:
    words = [f"{layout}={model}" for layout, model in layouts.items()]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    done = subprocess.run(
        [*launch, "-m", "tests.training.engines.megatron_ranks", str(out), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return {layout: torch.load(out / f"{file_name(layout)}.pt") for layout in layouts}


def fsdp(model: Path, **changes: Any) -> FSDPEngine:
    return FSDPEngine(config(model, **changes), ALONE, total_steps=4)


def named(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_tensors()}


def assert_same(found: dict[str, Any], model: Path, saved: Path) -> None:
    data, mask = batch(), batch()["attention_mask"]
    alone = fsdp(model, optimizer=GRADIENT)
    before = named(alone)
    assert set(found["weights"]) == set(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in found["weights"].items())

    logprobs = alone.forward(data, lambda outputs, micro: outputs.logprobs)
    for row, each in found["logprobs"].items():
        torch.testing.assert_close(
            each * mask[row, : len(each)], (logprobs[row] * mask[row])[: len(each)], rtol=0, atol=1e-5
        )
    torch.testing.assert_close(
        found["next"], alone.next_token_logprobs(torch.tensor([3, 1, 4, 1, 5])), rtol=0, atol=1e-5
    )
    assert found["eval"] == pytest.approx(alone.eval_batch(data, sft, tokens), abs=1e-5)

    update = alone.train_batch(data, sft, tokens)
    assert found["loss"] == pytest.approx(update.loss, abs=1e-5)
    assert found["norm"] == pytest.approx(update.grad_norm, rel=1e-5)
    for name, tensor in named(alone).items():
        torch.testing.assert_close(found["gradient"][name], before[name] - tensor, rtol=0, atol=1e-5, msg=name)

    adam = fsdp(model)
    losses = [adam.train_batch(data, sft, tokens).loss for _ in range(2)]
    assert found["losses"] == pytest.approx(losses, abs=1e-5)
    assert found["refused"] and found["resumed"] == (2, 7, True)
    assert (found["resumed third"], found["resumed fourth"]) == (found["third"], found["fourth"])

    opened = fsdp(saved)  # what Megatron has saved, in Hugging Face's format
    assert all(torch.equal(tensor, found["trained"][name]) for name, tensor in named(opened).items())


@pytest.mark.extended
def test_tensor_and_pipeline_parallel_ranks_match_one_rank(models: dict[str, Path], tmp_path: Path) -> None:
    layouts = {"megatron:t2": models["Qwen3"], "megatron:p2": models["Qwen2"]}
    for layout, found in run_ranks(2, layouts, tmp_path).items():
        assert_same(found, layouts[layout], tmp_path / f"model-{file_name(layout)}")


@pytest.mark.megatron
def test_other_two_rank_layouts_match_one_rank(models: dict[str, Path], tmp_path: Path) -> None:
    layouts = {
        "megatron:d2": models["Llama"],
        "megatron:c2": models["Llama"],
        "megatron:d2e2": models["Qwen3Moe"],
        "megatron:t2": models["Qwen3Moe"],
    }
    seen = run_ranks(2, layouts, tmp_path)
    for layout, found in seen.items():
        assert_same(found, layouts[layout], tmp_path / f"model-{file_name(layout)}")
    assert seen["megatron:c2"]["others' third"] == {
        "megatron:d2": pytest.approx((seen["megatron:d2"]["third"], seen["megatron:d2"]["fourth"]), abs=1e-5)
    }
    assert "an optimizer of their own" in seen["megatron:t2"]["others' third"]["megatron:d2e2"]


@pytest.mark.megatron
def test_four_rank_layouts_match_one_rank(models: dict[str, Path], tmp_path: Path) -> None:
    layouts = {
        "megatron:d2t2": models["Qwen3"],
        "megatron:t2p2": models["Qwen3"],
        "megatron:(attn:d2t2|ffn:d2t1e2)": models["Qwen3Moe"],
        "megatron:p2c2": models["Qwen3Moe"],
    }
    seen = run_ranks(4, layouts, tmp_path)
    for layout, found in seen.items():
        assert_same(found, layouts[layout], tmp_path / f"model-{file_name(layout)}")
    losses = seen["megatron:d2t2"]["third"], seen["megatron:d2t2"]["fourth"]
    assert seen["megatron:t2p2"]["others' third"] == {"megatron:d2t2": pytest.approx(losses, abs=1e-5)}
    message = seen["megatron:p2c2"]["others' third"]["megatron:(attn:d2t2|ffn:d2t1e2)"]
    assert "a checkpoint with e1 and one with more are not read by each other" in message


@pytest.mark.extended
def test_megatron_conforms() -> None:
    """The suite of every engine, in a process that computes ``megatron_on_cpu``."""
    folder = Path(__file__).parent
    plugin = ["-p", "tests.training.engines.megatron_on_cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *plugin, str(folder / "test_engine_conformance.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CONFORMING_TRAIN_ENGINES": "megatron"},
        cwd=folder.parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_deterministic_algorithms_set_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from areal.training.engines.megatron.engine import choose_algorithms

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    choose_algorithms(MegatronEngineConfig())
    assert not torch.are_deterministic_algorithms_enabled()
    try:
        choose_algorithms(MegatronEngineConfig(use_deterministic_algorithms=True))
        assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.extended
def test_megatron_settings_are_applied(models: dict[str, Path]) -> None:
    from transformers import AutoConfig

    from areal.training.engines.megatron.engine import ddp_config
    from areal.training.engines.megatron.model import transformer_config

    settings = MegatronEngineConfig(
        ddp=MegatronDDPConfig(overlap_grad_reduce=True),
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=2,
    )
    asked = config(models["Llama"], backend="megatron:d1", megatron=settings, gradient_checkpointing=True)
    model = architecture(AutoConfig.from_pretrained(models["Llama"]))
    built = transformer_config(model, Part("megatron"), asked)
    assert (built.recompute_granularity, built.recompute_method, built.recompute_num_layers) == ("full", "block", 2)
    assert transformer_config(model, Part("megatron"), config(models["Llama"])).recompute_granularity is None
    for each, wanted in ((asked, (True, True, True)), (config(models["Llama"]), (False, True, True))):
        how = ddp_config(each)
        assert (how.overlap_grad_reduce, how.use_distributed_optimizer, how.grad_reduce_in_fp32) == wanted
    with pytest.raises(ValueError, match="recompute_granularity needs gradient_checkpointing"):
        config(models["Llama"], backend="megatron:d1", megatron=settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_machine_without_a_gpu_is_refused(models: dict[str, Path]) -> None:
    with pytest.raises(UsageFault, match="megatron computes on GPUs, and torch finds none") as failure:
        open_engine(config(models["Llama"], backend="megatron:d1"), ALONE)
    assert failure.value.hint == "backend=fsdp:d1 runs on CPUs too"
