"""Objects named on the command line: ``KIND NAME...``, ``KIND/NAME...``, and their completion.

Completion reads file names only, so that pressing TAB opens no object.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

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
    from areal.resources.suggest import did_you_mean

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
    from areal.cli.selectors import parse_selector
    from areal.state.objects import ObjectStore

    if len(words) != 1 or "/" in words[0]:
        raise UsageFault("-l selects objects of one kind", hint="for example: models -l tier=prod")
    matches = parse_selector(selector)
    kind = resolve_kind(words[0])
    return [found.ref for found in ObjectStore(home).list(kind) if matches(found.labels)]


def complete_targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """``KIND``, then ``NAME``; or ``KIND/NAME``."""
    from click.shell_completion import CompletionItem

    root = home_of(ctx)
    given = ctx.params.get(param.name or "") or ()
    words = [given] if isinstance(given, str) else list(given)
    if words and "/" not in words[0]:
        return [CompletionItem(name) for name in _names(root, words[0]) if name.startswith(incomplete)]
    kind, slash, start = incomplete.partition("/")
    if slash:
        return [CompletionItem(f"{kind}/{name}") for name in _names(root, kind) if name.startswith(start)]
    choices = [spelling for info in KINDS.values() for spelling in (info.plural, info.singular)]
    objects = [f"{info.singular}/{name}" for info in KINDS.values() for name in names_of(root, info.kind)]
    return [CompletionItem(word) for word in [*choices, *objects] if word.startswith(incomplete)]


def complete_names(kind: str) -> Any:
    """A completer for the names of one kind."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in names_of(home_of(ctx), kind) if name.startswith(incomplete)]

    return complete


def complete_kinds(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(info.singular) for info in KINDS.values() if info.singular.startswith(incomplete.lower())]


def complete_fields(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """``KIND.FIELD...``: kinds, then the fields below what is typed."""
    from click.shell_completion import CompletionItem

    from areal.resources.explain import fields_below

    if "." not in incomplete:
        near = [info for info in KINDS.values() if info.kind.startswith(incomplete) and incomplete[:1].isupper()]
        words = [info.kind for info in near] or [item.value for item in complete_kinds(ctx, param, incomplete)]
        return [CompletionItem(word) for word in words]
    above, _, begun = incomplete.rpartition(".")
    return [
        CompletionItem(f"{above}.{name}", help=text)
        for name, text in fields_below(above).items()
        if name.lower().startswith(begun.lower())
    ]


def home_of(ctx: click.Context) -> str:
    """The state folder as completion sees it: the flags typed so far, the environment, the default. Never fails."""
    from areal.cli.invocation import Invocation, home_path

    invocation = ctx.find_object(Invocation)
    return home_path(invocation.home_flag if invocation else None)


def _names(root: str, kind: str) -> list[str]:
    try:
        return names_of(root, resolve_kind(kind))
    except NotFound:
        return []
