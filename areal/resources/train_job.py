"""``TrainJob``: a driver that runs to completion. What it trains with cannot change under it: another spec is
another run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from areal.resources.fields import (
    Backoff,
    Count,
    ModelRef,
    PositiveCount,
    Scheduler,
    Schema,
    Seconds,
    SecretFrom,
    SpecModel,
    Text,
    given,
)
from areal.resources.tree import FieldPath, UpdateClass

_FUNCTION = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
DRIVER = rf"^(?:[^\s:]+\.py(?::{_FUNCTION})?|{_FUNCTION}[:.]{_FUNCTION})$"


class JobResources(SpecModel):
    """Resources of the job's training processes."""

    gpus: Annotated[Count | None, UpdateClass.IMMUTABLE] = None
    """GPUs of each process. Absent: 1 where the machine has GPUs, else 0."""
    nodes: Annotated[PositiveCount, UpdateClass.IMMUTABLE] = 1
    """Machines."""
    processes_per_node: Annotated[PositiveCount, UpdateClass.IMMUTABLE] = 1
    """Training processes on each machine."""


class JobRestart(SpecModel):
    """Restart after the driver fails. A restarted job resumes from its newest checkpoint."""

    policy: Annotated[Literal["OnFailure", "Never"], UpdateClass.RECREATE] = "OnFailure"
    """`OnFailure`: start again. `Never`: the first failure is final."""
    max_restarts: Annotated[Count, UpdateClass.RECREATE] = 3
    """Restarts before the job is `Failed`."""
    backoff: Annotated[Backoff, UpdateClass.RECREATE] = Backoff()
    """Pauses between restarts."""


class TrainJobSpec(SpecModel):
    """A training run: a driver, its configuration, and the models it samples from."""

    REPLACEABLE: ClassVar = True
    REFERENCES: ClassVar = ((("rollout",), "service", "InferenceService"), (("rollout",), "model", "Model"))
    FILES: ClassVar = (("workingDir",), ("envFrom", "*", "file"), ("config",))
    FILES_FROM: ClassVar = {"config": "workingDir"}
    EXAMPLE: ClassVar = ("my-job", {"driver": "my_package.train:main", "config": "config.yaml"})

    driver: Annotated[str | None, Field(pattern=DRIVER), UpdateClass.IMMUTABLE] = None
    """The driver, as `module:function` or as a script, `path/driver.py`. Absent: the config's `driver:`, else the
    built-in of its trainer type."""
    config: Annotated[Text | dict[str, JsonValue] | None, UpdateClass.IMMUTABLE] = None
    """The driver's configuration: a file, or the map itself."""
    overrides: Annotated[list[Text], UpdateClass.IMMUTABLE] = []
    """Changes to the configuration, as `key=value`, passed to the driver as they are."""
    rollout: Annotated[ModelRef | None, UpdateClass.IMMUTABLE] = None
    """The model the job samples from and updates. Absent: the job brings its own where its configuration lays out an
    inference engine (`rollout.backend`, `allocation_mode`), and owns it."""
    scheduler: Annotated[Scheduler, UpdateClass.IMMUTABLE] = Scheduler()
    """Backend of the processes."""
    resources: Annotated[JobResources, UpdateClass.IMMUTABLE] = JobResources()
    """Resources of the training processes."""
    env: Annotated[dict[str, str], UpdateClass.IMMUTABLE] = {}
    """Environment of the driver. Quote numbers: every value is text."""
    env_from: Annotated[dict[str, SecretFrom], UpdateClass.IMMUTABLE] = {}
    """Environment of the driver that must not be written down: `WANDB_API_KEY: {env: WANDB_API_KEY}`."""
    working_dir: Annotated[Text | None, UpdateClass.IMMUTABLE] = None
    """Folder the driver starts in, also on its import path. Absent: where `apply` was run."""
    restart: Annotated[JobRestart, UpdateClass.RECREATE] = JobRestart()
    """Restart after the driver fails."""
    ttl_seconds_after_finished: Annotated[Seconds | None, UpdateClass.HOT] = None
    """A finished job is deleted by the first `areal reconcile` after this long. Absent: it stays until deleted."""
    suspend: Annotated[bool, UpdateClass.HOT] = False
    """True: no process runs; the job resumes from its newest checkpoint."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        overrides: Schema = {"required": ["overrides"], "properties": {"overrides": {"not": {"enum": [[]]}}}}
        return [{"anyOf": [given("driver"), given("config"), overrides]}]

    def problems(self) -> Iterator[tuple[FieldPath, str]]:
        if self.driver is None and self.config is None and not self.overrides:
            yield (), 'one of "driver" and "config" is needed'
