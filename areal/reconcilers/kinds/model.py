"""The Model kind: replicas of an engine and a data proxy behind its service's router, or of a data proxy alone."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.errors import UsageFault
from areal.installation import module_argv
from areal.reconcilers.kinds import Endpoint, KindController, StageReporter, folders_without_object, lazy
from areal.reconcilers.observe import Health, Observed, ObservedRun, routed_health
from areal.resources.kinds import API_VERSION, TRAIN_JOB, Ref, served_name, service_ref
from areal.resources.tree import FieldPath, get_path

if TYPE_CHECKING:
    from areal.reconcilers.desired import Wanted
    from areal.reconcilers.launch import EffectContext
    from areal.resources.fields import Strategy
    from areal.resources.nodes import Diagnostic
    from areal.resources.resource import Resource
    from areal.resources.specs import ModelSpec
    from areal.state.home import Home
    from areal.state.objects import ObjectStore
    from areal.state.records import StoredObject


_DISPOSAL_S = 60.0


class ModelController(KindController):
    replicas_field = "replicas"
    kept_status = ("commits",)
    columns = (("SERVICE", ("spec", "service"), False), ("BACKEND", ("spec", "backend"), False))
    plan_class = "areal.reconcilers.kinds.model_plan:ModelPlan"
    launch = lazy("areal.reconcilers.kinds.inference_launch:model_run")
    check_start = lazy("areal.reconcilers.kinds.inference_launch:require_models")
    status_of = lazy("areal.reconcilers.kinds.inference_launch:recovered_status")

    def faults(self, resources: Sequence[Resource], cache: Path, report: StageReporter) -> dict[Ref, list[Diagnostic]]:
        with_arguments = [each for each in resources if each.spec.get("engineArgs")]
        if not with_arguments:
            return {}
        from areal.reconcilers.kinds.model_engines import engine_args_faults

        return engine_args_faults(with_arguments, cache, report)

    def faults_against_state(
        self, resources: Sequence[Resource], stored: Sequence[StoredObject]
    ) -> dict[Ref, list[Diagnostic]]:
        from areal.resources.nodes import Diagnostic
        from areal.resources.paths import is_there, looked_in, looks_local, resolve_model_path
        from areal.resources.resource import served_as, served_name_conflict

        taken = {served_as(item.name, item.spec): item.ref for item in stored if item.kind == self.kind}
        resolve = cache(resolve_model_path)  # many models have the same
        faults: dict[Ref, list[Diagnostic]] = {}
        for resource in resources:
            found, adapters = [], resource.spec.get("lora")
            looked = f"({looked_in('the working directory', resource.source.file)})"
            later = any(need.startswith(f"{TRAIN_JOB}/") for need in resource.depends_on)  # a job writes its folders
            places: list[FieldPath] = [("path",), ("tokenizerPath",)]
            places += [("lora", name) for name in adapters] if isinstance(adapters, dict) else []
            tokenizer = ("tokenizerPath",) if resource.spec.get("tokenizerPath") else ("path",)
            for place in places:
                path = get_path(resource.spec, place)
                if later or not isinstance(path, str):
                    continue
                if (folder := resolve(path, resource.source.file)) is not None:
                    # Without config.json it is no model: the engine says so.
                    is_model = place == ("tokenizerPath",) or Path(folder, "config.json").is_file()
                    if place == tokenizer and is_model and not Path(folder, "tokenizer.json").is_file():
                        hint = "name a folder that has one as the tokenizer path"
                        found.append(resource.fault(place, f"model folder {path!r} has no tokenizer.json", hint))
                    continue
                from areal.hub import is_id

                if looks_local(path) or not is_id(path):
                    found.append(resource.fault(place, f"model folder {path!r} does not exist {looked}"))
            template = resource.spec.get("chatTemplate")
            if isinstance(template, str) and not is_there(template, resource.source.file):
                found.append(resource.fault(("chatTemplate",), f"file {template!r} does not exist {looked}"))
            if (other := taken.get(served_as(resource.name, resource.spec))) is not None:
                found.append(Diagnostic(*served_name_conflict(resource, str(other))))
            if found:
                faults[resource.ref] = found
        return faults

    def faults_before_start(
        self, items: Sequence[tuple[Wanted, Resource]], report: StageReporter
    ) -> dict[Ref, list[Diagnostic]]:
        """Secrets that cannot be read."""
        from areal.reconcilers.launch import secret_fault, secret_faults

        faults: dict[Ref, list[Diagnostic]] = {}
        for wanted, resource in items:
            found = [*secret_faults(wanted.spec.get("envFrom") or {})]
            for path in (("external", "apiKeyFrom"), ("engineApiKeyFrom",)):
                source = get_path(wanted.spec, path)
                found += secret_fault(path, source) if isinstance(source, dict) else ()
            if found:
                faults[resource.ref] = [resource.fault(*each) for each in found]
        return faults

    def packages(self, spec: Mapping[str, Any]) -> Mapping[str, str]:
        is_embedded = self._starts(spec, "embedded")
        return dict.fromkeys(("orjson", "torch", "transformers"), "embedded") if is_embedded else {"orjson": "serve"}

    def programs(self, spec: Mapping[str, Any]) -> Mapping[str, str]:
        python = (spec.get("env") or {}).get("AREAL_ENGINE_PYTHON")
        return {"spec.env.AREAL_ENGINE_PYTHON": str(python)} if python and self._starts(spec, "vllm", "sglang") else {}

    def _starts(self, spec: Mapping[str, Any], *engines: str) -> bool:
        return "engine" in self.slots(spec, None) and str(spec.get("backend", "embedded")).startswith(engines)

    def host(self, spec: Mapping[str, object]) -> str:
        return service_ref(spec)

    def health(self, ref: str, spec: Mapping[str, object], seen: Observed, host: Mapping[str, Any] | None) -> Health:
        """Return the health. Ready means that users' requests arrive: every replica's processes answer, the router
        sends requests to each, and the gateway answers."""
        slots = self.slots(spec, host)
        count = slots["data-proxy"]
        if count == 0:
            return Health("Suspended", 0, 0)
        name, owner = served_name(ref.partition("/")[2], spec), service_ref(spec)
        return routed_health(seen, ref, name, count, tuple(slots), owner, recorded=host is not None)

    def details(self, ref: str, seen: Observed) -> dict[str, object]:
        """Return ``weights``: the path, version and writer of the newest served weights, and ``others``: other versions
        that replicas serve."""
        found = [run.weights for run in seen.of(ref, "data-proxy") if run.weights]
        newest = max(found, key=lambda weights: weights.get("version") or 0, default=None)
        if newest is None:
            return {}
        others = sorted({weights.get("version") or 0 for weights in found} - {newest.get("version") or 0})
        return {"weights": {**newest, **({"others": others} if others else {})}}

    def slots(self, spec: Mapping[str, object], host: Mapping[str, object] | None) -> Mapping[str, int]:
        count = 0 if host is not None and host.get("suspend") else self.replicas(spec)
        names = ("data-proxy",) if spec.get("external") or spec.get("engineUrl") else ("engine", "data-proxy")
        return dict.fromkeys(names, count)

    def replicas(self, spec: Mapping[str, Any]) -> int:
        """Return the same count as ``replica_count``, from a sparse spec and without importing the spec's model."""
        if spec.get("suspend"):
            return 0
        if spec.get("external") or spec.get("engineUrl"):
            return 1
        if spec.get("replicas") is not None:
            return int(spec["replicas"])
        found = re.search(r"[:.](?:[a-z]\d+)*?d(\d+)", str(spec.get("backend", "")))
        return int(found[1]) if found else 1

    def scaled(self, store: ObjectStore, ref: Ref, model: str | None) -> Ref:
        found = super().scaled(store, ref, model)
        spec = store.expect(found).spec
        if place := "external" if spec.get("external") else "engineUrl" if spec.get("engineUrl") else "":
            raise UsageFault(f"{found} has no replicas to scale: spec.{place} names a server that areal does not start")
        return found

    def needed_to_end(self, found: StoredObject, observed: Observed) -> tuple[ObservedRun, ...]:
        return (*observed.of(str(found.ref)), *observed.of(service_ref(found.spec), "router"))

    def wants_gpus(self, spec: Mapping[str, object]) -> bool:
        from areal.reconcilers.kinds.model_plan import gpus_per_replica
        from areal.resources.validation import effective

        return gpus_per_replica(effective(self.kind, spec)) > 0

    def endpoint(self, spec: Mapping[str, object], component: str) -> Endpoint | None:
        return Endpoint(caller=("data-proxy", "engineUrl") if component == "engine" else None)

    def start_deadline_s(self, context: EffectContext, ref: str) -> float:
        """Return the earlier of the startup probe's deadline and the rollout's progress deadline."""
        spec: ModelSpec = context.spec_of(ref)
        strategy: Strategy = spec.strategy or context.spec_of(service_ref(context.object(ref).spec)).strategy
        return min(spec.probes.startup.deadline_seconds, strategy.progress_deadline_seconds)

    def dispose(self, home: Home, ref: Ref) -> str | None:
        """Remove the Model's trajectories, except finished ones that were never exported: a later Model of this name
        serves them again. Journals are read only by the recorder, which removes them in a separate process."""
        import subprocess

        folder = home.data / ref.name
        if not folder.exists():
            return None
        try:
            done = subprocess.run(
                module_argv("areal.services.inference.recorder.storage", str(folder)),
                capture_output=True,
                text=True,
                timeout=_DISPOSAL_S,
                stdin=subprocess.DEVNULL,
                check=True,
            )
            kept = json.loads(done.stdout)
        except subprocess.CalledProcessError as error:
            lines = error.stderr.strip().splitlines()
            return f"{ref}: {folder} is kept: {lines[-1] if lines else 'no reason given'}"
        except (OSError, subprocess.TimeoutExpired, ValueError) as error:
            return f"{ref}: {folder} is kept: its records could not be read: {error}"
        reasons = []
        if count := kept["finished"]:
            reasons.append(f"{count} finished {'trajectory was' if count == 1 else 'trajectories were'} never exported")
        if kept["unreadable"]:
            reasons.append(f"unreadable journals: {', '.join(kept['unreadable'])}")
        if kept["served"]:
            reasons.append(f"journals in use: {', '.join(kept['served'])}")
        if not reasons:
            return None
        return f"{ref}: {folder} is kept: {'; '.join(reasons)}. A Model of this name serves it again; remove it by hand"

    def adopted(self, store: ObjectStore, ref: Ref, pid: int | None, url: str | None) -> dict[str, object]:
        """Return the manifest of an external Model of the service ``default``, for the server that runs there."""
        from areal.reconcilers.kinds.model_engines import find_server

        store.expect(Ref("InferenceService", "default"))
        found = find_server(pid, url, ref.name)
        return {
            "apiVersion": API_VERSION,
            "kind": self.kind,
            "metadata": {"name": ref.name, "annotations": {"areal.dev/adopted": f"pid {pid}" if pid else found.url}},
            "spec": {"service": "default", "external": {"url": found.url, "model": found.model}},
        }

    def leftovers(self, home: Home, names: Collection[str]) -> Iterator[tuple[str, str]]:
        """Trajectories whose Model is deleted. Only a person removes them."""
        for path in folders_without_object(home.data, names):
            what = f"{path} holds trajectories of Model/{path.name}, which does not exist any more"
            yield what, "apply a Model of this name to export it, or remove the folder"
