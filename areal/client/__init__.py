"""HTTP clients of the services, and controllers of agent services and rollouts.

``http`` and ``loop_thread`` need only the standard library: the command line uses them. The other modules are the SDK,
which needs the extra ``client`` and is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.lazy import lazy

if TYPE_CHECKING:
    from areal.client.agent import AsyncAgentClient, AsyncAgentSession, response_text
    from areal.client.blocking import AgentClient, AgentSession, Group, InferenceClient, Session
    from areal.client.controller import AgentController, BlockingAgentController
    from areal.client.errors import (
        Blame,
        CallerError,
        ClientError,
        ConnectionLost,
        DeadlineExceeded,
        InfrastructureError,
        NotReady,
        Overloaded,
        ServiceError,
        StateConflict,
        Unauthorized,
        UnknownName,
        Unreachable,
    )
    from areal.client.inference import AsyncGroup, AsyncInferenceClient, AsyncSession
    from areal.client.trajectories import Lease, Trajectories
    from areal.client.transport import RetryPolicy
    from areal.rollout.controller import RolloutController, RolloutControllerV2
    from areal.rollout.failures import Failure, RolloutsFailed
    from areal.rollout.staleness import Rollout
    from areal.wire.agents import SessionHistory, SessionSummary, TurnRecord
    from areal.wire.bodies import Rewarded
    from areal.wire.columns import ExportedInteraction, ExportedRow, ExportError, FailedCalls

__all__ = [
    "AgentClient",
    "AgentController",
    "AgentSession",
    "AsyncAgentClient",
    "AsyncAgentSession",
    "AsyncGroup",
    "AsyncInferenceClient",
    "AsyncSession",
    "Blame",
    "BlockingAgentController",
    "CallerError",
    "ClientError",
    "ConnectionLost",
    "DeadlineExceeded",
    "ExportError",
    "ExportedInteraction",
    "ExportedRow",
    "FailedCalls",
    "Failure",
    "Group",
    "InferenceClient",
    "InfrastructureError",
    "Lease",
    "NotReady",
    "Overloaded",
    "RetryPolicy",
    "Rewarded",
    "Rollout",
    "RolloutController",
    "RolloutControllerV2",
    "RolloutsFailed",
    "ServiceError",
    "Session",
    "SessionHistory",
    "SessionSummary",
    "StateConflict",
    "Trajectories",
    "TurnRecord",
    "Unauthorized",
    "UnknownName",
    "Unreachable",
    "response_text",
]
_ELSEWHERE = {
    "areal.client.agent": ("AsyncAgentClient", "AsyncAgentSession", "response_text"),
    "areal.client.controller": ("AgentController", "BlockingAgentController"),
    "areal.client.blocking": ("AgentClient", "AgentSession", "Group", "InferenceClient", "Session"),
    "areal.client.inference": ("AsyncGroup", "AsyncInferenceClient", "AsyncSession"),
    "areal.client.trajectories": ("Lease", "Trajectories"),
    "areal.client.transport": ("RetryPolicy",),
    "areal.rollout.controller": ("RolloutController", "RolloutControllerV2"),
    "areal.rollout.failures": ("Failure", "RolloutsFailed"),
    "areal.rollout.staleness": ("Rollout",),
    "areal.wire.agents": ("SessionHistory", "SessionSummary", "TurnRecord"),
    "areal.wire.bodies": ("Rewarded",),
    "areal.wire.columns": ("ExportError", "ExportedInteraction", "ExportedRow", "FailedCalls"),
}
_HOMES = {name: home for home, names in _ELSEWHERE.items() for name in names}
__getattr__ = lazy(__name__, {**dict.fromkeys(__all__, "areal.client.errors"), **_HOMES})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
