"""The views of training in a browser: from a job to a curve, a step, a group, a sample and a token, by keys alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from areal.state.home import Home
from areal.state.records import StoredObject
from areal.ui.page import render_html
from tests.trajectories.test_steps import HOSTILE, decoder, sample
from tests.ui.conftest import Page
from tests.ui.test_browser import Tab, chromium, judged, tab, violations  # noqa: F401 - fixtures
from tests.ui.test_training import job  # noqa: F401 - fixture

if TYPE_CHECKING:
    from playwright.sync_api import Route

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
Tabs = Callable[..., Tab]
Recorder = Callable[..., StoredObject]

VIEWS = (
    "/job/learn",
    "/job/learn?smooth=much&log=1&all=1&at=20",
    "/job/learn/step/2",
    "/job/learn/step/2?view=samples&from=1&to=5",
    "/job/learn/step/2/group/g-2",
    "/job/learn/step/2/group/g-2?colour=version",
    "/job/learn/step/2/group/g%2F1/sample/1?colour=advantage",
    "/job/learn/step/3?eval=1",
    "/compare?jobs=learn",
)


def ready(it: Tab) -> None:
    it.page.wait_for_function(
        "() => document.querySelector('main h1') && !document.querySelector('main .empty[role=status]')"
    )


def test_job_tokens_are_reachable_by_keyboard(job: Home, tab: Tabs) -> None:  # noqa: F811
    it = tab()
    it.open("/job/learn")
    ready(it)
    it.page.wait_for_selector(".chart canvas")
    assert it.page.is_visible("figure >> text=NaN or infinite, first at step 50"), "a gap of the curve says why"
    waits = it.page.inner_text("figure >> text=what its steps waited for >> xpath=../..")
    assert re.search(r"rollouts \d+%", waits) and re.search(r"other \d+%", waits), "shares as on the axis"
    it.press(*["ArrowLeft"] * 3, "ArrowRight")
    assert "step 49" in it.page.inner_text(".readout")
    assert it.page.inner_text("figure >> nth=0").endswith("0.98")
    it.press("s")
    it.page.wait_for_function("() => location.search === '?smooth=some'")
    it.page.wait_for_timeout(100)  # drawn again
    assert it.page.inner_text("figure >> nth=0").endswith("reward\n0.98"), "once"
    it.page.goto(f"{it.server.url}/job/learn?at=2")
    ready(it)
    it.page.wait_for_selector("text=step 2")
    it.press("Enter")
    it.at("/job/learn/step/2")
    it.page.wait_for_selector("tr[aria-current]")
    assert it.page.is_visible("main a[href='/job/learn/step/2/group/g-2']"), "for another tab"
    it.press("j", "Enter")
    it.at("/job/learn/step/2/group/g-2")
    it.page.wait_for_selector("article")
    it.press("j")
    assert it.page.evaluate("document.activeElement.innerText") == "sample 0"
    it.press("j", "Enter")
    it.at("/job/learn/step/2/group/g-2/sample/1")
    it.page.wait_for_selector(".t")
    it.press("3")
    it.page.wait_for_function("() => location.search === '?colour=advantage'")
    it.page.wait_for_selector(".a-good")
    while not it.page.evaluate("document.activeElement.matches('.run:not(.prompt) .stretch')"):
        it.press("Tab")
    it.press("ArrowRight")
    tip = it.page.wait_for_selector(".tip:not([hidden])").inner_text()
    assert "logprob" in tip and "-1.5" in tip and "version" in tip and "0.5" in tip
    it.press("Escape")
    it.page.wait_for_selector(".tip", state="hidden")
    it.press("j")
    it.at("/job/learn/step/2/group/g-2/sample/2")
    it.press("Escape")
    it.at("/job/learn/step/2/group/g-2")
    it.press("Escape")
    it.at("/job/learn/step/2")
    it.press("Escape")
    it.at("/job/learn")


def test_alert_bar_shows_worst_first_and_rest_on_button(job: Home, tab: Tabs) -> None:  # noqa: F811
    alert = {"object": "TrainJob/learn", "message": "m", "cause": "c", "next": "n", "route": "/job/learn"}
    severities = ("warning", "warning", "warning", "error")
    alerts = [{**alert, "rule": f"rule-{at}", "severity": each} for at, each in enumerate(severities)]
    it = tab()
    it.page.route("**/api/alerts*", lambda route: route.fulfill(json={"alerts": alerts}))
    it.open("/job/learn")
    it.page.wait_for_selector(".alerts >> text=rule-3")
    rules = "[...document.querySelectorAll('.alerts li > b')].map(each => each.innerText)"
    assert it.page.evaluate(rules) == ["rule-3", "rule-0"]
    it.page.focus(".alerts >> text=2 more alerts")
    it.press("Enter")
    it.page.wait_for_selector(".alerts >> text=rule-2")
    assert it.page.evaluate(rules) == ["rule-3", "rule-0", "rule-1", "rule-2"]
    series = [{"points": {"mean": [0.0, 1.0] * 50 + [80.0]}}]
    words = it.page.evaluate("series => import('/static/chart.js').then(chart => chart.outliers(series))", series)
    assert words == "up to 80, clipped"


def test_histogram_filter_by_keys_is_kept_in_address(job: Home, tab: Tabs) -> None:  # noqa: F811
    it = tab()
    it.open("/job/learn/step/2?view=samples")
    ready(it)
    assert it.page.locator("table[aria-label=Samples] tbody tr").count() == 22
    it.page.focus(".histogram button:not([disabled]) >> nth=-1")
    it.press("Enter")
    it.page.wait_for_function("() => document.querySelectorAll('table[aria-label=Samples] tbody tr').length < 5")
    it.page.reload()
    it.page.wait_for_function(
        "() => [1, 2, 3, 4].includes(document.querySelectorAll('table[aria-label=Samples] tbody tr').length)"
    )
    it.press("x")
    it.page.wait_for_function("() => document.querySelectorAll('table[aria-label=Samples] tbody tr').length === 22")
    it.press("ArrowRight")
    it.at("/job/learn/step/3")


FOCUS = """() => {
    const at = document.activeElement, box = at.getBoundingClientRect(), style = getComputedStyle(at);
    const name = at.getAttribute("aria-label") ?? at.dataset.step ?? at.innerText.trim().split("\\n")[0];
    return {name: `${at.tagName} ${name}`.slice(0, 60),
            ring: style.outlineStyle !== "none" || style.boxShadow !== "none",
            seen: box.width > 0 && box.bottom > 0 && box.top < innerHeight};
}"""


@pytest.mark.parametrize("view", (VIEWS[0], VIEWS[2], VIEWS[4], VIEWS[-1]))
def test_tab_visits_all_controls_with_visible_ring(job: Home, tab: Tabs, view: str) -> None:  # noqa: F811
    it = tab()
    it.open(view)
    ready(it)
    it.page.focus("header a")
    wanted = it.page.evaluate(
        "() => [...document.querySelectorAll('main :is(a, button, input, select, summary)')]"
        ".filter(each => each.tabIndex >= 0 && !each.disabled && each.offsetParent).length"
    )
    seen = []
    while True:
        it.press("Tab")
        found = it.page.evaluate(FOCUS)
        if found["name"].startswith("BODY"):
            break
        assert found["ring"] and found["seen"], found
        seen.append(found["name"])
    assert len(seen) >= wanted > 3, seen


def test_focus_and_cursor_are_kept_while_job_writes(job: Home, tab: Tabs) -> None:  # noqa: F811
    it = tab()
    it.open("/job/learn")
    ready(it)
    it.page.wait_for_selector(".chart canvas")
    it.press("/")
    it.page.keyboard.type("reward")
    it.press("Escape", "ArrowLeft", "ArrowLeft")
    assert "step 49" in it.page.inner_text(".readout")
    it.page.focus("text=log axis")
    it.page.evaluate("document.querySelector('.chart canvas').dataset.same = 'yes'")
    line = {"step": 51, "attempt": 1, "time": 1051.0, "reward/mean": 0.25, "time/step": 2.0}
    with job.job_metrics("learn").open("a") as file:
        file.write("\n" + json.dumps(line) + "\n")
    it.page.wait_for_selector(".facts >> text=step 51")
    assert it.page.is_visible(".chart canvas[data-same]"), "a click that has begun ends on the same chart"
    assert it.page.evaluate("document.activeElement.innerText") == "log axis"
    assert "step 49" in it.page.inner_text(".readout") and it.page.input_value("[data-filter]") == "reward"
    it.press("Enter")
    it.page.wait_for_function("() => location.search.includes('log=1')")


def test_log_axis_begins_just_below_a_power_of_ten(job: Home, tab: Tabs) -> None:  # noqa: F811
    lines = [
        {"step": step, "attempt": 1, "time": 1000.0 + step, "grad_norm": 0.00118 * step**2} for step in range(1, 51)
    ]
    job.job_metrics("learn").write_text("".join(json.dumps(line) + "\n" for line in lines))
    it = tab()
    it.open("/job/learn?log=1")
    it.page.wait_for_selector(".chart canvas")


def test_comparison_shows_no_table_until_its_jobs_are_read(job: Home, record: Recorder, tab: Tabs) -> None:  # noqa: F811
    for name, config in (("other", "seed: 2\n"), ("bare", None)):
        record("TrainJob", name)
        (job.jobs / name).mkdir()
        if config is not None:
            (job.jobs / name / "config.yaml").write_text(config)
    it = tab()
    it.open("/compare?jobs=learn")
    it.page.wait_for_selector(".chart canvas")
    held: list[Route] = []
    it.page.route("**/api/compare?*", lambda route: held.append(route))
    it.page.click("button:text-is('other')")
    it.page.wait_for_function("() => location.search.includes('other')")
    while not held:
        it.page.wait_for_timeout(20)
    assert it.page.locator(".compare table").count() == 0
    held[0].continue_()
    it.page.unroute("**/api/compare?*")
    it.page.wait_for_selector(".compare table")
    assert it.page.inner_text(".compare table").count("seed") == 1
    it.open("/compare?jobs=learn,bare")
    it.page.wait_for_selector("text=it has written no config.yaml")
    assert it.page.locator(".compare table").count() == 0


def test_jobs_are_compared_by_keyboard(job: Home, record: Recorder, tab: Tabs) -> None:  # noqa: F811
    record("TrainJob", "other")
    (job.jobs / "other").mkdir()
    (job.jobs / "other" / "config.yaml").write_text("seed: 2\nactor: {optimizer: {lr: 0.1}}\n")
    lines = [{"step": step, "attempt": 1, "time": 1.0 * step, "reward/mean": 0.5} for step in range(1, 31)]
    (job.jobs / "other" / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    it = tab()
    it.open("/")
    it.press("g", "c")
    it.at("/compare")
    for name in ("learn", "other"):
        while it.page.evaluate("document.activeElement.innerText") != name:
            it.press("Tab")
        it.press("Space")
        it.page.wait_for_function("name => new URLSearchParams(location.search).get('jobs').includes(name)", arg=name)
        assert it.page.evaluate("document.activeElement.innerText") == name
    it.page.wait_for_selector("text=Configuration where it differs")
    assert it.page.inner_text("table[aria-label=Configuration], .compare table").count("seed") == 1
    it.page.wait_for_selector(".chart canvas")
    it.press("ArrowLeft", "m", "s")
    it.page.wait_for_function("() => location.search.includes('smooth=some') && location.search.includes('all=1')")
    it.press("/")
    it.page.keyboard.type("seed")
    it.page.wait_for_function("() => document.querySelectorAll('.compare tbody tr').length === 1")
    it.press("Escape", "Escape")
    it.at("/")


def test_hostile_sample_is_shown_as_text(job: Home, tab: Tabs) -> None:  # noqa: F811
    it = tab()
    it.page.add_init_script("window.alert = () => { window.owned = true }")
    it.open("/job/learn/step/2/group/g%2F1")
    it.page.wait_for_selector("details.example")
    it.page.click("details.example summary")
    assert "<script>alert(1)" in it.page.inner_text("details.example")
    assert it.page.evaluate("window.owned") is None


@pytest.mark.timeout(600)
def test_training_views_are_accessible(job: Home, tab: Tabs) -> None:  # noqa: F811
    assert violations(tab(noisy=True), VIEWS) == ""  # axe's own style is refused by the policy


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A page of 2,000 episodes without a server."""
    episodes = [sample(f"g-{number}", 0, float(number % 5)) for number in range(1_999)]
    path = tmp_path / "page.html"
    path.write_text(
        render_html([*episodes, sample(HOSTILE, 0, 1.0)], decoder, title="learn", left_out="1 step of 9")[0],
        errors="surrogatepass",
    )
    return path


def test_exported_page_keeps_selection_visible_by_keys(written: Path, tab: Tabs) -> None:  # noqa: F811
    it = tab()
    it.page.goto(written.as_uri())
    it.page.wait_for_selector(".turn")
    assert it.page.title() == "learn" and "1 step of 9" in it.page.inner_text(".left-out")
    assert it.page.locator(".row-of").count() < 100, "only rows on the screen are built"
    selected = """() => {
        const row = document.querySelector("[aria-selected=true]").getBoundingClientRect();
        const list = document.querySelector(".rows").getBoundingClientRect();
        return row.top >= list.top - 1 && row.bottom <= list.bottom + 1;
    }"""
    for key in ["j"] * 30 + ["ArrowDown"] * 5 + ["k", "End", "PageUp", "Home"]:
        it.press(key)
        assert it.page.evaluate(selected), key
        assert it.page.evaluate("document.activeElement.className") == "rows"
    it.press("End")
    assert it.page.evaluate("window.owned") is None and it.page.inner_text("h2").startswith("</script>")
    it.press("/")
    it.page.keyboard.type("g-77/")
    it.page.wait_for_function("() => document.querySelectorAll('.row-of').length === 1")


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_exported_page_is_accessible(written: Path, tab: Tabs, scheme: str) -> None:  # noqa: F811
    it = tab(820, scheme)
    it.page.goto(written.as_uri())
    it.page.wait_for_selector(".turn")
    assert judged(it.page) == []


def test_stopped_job_offers_resume(
    home: Home,
    record: Recorder,
    serve: Callable[..., Page],
    chromium: Any,  # noqa: F811
) -> None:
    record("TrainJob", "stopped", {"driver": "a:b", "suspend": True})
    context = chromium.new_context()
    it = Tab(context.new_page(), serve("--allow-actions"))
    it.open("/job/stopped")
    ready(it)
    it.page.wait_for_selector("main button >> text=/^Resume$/")
    assert it.page.locator("main button >> text=/^(Restart|Suspend)$/").count() == 0
    context.close()
