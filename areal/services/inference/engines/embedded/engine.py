"""The engine's thread: takes steps while there is work, and does everything else between two steps.

Other threads send it commands, which it runs in order between steps: once ``pause`` or ``load_weights`` is done, no
step is running, and while paused none begins. A paused engine keeps its sequences and their cache. After a weight swap
they continue from their tokens, with keys and values computed again: each token carries the version and the
log-probability of the weights that sampled it.

A failed step is fatal, since the state of cache and sequences is unknown. Every sequence ends, the engine refuses all
further calls, and ``on_failure`` is called.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch

from areal.dataclasses import dataclass, field, replace
from areal.errors import ArealError, Conflict
from areal.services.inference.engines.embedded.decoder import RowSpan, cheapest_spans
from areal.services.inference.engines.embedded.linear import Adapter
from areal.services.inference.engines.embedded.runner import Adapters, ModelRunner, PartImages
from areal.services.inference.engines.embedded.sampler import Sampled, SamplerBatch
from areal.services.inference.engines.embedded.scheduler import (
    BatchScheduler,
    Chunk,
    Copy,
    Decode,
    Finish,
    Prefill,
    SchedulerLimits,
    TokenSequence,
    TopLogprobs,
    merge_moves,
)
from areal.services.weight_transfer.memory import TransferProgress

T = TypeVar("T")
P = ParamSpec("P")
logger = logging.getLogger(__name__)
Scores = tuple[list[float], list[TopLogprobs]]
_MOMENT_S = 0.002
_GATHER_S = 0.02
# The fixed cost of an attention call, in positions of a row, measured at head_dim 64. An accelerator computes all rows
# in one call.
_CALL = {"cpu": 256}
_NEVER = 2**40


class CommandQueue:
    """Commands from other threads. ``call`` is for any thread, the rest for the thread that runs the commands.

    After ``close``, pending and later calls raise the refusal.
    """

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._gate = threading.Lock()  # orders putting a command and closing
        self._refusal: Exception | None = None

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Return the future of ``action()``. Cancelling it before it runs withdraws it."""
        future: Future[T] = Future()
        with self._gate:
            if self._refusal is not None:
                raise self._refusal
            self._commands.put((future, action))
        return future

    def run_next(self, *, wait: bool) -> None:
        """Run the next command; with ``wait``, wait for one."""
        if not wait and self._commands.empty():
            return
        future, action = self._commands.get()
        if not future.set_running_or_notify_cancel():
            return  # withdrawn by its caller
        try:
            future.set_result(action())
        except Exception as error:  # noqa: BLE001 (the calling thread gets it)
            future.set_exception(error)

    @property
    def is_empty(self) -> bool:
        return self._commands.empty()

    def close(self, refusal: Exception) -> None:
        with self._gate:
            self._refusal = refusal
        while not self._commands.empty():
            future, _ = self._commands.get()
            if future.set_running_or_notify_cancel():
                future.set_exception(refusal)


def _between_steps(method: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[Engine, P], Future[T]]:
    """Run the method in the engine's thread between two steps. Any thread may call it and gets a future."""

    @wraps(method)
    def call(engine: Engine, /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return engine._commands.call(lambda: method(engine, *args, **kwargs))

    return call


@dataclass
class Counters:
    """Totals since the start. Only the engine's thread writes them."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    aborted: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    weight_loads: int = 0
    busy_seconds: float = 0.0


@dataclass(frozen=True)
class Stats:
    running: int
    waiting: int
    paused: bool
    version: int
    kv_used: int
    kv_tokens: int
    memory_released: bool
    kept_tokens: int
    shared_tokens: int
    preemptions: int
    counters: Counters = field(default_factory=Counters)


class Engine:
    """Runs a model in its own thread, which also calls ``on_progress`` after each step (True: a sequence began or ended
    in it) and ``on_failure``."""

    def __init__(
        self,
        runner: ModelRunner,
        limits: SchedulerLimits,
        on_progress: Callable[[bool], None] = lambda urgent: None,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.limits = limits
        self.vocab_size, self.device = runner.vocab_size, runner.device
        self.version = 0
        self.paused = False
        self.memory_released = False
        self.counters = Counters()
        self._runner = runner
        self._scheduler = BatchScheduler(
            limits if runner.keeps_prefixes else replace(limits, shortest_share=2**62, copies_rows=False)
        )
        self._on_progress, self._on_failure = on_progress, on_failure
        self._commands = CommandQueue()
        self._closing = False
        self._broken: Exception | None = None
        self._staged: tuple[int, Callable[[], object]] | None = None  # version, and its installation
        self._gathering = False
        self._batch: SamplerBatch | None = None
        self._adapters: Adapters = ()  # those of the batch's sequences
        self._tokens = self._positions = torch.empty(0, dtype=torch.int64)
        self._spans: tuple[RowSpan, ...] = ()  # the batch's spans when it was bound
        self._grown = 0  # tokens per row since then
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def load(self) -> tuple[int, int]:
        """The numbers of running and waiting sequences."""
        return len(self._scheduler.running), len(self._scheduler.waiting)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread. Sequences that have not ended are lost."""
        if self._thread.is_alive():
            with contextlib.suppress(ArealError):  # it has ended already
                self._close()
            self._thread.join()

    @_between_steps
    def _close(self) -> None:
        self._closing = True

    @_between_steps
    def submit(self, sequences: list[TokenSequence], *, more_coming: bool = False) -> None:
        """Queue sequences. ``more_coming``: other requests of the same batch are about to arrive, and an engine without
        other work waits for them."""
        self._gathering = more_coming and (self._gathering or not self._scheduler.has_work)
        self.counters.requests += 1
        for sequence in sequences:
            self._scheduler.add(sequence)

    @_between_steps
    def abort(self, sequences: list[TokenSequence]) -> None:
        """End the sequences. Once the future is done, they get no further token."""
        self._abort(sequences, Finish.ABORT)

    @_between_steps
    def abort_if_paused(self) -> None:
        """End all sequences if a pause or released memory suspends them, for a shutdown."""
        if self._suspended:
            self._abort(self._sequences(), Finish.LOST)

    def _abort(self, sequences: list[TokenSequence], finish: Finish) -> None:
        live = [sequence for sequence in sequences if sequence.finish is None]
        self.counters.aborted += len(live)
        self._end(live, finish)
        self._on_progress(True)

    @_between_steps
    def pause(self) -> None:
        """Pause. Once the future is done, no step runs until ``resume``."""
        self.paused = True

    @_between_steps
    def resume(self) -> None:
        self.paused = False

    @_between_steps
    def set_version(self, version: int) -> None:
        self.version = version

    def load_weights(self, folder: Path, version: int | None) -> object:
        """Swap the weights between two steps; later tokens carry ``version``. Blocks the caller. Returns the replaced
        weights, because the engine's thread must not spend the time to free them.

        Raises ArealError if the folder does not have this whole model; then the old weights and their version stay.
        """
        return self._install(self._runner.prepare(folder), version).result()

    def stage_weights(self, folder: Path, version: int, arrival: TransferProgress | None = None) -> None:
        """Prepare weights for ``load_staged`` while generation continues, even while they arrive. Blocks the caller.
        Raises ArealError as ``load_weights`` does."""
        self.drop_staged()
        self._staged = (version, self._runner.prepare(folder, arrival))

    def drop_staged(self) -> None:
        """Free staged weights."""
        self._staged = None

    def load_staged(self, version: int) -> object:
        """Swap in the staged weights, like ``load_weights``. Raises Conflict if another version is staged."""
        staged, self._staged = self._staged, None
        if staged is None or staged[0] != version:
            has = "none" if staged is None else str(staged[0])
            raise Conflict(f"version {version} is not staged here: {has} is")
        return self._install(staged[1], version).result()

    @_between_steps
    def _install(self, install: Callable[[], object], version: int | None) -> object:
        if self.memory_released:
            raise Conflict("the engine's memory is released: resume it before weights are loaded")
        try:
            replaced = install()
        except Exception as error:
            # Old and new weights may be mixed.
            self._broken = error
            raise
        self._copy(self._scheduler.forget_cache())
        self._batch = None
        self.counters.weight_loads += 1
        if version is not None:
            self.version = version
        return replaced

    def forget_weights(self) -> None:
        """Free staged weights and the mapped memory of their source. Not concurrently with ``stage_weights``."""
        self._staged = None
        self._runner.forget()

    @_between_steps
    def score(self, prompt: list[int], top: int, adapter: Adapter | None = None) -> Scores:
        """Return the log-probability of each token of ``prompt`` except the first, and the ``top`` likeliest tokens
        there. Raises Conflict while the memory is released."""
        if self.memory_released:
            raise Conflict("the engine's memory is released")
        logprobs: list[float] = []
        tops: list[TopLogprobs] = []
        for logits in self._runner.score(prompt, adapter):
            following = prompt[len(logprobs) + 1 : len(logprobs) + 1 + len(logits)]
            scored = logits[: len(following)].log_softmax(-1)
            targets = torch.tensor(following, device=scored.device).unsqueeze(1)
            logprobs += scored.gather(1, targets).squeeze(1).tolist()
            values, ids = scored.topk(min(top, scored.shape[1]), dim=-1)
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            tops += [list(zip(each, of_each, strict=True)) for each, of_each in pairs]
        return logprobs, tops

    def read_adapter(self, name: str, folder: Path) -> Adapter:
        """Read an adapter. Raises ArealError if the folder is not a LoRA adapter of this model."""
        return self._runner.read_adapter(name, folder)

    @_between_steps
    def release_memory(self) -> None:
        """Free the memory of weights and cache. Running sequences wait, and are computed again.

        Raises ArealError, with nothing changed, if there is no room to offload the weights.
        """
        if not self.memory_released:
            self._runner.release()
            self._scheduler.forget_cache()
            self._batch = None
            self.memory_released = True

    @_between_steps
    def restore_memory(self) -> None:
        if not self.memory_released:
            return
        try:
            self._runner.restore()
        except Exception as error:
            self._broken = error  # some of the weights may be missing
            raise
        self.memory_released = False

    @_between_steps
    def stats(self) -> Stats:
        running = self._scheduler.running
        return Stats(
            running=len(running),
            waiting=len(self._scheduler.waiting),
            paused=self.paused,
            version=self.version,
            kv_used=sum(sequence.cached for sequence in running),
            kv_tokens=self.limits.kv_tokens,
            memory_released=self.memory_released,
            kept_tokens=self._scheduler.prefixes.size,
            shared_tokens=self._scheduler.shared_tokens,
            preemptions=self._scheduler.preemptions,
            counters=Counters(**vars(self.counters)),
        )

    def _run(self) -> None:
        try:
            while not self._closing:
                self._run_commands(wait=self._suspended or not self._scheduler.has_work)
                if self._gathering:
                    self._gather()
                if not self._suspended and not self._closing and self._scheduler.has_work:
                    self._step()
            self._end_all(Conflict("the engine is shutting down"))
        except Exception as error:  # the boundary of the thread
            logger.exception("a step failed")
            self._end_all(ArealError(f"the engine failed: {error!r}"))
            self._on_failure(error)

    def _gather(self) -> None:
        """Wait until no request arrives for a moment, at most ``_GATHER_S``: one large prefill costs less than several
        small ones."""
        until = time.monotonic() + _GATHER_S
        while self._gathering and self._broken is None and time.monotonic() < until:
            time.sleep(_MOMENT_S)
            if self._commands.is_empty:
                break
            self._run_commands(wait=False)
        self._gathering = False

    @property
    def _suspended(self) -> bool:
        return self.paused or self.memory_released

    def _run_commands(self, *, wait: bool) -> None:
        """Run all queued commands; with ``wait``, at least one."""
        self._commands.run_next(wait=wait)
        while not self._commands.is_empty and self._broken is None:
            self._commands.run_next(wait=False)
        if self._broken is not None:
            raise self._broken

    def _sequences(self) -> list[TokenSequence]:
        return [*self._scheduler.running, *self._scheduler.waiting]

    def _end_all(self, refusal: ArealError) -> None:
        """End the queue and all sequences, at the end of the thread."""
        self._commands.close(refusal)
        for sequence in self._sequences():
            sequence.finish = Finish.LOST
        self._on_progress(True)

    def _step(self) -> None:
        started = time.perf_counter()
        step = self._scheduler.schedule()
        assert step is not None
        self._copy(step.moves)
        self._runner.reserve(step.rows, step.width)
        if isinstance(step, Prefill):
            self._copy(step.fills)
        ended = self._prefill(step) if isinstance(step, Prefill) else self._decode(step)
        self.counters.busy_seconds += time.perf_counter() - started
        self._on_progress(ended or isinstance(step, Prefill))

    def _prefill(self, step: Prefill) -> bool:
        tokens = [chunk.sequence.tokens(chunk.start, chunk.stop) for chunk in step.chunks]
        starts, adapters = [chunk.start for chunk in step.chunks], _adapters([chunk.sequence for chunk in step.chunks])
        images = [_images(chunk) for chunk in step.chunks]
        logits = self._runner.prefill(tokens, starts, step.first_row, adapters, images if any(images) else ())
        self.counters.prefill_steps += 1
        self.counters.prompt_tokens += sum(map(len, tokens))
        if step.spread is not None:
            self._runner.copy(step.spread)
        self._scheduler.commit(step)
        completed = [sequence for sequence, _ in step.completed]
        if not completed:
            return False
        own = torch.tensor([place for _, place in step.completed], device=self._runner.device)
        batch = SamplerBatch(completed, self.vocab_size, self._runner.device)
        sampled = batch.sample(logits[own])
        self._set_batch(batch, sampled.tokens)
        return self._append(completed, sampled)

    def _decode(self, step: Decode) -> bool:
        if self._batch is None or not self._spans or self._batch.sequences != step.sequences:
            self._bind(step.sequences)
        assert self._batch is not None
        spans = tuple([span.grown(self._grown) for span in self._spans])
        logits = self._runner.decode(self._tokens, self._positions, spans, self._adapters)
        sampled = self._batch.sample(logits)
        self._tokens = sampled.tokens
        self._positions += 1
        self._grown += 1
        self.counters.decode_steps += 1
        self._scheduler.commit(step)
        return self._append(step.sequences, sampled)

    def _bind(self, sequences: tuple[TokenSequence, ...]) -> None:
        """Build the tensors of a changed batch."""
        device = self._runner.device
        if not self._narrow(sequences):
            newest = [sequence.tokens(sequence.length - 1, sequence.length)[0] for sequence in sequences]
            self._set_batch(SamplerBatch(sequences, self.vocab_size, device), torch.tensor(newest, device=device))
        lengths = [sequence.cached + 1 for sequence in sequences]
        self._spans, self._grown = cheapest_spans(lengths, _CALL.get(device.type, _NEVER)), 0

    def _set_batch(self, batch: SamplerBatch, tokens: torch.Tensor) -> None:
        """Continue with this batch, whose newest tokens are ``tokens``; ``_bind`` sets the spans."""
        self._batch, self._tokens, self._spans = batch, tokens, ()
        self._adapters = _adapters(batch.sequences)
        self._positions = torch.tensor([sequence.cached for sequence in batch.sequences], device=tokens.device)

    def _narrow(self, sequences: tuple[TokenSequence, ...]) -> bool:
        """Derive the batch from the present one if sequences were only removed, which is the usual change. Returns
        whether it was derived."""
        if self._batch is None or self._adapters:
            return False
        place = {id(sequence): number for number, sequence in enumerate(self._batch.sequences)}
        rows = [place.get(id(sequence), -1) for sequence in sequences]
        narrower = self._batch.of_rows(rows) if -1 not in rows else None
        if narrower is None:
            return False
        self._batch = narrower
        index = torch.from_numpy(np.array(rows)).to(self._runner.device)  # four times as fast as torch.tensor
        self._tokens, self._positions = self._tokens[index], self._positions[index]
        return True

    def _append(self, sequences: list[TokenSequence] | tuple[TokenSequence, ...], sampled: Sampled) -> bool:
        """Append a token to each sequence. Returns whether one of them ended."""
        version, top = self.version, sampled.top
        stopped: list[TokenSequence] = []
        full: list[TokenSequence] = []
        dead_ends: list[TokenSequence] = []  # their grammar allows no further token
        tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
        for sequence, likeliest in zip(sequences, top or (), strict=False):
            sequence.top.append(likeliest)
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            sequence.output.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
            sequence.produced += 1
            if sequence.matcher is not None and (fault := sequence.matcher.observe(token)) is not None:
                sequence.fault = fault
                dead_ends.append(sequence)
            elif token in sequence.stop_ids:
                sequence.stop_token = token
                stopped.append(sequence)
            elif sequence.produced == sequence.allowance:
                full.append(sequence)
        self.counters.generated_tokens += len(tokens)
        if stopped:
            self._end(stopped, Finish.STOP)
        if full:
            self._end(full, Finish.LENGTH)
        if dead_ends:
            self._end(dead_ends, Finish.DEAD_END)
        return bool(stopped or full or dead_ends)

    def _end(self, sequences: list[TokenSequence], finish: Finish) -> None:
        self._copy(self._scheduler.remove(sequences))
        for sequence in sequences:
            sequence.counts = sequence.seen = sequence.matcher = None
            sequence.finish = finish

    def _copy(self, copies: tuple[Copy, ...]) -> None:
        for copy in merge_moves(copies) if self._scheduler.limits.copies_rows else copies:
            self._runner.copy(copy)


def _adapters(sequences: list[TokenSequence] | tuple[TokenSequence, ...]) -> Adapters:
    """Return the sequences' adapters; empty if none has one, which is the fast path."""
    adapters = [sequence.adapter for sequence in sequences]
    return adapters if any(adapters) else ()


def _images(chunk: Chunk) -> PartImages | None:
    """Return the images of the chunk's prompt."""
    pixels = chunk.sequence.pixels
    return None if pixels is None else PartImages(pixels, 0).after(chunk.sequence.tokens(0, chunk.start))
