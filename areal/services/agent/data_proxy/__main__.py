"""``python -m areal.services.agent.data_proxy``: the data proxy process of an agent service."""

from __future__ import annotations

import sys

from areal.services.agent.data_proxy.process import agent_data_proxy
from areal.services.http.process import exit_on_failure, read_config, serve_options
from areal.services.http.serve import run_service
from areal.wire.processes import AgentDataProxyConfig


def main() -> None:
    config = read_config(AgentDataProxyConfig, "areal-agent-data-proxy")
    options = serve_options(config)
    run_service(lambda: agent_data_proxy(config, options), options)


if __name__ == "__main__":
    sys.exit(exit_on_failure(main))
