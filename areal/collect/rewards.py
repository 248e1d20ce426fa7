"""User rewards in processes of their own, each call with a deadline.

A reward that hangs, crashes its process or raises is a failure of its episode and never a number. A process that is
late is killed and replaced: Python cannot stop a call from within.
"""

from __future__ import annotations

import contextlib
import json
import queue
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from areal.collect.failures import EpisodeFailed, Kind
from areal.collect.scoring import BUILT_IN
from areal.errors import ArealError

_LOAD_S = 120.0
_GRACE_S = 2.0
_TOKENS = frozenset(("prompt_ids", "completion_ids"))


class _Worker:
    """One process, for one call at a time."""

    def __init__(self, spec: str) -> None:
        argv = [sys.executable, "-m", "areal.collect.reward_worker", spec]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._rest = b""

    def ask(self, document: Mapping[str, Any] | None, deadline_s: float) -> dict[str, Any]:
        """Raises TimeoutError, ConnectionError when the process is gone."""
        assert self._process.stdin is not None
        if document is not None:
            self._process.stdin.write(json.dumps(document, default=str).encode() + b"\n")
            self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._line(time.monotonic() + deadline_s))
        return found

    def _line(self, until: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([fd], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError
            more = self._process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
            if not more:
                raise ConnectionError(f"its process ended with status {self._process.wait()}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def end(self, *, kill: bool) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        if kill:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class RewardPool:
    """``size`` processes of one reward function, ``module:function`` or a built-in name. A context manager.
    ``wants_tokens``: it names token ids among its parameters."""

    def __init__(self, spec: str, size: int, deadline_s: float) -> None:
        self._spec = BUILT_IN.get(spec, spec)
        self._deadline_s = deadline_s
        self._size = size
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: set[_Worker] = set()
        self._lock = threading.Lock()
        self.wants_tokens = False

    def __enter__(self) -> RewardPool:
        """Raises ArealError with what the first process said when it cannot load the function."""
        try:
            for worker in [self._spawned() for _ in range(self._size)]:  # they load at the same time
                self._idle.put(self._loaded(worker))
        except BaseException:
            self._end(kill=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end(kill=kind is not None)

    def _end(self, *, kill: bool) -> None:
        with self._lock:
            for worker in self._all:
                worker.end(kill=kill)
            self._all.clear()

    def score(self, given: Mapping[str, Any]) -> float:
        """Raises EpisodeFailed."""
        worker = self._idle.get()
        try:
            said = worker.ask(given, self._deadline_s)
        except TimeoutError as error:
            worker = self._replaced(worker)
            message = f"the reward did not come within {self._deadline_s:g} s"
            raise EpisodeFailed(Kind.REWARD_TIMEOUT, message) from error
        except (OSError, ValueError) as error:
            worker = self._replaced(worker)
            raise EpisodeFailed(Kind.REWARD, f"the reward's process failed: {error}") from error
        finally:
            self._idle.put(worker)
        if "reward" not in said:
            raise EpisodeFailed(Kind.REWARD, str(said.get("error")))
        return float(said["reward"])

    def _replaced(self, worker: _Worker) -> _Worker:
        with self._lock:
            self._all.discard(worker)
        worker.end(kill=True)
        return self._loaded(self._spawned())

    def _spawned(self) -> _Worker:
        worker = _Worker(self._spec)
        with self._lock:
            self._all.add(worker)
        return worker

    def _loaded(self, worker: _Worker) -> _Worker:
        try:
            said = worker.ask(None, _LOAD_S)
        except (OSError, ValueError) as error:
            raise ArealError(f"--reward {self._spec}: its process did not start: {error}") from error
        if "error" in said:
            raise ArealError(str(said["error"]), hint=said.get("hint"))
        self.wants_tokens = not _TOKENS.isdisjoint(said["takes"])
        return worker
