"""``InferenceService``: a gateway, a router, and the models behind them."""

from __future__ import annotations

from typing import Annotated, Literal

from areal.resources.blocks import Auth, Gateway, LogLevel, Restart, Scheduler, Strategy
from areal.resources.fields import Bytes, Count, Port, PositiveSeconds, SpecModel
from areal.resources.model import InlineModel
from areal.resources.update import Update


class Router(SpecModel):
    """Which replica gets a request."""

    strategy: Annotated[Literal["auto", "round_robin", "least_loaded", "prefix"], Update.HOT] = "auto"
    """`auto`: sticky by session, else by shared prefix, else the less loaded of two. The others force one rule."""
    port: Annotated[Port | None, Update.RECREATE] = None
    """TCP port of the router, which listens on loopback. Absent: a free one, kept across restarts."""


class Limits(SpecModel):
    """What the gateway accepts."""

    max_body_bytes: Annotated[Bytes, Update.HOT] = 64 * 2**20
    """Longest request body; a longer one is answered 413."""
    request_timeout_seconds: Annotated[PositiveSeconds, Update.HOT] = 3600.0
    """Longest time for one request, streaming included."""
    max_queued_requests: Annotated[Count, Update.HOT] = 4096
    """Requests that may wait for a replica; one more is answered 503."""


class InferenceServiceSpec(SpecModel):
    """One address for many models: OpenAI-compatible HTTP in, engines behind."""

    gateway: Annotated[Gateway, Update.ROLL] = Gateway()
    """The address clients talk to."""
    router: Annotated[Router, Update.HOT] = Router()
    """Which replica gets a request."""
    auth: Annotated[Auth, Update.RECREATE] = Auth()
    """Keys of the service."""
    scheduler: Annotated[Scheduler, Update.RECREATE] = Scheduler()
    """Where the service's processes run, its models' too."""
    strategy: Annotated[Strategy, Update.META] = Strategy()
    """How changes are rolled out."""
    limits: Annotated[Limits, Update.HOT] = Limits()
    """What the gateway accepts."""
    models: Annotated[list[InlineModel], Update.HOT] = []
    """Models of this service, written here for short. Each becomes a Model object owned by the service."""
    log_level: Annotated[LogLevel, Update.ROLL] = "info"
    """How much the gateway and the router log."""
    restart: Annotated[Restart, Update.META] = Restart()
    """What happens when the gateway or the router exits by itself."""
    suspend: Annotated[bool, Update.HOT] = False
    """True: no process runs, the models' neither; nothing else is forgotten."""
