"""``/api/logs`` over a running job: the newest lines, older ones, new ones, filters."""

from __future__ import annotations

from typing import Any

from tests.ui.conftest import Job, Page, eventually

OF = {"kind": "trainjob", "name": "noisy"}


def texts(found: dict[str, Any]) -> list[str]:
    return [line[3] for line in found["lines"]]


def written(page: Page) -> dict[str, Any]:
    """The log once the driver has printed all."""
    found: dict[str, Any] = eventually(
        lambda: (d := page.read("logs", **OF))["lines"] and "long W" in d["lines"][-1][3] and d
    )
    return found


def test_log_shows_newest_thousand_lines_and_pages_back(page: Page, job: Job) -> None:
    found = written(page)
    assert len(found["lines"]) == 1000
    every, older = texts(found), found["older"]
    while older:
        before = page.read("logs", **OF, before=older)
        every, older = texts(before) + every, before["older"]
    assert [line for line in every if line.startswith("INFO")] == [f"INFO line {number}" for number in range(2500)]
    assert "started pid" in every[0] and every[1] == "WARNING before the attempt"


def test_new_lines_follow_cursor_once_each(page: Page, job: Job) -> None:
    cursor = written(page)["cursor"]
    assert page.read("logs", **OF, after=cursor)["lines"] == []
    job.say("ValueError: one more")
    found = eventually(lambda: (d := page.read("logs", **OF, after=cursor))["lines"] and d)
    assert texts(found) == ["ValueError: one more"] and found["lines"][0][2] == "error"
    assert page.read("logs", **OF, after=found["cursor"])["lines"] == []


def test_filters_find_distant_lines(page: Page, job: Job) -> None:
    written(page)
    assert texts(page.read("logs", **OF, q="before THE")) == ["WARNING before the attempt"]
    assert [line[2] for line in page.read("logs", **OF, level="warning")["lines"]] == ["warning", "error"]
    assert page.failure("logs", **OF, level="loud")[0] == 400
    status, error = page.failure("logs", **OF, component="engine")
    assert status == 404 and "driver/0" in error["hint"]


def test_hostile_text_is_escaped_and_long_line_cut(page: Page, job: Job) -> None:
    *_, red, long = written(page)["lines"]
    assert red[3].startswith("ERROR red <script>document.title") and "\x1b" not in red[3]
    assert len(long[3]) < 5000 and len(long[3]) + long[5] == 20_005


def test_malformed_cursor_is_400(page: Page, job: Job) -> None:
    for place in ("zz.1", "1", "1.2.3", "-1.5", "1.-5", f"1.{1 << 63:x}", f"{1 << 70:x}.0"):
        for name in ("before", "after"):
            assert page.failure("logs", **OF, **{name: f"x={place}"})[0] == 400, (name, place)


def test_previous_run_is_the_start_before_the_present_one(page: Page, job: Job) -> None:
    written(page)
    assert page.read("logs", **OF, previous="1")["lines"] == []
