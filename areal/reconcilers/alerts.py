"""Alerts: current problems of training jobs and their services, each with its cause and the next command.

The rules are pure. Rules on step metrics are in ``areal.wire.training_health``, which the trainer's log and a job's
status share. This module adds the rules that need more (a stalled step, restarts without progress, a replica behind),
and collects their inputs from a home.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from areal.client.gateway import ServiceClient
from areal.dataclasses import asdict, dataclass
from areal.errors import ArealError
from areal.numbers import age, duration
from areal.reconcilers.weight_gateways import GatewayRecord, read_gateway
from areal.resources.addresses import is_loopback
from areal.resources.kinds import TRAIN_JOB
from areal.state.home import Home
from areal.state.job_metrics import bottleneck, newest_step
from areal.wire.training_health import NO_WAIT, Step, warnings_of

if TYPE_CHECKING:
    from areal.reconcilers.kinds.job_status import JobStatus
    from areal.state.records import StoredObject

_STALLED = 10.0  # times the longest of the previous steps
_LEAST_STALL_S = 120.0
_REMEMBERED = 100  # steps
_RESTARTS = 2  # starts since the newest step
_BEHIND = 2  # versions; one is usual while an update is under way
_CALL_S = 1.0
_GREATEST = 1e12  # seconds; a greater value is not a time
_METRICS = "areal train metrics {name} --metric reward/mean --metric approx_kl --metric entropy --metric grad_norm"
_NEXT = {
    "not-finite": _METRICS,
    "kl-spike": _METRICS,
    "reward-collapse": _METRICS,
    "no-spread": "areal train trajectories {name} --step {step}",
    "flat-reward": "areal train trajectories {name} --step {step} --sort best",
}


@dataclass(frozen=True)
class Alert:
    """A problem. ``since``: seconds since the epoch, if known; ``step``: where it began."""

    rule: str
    severity: str  # error or warning
    object: str
    message: str
    cause: str
    next: str
    step: int | None = None
    since: float | None = None

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class JobFacts:
    """Facts about a job besides its steps. ``attempt``: the number of its driver's starts."""

    name: str
    is_running: bool
    attempt: int = 0
    waits_for: str = ""


def job_alerts(steps: Sequence[Step], facts: JobFacts, now: float) -> list[Alert]:
    """Return the alerts of a job at its newest step. The steps of an ended job are judged, too; stalls and restarts
    concern running jobs only."""
    newest: Step = steps[-1] if steps else {}
    found = []
    for warning in warnings_of(steps):
        words = _NEXT[warning.rule].format(name=facts.name, step=newest.get("step", 0))
        severity = "error" if warning.is_error else "warning"
        where = f"{TRAIN_JOB}/{facts.name}"
        recent = reversed(steps[-_REMEMBERED:]) if warning.step is not None else ()
        since = next((_seconds(each, "time") for each in recent if each.get("step") == warning.step), None)
        found.append(Alert(warning.rule, severity, where, warning.message, warning.cause, words, warning.step, since))
    if facts.is_running:
        found += filter(None, (_stall(steps, facts, now), _restart_loop(newest, facts)))
    return found


def _seconds(step: Step, name: str) -> float | None:
    value = step.get(name)
    return float(value) if isinstance(value, int | float) and -_GREATEST < value < _GREATEST else None


def _stall(steps: Sequence[Step], facts: JobFacts, now: float) -> Alert | None:
    if not steps or (written := _seconds(steps[-1], "time")) is None:
        return None
    recent = [steps[-back] for back in range(1, min(len(steps), _REMEMBERED) + 1)]
    took = [seconds for step in recent if (seconds := _seconds(step, "time/step")) is not None and seconds >= 0]
    limit = max(_LEAST_STALL_S, _STALLED * max(took, default=0.0))
    waited = now - written
    if waited <= limit or _is_last(steps[-1]):
        return None
    usual = f", where {duration(statistics.median(took))} is usual" if took else ""
    waits = f"; its last step {facts.waits_for}" if facts.waits_for not in ("", NO_WAIT) else ""
    return Alert(
        "stall",
        "error",
        f"{TRAIN_JOB}/{facts.name}",
        f"no step for {age(waited)}{usual}",
        f"a service that does not answer, an environment that hangs, or a rank that waits for others{waits}",
        f"areal train logs {facts.name} -n 50",
        steps[-1].get("step"),
        written,
    )


def _is_last(step: Step) -> bool:
    """Return whether this is the run's last step, after which only the final save follows."""
    number, total = step.get("step"), step.get("total_steps")
    return isinstance(number, int) and isinstance(total, int) and number >= total


def _restart_loop(newest: Step, facts: JobFacts) -> Alert | None:
    taken = newest.get("attempt", 0)
    if not isinstance(taken, int) or facts.attempt - max(taken, 1) < _RESTARTS:
        return None
    starts = facts.attempt - taken
    return Alert(
        "restart-loop",
        "error",
        f"{TRAIN_JOB}/{facts.name}",
        f"it was started {starts} times without finishing a step",
        "the driver fails before its first step: the log of an earlier attempt ends with why",
        f"areal train logs {facts.name} --attempt {facts.attempt - 1}",
        newest.get("step"),
    )


def replica_alerts(name: str, pairs: Sequence[Mapping[str, object]]) -> list[Alert]:
    """Return the alerts about the weights that the job ``name`` publishes. ``pairs``: as its weight-update gateway
    lists them."""
    found = []
    for pair in pairs:
        version = pair.get("version")
        workers = pair.get("inference_workers")
        workers = [each for each in workers if isinstance(each, Mapping)] if isinstance(workers, list) else []
        known = [(str(each.get("url")), each.get("version")) for each in workers]
        if not isinstance(version, int):
            continue
        behind = [(url, has) for url, has in known if isinstance(has, int) and has <= version - _BEHIND]
        if behind:
            url, has = behind[0]
            more = f", and {len(behind) - 1} more" if len(behind) > 1 else ""
            found.append(
                Alert(
                    "replica-behind",
                    "warning",
                    f"{TRAIN_JOB}/{name}",
                    f"{url} serves version {has}, where {version} is published{more}",
                    "the replica refused or missed a weight update; what it samples is older than staleness counts",
                    f"areal weight-update status --service {name}",
                )
            )
    return found


def read_pairs(gateway: GatewayRecord, key: str | None) -> list[dict[str, object]]:
    """Return the pairs that a weight-update gateway lists within a second. Raises ArealError if it does not."""
    status, document = ServiceClient(gateway.url, key, _CALL_S).ask("GET", "/pairs")
    if status != 200 or not isinstance(document, dict) or not isinstance(document.get("pairs"), list):
        raise ArealError(f"GET /pairs answers {status} without pairs")  # its port may be another's now
    return [pair for pair in document["pairs"] if isinstance(pair, dict)]


def _pairs_of(home: Home, name: str) -> list[dict[str, object]]:
    """Return the pairs of a job; none if it has no gateway or the gateway does not answer. The key is sent on this
    machine only."""
    try:
        gateway = read_gateway(home.jobs / name)
        return read_pairs(gateway, gateway.key() if is_loopback(urlsplit(gateway.url).hostname or "") else None)
    except (OSError, ValueError, KeyError, TypeError, ArealError):
        return []


def gather(
    home: Home,
    jobs: Sequence[StoredObject],
    statuses: Mapping[str, JobStatus],
    steps: Mapping[str, Sequence[Step]],
    *,
    with_replicas: bool = True,
) -> Iterator[Alert]:
    """Yield the alerts of ``jobs``. ``statuses`` and ``steps`` are by job name. ``with_replicas``: query the
    weight-update gateways, too."""
    from areal.reconcilers.kinds.job_status import JobPhase

    for job in jobs:
        status = statuses[job.name]
        running = status.phase is JobPhase.RUNNING
        waits = bottleneck(newest_step(home.job_metrics(job.name))) or ""
        facts = JobFacts(job.name, running, status.attempt, waits)
        yield from job_alerts(steps[job.name], facts, time.time())
        if running and with_replicas:
            yield from replica_alerts(job.name, _pairs_of(home, job.name))
