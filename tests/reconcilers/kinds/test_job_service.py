"""What a job without ``rollout`` stands for, and when the service that it created runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal.errors import ArealError, Conflict, InvalidManifest, UsageFault
from areal.reconcilers.desired import Target, Wanted, check_removals, deletions, pruned, target_for, with_layer
from areal.reconcilers.home_view import manifest
from areal.reconcilers.kinds import controller_of
from areal.reconcilers.kinds.job_plan import following_jobs, with_services
from areal.reconcilers.observe import Observed, ObservedRun
from areal.runtime.backends.base import LastExit, Phase, RunSpec, RunState
from areal.state.records import JOB, StoredObject

CONFIG: dict[str, Any] = {
    "actor": {"path": "org/model", "dtype": "float32"},
    "tokenizer_path": "${actor.path}",
    "rollout": {"backend": "embedded:d2", "model": "mine"},
}


def job(config: Any = CONFIG, **spec: Any) -> Wanted:
    return Wanted("TrainJob/learn", "TrainJob", "learn", {"config": config, **spec}, {}, {})


def with_brought(
    wanted: Sequence[Wanted], stored: Sequence[StoredObject], recreate: Sequence[str] = ()
) -> list[Wanted]:
    """``wanted`` with the objects that its jobs bring. Raises the error of the first job that is refused."""
    refused: dict[str, ArealError] = {}
    found = with_services(wanted, stored, recreate, refused)
    for error in refused.values():
        raise error
    return found


def expanded(wanted: Wanted, stored: list[StoredObject] | None = None, *, recreate: bool = False) -> dict[str, Wanted]:
    return {item.ref: item for item in with_brought([wanted], stored or [], [wanted.ref] if recreate else [])}


def recorded(found: dict[str, Wanted]) -> list[StoredObject]:
    targets = [
        target_for(item, None, set_name=None, force_conflicts=False, replace_it=False) for item in found.values()
    ]
    return [replace(target.object, uid=target.ref) for target in targets]


def test_job_with_engine_layout_declares_service_and_model() -> None:
    found = expanded(job(env={"OMP_NUM_THREADS": "1"}))
    assert list(found) == ["InferenceService/learn", "Model/mine", "TrainJob/learn"]
    assert found["TrainJob/learn"].spec["rollout"] == {"service": "learn", "model": "mine"}
    assert found["InferenceService/learn"].owner == "TrainJob/learn"
    assert found["Model/mine"].owner == "InferenceService/learn"
    assert found["Model/mine"].spec == {
        "service": "learn",
        "backend": "embedded:d2",
        "path": "org/model",
        "tokenizerPath": "org/model",
        "engineArgs": {"dtype": "float32"},
        "env": {"OMP_NUM_THREADS": "1"},
    }


@pytest.mark.parametrize(
    ("overrides", "backend"),
    [
        (["rollout.backend=null", "allocation_mode=embedded:d1+fsdp:d1"], "embedded:d1"),
        (["rollout.backend=", "allocation_mode=sglang.d4p1m1+d4p1m1"], "sglang:d4"),
        (["+rollout.backend=vllm:d2t2", "+vllm.max_model_len=64", "+vllm.model=x"], "vllm:d2t2"),
    ],
)
def test_engine_layout_comes_from_backend_or_allocation(overrides: list[str], backend: str) -> None:
    model = expanded(job(overrides=overrides))["Model/mine"].spec
    assert model["backend"] == backend
    assert model.get("engineArgs", {}).get("max_model_len") == (64 if backend.startswith("vllm") else None)
    assert "model" not in model.get("engineArgs", {}), "what areal sets itself is not passed on"


@pytest.mark.parametrize(("backend", "is_refused"), [("vllm:d1", True), ("sglang:d2", True), ("embedded:d1", False)])
@pytest.mark.parametrize("separator", [":", "."])
def test_workflow_with_images_needs_the_embedded_engine(backend: str, is_refused: bool, separator: str) -> None:
    workflow = f"workflow=areal.workflow.vision_rlvr{separator}VisionRLVRWorkflow"
    model = Wanted(
        "Model/seen", "Model", "seen", {"service": "default", "backend": backend, "path": "org/model"}, {}, {}
    )
    own = job(overrides=[workflow, f"rollout.backend={backend}"])
    named = job(overrides=[workflow], rollout={"service": "default", "model": "seen"})
    for wanted in ([own], [model, named]):
        refusal = pytest.raises(InvalidManifest, match=f"has the backend {backend}") if is_refused else nullcontext()
        with refusal:
            with_brought(wanted, [])


@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (CONFIG, {"rollout": {"service": "default", "model": "qwen"}}),
        ({**CONFIG, "rollout": {"model": "mine"}}, {}),
        ({**CONFIG, "rollout": {**CONFIG["rollout"], "gateway_addr": "http://127.0.0.1:8080"}}, {}),
        ({**CONFIG, "trainer": {"type": "sft"}}, {}),
        ({"actor": CONFIG["actor"], "allocation_mode": "sglang:d4+fsdp:d4"}, {}),
        ({**CONFIG, "rollout": {}, "allocation_mode": "fsdp:d4"}, {}),
        ({**CONFIG, "rollout": {"backend": "external"}}, {}),
    ],
)
def test_job_with_named_or_without_service_declares_none(config: Any, spec: dict[str, Any]) -> None:
    found = expanded(job(config, **spec))
    assert list(found) == ["TrainJob/learn"]
    assert found["TrainJob/learn"].spec.get("rollout") == spec.get("rollout")


def test_job_with_bad_layout_or_without_model_is_an_error() -> None:
    with pytest.raises(InvalidManifest, match=r"TrainJob/learn: rollout\.backend 'embedded:t2'"):
        expanded(job(overrides=["rollout.backend=embedded:t2"]))
    with pytest.raises(UsageFault, match="its configuration names no model"):
        expanded(job({"rollout": {"backend": "embedded"}}))
    with pytest.raises(UsageFault, match="cannot name a Model"):
        expanded(job(overrides=["rollout.model=Not A Name"]))


def test_reapplied_job_is_unchanged_and_rerun_keeps_port(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("actor: {path: org/model}\nrollout: {backend: embedded:d1}\n")
    wanted = job(str(file))
    stored = recorded(expanded(wanted))
    port = stored[0].spec["gateway"]["port"]
    file.write_text("actor: {path: org/other}\nrollout: {backend: embedded:d1}\n")
    again = expanded(wanted, stored)
    assert again["Model/learn"].spec["path"] == "org/model", "a job does not change while it is the same job"
    for item in again.values():
        (found,) = [each for each in stored if str(each.ref) == item.ref]
        same = target_for(item, found, set_name=None, force_conflicts=False, replace_it=False)
        assert same.action == "unchanged"
    recreate = expanded(wanted, stored, recreate=True)
    assert recreate["Model/learn"].spec["path"] == "org/other"
    assert recreate["InferenceService/learn"].spec["gateway"]["port"] == port


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rollout", {"service": "default", "model": "qwen"}),
        ("scheduler", {"type": "slurm"}),
        ("resources", {"processesPerNode": 2}),
    ],
)
def test_field_removed_from_manifest_is_removed_from_job(field: str, value: dict[str, Any]) -> None:
    config = {"trainer": {"type": "sft"}}
    first = recorded(expanded(job(config, **{field: value})))
    (again,) = expanded(job(config), first).values()
    with pytest.raises(Conflict, match=f"immutable: spec.{field}"):
        target_for(again, first[0], set_name=None, force_conflicts=False, replace_it=False)
    (replaced,) = expanded(job(config), first, recreate=True).values()
    assert field not in replaced.spec


def test_manifest_with_derived_value_keeps_it_derived() -> None:
    config = {"trainer": {"type": "sft"}, "scheduler": {"type": "slurm"}}
    first = recorded(expanded(job(config)))
    assert first[0].spec["scheduler"]
    exported = recorded(expanded(job(config, scheduler=first[0].spec["scheduler"], ttlSecondsAfterFinished=60), first))
    (again,) = expanded(job(config), exported).values()
    target_for(again, exported[0], set_name=None, force_conflicts=False, replace_it=False)
    assert again.spec["scheduler"] == first[0].spec["scheduler"]


def test_rerun_drops_settings_of_earlier_service() -> None:
    service, model, learn = recorded(expanded(job()))
    slept = with_layer(service, "suspend", {"suspend": True}, "").object
    scaled = with_layer(model, "scale", {"replicas": 5}, "").object
    found = expanded(job(overrides=["rollout.backend=embedded:d1"]), [slept, scaled, learn], recreate=True)
    targets = [
        target_for(found[str(item.ref)], item, set_name=None, force_conflicts=False, replace_it=False)
        for item in (slept, scaled)
    ]
    assert [target.action for target in targets] == ["configure", "configure"]
    assert "suspend" not in targets[0].object.spec and "replicas" not in targets[1].object.spec
    again = expanded(job(), [slept, scaled, learn])
    kept = target_for(again["Model/mine"], scaled, set_name=None, force_conflicts=False, replace_it=False)
    assert kept.object.spec["replicas"] == 5, "of the same job nothing is forgotten"


def test_rerun_without_service_removes_earlier_one() -> None:
    stored = recorded(expanded(job()))
    (wanted,) = expanded(job({"trainer": {"type": "sft"}}), stored, recreate=True).values()
    targets = pruned(stored, [wanted], prune=False, set_name=None)
    assert {target.ref for target in targets} == {"InferenceService/learn", "Model/mine"}
    for protected in (False, True):
        earlier = replace(stored[2], protected=protected)
        begins = target_for(
            wanted, earlier, set_name=None, force_conflicts=False, replace_it=False, recreate=[earlier.uid]
        )
        assert begins.action == "replace"
        with pytest.raises(Conflict, match="protected") if protected else nullcontext():
            check_removals([*stored[:2], earlier], [*targets, begins])


def test_job_never_takes_foreign_service_or_model() -> None:
    stored = recorded(expanded(job()))[:2]
    named = replace(stored[1], name="learn", owner=None)
    for foreign in ([replace(stored[0], owner=None)], [replace(stored[1], owner=None), named]):
        with pytest.raises(Conflict, match="belongs to another owner"):
            expanded(job(), foreign)


@pytest.mark.parametrize("owner", [None, "InferenceService/other"])
def test_model_with_taken_name_is_named_after_job(owner: str | None) -> None:
    taken = replace(recorded(expanded(job()))[1], owner=owner)
    found = expanded(job(), [taken])
    assert list(found) == ["InferenceService/learn", "Model/learn", "TrainJob/learn"]
    assert found["TrainJob/learn"].spec["rollout"] == {"service": "learn", "model": "learn"}
    again = expanded(job(), [*recorded(found), taken], recreate=True)
    assert list(again) == list(found)


def test_jobs_of_one_config_have_separate_models() -> None:
    second = replace(job(), ref="TrainJob/other", name="other")
    found = {item.ref: item for item in with_brought([job(), second], [], [])}
    models = {ref: item.owner for ref, item in found.items() if item.kind == "Model"}
    assert models == {"Model/mine": "InferenceService/learn", "Model/other": "InferenceService/other"}


def test_service_outliving_job_has_no_owner_and_is_reused() -> None:
    stays = job(overrides=["+shutdown_server_on_exit=false"])
    found = expanded(stays)
    assert found["InferenceService/learn"].owner is None
    stored = recorded(found)
    assert [target.ref for target in deletions(stored, ["TrainJob/learn"], cascade=False)] == ["TrainJob/learn"]
    again = expanded(stays, stored[:2])
    assert again["InferenceService/learn"].spec == found["InferenceService/learn"].spec
    members = [replace(item, set_name="s") for item in stored]
    same = expanded(stays, members)
    assert pruned(members, list(same.values()), prune=True, set_name="s") == []
    for item in members:
        wanted = same[str(item.ref)]
        target = target_for(wanted, item, set_name="s", force_conflicts=False, replace_it=False)
        assert target.action == "unchanged"
    by_hand = replace(same["InferenceService/learn"], spec={"gateway": {"port": 1}})
    named = [item for item in with_brought([by_hand, stays], members, []) if item.ref == by_hand.ref]
    assert named == [by_hand], "one that the manifests declare is theirs"


def test_manifest_of_derived_object_stays_owned_by_job() -> None:
    service, model, learn = recorded(expanded(job()))
    stored = [with_layer(service, JOB, {"suspend": True}, "").object, model, learn]
    for item in stored:
        read = manifest(item)
        assert "suspend" not in read["spec"]
        wanted = Wanted(str(item.ref), item.kind, item.name, read["spec"], {}, {})
        found = with_brought([wanted], stored, [])
        assert pruned(stored, found, prune=False, set_name=None) == []
        for each in found:
            (earlier,) = [known for known in stored if str(known.ref) == each.ref]
            target = target_for(each, earlier, set_name=None, force_conflicts=False, replace_it=False)
            assert target.action == "unchanged"


# -- how long it runs


def ended(code: int | None, restarted_at: str = "") -> RunState:
    spec = RunSpec("r1", "TrainJob/learn", "driver", 0, ("x",), inputs={"attempt": 1, "restartedAt": restarted_at})
    if code is None:
        return RunState(spec, Phase.RUNNING, pid=1)
    return RunState(spec, Phase.EXITED, last_exit=LastExit(code, None, 0.0, f"exited {code}"), reason=f"exited {code}")


@pytest.mark.parametrize(("phase", "why"), [(Phase.EXITED, "exited 1"), (Phase.RUNNING, "the one before exited 1")])
def test_job_status_quotes_driver_error(phase: Phase, why: str) -> None:
    line = "error: reward 'r:reward' cannot be imported: /j/r.py:3: ImportError"
    run = replace(ended(1), phase=phase, last_exit=LastExit(1, None, 0.0, "exited 1", line))
    seen = Observed({"TrainJob/learn": (ObservedRun(run),)})
    message = controller_of("TrainJob").health("TrainJob/learn", {}, seen, None).message
    assert message == f"attempt 1: {why}: {line}"


def followed(
    stored: list[StoredObject], targets: list[Target], runs: list[RunState]
) -> tuple[str, dict[str, Any]] | None:
    found = {target.ref: target for target in following_jobs(targets, stored, runs)}
    service = found.get("InferenceService/learn")
    return (service.action, dict(service.object.spec)) if service is not None else None


def test_job_service_suspends_and_resumes_with_job() -> None:
    stored = recorded(expanded(job()))
    service, _, learn = stored
    asked = [Target(learn, "unchanged")]
    assert followed(stored, asked, [])[0] == "unchanged"  # type: ignore[index]
    assert followed(stored, asked, [ended(None)])[0] == "unchanged"  # type: ignore[index]
    for code in (0, 1):
        action, spec = followed(stored, asked, [ended(code)])  # type: ignore[misc]
        assert (action, spec["suspend"]) == ("configure", True)
    resting = with_layer(service, JOB, {"suspend": True}, "").object
    slept = [resting, *stored[1:]]
    assert followed(slept, asked, [ended(0)])[0] == "unchanged"  # type: ignore[index]
    restarted = Target(replace(learn, status={"restartedAt": "7"}), "configure")
    for target in (restarted, Target(learn, "replace")):
        action, spec = followed(slept, [target], [ended(0)])  # type: ignore[misc]
        assert action == "configure" and "suspend" not in spec
    suspended = replace(with_layer(learn, "suspend", {"suspend": True}, "").object, owner=None)
    assert followed(stored, [Target(suspended, "configure")], [ended(None)])[0] == "unchanged", "the driver ends first"  # type: ignore[index]
    assert followed(stored, [Target(suspended, "unchanged")], [ended(143)])[0] == "configure"  # type: ignore[index]


def test_unrelated_services_and_jobs_are_left_alone() -> None:
    stored = recorded(expanded(job()))
    assert following_jobs([], stored, [ended(0)]) == ()
    own = [replace(stored[0], owner=None), *stored[1:]]
    asked = (Target(own[2], "unchanged"),)
    assert following_jobs(asked, own, [ended(0)]) == asked


AGENTS = Wanted("AgentService/players", "AgentService", "players", {"inference": {"model": "guess"}}, {}, {})


def with_agents(agents: Wanted = AGENTS, **rollout: Any) -> dict[str, Any]:
    wanted = job({"actor": {"path": "org/model"}}, rollout={"agents": "players", **rollout})
    found = {item.ref: item for item in with_brought([agents, wanted], [], [])}
    spec: dict[str, Any] = found["TrainJob/learn"].spec["rollout"]
    return spec


def test_job_of_an_agent_service_samples_from_its_model() -> None:
    assert with_agents() == {"agents": "players", "service": "default", "model": "guess"}
    assert with_agents(model="guess")["model"] == "guess"


def test_job_of_agent_service_with_other_model_is_refused() -> None:
    with pytest.raises(InvalidManifest, match=r"spec.rollout.model is 'other', and that of AgentService/players"):
        with_agents(model="other")
    with pytest.raises(InvalidManifest, match=r"AgentService/players has no spec.inference"):
        with_agents(replace(AGENTS, spec={}))


# -- AReaL's scheduling_spec, on a cluster

ROW = {"task_type": "worker", "port_count": 2, "cmd": "python3 -m rpc_server", "cpu": 4, "mem": 32, "gpu": 1}


def scheduled(row: Any, *, by: str = "slurm", rollout: Any = None, **spec: Any) -> Wanted:
    config = {**CONFIG, "scheduler": {"type": by}}
    config["actor"] = {**config["actor"], "scheduling_spec": row}
    config["rollout"] = {
        **config["rollout"],
        "scheduling_spec": "${actor.scheduling_spec}" if rollout is None else rollout,
    }
    return job(config, **spec)


def test_scheduling_spec_sets_cluster_resources() -> None:
    row = {**ROW, "env_vars": {"A": 1}, "nodelist": "n[1-2]", "exclusive": True, "additional_bash_cmds": ["module x"]}
    container = {"image": "a.sif", "container_type": "apptainer", "mount": "/a:/a,/b:/b"}
    found = expanded(scheduled([{**row, **container}]))

    slurm = {
        "nodelist": "n[1-2]",
        "extraArgs": ["--exclusive"],
        "setupCommands": ["module x"],
        "containerImage": "a.sif",
        "containerType": "apptainer",
        "containerMounts": ["/a:/a", "/b:/b"],
    }
    learn = found["TrainJob/learn"].spec
    assert learn["resources"] == {"cpus": 4, "memory": "32Gi", "gpus": 1}
    assert learn["env"] == {"A": "1"}
    assert learn["scheduler"] == found["InferenceService/learn"].spec["scheduler"] == {"type": "slurm", "slurm": slurm}
    model = found["Model/mine"].spec
    assert model["resources"] == {"cpus": 4, "memory": "32Gi"}  # its GPUs are its layout's
    assert model["env"]["A"] == "1"


def test_manifest_overrides_scheduling_spec() -> None:
    wanted = scheduled(
        [ROW], scheduler={"type": "slurm", "slurm": {"nodelist": "n9"}}, resources={"cpus": 1}, env={"A": "0"}
    )
    first = expanded(wanted)
    assert first["TrainJob/learn"].spec["resources"] == {"cpus": 1, "memory": "32Gi", "gpus": 1}
    assert first["TrainJob/learn"].spec["scheduler"]["slurm"] == {"nodelist": "n9"}

    assert expanded(wanted, recorded(first))["TrainJob/learn"].spec == first["TrainJob/learn"].spec


def test_local_or_empty_scheduling_spec_sets_nothing() -> None:
    for wanted in (scheduled([ROW], by="local"), scheduled([], by="ray"), scheduled([{"gpu": None}], by="ray")):
        assert "resources" not in expanded(wanted)["TrainJob/learn"].spec
    assert expanded(scheduled([{"gpu": 0}], by="ray"))["TrainJob/learn"].spec["resources"] == {"gpus": 0}


@pytest.mark.parametrize(
    ("row", "by", "place"),
    [
        ({"srun_additional_args": "--mpi=pmi2"}, "slurm", r"actor\.scheduling_spec\.0\.srun_additional_args"),
        ({"container_type": "docker"}, "slurm", r"actor\.scheduling_spec\.0\.container_type"),
        ({"nodelist": "n1"}, "ray", r"actor\.scheduling_spec\.0\.nodelist"),
        ({"image": "a"}, "ray", r"actor\.scheduling_spec\.0\.image"),
        ({"ray_placement_strategy": "deferred"}, "ray", r"actor\.scheduling_spec\.0\.ray_placement_strategy"),
        ({"cpus": 3}, "ray", r"actor\.scheduling_spec\.0\.cpus is no field"),
    ],
)
def test_unsupported_scheduling_spec_is_refused_with_its_place(row: dict[str, Any], by: str, place: str) -> None:
    with pytest.raises(ArealError, match=f"TrainJob/learn: {place}"):
        expanded(scheduled([row], by=by, rollout=[]))
    with pytest.raises(ArealError, match=place.replace("actor", "rollout")):
        expanded(scheduled([], by=by, rollout=[row]))
    with pytest.raises(ArealError, match=r"actor\.scheduling_spec is not a list of one row"):
        expanded(scheduled([{}, {}], by=by, rollout=[]))


def test_ray_receives_strategy() -> None:
    found = expanded(scheduled([{"ray_placement_strategy": "PACK"}], by="ray"))
    assert found["TrainJob/learn"].spec["scheduler"] == {"type": "ray", "ray": {"placementStrategy": "PACK"}}
