"""A trainer's numbers for Prometheus: ``/metrics`` of the first rank, and where it is found.

``prometheus.json`` in the run's folder is a file of Prometheus' ``file_sd_configs``; a run that samples from a service
also registers itself there, whose ``/http_sd`` lists it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from areal.resources.addresses import is_loopback
from areal.rollout.controller import KEY_FILE
from areal.services.http.auth import AdminKey, load_admin_key
from areal.services.http.serve import serve_in_thread
from areal.services.http.service import Service
from areal.training.run_folder import replace_text

if TYPE_CHECKING:
    from areal.api.cli_args import BaseExperimentConfig
    from areal.services.http.metrics import Metrics

DISCOVERY = "prometheus.json"
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


class Prometheus:
    """A tracker, as those of ``areal.training.metrics``: it shows each number that the last steps had."""

    def __init__(self, metrics: Metrics, total_steps: int) -> None:
        gauge = metrics.gauge
        self._step = gauge("areal_trainer_step", "Steps that were taken.")
        gauge("areal_trainer_total_steps", "Steps of the whole run.").set(total_steps)
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

    def close(self) -> None:
        pass


@contextlib.contextmanager
def prometheus(config: BaseExperimentConfig, folder: Path, total_steps: int) -> Iterator[tuple[Prometheus, str]]:
    """The tracker, and the address at which it is scraped while the block runs. Raises UsageFault where others could
    reach it and there is no key."""
    asked = config.stats_logger.prometheus
    loopback = is_loopback(asked.host)
    service = Service("trainer", key=None if loopback else _key(config), loopback=loopback)
    tracker = Prometheus(service.metrics, total_steps)
    with serve_in_thread(service, asked.host, asked.port) as url:
        file = folder / DISCOVERY
        replace_text(file, json.dumps([{"targets": [urlsplit(url).netloc], "labels": labels(config)}]) + "\n")
        try:
            yield tracker, url
        finally:
            file.unlink(missing_ok=True)


def labels(config: BaseExperimentConfig) -> dict[str, str]:
    return {"job": "areal-trainer", "experiment": config.experiment_name, "trial": config.trial_name}


def _key(config: BaseExperimentConfig) -> AdminKey | None:
    """That of the service which is trained for: whoever may scrape the one may scrape the other."""
    rollout = getattr(config, "rollout", None)
    of_service = (rollout.admin_api_key_file or os.environ.get(KEY_FILE)) if rollout is not None else None
    return load_admin_key(config.stats_logger.prometheus.key_file or of_service or None)
