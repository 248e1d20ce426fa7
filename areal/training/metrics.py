"""A run's numbers: a line of JSON a step, and whatever trackers the config asks for.

A run that resumes from an older checkpoint takes some steps again: it writes them again, and whoever reads takes the
last line of each step (``read_metrics``).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from areal.errors import UsageFault

if TYPE_CHECKING:
    from areal.api.cli_args import BaseExperimentConfig

Metrics = dict[str, float]


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """Written by the first rank. A full disk costs the line, not the run."""

    def __init__(self, path: Path, attempt: int, trackers: list[Tracker]) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._attempt = attempt
        self._trackers = trackers

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        line = {"step": step, "attempt": self._attempt, "time": time.time()}
        numbers = {name: _jsonable(value) for name, value in metrics.items()}
        with contextlib.suppress(OSError):
            self._file.write(json.dumps({**line, **numbers}) + "\n")
            self._file.flush()
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        for tracker in self._trackers:
            tracker.close()


def _jsonable(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # NaN is no JSON


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The last line of each step, in order of steps. A line that was cut off is left out."""
    by_step: dict[int, dict[str, Any]] = {}
    with path.open(encoding="utf-8") as file:
        for text in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                by_step[int(line["step"])] = line
    return [by_step[step] for step in sorted(by_step)]


class Timings:
    """Seconds by what they were spent on, of one step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[what] = self._seconds.get(what, 0.0) + time.monotonic() - began

    def taken(self) -> Metrics:
        seconds, self._seconds = self._seconds, {}
        return {f"time/{what}": value for what, value in seconds.items()}


def open_trackers(config: BaseExperimentConfig, folder: Path) -> list[Tracker]:
    """Raises UsageFault naming the package that a tracker needs."""
    asked, trackers = config.stats_logger, list[Tracker]()
    if asked.tensorboard.path is not None:
        trackers.append(_TensorBoard(asked.tensorboard.path))
    if asked.wandb.mode != "disabled":
        trackers.append(_WandB(config, folder))
    for name, mode in (("swanlab", asked.swanlab.mode), ("trackio", asked.trackio.mode)):
        if mode != "disabled":
            raise UsageFault(f"stats_logger.{name} is not there yet", hint="metrics.jsonl, tensorboard or wandb")
    return trackers


class _TensorBoard:
    def __init__(self, path: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageFault("stats_logger.tensorboard needs the package tensorboard") from error
        self._writer: Any = SummaryWriter(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, config: BaseExperimentConfig, folder: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageFault("stats_logger.wandb needs the package wandb") from error
        asked = config.stats_logger.wandb
        self._run: Any = wandb.init(
            mode=asked.mode,
            project=asked.project or config.experiment_name,
            name=asked.name or config.trial_name,
            entity=asked.entity,
            group=asked.group,
            tags=asked.tags,
            notes=asked.notes,
            job_type=asked.job_type,
            dir=str(folder),
            id=f"{config.experiment_name}-{config.trial_name}{asked.id_suffix or ''}".replace("/", "-"),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()
