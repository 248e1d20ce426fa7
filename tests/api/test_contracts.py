"""Values and names that drivers rely on."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from areal.api.alloc_mode import AllocationMode, BackendError, ModelAllocation, ParallelStrategy, train_backend
from areal.api.io_struct import FinetuneSpec, ModelResponse, StepInfo, WeightUpdateMeta
from areal.errors import UsageFault
from areal.loading import Registry, load_attr


def test_steps_count_through_epochs() -> None:
    spec = FinetuneSpec(total_train_epochs=2, dataset_size=10, train_batch_size=4)
    step, seen = StepInfo(0, 0, 0, spec.steps_per_epoch), []
    for _ in range(spec.total_train_steps):
        seen.append((step.epoch, step.epoch_step, step.global_step))
        step = step.next()
    assert seen == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]


def test_response_with_unequal_lists_is_refused() -> None:
    with pytest.raises(ValueError, match="equal lengths"):
        ModelResponse([1], [2, 3], [0.0], [0], "stop")


def test_each_version_has_a_folder_of_its_own() -> None:
    meta = WeightUpdateMeta.from_disk("/w").with_version(3)
    assert (meta.path, meta.version) == ("/w/weight_update_v3", 3)


def test_old_and_new_allocation_modes_are_read() -> None:
    mode = AllocationMode.from_str("sglang.d16p1m1+d32p2m1")
    assert mode.gen is not None and mode.gen.world_size == 16
    assert mode.train_backend == "megatron"
    assert train_backend("", "vllm:d2+fsdp:d4").data == 4
    assert train_backend("").world_size == 1
    with pytest.raises(BackendError, match="no pipeline parallelism"):
        train_backend("fsdp:p2")


def test_single_engine_allocation_has_areal_names() -> None:
    parallel = ModelAllocation.from_str("sglang:d4t2", "rollout").parallel
    assert (parallel.data_parallel_size, parallel.tensor_parallel_size, parallel.world_size) == (4, 2, 8)
    assert (parallel.pipeline_parallel_size, parallel.cp_size, parallel.ep_size) == (1, 1, 1)
    assert ParallelStrategy() == ModelAllocation.from_str("sglang").parallel
    assert (ParallelStrategy().world_size, ParallelStrategy().ep_size) == (1, 1)
    with pytest.raises(BackendError, match="one engine only"):
        ModelAllocation.from_str("sglang:d4+fsdp:d8")


def test_registry_takes_names_and_import_paths() -> None:
    registry: Registry[object] = Registry("reward")
    registry.register("gsm8k")(as_one := object())
    assert registry.resolve("gsm8k") is as_one
    assert registry.resolve("areal.reward.gsm8k:gsm8k_reward_fn") is registry.resolve(
        "areal.reward.gsm8k.gsm8k_reward_fn"
    )
    with pytest.raises(ValueError, match="already"):
        registry.register("gsm8k")(object())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gsm9k", "there is no reward 'gsm9k' (did you mean \"gsm8k\"?)"),
        ("nowhere.to:be", "there is no module nowhere"),
        ("areal.reward.gsm8k:gsm8k_rewardfn", "did you mean"),
        ("broken_driver:main", "its import of not_installed_at_all failed"),
    ],
)
def test_unresolvable_name_error_names_missing_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    (tmp_path / "broken_driver.py").write_text("import not_installed_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[object] = Registry("reward")
    registry.register("gsm8k")(object())
    with pytest.raises(UsageFault) as caught:
        registry.resolve(path)
    assert message in str(caught.value)
    assert "broken_driver" not in sys.modules


@pytest.mark.parametrize(("package", "hint"), [("openai.types", "[agents]"), ("absent.part", "is absent installed,")])
def test_missing_package_of_user_code_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, hint: str
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    (tmp_path / "agent_without_its_package.py").write_text(f"import {package}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageFault) as caught:
        load_attr("agent_without_its_package:Agent", "agent")
    assert hint in str(caught.value.hint)


def test_nested_attribute_is_loaded() -> None:
    assert load_attr("areal.api.io_struct:StepInfo.next") is StepInfo.next


def test_hanging_import_is_an_error_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "reward_that_hangs.py"
    file.write_text("import threading\ntry:\n    threading.Event().wait()\nexcept Exception:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    handler, (left, _) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)

    with pytest.raises(UsageFault) as caught:
        load_attr("reward_that_hangs:score", "reward", within_s=0.1)

    place = f"{file}:3, in <module>"
    assert str(caught.value) == f"reward 'reward_that_hangs:score': its import did not end within 0.1 s ({place})"
    assert "reward_that_hangs" not in sys.modules
    assert signal.getsignal(signal.SIGALRM) is handler
    assert bool(left) == bool(signal.getitimer(signal.ITIMER_REAL)[0])
