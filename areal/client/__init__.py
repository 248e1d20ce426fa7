"""Clients over HTTP for what the services serve, and the controller of rollouts.

``admin``, ``chat`` and ``connection`` need nothing but the standard library: the command line uses them. All else is
the SDK (the extra ``client``), imported when it is first asked for.
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
    from areal.client.inference import AsyncInferenceClient
    from areal.client.retrying import RetryPolicy
    from areal.client.rollouts.controller import RolloutController, RolloutControllerV2
    from areal.client.rollouts.executor import RolloutsFailed
    from areal.client.rollouts.ledger import Failure, Rollout
    from areal.client.sessions import AsyncGroup, AsyncSession, Rewarded
    from areal.client.trajectories import Lease, Trajectories

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
    **dict.fromkeys(_ERRORS, "errors"),
    **dict.fromkeys(("Group", "InferenceClient", "Session"), "blocking"),
    "AsyncInferenceClient": "inference",
    **dict.fromkeys(("AsyncGroup", "AsyncSession", "Rewarded"), "sessions"),
    "RetryPolicy": "retrying",
    **dict.fromkeys(("RolloutController", "RolloutControllerV2"), "rollouts.controller"),
    **dict.fromkeys(("Failure", "Rollout"), "rollouts.ledger"),
    "RolloutsFailed": "rollouts.executor",
    **dict.fromkeys(("Lease", "Trajectories"), "trajectories"),
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

    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
