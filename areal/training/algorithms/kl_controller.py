"""The adaptive coefficient of a KL penalty (Ziegler et al., arXiv 1909.08593, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass

_MOST = 0.2  # the relative error that counts


@dataclass
class KLController:
    """Holds the KL divergence from the reference near ``target``; None: the coefficient stays. ``horizon``: over how
    many sequences the coefficient may grow by a fifth. ``factor`` multiplies the configured coefficient."""

    target: float | None = None
    horizon: int = 10_000
    factor: float = 1.0

    def update(self, kl: float, sequences: int) -> None:
        """``kl``: the mean over the tokens of a batch of so many sequences."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -_MOST), _MOST)
            self.factor *= 1 + error * sequences / self.horizon
