"""Run a plan's ops in dependency order, in parallel. Decides nothing.

Invariants: an op begins only when all it needs have succeeded; an op that needs a failed one is skipped, and so is
whatever needs that; after an interrupt nothing new begins and what runs is finished, or gives up by itself. ``after``
in an op's args names ops that must have ended, well or not.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event

from areal.errors import ArealError
from areal.reconcilers.plan import Op, Plan

PARALLEL_OPS = 32
_INTERRUPT_POLL_S = 0.2


class Interrupted(ArealError):
    """An op that gave up because the user asked to: not done, not failed; the same command goes on from here."""

    exit_code = 130


@dataclass
class Report:
    """How each op of ``plan`` ended. ``skipped`` never began, or gave up on an interrupt."""

    plan: Plan = field(default_factory=Plan)
    done: set[int] = field(default_factory=set)
    failed: dict[int, ArealError] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    interrupted: bool = False
    notes: tuple[str, ...] = ()

    def errors_of(self, ref: str) -> list[ArealError]:
        return [self.failed[op.id] for op in self.plan.ops_of(ref) if op.id in self.failed]

    def is_unfinished(self, ref: str) -> bool:
        return any(op.id in self.skipped for op in self.plan.ops_of(ref))

    @property
    def failed_ops(self) -> tuple[Op, ...]:
        return tuple(op for op in self.plan.ops if op.id in self.failed)


def execute(plan: Plan, perform: Callable[[Op], None], interrupted: Event) -> Report:
    """Perform every op that can be performed. Only ArealErrors count as an op's failure; others propagate."""
    agenda = _Agenda(plan)
    running = 0
    ended: SimpleQueue[tuple[Op, Future[None]]] = SimpleQueue()
    with ThreadPoolExecutor(PARALLEL_OPS, thread_name_prefix="op") as pool:
        while True:
            if interrupted.is_set():
                agenda.give_up()
            for op in agenda.take_ready():
                future = pool.submit(perform, op)
                future.add_done_callback(partial(_tell, ended, op))
                running += 1
            if not running:
                break
            with suppress(Empty):
                op, future = ended.get(timeout=_INTERRUPT_POLL_S)
                running -= 1
                agenda.end(op, _error_of(future))
    assert not agenda.waiting, f"ops that can never begin: {sorted(agenda.waiting)}"
    return agenda.report


class _Agenda:
    """Which ops may begin now, kept up to date as ops end; every op is looked at once for each op it waits for."""

    def __init__(self, plan: Plan) -> None:
        self.report = Report(plan)
        self.waiting: dict[int, Op] = {op.id: op for op in plan.ops}
        self._blockers = {op.id: {*op.needs, *op.args.get("after", ())} & self.waiting.keys() for op in plan.ops}
        self._dependents: dict[int, list[int]] = {}
        for number, blockers in self._blockers.items():
            for blocker in blockers:
                self._dependents.setdefault(blocker, []).append(number)
        self._ready = [number for number, blockers in self._blockers.items() if not blockers]

    def take_ready(self) -> list[Op]:
        ready = [self.waiting.pop(number) for number in self._ready if number in self.waiting]
        self._ready.clear()
        return ready

    def end(self, op: Op, error: ArealError | None) -> None:
        if error is None:
            self.report.done.add(op.id)
        elif isinstance(error, Interrupted):
            self.report.interrupted = True
            self.report.skipped.add(op.id)
        else:
            self.report.failed[op.id] = error
        self._release(op.id)

    def give_up(self) -> None:
        """Nothing that has not begun will begin."""
        self.report.interrupted = self.report.interrupted or bool(self.waiting)
        self.report.skipped |= self.waiting.keys()
        self.waiting.clear()

    def _release(self, number: int) -> None:
        """Tell whoever waited for op ``number``; what needed it and cannot have it is skipped, and so on."""
        ended = [number]
        while ended:
            number = ended.pop()
            for dependent in self._dependents.get(number, ()):
                self._blockers[dependent].discard(number)
                op = self.waiting.get(dependent)
                if op is not None and number in op.needs and number not in self.report.done:
                    del self.waiting[dependent]
                    self.report.skipped.add(dependent)
                    ended.append(dependent)
                elif not self._blockers[dependent]:
                    self._ready.append(dependent)


def _tell(ended: SimpleQueue[tuple[Op, Future[None]]], op: Op, future: Future[None]) -> None:
    ended.put((op, future))


def _error_of(future: Future[None]) -> ArealError | None:
    try:
        future.result()
    except ArealError as error:
        return error
    return None
