"""``AgentService``: a user's agent behind a gateway, its turns run by pairs of a worker and a data proxy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, JsonValue

from areal.resources.blocks import Auth, Gateway, LogLevel, ModelRef, Restart, Scheduler, SecretFrom, Strategy
from areal.resources.fields import Port, PositiveCount, PositiveSeconds, Replicas, Seconds, SpecModel, Text
from areal.resources.update import Update

ENTRY_POINT = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
"""``package.module:Name``."""


class Session(SpecModel):
    """One conversation with the agent."""

    idle_timeout_seconds: Annotated[PositiveSeconds, Update.HOT] = 1800.0
    """A session without a turn for this long is closed."""
    max_concurrent_per_pair: Annotated[PositiveCount, Update.HOT] = 64
    """Sessions that one pair may hold; further ones wait."""


class AgentGateway(Gateway):
    """The address clients of the agent talk to."""

    port: Annotated[Port, Update.RECREATE] = 8090
    """TCP port. It is never picked automatically: clients have it in their configuration."""


class AgentServiceSpec(SpecModel):  # type: ignore[no-redef]  # mypy confuses the field with __init__'s **kwargs
    """Runs `agent` in `pairs` worker processes and keeps each session on its pair."""

    agent: Annotated[str, Field(pattern=ENTRY_POINT), Update.ROLL]
    """The agent's class, as `module:Class`."""
    kwargs: Annotated[dict[str, JsonValue], Update.ROLL] = {}
    """Keyword arguments of the class."""
    pairs: Annotated[Replicas, Update.HOT] = 1
    """Number of worker and data proxy pairs."""
    inference: Annotated[ModelRef | None, Update.ROLL] = None
    """The model the agent calls. Absent: the agent brings its own."""
    session: Annotated[Session, Update.HOT] = Session()
    """How long and how many conversations are kept."""
    setup_timeout_seconds: Annotated[PositiveSeconds, Update.META] = 120.0
    """A pair not ready after this long has failed to start."""
    drain_timeout_seconds: Annotated[Seconds, Update.META] = 600.0
    """How long running turns of a stopping pair may take to finish."""
    health_poll_seconds: Annotated[PositiveSeconds, Update.HOT] = 5.0
    """Pause between two questions whether a pair is well."""
    env: Annotated[dict[str, str], Update.ROLL] = {}
    """Environment of the workers. Quote numbers: every value is text."""
    env_from: Annotated[dict[str, SecretFrom], Update.ROLL] = {}
    """Environment of the workers that must not be written down: `SEARCH_KEY: {env: SEARCH_KEY}`."""
    working_dir: Annotated[Text | None, Update.ROLL] = None
    """Folder the workers start in, also on their import path. Absent: where `apply` was run."""
    gateway: Annotated[AgentGateway, Update.ROLL] = AgentGateway()
    """The address clients talk to."""
    auth: Annotated[Auth, Update.RECREATE] = Auth()
    """Keys of the service."""
    scheduler: Annotated[Scheduler, Update.RECREATE] = Scheduler()
    """Where the processes run."""
    strategy: Annotated[Strategy, Update.META] = Strategy()
    """How changes are rolled out."""
    restart: Annotated[Restart, Update.META] = Restart()
    """What happens when a process exits by itself."""
    log_level: Annotated[LogLevel, Update.ROLL] = "info"
    """How much the processes log."""
    suspend: Annotated[bool, Update.HOT] = False
    """True: no process runs, nothing else is forgotten."""
