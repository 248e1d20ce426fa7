"""What a gateway elsewhere can tell, in the shape of ``get`` and ``wait``: models, workers, its own health."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal.cli.listing import Listing
from areal.cli.output.table import Column, field
from areal.cli.remote import Gateway
from areal.cli.view import document_name
from areal.errors import ArealError, NotFound, TimedOut, UsageFault
from areal.resources.kinds import API_VERSION, Ref, parse_ref, resolve_kind

if TYPE_CHECKING:
    from areal.cli.invocation import Invocation

Document = dict[str, Any]
_POLL_S = 1.0

WORKER_COLUMNS = (
    field("WORKER", "worker_id"),
    field("MODEL", "model"),
    field("STATE", "state", state=True),
    field("IN-FLIGHT", "in_flight", right=True),
    field("TOKENS", "in_flight_tokens", right=True),
    field("VERSION", "version", right=True),
    field("ADDRESS", "worker_addr"),
)
_COLUMNS = (
    Column("NAME", document_name),
    field("READY", "status", "ready"),
    field("STATUS", "status", "phase", state=True),
    field("ADDRESS", "status", "address"),
)


def get_remote(chosen: Gateway, targets: Sequence[str]) -> Listing:
    if targets and targets[0] in ("processes", "process", "proc", "ps", "workers"):
        return Listing(workers(chosen), WORKER_COLUMNS, lambda row: str(row["worker_id"]), where=chosen.url)
    wanted, kinds = _asked(targets)
    rows = [row for row in documents(chosen) if row["kind"] in kinds]
    if wanted:
        by_ref = {Ref(row["kind"], row["metadata"]["name"]): row for row in rows}
        lost = next((ref for ref in wanted if ref not in by_ref), None)
        if lost is not None:
            raise NotFound(f"{lost} is not served by {chosen.url}", hint=f"it serves: {', '.join(map(str, by_ref))}")
        rows = [by_ref[ref] for ref in wanted]
    return Listing(rows, _COLUMNS, document_name, single=len(wanted) == 1, where=chosen.url)


def _asked(targets: Sequence[str]) -> tuple[list[Ref], set[str]]:
    refs = [parse_ref(word) for word in targets if "/" in word]
    if refs and len(refs) != len(targets):
        raise UsageFault("with --gateway name objects as KIND/NAME, or one list of kinds")
    kinds = {ref.kind for ref in refs} or {
        resolve_kind(word) for text in targets for word in text.split(",") if word and word != "all"
    }
    served = {"InferenceService", "Model"}
    if kinds - served:
        raise UsageFault(f"a gateway serves models; it knows nothing of {', '.join(sorted(kinds - served))}")
    return refs, kinds or served


def documents(chosen: Gateway) -> list[Document]:
    """The gateway as an InferenceService, and each model that it lists."""
    health = chosen.get("/health")
    models = [model_document(chosen, item) for item in chosen.get("/v1/models").get("data", [])]
    name = str(health.get("service") or "remote") if isinstance(health, dict) else "remote"
    service = _document("InferenceService", name, {"phase": "Ready", "address": chosen.url, "models": len(models)})
    return [service, *models]


def model_document(chosen: Gateway, item: Mapping[str, Any]) -> Document:
    status = {"ready": "true", "phase": "Ready", "address": chosen.url}
    return _document("Model", str(item.get("id")), status)


def _document(kind: str, name: str, status: Document) -> Document:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": {}, "status": status}


def workers(chosen: Gateway) -> list[Document]:
    """The router's workers; needs the admin key."""
    found = chosen.get("/workers")
    return list(found.get("workers", []))


def describe_remote(chosen: Gateway, ref: Ref) -> Document:
    """One model (or the service) with the workers that serve it, as far as the key may see them."""
    found = get_remote(chosen, [str(ref)]).rows[0]
    document = dict(found)
    try:
        served = workers(chosen)
    except ArealError as error:
        document["workers"] = error.message
    else:
        document["workers"] = [row for row in served if ref.kind != "Model" or row.get("model") == ref.name]
    return document


def model_rows(chosen: Gateway) -> list[Document]:
    """For ``inf models``: what the gateway lists."""
    return [
        {
            "name": str(item.get("id")),
            "service": chosen.url,
            "backend": item.get("owned_by"),
            "path": None,
            "phase": "Ready",
            "ready": None,
            "message": "",
        }
        for item in chosen.get("/v1/models").get("data", [])
    ]


def service_status(chosen: Gateway) -> Document:
    """For ``inf status``: a gateway that does not answer is a status, not an error."""
    document: Document = {"service": "remote", "address": chosen.url, "models": [], "components": [], "ready": "-"}
    try:
        health = chosen.get("/health")
        document["models"] = model_rows(chosen)
        document["service"] = str(health.get("service") or "remote")
    except ArealError as error:
        return {**document, "phase": "Unreachable", "healthy": False, "message": error.message}
    try:
        document["components"] = workers(chosen)
        down = [row for row in document["components"] if row.get("state") == "dead"]
        message = f"{len(down)} of {len(document['components'])} workers are dead" if down else ""
    except ArealError as error:
        down, message = [], error.message
    phase = "Degraded" if down else "Ready"
    return {**document, "phase": phase, "healthy": not down, "message": message}


def wait_remote(
    cli: Invocation, chosen: Gateway, refs: Sequence[Ref], wanted: Sequence[Sequence[str]], deadline_s: float
) -> int:
    """Poll until every model is listed (``ready``) or none is (``deleted``)."""
    if any(word not in ("ready", "deleted") for alternatives in wanted for word in alternatives):
        raise UsageFault("of a gateway, --for ready and --for deleted can be asked")
    if any(ref.kind != "Model" for ref in refs):
        raise UsageFault("of a gateway, models can be awaited", hint="areal wait model/NAME --for ready --gateway URL")
    until = time.monotonic() + deadline_s
    why = ""
    while True:
        try:
            listed = {str(item.get("id")) for item in chosen.get("/v1/models").get("data", [])}
        except ArealError as error:
            why = error.message
        else:
            unmet = [ref for ref in refs if not _met(ref.name in listed, wanted)]
            if not unmet:
                cli.say("met")
                return 0
            why = f"not yet: {', '.join(map(str, unmet))}"
        if time.monotonic() + _POLL_S > until:
            raise TimedOut(f"waited {deadline_s:g} s; {why}")
        time.sleep(_POLL_S)


def _met(listed: bool, wanted: Sequence[Sequence[str]]) -> bool:
    return all(any(listed == (word == "ready") for word in alternatives) for alternatives in wanted)
