"""``python -m areal.services.agent.gateway``: the gateway process of an agent service."""

from __future__ import annotations

import sys

from areal.services.agent.gateway.app import agent_gateway
from areal.services.http.serve import serve_main
from areal.wire.processes import AgentGatewayConfig

if __name__ == "__main__":
    # Shared: a successor listens on the port before this gateway hands over.
    sys.exit(serve_main(AgentGatewayConfig, "areal-agent-gateway", agent_gateway, reuse_port=True))
