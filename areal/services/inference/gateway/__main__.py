"""``python -m areal.services.inference.gateway``: one relay process, or a supervisor and ``relays`` of them."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

from areal.services.http.process import exit_on_failure, read_config, serve_options
from areal.services.inference.gateway.supervisor import MULTIPROC_VARIABLE, shared_folder, supervise
from areal.wire.processes import GatewayConfig


def main() -> None:
    config = read_config(GatewayConfig, "areal-inference-gateway")
    # The port is always shared: with other relays, and with a successor during a handover.
    options = serve_options(config, reuse_port=True)
    if config.relays > 1 and config.relay_index is None:
        supervise(config.relays, options, sys.argv[1:])
        return
    from areal.services.http.serve import run_service  # the supervisor itself needs no web server
    from areal.services.inference.gateway.app import gateway

    metrics = os.environ.get(MULTIPROC_VARIABLE)
    with shared_folder(Path(metrics)) if metrics else nullcontext():
        run_service(lambda: gateway(config, options), options)


if __name__ == "__main__":
    sys.exit(exit_on_failure(main))
