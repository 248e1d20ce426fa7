"""``python -m areal.services.inference.gateway``: one relay process, or a supervisor and ``--relays`` of them."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path

from areal.services.inference.gateway.options import gateway_parser
from areal.services.inference.gateway.shared_metrics import VARIABLE, held
from areal.services.inference.gateway.supervisor import supervise
from areal.services.web.options import exit_on_failure


def main() -> None:
    args = gateway_parser().parse_args()
    if args.relays > 1 and args.relay_index is None:
        supervise(args, sys.argv[1:])
        return
    from areal.services.inference.gateway.process import run_relay  # the supervisor itself needs no web server

    shared = os.environ.get(VARIABLE)
    with held(Path(shared)) if shared else nullcontext():
        run_relay(args)


if __name__ == "__main__":
    sys.exit(exit_on_failure(main))
