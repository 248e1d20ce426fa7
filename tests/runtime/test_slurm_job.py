"""A run as Slurm's words and Slurm's words as values, without Slurm."""

from __future__ import annotations

import json
import shlex
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic.alias_generators import to_camel

from areal.resources.scheduling import Slurm
from areal.runtime.backends.base import Cause, JobState
from areal.runtime.backends.slurm_job import (
    SlurmJob,
    batch_script,
    error_words,
    gpus_of_gres,
    in_steps,
    last_words,
    newest,
    parse_sacct,
    parse_squeue,
    submit_options,
)

from .support import run_spec

HOME = "/shared/me/.areal"
RUN_DIR = f"{HOME}/clusters/slurm/runs/r1"
PYTHON = "/opt/venv/bin/python"
NODE_PROGRAM = f"{PYTHON} -P -m areal.runtime.backends.node"

# -- a run as Slurm's words


def slurm(**settings: Any) -> Slurm:
    return Slurm.model_validate({to_camel(name): value for name, value in settings.items()})


def script(nodes: int = 1, **options: Any) -> list[str]:
    return batch_script(run_spec(nodes=nodes), slurm(**options), RUN_DIR, HOME, PYTHON).splitlines()


def test_script_for_one_node_execs_node_program() -> None:
    assert script() == ["#!/bin/bash", f"exec {NODE_PROGRAM} {RUN_DIR}"]


def test_script_runs_set_up_commands_first_verbatim() -> None:
    assert script(setup_commands=["module load cuda", 'export A="b c"'])[1:3] == ["module load cuda", 'export A="b c"']


def test_script_for_several_nodes_runs_task_on_each() -> None:
    lines = script(nodes=4)

    assert lines[1] == f'AREAL_FIRST_NODE="$({NODE_PROGRAM} --address)" || exit'
    assert lines[3] == (
        f"exec srun --nodes=4 --ntasks=4 --ntasks-per-node=1 --kill-on-bad-exit=1 {NODE_PROGRAM} {RUN_DIR}"
    )


def test_script_for_pyxis_mounts_home_and_uses_image_python() -> None:
    last = script(container_image="nvcr.io#x/y:1", container_mounts=["/data:/data"])[-1]

    assert f"--container-image=nvcr.io#x/y:1' --container-mounts={HOME}:{HOME},/data:/data python3 -P -m" in last


def test_script_for_apptainer_binds_home() -> None:
    last = script(container_image="/images/areal.sif", container_type="apptainer")[-1]

    assert last.startswith("exec srun --nodes=1")
    assert f"apptainer exec --nv --bind {HOME}:{HOME} /images/areal.sif python3 -P -m" in last


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), st.sampled_from(["", "image"]))
def test_any_folder_is_shell_quoted(folder: str, image: str) -> None:
    lines = batch_script(run_spec(), slurm(container_image=image or None), folder, folder, PYTHON)

    assert shlex.split(lines.partition("\nexec ")[2])[-1] == folder


def test_script_is_valid_shell() -> None:
    text = "\n".join(script(nodes=2, setup_commands=["set -e"], container_image="a b"))

    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_options_follow_manifest_with_extra_args_last() -> None:
    options = slurm(
        partition="gpu",
        account="team",
        qos="high",
        nodelist="n[1-2]",
        exclude="n3",
        constraint="h100",
        time_limit_seconds=5400.5,
        extra_args=["--requeue", "--exclusive"],
    )
    spec = run_spec(gpus=("a", "b"), spec={"resources": {"cpus": 2.5, "memory": "64Gi"}})

    found = submit_options(spec, options, RUN_DIR, HOME)

    assert found[:3] == ["--parsable", "--job-name=r1", f"--comment=areal:{HOME}"]
    assert {"--nodes=1", "--cpus-per-task=3", "--mem=65536M", "--gres=gpu:2", "--time=90:01"} <= set(found)
    assert {"--partition=gpu", "--account=team", "--qos=high", "--nodelist=n[1-2]", "--exclude=n3"} <= set(found)
    assert found[-2:] == ["--requeue", "--exclusive"]
    assert found.index("--no-requeue") < found.index("--requeue")


@pytest.mark.parametrize("word", ["-Mother", "--clusters=other", "--cluster", "--array=1-2", "-Jname"])
def test_options_hiding_jobs_from_areal_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="areal's own"):
        slurm(extra_args=[word])


def test_resources_apply_to_computing_component() -> None:
    spec = run_spec(component="data-proxy", spec={"resources": {"cpus": 64, "memory": "1Ti"}})

    assert not [word for word in submit_options(spec, Slurm(), RUN_DIR, HOME) if "cpus" in word or "mem" in word]


def test_job_reserves_for_each_process() -> None:
    resources = {"cpus": 4, "memory": "1Gi", "processesPerNode": 8, "nodes": 2}

    found = submit_options(run_spec(component="driver", nodes=2, spec={"resources": resources}), Slurm(), RUN_DIR, HOME)

    assert {"--nodes=2", "--cpus-per-task=32", "--mem=8192M"} <= set(found)


def test_percent_in_folder_is_escaped() -> None:
    assert "--output=/a%%b/log/job.log" in submit_options(run_spec(), Slurm(), "/a%b", HOME)


def test_step_is_used_for_containers_and_several_nodes() -> None:
    assert not in_steps(run_spec(), Slurm())
    assert in_steps(run_spec(nodes=2), Slurm())
    assert in_steps(run_spec(), slurm(container_image="x"))


# -- Slurm's words as values


def entry(**changes: Any) -> dict[str, Any]:
    """As Slurm 22.05 writes it."""
    plain = {"job_id": 7, "name": "r1", "comment": f"areal:{HOME}", "job_state": "RUNNING", "batch_host": "n1"}
    return {**plain, "state_reason": "None", "submit_time": 100, "end_time": 0, "exit_code": 0, **changes}


def one(**changes: Any) -> SlurmJob:
    (job,) = parse_squeue(json.dumps({"errors": [], "jobs": [entry(**changes)]}))
    return job


def test_pending_job_has_slurm_reason() -> None:
    job = one(job_state="PENDING", state_reason="Resources", batch_host="").job()

    assert (job.state, job.reason, job.queued_at, job.cause) == (JobState.QUEUED, "Resources", 100, Cause.NONE)


def test_pending_job_with_restart_count_was_requeued() -> None:
    assert one(job_state="PENDING", state_reason="BeginTime", restart_cnt=1).job().cause is Cause.REQUEUED


def test_running_job_has_its_node_and_gpus() -> None:
    job = one(gres_detail=["gpu:a100:3(IDX:0-1,5)"]).job()

    assert (job.state, job.node, job.gpus) == (JobState.RUNNING, "n1", ("0", "1", "5"))


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("NODE_FAIL", Cause.NODE_LOST),
        ("PREEMPTED", Cause.PREEMPTED),
        ("TIMEOUT", Cause.TIME_LIMIT),
        ("CANCELLED", Cause.CANCELLED),
        ("COMPLETED", Cause.NONE),
        ("OUT_OF_MEMORY", Cause.NONE),
    ],
)
def test_ended_job_has_cause(state: str, cause: Cause) -> None:
    job = one(job_state=state, end_time=200).job()

    assert (job.state, job.cause, job.ended_at) == (JobState.ENDED, cause, 200)
    assert job.reason == f"Slurm job 7 is {state} on n1"


def test_failed_job_quotes_its_exit_and_last_words() -> None:
    assert one(job_state="FAILED", exit_code=2 << 8).job("no such image").reason == (
        "Slurm job 7 is FAILED on n1, exit 2: no such image"
    )


def test_completing_job_is_not_gone() -> None:
    job = one(job_state="COMPLETING")

    assert not job.is_over and job.job().state is JobState.RUNNING


def test_newer_slurm_versions_are_parsed() -> None:
    def number(value: int) -> dict[str, object]:
        return {"set": True, "infinite": False, "number": value}

    newer = one(
        job_id=7,
        job_state=["FAILED", "COMPLETING"],
        submit_time=number(100),
        end_time=number(200),
        restart_cnt=1,
        exit_code={"status": ["ERROR"], "return_code": number(3), "signal": {"id": {"set": False, "number": 0}}},
        gres_detail=["gpu:1(IDX:4)"],
    )

    assert newer == one(
        job_state="FAILED+COMPLETING",
        end_time=200,
        restart_cnt=1,
        exit_code=3 << 8,
        gres_detail=["gpu:1(IDX:4)"],
    )
    assert not newer.is_over


@pytest.mark.parametrize(
    ("exit_code", "code"),
    [
        (0, 0),
        (3 << 8, 3),
        (9, 128 + 9),  # a wait status: killed by SIGKILL
        (11 | 0x80, 128 + 11),  # with a core dump
        ({"return_code": 3, "signal": {"signal_id": 0}}, 3),
        ({"return_code": 0, "signal": {"signal_id": 15}}, 128 + 15),
        ({"return_code": {"set": True, "number": 1}, "signal": {"id": {"set": True, "number": 9}}}, 128 + 9),
        ({}, 0),
        (None, 0),
    ],
)
def test_exit_code_of_a_job_is_that_of_a_shell(exit_code: object, code: int) -> None:
    assert one(exit_code=exit_code).exit_code == code


def test_failed_squeue_with_status_0_is_an_error() -> None:
    failed = {"errors": [{"description": "Failed while looking for jobs", "error_number": -1}], "jobs": []}

    with pytest.raises(ValueError, match="Failed while looking"):
        parse_squeue(json.dumps(failed))


def test_jobs_of_other_homes_are_excluded_and_live_ones_first() -> None:
    jobs = [
        SlurmJob("9", "r1", "CANCELLED", f"areal:{HOME}"),
        SlurmJob("10", "r1", "FAILED", f"areal:{HOME}"),
        SlurmJob("8", "r1", "RUNNING", f"areal:{HOME}"),
        SlurmJob("11", "r1", "RUNNING", "areal:/other"),
        SlurmJob("12", "r2", "FAILED", f"areal:{HOME}"),
    ]

    assert {name: job.job_id for name, job in newest(jobs, HOME).items()} == {"r1": "8", "r2": "12"}


def test_sacct_steps_are_skipped() -> None:
    lines = [
        "12|CANCELLED by 0|2026-11-23T14:40:13|n1|0:15",
        "12.batch|CANCELLED|Unknown|n1|0:15",
        "13|NODE_FAIL|Unknown|(null)|1:0",
    ]

    jobs = parse_sacct("\n".join(lines))

    assert [(job.job_id, job.state, job.node, job.exit_code) for job in jobs] == [
        ("12", "CANCELLED", "n1", 143),
        ("13", "NODE_FAIL", "", 1),
    ]
    assert jobs[0].ended_at is not None and jobs[1].ended_at is None


@pytest.mark.parametrize(
    ("gres", "count"),
    [("gpu:8", 8), ("gpu:a100:4(S:0-1)", 4), ("gpu:a100:4(S:0,1),gpu:h100:2,shard:8", 6), ("(null)", 0), ("", 0)],
)
def test_gpus_of_a_node(gres: str, count: int) -> None:
    assert gpus_of_gres(gres) == count


def test_error_is_one_line_without_the_name_of_the_command() -> None:
    stderr = "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid\n\n"

    assert error_words(stderr) == "invalid partition specified: x; Batch job submission failed: Invalid"


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)
STATES = ["PENDING", "RUNNING", "COMPLETING", "CANCELLED", "TIMEOUT", "SUSPENDED", "REQUEUED", "NEW_WORD"]


@given(st.dictionaries(st.sampled_from(sorted(entry())), anything), st.lists(st.sampled_from(STATES), max_size=3))
def test_any_squeue_entry_is_readable(damage: dict[str, Any], states: list[str]) -> None:
    (job,) = parse_squeue(json.dumps({"jobs": [{**entry(job_state=states), **damage}]}))

    assert job.job().state in JobState
    assert job.is_over == (job.job().state is JobState.ENDED)


@given(st.text())
def test_any_sacct_text_is_readable(text: str) -> None:
    for job in parse_sacct(text):
        job.job()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["srun: unrecognized option '--container-image=a'", 'Try "srun --help" for more information', ""], 0),
        (
            [
                "slurmstepd: error: execve(): apptainer: No such file or directory",
                "srun: error: n1: task 0: Exited with 2",
            ],
            0,
        ),
        (["all is well", "the end", " "], 1),
    ],
)
def test_last_words_are_the_fault_line(lines: list[str], words: int) -> None:
    assert last_words(lines) == lines[words]
    assert last_words([]) == ""
