"""Sessions, chat and changes in a browser, over the processes of an agent service."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from areal.client.gateway import GatewayClient
from areal.reconcilers.home_view import HomeView
from areal.state.home import Home
from areal.ui.access import access_of
from areal.ui.server import PageServer
from areal.ui.views import ViewContext, sessions
from areal.ui.views.action import Actions
from tests.services.agent.whole import WholeService
from tests.services.processes import Process
from tests.ui.conftest import Page, eventually
from tests.ui.test_browser import Tab, chromium, judged, tab, violations  # noqa: F401 - fixtures
from tests.ui.test_sessions import agents, remote, say, served  # noqa: F401 - fixtures

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]
Tabs = Callable[..., Tab]


@pytest.fixture
def page(home: Home, agents: WholeService) -> Iterator[Page]:  # noqa: F811
    """A server in this process, whose home has the services, and which may change them."""
    with page_over(ViewContext(home, actions=Actions())) as made:
        yield made


@contextmanager
def page_over(context: ViewContext) -> Iterator[Page]:
    rules = access_of("127.0.0.1", None)
    server = PageServer("127.0.0.1", 0, context, rules)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield Page(cast("subprocess.Popen[str]", None), f"127.0.0.1:{server.server_port}", rules.token)
    server.shutdown()
    server.server_close()


def confirm(it: Tab, key: str, value: str = "") -> None:
    """Carry out the change of ``key`` by the keyboard, with the name that the dialog asks for."""
    it.press(key)
    it.page.wait_for_selector("dialog.action[open]")
    if value:
        it.page.wait_for_selector("dialog input[type=number]:focus")
        it.page.keyboard.type(value)
        it.press("Enter")
    it.page.wait_for_selector("dialog input[type=text]:focus")
    it.page.keyboard.type(it.page.inner_text("dialog b.mono"))
    it.press("Enter")
    it.page.wait_for_selector("dialog >> text=: done")
    it.press("Escape")
    it.page.wait_for_selector("dialog", state="detached")


def test_session_is_rewarded_and_ended_by_keyboard(
    agents: WholeService,  # noqa: F811
    tab: Tabs,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "_TURNS", 3)
    say(agents, "ended", "hello", "weather", "model", "again", "and <b>again</b>")
    it = tab(noisy=True)  # a session that has ended is a failed request
    it.open()
    it.press("g", "s")
    it.at("/sessions")
    it.page.wait_for_selector("tr[aria-current]")
    it.press("j", "Enter")
    it.at("/agents/helper")
    it.page.wait_for_selector("text=ended")
    it.press("/")
    it.page.keyboard.type("ended")
    it.press("Enter", "Enter")
    it.at("/agents/helper/session/ended")
    it.page.wait_for_selector("text=and <b>again</b>")
    it.press("[")
    it.page.wait_for_selector("text=21 degrees")
    assert "weather(" in it.page.inner_text(".call") and "before=3" in it.page.url
    it.press("j")
    assert it.page.evaluate("document.activeElement.getAttribute('aria-label')") == "turn 1"
    it.press("j")
    assert it.page.evaluate("document.activeElement.getAttribute('aria-label')") == "turn 2"
    it.press("]")
    it.page.wait_for_selector("[aria-label='turn 5']")
    confirm(it, "W", "0.5")
    it.page.wait_for_selector("main table >> text=0.5")
    confirm(it, "E")
    it.page.wait_for_selector("text=session ended: ")
    it.press("Escape")
    it.at("/agents/helper")


def test_answer_is_streamed_kept_and_rewarded_by_the_keyboard(
    agents: WholeService,  # noqa: F811
    tab: Tabs,  # noqa: F811
) -> None:
    it = tab()
    it.open("/chat?keep=1&tokens=8&b=default/tiny")
    it.page.wait_for_selector("select")
    it.press("i")
    it.page.keyboard.type("hello")
    it.press("Enter")
    it.page.wait_for_selector(".answers .answer >> nth=1")
    it.page.wait_for_function("() => document.querySelectorAll('.turn a').length === 2")
    assert "version 0" in it.page.inner_text(".answers")
    it.page.locator(".turn a").first.focus()
    it.press("Enter")
    it.page.wait_for_function("() => location.pathname.startsWith('/sessions/default/session/')")
    it.page.wait_for_selector(".t")
    confirm(it, "W", "1")
    it.page.wait_for_selector("main .facts >> text=reward 1")


def test_running_turn_is_shown_until_end_and_empty_answer_named(
    agents: WholeService,  # noqa: F811
    tab: Tabs,  # noqa: F811
) -> None:
    client = GatewayClient(agents.url, agents.key, 60.0)
    asked = {"input": "wait", "user": "busy"}
    turn = threading.Thread(target=client.ask, args=("POST", "/v1/responses", asked), daemon=True)
    turn.start()
    eventually(lambda: client.ask("GET", "/sessions/busy")[0] == 200)
    it = tab()
    it.open("/agents/helper/session/busy")
    it.page.wait_for_selector("[role=status] >> text=turn 1 runs")
    assert client.ask("DELETE", "/sessions/busy/turn")[0] == 200
    turn.join()
    it.page.wait_for_selector("[aria-label='turn 1'] >> text=cancelled")
    it.page.wait_for_selector("text=turn 1 runs", state="detached")
    assert "1 turn " in it.page.inner_text(".head").replace("\n", " ")
    say(agents, "busy", " ")
    it.page.wait_for_selector("[aria-label='turn 2'] >> text=no text")


def test_remote_gateway_objects_link_to_chat_and_sessions(
    served: tuple[WholeService, Process],  # noqa: F811
    home: Home,
    chromium: Any,  # noqa: F811
) -> None:
    service, recorder = served
    tabs = chromium.new_context()
    with page_over(remote(recorder.url, service.key, home)) as far:
        it = Tab(tabs.new_page(), far)
        it.page.on("console", lambda message: it.console.append(message.text))
        it.open("/")
        it.page.click("main tbody >> text=tiny")
        it.page.wait_for_selector("text=default/tiny", state="detached")
        assert it.path == "/chat" and it.page.input_value("select >> nth=0") == "remote/tiny"
        it.page.go_back()
        it.page.click("main tbody >> text=remote")
        it.at("/sessions/remote")
        assert it.page.locator(".alerts").count() == 0 and it.console == []
    tabs.close()


VIEWS = (
    "/sessions",
    "/agents/helper",
    "/agents/helper?q=mine",
    "/agents/helper/session/mine",
    "/agents/helper/session/absent",
    "/sessions/default",
    "/chat?keep=1",
    "/weights",
    "/object/agentservice/helper",
)


@pytest.mark.timeout(600)
def test_session_views_are_accessible_and_do_not_scroll_sideways(
    agents: WholeService,  # noqa: F811
    home: Home,
    tab: Tabs,  # noqa: F811
) -> None:
    say(agents, "mine", "weather", "model", "W" * 400)
    row = sessions.read(ViewContext(home, {"kind": "agentservice", "name": "helper", "session": "mine"}))["session"]
    it = tab(noisy=True)  # a session that is absent is a failed request in the console
    assert violations(it, (*VIEWS, f"/sessions/default/session/{row['recorded']}?colour=version")) == ""
    it.press("E")
    it.page.wait_for_selector("dialog input[type=text]")
    assert judged(it.page) == []


def test_gateway_killed_under_open_page_is_named(
    agents: WholeService,  # noqa: F811
    tab: Tabs,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say(agents, "mine", "hello")
    it = tab(noisy=True)
    it.open("/agents/helper/session/mine")
    it.page.wait_for_selector("text=hello")
    monkeypatch.setattr(HomeView, "address", lambda self, ref: "http://127.0.0.1:1")
    it.page.wait_for_selector(".problem >> text=cannot reach the gateway")
    assert "it is " in it.page.inner_text(".problem") and "hello" in it.page.inner_text("main")
