"""``python -m areal.services.inference.data_proxy``"""

from __future__ import annotations

import sys

from areal.services.http.process import exit_on_failure, read_config
from areal.services.inference.data_proxy.process import run_data_proxy
from areal.wire.processes import DataProxyConfig


def main() -> None:
    run_data_proxy(read_config(DataProxyConfig, "areal-inference-data-proxy"))


if __name__ == "__main__":
    sys.exit(exit_on_failure(main))
