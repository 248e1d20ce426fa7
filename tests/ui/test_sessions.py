"""The view of sessions and the chat, over the processes of an agent service and a recorder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from areal.cli.remote_view import documents
from areal.client.gateway import GatewayClient
from areal.errors import ArealError, NotFound, UsageFault
from areal.reconcilers.home_view import HomeView
from areal.state.home import Home
from areal.state.records import StoredObject
from areal.ui.views import RemoteGateway, ViewContext, chat, expect_reader, sessions
from areal.ui.views import home as objects
from areal.ui.views.action import Actions, plan_of
from tests.services.agent.whole import WholeService, start_agents
from tests.services.processes import Process, Processes
from tests.services.tokenizer_folder import write_tokenizer
from tests.trajectories.test_steps import sample
from tests.ui.conftest import Page, eventually

Record = Callable[..., StoredObject]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WholeService, Process]]:
    """An agent service, and the recorder of its model calls."""
    folder = tmp_path_factory.mktemp("served")
    processes = Processes(folder)
    try:
        tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
        recorder = processes.data_proxy(processes.engine(tokenizer), tokenizer, "--state-dir", str(folder / "recorded"))
        yield start_agents(processes, folder, recorder), recorder
    finally:
        processes.stop()


@pytest.fixture
def agents(
    served: tuple[WholeService, Process], home: Home, record: Record, monkeypatch: pytest.MonkeyPatch
) -> WholeService:
    """The services as objects of the home."""
    service, recorder = served
    record("InferenceService", "default", {})
    record("AgentService", "helper", {"agent": "x:Y", "inference": {"service": "default"}})
    home.credentials.mkdir(parents=True, exist_ok=True)
    for name in ("default", "agentservice.helper"):
        (home.credentials / name).write_text(service.key)
    urls = {"AgentService/helper": service.url, "InferenceService/default": recorder.url}
    monkeypatch.setattr(HomeView, "address", lambda self, ref: urls.get(str(ref), ""))
    return service


def say(service: WholeService, session: str, *messages: str) -> None:
    client = GatewayClient(service.url, service.key, 60.0)
    for message in messages:
        status, found = client.ask("POST", "/v1/responses", {"input": message, "user": session})
        assert status == 200, found


def ask(home: Home, session: str = "", **query: str) -> dict[str, Any]:
    given = {"kind": "agentservice", "name": "helper", **({"session": session} if session else {}), **query}
    return sessions.read(ViewContext(home, given))


def test_session_shows_its_turns_its_calls_and_its_rewards(agents: WholeService, home: Home) -> None:
    say(agents, "one", "hello there", "model")
    view = ViewContext(home, actions=Actions())
    asked = {"verb": "reward", "kind": "agentservice", "name": "helper", "session": "one", "reward": 0.5}
    plan = plan_of(view, asked)
    assert view.actions is not None and plan.confirm == "one"
    action = view.actions.start(plan, plan.digest, "one")
    eventually(lambda: action.ended)
    assert action.error is None and "ready to be exported" in action.outcome[0]
    found = ask(home, "one")
    assert [turn["messages"][0]["text"] for turn in found["turns"]] == ["hello there", "model"]
    assert found["turns"][0]["messages"][-1]["role"] == "assistant" and found["turns"][0]["seconds"] >= 0
    assert [call["reward"] for call in found["calls"]] == [0.5] and found["calls"][0]["tokens"] > 0
    assert found["session"]["recorded"] and found["recordedBy"] == "default" and found["unseen"] == ""
    tokens = ask(home, found["session"]["recorded"], kind="inferenceservice", name="default", tokens="1")
    (episode,) = tokens["episodes"]
    assert episode["reward"] == 0.5 and sum(map(int, episode["turns"][0]["mask"])) == found["calls"][0]["tokens"]


def test_long_session_is_paged_and_filtered(agents: WholeService, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_TURNS", 3)
    monkeypatch.setattr(sessions, "_TEXT", 4)
    say(agents, "long", *[f"number {number}" for number in range(8)])
    newest = ask(home, "long")
    assert [turn["number"] for turn in newest["turns"]] == [6, 7, 8] and newest["older"] and newest["count"] == 8
    older = ask(home, "long", before="6")
    assert [turn["number"] for turn in older["turns"]] == [3, 4, 5]
    first = ask(home, "long", before="3")
    assert [turn["number"] for turn in first["turns"]] == [1, 2] and not first["older"]
    message = first["turns"][0]["messages"][0]
    assert message["text"] == "numb" and message["cut"] == len("number 0") - 4
    monkeypatch.setattr(sessions, "_TEXT", 100)
    assert [turn["number"] for turn in ask(home, "long", q="NUMBER 3")["turns"]] == [4]
    with pytest.raises(UsageFault):
        ask(home, "long", before="x")


def test_sessions_are_paged_and_filter_covers_all_pages(
    agents: WholeService, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_ROWS", 4)
    client = GatewayClient(agents.url, agents.key)
    for number in range(10):
        assert client.ask("POST", "/sessions", {"session_key": f"page-{number}"})[0] < 300
    seen: list[str] = []
    after = ""
    while after is not None:
        page = ask(home, q="page-", after=after)
        seen += [row["id"] for row in page["sessions"]]
        after = page["next"]
    assert seen == [f"page-{number}" for number in range(10)]
    assert [row["id"] for row in ask(home, q="page-7")["sessions"]] == ["page-7"]


def test_trained_sample_of_a_session_is_found_in_the_jobs_files(agents: WholeService, home: Home) -> None:
    say(agents, "taught", "model")
    recorded = ask(home, "taught")["session"]["recorded"]
    folder = home.jobs / "learn" / "trajectories"
    folder.mkdir(parents=True)
    document = sample("g", 1, 1.0).document()
    document["interactions"][0]["session_id"] = recorded
    other = sample("g", 0, 0.0).document()
    lines = "".join(json.dumps(each) + "\n" for each in (other, document)) + f'{{"torn": "{recorded}'
    (folder / "trajectories-7.jsonl").write_text(lines)
    found = ask(home, "taught", trained="1")["trained"]
    assert found["whole"] and [(each["job"], each["step"], each["sample"]) for each in found["samples"]] == [
        ("learn", 7, document["sample"])
    ]
    assert "trained" not in ask(home, "taught")


def test_ending_session_is_planned_and_refused_after_new_turn(agents: WholeService, home: Home) -> None:
    say(agents, "brief", "hello")
    view = ViewContext(home, actions=Actions())
    assert view.actions is not None
    asked = {"verb": "end-session", "kind": "agentservice", "name": "helper", "session": "brief"}
    plan = plan_of(view, asked)
    say(agents, "brief", "again")
    with_old = view.actions.start(plan, plan.digest, "brief")
    eventually(lambda: with_old.ended)
    assert with_old.error is not None and "has changed" in with_old.error["message"]
    plan = plan_of(view, asked)
    done = view.actions.start(plan, plan.digest, "brief")
    eventually(lambda: done.ended)
    assert done.error is None
    with pytest.raises(NotFound, match="brief"):
        ask(home, "brief")


def test_dead_gateway_is_named_with_its_processes(
    agents: WholeService, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HomeView, "address", lambda self, ref: "http://127.0.0.1:1")
    with pytest.raises(ArealError, match=r"127\.0\.0\.1:1.*refused.*; it is ") as raised:
        ask(home)
    assert raised.value.hint == "areal describe AgentService/helper"
    monkeypatch.setattr(HomeView, "address", lambda self, ref: "")
    with pytest.raises(NotFound, match="does not run; it is"):
        ask(home)


def remote(url: str, key: str, home: Home, query: dict[str, str] | None = None, body: Any = None) -> ViewContext:
    return ViewContext(home, query or {}, body, RemoteGateway(GatewayClient(url, key), documents))


def test_remote_gateway_shows_sessions_and_refuses_file_views(served: tuple[WholeService, Process], home: Home) -> None:
    service, recorder = served
    say(service, "far", "model")
    (agent,) = sessions.read(remote(service.url, service.key, home))["services"]
    assert agent["kind"] == "AgentService"
    query = {"kind": agent["kind"], "name": agent["name"]}
    listed = sessions.read(remote(service.url, service.key, home, query))["sessions"]
    assert "far" in [row["id"] for row in listed]
    view = remote(recorder.url, service.key, home)
    assert sessions.read(view)["services"][0]["kind"] == "InferenceService"
    assert {"service": "remote", "model": "tiny", "version": None} in chat.models(view)["models"]
    assert objects.read(view)["objects"][0]["kind"] == "InferenceService"
    found = objects.about(view)
    assert found["gateway"] == recorder.url and "weights" in found["views"] and "job" not in found["views"]
    for name in found["views"]:
        assert len(expect_reader(name, view).marks(view)) <= 2
    for name in ("job", "logs", "plan", "top", "object", "step", "compare"):
        with pytest.raises(UsageFault, match="reads files"):
            expect_reader(name, view)
    with pytest.raises(UsageFault, match="cannot restart"):
        plan_of(view, {"verb": "restart", "kind": "inferenceservice", "name": "remote"})


def body(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hello"}]
    return {"service": "default", "model": "tiny", "messages": messages, "maxTokens": 8, **more}


def test_chat_is_streamed_with_logprobs_and_versions(agents: WholeService, home: Home) -> None:
    parts = list(chat.answer(ViewContext(home, {}, body())))
    assert len(parts) >= 2 and parts[-1]["finishReason"] and parts[-1]["session"] is None
    tokens = [token for part in parts[:-1] for token in part["tokens"]]
    assert len(tokens) == parts[-1]["usage"]["completion_tokens"]
    assert all(token["logprob"] <= 0 and isinstance(token["version"], int) for token in tokens)
    assert agents.key not in json.dumps(parts)


def test_kept_answers_are_turns_of_rewardable_session(agents: WholeService, home: Home) -> None:
    with pytest.raises(UsageFault, match="allow-actions"):
        next(chat.answer(ViewContext(home, {}, body(keep=True))))
    actions = Actions()
    first = list(chat.answer(ViewContext(home, {}, body(keep=True), actions=actions)))
    session = first[-1]["session"]
    again = list(chat.answer(ViewContext(home, {}, body(keep=True, session=session), actions=actions)))
    assert again[-1]["session"] == session
    with pytest.raises(NotFound, match="none of this page's"):
        next(chat.answer(ViewContext(home, {}, body(keep=True, session="other"), actions=actions)))
    view = ViewContext(home, actions=actions)
    plan = plan_of(
        view, {"verb": "reward", "kind": "inferenceservice", "name": "default", "session": session, "reward": 1}
    )
    action = actions.start(plan, plan.digest, plan.confirm)
    eventually(lambda: action.ended)
    assert action.error is None, action.error
    found = ask(home, session, kind="inferenceservice", name="default")
    assert (
        found["session"]["turns"] == 2 and found["session"]["reward"] == 1.0 and found["session"]["task"] == "areal-ui"
    )


def test_remote_gateway_page_lists_its_sessions(
    served: tuple[WholeService, Process], serve: Callable[..., Page]
) -> None:
    service, _ = served
    page = serve("--gateway", service.url, "--api-key-file", str(service.processes.key_file))
    found = page.read("sessions", kind="agentservice", name="remote")
    assert "sessions" in found and service.key not in json.dumps(found)
    status, error = page.failure("job", name="learn")
    assert status == 400 and service.url in error["message"]


def test_chunked_answer_is_one_line_each_and_refusal_has_status(
    served: tuple[WholeService, Process], serve: Callable[..., Page]
) -> None:
    service, recorder = served
    page = serve("--gateway", recorder.url, "--api-key-file", str(service.processes.key_file))
    response, text = page.ask("/api/chat", method="POST", body=json.dumps(body(service="remote")).encode())
    assert response.status == 200 and response.headers["Content-Type"] == "application/x-ndjson"
    parts = [json.loads(line) for line in text.splitlines()]
    assert len(parts) >= 2 and parts[-1]["finishReason"]
    for wrong, status in (({"temperature": 9}, 400), ({"model": "other"}, 404), ({"keep": True}, 400)):
        sent = json.dumps(body(service="remote", **wrong)).encode()
        response, text = page.ask("/api/chat", method="POST", body=sent)
        assert response.status == status and json.loads(text)["error"]["message"], wrong
    response, text = page.ask("/api/chat")
    assert json.loads(text)["keeps"] is False
