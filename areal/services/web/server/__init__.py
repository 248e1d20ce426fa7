"""The HTTP/1.1 server of every service: httptools' parser on asyncio transports, and no framework above it.

It relays model calls at a fraction of what a general server takes, because nothing is built that nobody asked for: a
request is a few slots, an answer is one write, and a stream's bytes need no task switch. What it refuses, it refuses
in the API's own error shape. TLS, compression and websockets are not its business.
"""

from areal.services.web.server.connection import Application
from areal.services.web.server.limits import ServerLimits
from areal.services.web.server.listener import HttpServer
from areal.services.web.server.request import Request
from areal.services.web.server.response import AnyResponse, Response, StreamResponse
from areal.services.web.server.routing import RouteTable

__all__ = [
    "AnyResponse",
    "Application",
    "HttpServer",
    "Request",
    "Response",
    "RouteTable",
    "ServerLimits",
    "StreamResponse",
]
