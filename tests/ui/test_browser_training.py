"""The views of training in a browser: from a job to a curve, a step, a group, a sample and a token, by keys alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from areal.state.home import Home
from areal.ui.page import render_html
from tests.trajectories.test_steps import HOSTILE, decoder, sample
from tests.ui.test_browser import Tab, chromium, tab, violations  # noqa: F401 - fixtures
from tests.ui.test_training import job  # noqa: F401 - fixture

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
Tabs = Callable[..., Tab]

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


def test_job_to_token_and_back_by_the_keyboard_alone(job: Home, tab: Tabs) -> None:  # noqa: F811
    it = tab()
    it.open("/job/learn")
    ready(it)
    it.page.wait_for_selector(".chart canvas")
    it.press(*["ArrowLeft"] * 3, "ArrowRight")
    assert "step 49" in it.page.inner_text(".readout")
    assert it.page.inner_text("figure >> nth=0").endswith("0.98")
    it.page.goto(f"{it.server.url}/job/learn?at=2")
    ready(it)
    it.page.wait_for_selector("text=step 2")
    it.press("Enter")
    it.at("/job/learn/step/2")
    it.page.wait_for_selector("tr[aria-current]")
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


def test_histogram_filters_by_keys_and_the_address_keeps_it(job: Home, tab: Tabs) -> None:  # noqa: F811
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


def test_hostile_sample_is_text_and_runs_nothing(job: Home, tab: Tabs) -> None:  # noqa: F811
    it = tab()
    it.page.add_init_script("window.alert = () => { window.owned = true }")
    it.open("/job/learn/step/2/group/g%2F1")
    it.page.wait_for_selector("details.example")
    it.page.click("details.example summary")
    assert "<script>alert(1)" in it.page.inner_text("details.example")
    assert it.page.evaluate("window.owned") is None


def test_training_views_have_no_violation_and_do_not_scroll_sideways(job: Home, tab: Tabs) -> None:  # noqa: F811
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


def test_written_page_moves_by_keys_with_the_selection_in_sight(written: Path, tab: Tabs) -> None:  # noqa: F811
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
def test_written_page_has_no_violation(written: Path, tab: Tabs, scheme: str) -> None:  # noqa: F811
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    it = tab(820, scheme)
    it.page.goto(written.as_uri())
    it.page.wait_for_selector(".turn")
    found = [
        f"{each['id']}: {each['nodes'][0]['html'][:150]} {each['nodes'][0].get('failureSummary', '')[:200]}"
        for each in axe.run(it.page).response["violations"]
    ]
    assert not found, "\n".join(found)
