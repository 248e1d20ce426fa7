"""A matrix multiplies as its weight does, whatever its form; a sequence with a LoRA adapter is computed as by the model
that the adapter was merged into."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from areal.errors import ArealError
from areal.services.inference.engines.embedded import linear
from areal.services.inference.engines.embedded.linear import Matrix, deltas_of

from .support import FAMILIES, Harness, gap, make_adapter, make_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("shape", [(48, 32), (1024, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_project_in_any_layout_equals_product(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, int], rows: int, blocked: bool
) -> None:
    if not blocked:
        monkeypatch.setattr(linear, "onednn_supports", lambda dtype: False)
    held = Matrix(shape, dtype, CPU)
    for seed in (1, 2):
        torch.manual_seed(seed)
        weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
        inputs, residual = torch.randn(rows, shape[1]).to(dtype), torch.randn(rows, shape[0]).to(dtype)
        held.assign(weight)
        exact = inputs.double() @ weight.double().t()
        room: dict[str, Any] = {"rtol": 0.02, "atol": 1.0} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-3}
        torch.testing.assert_close(held.project(inputs).double(), exact, **room)
        torch.testing.assert_close(held.project(inputs, bias).double(), exact + bias.double(), **room)
        expected = exact + residual.double() + bias.double()
        torch.testing.assert_close(held.project_onto(residual.clone(), inputs, bias).double(), expected, **room)
        expected = exact + residual.double()
        torch.testing.assert_close(held.project_onto(residual, inputs).double(), expected, **room)


def test_assign_converts_dtype_and_stride() -> None:
    held = Matrix((64, 48), torch.float32, CPU)
    weight = torch.randn(48, 64).bfloat16()
    held.assign(weight.t())
    inputs = torch.randn(3, 48)
    torch.testing.assert_close(held.project(inputs), inputs @ weight.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not linear.keeps_order(torch.float32), reason="oneDNN wants float32 reordered on this machine")
def test_lent_weight_is_used_in_place_and_never_written() -> None:
    held, weight, other = Matrix((64, 48), torch.float32, CPU), torch.randn(64, 48), torch.randn(64, 48)
    held.adopt(held.forms(weight, borrowed=True))
    assert held.values().data_ptr() == weight.data_ptr()
    before, inputs = weight.clone(), torch.randn(300, 48)
    torch.testing.assert_close(held.project(inputs), inputs @ weight.t(), rtol=1e-4, atol=1e-4)
    held.assign(other)
    torch.testing.assert_close(held.project(inputs), inputs @ other.t(), rtol=1e-4, atol=1e-4)
    assert torch.equal(weight, before)


# -- LoRA adapters

Start = Callable[..., Harness]


@pytest.mark.parametrize("family", FAMILIES)
def test_adapter_matches_merged_model(tmp_path: Path, start: Start, family: str) -> None:
    base = make_model(tmp_path / "base", family)
    merged = make_adapter(tmp_path / "lora", base, use_rslora=family == "Qwen2")
    harness = start(tmp_path / "base")
    adapter = harness.engine.read_adapter("a", tmp_path / "lora")
    (sequence,) = harness.run(range(5, 45), max_new_tokens=12, adapter=adapter)
    assert gap(merged, sequence) < 1e-3 < gap(base, sequence)


def test_adapters_share_batch_but_not_prefixes(tmp_path: Path, start: Start) -> None:
    base = make_model(tmp_path / "base", "Qwen3")
    models = {name: make_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate("ab")}
    harness = start(tmp_path / "base")
    loaded = {name: harness.engine.read_adapter(name, tmp_path / name) for name in models}
    prompt = list(range(5, 45))  # long enough to be shared, were it the same model
    for _ in range(2):  # again, when prefixes are kept
        sequences = [
            harness.submit(prompt, max_new_tokens=16, seed=1, adapter=loaded.get(name)) for name in ("a", "", "b", "a")
        ]
        harness.wait(*sequences)
        for name, sequence in zip(("a", "", "b", "a"), sequences, strict=True):
            assert gap(models.get(name, base), sequence) < 1e-3
        assert sequences[0].output == sequences[3].output != sequences[1].output


def test_reloaded_adapter_does_not_share_old_prefix(tmp_path: Path, start: Start) -> None:
    base = make_model(tmp_path / "base")
    harness = start(tmp_path / "base")
    for seed in range(2):
        merged = make_adapter(tmp_path / "lora", base, seed=seed)
        adapter = harness.engine.read_adapter("a", tmp_path / "lora")
        (sequence,) = harness.run(range(5, 45), max_new_tokens=4, adapter=adapter)
        assert gap(merged, sequence) < 1e-3


def test_adapter_survives_weight_update(tmp_path: Path, start: Start) -> None:
    make_model(tmp_path / "old", seed=1)
    new = make_model(tmp_path / "new", seed=2)
    merged = make_adapter(tmp_path / "lora", new)
    harness = start(tmp_path / "old")
    adapter = harness.engine.read_adapter("a", tmp_path / "lora")
    harness.engine.load_weights(tmp_path / "new", 1)
    (sequence,) = harness.run([5, 6, 7], max_new_tokens=8, adapter=adapter)
    assert gap(merged, sequence) < 1e-3 and sequence.versions == [1] * 8


def _config(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("spoil", "reported"),
    [
        (lambda folder: _config(folder, use_dora=True), "use_dora"),
        (lambda folder: _config(folder, rank_pattern={"q_proj": 2}), "rank_pattern"),
        (lambda folder: _config(folder, peft_type="LOHA"), "LOHA"),
        (lambda folder: _config(folder, r=0), "ZeroDivision"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "not a LoRA adapter"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "no weights"),
        (lambda folder: _tensors(folder, lambda held: held.pop(Q + "B.weight")), "lora_B missing"),
        (lambda folder: _tensors(folder, lambda held: held.update({Q + "A.weight": torch.zeros(3, 5)})), "[3, 5]"),
        (lambda folder: _tensors(folder, lambda held: held.update({"x": torch.zeros(1)})), "no projection"),
        (lambda folder: _tensors(folder, lambda held: held[Q + "A.weight"].fill_(torch.nan)), "not finite"),
    ],
)
def test_unsupported_adapter_is_refused_by_name(
    tmp_path: Path, start: Start, llama: tuple[Path, Any], spoil: Callable[[Path], object], reported: str
) -> None:
    folder, model = llama
    make_adapter(tmp_path / "lora", model)
    spoil(tmp_path / "lora")
    harness = start(folder)
    with pytest.raises(ArealError) as caught:
        harness.engine.read_adapter("a", tmp_path / "lora")
    assert reported in str(caught.value)


def test_batch_without_adapters_has_no_deltas() -> None:
    assert deltas_of([None, None], 4, torch.device("cpu")) is None
    assert deltas_of((), 4, torch.device("cpu")) is None


@pytest.mark.parametrize("instructions", [pytest.param("avx2", marks=pytest.mark.extended), "default"])
def test_auto_dtype_is_float32_on_cpu_without_bfloat16(instructions: str, tmp_path: Path) -> None:
    code = f"""
import torch
from pathlib import Path
from areal.services.inference.engines.embedded.linear import onednn_supports
from areal.services.inference.engines.embedded.loading import _dtype
cpu, folder = torch.device("cpu"), Path({str(tmp_path)!r})
chosen = [_dtype(asked, "bfloat16", cpu, folder) for asked in ("auto", "bfloat16", "float32")]
print(onednn_supports(torch.bfloat16), *chosen)
"""
    isa = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"} if instructions == "avx2" else {}
    environment = {**os.environ, **isa}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    has_bfloat16, *dtypes = out.stdout.split()
    assert instructions == "default" or has_bfloat16 == "False"
    auto = "torch.bfloat16" if has_bfloat16 == "True" else "torch.float32"
    assert dtypes == [auto, "torch.bfloat16", "torch.float32"]
