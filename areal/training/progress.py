"""What a run tells whoever watches it: one line a step, and the one sentence about what it waits for."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TextIO

_WAITS = {
    "time/rollout": "rollouts",
    "time/weights": "weight updates",
    "time/save": "saving",
    "time/checkpoint": "checkpoints",
    "time/eval": "evaluation",
}
_SHOWN = (
    ("reward/mean", "reward {:.3f}"),
    ("accuracy", "accuracy {:.3f}"),
    ("loss", "loss {:.4f}"),
    ("tokens_per_second", "{:,.0f} tokens/s"),
    ("staleness/max", "staleness {:.0f}"),
    ("lr", "lr {:.1e}"),
)


def bottleneck(metrics: Mapping[str, float]) -> str:
    """Such as "waited 71% for rollouts"; "training" where nothing else took a quarter of the step. Said here
    once: whoever shows it later reads it in ``metrics.jsonl``."""
    whole = metrics.get("time/step", 0.0)
    if whole <= 0:
        return ""
    waits = {what: metrics.get(name, 0.0) / whole for name, what in _WAITS.items()}
    what, share = max(waits.items(), key=lambda item: item[1])
    return f"waited {share:.0%} for {what}" if share >= 0.25 else "training"


def step_line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """``step 12/200  reward 0.412  ...  1.3 s/step  waited 71% for rollouts``."""
    shown = [form.format(metrics[name]) for name, form in _SHOWN if name in metrics]
    seconds = metrics.get("time/step")
    paces = [] if seconds is None else [f"{seconds:.2f} s/step" if seconds >= 0.1 else f"{seconds * 1e3:.0f} ms/step"]
    return "  ".join([f"step {step}/{total}", *shown, *paces, bottleneck(metrics)]).rstrip()


@dataclass
class Progress:
    """On a terminal one line that changes; elsewhere a line for each hundredth of the run, and the last."""

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

    def say(self, text: str) -> None:
        self.close()
        self.stream.write(text + "\n")
        self.stream.flush()

    def close(self) -> None:
        if self._open:
            self.stream.write("\n")
            self._open = False
