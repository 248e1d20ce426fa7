"""The AgentService kind: pairs of a worker and a data proxy behind a router and a gateway of their own."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from areal.reconcilers.kinds import Endpoint, ServiceController, folders_without_object, lazy
from areal.reconcilers.observe import Health, Observed, best_run, judge, routed_health, serves
from areal.resources.kinds import service_ref
from areal.state.files import UnreadableFile, read_json, write_json

if TYPE_CHECKING:
    from areal.reconcilers.launch import EffectContext
    from areal.resources.agent_spec import AgentServiceSpec
    from areal.resources.kinds import Ref
    from areal.state.home import Home


class AgentServiceController(ServiceController):
    replicas_field = "pairs"
    ready_title = "PAIRS"
    columns = (("ADDRESS", ("status", "address"), False), ("AGENT", ("spec", "agent"), False))
    plan_class = "areal.reconcilers.kinds.agent_plan:AgentServicePlan"
    follow = lazy("areal.reconcilers.kinds.agent_plan:with_callers_of")
    launch = lazy("areal.reconcilers.kinds.agent_launch:agent_run")
    faults_before_start = lazy("areal.reconcilers.kinds.agent_launch:agent_faults")

    def called(self, spec: Mapping[str, Any]) -> str | None:
        return service_ref(spec["inference"]) if spec.get("inference") else None

    def health(self, ref: str, spec: Mapping[str, object], seen: Observed, host: Mapping[str, object] | None) -> Health:
        count = self.replicas(spec)
        if count == 0:
            return Health("Suspended", 0, 0)
        found = routed_health(seen, ref, ref.partition("/")[2], count, ("worker", "data-proxy"), ref)
        router = best_run(seen, ref, "router")  # which may serve its table and still not be ready
        return judge(count, count, [router]) if found.phase == "Ready" and not serves(router) else found

    def slots(self, spec: Mapping[str, object], host: Mapping[str, object] | None) -> Mapping[str, int]:
        count = self.replicas(spec)
        return {} if spec.get("suspend") else {"router": 1, "gateway": 1, "worker": count, "data-proxy": count}

    def endpoint(self, spec: Mapping[str, object], component: str) -> Endpoint | None:
        from areal.resources.validation import effective

        if component == "gateway":
            full: AgentServiceSpec = effective(self.kind, spec)
            return Endpoint(full.gateway.port, full.gateway.host, "spec.gateway.port", shared=True)
        callers = {"router": ("gateway", "routerUrl"), "worker": ("data-proxy", "workerUrl")}
        return Endpoint(in_place=component == "router", caller=callers.get(component))

    def start_deadline_s(self, context: EffectContext, ref: str) -> float:
        spec: AgentServiceSpec = context.spec_of(ref)
        return spec.setup_timeout_seconds

    def dispose(self, home: Home, ref: Ref) -> str | None:
        """Remove the service's conversations, and the record of its current one. Recorded model calls belong to the
        inference service and are kept."""
        shutil.rmtree(home.sessions / ref.name, ignore_errors=True)
        file = home.current_sessions
        with contextlib.suppress(FileNotFoundError, UnreadableFile):
            found: dict[str, str] = read_json(file)
            if kept := {place: key for place, key in found.items() if place != ref.name}:
                write_json(file, kept)
            else:
                file.unlink()
        return None

    def leftovers(self, home: Home, names: Collection[str]) -> Iterator[tuple[str, str]]:
        for path in folders_without_object(home.sessions, names):
            yield f"{path} holds the conversations of {self.kind}/{path.name}, which is gone", "remove the folder"
