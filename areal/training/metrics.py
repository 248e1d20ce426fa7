"""A run's metrics: one JSON line for each step, and the configured trackers.

A run that resumes from an older checkpoint repeats some steps: it removes their lines. Readers merge the lines of a
step (``areal.state.job_metrics``): a driver may log numbers of its own."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO
from urllib.parse import urlsplit

from areal.dataclasses import dataclass, field
from areal.errors import UsageFault
from areal.files import parse_json, replace_file
from areal.numbers import duration, number
from areal.resources.addresses import is_loopback
from areal.rollout.controller import KEY_FILE
from areal.services.http.auth import AdminKey, load_admin_key
from areal.services.http.serve import serve_in_thread
from areal.services.http.service import Service
from areal.training.run_folder import plain_values
from areal.wire.training_health import NO_WAIT

if TYPE_CHECKING:
    from areal.api.cli_args import BaseExperimentConfig
    from areal.services.http.service import Metrics as Registry


Metrics = dict[str, float]
DISCOVERY = "prometheus.json"
WANDB_ID = "wandb.id"
_GAUGES = {
    "reward/mean": ("areal_trainer_reward", "Mean reward of the last step's samples."),
    "eval/reward/mean": ("areal_trainer_eval_reward", "Mean reward of the last evaluation."),
    "accuracy": ("areal_trainer_accuracy_ratio", "Share of right answers or preferences."),
    "loss": ("areal_trainer_loss", "Loss of the last step."),
    "grad_norm": ("areal_trainer_grad_norm", "Norm of the gradient, before it is clipped."),
    "lr": ("areal_trainer_learning_rate", "Learning rate of the last update."),
    "entropy": ("areal_trainer_entropy_nats", "Mean entropy of the sampled tokens' distributions."),
    "length/mean": ("areal_trainer_answer_tokens", "Mean length of the last step's answers."),
    "length/truncated": ("areal_trainer_truncated_ratio", "Share of answers that were cut off."),
    "tokens_per_second": ("areal_trainer_tokens_per_second", "Sampled tokens that were trained on, of the last step."),
    "version": ("areal_trainer_weight_version", "Version of the weights that were published last."),
}
_KLS = {"approx_kl": "update", "ref_kl": "reference", "mismatch_kl": "mismatch"}
_AGES = {"staleness/mean": "mean", "staleness/max": "max"}
_WAITS = {
    "time/rollout": "rollouts",
    "time/weights": "weight updates",
    "time/save": "saving",
    "time/checkpoint": "checkpoints",
    "time/eval": "evaluation",
}
_SHOWN = (
    ("reward/mean", "reward {}"),
    ("accuracy", "accuracy {}"),
    ("loss", "loss {}"),
    ("tokens_per_second", "{} tokens/s"),
    ("staleness/max", "staleness {}"),
    ("lr", "lr {}"),
)


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def rewind(self, step: int) -> None:
        """Forget what was logged after ``step``: it is repeated."""

    def close(self) -> None: ...


class MetricsLog:
    """``metrics.jsonl``, written by the first rank. If the disk is full, a line is written with the next one. The file
    is opened for each line, because a trainer and a driver's ``StatsLogger`` may both write to it and replace it."""

    def __init__(self, path: Path, attempt: int, trackers: list[Tracker]) -> None:
        self._path = path
        path.touch()
        self._unwritten = ""
        self._attempt = attempt
        self._trackers = trackers

    def rewind(self, step: int) -> None:
        """Remove the lines of steps after ``step``, which a resumed run repeats."""
        self._replace([line for line in _lines(self._path) if line["step"] <= step])
        for tracker in self._trackers:
            tracker.rewind(step)

    def restart(self) -> Path | None:
        """Start an empty file. Returns the file to which the previous lines were moved, if there were any."""
        if not self._path.stat().st_size:
            return None
        earlier = self._path.with_name("metrics.old.jsonl")
        self._path.replace(earlier)
        self._path.touch()
        for tracker in self._trackers:
            tracker.rewind(-1)
        return earlier

    def amend(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics that were measured later to the line of ``step``."""
        numbers = _numbers(metrics)
        self._replace([line | numbers if line["step"] == step else line for line in _lines(self._path)])
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def _replace(self, lines: Sequence[Mapping[str, object]]) -> None:
        with contextlib.suppress(OSError):
            replace_file(self._path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def write(self, step: int, metrics: Mapping[str, float], total: int | None = None) -> None:
        """Write the line of a step. ``total``: the number of steps of the run."""
        line: dict[str, object] = {"step": step, "attempt": self._attempt, "time": time.time()}
        if total is not None:
            line["total_steps"] = total
        if text := bottleneck(metrics):
            line["bottleneck"] = text
        text, self._unwritten = f"{self._unwritten}{json.dumps({**line, **_numbers(metrics)})}\n", ""
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError:
            self._unwritten = f"\n{text}"  # a part of the line may be in the file
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def _numbers(metrics: Mapping[str, float]) -> dict[str, float | str]:
    """Return the numbers as JSON, which has no infinity and no NaN."""
    return {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                line = parse_json(text)
                line["step"] = int(line["step"])
                yield line


class Timings:
    """The seconds of a step, by phase."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def of(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - began

    def pop(self) -> Metrics:
        seconds, self._seconds = self._seconds, {}
        return {f"time/{phase}": value for phase, value in seconds.items()}


def open_trackers(config: BaseExperimentConfig, folder: Path, *, resumes: bool = False) -> list[Tracker]:
    """Open the configured trackers. ``resumes``: the run of a tracker continues the last one of ``folder``. Raises
    UsageFault with the package that a tracker needs."""
    logger, trackers = config.stats_logger, list[Tracker]()
    if logger.tensorboard.path is not None:
        trackers.append(_TensorBoard(logger.tensorboard.path))
    if logger.wandb.mode != "disabled":
        trackers.append(_open_wandb(config, folder, resumes=resumes))
    if logger.swanlab.mode != "disabled":
        trackers.append(_open_swanlab(config, folder))
    if logger.trackio.mode != "disabled":
        trackers.append(_open_trackio(config))
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

        self._open: Any = partial(SummaryWriter, path)
        self._writer = self._open()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(purge_step=step + 1)

    def close(self) -> None:
        self._writer.close()


@dataclass
class _TrackedRun:
    """A run of wandb, or of a package with wandb's interface."""

    run: Any

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def rewind(self, step: int) -> None:
        """Do nothing: the package cannot."""

    def close(self) -> None:
        self.run.finish()


def _settings(config: BaseExperimentConfig, asked: Mapping[str, object] | None) -> Mapping[str, object]:
    """Return what a tracker shows as the configuration of a run: what is ``asked`` for, else all of it."""
    return plain_values(config) if asked is None else asked


def _wandb_id(config: BaseExperimentConfig, folder: Path, *, resumes: bool) -> str:
    """Return the id of the run at W&B, which is another one for a new run of the same names: W&B drops the steps that
    a run has already."""
    file, suffix = folder / WANDB_ID, config.stats_logger.wandb.id_suffix or ""
    named = f"{config.experiment_name}-{config.trial_name}{suffix}".replace("/", "-")
    with contextlib.suppress(OSError):
        if resumes and (known := file.read_text()).startswith(named):
            return known
    made = f"{named}-{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):  # a full disk costs the continuation of the curve
        replace_file(file, made.encode())
    return made


def _open_wandb(config: BaseExperimentConfig, folder: Path, *, resumes: bool) -> Tracker:
    wandb, asked = _package("wandb", "wandb"), config.stats_logger.wandb
    run = wandb.init(
        mode=asked.mode,
        project=asked.project or config.experiment_name,
        name=asked.name or config.trial_name,
        entity=asked.entity,
        group=asked.group,
        tags=asked.tags,
        notes=asked.notes,
        job_type=asked.job_type,
        config=_settings(config, asked.config),
        dir=str(folder),
        id=_wandb_id(config, folder, resumes=resumes),
        resume="allow",
    )
    return _TrackedRun(run)


def _open_swanlab(config: BaseExperimentConfig, folder: Path) -> Tracker:
    swanlab, asked = _package("swanlab", "swanlab"), config.stats_logger.swanlab
    if asked.api_key:
        swanlab.login(api_key=asked.api_key)
    swanlab.init(
        project=asked.project or config.experiment_name,
        experiment_name=asked.name or config.trial_name,
        config=_settings(config, asked.config),
        logdir=asked.logdir or str(folder / "swanlog"),
        mode=asked.mode,
    )
    return _TrackedRun(swanlab)


def _open_trackio(config: BaseExperimentConfig) -> Tracker:
    trackio, asked = _package("trackio", "trackio"), config.stats_logger.trackio
    space = asked.space_id or os.environ.get("TRACKIO_SPACE_ID")
    if asked.mode == "online" and not space:
        raise UsageFault(
            "stats_logger.trackio: mode online needs the name of a Space",
            hint="stats_logger.trackio.space_id=USER/NAME, or mode=local",
        )
    trackio.init(
        project=asked.project or config.experiment_name,
        name=asked.name or config.trial_name,
        space_id=space if asked.mode == "online" else None,
        config=_settings(config, None),
    )
    return _TrackedRun(trackio)


class Prometheus:
    """A tracker that exports the newest metrics on ``/metrics`` of the first rank. ``prometheus.json`` in the run's
    folder names it for ``file_sd_configs``; a run with a service also registers it there, for ``/http_sd``."""

    def __init__(self, metrics: Registry, total_steps: int) -> None:
        gauge = metrics.gauge
        self._step = gauge("areal_trainer_step", "Steps that were taken.")
        self.total_steps = gauge("areal_trainer_total_steps", "Steps of the whole run.")
        self.total_steps.set(total_steps)
        self._gauges = {name: gauge(*about) for name, about in _GAUGES.items()}
        self._kl = gauge("areal_trainer_kl_nats", "KL divergence.", ("kind",))
        self._age = gauge(
            "areal_trainer_staleness_versions", "How much older samples were than the weights.", ("statistic",)
        )
        self._prompts = gauge("areal_trainer_prompts", "Prompts of the whole run, by how they ended.", ("outcome",))
        self._tokens = metrics.counter("areal_trainer_tokens_total", "Tokens of the batches, prompts too.")
        self._seconds = metrics.counter("areal_trainer_seconds_total", "Seconds that steps took.", ("phase",))
        self._other = gauge("areal_trainer_metric", "Any other number of metrics.jsonl.", ("name",))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._step.set(step)
        for name, value in metrics.items():
            kind, _, rest = name.partition("/")
            if name in self._gauges:
                self._gauges[name].set(value)
            elif name in _KLS:
                self._kl.labels(_KLS[name]).set(value)
            elif name in _AGES:
                self._age.labels(_AGES[name]).set(value)
            elif kind == "prompts":
                self._prompts.labels(rest).set(value)
            elif name == "tokens" and value >= 0:
                self._tokens.inc(value)
            elif kind == "time" and value >= 0 and math.isfinite(value):
                self._seconds.labels("whole" if rest == "step" else rest).inc(value)
            else:
                self._other.labels(name).set(value)

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def prometheus(config: BaseExperimentConfig, folder: Path, total_steps: int) -> Iterator[tuple[Prometheus, str]]:
    """Yield the tracker, and its URL while the block runs. Raises UsageFault for an open address without a key."""
    asked = config.stats_logger.prometheus
    loopback = is_loopback(asked.host)
    key: AdminKey | None = None
    if not loopback:  # by default the inference service's key: one scraper reads both
        rollout = getattr(config, "rollout", None)
        service_key = (rollout.admin_api_key_file or os.environ.get(KEY_FILE)) if rollout is not None else None
        key = load_admin_key(asked.key_file or service_key or None)
    service = Service("trainer", key=key, loopback=loopback)
    tracker = Prometheus(service.metrics, total_steps)
    with serve_in_thread(service, asked.host, asked.port) as url:
        file = folder / DISCOVERY
        replace_file(file, json.dumps([{"targets": [urlsplit(url).netloc], "labels": labels(config)}]).encode() + b"\n")
        try:
            yield tracker, url
        finally:
            file.unlink(missing_ok=True)


def labels(config: BaseExperimentConfig) -> dict[str, str]:
    return {"job": "areal-trainer", "experiment": config.experiment_name, "trial": config.trial_name}


def bottleneck(metrics: Mapping[str, float]) -> str:
    """Return the bottleneck of a step, such as "waited 71% for rollouts"; "training" if no wait took a quarter of the
    step."""
    whole = metrics.get("time/step", 0.0)
    if whole <= 0:
        return ""
    waits = {cause: metrics.get(name, 0.0) / whole for name, cause in _WAITS.items()}
    cause, share = max(waits.items(), key=lambda item: item[1])
    return f"waited {share:.0%} for {cause}" if share >= 0.25 else NO_WAIT


def step_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """Return the log line of a step: ``step 12/200  reward 0.412  ...  1.3s/step  waited 71% for rollouts``."""
    shown = [form.format(number(metrics[name])) for name, form in _SHOWN if name in metrics]
    paces = [f"{duration(metrics['time/step'])}/step"] if "time/step" in metrics else []
    return "  ".join([f"step {step}/{total}", *shown, *paces, bottleneck(metrics)]).rstrip()


@dataclass
class ProgressLine:
    """One line that is redrawn on a terminal; elsewhere a line for each percent of the run."""

    total: int
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    _open: bool = False

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        line = step_line(step, self.total, metrics)
        if self.stream.isatty():
            self.stream.write(f"\r\x1b[K{line}")
            self._open = True
        elif step == self.total or step % max(1, self.total // 100) == 0:
            self.stream.write(line + "\n")
        self.stream.flush()

    def info(self, text: str) -> None:
        self.close()
        self.stream.write(text + "\n")
        self.stream.flush()

    def close(self) -> None:
        if self._open:
            self.stream.write("\n")
            self._open = False
