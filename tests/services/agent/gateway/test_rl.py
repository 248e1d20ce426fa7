"""Sessions whose model calls are recorded: reward and export through the gateway, the session's key nowhere."""

from __future__ import annotations

import json
from pathlib import Path

from tests.services.agent.gateway.conftest import NAME, AgentService
from tests.services.processes import Processes


def test_reward_and_export_of_what_the_agent_asked_its_model(
    processes: Processes, tmp_path: Path, tokenizer: Path
) -> None:
    engine = processes.engine(tokenizer)
    proxy = processes.data_proxy(engine, tokenizer, "--state-dir", str(tmp_path / "recorded"))
    models = processes.router()
    processes.register(models, proxy)
    inference = processes.gateway(models)
    access = {"addr": inference.url, "admin_key_file": str(processes.key_file), "model": "tiny"}
    router = processes.router()
    service = AgentService(
        processes, router, processes.service("agent.gateway", "--router-url", router.url, "--service", NAME)
    )
    service.add_pair(tmp_path / "state", "summarise", "--inference", json.dumps(access))
    service.register()

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
