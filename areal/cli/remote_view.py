"""Models, workers and health of a remote gateway, for ``get``, ``describe`` and ``wait``.

As in the views of this machine, Ready means that a health request has succeeded: ``GET /ready`` for the gateway,
``GET /workers`` (which needs the admin key) for its router and each worker. A model that is only listed is Unknown: a
gateway also lists models whose workers are dead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from areal.cli.objects import PROCESSES
from areal.cli.options import Invocation
from areal.cli.output import Column, Row, Table, field
from areal.client.gateway import GatewayClient, KeyRefused
from areal.dataclasses import dataclass, replace
from areal.errors import ArealError, NotFound, TimedOut, UsageFault
from areal.reconcilers.home_view import document_name
from areal.reconcilers.observe import Health
from areal.resources.kinds import API_VERSION, INFERENCE_SERVICE, MODEL, Ref, parse_ref, resolve_kind

_STATES = ("dead", "draining", "cordoned")  # states of workers that get no new requests
_COMPONENTS = 2  # of a service: the router, the gateway


@dataclass(frozen=True)
class GatewayAnswers:
    """Responses of a gateway to concurrent requests. A failed request has an error in place of a response.

    ``ready`` is the status and the body of /ready, ``listed`` the entries of /v1/models, ``workers`` the body of
    /workers.
    """

    ready: tuple[int, Any] | ArealError
    listed: Sequence[Mapping[str, Any]] | ArealError
    workers: Mapping[str, Any] | ArealError

    @property
    def worker_rows(self) -> list[Mapping[str, object]]:
        return _entries(self.workers, "workers") or []


def _entries(body: Any, key: str) -> list[Mapping[str, object]] | None:
    """Return the objects of the list ``body[key]``; None if there is no such list."""
    rows = body.get(key) if isinstance(body, Mapping) else None
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else None


def service_health(answers: GatewayAnswers) -> Health:
    """Return the health of the gateway and its router; Unknown if the key may not read the router."""
    if isinstance(answers.ready, ArealError):
        return Health("Unknown", 0, _COMPONENTS, "NoAnswer", answers.ready.message)
    status, body = answers.ready
    reason = body.get("reason") if isinstance(body, Mapping) else None
    if status == 503:
        return Health("Progressing", 0, _COMPONENTS, "NotReady", f"the gateway is not ready: {reason or 'it says 503'}")
    if status != 200:
        return Health("Unknown", 0, _COMPONENTS, "NoAnswer", f"the gateway answers {status} to GET /ready")
    if isinstance(answers.workers, ArealError):
        phase = "Unknown" if isinstance(answers.workers, KeyRefused) else "Degraded"
        return Health(
            phase, 1, _COMPONENTS, "RouterNotSeen", f"the router was not seen: {_with_detail(answers.workers)}"
        )
    return Health("Ready", _COMPONENTS, _COMPONENTS, "AllReady")


def model_healths(answers: GatewayAnswers) -> dict[str, Health]:
    """Return the health of each model that is listed, has a worker, or is declared at the router. An adapter has the
    health of its model."""
    listed = [] if isinstance(answers.listed, ArealError) else answers.listed
    parents = {str(item.get("id")): str(item.get("parent") or item.get("id")) for item in listed}
    if isinstance(answers.workers, ArealError):
        why = f"its workers were not seen: {_with_detail(answers.workers)}"
        return {name: Health("Unknown", 0, 0, "WorkersNotSeen", why) for name in parents}
    declared = answers.workers.get("models")
    expected = {
        name: entry.get("expected")
        for name, entry in (declared.items() if isinstance(declared, Mapping) else ())
        if isinstance(entry, Mapping)
    }
    of_model: dict[str, list[Mapping[str, object]]] = {}
    for row in answers.worker_rows:
        if row.get("model"):
            of_model.setdefault(str(row["model"]), []).append(row)
    known = dict.fromkeys((*parents.values(), *of_model, *(name for name, count in expected.items() if count)))
    healths = {
        name: _model_health(of_model.get(name, ()), expected.get(name), name in parents, answers.listed)
        for name in known
    }
    return {name: healths[base] for name, base in parents.items()} | healths


def _model_health(
    workers: Sequence[Mapping[str, object]], expected: Any, listed: bool, listing: Sequence[Any] | ArealError
) -> Health:
    ready = [row for row in workers if row.get("state") == "ready"]
    dead = [row for row in workers if row.get("state") == "dead"]
    desired = expected if type(expected) is int else max(1, len(ready) + len(dead))
    count = min(len(ready), desired)
    message = f"{len(ready)} of {desired} replicas are ready"
    others = [
        f"{row.get('worker_id')} is {row['state']}" + (f" ({row['fault']})" if row.get("fault") else "")
        for row in workers
        if row.get("state") in _STATES
    ]
    if others:
        message += f": {', '.join(others)}"
    if len(ready) < desired:
        return Health("Degraded" if listed else "Progressing", count, desired, "NotReady", message)
    if isinstance(listing, ArealError):
        return Health("Unknown", 0, desired, "GatewayNotSeen", f"the workers are ready, but {listing.message}")
    if not listed:
        return Health("Progressing", count, desired, "NotListed", "the gateway does not list it yet")
    return Health("Ready", count, desired, "AllReady")


def _with_detail(error: ArealError) -> str:
    return f"{error.message}: {error.detail}" if error.detail else error.message


T = TypeVar("T")
_POLL_S = 1.0
_LOOK_S = 4.0  # with a stopped router, the gateway takes longer than this to respond
_NAME = "remote"  # shown as the name of the service, which only its own home knows

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
    field("MESSAGE", "status", "message", wide=True),
)


def get_remote(chosen: GatewayClient, targets: Sequence[str]) -> Table:
    if targets and targets[0] in (*PROCESSES, "workers"):
        return Table(workers(chosen), WORKER_COLUMNS, lambda row: str(row["worker_id"]), where=chosen.url)
    refs = [parse_ref(word) for word in targets if "/" in word]
    if refs and len(refs) != len(targets):
        raise UsageFault("with --gateway name objects as KIND/NAME, or one list of kinds")
    kinds = {ref.kind for ref in refs} or {
        resolve_kind(word) for text in targets for word in text.split(",") if word and word != "all"
    }
    served = {INFERENCE_SERVICE, MODEL}
    if kinds - served:
        raise UsageFault(f"a gateway serves models, and has no {', '.join(sorted(kinds - served))}")
    wanted, kinds = refs, kinds or served
    rows: list[Row] = [row for row in documents(chosen) if row["kind"] in kinds]
    if wanted:
        by_ref = {Ref(row["kind"], row["metadata"]["name"]): row for row in rows}
        lost = next((ref for ref in wanted if ref not in by_ref), None)
        if lost is not None:
            raise NotFound(f"{lost} is not served by {chosen.url}", hint=f"it serves: {', '.join(map(str, by_ref))}")
        rows = [by_ref[ref] for ref in wanted]
    return Table(rows, _COLUMNS, document_name, single=len(wanted) == 1, where=chosen.url)


def look(chosen: GatewayClient) -> GatewayAnswers:
    """Return the responses of the gateway to concurrent requests with one deadline. Raises KeyRefused if it rejects the
    key for the list of models, ArealError if there is no response at all."""
    chosen = replace(chosen, timeout_s=min(chosen.timeout_s, _LOOK_S))
    ready, listed, seen = _get_together(chosen, ("/ready", "/v1/models", "/workers"))
    if all(isinstance(answer, ArealError) for answer in (ready, listed, seen)):
        assert isinstance(ready, ArealError)
        raise ready
    if not isinstance(listed, ArealError) and listed[0] in (401, 403):
        chosen.checked("GET", "/v1/models", *listed)
    return GatewayAnswers(
        ready, _checked(chosen, "/v1/models", listed, _listing), _checked(chosen, "/workers", seen, _object)
    )


def _get_together(chosen: GatewayClient, paths: Sequence[str]) -> list[tuple[int, Any] | ArealError]:
    """Return status and body for each path. The deadline covers all requests, so that a gateway that sends single bytes
    cannot extend it."""
    silent = ArealError(f"the gateway {chosen.url} does not answer within {chosen.timeout_s:g} s")
    answers: dict[str, tuple[int, Any] | ArealError] = {}

    def ask(path: str) -> None:
        try:
            answers[path] = chosen.ask("GET", path)
        except ArealError as error:
            answers[path] = error

    threads = [threading.Thread(target=ask, args=(path,), name=f"GET {path}", daemon=True) for path in paths]
    until = time.monotonic() + chosen.timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return [answers.get(path, silent) for path in paths]


def _checked(
    chosen: GatewayClient, path: str, answer: tuple[int, Any] | ArealError, read: Callable[[Any], T | None]
) -> T | ArealError:
    if isinstance(answer, ArealError):
        return answer
    try:
        found = read(chosen.checked("GET", path, *answer))
    except ArealError as error:
        return error
    return ArealError(f"{chosen.url} answers GET {path} as no gateway of areal does") if found is None else found


def _object(document: Any) -> Mapping[str, object] | None:
    return document if isinstance(document, Mapping) else None


def _listing(document: Any) -> list[Mapping[str, object]] | None:
    models = _entries(document, "data")
    return None if models is None else [model for model in models if model.get("id")]


def documents(chosen: GatewayClient) -> list[dict[str, object]]:
    """Return the documents of the gateway, as an InferenceService, and of its models."""
    answers = look(chosen)
    models = model_healths(answers)
    service = _document(INFERENCE_SERVICE, _NAME, chosen, service_health(answers), models=len(models))
    return [service, *(_document(MODEL, name, chosen, health) for name, health in models.items())]


def _fraction(health: Health) -> str | None:
    return health.fraction if health.desired else None


def _document(kind: str, name: str, chosen: GatewayClient, health: Health, **more: int) -> dict[str, object]:
    status: dict[str, object] = {"ready": _fraction(health), "phase": health.phase, "address": chosen.url}
    status |= {"reason": health.reason, "message": health.message, **more}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": {}, "status": status}


def workers(chosen: GatewayClient) -> list[dict[str, object]]:
    """Return the router's workers; needs the admin key. Raises ArealError."""
    found = _checked(chosen, "/workers", chosen.ask("GET", "/workers"), _object)
    if isinstance(found, ArealError):
        raise found
    return [dict(row) for row in _entries(found, "workers") or []]


def describe_remote(chosen: GatewayClient, ref: Ref) -> dict[str, object]:
    """Return the document of a model (or the service) with its workers, or with the error of reading them."""
    document = dict(get_remote(chosen, [str(ref)]).rows[0])
    try:
        served = workers(chosen)
    except ArealError as error:
        document["workers"] = error.message
    else:
        document["workers"] = [row for row in served if ref.kind != MODEL or row.get("model") == ref.name]
    return document


def model_rows(chosen: GatewayClient, answers: GatewayAnswers | None = None) -> list[dict[str, object]]:
    """Return the rows of ``inf models``."""
    answers = answers or look(chosen)
    owners = (
        {} if isinstance(answers.listed, ArealError) else {str(it["id"]): it.get("owned_by") for it in answers.listed}
    )
    return [
        {
            "name": name,
            "service": chosen.url,
            "backend": owners.get(name),
            "path": None,
            "weights": _weights(answers, name),
            "phase": health.phase,
            "ready": _fraction(health),
            "message": health.message,
        }
        for name, health in model_healths(answers).items()
    ]


def _weights(answers: GatewayAnswers, model: str) -> dict[str, object] | None:
    """Return the newest version that a worker of the model serves; a gateway does not know who wrote it."""
    versions = [row.get("version") for row in answers.worker_rows if row.get("model") == model]
    known = sorted({version for version in versions if isinstance(version, int)})
    if not known:
        return None
    return {"path": None, "version": known[-1], "writer": None, **({"others": known[:-1]} if known[1:] else {})}


def service_status(chosen: GatewayClient) -> dict[str, object]:
    """Return the document of ``inf status``. An unreachable gateway is a status, not an error."""
    document: dict[str, object] = {
        "service": _NAME,
        "address": chosen.url,
        "models": [],
        "components": [],
        "ready": None,
    }
    try:
        answers = look(chosen)
    except ArealError as error:
        return {**document, "phase": "Unreachable", "healthy": False, "message": error.message}
    own, models = service_health(answers), model_rows(chosen, answers)
    return {
        **document,
        "phase": own.phase,
        "ready": _fraction(own),
        "healthy": all(phase == "Ready" for phase in (own.phase, *(row["phase"] for row in models))),
        "message": own.message,
        "models": models,
        "components": answers.worker_rows,
    }


def wait_remote(
    cli: Invocation, chosen: GatewayClient, refs: Sequence[Ref], wanted: Sequence[Sequence[str]], deadline_s: float
) -> int:
    """Poll until every model is Ready (``ready``) or gone (``deleted``). Raises TimedOut."""
    if any(word not in ("ready", "deleted") for alternatives in wanted for word in alternatives):
        raise UsageFault("with a gateway, only --for ready and --for deleted are supported")
    if any(ref.kind != MODEL for ref in refs):
        raise UsageFault(
            "with a gateway, areal can wait only for models", hint="areal wait model/NAME --for ready --gateway URL"
        )
    until = time.monotonic() + deadline_s
    why = ""
    while True:
        try:
            answers = look(chosen)
            if isinstance(answers.workers, KeyRefused):
                raise answers.workers  # waiting does not change this
        except KeyRefused:
            raise
        except ArealError as error:
            why = error.message
        else:
            healths = model_healths(answers)
            unmet = [ref for ref in refs if not _met(healths.get(ref.name), answers, wanted)]
            if not unmet:
                cli.info("met")
                return 0
            phases = [
                f"{ref} is {health.phase}: {health.message}" if health is not None else f"{ref} is not known"
                for ref, health in ((ref, healths.get(ref.name)) for ref in unmet)
            ]
            why = f"not yet: {', '.join(phases)}"
        if time.monotonic() + _POLL_S > until:
            raise TimedOut(f"waited {deadline_s:g} s; {why}")
        time.sleep(_POLL_S)


def _met(health: Health | None, answers: GatewayAnswers, wanted: Sequence[Sequence[str]]) -> bool:
    """Return whether a model meets the conditions. It is deleted if the model list and the router were both read, and
    neither has it."""
    were_read = not isinstance(answers.listed, ArealError) and not isinstance(answers.workers, ArealError)
    now = {"ready": health is not None and health.phase == "Ready", "deleted": health is None and were_read}
    return all(any(now[word] for word in alternatives) for alternatives in wanted)
