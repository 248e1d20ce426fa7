"""The InferenceService kind: a router and a gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from areal.errors import NotFound, UsageFault, did_you_mean
from areal.reconcilers.kinds import Endpoint, ServiceController, controller_of, lazy
from areal.reconcilers.observe import Health, Observed, best_run, judge, serves
from areal.resources.kinds import MODEL, Ref, service_ref

if TYPE_CHECKING:
    from areal.resources.specs import InferenceServiceSpec
    from areal.state.objects import ObjectStore


class InferenceServiceController(ServiceController):
    columns = (("ADDRESS", ("status", "address"), False),)
    plan_class = "areal.reconcilers.kinds.service_plan:InferenceServicePlan"
    launch = lazy("areal.reconcilers.kinds.inference_launch:service_run")

    def health(self, ref: str, spec: Mapping[str, object], seen: Observed, host: Mapping[str, Any] | None) -> Health:
        if spec.get("suspend"):
            return Health("Suspended", 0, 0)
        best = [best_run(seen, ref, name) for name in ("router", "gateway")]
        return judge(sum(1 for run in best if serves(run)), len(best), best)

    def slots(self, spec: Mapping[str, object], host: Mapping[str, object] | None) -> Mapping[str, int]:
        return {} if spec.get("suspend") else {"router": 1, "gateway": 1}

    def endpoint(self, spec: Mapping[str, object], component: str) -> Endpoint | None:
        from areal.resources.validation import effective

        full: InferenceServiceSpec = effective(self.kind, spec)
        if component == "gateway":
            return Endpoint(full.gateway.port, full.gateway.host, "spec.gateway.port", shared=True)
        caller = ("gateway", "routerUrl")
        return Endpoint(full.router.port or 0, field="spec.router.port", in_place=True, caller=caller)

    def scaled(self, store: ObjectStore, ref: Ref, model: str | None) -> Ref:
        """Return the named model, or the service's only model."""
        models = [item.name for item in store.list(MODEL) if service_ref(item.spec) == str(ref)]
        if model is None and len(models) != 1:
            raise UsageFault(f"{ref} has {len(models)} models; say which", hint="--model NAME")
        if model is not None and model not in models:
            raise NotFound(f"{ref} has no model {model!r}{did_you_mean(model, models)}")
        return controller_of(MODEL).scaled(store, Ref(MODEL, model or models[0]), None)
