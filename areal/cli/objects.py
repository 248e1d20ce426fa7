"""Objects and processes on the command line: their names, completion, and the columns of their tables.

Completion only lists file names, so that TAB does not read objects. Tables show parts of the documents of
``reconcilers.home_view``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from areal.cli.options import Invocation, home_path
from areal.cli.output import Column, field
from areal.errors import NotFound, UsageFault
from areal.numbers import age
from areal.reconcilers.home_view import document_name, weights_text
from areal.resources.kinds import INFERENCE_SERVICE, KINDS, MODEL, Ref, check_name, parse_ref, resolve_kind

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from areal.state.home import Home
    from areal.state.records import StoredObject


def parse_refs(words: Sequence[str]) -> list[Ref]:
    """Parse ``model qwen llama`` or ``model/qwen job/x``. Raises UsageFault if the two forms are mixed, and NotFound,
    with the object that has such a name, for an unknown kind."""
    try:
        return _parsed(words)
    except NotFound as error:
        root = home_of(click.get_current_context(silent=True))
        same = [f"{kind.lower()}/{words[0]}" for kind in KINDS if words[0] in names_of(root, kind)]
        if same and len(words) == 1:
            raise NotFound(f'"{words[0]}" is not a kind', hint=f"write {' or '.join(same)}") from error
        raise


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
    """Return the names of the stored objects of a kind, from the folder listing alone."""
    try:
        entries = os.scandir(os.path.join(home_root, "objects", kind.lower()))  # noqa: PTH118 - pathlib is slower
    except OSError:
        return []
    with entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith("."))


def stored(home: Home, ref: Ref) -> StoredObject:
    """Return the object. Raises NotFound, with a suggestion, or UnreadableFile if its file is damaged."""
    from areal.state.objects import ObjectStore

    return ObjectStore(home).expect(ref)


def recorded(cli: Invocation, ref: Ref) -> StoredObject | None:
    from areal.state.objects import ObjectStore

    return ObjectStore(cli.home).get(ref)


def select(home: Home, words: Sequence[str], selector: str) -> list[Ref]:
    """Return the objects of one kind with matching labels."""
    from areal.state.objects import ObjectStore

    if len(words) != 1 or "/" in words[0]:
        raise UsageFault("-l selects objects of one kind", hint="for example: models -l tier=prod")
    matches = parse_selector(selector)
    found = ObjectStore(home).list(resolve_kind(words[0]))
    return [item.ref for item in (*found, *found.presumed.values()) if matches(item.labels)]


def select_all(home: Home, words: Sequence[str]) -> list[Ref]:
    """Return all objects; of one kind, if ``words`` names one."""
    if len(words) > 1 or any("/" in word for word in words):
        raise UsageFault("--all is for one kind, or for all", hint="for example: models --all")
    return all_refs(home, None if words in ((), ("all",)) else words[0])


def all_refs(home: Home, kind: str | None) -> list[Ref]:
    """Return the objects of a kind, or of all; those whose records cannot be read are the last."""
    from areal.state.objects import ObjectStore
    from areal.state.upkeep import ref_of

    found = ObjectStore(home).list(kind)
    return [*(item.ref for item in found), *(ref_of(path) for path, _ in found.unreadable)]


Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def complete(choices: Callable[[click.Context], Iterable[str]]) -> Completer:
    """Return a completer for the words of ``choices``."""

    def completer(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        return [word for word in choices(ctx) if word.startswith(incomplete)]

    return completer


def complete_names(kind: str) -> Completer:
    """Return a completer for the names of one kind."""
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


def home_of(ctx: click.Context | None) -> str:
    """Return the state folder for completion, from the flags typed so far, the environment or the default. Never
    fails."""
    invocation = ctx.find_object(Invocation) if ctx else None
    return home_path(invocation.home_flag if invocation else None)


targets_argument = click.argument(
    "targets", nargs=-1, required=True, metavar="KIND/NAME | KIND NAME", shell_complete=complete_targets
)

service_option = click.option(
    "--service",
    metavar="NAME",
    shell_complete=complete_names(INFERENCE_SERVICE),
    help="The service  [default: `areal config set service`, else the only one, else 'default'].",
)


def service_name(cli: Invocation, given: str | None, kind: str = INFERENCE_SERVICE) -> str:
    """Return the name of the service that a command is about: the given one, else the user's default, else the only
    one, else ``default``."""
    if given is None and kind == INFERENCE_SERVICE:
        given = cli.default("service")
    if given is None:
        names = names_of(home_path(cli.home_flag), kind)
        given = names[0] if len(names) == 1 else "default"
    return check_name(str(given))


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
    """Return a predicate that is true if labels meet all comma-separated requirements. As in Kubernetes, ``!=`` and
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
        raise UsageFault(f"the selector {text!r} is incomplete: a requirement is missing at its end")
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


def columns_for(kinds: Iterable[str]) -> tuple[Column, ...]:
    """Return the columns of a table. A single kind has columns of its own; for several kinds there are only the common
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
        Column(
            "AGE",
            lambda row: _age(row["metadata"].get("createdAt")),
            right=True,
            order=lambda row: row["metadata"].get("createdAt"),
        ),
        field("GENERATION", "metadata", "generation", wide=True, right=True),
        field("SET", "metadata", "set", wide=True),
        field("LABELS", "metadata", "labels", wide=True),
        field("MESSAGE", "status", "message", wide=True),
    )


def _age(created: str | None) -> str:
    if not created:
        return "-"
    from datetime import datetime

    return age(time.time() - datetime.fromisoformat(created).timestamp())


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


PROCESSES = ("processes", "process", "proc", "ps")  # what `areal get` takes in place of a kind
PROCESS_COLUMNS = (
    field("OWNER", "owner"),
    field("COMPONENT", "component"),
    field("REPLICA", "replica", right=True),
    field("PID", "pid", right=True),
    field("GPU", "gpus"),
    field("PORT", "ports"),
    field("STATE", "state", state=True),
    field("RESTARTS", "restarts", right=True),
    Column("UPTIME", lambda row: age(row["uptimeSeconds"]), right=True, order=itemgetter("uptimeSeconds")),
    field("URL", "url", wide=True),
    Column("NODE", lambda row: row.get("node"), wide=True),
    Column("JOB", lambda row: row.get("jobId"), wide=True),
    field("UID", "uid", wide=True),
    field("REASON", "reason", wide=True),
)
