"""``python -m areal.services.agent.gateway``: the gateway process of an agent service."""

from __future__ import annotations

import sys

from areal.services.agent.gateway.app import agent_gateway
from areal.services.http.process import exit_on_failure, read_config, serve_options
from areal.services.http.serve import run_service
from areal.wire.processes import AgentGatewayConfig


def main() -> None:
    config = read_config(AgentGatewayConfig, "areal-agent-gateway")
    # Shared: a successor listens on the port before this gateway hands over.
    options = serve_options(config, reuse_port=True)
    run_service(lambda: agent_gateway(config, options), options)


if __name__ == "__main__":
    sys.exit(exit_on_failure(main))
