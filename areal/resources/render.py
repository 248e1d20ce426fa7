"""Renders manifests into resources. The result depends only on the files, the values and the environment variables that
``Rendered.env`` lists.

``read -> template -> overlay -> set -> assemble -> cross-check``: all stages collect faults in one list. ``render``
raises if there are any; ``render_valid`` leaves out the documents that have faults.

``--set`` sets one field from the command line, over everything in the files:

    spec.gateway.port=9000                  when there is one resource
    Model/qwen:spec.replicas=2              any resource, inline models too
    values.size=7b                          a value for expressions

The value is parsed as YAML and becomes part of the resource's spec; ``null`` removes the field. Its position is the
flag: ``--set:2:21`` is column 21 of the second ``--set``.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from areal.dataclasses import dataclass, field
from areal.errors import ArealError, closest, did_you_mean
from areal.resources import tree
from areal.resources.documents import Document, Reading, SourceText, read_sources, read_values
from areal.resources.expressions import EnvironmentVariables
from areal.resources.fields import resolve
from areal.resources.kinds import KINDS, Ref, name_problem, parse_ref
from areal.resources.nodes import (
    FLAG,
    Diagnostic,
    ManifestError,
    MappingNode,
    Node,
    Pos,
    Problems,
    ScalarNode,
    SequenceNode,
    at_path,
    child,
    item_name,
    mapping,
    plain,
    with_entry,
    without_entry,
)
from areal.resources.resource import Rendered, Resource, acyclic, assemble, place_references, served_once, unique
from areal.resources.tree import FieldPath, bracketed, path_text
from areal.resources.validation import spec_model
from areal.resources.yaml_io import MAX_DEPTH, load_value

_FORM = re.compile(r"(?:(?P<ref>[A-Za-z]+/[^:=]*):)?(?P<path>[^=]*)=(?P<value>.*)", re.DOTALL)
_ROOTS = ("spec", "metadata", "values")


@dataclass(frozen=True)
class RenderRequest:
    """Input of a rendering. ``"-"`` in ``files`` means the text in ``stdin``; ``env`` None means the environment of
    this process. ``manifests``: built from the flags of an imperative command, and read instead of ``files``. ``note``
    is called with a sentence about a setting that has no effect."""

    files: tuple[str, ...] = ()
    recursive: bool = False
    overlay: str | None = None
    sets: tuple[str, ...] = ()
    values_files: tuple[str, ...] = ()
    profile: str | None = None
    stdin: str | None = None
    manifests: tuple[Mapping[str, object], ...] = ()
    env: Mapping[str, str] | None = field(default=None, repr=False)
    note: Callable[[str], None] = field(default=lambda text: None, repr=False, compare=False)


def render(request: RenderRequest) -> Rendered:
    """Return the resources in file order, inline models after their service. Raises ManifestError with all faults."""
    valid = _rendered(request)
    if valid.faults:
        raise ManifestError(valid.faults)
    return valid.rendered


@dataclass(frozen=True)
class ValidPart:
    """The result of ``render`` without the documents that have faults. ``faults``: all faults, in file order.
    ``invalid``: the objects of the documents left out, if their names can be read, with the faults of the document;
    ``faulty``: those of them that could be assembled."""

    rendered: Rendered
    faults: tuple[Diagnostic, ...] = ()
    faulty: tuple[Resource, ...] = ()
    invalid: Mapping[Ref, tuple[Diagnostic, ...]] = field(default_factory=dict)


def render_valid(request: RenderRequest) -> ValidPart:
    """Render the documents that have no faults. Raises ManifestError if there is a fault in flags, values or overlays,
    since it can affect every document."""
    return _rendered(request, partly=True)


def _rendered(request: RenderRequest, *, partly: bool = False) -> ValidPart:
    problems = Problems()
    env = EnvironmentVariables(os.environ if request.env is None else request.env)
    files, stdin = request.files, request.stdin
    if request.manifests:  # JSON is YAML: they go through the same loader as a file
        files, stdin = ("-",), "\n---\n".join(json.dumps(manifest, indent=1) for manifest in request.manifests)
    sources = list(read_sources(files, request.recursive, stdin, problems, request.note))
    manifests = tuple(problems.files)
    documents = _documents(request, sources, Reading(problems, env, request.profile))
    made = [(document, assemble(document)) for document in documents]
    resources = [resource for _, each in made for resource in each]
    unique(resources, problems)
    served_once(resources, problems)
    references = place_references(resources)
    acyclic(references, problems)
    faults = tuple(problems.diagnostics())
    invalid: dict[Ref, tuple[Diagnostic, ...]] = {}
    faulty: list[Resource] = []
    if faults and partly:
        places = _Places(sources, manifests)
        by_place = places.of(faults)
        kept: list[Resource] = []
        for document, each in made:
            here = by_place.get(places.at(document.source.file, document.node.pos.line))
            if here is None:
                kept += each
            else:
                faulty += each
                invalid |= {ref: tuple(here) for ref in document.declared() if name_problem(ref.name) is None}
        resources = [item for item in kept if item.ref not in invalid]
        references = place_references(resources)
    return ValidPart(
        Rendered(tuple(resources), references, dict(sorted(env.read.items()))), faults, tuple(faulty), invalid
    )


class _Places:
    """Maps a line of a file to its YAML document. ``---`` at the start of a line always begins a document."""

    def __init__(self, sources: Iterable[SourceText], manifests: Iterable[str]) -> None:
        self._begins: dict[str, list[int]] = {file: [] for file in manifests}  # includes files that cannot be read
        self._begins |= {
            source.file: [
                number for number, line in enumerate(source.text.split("\n"), 1) if re.match(r"---(\s|$)", line)
            ]
            for source in sources
        }

    def at(self, file: str, line: int) -> tuple[str, int]:
        return file, bisect_right(self._begins.get(file, ()), line)

    def of(self, faults: tuple[Diagnostic, ...]) -> dict[tuple[str, int], list[Diagnostic]]:
        """Group faults by document. Raises ManifestError with all faults if one belongs to no document."""
        found: dict[tuple[str, int], list[Diagnostic]] = {}
        for fault in faults:
            if fault.pos.file not in self._begins:
                raise ManifestError(faults)
            found.setdefault(self.at(fault.pos.file, fault.pos.line), []).append(fault)
        return found


def _documents(request: RenderRequest, sources: list[SourceText], reading: Reading) -> list[Document]:
    problems = reading.problems
    parsed = (_parse(text, line, problems) for line, text in enumerate(request.sets, start=1))
    settings = [setting for setting in parsed if setting is not None]
    before = problems.met
    values = read_values(request.values_files, problems)
    if problems.met > before:  # every value that the file holds would be reported as not set
        reading.hidden = set()
        return apply_settings(reading.documents(sources, {}), settings, Problems())
    declared, values = values, set_values(values, settings, problems)
    documents = reading.documents(sources, values)
    if request.files and not documents and not reading.seen and not problems:
        problems.add(Pos(request.files[0], 1, 1), "", "no resources: every manifest in this folder is empty")
    if request.overlay is not None:
        from areal.resources.overlay import overlay_documents

        documents += overlay_documents(request.overlay, values, reading)
    reading.check_profile()
    if not problems:
        for setting in _unread(settings, reading.reads):
            if tree.get_path(declared, setting.path[1:]) is tree.ABSENT:
                _report_unread(setting, reading.reads, problems)
            else:  # a values file serves several manifests, each of which reads some of its values
                request.note(f"{setting.pos}: {path_text(setting.path)}: no effect: these manifests do not read it")
    return apply_settings(documents, settings, problems)


@dataclass(frozen=True)
class Setting:
    """One parsed ``--set``. ``ref`` None: the only resource, or a value for expressions."""

    ref: Ref | None
    path: FieldPath
    value: Node
    pos: Pos


def set_values(values: dict[str, object], settings: Sequence[Setting], problems: Problems) -> dict[str, object]:
    """Return ``values`` with all settings of ``values.NAME`` applied."""
    for setting in settings:
        if setting.path[0] != "values":
            continue
        if setting.ref is not None or len(setting.path) < 2:
            problems.add(setting.pos, path_text(setting.path), "a value is set as values.NAME=..., for no resource")
            continue
        values = tree.set_path(values, setting.path[1:], plain(setting.value))
    return values


def _unread(settings: Sequence[Setting], reads: Collection[FieldPath]) -> list[Setting]:
    """Return the settings of values that no expression reads."""

    def is_read(path: FieldPath) -> bool:
        return any(all(step == key for step, key in zip(path, read, strict=False)) for read in reads)

    return [each for each in settings if each.path[0] == "values" and not is_read(each.path)]


def _report_unread(setting: Setting, reads: Iterable[FieldPath], problems: Problems) -> None:
    known = sorted({path_text(path[1:]) for path in reads if path[0] == "values"})
    near = closest(path_text(setting.path[1:]), known)
    meant = f' (did you mean "values.{near}"?)' if near is not None else ""
    hint = f"values that expressions read: {', '.join(known) or 'none'}" if near is None else None
    message = f"no expression reads it, and no values file has it{meant}"
    problems.add(setting.pos, path_text(setting.path), message, hint=hint)


def apply_settings(documents: list[Document], settings: Sequence[Setting], problems: Problems) -> list[Document]:
    """Return the documents with all settings applied, except those of ``values``."""
    fields = [setting for setting in settings if setting.path[0] != "values"]
    if not fields:
        return documents
    documents = list(documents)
    names = {name: at for at, document in reversed(list(enumerate(documents))) for name in document.declared()}
    for setting in fields:
        at = _target(documents, names, setting, problems)
        if at is None:
            continue
        document = documents[at]
        try:
            path = setting.path
            if setting.ref is not None and setting.ref != document.declared()[0]:  # a model inline in a service's list
                path = ("spec", "models", f"[{setting.ref.name}]", *path[1:])
            removes = isinstance(setting.value, ScalarNode) and setting.value.value is None
            if removes and at_path(document.node, path) is None and not _is_declared(path, document.kind):
                raise _NoPlace("there is nothing to remove, and no such field")
            node = _removed(document.node, path) if removes else _set(document.node, path, setting, (), document.kind)
        except _NoPlace as error:
            problems.add(setting.pos, path_text(setting.path), str(error))
            continue
        assert isinstance(node, MappingNode)
        documents[at] = document._replace(node=node)
    return documents


class _NoPlace(Exception):
    pass


def _parse(text: str, line: int, problems: Problems) -> Setting | None:
    start = Pos(FLAG, line, 1)
    match = _FORM.fullmatch(text)
    if match is None:
        problems.add(start, "", f'"{text}" is not PATH=VALUE', hint="for example --set spec.gateway.port=9000")
        return None
    pos = start._replace(col=match.start("path") + 1)
    try:
        ref = parse_ref(match["ref"]) if match["ref"] is not None else None
        path = tree.parse_path(match["path"])
    except (ArealError, ValueError) as error:
        problems.add(start, "", str(error))
        return None
    if len(path) > MAX_DEPTH:
        problems.add(pos, "", f"the path has more than {MAX_DEPTH} steps")
        return None
    if not path or path[0] not in _ROOTS:
        first = str(path[0]) if path else ""
        problems.add(pos, match["path"], f"a path begins with spec, metadata or values{did_you_mean(first, _ROOTS)}")
        return None
    if path == ("metadata", "name"):
        problems.add(pos, match["path"], "the name identifies the object: it cannot be set")
        return None
    value = load_value(match["value"], start._replace(col=match.start("value") + 1), problems)
    return None if value is None else Setting(ref, path, value, pos)


def _target(documents: list[Document], names: dict[Ref, int], setting: Setting, problems: Problems) -> int | None:
    """Return the index of the document that the setting changes; None after reporting that there is none."""
    text = path_text(setting.path)
    if setting.ref is None:
        if len(documents) == 1:
            return 0
        hint = f"name one: {FLAG} {min(names, key=names.__getitem__)}:{text}=..." if names else None
        problems.add(setting.pos, text, f"there are {len(documents)} resources, and no one is named", hint=hint)
        return None
    if setting.ref not in names:
        near = did_you_mean(str(setting.ref), map(str, names))
        problems.add(setting.pos, text, f"{setting.ref} is not in these manifests{near}")
        return None
    return names[setting.ref]


def _set(node: Node | None, path: FieldPath, setting: Setting, above: FieldPath, kind: str) -> Node:
    """Return ``node`` with the setting's value at ``path``. Missing maps and lists on the path are created as the
    kind's model declares them."""
    if not path:
        return setting.value
    step, here = path[0], (*above, path[0])
    if isinstance(node, ScalarNode) and node.value is None:
        node = None
    if isinstance(node, SequenceNode) or (node is None and _is_list(above, kind)):
        items = node.items if isinstance(node, SequenceNode) else ()
        return SequenceNode(_set_item(items, path, setting, above, kind), node.pos if node is not None else setting.pos)
    if isinstance(node, ScalarNode):
        raise _NoPlace(f"{path_text(above)} is no map")
    holder = node if node is not None else mapping({}, setting.pos)
    key = bracketed(step) or str(step)
    return with_entry(
        holder, key, _set(holder.get(key), path[1:], setting, here, kind), holder.keys.get(key, setting.pos)
    )


def _removed(node: Node, path: FieldPath) -> Node:
    """Return ``node`` without the node at ``path``, if it exists."""
    step, below = path[0], child(node, path[0])
    if below is None:
        return node
    instead = None if len(path) == 1 else _removed(below, path[1:])
    if isinstance(node, SequenceNode):
        items = (instead if item is below else item for item in node.items)
        return SequenceNode(tuple(item for item in items if item is not None), node.pos)
    assert isinstance(node, MappingNode)
    key = bracketed(step) or str(step)
    return without_entry(node, key) if instead is None else with_entry(node, key, instead)


def _set_item(
    items: tuple[Node, ...], path: FieldPath, setting: Setting, above: FieldPath, kind: str
) -> tuple[Node, ...]:
    step, here = path[0], (*above, path[0])
    name = bracketed(step)
    for at, item in enumerate(items):
        if (name is not None and item_name(item) == name) or step == at:
            return (*items[:at], _set(item, path[1:], setting, here, kind), *items[at + 1 :])
    if name is None:
        raise _NoPlace(f"{path_text(above)} has no item {path_text((step,))}; it has {len(items)}")
    fresh = mapping({"name": ScalarNode(name, setting.pos)}, setting.pos)
    return (*items, _set(fresh, path[1:], setting, here, kind))


def _is_declared(path: FieldPath, kind: str) -> bool:
    """Return whether the kind has such a field."""
    if path[:1] != ("spec",) or kind not in KINDS:
        return path[0] == "metadata"
    fields = list(resolve(spec_model(kind), path[1:]))
    return bool(fields) and (fields[-1].name == path[-1] or fields[-1].mapped or fields[-1].nested is None)


def _is_list(path: FieldPath, kind: str) -> bool:
    if path[:1] != ("spec",) or kind not in KINDS:
        return False
    fields = list(resolve(spec_model(kind), path[1:]))
    return bool(fields) and fields[-1].repeated and fields[-1].name == path[-1]
