"""The views of training over a recorded job folder: curves, steps, groups, samples, comparison, alerts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from areal.errors import NotFound, UsageFault
from areal.rollout.dump import write_step
from areal.state.home import Home
from areal.state.objects import ObjectStore
from areal.state.records import AWAITING, Layer, StoredObject
from areal.ui import jobs
from areal.ui.curves import drawn_range
from areal.ui.views import ViewContext, reader_of
from tests.trajectories.test_steps import HOSTILE, sample
from tests.ui.conftest import Page, eventually

Recorder = Callable[..., StoredObject]


def ask(home: Home, view: str, **query: str) -> dict[str, Any]:
    reader = reader_of(view)
    assert reader is not None
    return json.loads(json.dumps(reader.read(ViewContext(home, query))))


@pytest.fixture
def job(home: Home, record: Recorder) -> Home:
    """A job of 50 steps with samples of the steps 2 and 3, and a NaN."""
    record("TrainJob", "learn")
    folder = home.jobs / "learn"
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = [
        {
            "step": step,
            "attempt": 1,
            "time": 1000.0 + step,
            "reward/mean": step / 50,
            "time/step": 2.0,
            "time/rollout": 1.0,
        }
        for step in range(1, 51)
    ]
    lines[-1]["loss"] = "nan"
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 51, "torn')
    groups = [sample("g/1", number, 1.0, example={"q": HOSTILE}) for number in (0, 1)]
    groups += [sample("g-2", number, float(number)) for number in range(20)]
    write_step(folder / "trajectories", 2, groups)
    write_step(folder / "trajectories", 3, [sample("g-9", 0, None)])
    write_step(folder / "trajectories", 3, [sample("e-1", 0, 0.5)], is_eval=True)
    failure = {"at": 1001.5, "episode": "g-7", "prompt": 3, "blame": "user", "error": "ValueError: no"}
    (folder / "trajectories" / "failures.jsonl").write_text(json.dumps(failure) + "\n")
    (folder / "config.yaml").write_text("seed: 1\nactor: {optimizer: {lr: 0.1}}\nexperiment_name: a\n")
    return home


def test_job_view_has_curves_groups_waits_and_alerts(job: Home) -> None:
    found = ask(job, "job", name="learn")
    assert found["starts"] == list(range(1, 51)) and found["bucket"] == 1 and found["shareRead"] == 1.0
    assert found["series"]["reward/mean"]["mean"][-1] == 1.0 and found["series"]["reward/mean"]["low"] is None
    assert found["notFinite"] == {"loss": 50} and found["series"]["loss"]["mean"] == [None] * 50
    assert [each["title"] for each in found["waits"]] == ["rollouts"] and found["hasSamples"]
    assert [each["title"] for each in found["groups"]] == ["reward", "loss", "time (s)"]
    assert [each["rule"] for each in found["alerts"]] == ["not-finite"]
    part = ask(job, "job", name="learn", first="11", last="30", points="5", metrics="reward/mean")
    assert part["bucket"] == 8 and part["starts"] == [8, 16, 24] and list(part["series"]) == ["reward/mean"]
    assert part["series"]["reward/mean"]["high"][-1] == 0.6
    with pytest.raises(NotFound, match="TrainJob/other"):
        ask(job, "job", name="other")


def test_waiting_job_is_pending_with_state_of_awaited_job(job: Home) -> None:
    layers = (
        Layer("apply", {"driver": "a:b"}, None, "me", 1.0),
        Layer(AWAITING, {"suspend": True}, {"job": "TrainJob/learn"}, "", 1.0),
    )
    store = ObjectStore(job)
    store.put(store.add_revision(StoredObject("TrainJob", "after", "uid-after", layers=layers, created_at=1.0)))
    found = ask(job, "job", name="after")
    assert (found["phase"], found["message"]) == ("Pending", "waits for TrainJob/learn, which is Pending")


def test_job_view_names_newest_validation_with_samples(job: Home) -> None:
    assert ask(job, "job", name="learn")["validatedStep"] is None, "no step has a score of a validation"
    with (job.jobs / "learn" / "metrics.jsonl").open("a") as file:
        file.write('n": 0}\n{"step": 3, "eval/reward/mean": 0.5}\n')
    assert ask(job, "job", name="learn")["validatedStep"] == 3
    assert ask(job, "step", name="learn", step="3", eval="1")["isEval"] is True


def test_step_view_has_groups_numbers_and_failures(job: Home) -> None:
    found = ask(job, "step", name="learn", step="2")
    assert [(each["group"], each["withoutSpread"], len(each["samples"])) for each in found["groups"]] == [
        ("g/1", True, 2),
        ("g-2", False, 20),
    ]
    assert found["metrics"]["reward/mean"] == 0.04 and found["waits"] == [
        {"metric": "time/rollout", "title": "rollouts", "seconds": 1.0}
    ]
    assert [each["error"] for each in found["failures"]] == ["ValueError: no"]
    assert (found["previous"], found["next"], found["count"]) == (None, {"step": 3, "isEval": False}, 2)
    newest = ask(job, "step", name="learn", eval="1")
    assert newest["isEval"] and newest["groups"][0]["group"] == "e-1" and newest["failures"] == []


def test_group_view_shows_samples_and_omissions(job: Home) -> None:
    found = ask(job, "step", name="learn", step="2", group="g-2")
    assert len(found["episodes"]) == 16 and found["leftOut"] == 4
    assert (found["previousGroup"], found["nextGroup"]) == ("g/1", None)
    one = ask(job, "step", name="learn", step="2", group="g-2", sample="19")
    (episode,) = one["episodes"]
    assert episode["reward"] == 19.0 and episode["shown"]["turns"][0]["lp"] == [-0.5, -1.5]
    assert ask(job, "step", name="learn", step="2", group="g/1")["episodes"][0]["question"]


@pytest.mark.parametrize(
    ("query", "error", "words"),
    [
        ({"step": "7"}, NotFound, "step 7 of trainjob/learn has no samples"),
        ({"step": "2", "group": "x"}, NotFound, "no group x"),
        ({"step": "2", "group": "g-2", "sample": "99"}, NotFound, "no sample 99"),
        ({"step": "x"}, UsageFault, "no integer"),
    ],
)
def test_missing_place_is_an_error_with_advice(
    job: Home, query: dict[str, str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ask(job, "step", name="learn", **query)


def test_job_without_samples_names_setting_to_write_them(home: Home, record: Recorder) -> None:
    record("TrainJob", "learn")
    with pytest.raises(NotFound, match="has written no trajectories") as caught:
        ask(home, "step", name="learn", step="1")
    assert "rollout.dump_to_file=true" in str(caught.value.hint)
    empty = ask(home, "job", name="learn")
    assert empty["steps"] == 0 and empty["starts"] == [] and empty["step"] is None


def test_compare_lists_differing_fields(job: Home, record: Recorder) -> None:
    record("TrainJob", "other")
    folder = job.jobs / "other"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 1\nactor: {optimizer: {lr: 0.2}, eps: null}\nexperiment_name: b\n")
    found = ask(job, "compare", jobs="learn,other")
    assert found["config"] == [
        {"field": "actor.optimizer.lr", "values": {"learn": 0.1, "other": 0.2}},
        {"field": "actor.eps", "values": {"other": None}},
    ]
    assert [each["steps"] for each in found["jobs"]] == [50, 0] and found["unreadable"] == {}
    (folder / "config.yaml").write_text("a: [")
    assert (
        "config.yaml:1:5: the configuration is not valid YAML"
        in ask(job, "compare", jobs="learn,other")["unreadable"]["other"]
    )
    with pytest.raises(UsageFault, match="at most 8"):
        ask(job, "compare", jobs="a,b,c,d,e,f,g,h,i")


def test_long_file_is_sampled_first_and_read_in_background(job: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_AT_ONCE", 100)
    path = job.job_metrics("learn")
    with path.open("a") as file:
        file.write("\n")
        for step in range(51, 20_000):
            file.write(json.dumps({"step": step, "attempt": 1, "loss": 1.0, "pad": "x" * 100}) + "\n")
    first = ask(job, "job", name="learn")
    assert first["shareRead"] < 1.0 and 100 < first["steps"] < 3_000 and first["lastStep"] == 19_999
    whole = eventually(lambda: (found := ask(job, "job", name="learn"))["shareRead"] == 1.0 and found)
    assert whole["steps"] == 19_999 and len(whole["starts"]) <= 1000


def test_numbers_of_many_small_jobs_stay_in_memory(home: Home) -> None:
    paths = [home.job_metrics(f"job-{number}") for number in range(8)]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text('{"step": 1, "loss": 0.5}\n')
    first = [jobs.numbers_of(path).curves for path in paths]
    assert all(jobs.numbers_of(path).curves is known for path, known in zip(paths, first, strict=True))


def test_numbers_in_use_by_view_are_not_replaced(job: Home) -> None:
    path = job.job_metrics("learn")
    curves = jobs.numbers_of(path).curves
    rows = iter(curves)
    first = next(rows)
    path.write_text(path.read_text().replace('"torn', '"new": 1}\n{"step": 0, "new": 2}\n'))
    assert len(jobs.numbers_of(path).curves) == 52
    assert [first["step"], *(row["step"] for row in rows)] == list(range(1, 51))
    path.write_text("")
    assert len(jobs.numbers_of(path).curves) == 0 and len(curves) == 50 and "new" not in curves.columns


def test_step_is_reread_once_all_numbers_are_read(job: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of("step")
    assert reader is not None
    view = ViewContext(job, {"name": "learn", "step": "2"})
    before = reader.marks(view)
    monkeypatch.setattr(jobs, "_AT_ONCE", 0)
    go_on = threading.Event()
    monkeypatch.setattr(jobs._Kept, "_read_all", lambda self: go_on.wait(30))
    reader.read(view)
    assert reader.marks(view) != before
    go_on.set()
    eventually(lambda: reader.marks(view) == before)


def test_page_gets_an_event_when_a_job_takes_a_step(job: Home, page: Page) -> None:
    assert page.read("job", name="learn")["lastStep"] == 50
    assert page.failure("job", name="none")[0] == 404
    path = job.job_metrics("learn")
    reader = reader_of("job")
    assert reader is not None
    before = reader.marks(ViewContext(job, {"name": "learn"}))
    with path.open("a") as file:
        file.write('"}\n' + json.dumps({"step": 52, "attempt": 1, "reward/mean": 1.0}) + "\n")
    assert reader.marks(ViewContext(job, {"name": "learn"})) != before
    assert page.read("job", name="learn")["lastStep"] == 52


def test_alerts_cover_running_and_failed_jobs(job: Home) -> None:
    assert ask(job, "alerts") == {"alerts": []}  # it has not been started
    began = time.monotonic()
    reader = reader_of("alerts")
    assert reader is not None and "clock" in reader.marks(ViewContext(job, {}))
    assert time.monotonic() - began < 5


def test_drawn_range_excludes_late_spike() -> None:
    low, high = drawn_range([0.1 * (each % 10) for each in range(99)] + [1000.0])
    assert low == 0.0 and high == pytest.approx(0.9)
    assert drawn_range([1.0, 2.0, 3.0]) == (1.0, 3.0) and drawn_range([]) == (0.0, 0.0)
    assert drawn_range([0.0] * 50 + [1.0] * 50) == (0.0, 1.0)
