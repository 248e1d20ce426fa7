"""Every view in a real browser: by the keyboard alone, without a violation that axe finds, with an empty console.

Run with ``pytest -m browser`` where Playwright and Chromium are installed (``pip install -e '.[dev-browser]'``).
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from areal.state.home import Home
from areal.state.records import StoredObject
from tests.ui.conftest import Job, Page

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
CHROMIUM = os.environ.get("AREAL_CHROMIUM", "/usr/bin/chromium")
Record = Callable[..., StoredObject]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no {CHROMIUM}")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Tab:
    """A page in the browser, and the messages of its console."""

    page: Any
    server: Page
    console: list[str] = field(default_factory=list)

    def open(self, path: str = "/") -> Any:
        self.page.goto(f"{self.server.url}{path}#token={self.server.token}")
        self.page.wait_for_selector("main h1, main .problem")
        return self.page

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    @property
    def path(self) -> str:
        return re.sub(r"[?].*", "", self.page.evaluate("location.pathname"))

    def at(self, path: str) -> None:
        """Wait until the view of this path hears its keys."""
        self.page.wait_for_function(
            "path => location.pathname === path && document.body.dataset.shown === path", arg=path
        )


@pytest.fixture
def tab(chromium: Any, page: Page) -> Iterator[Callable[..., Tab]]:
    """``tab(width, scheme)``. Its console must stay empty, unless ``noisy``."""
    tabs: list[tuple[Tab, bool]] = []

    def new(width: int = 1280, scheme: str = "light", *, noisy: bool = False) -> Tab:
        context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        context.set_default_timeout(60_000)  # an event is awaited: a busy machine makes it late, not wrong
        made = Tab(context.new_page(), page)
        made.page.on("console", lambda message: made.console.append(message.text))
        made.page.on("pageerror", lambda error: made.console.append(str(error)))
        tabs.append((made, noisy))
        return made

    yield new
    for made, noisy in tabs:
        made.page.context.close()
        assert noisy or made.console == []


@pytest.fixture
def objects(record: Record, job: Job) -> None:
    record("InferenceService", "default", {})
    for number in range(40):
        record("Model", f"qwen-{number}", {"service": "default", "backend": "embedded:d1", "path": "/models/qwen"})


VIEWS = (
    "/",
    "/?all=1&q=qwen&sort=-name",
    "/object/model/qwen-1",
    "/object/trainjob/noisy",
    "/logs/trainjob/noisy",
    "/logs/trainjob/noisy?level=error&wrap=1",
    "/plan",
    "/plan?path=/no/such/file.yaml",
    "/top",
    "/weights",
    "/chat",
    "/sessions",
    "/object/model/absent",
    "/nothing",
)


def visible(tab: Tab) -> bool:
    """Whether the element with the focus is within what is seen of the page."""
    return bool(
        tab.page.evaluate(
            """() => {
                const row = document.activeElement, box = row.getBoundingClientRect();
                const main = document.querySelector("main").getBoundingClientRect();
                return row.tagName === "TR" && box.top >= main.top && box.bottom <= main.bottom;
            }"""
        )
    )


def test_views_are_reachable_by_keyboard(objects: None, tab: Callable[..., Tab]) -> None:
    it = tab()
    it.open()
    it.press("j", "j", "Enter")
    it.at("/object/model/qwen-1")
    it.press("l")
    it.at("/logs/model/qwen-1")
    it.page.wait_for_selector(".log")
    it.press("Escape")
    it.at("/object/model/qwen-1")
    it.press("Escape")
    it.at("/")
    it.page.wait_for_selector("tr[aria-current]")
    it.press("/")
    it.page.keyboard.type("noisy")
    it.press("Escape", "Enter")
    it.page.wait_for_function("() => location.pathname.endsWith('/noisy')")
    it.press("g", "o")
    it.at("/")
    for key, path in {"t": "/top", "w": "/weights", "p": "/plan", "o": "/"}.items():
        it.press("g", key)
        it.at(path)
        it.page.wait_for_selector("main table")
    it.press("?")
    dialog = it.page.wait_for_selector("dialog[open]")
    assert "next, previous" in dialog.inner_text() and "ended" in dialog.inner_text()
    it.press("Escape")
    it.page.wait_for_selector("dialog", state="detached")


def test_keys_pressed_before_view_loads_are_handled(objects: None, tab: Callable[..., Tab]) -> None:
    it = tab()
    held: list[Any] = []
    it.page.route("**/api/home*", lambda route: held.append(route))
    it.page.goto(f"{it.server.url}/#token={it.server.token}")
    it.page.wait_for_selector("main [data-loading]")
    it.press("/")
    it.page.keyboard.type("qwen-7")
    it.press("Enter", "Enter")
    assert it.path == "/" and held
    for each in held:
        each.continue_()
    it.page.unroute("**/api/home*")
    it.at("/object/model/qwen-7")
    it.page.go_back()
    assert it.page.wait_for_selector("[data-filter]").input_value() == "qwen-7"
    it.page.route("**/static/views/weights.js", lambda route: held.append(route))
    it.press("g", "w", "s", "g", "o")  # another view is wanted meanwhile: what waited goes on in its order
    it.page.wait_for_function("() => location.pathname === '/weights'")
    held[-1].continue_()
    it.page.unroute("**/static/views/weights.js")
    it.at("/")


def test_keys_keep_their_order_while_earlier_ones_are_replayed(objects: None, tab: Callable[..., Tab]) -> None:
    it = tab()
    held: list[Any] = []
    it.page.add_init_script("window.requestAnimationFrame = (run) => setTimeout(() => run(performance.now()), 100)")
    it.page.route("**/api/home*", lambda route: held.append(route))
    it.page.goto(f"{it.server.url}/#token={it.server.token}")
    it.page.wait_for_selector("main [data-loading]")
    it.press("/")
    it.page.keyboard.type("qwe")
    for each in held:
        each.continue_()
    it.page.wait_for_function("() => document.activeElement.matches('[data-filter]')")
    it.page.keyboard.type("n-7")
    it.page.wait_for_function("() => document.querySelector('[data-filter]').value.length === 6")
    assert it.page.input_value("[data-filter]") == "qwen-7"


def test_plan_of_another_file_is_not_shown_while_one_is_made(objects: None, tab: Callable[..., Tab]) -> None:
    it = tab()
    it.open("/plan")
    it.page.wait_for_selector("main table")
    held: list[Any] = []
    it.page.route("**/api/plan?*", lambda route: held.append(route))
    it.page.fill("[data-filter]", "/no/such/file.yaml")
    it.page.click("text=Plan the file")
    it.page.wait_for_selector(".facts >> text=such/file.yaml")
    assert it.page.is_visible("main [data-loading]") and not it.page.is_visible("main table")
    while not held:
        it.page.wait_for_timeout(20)
    held[0].continue_()
    it.page.unroute("**/api/plan?*")
    it.page.wait_for_selector("main .problem")


def test_selection_stays_visible_and_focused_as_rows_change(
    objects: None, record: Record, tab: Callable[..., Tab]
) -> None:
    it = tab()
    it.open()
    for _ in range(39):
        it.press("j")
        assert visible(it), it.page.evaluate("document.activeElement.outerHTML")
    name = "document.activeElement.querySelector('a').innerText"
    chosen = it.page.evaluate(name)
    record("Model", "aaa-first", {"service": "default", "backend": "embedded:d1", "path": "/models/qwen"})
    it.page.wait_for_selector("text=aaa-first")
    assert it.page.evaluate(name) == chosen and visible(it)
    it.press("Home")
    assert visible(it)
    it.press("End")
    assert visible(it)


def test_address_state_survives_reload_and_back(objects: None, tab: Callable[..., Tab]) -> None:
    it = tab()
    it.open("/?sort=-name&q=qwen")
    it.press("j", "j", "j", "Enter")
    it.page.wait_for_function("() => location.pathname.startsWith('/object/')")
    opened = it.path
    it.page.go_back()
    it.at("/")
    it.page.wait_for_selector("tr[aria-current]")
    it.page.reload()
    it.page.wait_for_selector("tr[aria-current]")
    assert it.page.input_value("[data-filter]") == "qwen"
    it.press("Enter")
    it.at(opened)


# All rules at each width, in either scheme, and the colours of all that the widest page shows in the other scheme too.
LOOKS: tuple[tuple[int, str, tuple[str, ...]], ...] = (
    (400, "light", ()),
    (820, "dark", ()),
    (1280, "light", ()),
    (1280, "dark", ("color-contrast", "link-in-text-block")),
)
# Of many rows, lines and tokens that one component draws, the first ones.
ALIKE = (".log .line:nth-child(n+40)", "tbody tr:nth-child(n+30)", ".t:nth-child(n+60)")
JUDGE = """([alike, rules]) => axe.run(
    {include: [["html"]], exclude: alike.map((each) => [each])},
    {resultTypes: ["violations"], ...(rules && {runOnly: rules})},
).then((found) => found.violations.map(({id, nodes: [node]}) =>
    `${id}: ${node.html.slice(0, 150)} ${(node.failureSummary ?? "").slice(0, 300)}`))"""


def judged(page: Any, rules: Iterable[str] = ()) -> list[str]:
    """What axe finds in the page as it is."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(pytest.importorskip("axe_playwright_python.base").AXE_SCRIPT)
    found: list[str] = page.evaluate(JUDGE, [list(ALIKE), list(rules) or None])
    return found


def violations(it: Tab, views: Iterable[str]) -> str:
    """What axe finds in each view at each width, light and dark, and which views scroll sideways. One document shows
    all views, as it does for a user who moves between them."""
    found: list[str] = []
    for place, view in enumerate(views):
        if place == 0:
            it.open(view)
        else:
            it.page.evaluate(
                """view => { delete document.body.dataset.shown; history.pushState(null, "", view);
                             dispatchEvent(new PopStateEvent("popstate")); }""",
                view,
            )
        it.page.wait_for_function(
            """() => (document.body.dataset.shown === location.pathname || document.querySelector("main .problem"))
                     && !document.querySelector("main [data-loading]")"""
        )
        if "/logs/" in view:
            it.page.wait_for_selector(".log .line")
        if "colour=" in view:
            it.page.wait_for_selector(".t")
        for width, scheme, rules in LOOKS:
            it.page.set_viewport_size({"width": width, "height": 800})
            it.page.emulate_media(color_scheme=scheme)
            found += [f"{width} {scheme} {view}: {each}" for each in judged(it.page, rules)]
            if it.page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                found.append(f"{width} {view}: scrolls sideways")
    return "\n".join(found)


@pytest.mark.timeout(600)  # axe costs seconds a view where other tests run beside it
def test_views_are_accessible_and_do_not_scroll_sideways(objects: None, tab: Callable[..., Tab]) -> None:
    it = tab(noisy=True)  # a refused object is a failed request in the console
    assert violations(it, VIEWS) == ""


def test_every_view_is_reachable_by_touch_at_400_pixels(objects: None, home: Home, tab: Callable[..., Tab]) -> None:
    metrics = home.job_metrics("noisy")
    metrics.parent.mkdir(parents=True, exist_ok=True)
    metrics.write_text('{"step": 12345, "total_steps": 20000, "attempt": 1, "time": 1.0, "reward/mean": 0.98765}\n')
    it = tab(400)
    it.open()
    it.page.wait_for_selector("text=12,345")
    out_of_sight = """() => [...document.querySelectorAll("header a, header button")].filter(each => {
        const box = each.getBoundingClientRect();
        return box.left < 0 || box.right > innerWidth || box.top < 0;
    }).map(each => each.innerText)"""
    assert it.page.evaluate(out_of_sight) == []
    it.page.set_viewport_size({"width": 640, "height": 400})  # 1280 x 800 at 200 %
    assert it.page.evaluate(out_of_sight) == []
    it.page.set_viewport_size({"width": 400, "height": 800})
    table = "() => { const box = document.querySelector('main .scroll'); return box.scrollWidth <= box.clientWidth; }"
    assert it.page.evaluate(table), "the columns of objects fit"


def test_hostile_text_of_a_log_is_shown_and_not_run(objects: None, tab: Callable[..., Tab]) -> None:
    it = tab()
    it.open("/logs/trainjob/noisy?q=script")
    it.page.wait_for_selector("text=<script>document.title = 'owned'</script>")
    assert "owned" not in it.page.title()


def test_log_follows_and_jumps_to_the_error_by_keys(job: Job, tab: Callable[..., Tab]) -> None:
    it = tab()
    it.open("/logs/trainjob/noisy")
    it.page.wait_for_selector("text=ERROR red")
    job.say("a line that comes later")
    it.page.wait_for_selector("text=a line that comes later")
    it.press("E")
    it.page.wait_for_selector(".line.current >> text=ERROR red")
    it.press("Home")
    it.page.wait_for_selector(".log >> text=INFO line 100", state="attached")
    it.press("Home")
    it.page.wait_for_selector("text=the beginning of what is kept", state="attached")


def test_job_killed_under_open_page_shows_cause(job: Job, home: Home, tab: Callable[..., Tab]) -> None:
    it = tab()
    it.open()
    it.page.wait_for_selector("text=Running")
    pid = next(row["pid"] for row in it.server.read("object", kind="trainjob", name="noisy")["processes"])
    os.kill(pid, signal.SIGKILL)
    it.page.wait_for_selector("text=Failed")
    assert "SIGKILL" in it.page.inner_text("main")


def test_server_ending_under_open_page_is_reported(objects: None, tab: Callable[..., Tab]) -> None:
    it = tab(noisy=True)
    it.open()
    it.page.wait_for_selector("text=qwen-1")
    it.server.popen.send_signal(signal.SIGINT)
    it.page.wait_for_selector("text=not connected since")
    assert "qwen-1" in it.page.inner_text("main"), "what was read stays"


def test_view_opened_while_server_is_down_loads_after_restart(objects: None, tab: Callable[..., Tab]) -> None:
    it = tab(noisy=True)
    it.open()
    it.page.wait_for_selector("text=qwen-1")
    it.page.context.set_offline(True)
    it.page.route("**/api/changes*", lambda route: route.abort())  # the stream ends with the connection
    it.press("g", "t")
    it.page.wait_for_selector("text=the view failed")
    it.page.wait_for_selector("text=not connected since")
    it.page.context.set_offline(False)
    it.page.unroute("**/api/changes*")
    it.at("/top")
    it.page.wait_for_selector("main table")


def test_page_without_its_token_asks_for_it_and_then_opens(objects: None, tab: Callable[..., Tab]) -> None:
    it = tab(noisy=True)
    it.page.goto(it.server.url + "/")
    it.page.wait_for_selector("text=This page needs its token")
    it.page.keyboard.type("wrong")
    it.press("Enter")
    it.page.wait_for_selector("text=this is not the token")
    it.page.fill("input[name=token]", f"{it.server.url}/#token={it.server.token}")
    it.press("Enter")
    it.page.wait_for_selector("text=qwen-1")
    assert it.server.token not in it.page.url


def test_address_with_new_token_opens_in_place_of_the_same_page(objects: None, tab: Callable[..., Tab]) -> None:
    it = tab(noisy=True)
    it.page.goto(it.server.url + "/#token=of-a-server-before")
    it.page.wait_for_selector("text=This page needs its token")
    it.page.goto(f"{it.server.url}/#token={it.server.token}")
    it.page.wait_for_selector("text=qwen-1")
    assert it.server.token not in it.page.url


def test_token_is_removed_from_address_without_cookie(page: Page, tab: Callable[..., Tab]) -> None:
    it = tab()
    it.open()
    assert page.token not in it.page.url
    assert it.page.context.cookies() == []
    assert page.token not in str(it.page.evaluate("JSON.stringify(localStorage)"))


def test_policy_blocks_injected_script(page: Page, tab: Callable[..., Tab]) -> None:
    it = tab(noisy=True)
    it.open()
    it.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.owned = 1'}))"
    )
    it.page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.owned = 1\">')")
    time.sleep(0.2)
    assert it.page.evaluate("window.owned") is None
