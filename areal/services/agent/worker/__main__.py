"""``python -m areal.services.agent.worker``: the worker process of an agent service."""

from __future__ import annotations

import sys

from areal.services.agent.worker.agents import check_config, import_agent, use_import_path
from areal.services.agent.worker.app import agent_worker, restart, restart_wanted
from areal.services.http.process import exit_on_failure, read_config, serve_options
from areal.services.http.serve import run_service
from areal.wire.processes import AgentWorkerConfig
from areal.wire.stage import report_stage


def main() -> None:
    config = read_config(AgentWorkerConfig, "areal-agent-worker")
    check_config(config)
    use_import_path(config.import_path)
    options = serve_options(config)
    if config.agent:
        report_stage(f"importing the agent {config.agent}")
    found = import_agent(config.agent) if config.agent else None
    run_service(lambda: agent_worker(config, options, found), options)
    if restart_wanted.is_set():
        restart()


if __name__ == "__main__":
    sys.exit(exit_on_failure(main))
