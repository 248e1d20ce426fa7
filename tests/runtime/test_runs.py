from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import ArealError, UsageFault
from areal.runtime import procfs, records
from areal.runtime.backends.base import NODE_HOST, HttpProbe, Job, JobState, Phase, RestartPolicy, RunSpec
from areal.runtime.identity import Liveness, ProcessIdentity, identify, liveness, where
from areal.runtime.observation import observe_job
from areal.runtime.runs import RunStore, check_uid, is_placed, spec_from_record, spec_to_record

from .support import run_spec, unhurried

texts = st.text(max_size=8)
plain = st.dictionaries(texts, st.integers() | st.lists(texts) | st.none(), max_size=3)
specs = st.builds(
    RunSpec,
    uid=st.just("r1"),
    owner=texts,
    component=texts,
    replica=st.integers(0, 9),
    argv=st.lists(texts).map(tuple),
    env=st.dictionaries(texts, texts, max_size=3),
    cwd=st.none() | texts,
    scheduler=plain,
    ports=st.lists(st.integers(1, 65535)).map(tuple),
    shared_ports=st.lists(st.integers(1, 65535)).map(tuple),
    gpus=st.lists(texts).map(tuple),
    url=st.none() | texts,
    nodes=st.integers(1, 9),
    generation=st.integers(0),
    spec=plain,
    inputs=plain,
    config=plain,
    restart=st.builds(
        RestartPolicy, budget_count=st.integers(0), success_exit_codes=st.just((0, 2)), final_exit_codes=st.just((3,))
    ),
    liveness=st.none() | st.builds(HttpProbe, url=texts),
)


@unhurried
@given(specs)
def test_spec_round_trips_through_record(spec: RunSpec) -> None:
    assert spec_from_record(json.loads(json.dumps(spec_to_record(spec)))) == spec


def test_record_never_holds_secrets() -> None:
    assert "hush" not in json.dumps(spec_to_record(run_spec(secret_env={"KEY": "hush"})))


def test_record_of_another_version_is_read() -> None:
    record = spec_to_record(run_spec())
    del record["log_files"], record["liveness"]
    record["invented_later"] = 1

    assert spec_from_record(record) == run_spec()


@pytest.mark.parametrize("uid", ["", ".", "..", "../x", "a/b", ".hidden", "-x", "a\0b", "a b", "é", "x" * 200])
def test_uid_escaping_its_folder_is_refused(uid: str) -> None:
    with pytest.raises(UsageFault):
        check_uid(uid)


def test_create_makes_private_folder_atomically(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs")

    os.close(store.create(run_spec()))

    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["r1"]
    assert stat.S_IMODE((tmp_path / "runs" / "r1").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "runs" / "r1" / "intent.json").stat().st_mode) == 0o600


def test_failed_create_leaves_nothing_and_names_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")

    with pytest.raises(ArealError, match="runs"):
        RunStore(tmp_path / "runs").create(run_spec())

    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_life_lock_is_held_until_the_descriptor_is_closed(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs")
    life = store.create(run_spec())
    assert store.is_held("r1")

    os.close(life)

    assert not store.is_held("r1")


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '{"stage": 3}', '{"stage"', "\x00", '{"stage": "x", "done": "many"}']
)
def test_stage_accepts_any_content(tmp_path: Path, text: str) -> None:
    store = RunStore(tmp_path / "runs")
    os.close(store.create(run_spec()))
    (tmp_path / "runs" / "r1" / "stage.json").write_text(text)

    stage = store.stage("r1")

    assert stage is None or stage.done is None


def test_leftovers_are_old_hidden_folders_only(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs")
    os.close(store.create(run_spec()))
    old, fresh = tmp_path / "runs" / ".new-r2-1", tmp_path / "runs" / ".forgotten-r3-1"
    old.mkdir()
    fresh.mkdir()
    os.utime(old, (0, 0))

    assert store.leftovers() == [str(old)]
    assert store.uids() == ["r1"]
    os.close(RunStore(tmp_path / "runs").create(run_spec("r4")))
    assert fresh.exists() and not old.exists()


def test_creating_many_runs_lists_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, looks = RunStore(tmp_path / "runs"), list[str]()

    def leftovers() -> list[str]:
        looks.append("all")
        return []

    monkeypatch.setattr(store, "leftovers", leftovers)
    for number in range(5):
        os.close(store.create(run_spec(f"r{number}")))
    assert looks == ["all"]


@pytest.fixture
def me() -> ProcessIdentity:
    return identify(os.getpid())


def test_living_process_is_alive(me: ProcessIdentity) -> None:
    assert liveness(me) is Liveness.ALIVE


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("start_ticks", 1, Liveness.DEAD),  # the pid was given to another process
        ("boot_id", "another boot", Liveness.DEAD),
        ("machine_id", "another machine", Liveness.UNKNOWN),
        ("pid_namespace", "pid:[1]", Liveness.UNKNOWN),
    ],
)
def test_liveness_with_one_changed_field_is_unknown_unless_provable(
    me: ProcessIdentity, field: str, value: object, expected: Liveness
) -> None:
    assert liveness(dataclasses.replace(me, **{field: value})) is expected  # type: ignore[arg-type]


def test_liveness_on_other_machine_is_unknown_for_any_boot(me: ProcessIdentity) -> None:
    elsewhere = dataclasses.replace(me, machine_id="another machine", boot_id="another boot", pid=2**22)

    assert liveness(elsewhere) is Liveness.UNKNOWN
    assert "another machine" in where(elsewhere)


def test_liveness_of_a_zombie_is_dead() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    identity = identify(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead and not reaped

    assert procfs.read_stat(process.pid) is not None
    assert liveness(identity) is Liveness.DEAD
    process.wait()
    assert liveness(identity) is Liveness.DEAD


def test_liveness_with_zombie_as_first_thread_follows_the_other_threads() -> None:
    script = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()\n"
    script += "ctypes.CDLL(None).pthread_exit(None)"
    process = subprocess.Popen([sys.executable, "-c", script])
    identity = identify(process.pid)
    try:
        while (found := procfs.read_stat(process.pid)) is None or found.state != "Z":
            time.sleep(0.01)
        assert found.threads == 2 and liveness(identity) is Liveness.ALIVE
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert liveness(identity) is Liveness.DEAD
    finally:
        process.kill()
        process.wait()


def test_identify_without_a_process_raises() -> None:
    process = subprocess.Popen(["true"])
    process.wait()

    with pytest.raises(ProcessLookupError):
        identify(process.pid)


def test_identity_round_trips_through_record(me: ProcessIdentity) -> None:
    assert ProcessIdentity.from_record(dataclasses.asdict(me)) == me


@pytest.mark.parametrize("record", [{}, {"pid": "x"}, {"machine_id": "m", "boot_id": "b", "pid_namespace": "n"}])
def test_identity_from_a_damaged_record_raises(record: dict[str, object]) -> None:
    with pytest.raises((KeyError, ValueError, TypeError)):
        ProcessIdentity.from_record(record)


@pytest.mark.parametrize("name", ["a b", "a) R 1 1 1 (x", "(((", "VLLM::EngineCor"])
def test_stat_handles_unusual_process_names(name: str) -> None:
    source = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)\n"
        "print('named', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()

    stat = procfs.read_stat(process.pid)

    assert stat is not None
    assert (stat.comm, stat.ppid, stat.session) == (name[:15], os.getpid(), os.getsid(0))
    process.communicate()


# -- runs of another machine


def remote_spec() -> RunSpec:
    return run_spec(
        argv=("serve", "--host", NODE_HOST, "--at", f"http://{NODE_HOST}:7000"),
        config={"host": NODE_HOST, "urls": [f"http://{NODE_HOST}:1"]},
        url=f"http://{NODE_HOST}:7000",
        liveness=HttpProbe(f"http://{NODE_HOST}:7000/health"),
    )


def test_place_substitutes_node_address_each_time(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "runs")
    os.close(store.create(remote_spec()))
    assert not is_placed(remote_spec())

    store.place("r1", "10.0.0.1")
    spec = store.place("r1", "fd00::2")

    state = observe_job(store, "r1", Job(JobState.QUEUED, reason="Resources"))
    assert state is not None and state.spec == spec and is_placed(spec)
    assert spec.argv[2:] == ("fd00::2", "--at", "http://[fd00::2]:7000")
    assert (spec.url, spec.config["host"]) == ("http://[fd00::2]:7000", "fd00::2")
    assert spec.liveness is not None and spec.liveness.url == "http://[fd00::2]:7000/health"
    assert json.loads((tmp_path / "runs" / "r1" / "config.json").read_text())["urls"] == ["http://[fd00::2]:1"]


@pytest.mark.parametrize(
    "job, files, phase",
    [
        (None, {}, Phase.INTENDED),
        (Job(JobState.QUEUED, reason="Priority"), {}, Phase.QUEUED),
        (Job(JobState.UNKNOWN, reason="slurmctld is away"), {}, Phase.UNKNOWN),
        (Job(JobState.RUNNING), {}, Phase.STARTING),
        (Job(JobState.RUNNING), {"child": {"state": "running"}}, Phase.RUNNING),
        (Job(JobState.RUNNING), {"child": {"state": "backoff", "next_start_at": 0}}, Phase.BACKOFF),
        (Job(JobState.ENDED, ended_at=1.0), {"child": {"state": "running"}}, Phase.DEAD),
        (Job(JobState.UNKNOWN), {"child": {"state": "running"}}, Phase.UNKNOWN),
        (None, {"child": {"state": "running"}}, Phase.DEAD),
        (Job(JobState.RUNNING), {"exit": {"phase": "exited"}}, Phase.EXITED),
        (Job(JobState.QUEUED), {"exit": {"phase": "exited"}}, Phase.QUEUED),  # it is started anew
    ],
)
def test_observe_job_combines_scheduler_and_records(
    tmp_path: Path, job: Job | None, files: dict[str, dict[str, object]], phase: Phase
) -> None:
    store = RunStore(tmp_path / "runs")
    os.close(store.create(remote_spec()))
    if files:
        identity = dict.fromkeys(("machine_id", "boot_id", "pid_namespace"), "x")
        records.write_json(store.folder("r1"), records.ID, {**identity, "pid": 1, "start_ticks": 1, "session_id": 1})
    about = {"pid": 7, "start_ticks": 1, "started_at": 1.0, "restarts": 2, "last_exit": None, "reason": "stopped"}
    for name, content in files.items():
        records.write_json(store.folder("r1"), f"{name}.json", {**about, **content})

    state = observe_job(store, "r1", job)

    assert state is not None and state.phase is phase, state
    assert state.reason == (job.reason if job is not None and job.reason else state.reason)
    assert observe_job(store, "absent", job) is None
