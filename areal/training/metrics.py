"""A run's numbers: a line of JSON a step, and whatever trackers the config asks for.

A run that resumes from an older checkpoint takes some steps again: their lines are taken out when it does, and whoever
reads takes the last line of each step (``read_metrics``).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from areal.errors import UsageFault
from areal.training.run_folder import bottleneck, replace_text

if TYPE_CHECKING:
    from areal.api.cli_args import BaseExperimentConfig

Metrics = dict[str, float]


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """Written by the first rank. A full disk costs the line, not the run."""

    def __init__(self, path: Path, attempt: int, trackers: list[Tracker]) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")
        self._attempt = attempt
        self._trackers = trackers

    def rewind(self, step: int) -> None:
        """Leave out the lines of later steps: a run that resumes after ``step`` takes them again."""
        kept = [line for line in _lines(self._path) if line["step"] <= step]
        with contextlib.suppress(OSError):
            replace_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))
            self._file.close()
            self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float], total: int | None = None) -> None:
        """``total``: how many steps the run has."""
        line: dict[str, Any] = {"step": step, "attempt": self._attempt, "time": time.time()}
        if total is not None:
            line["total_steps"] = total
        if said := bottleneck(metrics):
            line["bottleneck"] = said
        numbers = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The last line of each step, in order of steps. A line that was cut off is left out."""
    by_step = {line["step"]: line for line in _lines(path)}
    return [by_step[step] for step in sorted(by_step)]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Those that are whole."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = json.loads(text)
                line["step"] = int(line["step"])
                yield line


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
    if asked.swanlab.mode != "disabled":
        trackers.append(_SwanLab(config, folder))
    if asked.trackio.mode != "disabled":
        trackers.append(_Trackio(config))
    return trackers


def _package(tracker: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageFault(
            f"stats_logger.{tracker} needs the package {error.name or name}",
            hint=f"pip install {name}; metrics.jsonl is written in any case",
        ) from error


class _TensorBoard:
    def __init__(self, path: str) -> None:
        _package("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, config: BaseExperimentConfig, folder: Path) -> None:
        wandb = _package("wandb", "wandb")
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
            config=asked.config,
            dir=str(folder),
            id=f"{config.experiment_name}-{config.trial_name}{asked.id_suffix or ''}".replace("/", "-"),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _SwanLab:
    def __init__(self, config: BaseExperimentConfig, folder: Path) -> None:
        asked = config.stats_logger.swanlab
        self._swanlab = _package("swanlab", "swanlab")
        if asked.api_key:
            self._swanlab.login(api_key=asked.api_key)
        self._swanlab.init(
            project=asked.project or config.experiment_name,
            experiment_name=asked.name or config.trial_name,
            config=asked.config,
            logdir=asked.logdir or str(folder / "swanlog"),
            mode=asked.mode,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


class _Trackio:
    def __init__(self, config: BaseExperimentConfig) -> None:
        asked = config.stats_logger.trackio
        self._trackio = _package("trackio", "trackio")
        space = asked.space_id or os.environ.get("TRACKIO_SPACE_ID")
        if asked.mode == "online" and not space:
            raise UsageFault(
                "stats_logger.trackio: mode online needs the name of a Space",
                hint="stats_logger.trackio.space_id=USER/NAME, or mode=local",
            )
        self._trackio.init(
            project=asked.project or config.experiment_name,
            name=asked.name or config.trial_name,
            space_id=space if asked.mode == "online" else None,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._trackio.log(dict(metrics), step=step)

    def close(self) -> None:
        self._trackio.finish()
