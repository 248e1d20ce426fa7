"""The gateway's flags. Limits given here hold until the router's table says otherwise."""

from __future__ import annotations

import argparse

from areal.services.inference.router.table import Limits
from areal.services.web.options import add_serve_arguments


def gateway_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="areal-inference-gateway")
    add_serve_arguments(parser, port=8080)
    parser.add_argument("--router-url", required=True)
    parser.add_argument("--relays", type=int, default=1, help="relay processes on the one port")
    limits = Limits()
    parser.add_argument("--max-body-bytes", type=int, default=limits.max_body_bytes)
    parser.add_argument(
        "--request-timeout", type=float, default=limits.request_timeout_seconds, help="seconds without progress"
    )
    parser.add_argument(
        "--max-queued-requests",
        type=int,
        default=limits.max_queued_requests,
        help="requests that may wait for a worker, in each relay",
    )
    parser.add_argument("--relay-index", type=int, help=argparse.SUPPRESS)  # set by the supervisor on its children
    return parser
