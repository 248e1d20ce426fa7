"""``python -m areal.services.inference.router``"""

from __future__ import annotations

import sys

from areal.services.http.process import exit_on_failure, read_config, serve_options
from areal.services.http.serve import run_service
from areal.services.inference.router.app import router
from areal.wire.processes import RouterConfig


def main() -> None:
    config = read_config(RouterConfig, "areal-inference-router")
    options = serve_options(config)
    run_service(lambda: router(config, options), options)


if __name__ == "__main__":
    sys.exit(exit_on_failure(main))
