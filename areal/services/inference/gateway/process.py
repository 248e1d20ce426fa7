"""One relay process, wired together."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import AsyncIterator

from areal.services.inference.gateway.admission import Admission
from areal.services.inference.gateway.app import GatewayRoutes, not_ready
from areal.services.inference.gateway.control import WorkerControl
from areal.services.inference.gateway.exports import ExportRoutes
from areal.services.inference.gateway.follow import Follower
from areal.services.inference.gateway.journal_client import JournalClient
from areal.services.inference.gateway.live_table import LiveTable
from areal.services.inference.gateway.metrics import RelayMetrics
from areal.services.inference.gateway.registration import Registration
from areal.services.inference.gateway.relay import Relay
from areal.services.inference.gateway.router_client import RouterClient
from areal.services.inference.gateway.session_keys import SessionKeys
from areal.services.inference.gateway.sessions import SessionRoutes
from areal.services.inference.router.table import Limits
from areal.services.web.client import HttpClient
from areal.services.web.garbage import collect_rarely
from areal.services.web.options import ServeOptions, serve_options
from areal.services.web.serve import run_service, serve
from areal.services.web.service import Service
from areal.services.web.tasks import background


def run_relay(args: argparse.Namespace) -> None:
    # Always shared: other relays listen on it too, and so does a successor to which this gateway hands over.
    options = serve_options(args, reuse_port=True)
    limits = Limits(args.max_body_bytes, args.request_timeout, args.max_queued_requests)

    async def run() -> None:
        async with HttpClient() as http:
            service = build_relay(args.router_url, options, limits, http)
            collect_rarely()
            await serve(service, options)

    run_service(run, options.log_level)


def build_relay(router_url: str, options: ServeOptions, limits: Limits, http: HttpClient) -> Service:
    """The relay's service; its follower starts and stops with the application."""
    table = LiveTable(limits)
    headers = options.key.bearer() if options.key else {}
    follower = Follower(table, http, router_url, headers)
    service = Service(
        "gateway",
        key=options.key,
        loopback=options.loopback,
        not_ready=lambda: not_ready(table),
        details=lambda: {"router_connected": follower.connected, "table": table.summary()},
    )
    metrics = RelayMetrics(service.metrics)
    admission = Admission(table, metrics.queued)
    relay = Relay(table, follower, admission, http, metrics)
    router = RouterClient(http, router_url, headers)
    keys = SessionKeys(table, follower, router, options.key)
    journals = JournalClient(http, table, admission, keys, headers)
    GatewayRoutes(table, relay, router, keys).add_to(service)
    SessionRoutes(table, relay, router, journals, keys).add_to(service)
    ExportRoutes(journals).add_to(service)
    WorkerControl(http, router, headers).add_to(service)
    Registration(http, router, headers).add_to(service)

    @contextlib.asynccontextmanager
    async def following() -> AsyncIterator[None]:
        async with background("router-watch", follower.run):
            yield

    service.beside(following)
    return service
