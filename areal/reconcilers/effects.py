"""The effects behind each verb of a plan: one method a verb, each journaled before and after, each idempotent."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from areal.client.admin import AdminClient
from areal.errors import ArealError, TargetFailed, TimedOut
from areal.reconcilers import launch as launchers
from areal.reconcilers.admin_keys import ensure_key
from areal.reconcilers.context import Context, Progress
from areal.reconcilers.desired import Target
from areal.reconcilers.executor import Interrupted
from areal.reconcilers.launch import Launch, Slot
from areal.reconcilers.observe import probe_run
from areal.reconcilers.observed import Observed, Seen
from areal.reconcilers.plan import Op, Verb
from areal.resources.inference_service import InferenceServiceSpec
from areal.resources.model import ModelSpec
from areal.resources.registry import effective
from areal.runtime.backends.base import Phase, RunState
from areal.runtime.backends.local import LocalBackend
from areal.runtime.probes import Unreachable, http_get
from areal.runtime.readiness import failure, wait_ready
from areal.state.credentials import read_key
from areal.state.events import EventLog
from areal.state.journal import Transaction
from areal.state.objects import ObjectStore
from areal.state.records import StoredObject, new_uid

POLL_S = 0.02
SLOW_POLL_S = 0.1
KICK_SETTLE_S = 2.0
ADMIN_TIMEOUT_S = 10.0
WARM_TIMEOUT_S = 120.0


@dataclass
class Effects:
    """The hands of the executor. ``slots`` maps the plan's symbols to claimed slots."""

    ctx: Context
    backend: LocalBackend
    store: ObjectStore
    targets: Mapping[str, Target]
    observed: Observed
    slots: Mapping[str, Slot]
    tx: Transaction
    deadline: float
    now: Callable[[], float] = time.time
    spawned: dict[str, str] = field(default_factory=dict)  # symbol -> uid, once it has been started
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stages: dict[str, str] = field(default_factory=dict)

    def perform(self, op: Op) -> None:
        handler = _HANDLERS[op.verb]
        number = self.tx.begin(op.verb.value, ref=op.ref, target=op.target, run=self.uid(op.run))
        try:
            handler(self, op, number)
        except ArealError:
            # A failure that was dealt with is over; only a death in the middle leaves an operation open.
            self.tx.end(number, failed=True)
            raise
        self.tx.end(number)

    # -- naming ------------------------------------------------------------------------------------------------

    def uid(self, run: str) -> str:
        return self.slots[run].uid if run in self.slots else run

    def url(self, run: str) -> str:
        if run in self.slots:
            return self.slots[run].url
        for runs in self.observed.runs.values():
            for seen in runs:
                if seen.uid == run:
                    return seen.url
        raise ArealError(f"run {run} has no known address")

    def key_file(self, service: str) -> str:
        stored = self._object(f"InferenceService/{service}")
        if stored is None:
            raise ArealError(f"InferenceService/{service} is not recorded", hint="areal get inferenceservices")
        return str(ensure_key(self.ctx.home, stored))

    def admin(self, service: str, url: str) -> AdminClient:
        return AdminClient(url, read_key(Path(self.key_file(service))), timeout_s=ADMIN_TIMEOUT_S)

    def _object(self, ref: str) -> StoredObject | None:
        if ref in self.targets:
            return self.targets[ref].object
        from areal.resources.kinds import parse_ref

        return self.store.get(parse_ref(ref))

    def event(self, ref: str, kind: str, reason: str, message: str) -> None:
        from areal.resources.kinds import parse_ref

        EventLog(self.ctx.home).record(parse_ref(ref), kind, reason, message, actor=self.ctx.actor)

    # -- objects -----------------------------------------------------------------------------------------------

    def record(self, op: Op, number: int) -> None:
        target = self.targets[op.ref]
        now = self.now()
        layers = tuple(
            layer if layer.at else replace(layer, at=now, actor=layer.actor or self.ctx.actor)
            for layer in target.object.layers
        )
        stamped = replace(
            target.object,
            uid=target.object.uid or new_uid(),
            created_at=target.object.created_at or now,
            layers=layers,
        )
        if target.changes or target.action == "create":
            stamped = self.store.add_revision(stamped, actor=self.ctx.actor, at=now)
        self.store.put(stamped)
        reason = "Created" if target.action == "create" else "Configured"
        self.event(op.ref, "Normal", reason, op.cause)

    def erase(self, op: Op, number: int) -> None:
        from areal.resources.kinds import parse_ref

        with self._lock:
            self.store.delete(parse_ref(op.ref))

    # -- runs --------------------------------------------------------------------------------------------------

    def spawn(self, op: Op, number: int) -> None:
        slot = self.slots[op.run]
        stored = self._object(op.ref)
        assert stored is not None
        inputs = self._inputs(op)
        service = self._service_name(stored)
        gpus = self._gpus(stored, slot)
        launch = Launch(stored, slot, self.key_file(service), inputs, gpus)
        spec = self._run_spec(launch, stored, service)
        self._say(op, f"starting {slot.component}")
        self.backend.start(spec, on_pid=lambda pid: self.tx.note(number, pid=pid))
        with self._lock:
            self.spawned[op.run] = slot.uid
        self.event(op.ref, "Normal", "Started", f"{op.target} on port {slot.port}: {op.cause}")

    def _inputs(self, op: Op) -> dict[str, Any]:
        inputs = dict(op.args.get("inputs", {}))
        if "router" in op.args:
            inputs["routerUrl"] = self.url(op.args["router"])
        if "engine" in op.args:
            inputs["engineUrl"] = self.url(op.args["engine"])
        return inputs

    def _service_name(self, stored: StoredObject) -> str:
        if stored.kind == "InferenceService":
            return stored.name
        spec = effective("Model", stored.spec)
        assert isinstance(spec, ModelSpec)
        return spec.service

    def _gpus(self, stored: StoredObject, slot: Slot) -> tuple[str, ...]:
        if slot.component != "engine":
            return ()
        from areal.reconcilers.replicas import gpus_per_replica

        spec = effective("Model", stored.spec)
        assert isinstance(spec, ModelSpec)
        need = gpus_per_replica(spec)
        return self.backend.claim_gpus(need, owner=slot.ref) if need else ()

    def _run_spec(self, launch: Launch, stored: StoredObject, service: str) -> Any:
        component = launch.slot.component
        if stored.kind == "InferenceService":
            service_spec = effective("InferenceService", stored.spec)
            assert isinstance(service_spec, InferenceServiceSpec)
            build = launchers.router if component == "router" else launchers.gateway
            return build(launch, service_spec)
        owner = self._object(f"InferenceService/{service}")
        service_spec = effective("InferenceService", owner.spec if owner else {})
        model_spec = effective("Model", stored.spec)
        assert isinstance(service_spec, InferenceServiceSpec)
        assert isinstance(model_spec, ModelSpec)
        start = launchers.engine if component == "engine" else launchers.data_proxy
        return start(launch, model_spec, service_spec)

    def kick(self, op: Op, number: int) -> None:
        self._say(op, "restarting now")
        self.backend.kick(op.run)
        until = time.monotonic() + KICK_SETTLE_S
        while self._state(op.run).phase is Phase.BACKOFF and time.monotonic() < until:
            time.sleep(POLL_S)
        self.event(op.ref, "Normal", "Restarted", f"{op.target}: {op.cause}")

    def await_ready(self, op: Op, number: int) -> None:
        """The run's own child lives, owns its port and answers; a child that ends while starting fails at once."""
        try:
            wait_ready(
                self.backend,
                self.uid(op.run),
                timeout_s=max(0.1, min(self.deadline - time.monotonic(), self._startup_deadline_s(op))),
                on_wait=lambda state, elapsed_s: self._say_stage(op, state.spec.uid),
                interrupted=self.ctx.interrupted,
            )
        except KeyboardInterrupt:
            raise _interrupted(op) from None
        except TargetFailed as error:
            self.event(op.ref, "Warning", "StartFailed", f"{op.target}: {error.message}")
            raise
        self._say(op, "ready")

    def _startup_deadline_s(self, op: Op) -> float:
        stored = self._object(op.ref)
        if stored is None or stored.kind != "Model":
            return float("inf")
        spec: ModelSpec = effective("Model", stored.spec)
        return spec.probes.startup.deadline_seconds

    def _state(self, uid: str) -> RunState:
        found = self.backend.observe([uid])
        if uid not in found:
            raise TargetFailed(f"run {uid} has no record", hint="areal doctor")
        return found[uid]

    def warm(self, op: Op, number: int) -> None:
        """A one-token completion through the data proxy itself: the model answers, or it is not ready."""
        self._say(op, "warming up")
        stored = self._object(op.ref)
        assert stored is not None
        client = self.admin(self._service_name(stored), self.url(op.run))
        client.timeout_s = WARM_TIMEOUT_S
        body = {"model": stored.name, "prompt": "1", "max_tokens": 1, "temperature": 0}
        try:
            status, answer = client.post("/v1/completions", body)
        except OSError as error:
            raise TargetFailed(f"{op.ref} {op.target}: warm-up: {error or type(error).__name__}") from error
        if status != 200:
            raise TargetFailed(
                f"{op.ref} {op.target}: the model does not complete: {status} {_brief(answer)}",
                hint=f"areal logs {op.ref.lower()}",
            )

    def stop(self, op: Op, number: int) -> None:
        self._say(op, "stopping")
        report = self.backend.stop(op.run, grace_s=op.args.get("graceSeconds"))
        if report.was_alive or report.swept_pids:
            swept = f"; swept {len(report.swept_pids)} left-over processes" if report.swept_pids else ""
            self.event(op.ref, "Normal", "Stopped", f"{op.target}: {op.cause}{swept}")

    def forget(self, op: Op, number: int) -> None:
        self.backend.forget(op.run)

    # -- routes ------------------------------------------------------------------------------------------------

    def route(self, op: Op, number: int) -> None:
        stored = self._object(op.ref)
        assert stored is not None
        workers = [{"worker_id": self.uid(run), "worker_addr": self.url(run)} for run in op.runs]
        body = {
            "model": stored.name,
            "workers": workers,
            "expected": op.args["expected"],
        }
        self._router(op, "/register_model", body)
        for worker in workers:
            self._router(op, "/undrain", {"worker_id": worker["worker_id"]})
        self.event(op.ref, "Normal", "Routed", f"{len(workers)} replicas: {op.cause}")

    def unroute(self, op: Op, number: int) -> None:
        name = op.args.get("model") or op.ref.partition("/")[2]
        self._router(op, "/remove_model", {"model": name}, missing_is_fine=True)

    def configure(self, op: Op, number: int) -> None:
        self._router(op, "/configure", dict(op.args))

    def synced(self, op: Op, number: int) -> None:
        self._router(op, "/synced", {})

    def _router(self, op: Op, path: str, body: Mapping[str, Any], *, missing_is_fine: bool = False) -> Any:
        service = str(op.args.get("service") or op.ref).partition("/")[2]
        router = op.args.get("router") or op.run
        client = self.admin(service, self.url(router))
        try:
            status, answer = client.post(path, dict(body))
        except OSError as error:
            raise ArealError(f"router of {service}: POST {path}: {error or type(error).__name__}") from error
        if status >= 400 and not (missing_is_fine and status == 404):
            raise ArealError(f"router of {service}: POST {path} answers {status}: {_brief(answer)}")
        return answer

    def drain(self, op: Op, number: int) -> None:
        """No new picks, then wait until no request is in flight at the data proxy, or the drain's own deadline."""
        try:
            self._router(op, "/drain", {"worker_id": op.run}, missing_is_fine=True)
            url = self.url(op.run)
        except ArealError:
            return  # no router to ask: nobody picks the worker either
        until = time.monotonic() + float(op.args["seconds"])
        settle = time.monotonic() + DRAIN_SETTLE_S
        while time.monotonic() < until:
            busy = _in_flight(url)
            if busy is None or (busy == 0 and time.monotonic() >= settle):
                return
            self._say(op, f"draining, {busy} requests in flight")
            if self.ctx.interrupted.wait(SLOW_POLL_S):
                raise _interrupted(op)
        self.event(op.ref, "Warning", "DrainTimeout", f"{op.run} still had requests after {op.args['seconds']} s")

    def settle(self, op: Op, number: int) -> None:
        """The gateway lists the model: what `Ready` promises is what a user's client sees."""
        service = str(op.args["service"])
        name = op.ref.partition("/")[2]
        gateway = self._gateway_url(service)
        if gateway is None:
            raise TargetFailed(f"{service} has no running gateway", hint=f"areal describe {service.lower()}")
        client = self.admin(service.partition("/")[2], gateway)
        while True:
            try:
                status, answer = client.get("/v1/models")
            except OSError as error:
                status, answer = 0, str(error)
            if status == 200 and any(entry.get("id") == name for entry in answer.get("data", ())):
                return
            self._check_time(op, f"{gateway} does not list model {name} ({status} {_brief(answer)})")
            time.sleep(POLL_S)

    def _gateway_url(self, service: str) -> str | None:
        for slot in self.slots.values():
            if slot.ref == service and slot.component == "gateway":
                return slot.url
        return next((run.url for run in self.observed.of(service, "gateway") if run.is_live), None)

    def soak(self, op: Op, number: int) -> None:
        until = time.monotonic() + float(op.args["seconds"])
        while time.monotonic() < until:
            for symbol in op.runs:
                run = probe_run(self._state(self.uid(symbol)))
                if run.seen is Seen.REFUSING or run.state.phase is not Phase.RUNNING:
                    raise failure(self.backend, run.state)
            time.sleep(SLOW_POLL_S)

    # -- progress ----------------------------------------------------------------------------------------------

    def _say(self, op: Op, stage: str, done: int | None = None, total: int | None = None) -> None:
        key = f"{op.ref} {op.target}".strip()
        self._stages[key] = stage
        elapsed = time.monotonic() - self._began
        self.ctx.progress(Progress(key, stage, done, total, elapsed))

    def _say_stage(self, op: Op, uid: str) -> None:
        stage = self.backend.stage(uid)
        if stage is not None:
            self._say(op, stage.stage, stage.done, stage.total)

    def _check_time(self, op: Op, message: str) -> None:
        if time.monotonic() > self.deadline:
            raise TimedOut(message, hint=f"areal logs {op.ref.lower()}; a longer --timeout; then apply again")
        if self.ctx.interrupted.is_set():
            raise _interrupted(op)

    _began: float = field(default_factory=time.monotonic)


DRAIN_SETTLE_S = 0.3  # a relay may have picked the worker just before it heard of the drain


def _interrupted(op: Op) -> Interrupted:
    return Interrupted(f"{op.ref} {op.target}: interrupted", hint="the same command again goes on from here")


def _in_flight(url: str) -> int | None:
    """Requests in flight at a data proxy; None when it cannot say, which means it is gone."""
    try:
        return int(json.loads(http_get(f"{url}/health", 2.0).body).get("in_flight", 0))
    except (Unreachable, ValueError):
        return None


def _brief(answer: Any) -> str:
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        return str(answer["error"].get("message", ""))
    return str(answer)[:300]


_HANDLERS: dict[Verb, Callable[[Effects, Op, int], None]] = {
    Verb.RECORD: Effects.record,
    Verb.SPAWN: Effects.spawn,
    Verb.KICK: Effects.kick,
    Verb.AWAIT: Effects.await_ready,
    Verb.WARM: Effects.warm,
    Verb.ROUTE: Effects.route,
    Verb.CONFIGURE: Effects.configure,
    Verb.SYNC: Effects.synced,
    Verb.SETTLE: Effects.settle,
    Verb.SOAK: Effects.soak,
    Verb.DRAIN: Effects.drain,
    Verb.UNROUTE: Effects.unroute,
    Verb.STOP: Effects.stop,
    Verb.FORGET: Effects.forget,
    Verb.ERASE: Effects.erase,
}
