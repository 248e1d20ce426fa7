"""Clients over HTTP for what the services serve, and the controller of rollouts.

``http`` and ``loop_thread`` need nothing but the standard library: the command line uses them. All else is the SDK (the
extra ``client``), imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.client.blocking import Group, InferenceClient, Session
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
    from areal.client.inference import AsyncGroup, AsyncInferenceClient, AsyncSession, Rewarded
    from areal.client.trajectories import Lease, Trajectories
    from areal.client.transport import RetryPolicy
    from areal.rollout.controller import RolloutController, RolloutControllerV2
    from areal.rollout.executor import RolloutsFailed
    from areal.rollout.failures import Failure
    from areal.rollout.staleness import Rollout

_ERRORS = (
    "Blame",
    "CallerError",
    "ClientError",
    "ConnectionLost",
    "DeadlineExceeded",
    "InfrastructureError",
    "NotReady",
    "Overloaded",
    "ServiceError",
    "StateConflict",
    "Unauthorized",
    "UnknownName",
    "Unreachable",
)
_HOMES = {
    **dict.fromkeys(_ERRORS, "client.errors"),
    **dict.fromkeys(("Group", "InferenceClient", "Session"), "client.blocking"),
    "AsyncInferenceClient": "client.inference",
    **dict.fromkeys(("AsyncGroup", "AsyncSession", "Rewarded"), "client.inference"),
    "RetryPolicy": "client.transport",
    **dict.fromkeys(("RolloutController", "RolloutControllerV2"), "rollout.controller"),
    "Failure": "rollout.failures",
    "Rollout": "rollout.staleness",
    "RolloutsFailed": "rollout.executor",
    **dict.fromkeys(("Lease", "Trajectories"), "client.trajectories"),
}

__all__ = [
    "AsyncGroup",
    "AsyncInferenceClient",
    "AsyncSession",
    "Blame",
    "CallerError",
    "ClientError",
    "ConnectionLost",
    "DeadlineExceeded",
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
    "StateConflict",
    "Trajectories",
    "Unauthorized",
    "UnknownName",
    "Unreachable",
]


def __getattr__(name: str) -> Any:
    if (home := _HOMES.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"areal.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
