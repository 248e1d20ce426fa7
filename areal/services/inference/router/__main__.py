"""``python -m areal.services.inference.router``"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from areal.services.inference.router.app import RouterRoutes
from areal.services.inference.router.declared_file import DeclaredFile
from areal.services.inference.router.health import Readiness
from areal.services.inference.router.metrics import count_workers
from areal.services.inference.router.prober import Prober, expire_leases
from areal.services.inference.router.registry import Registry
from areal.services.inference.router.session_placing import SessionPlacing
from areal.services.inference.router.table import STRATEGIES
from areal.services.inference.router.watch import Watch
from areal.services.web.client import HttpClient
from areal.services.web.options import add_serve_arguments, exit_on_failure, serve_options
from areal.services.web.serve import run_service, serve
from areal.services.web.service import Service
from areal.services.web.tasks import background


def main() -> None:
    parser = argparse.ArgumentParser(prog="areal-inference-router")
    add_serve_arguments(parser, port=8081)
    parser.set_defaults(drain_timeout=30.0)
    parser.add_argument("--strategy", default="auto", choices=STRATEGIES)
    parser.add_argument(
        "--health-period",
        type=float,
        default=1.0,
        help="seconds between two probes of a worker, where its model does not say",
    )
    parser.add_argument("--state-file", type=Path, help="where what was declared is kept, and data proxies find us")
    args = parser.parse_args()
    options = serve_options(args)

    async def run() -> None:
        service = Service("router", key=options.key, loopback=options.loopback)
        registry = Registry(strategy=args.strategy, readiness=Readiness(period_seconds=args.health_period))
        kept = DeclaredFile(args.state_file, registry)
        kept.read()
        async with HttpClient() as http:
            headers = options.key.bearer() if options.key else {}
            prober = Prober(registry, http, headers)
            placing = SessionPlacing(registry, http, headers)
            count_workers(service.metrics, registry)
            RouterRoutes(registry, prober, Watch(registry, service.lifetime), placing, kept).add_to(service)

            @contextlib.asynccontextmanager
            async def probing() -> AsyncIterator[None]:
                kept.announce(service.address)
                async with (
                    background("worker-probes", prober.run),
                    background("leases", lambda: expire_leases(registry)),
                    background("declared-file", kept.run),
                ):
                    yield

            service.beside(probing)
            await serve(service, options)

    run_service(run, options.log_level)


if __name__ == "__main__":
    sys.exit(exit_on_failure(main))
