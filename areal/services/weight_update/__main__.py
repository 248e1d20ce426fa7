"""``python -m areal.services.weight_update``"""

from __future__ import annotations

import sys

from areal.services.http.process import exit_on_failure, read_config, serve_options
from areal.services.http.serve import run_service
from areal.services.weight_update.app import weight_update_gateway
from areal.wire.processes import WeightUpdateConfig


def main() -> None:
    config = read_config(WeightUpdateConfig, "areal-weight-update")
    options = serve_options(config)
    run_service(lambda: weight_update_gateway(config, options), options)


if __name__ == "__main__":
    sys.exit(exit_on_failure(main))
