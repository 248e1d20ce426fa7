"""What starting a process takes, whatever its kind: a slot, a record of how it is run, its secrets."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.errors import ArealError
from areal.resources.addresses import base_url
from areal.resources.fields import LivenessProbe
from areal.runtime.backends.base import HttpProbe, RestartPolicy, RunSpec
from areal.state.records import StoredObject

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Slot:
    """A place for a run, claimed before anything starts: its uid, its port and where it will answer."""

    uid: str
    ref: str
    component: str
    replica: int
    port: int
    host: str = LOOPBACK
    shared: bool = False  # the port is held together with the predecessor's
    backend: str = "local"  # spec.scheduler.type of the object

    @property
    def url(self) -> str:
        return base_url(self.host, self.port)


def run_spec(
    found: StoredObject,
    slot: Slot,
    argv: Sequence[str],
    restart: RestartPolicy,
    grace_s: float,
    *,
    inputs: Mapping[str, Any] | None = None,
    gpus: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    secret_env: Mapping[str, str] | None = None,
    liveness: LivenessProbe | None = None,
    config: Mapping[str, Any] | None = None,
) -> RunSpec:
    """A process that answers at its slot's address. ``inputs``: what it is told about its neighbours. ``config``: its
    configuration (``areal.wire.processes``), beside its argv."""
    probe = liveness or LivenessProbe()
    return RunSpec(
        uid=slot.uid,
        owner=slot.ref,
        component=slot.component,
        replica=slot.replica,
        argv=tuple(argv),
        backend=slot.backend,
        env={"PYTHONUNBUFFERED": "1", **(env or {})},
        secret_env=dict(secret_env or {}),
        ports=() if slot.shared else (slot.port,),
        shared_ports=(slot.port,) if slot.shared else (),
        gpus=gpus,
        url=slot.url,
        generation=found.generation,
        spec=found.spec,
        inputs=dict(inputs or {}),
        config=dict(config or {}),
        restart=restart,
        liveness=HttpProbe(f"{slot.url}/health", probe.period_seconds, probe.timeout_seconds, probe.failure_threshold),
        stop_grace_s=min(grace_s, 10.0),
    )


def restart_policy(restart: Any) -> RestartPolicy:
    return RestartPolicy(
        policy=restart.policy,
        initial_backoff_s=restart.backoff.initial_seconds,
        factor=restart.backoff.factor,
        max_backoff_s=restart.backoff.max_seconds,
        jitter=restart.backoff.jitter,
        budget_count=restart.budget.count,
        budget_window_s=restart.budget.window_seconds,
    )


def source_file(stored: StoredObject) -> str | None:
    for layer in stored.layers:
        if layer.source and layer.source.get("file"):
            return str(layer.source["file"])
    return None


def secret_of(key_from: Any, stored: StoredObject) -> str:
    """Resolve ``apiKeyFrom: {env|file}`` at spawn; the value travels by a 0600 file, never by argv or state."""
    if key_from.env:
        value = os.environ.get(key_from.env, "")
        if not value:
            raise ArealError(
                f"{stored.ref}: environment variable {key_from.env} is not set",
                hint=f"export {key_from.env}=... and apply again",
            )
        return value
    try:
        return Path(key_from.file).expanduser().read_text().strip()
    except OSError as error:
        raise ArealError(
            f"{stored.ref}: the secret's file {key_from.file} cannot be read: {error.strerror}",
            hint="write it, readable by you alone, and apply again",
        ) from error
