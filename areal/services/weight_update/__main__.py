"""``python -m areal.services.weight_update``"""

from __future__ import annotations

import sys

from areal.services.http.serve import serve_main
from areal.services.weight_update.app import weight_update_gateway
from areal.wire.processes import WeightUpdateConfig

if __name__ == "__main__":
    sys.exit(serve_main(WeightUpdateConfig, "areal-weight-update", weight_update_gateway))
