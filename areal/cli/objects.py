"""Objects and processes on the command line: their names, completion, state and documents.

Completion only lists file names, so that TAB opens no object. Other functions read state and /proc. A document is a
typed tree, the same in JSON, YAML and JSONPath; tables show a part of it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

from areal.cli.options import Invocation, home_path
from areal.cli.output import Column, age, field, iso
from areal.errors import NotFound, UsageFault
from areal.resources.kinds import API_VERSION, INFERENCE_SERVICE, KINDS, MODEL, Ref, check_name, parse_ref, resolve_kind

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from areal.reconcilers.kinds.job_status import JobStatus
    from areal.reconcilers.observe import ObservedRun
    from areal.reconcilers.status import ObjectStatus
    from areal.resources.resource import Resource
    from areal.runtime.backends.base import RunState
    from areal.state.home import Home
    from areal.state.records import Listing, StoredObject


def parse_refs(words: Sequence[str]) -> list[Ref]:
    """Parses ``model qwen llama`` or ``model/qwen job/x``. Raises UsageFault if the two forms are mixed, and NotFound,
    with the object that has such a name, for an unknown kind."""
    try:
        return _parsed(words)
    except NotFound as error:
        same = [f"{kind.lower()}/{words[0]}" for kind in KINDS if words[0] in names_of(_root(), kind)]
        if same and len(words) == 1:
            raise NotFound(f'"{words[0]}" is no kind', hint=f"write {' or '.join(same)}") from error
        raise


def _root() -> str:
    """The home of this invocation, as completion reads it."""
    context = click.get_current_context(silent=True)
    invocation = context.find_object(Invocation) if context is not None else None
    return home_path(invocation.home_flag if invocation is not None else None)


def _parsed(words: Sequence[str]) -> list[Ref]:
    if not words:
        return []
    if "/" in words[0]:
        return [parse_ref(word) for word in words]
    if len(words) == 1:
        raise UsageFault(f"which {resolve_kind(words[0])}? a name is missing", hint=f"write {words[0]}/NAME")
    kind = resolve_kind(words[0])
    mixed = next((word for word in words[1:] if "/" in word), None)
    if mixed:
        raise UsageFault(f'"{mixed}" mixes the two spellings', hint="write KIND/NAME for each, or KIND NAME...")
    return [Ref(kind, check_name(word)) for word in words[1:]]


def one_ref(words: Sequence[str]) -> Ref:
    refs = parse_refs(words)
    if len(refs) != 1:
        raise UsageFault("name one object", hint="write KIND/NAME, for example model/qwen")
    return refs[0]


def names_of(home_root: str, kind: str) -> list[str]:
    """Returns the names of the stored objects of a kind, from the folder listing alone."""
    try:
        entries = os.scandir(os.path.join(home_root, "objects", kind.lower()))  # noqa: PTH118 - pathlib is slower
    except OSError:
        return []
    with entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith("."))


def stored(home: Home, ref: Ref) -> StoredObject:
    """Returns the object. Raises NotFound, with a suggestion, or Unreadable if its file is damaged."""
    from areal.state.objects import ObjectStore

    return ObjectStore(home).expect(ref)


def recorded(cli: Invocation, ref: Ref) -> StoredObject | None:
    from areal.state.objects import ObjectStore

    return ObjectStore(cli.home).get(ref)


def select(home: Home, words: Sequence[str], selector: str) -> list[Ref]:
    """Returns the objects of one kind with matching labels."""
    from areal.state.objects import ObjectStore

    if len(words) != 1 or "/" in words[0]:
        raise UsageFault("-l selects objects of one kind", hint="for example: models -l tier=prod")
    matches = parse_selector(selector)
    kind = resolve_kind(words[0])
    return [found.ref for found in ObjectStore(home).list(kind) if matches(found.labels)]


# -- completion

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def complete(choices: Callable[[click.Context], Iterable[str]]) -> Completer:
    """Returns a completer for the words of ``choices``."""

    def completer(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        return [word for word in choices(ctx) if word.startswith(incomplete)]

    return completer


def complete_names(kind: str) -> Completer:
    """Returns a completer for the names of one kind."""
    return complete(lambda ctx: names_of(home_of(ctx), kind))


def complete_kinds(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [info.singular for info in KINDS.values() if info.singular.startswith(incomplete.lower())]


def complete_targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Completes ``KIND``, then ``NAME``; or ``KIND/NAME``."""

    def names(spelling: str) -> list[str]:
        try:
            return names_of(root, resolve_kind(spelling))
        except NotFound:
            return []

    root = home_of(ctx)
    given = ctx.params.get(param.name or "") or ()
    words = [given] if isinstance(given, str) else list(given)
    kind, slash, _ = incomplete.partition("/")
    if words and "/" not in words[0]:
        choices = names(words[0])
    elif slash:
        choices = [f"{kind}/{name}" for name in names(kind)]
    else:
        choices = [spelling for info in KINDS.values() for spelling in (info.plural, info.singular)]
        choices += [f"{info.singular}/{name}" for info in KINDS.values() for name in names_of(root, info.kind)]
    return [word for word in choices if word.startswith(incomplete)]


def complete_fields(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str] | list[CompletionItem]:
    """Completes ``KIND.FIELD...``: kinds, then the fields below the typed field."""
    from click.shell_completion import CompletionItem

    from areal.resources.explain import fields_below

    if "." not in incomplete:
        near = [kind for kind in KINDS if kind.startswith(incomplete) and incomplete[:1].isupper()]
        return near or complete_kinds(ctx, param, incomplete)
    above, _, start = incomplete.rpartition(".")
    return [
        CompletionItem(f"{above}.{name}", help=text)
        for name, text in fields_below(above).items()
        if name.lower().startswith(start.lower())
    ]


def home_of(ctx: click.Context) -> str:
    """Returns the state folder for completion, from the flags typed so far, the environment or the default. Never
    fails."""
    invocation = ctx.find_object(Invocation)
    return home_path(invocation.home_flag if invocation else None)


# -- arguments and options

targets_argument = click.argument(
    "targets", nargs=-1, required=True, metavar="KIND/NAME | KIND NAME", shell_complete=complete_targets
)

service_option = click.option(
    "--service",
    metavar="NAME",
    shell_complete=complete_names(INFERENCE_SERVICE),
    help="The service  [default: `areal config set service`, else 'default'].",
)


def service_name(cli: Invocation, given: str | None) -> str:
    return check_name(given or str(cli.default("service") or "default"))


def model_name_option(*, required: bool) -> Callable[[Any], Any]:
    return click.option(
        "--model",
        "--model-name",
        "model",
        metavar="NAME",
        required=required,
        shell_complete=complete_names(MODEL),
        help="The model's name.",
    )


# -- label selectors as in kubectl

Labels = Mapping[str, str]
Selector = Callable[[Labels], bool]

_KEY = r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?"
_VALUE = r"[A-Za-z0-9._-]*"
_TERM = rf"""\s*(?:
        (?P<set_key>{_KEY})\s+(?P<set_op>in|notin)\s*\((?P<values>[^()]*)\)
      | (?P<key>{_KEY})\s*(?P<op>==|=|!=)\s*(?P<value>{_VALUE})
      | (?P<absent>!)?\s*(?P<exists>{_KEY})
    )\s*(?:,|$)"""


def parse_selector(text: str) -> Selector:
    """Returns a predicate that is true if labels meet all comma-separated requirements. As in Kubernetes, ``!=`` and
    ``notin`` also match an object without the label. Raises UsageFault."""
    requirement = re.compile(_TERM, re.VERBOSE)
    terms: list[Selector] = []
    at = 0
    while at < len(text):
        match = requirement.match(text, at)
        if match is None:
            raise UsageFault(
                f"cannot read the selector at {text[at:]!r}",
                hint="write a=b, a!=b, 'a in (x,y)', 'a notin (x,y)', a or !a, joined by commas",
            )
        terms.append(_term(match))
        at = match.end()
    if not terms or text.rstrip().endswith(","):
        raise UsageFault(f"the selector {text!r} ends where a requirement is needed")
    return lambda labels: all(term(labels) for term in terms)


def _term(match: re.Match[str]) -> Selector:
    key, present = match["exists"], not match["absent"]
    if key:
        return lambda labels: (key in labels) == present
    if match["set_key"]:
        key, included = match["set_key"], match["set_op"] == "in"
        values = {value.strip() for value in match["values"].split(",")}
    else:
        key, included, values = match["key"], match["op"] != "!=", {match["value"]}
    return lambda labels: (labels.get(key) in values) == included


# -- a home at one moment


class HomeView:
    """A snapshot of a home: its objects and processes, each read on first use."""

    def __init__(self, home: Home) -> None:
        self.home = home

    @cached_property
    def objects(self) -> Listing[StoredObject]:
        from areal.state.objects import ObjectStore

        return ObjectStore(self.home).list()

    @cached_property
    def _by_ref(self) -> dict[str, StoredObject]:
        return {str(item.ref): item for item in self.objects}

    @cached_property
    def runs(self) -> Mapping[str, RunState]:
        from areal.runtime.backends import Backends

        return Backends(self.home.root).observe()

    def of_kind(self, kind: str) -> list[StoredObject]:
        from areal.state.objects import ObjectStore

        return list(ObjectStore(self.home).list(kind))

    def statuses(self, objects: Sequence[StoredObject], *, probe: bool = True) -> dict[str, ObjectStatus]:
        from areal.reconcilers.status import statuses

        return statuses(self.home, objects, self.runs if objects and probe else {})

    def states(self, refs: Iterable[Ref] | None = None) -> list[RunState]:
        """Returns the processes of ``refs``, or all, sorted by slot (owner, component, replica), then by start time."""
        owners = {str(ref) for ref in refs} if refs is not None else None
        found = [state for state in self.runs.values() if owners is None or state.spec.owner in owners]
        return sorted(found, key=lambda state: (*_slot(state), state.started_at or 0.0))

    def stage(self, state: RunState) -> str | None:
        """Returns what a process that starts is doing, in its own words."""
        from areal.runtime.backends import Backends

        found = Backends(self.home.root).stage(state.spec.uid)
        return found.stage if found is not None else None

    def is_removed(self, state: RunState) -> bool:
        """Whether a process has ended with a replica that its object no longer has."""
        from areal.reconcilers.kinds import controller_of, host_of
        from areal.runtime.backends.base import ENDED

        owner = self._by_ref.get(state.spec.owner)
        if owner is None or state.phase not in ENDED or state.pid:
            return False
        host = self._by_ref.get(host_of(owner) or "")
        slots = controller_of(owner.kind).slots(owner.spec, host.spec if host is not None else None)
        return slots is not None and state.spec.replica >= slots.get(state.spec.component, 0)

    def gone(self, states: Sequence[RunState], *, failed: bool = True) -> set[str]:
        """Returns the uids of processes that are no longer there: of removed replicas, those whose slot (owner,
        component, replica) a successor has taken, and background commands that have succeeded. ``failed`` False: not
        those that a successor had to follow because they failed."""
        from areal.runtime.backends.base import ENDED

        last: dict[tuple[str, str, int], RunState] = {}
        for state in sorted(states, key=_ended_at):
            if state.phase not in ENDED or last.get(_slot(state), state).phase in ENDED:
                last[_slot(state)] = state

        def is_gone(state: RunState) -> bool:
            if not state.spec.owner:
                return _ended_well(state)
            replaced = state.phase in ENDED and not state.pid and last[_slot(state)] is not state
            return self.is_removed(state) or (replaced and (failed or not has_failed(state)))

        return {state.spec.uid for state in states if is_gone(state)}

    def family(self, ref: Ref) -> list[Ref]:
        """Returns the object, the objects that it owns, and the objects attached to it, as models to a service."""
        from areal.reconcilers.kinds import host_of

        return [ref, *(found.ref for found in self.objects if str(ref) in (found.owner, host_of(found)))]

    def ended(self) -> set[str]:
        """Returns the objects that have completed, such as succeeded or failed jobs, and the objects that they own."""
        from areal.reconcilers.kinds import controller_of

        ended = set()
        for item in self.objects:
            controller = controller_of(item.kind)
            if controller.runs_to_completion and controller.completion(item.spec, self._observed(item)).ended:
                ended.add(str(item.ref))
        while more := {str(item.ref) for item in self.objects if item.owner in ended} - ended:
            ended |= more
        return ended

    def job_status(self, job: StoredObject) -> JobStatus:
        from areal.reconcilers.kinds.job_status import job_status

        return job_status(self._observed(job), suspended=bool(job.spec.get("suspend")))

    def _observed(self, found: StoredObject) -> list[ObservedRun]:
        from areal.reconcilers.observe import ObservedRun

        return [ObservedRun(state) for state in self.states([found.ref])]

    def address(self, ref: Ref) -> str:
        """Returns the URL of a service's gateway; "" if none runs."""
        from areal.reconcilers.status import gateway_address

        return gateway_address(str(ref), self.runs.values())


def service_of(found: StoredObject) -> str | None:
    """Returns the name of the service that a model is attached to; None for an object without one."""
    from areal.reconcilers.kinds import host_of

    host = host_of(found)
    return host.partition("/")[2] if host is not None else None


def _slot(state: RunState) -> tuple[str, str, int]:
    return state.spec.owner, state.spec.component, state.spec.replica


def _ended_at(state: RunState) -> float:
    return max(state.last_exit.at if state.last_exit is not None else 0.0, state.started_at or 0.0)


def has_failed(state: RunState) -> bool:
    return state.last_exit is not None and state.last_exit.reason != "stopped"


def _ended_well(state: RunState) -> bool:
    return not state.pid and state.last_exit is not None and state.last_exit.code == 0


# -- documents of objects


def columns_for(kinds: Iterable[str]) -> tuple[Column, ...]:
    """Returns the columns of a table. A single kind has columns of its own; for several kinds there are only the common
    columns, and objects are named KIND/NAME."""
    from areal.reconcilers.kinds import KindController, controller_of

    one, *more = dict.fromkeys(kinds) or KINDS
    controller = KindController("") if more else controller_of(one)
    own = (("ADDRESS", ("status", "address"), False),) if more else controller.columns
    return (
        Column("NAME", document_name) if more else field("NAME", "metadata", "name"),
        field(controller.ready_title, "status", "ready"),
        field("STATUS", "status", "phase", state=True),
        *(field(title, *path, wide=wide) for title, path, wide in own),
        *([Column("WEIGHTS", lambda row: weights_text(row["status"]), wide=True)] if more or one == MODEL else ()),
        Column("AGE", lambda row: _age(row["metadata"].get("createdAt")), right=True),
        field("GENERATION", "metadata", "generation", wide=True, right=True),
        field("SET", "metadata", "set", wide=True),
        field("LABELS", "metadata", "labels", wide=True),
        field("MESSAGE", "status", "message", wide=True),
    )


def weights_text(status: Mapping[str, Any]) -> str:
    """``version 353 of TrainJob/x, /path``: the weights that a model serves, of its status or row."""
    weights = status.get("weights") or {}
    version, writer = weights.get("version"), weights.get("writer")
    if version is None:
        return str(weights.get("path") or "")
    text = (
        f"version {version}" + (f" of {writer}" if writer else "") + (f", {weights['path']}" if weights["path"] else "")
    )
    return text + (f" (other replicas: {', '.join(map(str, weights['others']))})" if weights.get("others") else "")


def _age(created: str | None) -> str:
    if not created:
        return "-"
    import calendar

    return age(time.time() - calendar.timegm(time.strptime(created, "%Y-%m-%dT%H:%M:%SZ")))


def document_name(document: Mapping[str, Any]) -> str:
    return f"{document['kind'].lower()}/{document['metadata']['name']}"


def document_of(found: StoredObject, status: ObjectStatus, *, defaults: bool = False) -> dict[str, Any]:
    """Returns ``apiVersion, kind, metadata, spec, status``; ``spec`` as the user set it, or with defaults."""
    from areal.reconcilers.status import object_document

    return object_document(found, status, spec=with_defaults(found) if defaults else None)


def manifest(item: StoredObject | Resource) -> dict[str, Any]:
    """Returns the manifest with the fields that the user has set: applying it changes nothing."""
    from areal.state.records import JOB, StoredObject, effective

    asked = item.spec
    if isinstance(item, StoredObject):  # without what its job at rest has set
        asked = effective(tuple(layer for layer in item.layers if layer.manager != JOB))
    metadata: dict[str, Any] = {"name": item.name}
    if item.labels:
        metadata["labels"] = dict(item.labels)
    if item.annotations:
        metadata["annotations"] = dict(item.annotations)
    if item.depends_on:
        metadata["dependsOn"] = [str(ref) for ref in item.depends_on]
    return {"apiVersion": API_VERSION, "kind": item.kind, "metadata": metadata, "spec": dict(asked)}


def with_defaults(found: StoredObject) -> dict[str, Any]:
    """Returns the spec with defaults. Slow, because it validates the spec."""
    from areal.resources.validation import effective

    dumped: dict[str, Any] = effective(found.kind, found.spec).model_dump(mode="json", by_alias=True)
    return dumped


def origin_rows(found: StoredObject, *, defaults: bool = False) -> list[dict[str, Any]]:
    """Returns a row per field: its value, the layer that set it, the actor, the time and the source file."""
    from areal.resources.tree import leaves, path_text
    from areal.state.records import origins

    by_path = {path_text(path): layer for path, layer in origins(found.layers).items()}
    rows = []
    for path, value in leaves(with_defaults(found) if defaults else found.spec).items():
        layer = by_path.get(path_text(path))
        row: dict[str, Any] = {"path": f"spec.{path_text(path)}", "value": value, "origin": "default"}
        if layer is not None:
            row.update(origin=layer.manager, actor=layer.actor, at=layer.at, source=source_text(layer.source))
        rows.append(row)
    return rows


def json_text(value: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)


ORIGIN_COLUMNS = (
    field("FIELD", "path"),
    Column("VALUE", lambda row: json_text(row["value"])),
    field("ORIGIN", "origin"),
    field("WHO", "actor"),
    field("SOURCE", "source"),
)


def source_text(source: Mapping[str, Any] | None) -> str | None:
    """Returns ``file:line`` of a manifest; None if there was no file."""
    if not source or not source.get("file"):
        return None
    return f"{source['file']}:{source['line']}" if source.get("line") else str(source["file"])


# -- rows of processes


def process_row(state: RunState) -> dict[str, Any]:
    """Returns the document of a process."""
    from areal.runtime.runs import is_placed

    last = state.last_exit
    return {
        "uid": state.spec.uid,
        "owner": state.spec.owner,
        "component": state.spec.component,
        "replica": state.spec.replica,
        "state": "halted" if state.halted else state.phase.value,  # halted: alive, stopped by a signal or debugger
        "pid": state.pid,
        "shimPid": state.shim_pid,
        "gpus": list(state.gpus or state.spec.gpus),
        "ports": [*state.spec.ports, *state.spec.shared_ports],
        "url": state.spec.url if is_placed(state.spec) else None,
        "startedAt": iso(state.started_at),
        "uptimeSeconds": None
        if state.started_at is None or not state.pid
        else round(max(0.0, time.time() - state.started_at), 1),
        "restarts": state.restarts,
        "lastExit": None
        if last is None
        else {"code": last.code, "signal": last.signal, "at": iso(last.at), "reason": last.reason},
        "reason": last.reason if state.cause and last is not None else state.reason,
        "generation": state.spec.generation,
        **({"node": state.node} if state.node else {}),
        **({"jobId": state.job_id} if state.job_id else {}),
        **({"cause": str(state.cause)} if state.cause else {}),
        **({"queuedAt": iso(state.queued_at)} if state.job_id and state.queued_at else {}),
    }


PROCESS_COLUMNS = (
    field("OWNER", "owner"),
    field("COMPONENT", "component"),
    field("REPLICA", "replica", right=True),
    field("PID", "pid", right=True),
    field("GPU", "gpus"),
    field("PORT", "ports"),
    field("STATE", "state", state=True),
    field("RESTARTS", "restarts", right=True),
    Column("UPTIME", lambda row: age(row["uptimeSeconds"]), right=True),
    field("URL", "url", wide=True),
    Column("NODE", lambda row: row.get("node"), wide=True),
    Column("JOB", lambda row: row.get("jobId"), wide=True),
    field("UID", "uid", wide=True),
    field("REASON", "reason", wide=True),
)
