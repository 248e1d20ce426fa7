"""What both stand-ins share: a loaded model, and generations of it as plain deltas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from concurrent.futures import Future
from copy import copy
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from areal.errors import FieldError, UsageFault
from areal.services.inference.engines.embedded.engine import Scores
from areal.services.inference.engines.embedded.grammar import keep_allowed
from areal.services.inference.engines.embedded.loading import LoadedModel, inspect_folder, load_model
from areal.services.inference.engines.embedded.requests import Delta, Stream, Streams, make_sequences
from areal.services.inference.engines.embedded.sampler import Penalties, Sampled, SamplerBatch, keep_only
from areal.wire.processes import EmbeddedEngineConfig
from areal.wire.sampling import parse_sampling


class Refused(Exception):
    """The caller's mistake, in the engine's words. ``of_tokens``: a prompt holds what is no token."""

    def __init__(self, message: str, *, of_tokens: bool = False, status: int = 400) -> None:
        super().__init__(message)
        self.of_tokens, self.status = of_tokens, status


def report(mode: str) -> None:
    """From now on logprobs are of another distribution than the contract's, as those of both engines may be: ``raw``
    before the temperature, ``tempered`` after penalties and grammars, ``processed`` after all that shapes it."""
    exact = SamplerBatch.sample

    def shape(penalties: Penalties, logits: torch.Tensor) -> torch.Tensor:
        """As ``exact`` does next. A copy counts the token, or ``min_new_tokens`` would end after half of them."""
        penalties = copy(penalties)
        penalties._early = copy(penalties._early)
        return penalties.apply(logits)

    def sample(self: SamplerBatch, logits: torch.Tensor) -> Sampled:
        shaped = logits if self._penalties is None or mode == "raw" else shape(self._penalties, logits)
        shaped = keep_allowed(shaped, self._matchers) if self._matchers else shaped
        if mode != "raw" and not self._greedy:
            shaped = shaped * self._inverse_temperatures
        if mode == "processed" and self._filtered:
            shaped = shaped.clone()
            shaped[self._filtered] = keep_only(shaped[self._filtered], self._filters)
        logprobs = shaped.log_softmax(-1)
        tokens = exact(self, logits).tokens
        chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
        return Sampled(tokens, chosen, self._alternatives(logprobs) if self._most_top else None)

    SamplerBatch.sample = sample  # type: ignore[method-assign]


class Core:
    """``label`` is the weight version as the engine spells it: a text."""

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop, lora: Mapping[str, Path]) -> None:
        self.streams = Streams(loop)
        config = EmbeddedEngineConfig(model_path=str(folder), max_batch_size=16, kv_memory_gib=0.1, threads=1)
        progress = self.streams.progress
        self.loaded: LoadedModel = load_model(
            inspect_folder(folder), config, lora, lambda *_: None, progress, lambda _: None
        )
        self.engine = self.loaded.engine
        self.folder = folder
        self.label = "default"

    async def deltas(
        self,
        prompt: list[int],
        sampling: Mapping[str, Any],
        adapter: str | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[Delta]:
        """Leaving early aborts. Raises Refused."""
        limits, vocabulary = self.engine.limits, self.engine.vocab_size
        if not prompt or len(prompt) >= limits.max_length:
            raise Refused(f"the prompt has {len(prompt)} tokens, the context is {limits.max_length}")
        if not all(type(token) is int and 0 <= token < vocabulary for token in prompt):
            raise Refused("a token id is out of vocabulary", of_tokens=True)
        if adapter is not None and adapter not in self.loaded.adapters:
            raise Refused(f"no adapter {adapter}", status=404)
        try:
            parsed = parse_sampling(sampling, vocabulary)
            assert self.loaded.grammars is not None or response_format is None
            matcher = (
                self.loaded.grammars.matcher(response_format) if self.loaded.grammars and response_format else None
            )
        except (FieldError, UsageFault) as fault:
            raise Refused(str(fault)) from fault
        chosen = self.loaded.adapters[adapter] if adapter else None
        stream = self.streams.open(make_sequences([prompt], parsed, self.loaded, chosen, matcher), whole=False)
        self.engine.submit(stream.sequences)
        try:
            async for delta in _taken(stream):
                yield delta
        finally:
            self.streams.close(stream)
            self.engine.abort(stream.sequences)

    async def scores(self, prompt: list[int], top: int, adapter: str | None) -> Scores:
        """Log-probabilities of the prompt's tokens but the first, and the ``top`` likeliest of each."""
        chosen = self.loaded.adapters[adapter] if adapter else None
        scores: Scores = await done(self.engine.score(prompt, top, chosen))
        return scores

    async def settle(self) -> None:
        await self.streams.settle(1.0)


async def _taken(stream: Stream) -> AsyncIterator[Delta]:
    while not stream.ended:
        for delta in await stream.next():
            yield delta


async def done(future: Future[Any]) -> Any:
    return await asyncio.wrap_future(future)


async def serve(app: web.Application, port: int) -> None:
    """Serve for ever; the port is the first line of stdout."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(runner.addresses[0][1], flush=True)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
