"""Maps that several kinds share: secrets, scheduling, rollouts, restarts, probes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from areal.resources.fields import (
    Cores,
    Count,
    Factor,
    Name,
    Port,
    PositiveCount,
    PositiveSeconds,
    Quantity,
    Ratio,
    Seconds,
    SpecModel,
    Text,
    Unit,
)
from areal.resources.rules import EXPRESSION, Schema, given, when, written
from areal.resources.update import Update

LogLevel = Literal["debug", "info", "warning", "error"]


class SecretFrom(SpecModel):
    """Where a secret is read when a process starts. It is never written to state, argv or a plan."""

    file: Annotated[Text | None, Update.ROLL] = None
    """File that holds the secret, surrounding whitespace ignored."""
    env: Annotated[Text | None, Update.ROLL] = None
    """Environment variable of the command that starts the process."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        some = {"anyOf": [given("file"), given("env")]}
        return [some, {"not": {"allOf": [written("file"), written("env")]}}]

    @model_validator(mode="after")
    def _one_source(self) -> SecretFrom:
        if (self.file is None) == (self.env is None):
            raise PydanticCustomError("areal_one_of", 'needs exactly one of "file" and "env"')
        return self


class Auth(SpecModel):
    """Keys of a service's HTTP surface."""

    admin_key_from: Annotated[SecretFrom | None, Update.RECREATE] = None
    """Where the admin key comes from. Absent: one is generated and kept in a 0600 file."""


class Ray(SpecModel):
    """How to reach a Ray cluster."""

    address: Annotated[Text, Update.RECREATE] = "auto"
    """Address of the cluster; `auto` finds the one this machine belongs to."""
    namespace: Annotated[Text, Update.RECREATE] = "areal"
    """Ray namespace that the actors live in."""


class Slurm(SpecModel):
    """How to submit to Slurm."""

    partition: Annotated[Text | None, Update.RECREATE] = None
    """Partition to submit to. Absent: the cluster's default."""
    account: Annotated[Text | None, Update.RECREATE] = None
    """Account to charge. Absent: the user's default."""
    time_limit_seconds: Annotated[PositiveSeconds | None, Update.RECREATE] = None
    """Wall-clock limit of a job. Absent: the partition's."""
    extra_args: Annotated[list[Text], Update.RECREATE] = []
    """Options passed to `sbatch` as they are, for example `--constraint=h100`."""


class Scheduler(SpecModel):
    """Where processes run."""

    type: Annotated[Literal["local", "ray", "slurm"], Update.IMMUTABLE] = "local"
    """`local`: this machine. `ray`, `slurm`: a cluster."""
    ray: Annotated[Ray | None, Update.RECREATE] = None
    """Settings for `type: ray`."""
    slurm: Annotated[Slurm | None, Update.RECREATE] = None
    """Settings for `type: slurm`."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        of_type = {kind: {"anyOf": [{"const": kind}, EXPRESSION]} for kind in ("ray", "slurm")}
        return [
            when(written(kind), {"required": ["type"], "properties": {"type": shape}})
            for kind, shape in of_type.items()
        ]

    @model_validator(mode="after")
    def _settings_fit(self) -> Scheduler:
        for kind, settings in (("ray", self.ray), ("slurm", self.slurm)):
            if settings is not None and self.type != kind:
                raise PydanticCustomError(
                    "areal_scheduler",
                    '"{kind}" settings need "type: {kind}", the type is {type}',
                    {"kind": kind, "type": self.type},
                )
        return self


class Strategy(SpecModel):
    """How a change that needs new processes is rolled out. Only the next rollout reads it."""

    type: Annotated[Literal["Rolling", "Recreate", "BlueGreen"], Update.META] = "Rolling"
    """`Rolling`: new replicas beside the old, then the old drained. `Recreate`: stop, then start. `BlueGreen`: a full
    second set, then one switch."""
    max_surge: Annotated[PositiveCount | Literal["auto"], Update.META] = "auto"
    """Replicas above the declared number during a rollout; `auto`: as many as free GPUs allow."""
    max_unavailable: Annotated[Count, Update.META] = 0
    """Replicas below the declared number during a rollout."""
    min_ready_seconds: Annotated[Seconds, Update.META] = 0.0
    """How long a new replica must stay ready before an old one is drained."""
    progress_deadline_seconds: Annotated[PositiveSeconds, Update.META] = 1800.0
    """A rollout without progress for this long has failed; the old replicas keep serving."""
    drain_timeout_seconds: Annotated[Seconds, Update.META] = 600.0
    """How long running requests of an old replica may take to finish."""
    keep_old_seconds: Annotated[Seconds, Update.META] = 0.0
    """`BlueGreen` only: how long the old set is kept after the switch."""


class Backoff(SpecModel):
    """Pause before a restart: grows by `factor` with each, falls back after a quiet time."""

    initial_seconds: Annotated[Seconds, Update.META] = 10.0
    """Pause before the first restart."""
    factor: Annotated[Factor, Update.META] = 2.0
    """Each pause is this many times the one before."""
    max_seconds: Annotated[Seconds, Update.META] = 300.0
    """Longest pause."""
    jitter: Annotated[Ratio, Update.META] = 0.25
    """Random part of a pause, so that replicas do not restart in step."""


class Budget(SpecModel):
    """How many restarts are tolerated before giving up."""

    count: Annotated[Count, Update.META] = 5
    """Restarts allowed within the window; one more and the process is given up (`CrashLoop`)."""
    window_seconds: Annotated[PositiveSeconds, Update.META] = 1800.0
    """Length of the window."""


class Restart(SpecModel):
    """What happens when a process exits by itself. Its supervisor is told at the start: a change takes effect when the
    process is next started, and restarts nothing."""

    policy: Annotated[Literal["Always", "OnFailure", "Never"], Update.META] = "Always"
    """When an exited process is started again."""
    backoff: Annotated[Backoff, Update.META] = Backoff()
    """Pauses between restarts."""
    budget: Annotated[Budget, Update.META] = Budget()
    """Restarts tolerated."""


class Resources(SpecModel):
    """What one replica is given."""

    gpus: Annotated[Count | None, Update.ROLL] = None
    """GPUs. Absent: tensor x pipeline of the backend, 0 for `embedded`."""
    cpus: Annotated[Cores | None, Update.ROLL] = None
    """CPU cores, which bound the threads of the process. Absent: no bound."""
    memory: Annotated[Quantity | None, Update.ROLL] = None
    """Main memory that a cluster scheduler reserves, for example `64Gi`; `local` reserves none. Absent: its default."""


class StartupProbe(SpecModel):
    """How long a process may take to become ready. An exit during start fails at once, whatever is left."""

    deadline_seconds: Annotated[PositiveSeconds, Update.META] = 1800.0
    """Not ready after this long: the start has failed."""
    period_seconds: Annotated[PositiveSeconds, Update.META] = 0.5
    """Pause between two questions."""
    timeout_seconds: Annotated[PositiveSeconds, Update.META] = 2.0
    """Longest wait for one answer."""


class ReadinessProbe(SpecModel):
    """Whether a replica gets new requests: the router asks its data proxy."""

    period_seconds: Annotated[PositiveSeconds, Update.HOT] = 1.0
    """Pause between two questions."""
    timeout_seconds: Annotated[PositiveSeconds, Update.HOT] = 2.0
    """Longest wait for one answer."""
    failure_threshold: Annotated[PositiveCount, Update.HOT] = 3
    """Failures in a row that take the replica out of rotation."""
    success_threshold: Annotated[PositiveCount, Update.HOT] = 2
    """Successes in a row that bring it back."""


class LivenessProbe(SpecModel):
    """Whether a process is restarted although it has not exited. A change takes effect when the process is next
    started."""

    period_seconds: Annotated[PositiveSeconds, Update.META] = 10.0
    """Pause between two questions."""
    timeout_seconds: Annotated[PositiveSeconds, Update.META] = 5.0
    """Longest wait for one answer."""
    failure_threshold: Annotated[PositiveCount, Update.META] = 6
    """Failures in a row that restart the process."""


class Probes(SpecModel):
    """Questions asked of a replica."""

    startup: Annotated[StartupProbe, Update.META] = StartupProbe()
    """While it starts."""
    readiness: Annotated[ReadinessProbe, Update.HOT] = ReadinessProbe()
    """While it serves: may it have requests?"""
    liveness: Annotated[LivenessProbe, Update.META] = LivenessProbe()
    """While it serves: is it stuck?"""


class Gateway(SpecModel):
    """The address clients talk to."""

    host: Annotated[Text, Update.RECREATE] = "127.0.0.1"
    """Address to bind. Anything but loopback is reachable from outside, and needs the admin key."""
    port: Annotated[Port, Update.RECREATE] = 8080
    """TCP port. It is never picked automatically: clients have it in their configuration."""
    relays: Annotated[int, Field(ge=1, le=64), Unit("count"), Update.ROLL] = 1
    """Processes that share the port; more of them when one core cannot carry the traffic."""


class ModelRef(SpecModel):
    """A model of an inference service."""

    service: Annotated[Name, Update.ROLL] = "default"
    """Name of the InferenceService."""
    model: Annotated[Name | None, Update.ROLL] = None
    """Name of the Model. Absent: the only one of the service."""
