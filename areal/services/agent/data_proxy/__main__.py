"""``python -m areal.services.agent.data_proxy``: the data proxy process of an agent service."""

from __future__ import annotations

import sys

from areal.services.agent.data_proxy.app import agent_data_proxy
from areal.services.http.serve import serve_main
from areal.wire.processes import AgentDataProxyConfig

if __name__ == "__main__":
    sys.exit(serve_main(AgentDataProxyConfig, "areal-agent-data-proxy", agent_data_proxy))
