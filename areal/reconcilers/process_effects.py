"""The effects on processes: start, restart, wait, warm up, watch, stop, forget. Each is idempotent."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

from areal.errors import ArealError, TargetFailed, TimedOut
from areal.reconcilers import launch as launchers
from areal.reconcilers.hands import Hands, brief, interrupted
from areal.reconcilers.job_effects import driver_run
from areal.reconcilers.job_phase import DRIVER
from areal.reconcilers.launch import Launch, Slot
from areal.reconcilers.model_data import data_folder, router_file
from areal.reconcilers.observe import key_headers, probe_run, ready_path
from areal.reconcilers.observed import Seen
from areal.reconcilers.plan import Op
from areal.reconcilers.replicas import ENGINE, gpus_per_replica
from areal.resources.kinds import parse_ref, served_name
from areal.runtime.backends.base import Phase, RunSpec
from areal.runtime.probes import Response
from areal.runtime.readiness import failure, wait_ready

POLL_S = 0.02
SLOW_POLL_S = 0.1
KICK_SETTLE_S = 2.0
WARM_TIMEOUT_S = 120.0
WEIGHTS_BEHIND = "weights_behind"  # a data proxy's answer to calls while its engine lacks what a trainer published


def spawn(hands: Hands, op: Op, number: int) -> None:
    slot = hands.slots[op.run]
    hands.say(op, f"starting {slot.component}")
    spec = driver_run(hands, op, slot) if slot.component == DRIVER else _component_run(hands, op, slot)
    hands.backend.start(spec, on_pid=lambda pid: hands.tx.note(number, pid=pid))
    with hands.lock:
        hands.spawned[op.run] = slot.uid
    where = f" on port {slot.port}" if slot.port else ""
    hands.event(op.ref, "Normal", "Started", f"{op.target}{where}: {op.cause}")


def _component_run(hands: Hands, op: Op, slot: Slot) -> RunSpec:
    stored = hands.object(op.ref)
    launch = Launch(
        object=stored,
        slot=slot,
        admin_key_file=hands.key_file(hands.service_of(op.ref)),
        data_folder=str(data_folder(hands.ctx.home, parse_ref(op.ref).name)),
        router_file=str(router_file(hands.ctx.home, parse_ref(hands.service_of(op.ref)))),
        inputs=_inputs(hands, op),
        gpus=_gpus(hands, slot),
        successor=bool(op.args.get("successor")),
        folders=_folders(hands, op) if stored.kind == "Model" else {},
    )
    return _run_spec(hands, launch)


def _folders(hands: Hands, op: Op) -> dict[str, str]:
    """Of the Hugging Face ids that the model names; what is not in the cache is downloaded."""

    def told(name: str, done: int, total: int | None) -> None:
        if hands.ctx.interrupted.is_set():
            raise interrupted(op)  # the download goes on from here the next time
        hands.say(op, f"downloading {name}", done, total)

    return hands.files.folders(hands.object(op.ref), hands.model_spec(op.ref), told)


def _inputs(hands: Hands, op: Op) -> dict[str, Any]:
    """What the process is told about its neighbours."""
    inputs = dict(op.args.get("inputs", {}))
    if "router" in op.args:
        inputs["routerUrl"] = hands.url(op.args["router"])
    if "engine" in op.args:
        inputs["engineUrl"] = hands.url(op.args["engine"])
    return inputs


def _gpus(hands: Hands, slot: Slot) -> tuple[str, ...]:
    if slot.component != ENGINE:
        return ()
    need = gpus_per_replica(hands.model_spec(slot.ref))
    return hands.backend.claim_gpus(need, owner=slot.ref) if need else ()


def _run_spec(hands: Hands, launch: Launch) -> RunSpec:
    ref, component = launch.slot.ref, launch.slot.component
    service = hands.service_spec(hands.service_of(ref))
    if component == "router":
        return launchers.router(launch, service)
    if component == "gateway":
        return launchers.gateway(launch, service)
    start = launchers.engine if component == ENGINE else launchers.data_proxy
    return start(launch, hands.model_spec(ref), service)


def kick(hands: Hands, op: Op, number: int) -> None:
    hands.say(op, "restarting now")
    hands.backend.kick(op.run)
    until = time.monotonic() + KICK_SETTLE_S
    while hands.state(op.run).phase is Phase.BACKOFF and time.monotonic() < until:
        time.sleep(POLL_S)
    hands.event(op.ref, "Normal", "Restarted", f"{op.target}: {op.cause}")


def await_ready(hands: Hands, op: Op, number: int) -> None:
    """The run's own child lives, owns its port and answers; a child that ends while starting fails at once."""
    patience_s = _start_deadline_s(hands, op)
    left_s = hands.left_s
    spec = hands.state(op.run).spec
    try:
        wait_ready(
            hands.backend,
            hands.uid(op.run),
            path=ready_path(spec),
            headers=key_headers(spec),
            timeout_s=min(left_s, patience_s),
            on_wait=lambda state, elapsed_s: _say_stage(hands, op, state.spec.uid),
            interrupted=hands.ctx.interrupted,
            accept=partial(_accepts, op, bool(op.args.get("trainer"))),
        )
    except KeyboardInterrupt:
        raise interrupted(op) from None
    except TimedOut as error:
        if patience_s > left_s:
            raise
        hands.event(op.ref, "Warning", "StartFailed", f"{op.target}: {error.message}")
        raise TargetFailed(error.message, hint=error.hint, detail=error.detail) from error
    except TargetFailed as error:
        hands.event(op.ref, "Warning", "StartFailed", f"{op.target}: {error.message}")
        raise
    hands.say(op, "ready")


def _accepts(op: Op, has_trainer: bool, response: Response) -> bool:
    """Ready; or all that a data proxy lacks are the weights that its model's trainer is to bring. Raises TargetFailed
    where the process says that waiting will not make it ready."""
    if response.status == 200 or (has_trainer and _field(response.body, "awaits_version") is not None):
        return True
    if fault := _field(response.body, "fault"):
        what, _, advice = str(fault).rpartition("; ")
        raise TargetFailed(f"{op.ref} {op.target}: {what}", hint=f"{advice}; then the same command again")
    return False


def _field(body: bytes, name: str) -> Any:
    try:
        data = json.loads(body)
    except ValueError:
        return None
    return data.get(name) if isinstance(data, dict) else None


def _start_deadline_s(hands: Hands, op: Op) -> float:
    """How long the process may take to start, whatever the command's own time. A rollout has its own patience."""
    if hands.object(op.ref).kind != "Model":
        return float("inf")
    spec = hands.model_spec(op.ref)
    strategy = spec.strategy or hands.service_spec(hands.service_of(op.ref)).strategy
    return min(spec.probes.startup.deadline_seconds, strategy.progress_deadline_seconds)


def _say_stage(hands: Hands, op: Op, uid: str) -> None:
    stage = hands.backend.stage(uid)
    if stage is not None:
        hands.say(op, stage.stage, stage.done, stage.total)


def warm(hands: Hands, op: Op, number: int) -> None:
    """A one-token completion through the data proxy itself: the model answers, or it is not ready."""
    hands.say(op, "warming up")
    client = hands.admin(hands.service_of(op.ref), hands.url(op.run), WARM_TIMEOUT_S)
    model = hands.object(op.ref)
    body = {
        "model": served_name(model.name, model.spec),
        "prompt": "1",
        "max_tokens": 1,
        "temperature": 0,
        "store": False,
    }
    logs = f"areal logs {op.ref.lower()}"
    try:
        status, answer = client.post("/v1/completions", body)
    except OSError as error:
        why = error or type(error).__name__
        raise TargetFailed(f"{op.ref} {op.target}: no answer to a first completion: {why}", hint=logs) from error
    refused = answer.get("error") if isinstance(answer, dict) else None
    if op.args.get("trainer") and isinstance(refused, dict) and refused.get("code") == WEIGHTS_BEHIND:
        hands.say(op, f"waits for the weights of {op.args['trainer']}")
        return
    if status != 200:
        raise TargetFailed(f"{op.ref} {op.target}: the model does not complete: {status} {brief(answer)}", hint=logs)


def soak(hands: Hands, op: Op, number: int) -> None:
    """The new processes stay up for as long as they must before old ones go."""
    until = time.monotonic() + float(op.args["seconds"])
    while time.monotonic() < until:
        for symbol in op.runs:
            run = probe_run(hands.state(symbol))
            if run.seen in (Seen.REFUSING, Seen.SILENT) or run.state.phase is not Phase.RUNNING:
                raise failure(hands.backend, run.state)
        hands.say(op, f"must stay ready for {until - time.monotonic():.0f} s more")
        hands.pause(op, SLOW_POLL_S)


def stop(hands: Hands, op: Op, number: int) -> None:
    hands.say(op, "stopping")
    report = hands.backend.stop(op.run, grace_s=op.args.get("graceSeconds"))
    if report.was_alive or report.swept_pids:
        swept = f"; swept {len(report.swept_pids)} left-over processes" if report.swept_pids else ""
        note = f"; {report.note}" if report.note else ""
        hands.event(op.ref, "Normal", "Stopped", f"{op.target}: {op.cause}{swept}{note}")


def forget(hands: Hands, op: Op, number: int) -> None:
    hands.backend.forget(op.run)


def give_up(hands: Hands, runs: tuple[str, ...]) -> None:
    """Stop what was started in vain. What cannot be stopped is left to `areal doctor`, and to the next plan."""
    for symbol in runs:
        slot = hands.slots[symbol]
        try:
            hands.backend.stop(hands.spawned[symbol])
        except ArealError as error:
            message = f"{slot.component}/{slot.replica} was given up and could not be stopped: {error.message}"
            hands.event(slot.ref, "Warning", "StopFailed", message)
