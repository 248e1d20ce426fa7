"""Objects named on the command line: ``KIND NAME...``, ``KIND/NAME...``, label selectors, and their completion.

Completion reads file names only, so that pressing TAB opens no object.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from areal.cli.options import Invocation, home_path
from areal.errors import NotFound, UsageFault
from areal.resources.kinds import KINDS, Ref, check_name, parse_ref, resolve_kind

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from areal.state.home import Home
    from areal.state.records import StoredObject


def parse_refs(words: Sequence[str]) -> list[Ref]:
    """``model qwen llama`` or ``model/qwen job/x``; the two spellings do not mix."""
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
    """Names of the stored objects of a kind, from the folder listing alone."""
    try:
        entries = os.scandir(os.path.join(home_root, "objects", kind.lower()))  # noqa: PTH118 - pathlib is slower
    except OSError:
        return []
    with entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith("."))


def missing(home: Home, ref: Ref) -> NotFound:
    """The error for an object that is not there, with the name that was probably meant."""
    from areal.errors import did_you_mean

    names = names_of(str(home.root), ref.kind)
    known = f"there are: {', '.join(names[:8])}" if names else f"there is no {ref.kind} in {home.root}"
    return NotFound(f"{ref} does not exist{did_you_mean(ref.name, names)}", hint=known)


def stored(home: Home, ref: Ref) -> StoredObject:
    """The object, or NotFound with a suggestion. Raises Unreadable when its file is damaged."""
    from areal.state.objects import ObjectStore

    found = ObjectStore(home).get(ref)
    if found is None:
        raise missing(home, ref)
    return found


def select(home: Home, words: Sequence[str], selector: str) -> list[Ref]:
    """The objects of one kind with matching labels."""
    from areal.state.objects import ObjectStore

    if len(words) != 1 or "/" in words[0]:
        raise UsageFault("-l selects objects of one kind", hint="for example: models -l tier=prod")
    matches = parse_selector(selector)
    kind = resolve_kind(words[0])
    return [found.ref for found in ObjectStore(home).list(kind) if matches(found.labels)]


# -- completion

Completer = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]


def complete(choices: Callable[[click.Context], Iterable[str]]) -> Completer:
    """A completer for words that ``choices`` gives."""

    def completer(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return _items(word for word in choices(ctx) if word.startswith(incomplete))

    return completer


def _items(words: Iterable[str]) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(word) for word in words]


def complete_names(kind: str) -> Completer:
    """A completer for the names of one kind."""
    return complete(lambda ctx: names_of(home_of(ctx), kind))


def complete_kinds(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return _items(info.singular for info in KINDS.values() if info.singular.startswith(incomplete.lower()))


def complete_targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """``KIND``, then ``NAME``; or ``KIND/NAME``."""

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
    return _items(word for word in choices if word.startswith(incomplete))


def complete_fields(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """``KIND.FIELD...``: kinds, then the fields below the typed one."""
    from click.shell_completion import CompletionItem

    from areal.resources.explain import fields_below

    if "." not in incomplete:
        near = [kind for kind in KINDS if kind.startswith(incomplete) and incomplete[:1].isupper()]
        return _items(near) if near else complete_kinds(ctx, param, incomplete)
    above, _, start = incomplete.rpartition(".")
    return [
        CompletionItem(f"{above}.{name}", help=text)
        for name, text in fields_below(above).items()
        if name.lower().startswith(start.lower())
    ]


def home_of(ctx: click.Context) -> str:
    """The state folder as completion sees it: the flags typed so far, the environment, the default. Never fails."""
    invocation = ctx.find_object(Invocation)
    return home_path(invocation.home_flag if invocation else None)


# -- arguments and options

targets_argument = click.argument(
    "targets", nargs=-1, required=True, metavar="KIND/NAME | KIND NAME", shell_complete=complete_targets
)
SERVICE = "InferenceService"

service_option = click.option(
    "--service",
    metavar="NAME",
    shell_complete=complete_names(SERVICE),
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
        shell_complete=complete_names("Model"),
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
    """One predicate over labels: every comma-separated requirement holds. As in Kubernetes, ``!=`` and ``notin`` also
    match an object without the label."""
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
