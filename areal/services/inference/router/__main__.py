"""``python -m areal.services.inference.router``"""

from __future__ import annotations

import sys

from areal.services.http.serve import serve_main
from areal.services.inference.router.app import router
from areal.wire.processes import RouterConfig

if __name__ == "__main__":
    sys.exit(serve_main(RouterConfig, "areal-inference-router", router))
