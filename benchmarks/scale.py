"""The planner and the router of a large fleet, by simulation: 1,000, 3,000 and 10,000 replicas, eight a node, with a
hundred sessions each. Observations are generated; no process of a replica runs.

    python benchmarks/scale.py [--quick] [--write]

``plan``: CPU and peak memory of one plan, with all replicas in one model, in models of a hundred, in models of one:
nothing to do, a node lost (its engines and data proxies are dead), a rolling update with a tenth of the fleet to spare,
one with a single node to spare. ``apply``: the whole command, a no-op, on the recorded state of a cluster: one query of
its scheduler, the records of all runs, and a probe of each process, which a small server answers. ``call``: what is
done for one call, session or lease by the router and a relay, with all replicas in one model. ``event``: what one lost
node and one batch of a rolling update cost the router, and each relay.

Targets: a plan in 10 CPU-seconds; a pick in 10 us; a no-op apply of 1,000 replicas in 3 CPU-seconds; linear, which
means that from the smallest fleet to the largest plans grow by no more than 1.3 times what the fleet does,
and what is done for one call by no more than 1.5 times (a cache that 10,000 addresses do not fit into).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from areal.http.client import HttpReply
from areal.http.headers import Headers
from areal.reconcilers.desired import Target, Wanted, target_for
from areal.reconcilers.observe import Observed, ObservedRun, Seen
from areal.reconcilers.plan import Plan
from areal.reconcilers.planner import make_plan
from areal.reconcilers.planning import PlanScope, Policy
from areal.runtime import records
from areal.runtime.backends.base import LastExit, Phase, RunSpec, RunState
from areal.runtime.runs import RunStore
from areal.services.http.service import Metrics
from areal.services.inference.gateway.relay import Admission
from areal.services.inference.gateway.routing import LiveTable
from areal.services.inference.router.picking import CallKey
from areal.services.inference.router.prober import read_report, read_result
from areal.services.inference.router.registry import WorkerRegistry
from areal.services.inference.router.sessions import SessionPlacing
from areal.services.journal.keys import new_tag
from areal.state.home import Home
from areal.state.objects import ObjectStore
from areal.state.records import Layer, StoredObject
from areal.wire.bodies import RenewLease, RouteCall
from areal.wire.routing import Changes, GatewayLimits, ModelEntry, Readiness, Snapshot, WorkerEntry
from benchmarks.reporting import header, publish, table

SIZES = (1_000, 3_000, 10_000)
A_NODE = 8
SESSIONS = 100  # of a replica
PLAN_S, PICK_US, APPLY_S = 10.0, 10.0, 3.0
PLAN_GROWTH, CALL_GROWTH = 1.3, 1.5
SERVICE = "InferenceService/default"
LIMITS = {"max_body_bytes": 64 * 2**20, "request_timeout_seconds": 3600.0, "max_queued_requests": 4096}


# -- a fleet as it is recorded and observed


def recorded(kind: str, name: str, spec: Mapping[str, Any]) -> StoredObject:
    layer = Layer("apply", dict(spec), None, "benchmark", 1.0)
    return StoredObject(kind, name, uid=f"uid-{name}", layers=(layer,), created_at=1.0, revision=1)


def address(number: int) -> str:
    """Of the process ``number`` of its node: eight replicas of two processes each."""
    node, place = divmod(number, 2 * A_NODE)
    return f"http://10.{node >> 16 & 255}.{node >> 8 & 255}.{node & 255}:{21_000 + place}"


def running(item: StoredObject, component: str, index: int, url: str, node: str, **inputs: Any) -> ObservedRun:
    uid = f"{item.name}-{component}-{index}-{index:08x}"
    port = int(url.rpartition(":")[2])
    gpus = (f"GPU-{uid}",) if component == "engine" else ()
    about: dict[str, Any] = {"ports": (port,), "gpus": gpus, "url": url, "spec": item.spec, "inputs": inputs}
    spec = RunSpec(uid, str(item.ref), component, index, ("true",), **about)
    state = RunState(spec, Phase.RUNNING, pid=100, shim_pid=99, started_at=1.0, node=node, job_id=str(index))
    return ObservedRun(state, Seen.READY, age_s=1000.0)


class Fleet:
    """``size`` replicas, ``a_model`` in each model, behind one router; all as recorded."""

    def __init__(self, size: int, a_model: int, service: Mapping[str, Any] | None = None) -> None:
        counts = [a_model] * (size // a_model)
        self.service = recorded("InferenceService", "default", service or {})
        self.models = [
            recorded(
                "Model",
                f"model-{number:03}",
                {"service": "default", "backend": "sglang:t1", "path": "Qwen/Qwen3-8B", "replicas": count},
            )
            for number, count in enumerate(counts)
        ]
        router = running(self.service, "router", 0, "http://10.255.0.1:20001", "head")
        gateway = running(self.service, "gateway", 0, "http://10.255.0.1:8080", "head", routerUrl=router.url)
        self.runs: dict[str, tuple[ObservedRun, ...]] = {SERVICE: (router, gateway)}
        routes: dict[str, ModelEntry] = {}
        number = 0
        for item, count in zip(self.models, counts, strict=True):
            pairs = []
            for index in range(count):
                node = f"node-{number // (2 * A_NODE):04}"
                engine = running(item, "engine", index, address(number), node)
                proxy = running(item, "data-proxy", index, address(number + 1), node, engineUrl=engine.url)
                pairs += [engine, proxy]
                number += 2
            self.runs[str(item.ref)] = tuple(sorted(pairs, key=lambda run: run.uid))
            proxies = (run for run in pairs if run.state.spec.component == "data-proxy")
            routes[item.name] = ModelEntry(item.name, tuple(WorkerEntry(run.uid, run.url) for run in proxies))
        self.routes = Snapshot("epoch", 1, True, "auto", LIMITS, routes)

    def observed(self, lost: str = "") -> Observed:
        """With the processes of the node ``lost`` dead."""
        died = LastExit(None, 9, 5.0, "node failure")

        def seen(run: ObservedRun) -> ObservedRun:
            if not lost or run.state.node != lost:
                return run
            state = replace(run.state, phase=Phase.DEAD, pid=None, last_exit=died, reason="its node is lost")
            return ObservedRun(state)

        return Observed({ref: tuple(map(seen, runs)) for ref, runs in self.runs.items()}, {SERVICE: self.routes})

    def targets(self, more: Mapping[str, Any] | None = None) -> tuple[Target, ...]:
        """Of applying the manifests again, with ``more`` in each model."""

        def target(item: StoredObject, spec: Mapping[str, Any]) -> Target:
            wanted = Wanted(str(item.ref), item.kind, item.name, spec, {}, {})
            return target_for(wanted, item, set_name=None, force_conflicts=False, replace_it=False)

        models = (target(item, {**item.spec, **(more or {})}) for item in self.models)
        return (target(self.service, self.service.spec), *models)


# -- plans

PLANS: dict[str, tuple[bool, Mapping[str, Any], Callable[[int], int]]] = {
    # a node is lost, what each model changes, how many GPUs are free
    "nothing to do": (False, {}, lambda size: 0),
    "a node lost": (True, {}, lambda size: A_NODE),
    "rolling update, a tenth to spare": (False, {"engineArgs": {"max-model-len": 8192}}, lambda size: size // 10),
    "rolling update, a node to spare": (False, {"engineArgs": {"max-model-len": 8192}}, lambda size: A_NODE),
}
SHAPES: dict[str, Callable[[int], int]] = {
    "one model": lambda size: size,
    "models of 100": lambda size: 100,
    "models of 1": lambda size: 1,
}


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_plan(what: str, shape: str, size: int) -> dict[str, Any]:
    lost, more, spare = PLANS[what]
    fleet = Fleet(size, SHAPES[shape](size))
    observed = fleet.observed("node-0003" if lost else "")
    gc.collect()
    before, began = peak_mib(), time.process_time()
    plan = make_plan(PlanScope(fleet.targets(more)), observed, Policy(free_gpus=spare(size)))
    spent = time.process_time() - began
    check_plan(what, plan, size)
    return {"cpuSeconds": round(spent, 3), "ops": len(plan.ops), "planMiB": round(peak_mib() - before, 1)}


def check_plan(what: str, plan: Plan, size: int) -> None:
    """The plan is the one that the row is named for."""
    starts = Counter(op.target.partition("/")[0] for op in plan.ops if op.verb.value == "spawn")
    wanted = 0 if what == "nothing to do" else A_NODE if what == "a node lost" else size
    assert starts == Counter({"engine": wanted, "data-proxy": wanted} if wanted else {}), (what, starts)


# -- the whole command, on the recorded state of a cluster

BACKEND = """
import json, os, subprocess
from areal.runtime.backends.base import Capacity, Job, JobState
from areal.runtime.backends.cluster import ClusterBackend

class RecordedBackend(ClusterBackend):
    name = "recorded"
    def capacity(self): return Capacity(queued={"recorded": 1 << 20})
    def require_possible(self, scheduler, **asked): pass
    def submit(self, spec, folder): raise AssertionError("this was no no-op")
    def jobs(self, uids):
        with open(self.home / "queries", "a") as file:
            file.write("query\\n")
        squeue = subprocess.run(["cat", str(self.home / "queue.json")], capture_output=True, check=True)
        told = json.loads(squeue.stdout)
        return {job["name"]: Job(JobState.RUNNING, str(job["job_id"]), job["nodes"]) for job in told["jobs"]}
    def kick_job(self, uid, state): raise AssertionError
    def end_job(self, uid, state, grace_s): raise AssertionError

def open_backend(home_root, lease_dir, crash):
    return RecordedBackend(home_root, crash)
"""
RECORDED: Mapping[str, Any] = {"type": "recorded"}
MANIFESTS = """apiVersion: areal.dev/v1alpha1
kind: InferenceService
metadata: {name: default}
spec: {scheduler: SCHEDULER}
---
apiVersion: areal.dev/v1alpha1
kind: Model
metadata: {name: model-000}
spec: {service: default, backend: "sglang:t1", path: Qwen/Qwen3-8B, replicas: SIZE}
"""


class Answering:
    """A server that answers every probe of a fleet, and the table of its router."""

    def __init__(self, folder: Path) -> None:
        self._table = folder / "table.json"
        command = [sys.executable, __file__, "--answer", str(self._table)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


async def answer(path: Path) -> None:
    ready = b'HTTP/1.1 200 OK\r\nContent-Length: 18\r\nConnection: close\r\n\r\n{"status":"ready"}'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.partition(b" HTTP/")[0].endswith(b"/table"):
            body = path.read_bytes()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body)
        else:
            writer.write(ready)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def record_home(folder: Path, size: int, url: str, scheduler: Mapping[str, Any] = RECORDED) -> dict[str, str]:
    """A home after the manifests were applied on a cluster: objects, and runs with their records. The nodes of the runs
    by their uids."""
    name = str(scheduler["type"])
    fleet = Fleet(size, size, {"scheduler": dict(scheduler)})
    store = ObjectStore(Home(folder))
    Home(folder).ensure()
    for item in (fleet.service, *fleet.models):
        store.put(store.add_revision(item, actor="benchmark", at=1.0))
    runs, nodes = RunStore(folder / "clusters" / name / "runs"), {}
    (folder / "backends").mkdir()
    (folder / "backends" / name).touch()
    for run in (run for owned in fleet.runs.values() for run in owned):
        inputs = {name: f"{url}/{told.rpartition('://')[2]}" for name, told in run.state.spec.inputs.items()}
        spec = replace(run.state.spec, url=f"{url}/{run.url.rpartition('://')[2]}", backend=name, inputs=inputs)
        os.close(runs.create(spec))
        shim = {"machine_id": "m", "boot_id": "b", "pid_namespace": "n", "pid": 99, "start_ticks": 1, "session_id": 99}
        records.write_json(runs.folder(run.uid), records.ID, shim, durable=False)
        child = {"state": "running", "pid": 100, "start_ticks": 1, "started_at": 1.0, "restarts": 0, "last_exit": None}
        records.write_json(runs.folder(run.uid), records.CHILD, child, durable=False)
        nodes[run.uid] = run.state.node
    workers = [
        {"id": worker.id, "addr": f"{url}/{worker.addr.rpartition('://')[2]}", "state": worker.state}
        for worker in fleet.routes.models["model-000"].workers
    ]
    readiness = asdict(Readiness())
    models = {"model-000": {"workers": workers, "readiness": readiness}}
    told = {"epoch": "epoch", "serial": 1, "models": models, "synced": True}
    (folder / "table.json").write_text(json.dumps({**told, "strategy": "auto", "limits": fleet.routes.limits}))
    return nodes


def measure_apply(size: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package, home = folder / "packages", folder / "home"
        (package / "recorded-0.dist-info").mkdir(parents=True)
        (package / "recorded.py").write_text(BACKEND)
        metadata = "Metadata-Version: 2.1\nName: recorded\nVersion: 0\n"
        (package / "recorded-0.dist-info" / "METADATA").write_text(metadata)
        points = "[areal.backends]\nrecorded = recorded:open_backend\n"
        (package / "recorded-0.dist-info" / "entry_points.txt").write_text(points)
        manifest = folder / "fleet.yaml"
        manifest.write_text(fleet_manifest(size))
        home.mkdir()
        with Answering(home) as answering:
            nodes = record_home(home, size, answering.url)
            jobs = [{"name": uid, "job_id": number, "nodes": node} for number, (uid, node) in enumerate(nodes.items())]
            (home / "queue.json").write_text(json.dumps({"jobs": jobs}))
            environment = {**os.environ, "AREAL_HOME": str(home), "PYTHONPATH": f"{ROOT}:{package}"}
            spent = [no_op_apply(manifest, environment) for _ in range(rounds)]
        queries = len((home / "queries").read_text().splitlines()) / rounds
    cpu_s = sorted(each for each, _ in spent)[len(spent) // 2]
    return {"cpuSeconds": round(cpu_s, 3), "queries": queries, "peakMiB": round(max(mib for _, mib in spent), 1)}


def fleet_manifest(size: int, scheduler: Mapping[str, Any] = RECORDED) -> str:
    return MANIFESTS.replace("SCHEDULER", json.dumps(scheduler)).replace("SIZE", str(size))


def no_op_apply(manifest: Path, environment: Mapping[str, str]) -> tuple[float, float]:
    """CPU seconds and peak MiB of the command."""
    command = [sys.executable, "-m", "areal.cli", "apply", "-f", str(manifest), "-q"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    text = process.stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0 and text.count("unchanged") == 2, f"this was no no-op: {process.returncode}\n{text}"
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


# -- the router and a relay

MODEL = "model-000"
PREFIXES = [os.urandom(16) for _ in range(512)]


class DataProxies:
    """In place of the router's HTTP client: every data proxy takes every session."""

    def __init__(self) -> None:
        self.sessions: Counter[str] = Counter()

    async def fetch(self, method: str, base_url: str, path: str, **_: object) -> HttpReply:
        self.sessions[base_url] += 1
        return HttpReply(201, Headers({}), b"{}")


class RouterBench:
    def __init__(self, size: int) -> None:
        self.size = size
        gc.collect()
        before = peak_mib()
        self.registry = WorkerRegistry()
        self.places = [(f"{MODEL}-data-proxy-{index}-{index:08x}", address(2 * index + 1)) for index in range(size)]
        self.registry.register_model(MODEL, self.places, expected=size, external=False)
        self.registry.mark_synced()
        self.tags = [new_tag() for _ in range(size)]
        self.sessions = [0] * size
        self.lease_us = self.renew_all()
        self.table_bytes = len(orjson.dumps(self.registry.snapshot().to_json()))
        self.router_mib = peak_mib() - before
        before = peak_mib()
        self.live = LiveTable(GatewayLimits())
        self.told = Snapshot.from_json(orjson.loads(orjson.dumps(self.registry.snapshot().to_json())))
        self.live.apply(self.told)
        self.relay_mib = peak_mib() - before

    def renew_all(self, but: Iterable[int] = ()) -> float:
        """Every data proxy reports, as it does within each lease; CPU microseconds of one."""
        rest, began = set(but), time.process_time()
        for index, (worker, addr) in enumerate(self.places):
            if index not in rest:
                self.renew(index, worker, addr)
        return (time.process_time() - began) / self.size * 1e6

    def renew(self, index: int, worker: str, addr: str) -> None:
        body = {"worker_id": worker, "addr": addr, "model": MODEL, "expected": self.size, "status": "ready"}
        body |= {"journals": [self.tags[index]], "sessions": self.sessions[index], "in_flight": 3}
        body |= {"in_flight_tokens": 1000, "version": 7}
        lease = RenewLease(worker_id=worker, worker_addr=addr, model=MODEL, expected=self.size)
        self.registry.renew(lease, read_result(body), read_report(body, time.monotonic()), time.monotonic())

    # -- for one call

    async def picks(self, strategy: str, key: Callable[[int], CallKey], count: int, suspects: int = 0) -> float:
        """CPU microseconds of a pick by a relay that has a thousand calls in flight, its accounting included."""
        self.registry.configure(strategy, {})
        self.follow()
        for _, addr in self.places[:suspects]:
            self.live.suspect(addr)
        admission = Admission(self.live, Metrics().gauge("queued", "Queued.", ()))
        running = []
        for number in range(1000):
            each = key(number)
            worker = await admission.worker(MODEL, each, (), 0.0)
            admission.begin(worker, each)
            running.append((worker, each))
        began = time.process_time()
        for number in range(count):
            each = key(number)
            worker = await admission.worker(MODEL, each, (), 0.0)
            admission.begin(worker, each)
            admission.end(*running[number % 1000])
            running[number % 1000] = worker, each
        spent = (time.process_time() - began) / count * 1e6
        for _, addr in self.places[:suspects]:
            self.live.trust(addr)
        return spent

    async def starts(self, count: int) -> tuple[float, int, int]:
        """CPU microseconds of starting a session, and the fewest and most sessions that a replica got."""
        proxies = DataProxies()
        placing = SessionPlacing(self.registry, proxies, {})  # type: ignore[arg-type]
        spent, step = 0.0, self.size
        for _ in range(count // step):
            began = time.process_time()
            for _ in range(step):
                await placing.start({"model": MODEL}, "request")
            spent += time.process_time() - began
            self.sessions = [proxies.sessions[addr] for _, addr in self.places]
            self.renew_all()
        return spent / count * 1e6, min(self.sessions), max(self.sessions)

    async def finds(self, count: int) -> float:
        """CPU microseconds of finding a session by its id at the router."""
        placing = SessionPlacing(self.registry, DataProxies(), {})  # type: ignore[arg-type]
        calls = [RouteCall(session_id=session_id(random.choice(self.tags), number)) for number in range(1000)]
        began = time.process_time()
        for number in range(count):
            assert await placing.holder(calls[number % 1000]) is not None
        return (time.process_time() - began) / count * 1e6

    # -- events

    def follow(self) -> tuple[float, float, int]:
        """Have the relay follow the router: CPU milliseconds of the router and of the relay, bytes sent."""
        began = time.process_time()
        changes = self.registry.changes_since(self.told.serial)
        told = self.registry.snapshot() if changes is None else changes
        line = orjson.dumps(told.to_json())
        sent_at = time.process_time()
        data = orjson.loads(line)
        self.told = Snapshot.from_json(data) if changes is None else self.told.changed(Changes.from_json(data))
        self.live.apply(self.told)
        return (sent_at - began) * 1e3, (time.process_time() - sent_at) * 1e3, len(line)

    def node_lost(self) -> dict[str, Any]:
        """Its eight leases run out while all others are renewed."""
        self.follow()
        later = time.monotonic() + 3600.0
        for worker in self.registry.workers():
            assert worker.expires_at is not None
            worker.expires_at += 7200.0
        for worker in self.registry.workers()[:A_NODE]:
            worker.expires_at, worker.granted_s = 0.0, 1e9
        began = time.process_time()
        self.registry.expire(later)
        noticed_ms = (time.process_time() - began) * 1e3
        router_ms, relay_ms, sent = self.follow()
        states = Counter(worker.state for worker in self.told.models[MODEL].workers)
        assert states["dead"] == A_NODE, states
        return _event("a node lost", noticed_ms + router_ms, relay_ms, sent)

    def batch_replaced(self) -> dict[str, Any]:
        """Eight successors join a rolling update's set of all."""
        self.follow()
        new = [(f"{worker}-next", f"{addr}1") for worker, addr in self.places[-A_NODE:]]
        began = time.process_time()
        self.registry.register_model(MODEL, [*self.places, *new], expected=self.size, external=False)
        declared_ms = (time.process_time() - began) * 1e3
        router_ms, relay_ms, sent = self.follow()
        assert len(self.told.models[MODEL].workers) == self.size + A_NODE
        return _event("a batch of a rolling update", declared_ms + router_ms, relay_ms, sent)


def _event(name: str, router_ms: float, relay_ms: float, sent: int) -> dict[str, Any]:
    milliseconds = {"routerMilliseconds": round(router_ms, 2), "relayMilliseconds": round(relay_ms, 2)}
    return {"event": name, **milliseconds, "bytes": sent}


def session_id(tag: str, number: int) -> str:
    from areal.services.inference.recorder.session import SessionName

    return str(SessionName("task", tag, number))


async def measure_router(size: int, picks: int) -> dict[str, Any]:
    bench = RouterBench(size)
    prefixed = lambda number: CallKey(100.0, PREFIXES[number % 512])  # noqa: E731
    loading = lambda number: CallKey(4000.0, PREFIXES[number % 512])  # noqa: E731
    plain = lambda number: CallKey(100.0)  # noqa: E731
    of_session = lambda number: CallKey(100.0, tag=bench.tags[number % size])  # noqa: E731
    calls = {
        "pick: auto, a recorded conversation": await bench.picks("auto", prefixed, picks),
        "pick: auto": await bench.picks("auto", plain, picks),
        "pick: prefix": await bench.picks("prefix", prefixed, picks),
        "pick: prefix, long prompts": await bench.picks("prefix", loading, picks),
        "pick: least_loaded": await bench.picks("least_loaded", plain, picks),
        "pick: round_robin": await bench.picks("round_robin", plain, picks),
        "pick: of a session": await bench.picks("auto", of_session, picks),
        "pick: auto, while a node is suspect": await bench.picks("auto", prefixed, picks, suspects=A_NODE),
    }
    found_us = await bench.finds(picks)
    start_us, fewest, most = await bench.starts(size * SESSIONS)
    calls |= {"find a session at the router": found_us, "start a session": start_us}
    calls["renew a lease"] = bench.renew_all()
    memory = {"routerMiB": round(bench.router_mib, 1), "relayMiB": round(bench.relay_mib, 1)}
    spread = {"sessions": size * SESSIONS, "fewest": fewest, "most": most}
    events = [bench.node_lost(), bench.batch_replaced()]
    return {
        "calls": {name: round(us, 2) for name, us in calls.items()},
        "events": events,
        "spread": spread,
        "memory": {**memory, "tableBytes": bench.table_bytes},
    }


# -- each measurement in a process of its own


def in_process(*words: object) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", json.dumps(words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(what: str, *words: Any) -> dict[str, Any]:
    if what == "plan":
        return measure_plan(*words)
    if what == "apply":
        return measure_apply(*words)
    return asyncio.run(measure_router(*words))


def growth(small: float, large: float, sizes: tuple[int, ...]) -> float:
    """Growth beside that of the fleet."""
    return large / max(small, 1e-9) / (sizes[-1] / sizes[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the sizes, in half a minute")
    parser.add_argument("--write", action="store_true", help="keep the results in benchmarks/results")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        asyncio.run(answer(options.answer))
    if options.measure:
        print(json.dumps(measure(*json.loads(options.measure))))
        return 0
    sizes = tuple(size // 10 for size in SIZES) if options.quick else SIZES
    found = {**header("scale"), "replicas": sizes, **measure_all(sizes, 2_000 if options.quick else 50_000)}
    found["verdicts"] = verdicts(found, sizes)
    publish(found, report(found, sizes), options.write)
    return 0 if all(verdict["met"] for verdict in found["verdicts"]) else 1


def measure_all(sizes: tuple[int, ...], picks: int) -> dict[str, Any]:
    plans = [
        {"plan": what, "shape": shape, "rows": [{"size": n, **in_process("plan", what, shape, n)} for n in sizes]}
        for shape in SHAPES
        for what in PLANS
    ]
    applies = [{"size": size, **in_process("apply", size, 3)} for size in (sizes[0] // 10, sizes[0])]
    routers = [{"size": size, **in_process("router", size, picks)} for size in sizes]
    return {"plans": plans, "applies": applies, "routers": routers}


def verdicts(found: Mapping[str, Any], sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    def verdict(what: str, measured: float, most: float) -> dict[str, Any]:
        return {"what": what, "wanted": f"at most {most:g}", "measured": round(measured, 2), "met": measured <= most}

    plans, applies, routers = found["plans"], found["applies"], found["routers"]
    cpu = {(each["plan"], each["shape"]): [row["cpuSeconds"] for row in each["rows"]] for each in plans}
    calls = {name: [each["calls"][name] for each in routers] for name in routers[0]["calls"]}
    rows = [verdict("a plan, the dearest: CPU s", max(max(each) for each in cpu.values()), PLAN_S)]
    tenth = [name for name in cpu if name[0] != "rolling update, a node to spare"]
    worst = max(tenth, key=lambda name: growth(cpu[name][0], cpu[name][-1], sizes))
    grown = growth(cpu[worst][0], cpu[worst][-1], sizes)
    rows.append(verdict(f"growth beside the fleet: {', '.join(worst)}", grown, PLAN_GROWTH))
    picks = {name: each for name, each in calls.items() if name.startswith("pick")}
    dearest = max(picks, key=lambda name: picks[name][-1])
    rows.append(verdict(f"{dearest}: CPU us", picks[dearest][-1], PICK_US))
    steep = max(calls, key=lambda name: calls[name][-1] / calls[name][0])
    rows.append(verdict(f"growth: {steep}", calls[steep][-1] / calls[steep][0], CALL_GROWTH))
    rows.append(verdict(f"no-op apply of {applies[1]['size']:,}: CPU s", applies[1]["cpuSeconds"], APPLY_S))
    rows.append(verdict("no-op apply: queries of the scheduler", max(each["queries"] for each in applies), 1))
    return rows


def report(found: Mapping[str, Any], sizes: tuple[int, ...]) -> str:
    plans, routers = found["plans"], found["routers"]
    named = [f"{size:,}" for size in sizes]
    parts = [
        table(
            ("plan", "replicas in", *(f"CPU s, {size}" for size in named), "ops", "MiB of the plan"),
            [
                (
                    each["plan"],
                    each["shape"],
                    *(row["cpuSeconds"] for row in each["rows"]),
                    f"{each['rows'][-1]['ops']:,}",
                    each["rows"][-1]["planMiB"],
                )
                for each in plans
            ],
        ),
        table(
            ("no-op apply of replicas", "CPU s", "queries of the scheduler", "peak MiB"),
            [(f"{row['size']:,}", row["cpuSeconds"], row["queries"], row["peakMiB"]) for row in found["applies"]],
        ),
        table(
            ("for one call", *(f"CPU us, {size}" for size in named)),
            [(name, *(each["calls"][name] for each in routers)) for name in routers[0]["calls"]],
        ),
        table(
            ("event", "replicas", "router CPU ms", "relay CPU ms", "bytes to each relay"),
            [
                (e["event"], f"{each['size']:,}", e["routerMilliseconds"], e["relayMilliseconds"], e["bytes"])
                for each in routers
                for e in each["events"]
            ],
        ),
        table(
            ("replicas", "sessions", "sessions of a replica", "router MiB", "relay MiB", "table, bytes"),
            [
                (
                    f"{each['size']:,}",
                    f"{each['spread']['sessions']:,}",
                    f"{each['spread']['fewest']} to {each['spread']['most']}",
                    each["memory"]["routerMiB"],
                    each["memory"]["relayMiB"],
                    each["memory"]["tableBytes"],
                )
                for each in routers
            ],
        ),
        table(
            ("what", "wanted", "measured", "met"),
            [(it["what"], it["wanted"], it["measured"], "yes" if it["met"] else "no") for it in found["verdicts"]],
        ),
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
