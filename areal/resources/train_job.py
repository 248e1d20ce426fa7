"""``TrainJob``: a driver that runs to completion. What it trains with cannot change under it: another spec is
another run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from areal.resources.blocks import Backoff, ModelRef, Scheduler, SecretFrom
from areal.resources.fields import Count, PositiveCount, Seconds, SpecModel, Text
from areal.resources.rules import Schema, given
from areal.resources.tree import Path
from areal.resources.update import Update

_FUNCTION = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
DRIVER = rf"^(?:[^\s:]+\.py(?::{_FUNCTION})?|{_FUNCTION}[:.]{_FUNCTION})$"


class JobResources(SpecModel):
    """What the job's training processes are given."""

    gpus: Annotated[Count | None, Update.IMMUTABLE] = None
    """GPUs of each process. Absent: 1 where the machine has GPUs, else 0."""
    nodes: Annotated[PositiveCount, Update.IMMUTABLE] = 1
    """Machines."""
    processes_per_node: Annotated[PositiveCount, Update.IMMUTABLE] = 1
    """Training processes on each machine."""


class JobRestart(SpecModel):
    """What happens when the driver fails. A restarted job resumes from its newest checkpoint."""

    policy: Annotated[Literal["OnFailure", "Never"], Update.RECREATE] = "OnFailure"
    """`OnFailure`: start again. `Never`: the first failure is final."""
    max_restarts: Annotated[Count, Update.RECREATE] = 3
    """Restarts before the job is `Failed`."""
    backoff: Annotated[Backoff, Update.RECREATE] = Backoff()
    """Pauses between restarts."""


class TrainJobSpec(SpecModel):
    """A training run: a driver, its configuration, and the models it samples from."""

    driver: Annotated[str | None, Field(pattern=DRIVER), Update.IMMUTABLE] = None
    """The driver, as `module:function` or as a script, `path/driver.py`. Absent: the config's `driver:`, else the
    built-in of its trainer type."""
    config: Annotated[Text | dict[str, JsonValue] | None, Update.IMMUTABLE] = None
    """The driver's configuration: a file, or the map itself."""
    overrides: Annotated[list[Text], Update.IMMUTABLE] = []
    """Changes to the configuration, as `key=value`, passed to the driver as they are."""
    rollout: Annotated[ModelRef | None, Update.IMMUTABLE] = None
    """The model the job samples from and updates. Absent: the job brings its own where its configuration lays out an
    inference engine (`rollout.backend`, `allocation_mode`), and owns it."""
    scheduler: Annotated[Scheduler, Update.IMMUTABLE] = Scheduler()
    """Where the processes run."""
    resources: Annotated[JobResources, Update.IMMUTABLE] = JobResources()
    """What the training processes are given."""
    env: Annotated[dict[str, str], Update.IMMUTABLE] = {}
    """Environment of the driver. Quote numbers: every value is text."""
    env_from: Annotated[dict[str, SecretFrom], Update.IMMUTABLE] = {}
    """Environment of the driver that must not be written down: `WANDB_API_KEY: {env: WANDB_API_KEY}`."""
    working_dir: Annotated[Text | None, Update.IMMUTABLE] = None
    """Folder the driver starts in, also on its import path. Absent: where `apply` was run."""
    restart: Annotated[JobRestart, Update.RECREATE] = JobRestart()
    """What happens when the driver fails."""
    ttl_seconds_after_finished: Annotated[Seconds | None, Update.HOT] = None
    """A finished job is deleted by the first `areal reconcile` after this long. Absent: it stays until deleted."""
    suspend: Annotated[bool, Update.HOT] = False
    """True: no process runs; the job resumes from its newest checkpoint."""

    @classmethod
    def schema_rules(cls) -> list[Schema]:
        overrides: Schema = {"required": ["overrides"], "properties": {"overrides": {"not": {"enum": [[]]}}}}
        return [{"anyOf": [given("driver"), given("config"), overrides]}]

    def problems(self) -> Iterator[tuple[Path, str]]:
        if self.driver is None and self.config is None and not self.overrides:
            yield (), 'one of "driver" and "config" is needed'
