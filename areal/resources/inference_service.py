"""``InferenceService``: a gateway, a router, and the models behind them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from areal.resources.fields import (
    Auth,
    Bytes,
    Count,
    Gateway,
    LogLevel,
    Port,
    PositiveSeconds,
    Restart,
    Scheduler,
    SpecModel,
    Strategy,
)
from areal.resources.model import InlineModel
from areal.resources.tree import UpdateClass


class Router(SpecModel):
    """How a replica is chosen for a request."""

    strategy: Annotated[Literal["auto", "round_robin", "least_loaded", "prefix"], UpdateClass.HOT] = "auto"
    """`auto`: sticky by session, else by shared prefix, else the less loaded of two. The others force one rule."""
    port: Annotated[Port | None, UpdateClass.RECREATE] = None
    """TCP port of the router, which listens on loopback. Absent: a free one, kept across restarts."""


class Limits(SpecModel):
    """Limits of the gateway."""

    max_body_bytes: Annotated[Bytes, UpdateClass.HOT] = 64 * 2**20
    """Longest request body; a longer one is answered 413."""
    request_timeout_seconds: Annotated[PositiveSeconds, UpdateClass.HOT] = 3600.0
    """Longest time for one request, streaming included."""
    max_queued_requests: Annotated[Count, UpdateClass.HOT] = 4096
    """Requests that may wait for a replica; one more is answered 503."""


class InferenceServiceSpec(SpecModel):
    """One address for many models: OpenAI-compatible HTTP in, engines behind."""

    INLINE: ClassVar = ("models", "Model", "service")
    FILES: ClassVar = (("auth", "adminKeyFrom", "file"),)
    EXAMPLE: ClassVar = ("default", {"gateway": {"host": "127.0.0.1", "port": 8080}})

    gateway: Annotated[Gateway, UpdateClass.ROLL] = Gateway()
    """The address clients talk to."""
    router: Annotated[Router, UpdateClass.HOT] = Router()
    """How a replica is chosen for a request."""
    auth: Annotated[Auth, UpdateClass.RECREATE] = Auth()
    """Keys of the service."""
    scheduler: Annotated[Scheduler, UpdateClass.RECREATE] = Scheduler()
    """Backend of the processes of the service and its models."""
    strategy: Annotated[Strategy, UpdateClass.META] = Strategy()
    """Rollout of changes."""
    limits: Annotated[Limits, UpdateClass.HOT] = Limits()
    """Limits of the gateway."""
    models: Annotated[list[InlineModel], UpdateClass.HOT] = []
    """Models of this service, written here for short. Each becomes a Model object owned by the service."""
    log_level: Annotated[LogLevel, UpdateClass.ROLL] = "info"
    """Least severe level that the gateway and the router log."""
    restart: Annotated[Restart, UpdateClass.META] = Restart()
    """Restart of a gateway or router that exits by itself."""
    suspend: Annotated[bool, UpdateClass.HOT] = False
    """True: no process runs, the models' neither; nothing else is forgotten."""
