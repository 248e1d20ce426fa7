"""The executor runs what may run, skips what cannot, and begins nothing more after a request to stop."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.client.gateway import ServiceClient
from areal.errors import ArealError, TargetFailed
from areal.reconcilers import execute as execution
from areal.reconcilers.execute import execute
from areal.reconcilers.launch import Interrupted
from areal.reconcilers.plan import DrainWorker, Op, Plan, Report, Verb
from areal.runtime.backends.base import RunSpec

NEVER = threading.Event()


def op(
    number: int,
    needs: Iterable[int] = (),
    after: Iterable[int] = (),
    ref: str = "Model/a",
    verb: Verb = Verb.STOP,
) -> Op[Any]:
    return Op(number, verb, ref, f"engine/{number}", "test", tuple(needs), after=tuple(after))


def run(
    *ops: Op[Any],
    failing: Iterable[int] = (),
    perform: Callable[[Op[Any]], None] | None = None,
    interrupted: threading.Event = NEVER,
) -> tuple[Report, list[int]]:
    broken, lock = set(failing), threading.Lock()
    began: list[int] = []

    def together(items: Sequence[Op[Any]]) -> None:
        with lock:
            began.extend(item.id for item in items)
        for item in items:
            if perform is not None:
                perform(item)
            if item.id in broken:
                raise TargetFailed(f"op {item.id}")

    return execute(Plan(ops=ops), together, interrupted), began


def test_execute_of_an_empty_plan_does_nothing() -> None:
    report, began = run()
    assert (report.done, began, report.interrupted) == (set(), [], False)


def test_execute_starts_op_after_all_its_needs() -> None:
    report, began = run(op(1), op(2), op(3, needs=[1, 2]), op(4, needs=[3]))
    assert began.index(3) > max(began.index(1), began.index(2))
    assert began[-1] == 4
    assert report.done == {1, 2, 3, 4}


def test_execute_runs_independent_ops_concurrently() -> None:
    together = threading.Barrier(3, timeout=20)

    def perform(item: Op[Any]) -> None:
        together.wait()

    report, _ = run(op(1), op(2), op(3), perform=perform)
    assert report.done == {1, 2, 3}


def test_execute_batches_ready_records() -> None:
    batches: list[list[int]] = []
    record = Verb.RECORD
    ops = (op(1, verb=record), op(2, verb=record), op(3), op(4, verb=record, needs=[3]), op(5, needs=[1, 4]))
    report = execute(Plan(ops=ops), lambda items: batches.append([item.id for item in items]), NEVER)
    assert sorted(batches) == [[1, 2], [3], [4], [5]]
    assert report.done == {1, 2, 3, 4, 5}


def test_execute_retries_failed_record_batch_one_by_one() -> None:
    ops = (*(op(number, verb=Verb.RECORD) for number in (1, 2, 3)), op(4, needs=[2]), op(5, needs=[3]))
    report, began = run(*ops, failing=[2])
    assert sorted(began) == [1, 1, 2, 2, 3, 3, 5]
    assert {number: str(error) for number, error in report.failed.items()} == {2: "op 2"}
    assert (report.done, report.skipped) == ({1, 3, 5}, {4})


def test_execute_skips_dependents_of_failed_op() -> None:
    report, began = run(op(1), op(2, needs=[1]), op(3, needs=[2]), op(4), op(5, needs=[4]), failing=[1])
    assert report.failed.keys() == {1}
    assert report.skipped == {2, 3}
    assert report.done == {4, 5}
    assert 3 not in began


def test_execute_after_waits_for_end_with_any_outcome() -> None:
    report, began = run(op(1), op(2, needs=[1]), op(3, after=[1, 2]), failing=[1])
    assert report.skipped == {2}
    assert report.done == {3}
    assert began == [1, 3]


def test_execute_ignores_after_of_filtered_ops() -> None:
    report, _ = run(op(1), op(5, needs=[1], after=[3]))
    assert report.done == {1, 5}


def test_execute_interrupted_finishes_only_running_ops() -> None:
    interrupted, release = threading.Event(), threading.Event()

    def perform(item: Op[Any]) -> None:
        interrupted.set()
        release.wait(0.5)  # long enough for the loop to have seen the interrupt more than once

    report, began = run(op(1), op(2, needs=[1]), perform=perform, interrupted=interrupted)
    assert began == [1]
    assert report.done == {1}
    assert report.skipped == {2}
    assert report.interrupted


def test_execute_interrupted_after_last_start_is_complete() -> None:
    interrupted = threading.Event()
    report, _ = run(op(1), perform=lambda _: interrupted.set(), interrupted=interrupted)
    assert report.done == {1}
    assert not report.interrupted


def test_execute_skips_op_that_gives_up_on_interrupt() -> None:
    def perform(item: Op[Any]) -> None:
        raise Interrupted(op(1))

    report, _ = run(op(1), op(2, needs=[1]), perform=perform)
    assert not report.failed
    assert report.skipped == {1, 2}
    assert report.interrupted


def test_report_finds_errors_by_object_despite_id_gaps() -> None:
    report, _ = run(op(2, ref="Model/a"), op(7, ref="Model/b"), failing=[7])
    assert [error.message for error in report.errors_of("Model/b")] == ["op 7"]
    assert report.errors_of("Model/a") == []


@st.composite
def graphs(draw: st.DrawFn) -> tuple[tuple[Op[Any], ...], frozenset[int]]:
    size = draw(st.integers(1, 25))
    ops = []
    for number in range(1, size + 1):
        earlier = st.sets(st.integers(1, number - 1), max_size=3) if number > 1 else st.just(set())
        verb = draw(st.sampled_from((Verb.STOP, Verb.RECORD)))
        ops.append(op(number, sorted(draw(earlier)), sorted(draw(earlier)), verb=verb))
    return tuple(ops), draw(st.frozensets(st.integers(1, size), max_size=4))


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_execute_ends_every_op_of_any_graph_once(
    given_graph: tuple[tuple[Op[Any], ...], frozenset[int]],
) -> None:
    ops, failing = given_graph
    report, attempts = run(*ops, failing=failing)
    began = list(dict.fromkeys(reversed(attempts)))[::-1]  # the last attempts
    by_id = {item.id: item for item in ops}
    assert all(by_id[number].verb is Verb.RECORD for number in began if attempts.count(number) > 1)
    assert report.done | report.failed.keys() | report.skipped == {item.id for item in ops}
    assert report.failed.keys() == failing & set(began)
    position = {number: index for index, number in enumerate(began)}
    for item in ops:
        hopeless = not set(item.needs) <= report.done
        assert (item.id in report.skipped) == hopeless
        for waited in (*item.needs, *item.after):
            if item.id in position and waited in position:
                assert position[waited] < position[item.id]


def test_execute_propagates_unexpected_exception() -> None:
    def perform(item: Op[Any]) -> None:
        raise ZeroDivisionError

    try:
        run(op(1), perform=perform)
    except ZeroDivisionError:
        return
    raise AssertionError("a programming error must not be taken for a failed op")


def test_execute_treats_any_areal_error_as_a_failed_op() -> None:
    def perform(item: Op[Any]) -> None:
        raise ArealError("no")

    report, _ = run(op(1), perform=perform)
    assert report.failed.keys() == {1}


def test_object_with_skipped_op_is_unfinished() -> None:
    report, _ = run(op(1), op(2, needs=[1], ref="Model/b"), op(3, ref="Model/c"), failing=[1])
    assert [report.is_unfinished(ref) for ref in ("Model/a", "Model/b", "Model/c")] == [False, True, False]
    assert Interrupted(op(1)).exit_code == 130


class DrainedProxy(ThreadingHTTPServer):
    """A data proxy that answers each look at its health with the next number of requests in flight; None: not at all,
    as one that is halted or busy."""

    def __init__(self, in_flight: Iterable[int | None]) -> None:
        self.in_flight, self.over = iter(in_flight), threading.Event()
        super().__init__(("127.0.0.1", 0), DrainedProxyHandler)


class DrainedProxyHandler(BaseHTTPRequestHandler):
    server: DrainedProxy

    def do_GET(self) -> None:
        busy = next(self.server.in_flight)
        if busy is None:
            self.server.over.wait()
        else:
            self.answer({"in_flight": busy})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({})

    def answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@dataclass
class DrainContext:
    address: str
    reports: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def url(self, item: Op[Any], run: str) -> str:
        return self.address

    def state(self, run: str) -> Any:
        return SimpleNamespace(spec=RunSpec(uid=run, argv=(), owner="Model/a", component="data-proxy", replica=0))

    def admin(self, service: str, url: str) -> ServiceClient:
        return ServiceClient(url, "key")

    def report(self, item: Op[Any], stage: str) -> None:
        self.reports.append(stage)

    def event(self, ref: str, kind: str, reason: str, message: str) -> None:
        self.events.append(f"{reason}: {message}")

    def pause(self, item: Op[Any], seconds: float) -> None:
        pass


@pytest.fixture
def drained(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., DrainContext]]:
    """Drain a data proxy that answers as given."""
    monkeypatch.setattr(execution, "DRAIN_PROBE_S", 0.2)
    monkeypatch.setattr(execution, "DRAIN_SETTLE_S", 0.0)
    proxies: list[DrainedProxy] = []

    def drain(*in_flight: int | None, seconds: float = 60.0) -> DrainContext:
        proxies.append(DrainedProxy(in_flight))
        threading.Thread(target=proxies[-1].serve_forever, name="drained-proxy", daemon=True).start()
        context = DrainContext(f"http://127.0.0.1:{proxies[-1].server_port}")
        args = DrainWorker("InferenceService/default", "router", seconds)
        execution.drain(context, Op(1, Verb.DRAIN, "Model/a", "data-proxy/0", "test", run="r1", args=args), 1)  # type: ignore[arg-type]
        return context

    yield drain
    for proxy in proxies:
        proxy.over.set()
        proxy.shutdown()
        proxy.server_close()


def test_drain_of_silent_data_proxy_waits_for_its_requests(
    drained: Callable[..., DrainContext],
) -> None:
    context = drained(1, None, 1, 0)
    one = "draining, 1 requests in flight"
    assert (context.reports, context.events) == ([one, "draining, no answer", one], [])


def test_drain_of_silent_data_proxy_ends_at_deadline(drained: Callable[..., DrainContext]) -> None:
    assert drained(None, None, None, seconds=0.3).events == ["DrainTimeout: r1: still no answer after 0.3 s"]
