"""The views of evaluations in a browser, over what ``areal eval`` wrote."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from areal.state.home import Home
from tests.rollout.collection.conftest import module_processes, shared, tokenizer  # noqa: F401 - fixtures
from tests.ui.test_browser import Tab, chromium, tab, violations  # noqa: F401 - fixtures
from tests.ui.test_evaluations import evaluated  # noqa: F401 - fixture

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
VIEWS = (
    "/evaluations",
    "/evaluations/after",
    "/evaluations/after?show=all&against=none",
    "/evaluations/after/prompt/1",
    "/evaluations/nothing",
)


@pytest.fixture
def home(evaluated: Home) -> Home:  # noqa: F811
    return evaluated


def test_evaluation_samples_are_reachable_by_keyboard(tab: Callable[..., Tab]) -> None:  # noqa: F811
    it = tab()
    it.open("/")
    it.press("g", "e")
    it.at("/evaluations")
    it.page.wait_for_selector("tr[aria-current]")
    it.press("j", "Enter")
    it.at("/evaluations/after")
    it.page.wait_for_selector("table[aria-label=Prompts] tr[aria-current]")
    assert "1 prompt better, 1 worse, 2 alike" in it.page.inner_text("main")
    assert it.page.locator("table[aria-label=Prompts] tbody tr").count() == 2
    it.press("v")
    rows = "count => document.querySelectorAll('table[aria-label=Prompts] tbody tr').length === count"
    it.page.wait_for_function(rows, arg=1)
    it.press("v", "v")
    it.page.wait_for_function(rows, arg=4)
    it.press("v")
    it.page.wait_for_function(rows, arg=2)
    it.press("Enter")
    it.at("/evaluations/after/prompt/1")
    it.page.wait_for_selector(".side section:nth-child(2) article .t")
    assert it.page.eval_on_selector_all(".side h2", "all => all.map(each => each.innerText)") == ["before", "after"]
    it.press("j", "j", "j")
    assert "after" in it.page.evaluate("document.activeElement.closest('section').getAttribute('aria-label')")
    it.press("ArrowRight")
    it.at("/evaluations/after/prompt/2")
    it.page.wait_for_selector(".side article .t")
    it.press("Escape")
    it.at("/evaluations/after")
    it.press("Escape")
    it.at("/evaluations")
    it.press("Escape")
    it.at("/")


def test_other_baseline_is_chosen_and_kept_in_the_address(tab: Callable[..., Tab]) -> None:  # noqa: F811
    it = tab()
    it.open("/evaluations/after")
    it.page.wait_for_selector("select")
    it.page.select_option("select", "other")
    it.page.wait_for_selector("text=Difference to other")
    it.page.reload()
    it.page.wait_for_selector("text=Difference to other")
    it.page.click("table[aria-label=Prompts] tbody tr >> nth=0")
    it.page.wait_for_selector(".side section[aria-label=other] article .t")


@pytest.mark.timeout(600)
def test_evaluations_are_accessible_and_do_not_scroll_sideways(tab: Callable[..., Tab]) -> None:  # noqa: F811
    assert violations(tab(noisy=True), VIEWS) == ""
