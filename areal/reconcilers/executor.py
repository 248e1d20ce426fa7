"""Run a plan's ops in dependency order, in parallel, journaling each before and after. Decides nothing.

Invariants: an op begins only when all it needs have succeeded; an op that needs a failed one is skipped, and so is
whatever needs that; after an interrupt nothing new begins and what runs is finished. ``after`` in an op's args names
ops that must have ended, well or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Event

from areal.errors import ArealError
from areal.reconcilers.plan import Op, Plan

PARALLEL_OPS = 32
_INTERRUPT_POLL_S = 0.2


@dataclass
class Report:
    """How each op ended. ``skipped`` holds ops that never began."""

    done: set[int] = field(default_factory=set)
    failed: dict[int, ArealError] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    interrupted: bool = False

    def errors_of(self, plan: Plan, ref: str) -> list[ArealError]:
        return [error for number, error in sorted(self.failed.items()) if plan.ops[number - 1].ref == ref]


def execute(plan: Plan, perform: Callable[[Op], None], interrupted: Event) -> Report:
    """Perform every op that can be performed. Only ArealErrors count as an op's failure; others propagate."""
    report = Report()
    waiting: dict[int, Op] = {op.id: op for op in plan.ops}
    running: dict[Future[None], int] = {}
    with ThreadPoolExecutor(PARALLEL_OPS, thread_name_prefix="op") as pool:
        while waiting or running:
            if interrupted.is_set():
                report.interrupted = bool(waiting)
                report.skipped |= set(waiting)
                waiting.clear()
            _skip_hopeless(waiting, report)
            for op in [op for op in waiting.values() if _may_begin(op, report)]:
                del waiting[op.id]
                running[pool.submit(perform, op)] = op.id
            if running:
                finished, _ = wait(running, timeout=_INTERRUPT_POLL_S, return_when=FIRST_COMPLETED)
                for future in finished:
                    _settle(future, running.pop(future), report)
    return report


def _may_begin(op: Op, report: Report) -> bool:
    ended = report.done | report.failed.keys() | report.skipped
    return set(op.needs) <= report.done and set(op.args.get("after", ())) <= ended


def _skip_hopeless(waiting: dict[int, Op], report: Report) -> None:
    hopeless = report.failed.keys() | report.skipped
    # Ids grow along the dependencies, so one pass in order sees every consequence.
    for number in sorted(waiting):
        if hopeless & set(waiting[number].needs):
            del waiting[number]
            report.skipped.add(number)
            hopeless = hopeless | {number}


def _settle(future: Future[None], number: int, report: Report) -> None:
    try:
        future.result()
    except ArealError as error:
        report.failed[number] = error
    else:
        report.done.add(number)


def failed_refs(plan: Plan, report: Report) -> Mapping[str, list[ArealError]]:
    refs = {plan.ops[number - 1].ref for number in report.failed}
    return {ref: report.errors_of(plan, ref) for ref in sorted(refs)}
