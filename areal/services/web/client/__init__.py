"""How services call other services: pooled HTTP/1.1 connections of our own, on the loop's transports.

No proxies, no cookies, no redirects, no compression. Every call has a deadline, from the caller or from ``fetch``.
"""

from areal.services.web.client.connection import Connection
from areal.services.web.client.failures import CallFailed, Lost, NotConnected
from areal.services.web.client.pool import ENGINE_IDLE_S, Answering, Fetched, HttpClient
from areal.services.web.client.window import Window

__all__ = [
    "ENGINE_IDLE_S",
    "Answering",
    "CallFailed",
    "Connection",
    "Fetched",
    "HttpClient",
    "Lost",
    "NotConnected",
    "Window",
]
