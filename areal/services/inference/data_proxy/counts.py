"""What of finished answers is counted for ``/metrics``."""

from __future__ import annotations

from areal.services.inference.data_proxy.shapes import Frame
from areal.services.inference.engines.base import FinishReason
from areal.services.web.metrics import SECONDS, TOKEN_SECONDS, Metrics


class TokenCounts:
    def __init__(self, metrics: Metrics) -> None:
        self._prompt = metrics.counter("areal_prompt_tokens_total", "Tokens of prompts answered.")
        self._generated = metrics.counter("areal_generated_tokens_total", "Tokens generated in finished answers.")
        choices = metrics.counter("areal_choices_total", "Finished choices.", ("finish_reason",))
        self._choices = {reason: choices.labels(reason.value) for reason in FinishReason}
        self._first = metrics.histogram(
            "areal_time_to_first_token_seconds", "From a request read to its first token.", SECONDS, ()
        )
        self._each = metrics.histogram(
            "areal_time_per_output_token_seconds", "Between two tokens: an answer's mean.", TOKEN_SECONDS, ()
        )

    def answered(self, frame: Frame, to_first_s: float, after_first_s: float) -> None:
        """All choices of an answer have ended: ``to_first_s`` from its request to its first token, then the rest."""
        self._first.observe(to_first_s)
        longest = max(len(choice.token_ids) for choice in frame.choices)
        if longest > 1:
            self._each.observe(after_first_s / (longest - 1))
        self._prompt.inc(sum(map(len, frame.prompts)))
        self._generated.inc(sum(len(choice.token_ids) for choice in frame.choices))
        for choice in frame.choices:
            assert choice.finish_reason is not None
            self._choices[choice.finish_reason].inc()
