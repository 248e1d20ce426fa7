"""``python -m areal.services.weight_update``"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from areal.services.web.client import HttpClient
from areal.services.web.options import add_serve_arguments, exit_on_failure, serve_options
from areal.services.web.serve import run_service, serve
from areal.services.web.service import Service
from areal.services.weight_update.app import WeightUpdateRoutes
from areal.services.weight_update.discovery import discoverable
from areal.services.weight_update.metadata import Metadata
from areal.services.weight_update.pairs import Pairs
from areal.services.weight_update.peers import Peers
from areal.services.weight_update.updating import Updater


def main() -> None:
    parser = argparse.ArgumentParser(prog="areal-weight-update")
    add_serve_arguments(parser, port=7080)
    parser.set_defaults(drain_timeout=60.0)
    parser.add_argument("--discovery-file", type=Path, help="written with our address once we listen, removed at exit")
    args = parser.parse_args()
    options = serve_options(args)

    async def run() -> None:
        service = Service("weight-update", key=options.key, loopback=options.loopback)
        async with HttpClient() as http:
            peers = Peers(http, options.key.bearer() if options.key else {})
            WeightUpdateRoutes(Pairs(), Updater(peers, lambda: service.address), Metadata()).add_to(service)
            with discoverable(args.discovery_file, options, args.admin_key_file):
                await serve(service, options)

    run_service(run, options.log_level)


if __name__ == "__main__":
    sys.exit(exit_on_failure(main))
