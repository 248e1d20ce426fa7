"""Agents of the contract: what they get, what they emit, what they return."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest

from tests.services.agent.worker.conftest import Events, StartWorker, answer, run, start_agent
from tests.services.processes import TERM, Process, Processes, wait_until

CONTRACT = """
    import asyncio, os
    from areal.api.agent import AgentResponse, StreamResponse

    async def ticks():
        for number in range(3):
            yield b"tick %d;" % number

    def tell(text):
        print(text, file=open(os.environ["TOLD"], "a") if "TOLD" in os.environ else None, flush=True)

    class Agent:
        def __init__(self, greeting="hello"):
            self.greeting = greeting

        async def run(self, request, *, emitter):
            return await getattr(self, request.message)(request, emitter)

        async def seen(self, request, emitter):
            about = {"key": request.session_key, "run": request.run_id, "history": request.history}
            return AgentResponse(self.greeting, {**about, "mode": request.queue_mode, "metadata": request.metadata})

        async def events(self, request, emitter):
            await emitter.emit_delta("first ")
            await emitter.emit_tool_call("search", {"q": "a"})
            await emitter.emit_tool_call("search", '{"q": "b"}')
            await emitter.emit_tool_call("look", "", "call-look")
            await emitter.emit_tool_result("search", "of a")
            await emitter.emit_tool_result("look", {"seen": True})
            await emitter.emit_tool_result("search", "of b")
            await emitter.emit_delta("second")

        async def mistaken(self, request, emitter):
            await emitter.emit_tool_call("search", '{"q": ', "call-1")
            await emitter.emit_tool_result("search", "the arguments are no JSON", "call-1")

        async def wait(self, request, emitter):
            await emitter.emit_delta("waiting")
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)
                tell(f"cancelled {request.run_id}")

        async def stream(self, request, emitter):
            return StreamResponse(201, {"X-Mine": "yes"}, ticks())

        async def close_session(self, key):
            if key == "bad":
                raise ValueError("cannot close")
            tell(f"closed {key!r}")

        async def close_all_sessions(self):
            tell("closed all")
"""


@pytest.fixture(scope="module")
def worker(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Process:
    kwargs = '{"greeting": "hey"}'
    return start_agent(module_processes, tmp_path_factory.mktemp("agent"), CONTRACT, "--kwargs", kwargs)


def test_run_passes_whole_request_to_agent(worker: Process) -> None:
    history = [{"role": "user", "content": "before"}]
    metadata = {"task": 3, "areal_inference": {"base_url": "http://x", "api_key": "k", "model": "m"}}
    last = answer(worker, "seen", history=history, metadata=metadata, session_key="a/b ü", queue_mode="followup")
    assert last["type"] == "complete" and last["summary"] == "hey"
    expected = {"key": "a/b ü", "run": "run-1", "history": history, "mode": "followup", "metadata": metadata}
    assert last["metadata"] == expected


def test_run_emits_events_in_order_with_matching_ids(worker: Process) -> None:
    *events, last = run(worker, "events")
    kinds = [event["type"] for event in events]
    assert kinds == ["delta", *["tool_call"] * 3, *["tool_result"] * 3, "delta"]
    first, second, look = events[1:4]
    assert [json.loads(each["arguments"]) for each in (first, second, look)] == [{"q": "a"}, {"q": "b"}, {}]
    assert len({first["id"], second["id"], look["id"]}) == 3 and look["id"] == "call-look"
    assert first["content"] == "first " and "content" not in second  # text beside a call is in its message
    assert [(event["id"], event["result"]) for event in events[4:7]] == [
        (first["id"], "of a"),
        (look["id"], '{"seen": true}'),
        (second["id"], "of b"),
    ]
    assert last == {"type": "complete", "summary": "second", "metadata": {}}


def test_non_json_tool_arguments_are_passed_on(worker: Process) -> None:
    call, result, last = run(worker, "mistaken")
    assert (call["id"], call["arguments"]) == ("call-1", '{"q": ')
    assert (result["id"], last["type"]) == ("call-1", "complete")


def test_run_streams_events_and_disconnect_cancels(worker: Process) -> None:
    events = Events(worker, "wait")
    assert events.next() == {"type": "delta", "text": "waiting"}
    assert worker.call("GET", "/ready").json()["turns"] == 1
    events.leave()
    worker.wait_log("cancelled run-1")
    wait_until(lambda: worker.call("GET", "/ready").json()["turns"] == 0)
    assert 'areal_agent_turns_total{outcome="cancelled"} 1.0' in worker.call("GET", "/metrics").body.decode()


def test_run_passes_raw_agent_stream_on(worker: Process) -> None:
    events = run(worker, "stream")
    assert events[0] == {"type": "response", "status": 201, "headers": {"X-Mine": "yes"}}
    assert b"".join(base64.b64decode(event["data"]) for event in events[1:-1]) == b"tick 0;tick 1;tick 2;"
    assert events[-1] == {"type": "complete", "summary": "", "metadata": {}}


@pytest.mark.parametrize("key", ["a", "a%2Fb", "..", "%C3%BC"])
def test_close_session_notifies_agent(worker: Process, key: str) -> None:
    assert worker.call("POST", f"/session/{quote(unquote(key), safe='')}/close").status == 200
    worker.wait_log("closed " + repr(unquote(key)))


def test_raising_close_session_is_an_error(worker: Process) -> None:
    refused = worker.call("POST", "/session/bad/close")
    assert refused.status == 500 and refused.json()["error"]["code"] == "agent_failed"
    assert "ValueError: cannot close (my_agent.py:" in refused.json()["error"]["message"]


def test_sigterm_ends_turns_before_closing_sessions(start_worker: StartWorker, tmp_path: Path) -> None:
    reported = tmp_path / "reported"
    worker = start_worker(CONTRACT, "--drain-timeout", "0.5", env={"TOLD": str(reported)})
    events = Events(worker, "wait")
    events.next()
    worker.signal(TERM)
    assert worker.wait() == 0
    assert reported.read_text() == "cancelled run-1\nclosed all\n"


@pytest.mark.parametrize(
    ("change", "param"),
    [({"run_id": None}, "run_id"), ({"session_key": "a\n"}, "session_key"), ({"queue_mode": "x"}, "queue_mode")],
)
def test_run_a_bad_request_is_refused_by_name(worker: Process, change: dict[str, Any], param: str) -> None:
    body = {"message": "seen", "session_key": "s", "run_id": "r", **change}
    refused = worker.call("POST", "/run", body)
    assert refused.status == 400 and refused.json()["error"]["param"] == param


FORMS = {
    "async def Agent(message): return message.upper()": "HELLO",
    "def Agent(message): return message.upper()": "HELLO",
    "async def Agent(request): return request.message + '!'": "hello!",
    "async def Agent(message, history, session_key, run_id): return f'{history} {session_key} {run_id}'": "[] s run-1",
    "async def Agent(message, *, emitter): await emitter.emit_delta(message * 2)": "hellohello",
    "def Agent(message, emitter): emitter.emit_delta(message * 2)": "hellohello",
    "def Agent(message, base_url=None, model=None): return f'{base_url} {model}'": "http://x default",
    "class Agent:\n  def run(self, request, *, emitter): emitter.emit_delta(request.message)": "hello",
    "class Made:\n  async def run(self, request, *, emitter): return request.message\nAgent = Made()": "hello",
    "class Agent:\n  async def __call__(self, message): return message": "hello",
    "def Agent(message):\n  async def later(): return message\n  return later()": "hello",
    "import functools\ndef f(message, end): return message + end\nAgent = functools.partial(f, end='!')": "hello!",
}


@pytest.mark.parametrize("code", FORMS)
def test_every_agent_form_answers(start_worker: StartWorker, code: str) -> None:
    last = answer(start_worker(code), metadata={"areal_inference": {"base_url": "http://x", "api_key": "k"}})
    assert last == {"type": "complete", "summary": FORMS[code], "metadata": {}}


def test_function_receives_kwargs(start_worker: StartWorker) -> None:
    code = "async def Agent(message, times): return message * times"
    assert answer(start_worker(code, "--kwargs", '{"times": 2}'))["summary"] == "hellohello"


@pytest.fixture(scope="module")
def workflow(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Process:
    return start_agent(module_processes, tmp_path_factory.mktemp("workflow"), WORKFLOW)


WORKFLOW = """
    class Agent:
        async def run(self, data, **extra):
            if data.get("reward") is not None:
                return data["reward"]
            return str({**data, **{name: value for name, value in extra.items() if name != "http_client"}})
"""


def test_workflow_receives_rollout_arguments(workflow: Process) -> None:
    history = [{"role": "user", "content": "a"}]
    access = {"base_url": "http://x", "api_key": "k", "model": "m"}
    last = answer(workflow, history=history, metadata={"answer": "4", "areal_inference": access})
    assert eval(last["summary"]) == {
        "messages": [*history, {"role": "user", "content": "hello"}],
        "answer": "4",
        **access,
    }


@pytest.mark.parametrize(("reward", "kept"), [(1, 1.0), (0.5, 0.5), ({"chatcmpl-1": 1}, {"chatcmpl-1": 1.0})], ids=str)
def test_workflow_reward_becomes_metadata(workflow: Process, reward: object, kept: object) -> None:
    last = answer(workflow, metadata={"reward": reward})
    assert last == {"type": "complete", "summary": "", "metadata": {"reward": kept}}


def test_ready_and_metrics_describe_agent(worker: Process) -> None:
    ready = worker.call("GET", "/ready").json()
    assert ready["component"] == "worker" and ready["agent"].endswith("my_agent.py:Agent") and ready["form"] == "Agent"
    answer(worker, "seen")
    text = worker.call("GET", "/metrics").body.decode()
    assert 'areal_agent_turns_total{outcome="complete"}' in text and "areal_agent_turn_seconds_count" in text
