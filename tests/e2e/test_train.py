"""Training jobs through the command line: a driver of the user's own, from its first line to its exit status."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Box
from tests.services.processes import wait_until

# Counts to ten and notes each number, going on from where the attempt before it came to.
DRIVER = """
import json, os, sys, time
from pathlib import Path

def main(args):
    given = dict(item.split("=") for item in args if "=" in item)
    folder = Path(os.environ["AREAL_RUN_FOLDER"])
    done = folder / "done.txt"
    first = int(done.read_text()) if done.exists() else 0
    print("attempt", os.environ["AREAL_ATTEMPT"], "from", first, "with", json.dumps(args), flush=True)
    with (folder / "metrics.jsonl").open("a") as metrics:
        for step in range(first + 1, 11):
            metrics.write(json.dumps({"step": step, "reward/mean": step / 10}) + "\\n")
            metrics.flush()
            done.write_text(str(step))
            if step == int(given.get("fail_at", 0)) and os.environ["AREAL_ATTEMPT"] == "1":
                raise RuntimeError("scripted failure")
            if step == int(given.get("hang_at", 0)):
                print("hanging", flush=True)
                time.sleep(1000)
    print("devices", repr(os.environ.get("CUDA_VISIBLE_DEVICES")))
    print("inference", os.environ.get("AREAL_INFERENCE_ADDR"), os.environ.get("AREAL_INFERENCE_MODEL"), flush=True)
    return int(given.get("status", 0))
"""


@pytest.fixture
def jobs(box: Box) -> Box:
    """A box with a driver and its configuration."""
    box.write(DRIVER, "counting.py")
    box.write("experiment_name: Count\ntrial_name: to-ten\ndriver: counting:main\n", "count.yaml")
    return box


def status(box: Box, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(box.areal("train", "status", name, "--json").out)
    return found


def wait_phase(box: Box, name: str, phase: str) -> dict[str, Any]:
    reached = wait_until(lambda: (now := status(box, name))["phase"] == phase and now, 60, f"{name} {phase}")
    assert isinstance(reached, dict)
    return reached


@pytest.mark.extended
def test_run_shows_driver_output_and_exits_with_its_status(jobs: Box) -> None:
    result = jobs.areal("train", "run", "--config", "count.yaml", "actor.lr=1e-3", "status=7")
    assert result.code == 7, result.text
    config = jobs.folder / "count.yaml"
    assert f'attempt 1 from 0 with ["--config", "{config}", "actor.lr=1e-3", "status=7"]' in result.out
    now = status(jobs, "count-to-ten")
    assert (now["phase"], now["exitCode"], now["step"], now["reward"], now["attempt"]) == ("Failed", 7, 10, 1.0, 1)
    hopeless = jobs.areal("wait", "trainjob/count-to-ten", "--for", "completed", "--timeout", "200s")
    assert hopeless.code == 8 and "exited 7" in hopeless.err
    assert "areal restart TrainJob/count-to-ten starts it again" in hopeless.err
    again = jobs.areal("train", "run", "--config", "count.yaml")
    assert again.code == 0 and "attempt 1 from 0" in again.out, "another run of the same name begins anew"
    assert len(list((jobs.home / "jobs").glob("count-to-ten.*"))) == 1, "what the first one made is set aside"
    same = jobs.areal("train", "run", "--config", "count.yaml")
    assert same.code == 0 and "started pid" in same.out and len(list((jobs.home / "jobs").glob("count-to-ten.*"))) == 2
    assert "another run, from the start" in same.err
    assert jobs.ok("train", "ps").out == ""
    assert "Succeeded" in jobs.ok("train", "ps", "--all").out


def test_job_name_follows_overrides(jobs: Box) -> None:
    words = ("train", "start", "--config", "count.yaml", "--dry-run", "-o", "name")
    assert jobs.ok(*words, "trial_name=To 20").out == "trainjob/count-to-20\n"
    assert jobs.ok(*words, "experiment_name=sum", "+trial_name=b").out == "trainjob/sum-b\n"
    assert jobs.ok(*words, "trial_name=b", "--name", "mine").out == "trainjob/mine\n"


def test_interrupted_run_stops_its_driver(jobs: Box) -> None:
    running = jobs.start("train", "run", "--config", "count.yaml", "hang_at=3")
    assert running.stdout is not None
    for line in running.stdout:
        if line == "hanging\n":
            break
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert not jobs.processes()
    assert status(jobs, "count-to-ten")["phase"] == "Stopped"
    jobs.ok("delete", "trainjob/count-to-ten", "--yes")
    (output,) = (jobs.home / "jobs" / "count-to-ten" / "logs").iterdir()
    assert "hanging\n" in output.read_text(), "a job that is deleted leaves its output"


@pytest.mark.extended
def test_unimportable_driver_is_a_clear_error(jobs: Box) -> None:
    result = jobs.areal("train", "run", "--config", "count.yaml", "--driver", "no.such.place:main")
    assert result.code == 2
    assert "driver 'no.such.place:main': there is no module no" in result.err
    started = jobs.areal(
        "train", "start", "--config", "count.yaml", "--name", "again", "--driver", "no.such.place:main"
    )
    assert started.code == 2 and not (jobs.home / "objects").exists(), "nothing is recorded, and nothing is started"
    jobs.write("import no.such.place\n\n\ndef main(args): ...\n", "broken.py")
    broken = jobs.areal("train", "run", "--config", "count.yaml", "--driver", "broken:main")
    assert broken.code == 2 and "its import of no failed" in broken.out
    nothing = jobs.areal("train", "run", "--config", jobs.write("a: 1\n", "plain.yaml"))
    assert nothing.code == 2 and "names no driver" in nothing.err
    assert not jobs.processes()


@pytest.mark.extended
def test_failed_driver_restarts_and_resumes(jobs: Box) -> None:
    manifest = jobs.write(
        "apiVersion: areal.dev/v1alpha1\nkind: TrainJob\nmetadata: {name: count}\nspec:\n"
        "  config: count.yaml\n  overrides: [fail_at=4]\n  resources: {gpus: 0}\n"
        "  restart: {policy: OnFailure, maxRestarts: 2, backoff: {initialSeconds: 0.1, jitter: 0}}\n",
        "job.yaml",
    )
    jobs.ok("apply", "-f", manifest)
    jobs.ok("train", "wait", "count", "--timeout", "200s")
    now = status(jobs, "count")
    assert (now["phase"], now["attempt"], now["step"]) == ("Succeeded", 2, 10)
    logs = jobs.ok("train", "logs", "count").out
    assert "attempt 2 from 4" in logs
    assert "devices ''" in logs, "a job of no GPUs sees none"
    first = jobs.ok("train", "logs", "count", "--attempt", "1").out
    documents = json.loads(jobs.ok("train", "logs", "count", "--attempt", "1", "-o", "json").out)["items"]
    assert [row["line"] for row in documents] == first.splitlines()
    assert "scripted failure" in first and "attempt 2" not in first
    assert json.loads(jobs.ok("train", "metrics", "count", "--json").out)["items"][0]["steps"] == list(range(1, 11))
    files = jobs.files()
    assert "unchanged" in jobs.ok("apply", "-f", manifest).out, "a finished job is not run again"
    assert jobs.files() == files
    text = Path(manifest).read_text()
    Path(manifest).write_text(text.replace("fail_at=4", "fail_at=0"))
    refused = jobs.areal("apply", "-f", manifest)
    assert refused.code == 5 and "spec.overrides" in refused.err and "--replace" in refused.err
    jobs.ok("apply", "-f", manifest, "--replace", "--yes")
    assert wait_phase(jobs, "count", "Succeeded")["attempt"] == 1


@pytest.mark.extended
def test_finished_job_is_deleted_after_its_ttl(jobs: Box) -> None:
    manifest = (
        "apiVersion: areal.dev/v1alpha1\nkind: TrainJob\nmetadata: {{name: brief}}\nspec:\n"
        "  config: count.yaml\n  ttlSecondsAfterFinished: {ttl}\n"
    )
    jobs.ok("apply", "-f", jobs.write(manifest.format(ttl=3600)))
    wait_phase(jobs, "brief", "Succeeded")
    assert "brief unchanged" in jobs.ok("reconcile").out
    jobs.ok("apply", "-f", jobs.write(manifest.format(ttl=0)))
    kept = manifest.format(ttl=0).replace("{name: brief}", "{name: kept, annotations: {areal.dev/protect: 'true'}}")
    jobs.ok("apply", "-f", jobs.write(kept, "kept.yaml"))
    wait_phase(jobs, "kept", "Succeeded")
    assert "ttlSecondsAfterFinished" in jobs.ok("reconcile").out, "a protected one beside it hinders nothing"
    assert jobs.ok("get", "trainjobs", "-a", "-o", "name").out == "trainjob/kept\n"


@pytest.mark.extended
def test_replacing_job_runs_in_folder_of_apply(jobs: Box) -> None:
    manifest = jobs.write(
        "apiVersion: areal.dev/v1alpha1\nkind: TrainJob\nmetadata: {name: moved}\nspec: {config: count.yaml}\n",
        "job.yaml",
    )
    jobs.ok("apply", "-f", manifest)
    wait_phase(jobs, "moved", "Succeeded")
    other = replace(jobs, folder=jobs.folder / "other")
    other.folder.mkdir()
    other.write(DRIVER.replace('print("inference"', 'print("of the other folder"'), "counting.py")
    other.write((jobs.folder / "count.yaml").read_text(), "count.yaml")
    other.write(Path(manifest).read_text(), "job.yaml")
    other.ok("apply", "-f", "job.yaml", "--replace", "--yes", "--set", "trainjob/moved:spec.env.A=b")
    wait_phase(other, "moved", "Succeeded")
    assert "of the other folder" in other.ok("train", "logs", "moved").out


@pytest.mark.extended
def test_job_applied_suspended_runs_in_folder_of_apply(jobs: Box) -> None:
    manifest = jobs.write(
        "apiVersion: areal.dev/v1alpha1\nkind: TrainJob\nmetadata: {name: later}\n"
        "spec: {config: count.yaml, suspend: true}\n"
    )
    jobs.ok("apply", "-f", manifest)
    other = replace(jobs, folder=jobs.folder / "other")
    other.folder.mkdir()
    other.ok("resume", "trainjob/later")
    wait_phase(jobs, "later", "Succeeded")  # it imports the driver, which is not in the other folder


@pytest.mark.extended
def test_job_can_stop_resume_and_heal_after_supervisor_death(jobs: Box) -> None:
    started = jobs.ok("train", "start", "--config", "count.yaml", "--restart", "on-failure", "hang_at=5")
    assert started.out == "count-to-ten\n"
    wait_until(lambda: status(jobs, "count-to-ten")["step"] == 5, 60, "it hangs")
    assert jobs.areal("train", "start", "--config", "count.yaml").code == 5
    stopped = jobs.ok("train", "stop", "count-to-ten", "--grace", "5s")
    assert stopped.out == "trainjob/count-to-ten stopped\n"
    assert stopped.err.endswith("areal resume trainjob/count-to-ten continues it from its newest checkpoint\n")
    unfinished = jobs.areal("train", "wait", "count-to-ten")
    assert unfinished.code == 8 and "was stopped" in unfinished.err
    assert not jobs.processes()
    jobs.ok("reconcile")
    assert not jobs.processes(), "what was stopped stays so"
    jobs.ok("resume", "trainjob/count-to-ten")
    # the hang is behind it: it goes on from 5
    assert wait_phase(jobs, "count-to-ten", "Succeeded")["attempt"] == 2

    jobs.ok("train", "start", "--config", "count.yaml", "--name", "lost", "--restart", "on-failure", "hang_at=5")
    wait_until(lambda: status(jobs, "lost")["step"] == 5, 60, "it hangs")
    pid = jobs.pids()["driver/0"]
    os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    assert "process-died" in wait_until(lambda: jobs.areal("diff", "--drift").out, what="drift")
    jobs.ok("reconcile")
    assert wait_phase(jobs, "lost", "Succeeded")["step"] == 10


@pytest.mark.extended
def test_job_starts_after_its_model_and_gets_address(jobs: Box) -> None:
    manifest = Path(jobs.manifest(model="servedModelName: Acme/Reverse-1.5"))
    manifest.write_text(
        manifest.read_text()
        + "---\napiVersion: areal.dev/v1alpha1\nkind: TrainJob\nmetadata: {name: sampling}\nspec:\n"
        "  driver: counting:main\n  config: {experiment_name: x}\n  rollout: {service: default, model: reverse}\n"
    )
    jobs.ok("apply", "-f", str(manifest))
    wait_phase(jobs, "sampling", "Succeeded")
    output = jobs.ok("train", "logs", "sampling").out
    assert f"inference {jobs.url} Acme/Reverse-1.5" in output
    jobs.chat("12", model="Acme/Reverse-1.5")
    jobs.ok("inf", "chat", "--model", "reverse", "-m", "12")
    assert "model/reverse unchanged" in jobs.ok("apply", "-f", str(manifest)).out
    assert json.loads(jobs.ok("get", "model/reverse", "-o", "json").out)["status"]["phase"] == "Ready"
    assert jobs.ok("delete", "model/reverse", "--yes").out == "model/reverse deleted\n", "a finished job needs no model"
    jobs.ok("delete", "-f", str(manifest), "--yes", "--ignore-not-found")
    assert not jobs.processes()
    assert (jobs.home / "jobs" / "sampling" / "metrics.jsonl").exists(), "what a job made outlives it"


@pytest.mark.slow
def test_failing_two_process_job_leaves_no_stray_logs(jobs: Box) -> None:
    jobs.write(
        "import os\n\n\ndef main(args):\n    if os.environ['AREAL_ATTEMPT'] == '1':\n"
        "        raise RuntimeError('scripted failure')\n    print('rank', os.environ['RANK'], flush=True)\n",
        "failing.py",
    )
    jobs.write(
        "apiVersion: areal.dev/v1alpha1\nkind: TrainJob\nmetadata: {name: two}\nspec:\n  driver: failing:main\n"
        "  resources: {processesPerNode: 2}\n"
        "  restart: {policy: OnFailure, maxRestarts: 1, backoff: {initialSeconds: 0.1, maxSeconds: 0.1, jitter: 0}}\n",
        "two.yaml",
    )
    jobs.ok("apply", "-f", "two.yaml")
    jobs.ok("wait", "trainjob/two", "--for", "completed", "--timeout", "200s")
    given = jobs.ok("logs", "trainjob/two").out
    assert "scripted failure" in given and "rank 0" in given and "rank 1" in given
    assert not list(Path(jobs.env["TMPDIR"]).iterdir())
