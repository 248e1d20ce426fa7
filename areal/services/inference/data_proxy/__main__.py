"""``python -m areal.services.inference.data_proxy``"""

from __future__ import annotations

import sys

from areal.services.http.serve import serve_main
from areal.services.inference.data_proxy.process import data_proxy
from areal.wire.processes import DataProxyConfig

if __name__ == "__main__":
    sys.exit(serve_main(DataProxyConfig, "areal-inference-data-proxy", data_proxy))
