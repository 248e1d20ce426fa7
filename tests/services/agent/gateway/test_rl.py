"""Sessions whose model calls are recorded: reward and export through the gateway, the session's key nowhere."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.services.agent.gateway.conftest import NAME, AgentService
from tests.services.inference.data_proxy.dialects.talks import TEMPLATE, TWO_CALLS
from tests.services.processes import Answer, Process, Processes, engine_calls, script
from tests.services.tokenizer_folder import write_tokenizer


def start(processes: Processes, folder: Path, tokenizer: Path, agent: str, *flags: str) -> tuple[AgentService, Process]:
    """An agent service whose model calls are recorded, and the model's engine."""
    engine = processes.engine(tokenizer)
    inference = processes.data_proxy(engine, tokenizer, "--state-dir", str(folder / "recorded"), *flags)
    access = {"addr": inference.url, "admin_key_file": str(processes.key_file), "model": "tiny"}
    router = processes.router()
    service = AgentService(
        processes, router, processes.service("agent.gateway", "--router-url", router.url, "--service", NAME)
    )
    service.add_pair(folder / "state", agent, "--inference", json.dumps(access))
    service.register()
    return service, engine


@pytest.mark.extended
@pytest.mark.parametrize("agent", ["using_tools", "sdk_agent"])
def test_tool_conversation_rows_extend_one_trajectory(processes: Processes, tmp_path: Path, agent: str) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template=TEMPLATE)
    service, engine = start(processes, tmp_path, tokenizer, agent, "--tool-call-parser", "hermes")
    for message in ("How is Rome?", "And now?"):
        replies = [["<tool_response>", "It is sunny."], [message, f"I look.\n{TWO_CALLS}"]]
        script(engine, replies=replies)
        answer = service.respond(message, "learner")
        assert (answer.status, answer.json()["output"][-1]["content"][0]["text"]) == (200, "It is sunny."), answer.body
    calls = engine_calls(engine)
    assert len(calls) == 4
    for before, after in pairwise(calls):
        known = before["body"]["input_ids"] + before["generated"]
        assert after["body"]["input_ids"][: len(known)] == known
    assert service.call("POST", "/sessions/learner/reward", {"reward": 1}).status == 200
    (row,) = service.call("POST", "/sessions/learner/export", {"style": "concat"}).json()["traj"]["input_ids"]
    assert row[: len(calls[-1]["body"]["input_ids"])] == calls[-1]["body"]["input_ids"]


def test_reward_and_export_cover_agent_model_calls(processes: Processes, tmp_path: Path, tokenizer: Path) -> None:
    service, _ = start(processes, tmp_path, tokenizer, "summarise")
    turns = [service.respond(message, "learner") for message in ("Hello", "Again")]
    assert [turn.status for turn in turns] == [200, 200]
    rewarded = service.call("POST", "/sessions/learner/reward", {"reward": 0.25})
    assert (rewarded.status, rewarded.json()["trajectory_ready"]) == (200, True)
    exported = service.call("POST", "/sessions/learner/export", {"style": "concat"})
    assert exported.status == 200, exported.body
    assert exported.json()["traj"]["rewards"][-1] == 0.25
    shown = service.call("GET", "/sessions/learner")
    assert shown.json()["inference_session_id"]
    started = service.call("POST", "/sessions", {"session_key": "another"})
    seen = b"".join((*(turn.body for turn in turns), rewarded.body, shown.body, started.body))
    assert b"sk-" not in seen


@pytest.mark.extended
def test_error_of_a_reward_or_export_has_the_replys_request_id(
    processes: Processes, tmp_path: Path, tokenizer: Path
) -> None:
    service, _ = start(processes, tmp_path, tokenizer, "summarise")
    service.call("POST", "/sessions", {"session_key": "learner"})
    for verb, body in (("reward", {"reward": 1.0}), ("export", {}), ("export", {"trajectory_id": 7})):
        answer = service.call("POST", f"/sessions/learner/{verb}", body)
        assert answer.status >= 400
        assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"], (verb, answer.body)


@pytest.mark.extended
def test_repeated_reward_is_not_given_to_next_trajectory(processes: Processes, tmp_path: Path, tokenizer: Path) -> None:
    service, _ = start(processes, tmp_path, tokenizer, "summarise")

    def post(verb: str, body: object, key: str) -> Answer:
        return service.call("POST", f"/sessions/learner/{verb}", body, headers={"Idempotency-Key": key})

    service.respond("Hello", "learner")
    first = post("reward", {"reward": 1.0}, "once")
    service.respond("Again", "learner")
    assert post("reward", {"reward": 1.0}, "once").json() == first.json()
    reused = post("reward", {"reward": 0.5}, "once")
    assert (reused.status, reused.json()["error"]["code"]) == (422, "idempotency_key_reused")
    exported = post("export", {}, "rows").json()
    assert [row["trajectory_id"] for row in exported["rows"]] == [0]
    assert service.call("POST", "/sessions/learner/reward", {"reward": 0.25}).json()["trajectory_id"] == 1
    taken = service.call("POST", "/sessions/learner/export", {}).json()
    assert ([row["trajectory_id"] for row in taken["rows"]], taken["removed"]) == ([1], True)
    service.respond("In an RL session that began since", "learner")
    assert post("export", {}, "rows").json()["export_id"] == exported["export_id"], "the retry of a lost answer"
    assert post("reward", {"reward": 1.0}, "once").json() == first.json(), "its trajectory was exported since"
    released = service.call("POST", "/sessions/learner/export/ack", {"export_id": taken["export_id"]})
    assert released.json()["released"] is True
    assert post("reward", {"reward": 1.0}, "once").json() == first.json(), "... and the export acknowledged"
    other = post("reward", {"reward": 0.5}, "once")
    assert (other.status, other.json()["error"]["code"]) == (422, "idempotency_key_reused")


@pytest.mark.parametrize(("method", "path"), [("POST", "/sessions"), ("DELETE", "/sessions/learner/turn")])
def test_idempotency_key_is_refused_where_unsupported(service: AgentService, method: str, path: str) -> None:
    body: dict[str, object] | None = {} if method == "POST" else None
    refused = service.call(method, path, body, headers={"Idempotency-Key": "once"})
    assert (refused.status, refused.json()["error"]["code"]) == (400, "idempotency_key_unsupported")


@pytest.mark.extended
def test_session_without_an_inference_service_is_refused_soon(processes: Processes, tmp_path: Path) -> None:
    router = processes.router()
    service = AgentService(
        processes, router, processes.service("agent.gateway", "--router-url", router.url, "--service", NAME)
    )
    away = {"addr": "http://127.0.0.1:9", "admin_key_file": str(processes.key_file), "model": "tiny"}
    service.add_pair(tmp_path / "state", "TalkingAgent", "--inference", json.dumps(away))
    service.register()
    began = time.monotonic()
    for refused in (service.call("POST", "/sessions", {}), service.respond("hello", "mine")):
        assert (refused.status, refused.json()["error"]["code"]) == (503, "inference_unavailable")
        assert "the inference service at http://127.0.0.1:9 does not answer" in refused.json()["error"]["message"]
    assert time.monotonic() - began < 15


def test_prometheus_targets_list_every_process(service: AgentService) -> None:
    found = service.call("GET", "/http_sd").json()
    addresses = {each["targets"][0]: each["labels"]["job"] for each in found}
    jobs = {"agent-gateway": [service.gateway], "data-proxy": service.proxies, "agent-worker": service.workers}
    for job, processes in jobs.items():
        for process in processes:
            assert addresses[f"127.0.0.1:{process.port}"] == f"areal-{job}"
