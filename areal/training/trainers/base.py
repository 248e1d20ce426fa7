"""``Trainer``: the training loop of all algorithms, with timers, checkpoints, evaluation and metrics.

An algorithm implements ``train_step`` and its own checkpoint state. The loop resumes from the newest checkpoint if
``recover`` allows it. ``_after_step`` saves, evaluates and checkpoints between steps, in one order, on all ranks.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import gc
import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from areal.api import stats
from areal.api.alloc_mode import train_backend
from areal.api.cli_args import BaseExperimentConfig, TrainEngineConfig
from areal.api.config.experiment import PeriodicConfig
from areal.api.engine_api import CheckpointUnreadable, TrainEngine
from areal.api.io_struct import StepInfo
from areal.dataclasses import asdict, dataclass
from areal.errors import ArealError, UsageFault
from areal.files import disk_remedy
from areal.training import stopping
from areal.training.checkpoints import Checkpoint, CheckpointFailed, Checkpoints
from areal.training.engines import open_engine, without_optimizer
from areal.training.frontier import DataOrder, rows_digest
from areal.training.metrics import Metrics, MetricsLog, ProgressLine, Prometheus, Timings, open_trackers, prometheus
from areal.training.ranks import Ranks, ensure_layout, join_ranks, layout_of, require_layout, require_shared
from areal.training.run_folder import run_folder
from areal.wire.stage import report_stage
from areal.wire.training_health import warnings_of

_REMEMBERED = 5000  # steps: warnings count consecutive ones


@dataclass
class Timer:
    """The period of an action. Call ``due`` once after every step. ``now`` is the first rank's monotonic clock, so that
    all ranks act together."""

    period: PeriodicConfig
    steps: int = 0  # since the action was last due
    epochs: int = 0
    fired_at: float | None = None

    @property
    def is_disabled(self) -> bool:
        return (self.period.freq_steps, self.period.freq_epochs, self.period.freq_secs) == (None, None, None)

    def due(self, *, epoch_ended: bool, now: float) -> bool:
        if self.fired_at is None:
            self.fired_at = now
        self.steps += 1
        self.epochs += epoch_ended
        passed = (
            (self.steps, self.period.freq_steps),
            (self.epochs, self.period.freq_epochs),
            (now - self.fired_at, self.period.freq_secs),
        )
        fires = any(limit is not None and count >= limit for count, limit in passed)
        if fires:
            self.steps, self.epochs, self.fired_at = 0, 0, now
        return fires

    def state(self) -> dict[str, int]:
        return {"steps": self.steps, "epochs": self.epochs}

    def restore(self, state: dict[str, int]) -> None:
        self.steps, self.epochs, self.fired_at = state["steps"], state["epochs"], None


class Trainer(abc.ABC):
    """The training loop. A context manager that owns the ranks, files and services that it opens. ``scheduler``: an
    argument of AReaL's drivers, which is ignored."""

    scheduler: None = None

    def __init__(
        self,
        config: BaseExperimentConfig,
        train_dataset: Sequence[Any] | None = None,
        valid_dataset: Sequence[Any] | None = None,
    ) -> None:
        ensure_layout(config)
        self.config = config
        self.train_dataset = train_dataset
        self.valid_dataset = valid_dataset
        self.step = 0  # completed steps
        self.timings = Timings()
        self.engines: dict[str, TrainEngine] = {}
        self._updates: dict[str, int] = {}  # optimizer steps in a step, by role
        self._prometheus: Prometheus | None = None
        self._recent: deque[Metrics] = deque(maxlen=_REMEMBERED)
        self._warned: set[str] = set()  # the rules of the newest step's warnings
        self._skipped: set[str] = set()  # actions that were due after this step, and skipped by a stop
        self.stack = contextlib.ExitStack()
        try:
            self._open()
        except BaseException:
            self.stack.close()
            raise

    def _open(self) -> None:
        self.ranks: Ranks = self.stack.enter_context(join_ranks(layout_of(self.config)))
        torch.manual_seed(self.config.seed)  # the same on every rank: new weights are initialized before sharding
        self.folder = run_folder(self.config)
        data, rows = self.config.train_dataset, self._require_rows(self.train_dataset, "train_dataset")
        source = str(getattr(rows, "source", "") or data.path or "memory")
        is_kept = self.ranks.is_first and self.config.recover.enabled
        digest = rows_digest(rows) if is_kept else ""
        try:
            self.order = DataOrder(
                len(rows), data.batch_size, data.shuffle, data.drop_last, self.config.seed, source, digest
            )
        except ValueError as error:
            raise UsageFault(str(error), hint="train_dataset.batch_size=N, or train_dataset.drop_last=false") from error
        self.steps_per_epoch = self.order.batches_per_epoch
        self.total_steps = self.config.total_train_steps or self.config.total_train_epochs * self.steps_per_epoch
        self.checkpoints = Checkpoints(self.folder.checkpoints)
        self._timers = {
            "save": Timer(self.config.saver),
            "checkpoint": Timer(self.config.recover),
            "eval": Timer(self.config.evaluator),
        }
        self.progress = ProgressLine(self.total_steps)
        if self.ranks.is_first:
            self.folder.prepare()
            self.stack.enter_context(self.folder.locked())
            self._changes = self.folder.write_config(self.config)
            resumes = self.config.recover.enabled and self.checkpoints.newest() is not None
            trackers = open_trackers(self.config, self.folder.root, resumes=resumes)
            self.metrics_url: str | None = None
            if self.config.stats_logger.prometheus.enabled:
                scraped = prometheus(self.config, self.folder.root, self.total_steps)
                self._prometheus, self.metrics_url = self.stack.enter_context(scraped)
                trackers.append(self._prometheus)
            self.log = MetricsLog(self.folder.metrics, self.folder.attempt, trackers)
            self.stack.callback(self.log.close)
            self.stack.callback(self.progress.close)
        require_shared(self.folder.root, self.ranks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()
        stats.taken()  # what its last episodes have recorded is not that of the next run of this process

    @abc.abstractmethod
    def train_step(self) -> Metrics:
        """Run step number ``self.step`` (from 0), on all ranks. Raises NonFinite."""

    def evaluate(self) -> Metrics:
        """Return the metrics of ``valid_dataset``, if any."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the algorithm's state for a checkpoint, besides the engines, as JSON."""
        return {}

    def restore(self, state: dict[str, object]) -> None:
        """Restore the result of ``state``."""
        assert not state, "an algorithm with a state overrides this"

    def run(self) -> None:
        """Train to the end of the run. Raises Stopped after the step in which a stop was requested."""
        resumed = self.recover()
        if self.config.evaluator.eval_before_train and not resumed:
            self._log(self._evaluate() | self.timings.pop())
        if self._skipped:
            metrics = self._after_step(self._skipped) | self.timings.pop()
            self._skipped = set()
            if self.ranks.is_first:
                self.log.amend(self.step, metrics)
        gc.collect()
        gc.freeze()  # a collection over the objects of torch and transformers takes 0.16 s
        with stopping.deferred():
            while self.step < self.total_steps:
                began = time.monotonic()
                try:
                    metrics = self.train_step()
                except stopping.Stopped:  # requested before the step has begun
                    self._checkpoint_to_stop()
                    raise
                self.step += 1
                stop = bool(self.ranks.all_max(int(stopping.requested())))
                due = self._due()
                if stop and self.step < self.total_steps:
                    self._skipped = due & {"save", "eval"}
                    self._checkpoint_to_stop()
                else:
                    metrics |= self._after_step(due)
                metrics |= self.timings.pop() | {
                    "time/step": time.monotonic() - began,
                    "epoch": self.step / self.steps_per_epoch,
                }
                self._log(metrics)
                if stop and self.step < self.total_steps:
                    raise stopping.Stopped

    def _checkpoint_to_stop(self) -> None:
        newest = self.checkpoints.newest()
        if self.config.recover.enabled and self.step and (newest is None or newest.step != self.step):
            self.checkpoint()

    def _due(self) -> set[str]:
        """Return the actions that are due after this step, the same on all ranks."""
        ended = self.step % self.steps_per_epoch == 0
        now = float(self.ranks.broadcast(time.monotonic()))
        return {name for name, timer in self._timers.items() if timer.due(epoch_ended=ended, now=now)}

    def _after_step(self, due: Collection[str]) -> Metrics:
        """Save, evaluate and checkpoint as far as they are due, on all ranks."""
        last = self.step == self.total_steps
        metrics: Metrics = {}
        if "save" in due or (last and not self._timers["save"].is_disabled):
            with self.timings.of("save"):
                metrics |= self._try_save(last=last)
        if "eval" in due:
            metrics |= self._evaluate()
        if self.config.recover.enabled and ("checkpoint" in due or last):
            with self.timings.of("checkpoint"):
                metrics |= self._try_checkpoint(last=last)
        return metrics

    def _try_save(self, *, last: bool) -> Metrics:
        """Save the model. A full disk causes a warning, but is an error for the ``last`` model."""
        failure: OSError | None = None
        try:
            self.save(self.folder.models / f"step_{self.step}")
        except OSError as error:
            failure = error
        if not self.ranks.all_max(int(failure is not None)):
            return {}
        message = f"the model of step {self.step} cannot be written: {failure or 'the first rank failed'}"
        if last:
            raise ArealError(message, hint=f"{disk_remedy(failure)}, then areal restart the job")
        self._note(f"warning: {message}; the run goes on")
        return {"save/failed": 1.0}

    def _try_checkpoint(self, *, last: bool) -> Metrics:
        """Write a checkpoint. A full disk causes a warning, because the next one may succeed; for the ``last`` it is an
        error."""
        try:
            self.checkpoint()
        except CheckpointFailed as error:
            if last:
                raise
            self._note(f"warning: {error.message}; the run goes on")
            return {"checkpoint/failed": 1.0}
        return {}

    def _evaluate(self) -> Metrics:
        with self.timings.of("eval"):
            return {f"eval/{name}": value for name, value in self.evaluate().items()}

    def _log(self, metrics: Metrics) -> None:
        """Log the metrics, and the statistics that workflows and the driver have recorded on all ranks."""
        recorded = stats.numbers_of(stats.merged(self.ranks.data_gather(stats.taken())))
        if self.ranks.is_first:
            self.log.write(self.step, recorded | metrics, self.total_steps)
            self.progress.step(self.step, metrics)
            self._recent.append({"step": self.step, **metrics})
            found = warnings_of(self._recent)
            for warning in found:
                if warning.is_due(self._warned):
                    self.progress.info(f"warning: {warning.message}")
            self._warned = {warning.rule for warning in found}

    def _note(self, text: str) -> None:
        """Write a line to the log, once for all ranks."""
        if self.ranks.is_first:
            self.progress.info(text)

    def report_stage(self, stage: str) -> None:
        """Report the stage of the run before its first step, for its status."""
        if self.ranks.is_first:
            report_stage(stage)

    def info(self) -> StepInfo:
        """Return the position of the next step in the run."""
        epoch, number = divmod(self.step, self.steps_per_epoch)
        return StepInfo(epoch, number, self.step, self.steps_per_epoch)

    def add_engine(self, role: str, config: TrainEngineConfig, updates: int = 1) -> TrainEngine:
        """Load the model of ``role`` into an engine. ``updates``: optimizer steps in one step of the run. Raises
        UsageFault if the model needs an optimizer and has none."""
        if role != "ref" and config.optimizer is None:  # before services start
            raise without_optimizer(config.path, role)
        total_updates = max(1, self.total_steps * updates)
        if config.backend:
            require_layout(self.ranks, train_backend(config.backend), role)
        self.report_stage(f"loading {role} from {config.path}")
        engine = open_engine(config, self.ranks, total_updates, str(self.ranks.layout))
        self.engines[role], self._updates[role] = engine, updates
        return engine

    def set_total_steps(self, steps: int) -> None:
        """Set the length of the run, and of the engines' learning rate schedules."""
        self.total_steps = self.progress.total = steps
        for role, engine in self.engines.items():
            engine.total_steps = max(1, steps * self._updates[role])
        if self.ranks.is_first and self._prometheus is not None:
            self._prometheus.total_steps.set(steps)

    def add_reference(self, config: TrainEngineConfig, path: str) -> TrainEngine:
        """Load a frozen model ``ref``, by default the model in ``path``."""
        reference = copy.deepcopy(config)
        reference.optimizer, reference.path = None, reference.path or path
        return self.add_engine("ref", reference)

    def save(self, folder: Path) -> None:
        """Save the first engine's model as a Hugging Face folder with its tokenizer."""
        next(iter(self.engines.values())).save_model(folder, self.config.tokenizer_path)

    def checkpoint(self) -> None:
        """Write a checkpoint of all trained engines and of the trainer's state, on all ranks."""
        with self.checkpoints.writing(self.step, self.ranks) as (folder, state):
            for role, engine in self.engines.items():
                if engine.is_trained:
                    engine.save_checkpoint(folder / role)
            state |= {
                "step": self.step,
                "total_steps": self.total_steps,
                "data": asdict(self.order),
                "timers": {name: timer.state() for name, timer in self._timers.items()},
                "skipped": sorted(self._skipped),
                "algorithm": self.state(),
            }

    def recover(self) -> bool:
        """Resume from the newest valid checkpoint, if the configuration allows it. Return whether it did."""
        newest = self._load_newest() if self.config.recover.enabled else None
        if newest is None:
            if self.ranks.is_first:
                earlier = self.log.restart()
                if earlier is not None and self.folder.attempt == 1:
                    self.progress.info(f"the metrics of an earlier run of these names are kept as {earlier}")
            return False
        state = newest.state()
        self.step = int(state["step"])
        for name, timer in self._timers.items():
            timer.restore(state["timers"][name])
        self._skipped = set(state.get("skipped", ()))  # absent in older checkpoints
        self.restore(state["algorithm"])
        changed = self.order.changes(state["data"])
        if changed:
            self._note(
                f"warning: the data is not that of the checkpoint ({', '.join(changed)}): rows may come twice, or never"
            )
        if self.ranks.is_first:
            if self._changes:
                self._note(f"warning: the configuration is not that of the last attempt ({', '.join(self._changes)})")
            self.log.rewind(self.step)
        self._note(f"resumed after step {self.step} from {newest.folder}")
        return True

    def _load_newest(self) -> Checkpoint | None:
        """Load the newest readable checkpoint into the engines. Newer unreadable ones are set aside. If none is
        readable, the configuration is probably wrong: raises ArealError, and keeps all of them."""
        refused: list[tuple[Checkpoint, str]] = []
        while True:
            before = refused[-1][0].step if refused else None
            found: Checkpoint | None = self.ranks.broadcast(
                self.checkpoints.newest_whole(before) if self.ranks.is_first else None
            )
            if found is None:
                break
            try:
                for role, engine in self.engines.items():
                    if engine.is_trained:
                        engine.load_checkpoint(found.folder / role)
                break
            except CheckpointUnreadable as error:
                refused.append((found, error.message))
        if refused and found is None:
            first, why = refused[0]
            raise ArealError(
                f"{first.folder} cannot be loaded: {why}",
                hint="it may be of another model or layout of parameters: what is there is left as it is",
            )
        for checkpoint, why in refused if self.ranks.is_first else ():
            self.checkpoints.set_aside(checkpoint, why)
        return found

    @staticmethod
    def _require_rows(dataset: Sequence[Any] | None, name: str) -> Sequence[Any]:
        if dataset is None or not len(dataset):
            raise UsageFault(f"this trainer needs a {name} with at least one row")
        return dataset
