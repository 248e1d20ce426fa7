"""``areal train estimate``: from a configuration or manifests to a table, JSON and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Areal, areal, clean_environment  # noqa: F401 - fixtures
from tests.estimate.test_memory import QWEN, N
from tests.hub_standin import hub_standin

GSM8K = Path(__file__).resolve().parents[2] / "examples" / "gsm8k"
CONFIG = """\
experiment_name: gsm8k
trial_name: estimated
trainer: {type: grpo}
train_dataset: {path: openai/gsm8k, batch_size: 64}
gconfig: {n_samples: 8, max_new_tokens: 1024}
rollout: {backend: "sglang:d4", max_concurrent_rollouts: 64, max_head_offpolicyness: 2}
actor:
  path: model
  backend: fsdp:d4
  gradient_checkpointing: true
  ppo_n_minibatches: 1
  mb_spec: {max_tokens_per_mb: 16384}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "grpo.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_estimate_lists_each_part_as_estimated(areal: Areal, folder: Path) -> None:  # noqa: F811
    shown = areal("train", "estimate", "grpo.yaml", "actor.backend=fsdp:d2", "--gpu", "a100")
    assert shown.code == 0, shown.err
    assert "All figures are estimated" in shown.out and "A100 80 GB has 80GiB" in shown.out
    assert "fsdp:d2" in shown.out and "sglang:d4" in shown.out and "estimated: rollout" in shown.out
    [item] = areal("train", "estimate", "grpo.yaml", "-o", "json").items
    actor, rollout = item["models"]
    assert actor["weights"] == pytest.approx(4 * N / 4 / 2**30, abs=1e-3)
    assert rollout["weights"] == pytest.approx(2 * N / 2**30, abs=1e-3)
    assert item["estimated"] is True and item["problems"] == [] and item["samples"] == 512
    assert [each["devices"] for each in item["needed"]] == [4, 4]


def test_estimate_of_unfitting_job_exits_10(areal: Areal, folder: Path) -> None:  # noqa: F811
    shown = areal("train", "estimate", "grpo.yaml", "actor.backend=fsdp:d1", "--gpu", "l4")
    assert shown.code == 10
    assert "training needs" in shown.err and "L4 has 22.5GiB" in shown.err and "OPTIMIZER" in shown.out
    small = areal("train", "estimate", "grpo.yaml", "--memory-gib", "5")
    assert small.code == 10 and "left for its cache, and one sequence of 1280 tokens takes" in small.err


def test_engine_and_trainer_sharing_gpu_are_summed(areal: Areal, folder: Path) -> None:  # noqa: F811
    (folder / "profiles").mkdir()
    for file in ("ppo.yaml", "profiles/gpu.yaml"):
        (folder / file).write_text((GSM8K / file).read_text())
    words = ("train", "estimate", "-f", "ppo.yaml", "--values", "profiles/gpu.yaml", "--set", "values.model=model")
    [item] = areal(*words, "-o", "json").items
    assert [each["place"] for each in item["needed"]] == ["training and rollout"]
    assert [each["role"] for each in item["models"]] == ["actor", "critic", "rollout"]
    spelled = areal(*words, "--set", "values.engine.args.memFractionStatic=7")
    assert spelled.code == 2 and "mem-fraction-static: must be above 0 and at most 1, not 7" in spelled.err


def test_overly_nested_model_config_is_refused(areal: Areal, folder: Path) -> None:  # noqa: F811
    (folder / "model" / "config.json").write_text("[" * 200_000)
    refused = areal("train", "estimate", "grpo.yaml")
    assert refused.code == 2 and "is not valid JSON" in refused.err, refused.err


def test_estimate_of_agent_job_includes_sampling_model(areal: Areal, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.chdir(GSM8K.parent / "search")
    words = ("train", "estimate", "-f", "grpo.yaml", "--values", "profiles/cpu.yaml")
    refused = areal(*words)
    assert refused.code == 2 and "--answer-tokens" in refused.err
    [item] = areal(*words, "--answer-tokens", "40", "-o", "json").items
    assert [each["role"] for each in item["models"]] == ["actor", "rollout"]
    assert item["device"] == "the CPU" and item["step"] is None and item["tokensAtMost"] == 256 + 80


def test_estimate_downloads_only_config_from_hub(
    areal: Areal,  # noqa: F811
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hub_standin() as hub:
        files = {"config.json": json.dumps(QWEN).encode(), "model.safetensors": b"never read"}
        hub.repository("acme/small").push(files, "first")
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(folder / "hf"))
        shown = areal("train", "estimate", "grpo.yaml", "actor.path=acme/small")
    assert shown.code == 0, shown.err
    assert {path.name for path in (folder / "hf").rglob("snapshots/*/*")} == {"config.json"}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "no configuration and no manifest is given"),
        (("none.yaml",), 4, "there is no configuration none.yaml"),
        (("grpo.yaml", "--gpu", "h10"), 2, 'did you mean "h100"?'),
        (("grpo.yaml", "actor.path=nowhere/at/all"), 4, "config.json cannot be read"),
        (("grpo.yaml", "actor.path=''"), 2, "actor.path: no model path is set"),
        (("grpo.yaml", "trainer.type=null"), 2, "there is no trainer.type that trains"),
        (("grpo.yaml", "-f", "grpo.yaml"), 2, "CONFIG and -f cannot be used together"),
        (("grpo.yaml", "--memory-gib", "0"), 2, "0"),
        (("grpo.yaml", "--memory-gib", "inf"), 2, "not a finite number"),
        (("grpo.yaml", "--memory-gib", "nan"), 2, "not a finite number"),
        (("grpo.yaml", f"train_dataset.batch_size=1{'0' * 400}"), 2, "too large to estimate"),
        (("grpo.yaml", "sglang.mem_fraction_static=7"), 2, "mem-fraction-static: must be above 0 and at most 1, not 7"),
    ],
)
def test_estimate_of_unreadable_input_is_refused(
    areal: Areal,  # noqa: F811
    folder: Path,
    words: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    refused = areal("train", "estimate", *words)
    assert refused.code == code and message in refused.err, refused.err


@pytest.mark.parametrize(
    "refused",
    [
        {
            "actor.dtype=float17": "must be one of float32, bfloat16, float16",
            "actor.optimizer.type=lion": "must be one of adam, sgd",
            "gconfig.n_samples=x": "must be a whole number, not 'x'",
            "actor.lora_rnak=8": "lora_rank",
        },
        {
            "actor.mb_spec.max_tokens_per_mb=-1": "must be at least 1, not -1",
            "gconfig.n_samples=0": "must be at least 1, not 0",
            "train_dataset.batch_size=-4": "must be at least 1, not -4",
        },
    ],
)
def test_estimate_reports_all_invalid_values_together(
    areal: Areal,  # noqa: F811
    folder: Path,
    refused: dict[str, str],
) -> None:
    shown = areal("train", "estimate", "grpo.yaml", *refused)
    assert shown.code == 3 and not shown.out
    for override, message in refused.items():
        key = override.partition("=")[0]
        assert any(key in line and message in line for line in shown.err.splitlines()), (key, shown.err)


def test_job_without_its_model_manifest_is_refused(areal: Areal, folder: Path) -> None:  # noqa: F811
    job = "apiVersion: areal.dev/v1alpha1\nkind: TrainJob\nmetadata: {name: j}\n"
    (folder / "job.yaml").write_text(f"{job}spec: {{config: grpo.yaml, rollout: {{service: default, model: m}}}}\n")
    refused = areal("train", "estimate", "-f", "job.yaml")
    assert refused.code == 3 and "the Model that it samples from is not in these manifests" in refused.err


_EMBEDDED = """
{apiVersion: areal.dev/v1alpha1, kind: InferenceService, metadata: {name: default}, spec: {}}
---
apiVersion: areal.dev/v1alpha1
kind: Model
metadata: {name: small}
spec: {backend: "embedded:d1", path: model, engineArgs: %s}
---
apiVersion: areal.dev/v1alpha1
kind: TrainJob
metadata: {name: learn}
spec: {config: grpo.yaml, rollout: {model: small}, overrides: [actor.backend=fsdp:d1]}
"""


def test_embedded_engine_estimate_respects_its_limits(areal: Areal, folder: Path) -> None:  # noqa: F811
    (folder / "all.yaml").write_text(_EMBEDDED % '{"device": "cuda", "kvMemoryGib": 0.5, "maxModelLen": 1000}')
    [item] = areal("train", "estimate", "-f", "all.yaml", "--memory-gib", "400", "-o", "json").items
    token = 2 * 2 * 2 * 128 * 28  # keys and values of two heads in bfloat16, in 28 layers
    assert item["sequenceTokens"] == 1000 and item["models"][-1]["kvCache"] == 0.5
    assert item["cachedSequences"] == int(0.375 * 2**30) // (1000 * token), "a quarter is the prefix cache's"


@pytest.mark.parametrize(("flag", "value"), [("kv-memory-gib", -1), ("max-model-len", 0), ("kv-memory-gib", "much")])
def test_invalid_engine_limit_is_refused(areal: Areal, folder: Path, flag: str, value: object) -> None:  # noqa: F811
    (folder / "all.yaml").write_text(_EMBEDDED % json.dumps({flag: value}))
    refused = areal("train", "estimate", "-f", "all.yaml")
    assert refused.code in (2, 3) and flag in refused.err and str(value) in refused.err, refused.err
