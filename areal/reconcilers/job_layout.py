"""How many processes train, from what a job's configuration lays out; what cannot be is refused before anything starts.

``actor.backend`` (or ``allocation_mode``) says ``fsdp:d4``: four processes. ``spec.resources`` may say the same in its
own words, or alone.
"""

from __future__ import annotations

from dataclasses import replace

from areal.errors import InvalidManifest
from areal.reconcilers.desired import Wanted
from areal.reconcilers.job_config import JobConfig
from areal.resources.backend_grammar import Part

PROCESSES = "processesPerNode"


def laid_out(job: Wanted, config: JobConfig) -> Wanted:
    """The job with its number of processes. Raises InvalidManifest naming the field."""
    resources = dict(job.spec.get("resources") or {})
    nodes, scheduler = resources.get("nodes") or 1, (job.spec.get("scheduler") or {}).get("type", "local")
    if nodes > 1 and scheduler == "local":
        raise InvalidManifest(
            f"{job.ref}: spec.resources.nodes is {nodes}, and spec.scheduler.type local knows one machine",
            hint="leave nodes out, or name a cluster's scheduler: ray or slurm",
        )
    found = config.training()
    if found is None:
        return job
    key, part = found
    _require_possible(job, key, part)
    if resources.get(PROCESSES) is None:
        wanted, rest = divmod(part.data, nodes)
        if rest:
            raise InvalidManifest(f"{job.ref}: {key} {part} cannot be spread over spec.resources.nodes {nodes}")
        if wanted == 1:
            return job
        return replace(job, spec={**job.spec, "resources": {**resources, PROCESSES: wanted}})
    stated = nodes * resources[PROCESSES]
    if stated != part.data:
        raise InvalidManifest(
            f"{job.ref}: {key} {part} is {part.data} processes, and spec.resources.{PROCESSES} makes {stated}",
            hint="give one of them, or the same number",
        )
    return job


def _require_possible(job: Wanted, key: str, part: Part) -> None:
    if part.engine != "fsdp":
        raise InvalidManifest(
            f"{job.ref}: {key} {part}: the {part.engine} engine is not there yet, and p, t, c and m need it",
            hint=f"for example fsdp:d{part.world_size}",
        )
    if part.devices_per_replica > 1 or part.expert > 1:
        raise InvalidManifest(
            f"{job.ref}: {key} {part}: fsdp shards over data-parallel ranks only",
            hint=f"for example fsdp:d{part.world_size}",
        )
