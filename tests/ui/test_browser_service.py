"""A service under the page: its model is scaled, suspended, resumed and restarted by clicks, two of its versions answer
side by side, and the timeline of weights shows both. The processes are real and shared by the tests."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal.state.home import Home
from tests.e2e.conftest import Box, make_box, tear_down
from tests.ui.conftest import Page, eventually, page_of
from tests.ui.test_browser import Tab, chromium, tab, violations  # noqa: F401 - fixtures

pytestmark = [pytest.mark.browser, pytest.mark.extended, pytest.mark.timeout(300)]
Tabs = Callable[..., Tab]
MODEL = "/object/model/reverse"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    folder = tmp_path_factory.mktemp("service")
    made = make_box(folder)
    made = replace(made, env={**made.env, "HOME": str(folder)})
    made.ok("apply", "-f", made.manifest())
    yield made
    tear_down(made)


@pytest.fixture(scope="module")
def acting(service: Box) -> Iterator[Page]:
    with page_of(service, "--allow-actions") as it:
        yield it


@pytest.fixture
def page(acting: Page) -> Page:
    return acting


def click(it: Tab, button: str, number: str = "") -> str:
    """Carry out the change of a button with the mouse; return the plan that was confirmed."""
    it.page.click(f"main button >> text=/^{button}$/")
    dialog = it.page.wait_for_selector("dialog.action[open]")
    if number:
        it.page.fill("dialog input[type=number]", number)
        it.page.click("dialog button >> text=Show the plan")
    it.page.wait_for_selector("dialog input[type=text]")
    plan = str(dialog.inner_text())
    it.page.fill("dialog input[type=text]", "reverse")
    it.page.click(f"dialog form button >> text={button}")
    it.page.wait_for_selector("dialog >> text=: done", timeout=120_000)
    it.page.click("dialog button >> text=Close")
    it.page.wait_for_selector("dialog", state="detached")
    return plan


def engines(service: Box) -> dict[str, int]:
    return {name: pid for name, pid in service.pids().items() if name.startswith("engine")}


def test_model_is_scaled_suspended_and_restarted_by_clicks(service: Box, tab: Tabs) -> None:  # noqa: F811
    it = tab()
    it.open(MODEL)
    it.page.wait_for_selector("text=1/1 ready")
    assert "spec.replicas" in click(it, "Scale", "2")
    it.page.wait_for_selector("text=2/2 ready")
    before = engines(service)
    assert len(before) == 2
    assert "restart" in click(it, "Restart")
    it.page.wait_for_selector("text=2/2 ready")
    assert not set(before.values()) & set(engines(service).values())
    click(it, "Suspend")
    it.page.wait_for_selector(".head >> text=Suspended")
    assert engines(service) == {} and it.page.locator("button >> text=Suspend").count() == 0
    click(it, "Resume")
    it.page.wait_for_selector("text=2/2 ready")
    assert service.chat("1234")


def two_versions(service: Box, page: Page) -> list[dict[str, Any]]:
    """The replicas of the model, of which one serves another version."""
    service.ok("scale", "model/reverse", "--replicas", "2")
    rows = eventually(lambda: len(rows := page.read("weights")["replicas"]) == 2 and rows)
    url = f"{service.url}/set_version/{rows[0]['worker']}"
    headers = {"Authorization": f"Bearer {service.key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps({"version": 3}).encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200

    def apart() -> list[dict[str, Any]] | None:
        rows: list[dict[str, Any]] = page.read("weights")["replicas"]
        return rows if {each["version"] for each in rows} == {0, 3} else None

    found: list[dict[str, Any]] = eventually(apart)
    return found


def test_two_versions_of_a_model_answer_side_by_side(service: Box, page: Page, tab: Tabs) -> None:  # noqa: F811
    two_versions(service, page)
    it = tab()
    it.open("/chat?a=default/reverse v0&b=default/reverse v3&temperature=0&tokens=5".replace(" ", "%20"))
    it.press("i")
    it.page.keyboard.type("1234")
    it.page.wait_for_function("() => document.querySelector('textarea')?.value === '1234'")  # keys wait for the view
    composes = "new KeyboardEvent('keydown', { key: 'Enter', isComposing: true, bubbles: true })"
    it.page.eval_on_selector("textarea", f"each => each.dispatchEvent({composes})")
    assert it.page.input_value("textarea") == "1234", "Enter that ends an input method's composition sends nothing"
    it.press("Enter")
    it.page.wait_for_function("() => document.querySelectorAll('.answers .answer').length === 2")
    it.page.wait_for_function("() => !document.querySelector('.answers [role=status]')", timeout=120_000)
    facts = it.page.eval_on_selector_all(".answers p.dim", "all => all.map(each => each.innerText)")
    assert [re.findall(r"version \d+", each) for each in facts] == [["version 0"], ["version 3"]], facts
    texts = it.page.eval_on_selector_all(".answers .answer", "all => all.map(each => each.innerText)")
    assert texts[0] == texts[1] != "", "the weights are the same"
    it.page.check("text=keep as a session")
    it.page.wait_for_selector("text=an answer of one version is not recorded")


def test_weight_timeline_has_lane_per_replica_and_names_stale(
    service: Box,
    page: Page,
    tab: Tabs,  # noqa: F811
) -> None:
    newer, older = sorted(two_versions(service, page), key=lambda each: -each["version"])
    folder = Home(service.home).jobs / "learn"
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    entry = {"pair": "p", "model": "reverse", "joined": False, "bytes": 340000, "error": None}
    lines = [
        {
            **entry,
            "version": version,
            "began": now - age - 0.2,
            "at": now - age,
            "replicas": {newer["address"]: 4.0, older["address"]: pause},
        }
        for version, age, pause in ((1, 900, 5.0), (3, 60, None))
    ]
    Path(folder / "weight_updates.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    it = tab()
    it.open("/")
    it.press("g", "w")
    it.at("/weights")
    it.page.wait_for_selector("text=1 behind")
    it.page.wait_for_function("() => document.querySelectorAll('.lane').length === 2")
    labels = it.page.eval_on_selector_all(".lane svg", "all => all.map(each => each.getAttribute('aria-label'))")
    ours = {each["worker"]: next(text for text in labels if each["worker"] in text) for each in (newer, older)}
    assert "v1 from" in ours[newer["worker"]] and "v3 from" in ours[newer["worker"]]
    assert "missed 1" in ours[older["worker"]] and "v3 from" not in ours[older["worker"]]
    it.press("s", "s", "s")
    it.page.wait_for_function("() => location.search.includes('span=10min')")
    assert it.page.locator(".lane rect.missed").count() == 1
    it.press("Enter")
    it.at("/object/inferenceservice/default")


def test_running_service_views_are_accessible(service: Box, page: Page, tab: Tabs) -> None:  # noqa: F811
    two_versions(service, page)
    views = ("/", MODEL, "/top", "/weights", "/weights?span=hour", "/chat", "/logs/model/reverse", "/plan")
    assert violations(tab(noisy=True), views) == ""
