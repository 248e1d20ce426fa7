"""``AgentService``: a user's agent behind a gateway, its turns run by pairs of a worker and a data proxy."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, JsonValue

from areal.resources.fields import (
    Auth,
    Gateway,
    LogLevel,
    ModelRef,
    Port,
    PositiveCount,
    PositiveSeconds,
    Replicas,
    Restart,
    Scheduler,
    Seconds,
    SecretFrom,
    SpecModel,
    Strategy,
    Text,
)
from areal.resources.tree import UpdateClass

ENTRY_POINT = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
"""``package.module:Name``."""


class SessionSettings(SpecModel):
    """One conversation with the agent."""

    idle_timeout_seconds: Annotated[PositiveSeconds, UpdateClass.HOT] = 1800.0
    """A session without a turn for this long is closed."""
    max_concurrent_per_pair: Annotated[PositiveCount, UpdateClass.HOT] = 64
    """Sessions that one pair may hold; further ones wait."""


class AgentGateway(Gateway):
    """The address clients of the agent talk to."""

    port: Annotated[Port, UpdateClass.RECREATE] = 8090
    """TCP port. It is never picked automatically: clients have it in their configuration."""


class AgentServiceSpec(SpecModel):  # type: ignore[no-redef]  # mypy confuses the field with __init__'s **kwargs
    """Runs `agent` in `pairs` worker processes and keeps each session on its pair."""

    REFERENCES: ClassVar = ((("inference",), "service", "InferenceService"), (("inference",), "model", "Model"))
    FILES: ClassVar = (("auth", "adminKeyFrom", "file"), ("envFrom", "*", "file"))
    EXAMPLE: ClassVar = (
        "my-agent",
        {"agent": "my_package.agent:MyAgent", "pairs": 1, "inference": {"service": "default"}},
    )

    agent: Annotated[str, Field(pattern=ENTRY_POINT), UpdateClass.ROLL]
    """The agent's class, as `module:Class`."""
    kwargs: Annotated[dict[str, JsonValue], UpdateClass.ROLL] = {}
    """Keyword arguments of the class."""
    pairs: Annotated[Replicas, UpdateClass.HOT] = 1
    """Number of worker and data proxy pairs."""
    inference: Annotated[ModelRef | None, UpdateClass.ROLL] = None
    """The model the agent calls. Absent: the agent brings its own."""
    session: Annotated[SessionSettings, UpdateClass.HOT] = SessionSettings()
    """Lifetime and number of sessions."""
    setup_timeout_seconds: Annotated[PositiveSeconds, UpdateClass.META] = 120.0
    """A pair not ready after this long has failed to start."""
    drain_timeout_seconds: Annotated[Seconds, UpdateClass.META] = 600.0
    """Longest time for running turns of a stopping pair to finish."""
    health_poll_seconds: Annotated[PositiveSeconds, UpdateClass.HOT] = 5.0
    """Time between two health checks of a pair."""
    env: Annotated[dict[str, str], UpdateClass.ROLL] = {}
    """Environment of the workers. Quote numbers: every value is text."""
    env_from: Annotated[dict[str, SecretFrom], UpdateClass.ROLL] = {}
    """Environment of the workers that must not be written down: `SEARCH_KEY: {env: SEARCH_KEY}`."""
    working_dir: Annotated[Text | None, UpdateClass.ROLL] = None
    """Folder the workers start in, also on their import path. Absent: where `apply` was run."""
    gateway: Annotated[AgentGateway, UpdateClass.ROLL] = AgentGateway()
    """The address clients talk to."""
    auth: Annotated[Auth, UpdateClass.RECREATE] = Auth()
    """Keys of the service."""
    scheduler: Annotated[Scheduler, UpdateClass.RECREATE] = Scheduler()
    """Backend of the processes."""
    strategy: Annotated[Strategy, UpdateClass.META] = Strategy()
    """Rollout of changes."""
    restart: Annotated[Restart, UpdateClass.META] = Restart()
    """Restart of a process that exits by itself."""
    log_level: Annotated[LogLevel, UpdateClass.ROLL] = "info"
    """Least severe level that the processes log."""
    suspend: Annotated[bool, UpdateClass.HOT] = False
    """True: no process runs, nothing else is forgotten."""
