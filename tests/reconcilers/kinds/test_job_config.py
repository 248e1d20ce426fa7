"""A job's driver, its number of processes, and the faults that are found before anything starts."""

from __future__ import annotations

import json
import re
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.api import cli_args
from areal.api.config import loading
from areal.cli.main import run
from areal.errors import ArealError, InvalidManifest, UsageFault
from areal.loading import load_attr
from areal.reconcilers.desired import Wanted
from areal.reconcilers.kinds.job_config import (
    BUILT_IN,
    JobConfig,
    choose_driver,
    config_tree,
    expand_job,
    read_config,
    require_runnable,
)
from areal.resources.job_spec import DRIVERS
from areal.resources.tree import merge_values
from tests.reconcilers.kinds.test_job_service import recorded, with_brought

# -- the driver and the configuration's file


@pytest.mark.parametrize(
    ("given", "config", "overrides", "chosen"),
    [
        ("a:b", {"driver": "c:d", "trainer": {"type": "grpo"}}, (), "a:b"),
        (None, {"driver": "c:d", "trainer": {"type": "grpo"}}, (), "c:d"),
        (None, {"driver": "c:d"}, ("x=1", "driver=e:f"), "e:f"),
        (None, {"trainer": {"type": "grpo"}}, (), BUILT_IN["grpo"]),
        (None, {"trainer": {"type": "grpo"}}, ("trainer.type=sft",), BUILT_IN["sft"]),
        (None, {}, ("+trainer.type=dpo",), BUILT_IN["dpo"]),
        (None, {"trainer": {"type": "null"}}, (), BUILT_IN["null"]),
        (None, {"trainer": {"type": None}}, (), BUILT_IN["null"]),
        (None, {"trainer": {"type": "grpo"}}, ("trainer.type=null",), BUILT_IN["null"]),
    ],
)
def test_driver_choice_follows_precedence(
    given: str | None, config: dict[str, Any], overrides: tuple[str, ...], chosen: str
) -> None:
    assert choose_driver(given, config_tree(config, overrides), "c.yaml") == chosen


def test_missing_or_unknown_driver_error_gives_advice() -> None:
    with pytest.raises(UsageFault, match="names no driver"):
        choose_driver(None, {}, "c.yaml")
    with pytest.raises(UsageFault, match=r"'grop' has no built-in driver.*grpo"):
        choose_driver(None, {"trainer": {"type": "grop"}}, "c.yaml")


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just words"])
def test_non_mapping_config_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InvalidManifest, match=r"c\.yaml:1:"):
        read_config(path)


def test_built_in_drivers_exist() -> None:
    for driver, config in DRIVERS.values():
        assert driver == load_attr(driver, "driver").__module__ + ":" + load_attr(driver, "driver").__name__
        assert issubclass(getattr(cli_args, config), cli_args.BaseExperimentConfig)


# -- one reader: what the command line takes from a configuration is what its driver gets

NAMED = {"experiment_name": "e", "trial_name": "t", "trainer": {"type": "grpo"}}
VALUES: dict[str, Any] = {
    "actor.backend": st.sampled_from(["fsdp:d1", "fsdp:d2", "megatron:d2"]),
    "actor.dtype": st.sampled_from(["bfloat16", "float32"]),
    "cluster.n_gpus_per_node": st.integers(1, 8),
    "rollout.backend": st.sampled_from(["sglang:d1", "vllm:d2"]),
}
SET = st.sampled_from(sorted(VALUES)).flatmap(lambda key: st.tuples(st.just(key), st.booleans(), VALUES[key]))


def tree_of(path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {first: tree_of(rest, value) if rest else value}


@settings(max_examples=10)  # a configuration is built in some 50 ms
@given(st.lists(SET, max_size=4), st.lists(SET, max_size=4))
def test_command_line_and_driver_read_same_config(
    written: list[tuple[str, bool, Any]], overridden: list[tuple[str, bool, Any]]
) -> None:
    config: dict[str, Any] = NAMED
    for key, nested, value in written:
        config = merge_values(config, tree_of(f"trainer.grpo.{key}" if nested else key, value))
    overrides = [f"{'+trainer.grpo.' if nested else ''}{key}={value}" for key, nested, value in overridden]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(config, file)
        file.flush()
        given = loading.examine(file.name, overrides, cli_args.GRPOConfig)
        wanted = job(file.name, overrides=overrides)
        read = JobConfig.of(wanted)
    assert given.faults == ()
    for key in {key for key, *_ in (*written, *overridden)}:
        assert read.get(key) == attrgetter(key)(given.config), key


def test_override_of_trainer_nested_key_takes_effect(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "experiment_name: e\ntrial_name: t\ntrainer: {type: grpo, grpo: {actor: {path: m, backend: 'fsdp:d2'}}}\n"
    )
    wanted = job(str(tmp_path / "c.yaml"), overrides=["actor.backend=fsdp:d4"])
    loaded = loading.load_config(str(tmp_path / "c.yaml"), ["actor.backend=fsdp:d4"], cli_args.GRPOConfig)
    assert (loaded.actor.backend, processes(wanted)) == ("fsdp:d4", 4)
    assert processes(job(str(tmp_path / "c.yaml"))) == 2


@pytest.mark.parametrize("absent", ["${layout}", "${..layout}", "${...base}"])
def test_layout_reference_to_missing_key_is_refused(absent: str) -> None:
    with pytest.raises(InvalidManifest, match=rf"actor\.backend '{re.escape(absent)}' refers to a key"):
        processes(job({"actor": {"backend": absent}, "base": "fsdp:d3"}))


def test_references_are_read_as_driver_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", "/models")
    (tmp_path / "c.yaml").write_text(
        "trainer: {type: grpo}\nseed: 7\nactor: {path: '${oc.env:FOLDER}/small', dtype: float32}\n"
        "tokenizer_path: ${actor.path}\nallocation_mode: vllm:d1\nbase: {random_seed: '${seed}'}\n"
        "vllm: {dtype: '${actor.dtype}', max_num_seqs: '${rollout.max_concurrent_rollouts}', seed: '${seed}'}\n"
        "sglang: '${base}'\nrollout: {max_concurrent_rollouts: 9, model: '${no.such}', backend: '${.layout}'}\n"
        "lost: '${mine:of a resolver that the driver registers}'\n"
    )
    for driver in ("areal.training.drivers:grpo", "mine:main"):
        read = JobConfig.of(job(str(tmp_path / "c.yaml"), driver=driver, overrides=["+rollout.layout=sglang:d2"]))
        assert read.text("tokenizer_path") == "/models/small"
        assert read.engine_arguments("vllm") == {"dtype": "float32", "max_num_seqs": 9, "seed": 7}
        assert read.engine_arguments("sglang") == {"random_seed": 7}
        assert read.text("rollout.model") == "" and str(read.inference()) == "sglang:d2"
    default = {"actor": {"backend": "fsdp:d${cluster.n_nodes}"}, "trainer": {"type": "grpo"}}
    assert processes(job(default)) == 32, "the default of the class"


# -- the number of processes


def job(config: dict[str, Any] | str, **spec: Any) -> Wanted:
    return Wanted("TrainJob/learn", "TrainJob", "learn", {"config": config, **spec}, {}, {})


def processes(wanted: Wanted) -> Any:
    return (expand_job(wanted, JobConfig.of(wanted)).spec.get("resources") or {}).get("processesPerNode")


@pytest.mark.parametrize(
    ("spec", "found"), [({}, {"type": "slurm"}), ({"scheduler": {"type": "ray"}}, {"type": "ray"})]
)
def test_job_scheduler_defaults_to_config(spec: dict[str, Any], found: dict[str, Any]) -> None:
    wanted = job({"scheduler": {"type": "slurm"}}, **spec)

    assert expand_job(wanted, JobConfig.of(wanted)).spec["scheduler"] == found


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({}, None),
        ({"actor": {"backend": "fsdp:d1"}}, None),
        ({"actor": {"backend": "fsdp:d4"}}, 4),
        ({"actor": {"backend": "fsdp:d2t2"}}, 4),
        ({"actor": {"backend": "${allocation}"}, "allocation": "fsdp:d2"}, 2),
        ({"actor": {"backend": "fsdp:${oc.select:layout,d3}"}}, 3),
        ({"actor": {"backend": "fsdp:${.layout}", "layout": "d2"}}, 2),
        ({"actor": {"backend": "fsdp:${..layout}"}, "layout": "d2"}, 2),
        ({"actor": {"backend": "${..own.layout}"}, "own": {"layout": "${..base}"}, "base": "fsdp:d3"}, 3),
        ({"allocation_mode": "${.layout}", "layout": "sglang:d4+fsdp:d8"}, 8),
        ({"model": {"backend": "fsdp:d8p1t1"}}, 8),
        ({"allocation_mode": "sglang.d4p1m1+d4p1m1"}, 4),
        ({"allocation_mode": "sglang:d4"}, None),
        ({"allocation_mode": "sglang:d4+fsdp:d8", "actor": {"backend": "fsdp:d2"}}, 2),
    ],
)
def test_process_count_follows_layout(config: dict[str, Any], count: int | None) -> None:
    assert processes(job(config)) == count


@given(st.integers(1, 16), st.integers(1, 16))
def test_conflicting_process_counts_are_refused(laid: int, stated: int) -> None:
    wanted = job({"actor": {"backend": f"fsdp:d{laid}"}}, resources={"processesPerNode": stated})
    if laid == stated:
        assert processes(wanted) == stated
    else:
        with pytest.raises(InvalidManifest, match=f"d{laid} is {laid} processes, and .* makes {stated}"):
            processes(wanted)


@pytest.mark.parametrize(
    ("config", "spec", "says"),
    [
        ({"actor": {"backend": "fsdp:p2"}}, {}, r"TrainJob/learn: actor\.backend 'fsdp:p2': .*no pipeline parallelism"),
        (
            {"actor": {"backend": "fsdp:d2c2"}},
            {},
            r"actor\.backend fsdp:d2c2: fsdp has data and tensor parallelism only",
        ),
        ({"allocation_mode": "sglang:d4+fsdp:q4"}, {}, r"allocation_mode .*unknown dimension \"q\""),
        (
            {"actor": {"backend": "megatron:(attn:t2)"}},
            {},
            r"actor\.backend .*a layout of its own for experts is",
        ),
        ({}, {"resources": {"nodes": 2}}, r"spec\.resources\.nodes is 2, and spec\.scheduler\.type local"),
        (
            {"actor": {"backend": "fsdp:d3"}},
            {"resources": {"nodes": 2}, "scheduler": {"type": "slurm"}},
            r"TrainJob/learn: actor\.backend fsdp:d3 cannot be spread over spec\.resources\.nodes 2: 3 processes are",
        ),
    ],
)
def test_impossible_layout_error_names_field(config: dict[str, Any], spec: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidManifest, match=says) as caught:
        processes(job(config, **spec))
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("config", "resources"),
    [
        ({"cluster": {"n_gpus_per_node": 8}}, {"nodes": 4, "processesPerNode": 8}),
        ({}, {"processesPerNode": 32}),
        ({"cluster": {"n_gpus_per_node": 64}}, {"nodes": 1, "processesPerNode": 32}),
    ],
)
def test_cluster_job_takes_node_count_from_config(config: dict[str, Any], resources: dict[str, int]) -> None:
    wanted = job({"actor": {"backend": "fsdp:d32"}, "scheduler": {"type": "slurm"}, **config})
    expanded = expand_job(wanted, JobConfig.of(wanted))
    assert expanded.spec["scheduler"] == {"type": "slurm"} and expanded.spec["resources"] == resources


def test_nodes_not_dividing_layout_are_refused() -> None:
    wanted = job({"actor": {"backend": "fsdp:d3"}}, resources={"nodes": 2}, scheduler={"type": "ray"})
    with pytest.raises(InvalidManifest, match=r"fsdp:d3 cannot be spread over spec\.resources\.nodes 2"):
        processes(wanted)


def test_reapplied_job_keeps_process_count_after_config_change() -> None:
    wanted = job({"actor": {"backend": "fsdp:d4"}})
    (first,) = with_brought([wanted], [], [])
    stored = recorded({first.ref: first})
    changed = job({"actor": {"backend": "fsdp:d2"}})
    (again,) = with_brought([changed], stored, [])
    assert again.spec["resources"] == {"processesPerNode": 4}
    (recreate,) = with_brought([changed], stored, [wanted.ref])
    assert recreate.spec["resources"] == {"processesPerNode": 2}


# -- jobs that cannot run


def check(folder: Path, config: dict[str, Any], **spec: Any) -> None:
    whole = {"config": config, "workingDir": str(folder), **spec}
    job = Wanted("TrainJob/j", "TrainJob", "j", whole, {}, {})
    require_runnable(job, JobConfig.of(job))


@pytest.mark.parametrize(
    ("config", "spec", "code", "message"),
    [
        ({"scheduler": {"type": "nomad"}}, {}, 3, "scheduler.type nomad"),
        ({}, {"overrides": ["scheduler.type=slurm"], "scheduler": {"type": "local"}}, 3, "scheduler.type is slurm"),
        ({"actor": {"weight_update_mode": "shm"}}, {"scheduler": {"type": "slurm"}}, 3, "weight_update_mode shm"),
        ({}, {"overrides": ["weight_update_mode=shm"], "scheduler": {"type": "ray"}}, 3, "weight_update_mode shm"),
        ({"stats_logger": {"swanlab": {"mode": "online"}}}, {}, 2, "package swanlab"),
        ({}, {"overrides": ["stats_logger.trackio.mode=online"]}, 2, "package trackio"),
        ({}, {"driver": "nowhere:main"}, 2, "no module nowhere"),
        ({}, {"driver": "mine.deeper:main"}, 2, "no module mine.deeper"),
        ({}, {"driver": "nowhere.main"}, 2, "no module nowhere"),
        ({"driver": "nowhere:main"}, {}, 2, "no module nowhere"),
        ({}, {"driver": "nowhere.py"}, 2, "no file"),
        ({}, {"driver": "mine:main"}, 2, "no 'main' in"),
    ],
)
def test_unrunnable_job_is_refused_with_reason(
    tmp_path: Path, config: dict[str, Any], spec: dict[str, Any], code: int, message: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    with pytest.raises(ArealError, match=message) as caught:
        check(tmp_path, config, **spec)
    assert caught.value.exit_code == code
    check(tmp_path, config, **spec, suspend=True)


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        ({"scheduler": {"type": "local"}, "stats_logger": {"wandb": {"mode": "disabled"}}}, {}),
        ({"scheduler": {"type": None}, "stats_logger": {"tensorboard": {"path": None}}}, {}),
        ({}, {"driver": "areal.training.drivers:grpo"}),
        ({}, {"driver": "mine:main"}),
        ({}, {"driver": "mine.deep.main"}),
        ({}, {"driver": "mine/deep.py:main"}),
        ({}, {"driver": "elsewhere:main", "env": {"PYTHONPATH": "more"}}),
    ],
)
def test_runnable_job_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], spec: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    main = "def main(args): ...\nraise SystemExit('imported')\n"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text(main)
    (tmp_path / "mine" / "deep.py").write_text(main)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "elsewhere.py").write_text(main)
    check(tmp_path, config, **spec)


@pytest.mark.parametrize(
    ("config", "package", "message"),
    [
        ({}, "torch", "needs the package torch"),
        ({"actor": {"backend": "megatron:d1"}}, "megatron.core", "megatron:d1 needs the package megatron-core"),
        ({"workflow": "areal.workflow.vision_rlvr:VisionRLVRWorkflow"}, "PIL", "needs the package pillow"),
        ({"workflow": "areal.workflow.vision_rlvr.VisionRLVRWorkflow"}, "PIL", "needs the package pillow"),
    ],
)
def test_missing_package_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], package: str, message: str
) -> None:
    config = {"trainer": {"type": "grpo"}, **config}
    missing = lambda name, places: f"no module {name}" if name == package else tmp_path  # noqa: E731
    monkeypatch.setattr("areal.reconcilers.kinds.job_config.module_of", missing)
    with pytest.raises(UsageFault, match=message) as caught:
        check(tmp_path, config)
    assert "pip install" in str(caught.value.hint)


def test_unknown_train_option_fails_and_dashes_pass_driver_args(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("driver: nowhere:main\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AREAL_HOME", str(tmp_path / "home"))
        for verb in ("run", "start"):
            assert run(["train", verb, "--config", str(config), "--drvier", "x:y"]) == 2
            assert run(["train", verb, "--config", str(config), "--name", "n", "--", "--flag=1"]) == 2  # no such driver
    assert not (tmp_path / "home" / "objects").exists()
