"""Turns ``-f`` arguments into documents: reads files, selects profiles, expands ``generate``, evaluates expressions.

    generate:
      each: [{name: small, replicas: 1}, ...]      # or an expression; or matrix: {size: [7b, 32b], tp: [1, 2]}
    template: {kind: Model, metadata: {name: "${{ item.name }}"}, ...}     # or a list of them

``item`` is the item (of a matrix: a map with one value of each axis, the last axis fastest), ``index`` counts from 0.
Expressions are evaluated on nodes, never on text: a result takes the position of its expression, and all other values
keep theirs. No other module reads manifests from disk.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from areal.dataclasses import dataclass, field, replace
from areal.errors import closest, did_you_mean
from areal.resources.expressions import OPENING, EnvironmentVariables, ExpressionError, Scope, parse_template
from areal.resources.kinds import KINDS, Ref
from areal.resources.nodes import (
    STDIN,
    MappingNode,
    Node,
    Pos,
    Problems,
    ScalarNode,
    SequenceNode,
    child,
    item_name,
    plain,
    text_of,
    text_place,
    to_node,
    unreadable,
    with_entry,
)
from areal.resources.tree import FieldPath, Step, merge_values, path_text
from areal.resources.validation import describe, spec_model
from areal.resources.yaml_io import MAX_FILE_BYTES, load_documents

OVERLAY_FILE = "areal.overlay.yaml"

MAX_RENDERED = 4_000_000
MAX_ITEMS = 20_000
MAX_DOCUMENTS = 50_000
TOO_MUCH = "templates and expressions yield more than any set of manifests needs"

_SUFFIXES = (".yaml", ".yml", ".json")
_SCHEMA = ".schema.json"
_GENERATE_KEYS = ("apiVersion", "generate", "template", "profiles")
_RESULT_COST = 4  # budget for a value that an expression returns; a value of a template, which is shared, costs 1


@dataclass(frozen=True)
class SourceText:
    """One manifest file. ``named``: the user named the file itself, not its folder."""

    file: str
    text: str
    sha256: str
    named: bool = True

    @cached_property
    def has_expressions(self) -> bool:
        """Whether a value may contain an expression. An escape may stand for one of its characters."""
        return OPENING in self.text or "\\" in self.text


def read_sources(
    files: tuple[str, ...],
    recursive: bool,
    stdin: str | None,
    problems: Problems,
    note: Callable[[str], None] = lambda text: None,
) -> Iterator[SourceText]:
    """Yield the text of each file once, in the order of the arguments; the files of a folder are sorted by name.
    ``note`` is called with a sentence about each overlay that is left out."""
    seen: set[Path] = set()
    for argument in files:
        if argument == "-":
            problems.files[STDIN] = None
            source = _decode(STDIN, (stdin or "").encode("utf-8", "surrogateescape"), problems)
            if source is not None:
                yield source
            continue
        if "://" in argument:
            hint = f"curl -fsSL {argument} | areal apply -f -"
            problems.add(Pos(argument, 1, 1), "", "a URL is not a file", hint=hint)
            continue
        for path, named in _expand(argument, recursive, problems):
            if path.name == OVERLAY_FILE and not named:
                note(f"{path}: not read: an overlay is applied with -k {path.parent}")
                continue
            real = path.resolve()
            if real in seen:
                continue
            seen.add(real)
            source = read_text(path, problems, named=named)
            if source is not None:
                yield source


def read_text(path: Path, problems: Problems, *, named: bool = True) -> SourceText | None:
    """Return the text of one file. Returns None if it cannot be read, after reporting the reason."""
    problems.files[str(path)] = None
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        others = (each for suffix in _SUFFIXES if absent for each in path.parent.glob(f"*{suffix}") if each != path)
        beside = {each.stem: str(each) for each in others}
        closest_stem = closest(path.stem, beside)
        near = f' (did you mean "{beside[closest_stem]}"?)' if closest_stem is not None else ""
        hint = f"a path is relative to the working folder, {Path.cwd()}" if absent and not near else None
        problems.add(Pos(str(path), 1, 1), "", f"cannot be read: {error.strerror or error}{near}", hint=hint)
        return None
    return _decode(str(path), data, problems, named=named)


def _decode(file: str, data: bytes, problems: Problems, *, named: bool = True) -> SourceText | None:
    if len(data) > MAX_FILE_BYTES:
        problems.add(Pos(file, 1, 1), "", f"larger than {MAX_FILE_BYTES // 2**20} MiB, which no manifest is")
        return None
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        problems.add(Pos(file, 1, 1), "", "UTF-16 text: save it as UTF-8")
        return None
    try:
        text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        col = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        fault = "binary data" if b"\0" in data else f"not UTF-8: byte 0x{data[error.start]:02x}"
        problems.add(Pos(file, line, col), "", fault)
        return None
    return SourceText(file, text, hashlib.sha256(data).hexdigest(), named)


def _expand(argument: str, recursive: bool, problems: Problems) -> Iterator[tuple[Path, bool]]:
    path = Path(argument)
    if not path.is_dir():
        yield path, True
        return
    start = Pos(argument, 1, 1)
    if (path / OVERLAY_FILE).is_file():
        problems.add(start, "", f"an overlay ({OVERLAY_FILE}), not plain manifests", hint=f"use -k {argument}")
        return
    try:
        found = list(_manifests(path, recursive))
    except OSError as error:
        problems.add(start, "", f"cannot be read: {error.strerror}")
        return
    if all(file.name == OVERLAY_FILE for file in found):
        deeper = not recursive and any(_manifests(path, True))
        hint = f"add -R to read the folders below {argument}" if deeper else None
        problems.add(
            start, "", f"no manifests in this folder ({', '.join('*' + suffix for suffix in _SUFFIXES)})", hint=hint
        )
    yield from ((file, False) for file in found)


def _manifests(folder: Path, recursive: bool) -> Iterator[Path]:
    """Yield manifest files and overlays of a folder by name. Skips hidden files and folders, and the schemas that
    `areal init` writes beside manifests for editors; does not follow links to folders."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if recursive and not path.is_symlink():
                yield from _manifests(path, recursive)
        elif path.suffix in _SUFFIXES and not path.name.endswith(_SCHEMA):
            yield path


class Document(NamedTuple):
    """One document. ``origin``: the item of ``generate`` that it was made for (``each[2]``), empty if there is none."""

    node: MappingNode
    source: SourceText
    problems: Problems
    origin: str = ""

    @property
    def kind(self) -> str:
        """The kind as written; empty if it is missing or not a text."""
        return text_of(self.node.get("kind"))

    @property
    def name(self) -> str:
        return item_name(self.node.get("metadata") or self.node) or ""

    def declared(self) -> list[Ref]:
        """Return the references of the document's resource and of its inline objects, if their names can be read."""
        if self.kind not in KINDS or not self.name:
            return []
        return [Ref(self.kind, self.name), *self.inline()]

    def inline(self) -> list[Ref]:
        """Return the references of the named objects that the document declares inside its spec."""
        inline = spec_model(self.kind).INLINE if self.kind in KINDS else None
        items = child(self.node.get("spec") or self.node, inline[0]) if inline is not None else None
        if inline is None or not isinstance(items, SequenceNode):
            return []
        return [Ref(inline[1], name) for item in items.items if (name := item_name(item)) is not None]

    def report(self, pos: Pos, path: str, message: str, *, hint: str | None = None, absent: str = "") -> None:
        """Report a fault in this document, with its ``origin``: generated documents share one position."""
        self.problems.add(pos, path, message, hint=hint, absent=absent, origin=self.origin)


def read_documents(source: SourceText, problems: Problems) -> list[Document]:
    """Return the documents of one file, with each item of a ``kind: List`` as a document. An empty file is a fault if
    the user named it."""
    before = problems.met
    found: list[Document] = []
    for node in load_documents(source.text, source.file, problems):
        found += _flatten(node, source, problems)
    if not found and source.named and problems.met == before:
        problems.add(Pos(source.file, 1, 1), "", "no resources: the file is empty")
    return found


def _flatten(node: Node, source: SourceText, problems: Problems) -> list[Document]:
    if not isinstance(node, MappingNode):
        problems.add(node.pos, "", "a resource is a map with apiVersion, kind, metadata and spec")
        return []
    if text_of(node.get("kind")) != "List":
        return [Document(node, source, problems)]
    items = node.get("items")
    if not isinstance(items, SequenceNode):
        problems.add(node.key_pos("items"), "items", "a List needs a list of items")
        return []
    return [document for item in items.items for document in _flatten(item, source, problems)]


def read_values(files: tuple[str, ...], problems: Problems) -> dict[str, object]:
    """Merge values files, a later file over an earlier one. Every document must be a map."""
    values: dict[str, object] = {}
    for file in files:
        source = read_text(Path(file), problems)
        if source is None:
            continue
        for node in load_documents(source.text, source.file, problems):
            if isinstance(node, MappingNode):
                values = merge_values(values, plain(node))
            else:
                problems.add(node.pos, "", "a values file is a map")
    return values


@dataclass
class RenderBudget:
    """Limits how many values, and 64-character pieces of text, all templates and expressions of one rendering may
    produce, so that a small file cannot expand to gigabytes."""

    left: int = MAX_RENDERED

    def spend(self, node: Node, cost: int = 1) -> bool:
        """Charge ``cost`` for each value in ``node``. Returns False if the budget is used up."""
        pending = [node]
        while pending and self.left > 0:
            found = pending.pop()
            self.left -= cost
            if isinstance(found, MappingNode):
                pending += found.entries.values()
            elif isinstance(found, SequenceNode):
                pending += found.items
            elif isinstance(found.value, str):
                self.left -= len(found.value) // 64 * cost
        return self.left > 0


@dataclass(frozen=True)
class ExpressionContext:
    """The names that expressions can use, and the document or problem list that gets their faults. ``hidden``: None, or
    where the values are unknown the positions of the expressions that read them, which are not evaluated."""

    scope: Scope
    problems: Problems
    budget: RenderBudget
    document: Document | None = None
    reads: set[FieldPath] = field(default_factory=set)
    hidden: set[Pos] | None = None

    def report(self, pos: Pos, path: FieldPath, message: str, *, hint: str | None = None) -> None:
        if self.document is not None:
            self.document.report(pos, path_text(path), message, hint=hint)
        else:
            self.problems.add(pos, path_text(path), message, hint=hint)


def substitute(node: Node, context: ExpressionContext, path: FieldPath = ()) -> Node:
    """Return ``node`` with every expression evaluated; the same object if it has none."""
    if isinstance(node, ScalarNode):
        return _scalar(node, context, path) if isinstance(node.value, str) and OPENING in node.value else node
    if isinstance(node, SequenceNode):
        items = tuple(substitute(item, context, (*path, _step(item, at))) for at, item in enumerate(node.items))
        changed = any(new is not old for new, old in zip(items, node.items, strict=True))
        return SequenceNode(items, node.pos) if changed else node
    entries = {key: substitute(value, context, (*path, key)) for key, value in node.entries.items()}
    changed = any(value is not node.entries[key] for key, value in entries.items())
    return MappingNode(entries, node.keys, node.pos) if changed else node


def _step(item: Node, at: int) -> Step:
    name = item_name(item)
    return at if name is None or OPENING in name else f"[{name}]"


def _scalar(node: ScalarNode, context: ExpressionContext, path: FieldPath) -> Node:
    if context.budget.left <= 0:
        return unreadable(node.pos)
    try:
        text = parse_template(str(node.value))
        context.reads.update(text.reads)
        if context.hidden is not None and any(read[0] == "values" for read in text.reads):
            context.hidden.add(node.pos)
            return unreadable(node.pos)
        value = text.evaluate(context.scope)
    except ExpressionError as error:
        pos, where = text_place(node, error.column)
        context.report(pos, path, error.message + where, hint=error.hint)
        return unreadable(node.pos)
    result = to_node(value, node.pos)
    if not context.budget.spend(result, _RESULT_COST):
        context.report(node.pos, path, TOO_MUCH)
        return unreadable(node.pos)
    return result


def expand(document: Document, context: ExpressionContext) -> Iterator[Document]:
    """Yield the documents that ``generate`` produces, or ``document`` itself, with every expression evaluated."""
    is_template = "generate" in document.node.entries or "template" in document.node.entries
    if not is_template and not document.source.has_expressions:
        yield document
        return
    context = replace(context, document=document)
    if not is_template:
        node = substitute(document.node, context)
        assert isinstance(node, MappingNode)
        yield document._replace(node=node)
        return
    templates = _templates(document)
    for index, (item, label) in enumerate(_items(document, context)):
        for template in templates:
            if not context.budget.spend(template):
                context.report(template.pos, ("template",), TOO_MUCH)
                return
            generated = Document(template, document.source, document.problems, f"{label}[{index}]")
            inner = replace(context, scope=replace(context.scope, item=item, index=index), document=generated)
            node = substitute(template, inner)
            assert isinstance(node, MappingNode)
            yield generated._replace(node=node)


def _templates(document: Document) -> list[MappingNode]:
    for key in document.node.entries:
        if key not in _GENERATE_KEYS:
            message = f'unknown field beside "generate"{did_you_mean(key, _GENERATE_KEYS)}'
            document.report(document.node.keys[key], key, message)
    node = document.node.get("template")
    if node is None:
        document.report(document.node.key_pos("generate"), "", '"generate" needs a "template" beside it')
        return []
    templates = []
    for template in node.items if isinstance(node, SequenceNode) else (node,):
        if not isinstance(template, MappingNode):
            document.report(template.pos, "template", "expected a resource, or a list of resources")
            continue
        for key in ("apiVersion", "profiles"):  # a template inherits the fields beside ``generate``
            beside = document.node.get(key)
            if beside is not None and key not in template.entries:
                template = with_entry(template, key, beside, document.node.keys[key])
        templates.append(template)
    return templates


def _items(document: Document, context: ExpressionContext) -> list[tuple[Any, str]]:
    generate = document.node.get("generate")
    if not isinstance(generate, MappingNode) or len(generate.entries) != 1:
        pos = document.node.key_pos("generate")
        context.report(pos, ("generate",), 'exactly one of "each" and "matrix" is needed')
        return []
    (key,) = generate.entries
    before = context.problems.met + len(context.hidden or ())
    node = substitute(generate.entries[key], context, ("generate", key))
    if context.problems.met + len(context.hidden or ()) > before:
        return []
    if key == "each":
        return [(item, "each") for item in _list(node, context, ("generate", "each"))]
    if key == "matrix":
        return [(item, "matrix") for item in _matrix(node, context)]
    near = did_you_mean(key, ("each", "matrix"))
    context.report(generate.keys[key], ("generate", key), f'unknown field{near}: "each" or "matrix"')
    return []


def _matrix(node: Node, context: ExpressionContext) -> list[dict[str, object]]:
    if not isinstance(node, MappingNode) or not node.entries:
        context.report(node.pos, ("generate", "matrix"), "expected a map from a name to a list of values")
        return []
    axes = [_list(axis, context, ("generate", "matrix", name)) for name, axis in node.entries.items()]
    size = math.prod(map(len, axes))
    if size > MAX_ITEMS:
        context.report(node.pos, ("generate", "matrix"), f"{size} combinations, at most {MAX_ITEMS} are allowed")
        return []
    return [dict(zip(node.entries, values, strict=True)) for values in itertools.product(*axes)]


def _list(node: Node, context: ExpressionContext, path: tuple[str, ...]) -> list[Any]:
    if not isinstance(node, SequenceNode):
        context.report(node.pos, path, f"expected a list, got {describe(plain(node))}")
        return []
    if len(node.items) > MAX_ITEMS:
        context.report(node.pos, path, f"{len(node.items)} items, at most {MAX_ITEMS} are allowed")
        return []
    return [plain(item) for item in node.items]


@dataclass
class Reading:
    """State of one rendering while files are read. ``profiles``: all profiles that files name; ``seen``: documents
    read, including those of other profiles; ``count``: documents after ``generate`` is expanded; ``reads``: what
    expressions name of ``values`` and ``profile``; ``hidden``: of ``ExpressionContext``."""

    problems: Problems
    env: EnvironmentVariables
    profile: str | None = None
    budget: RenderBudget = field(default_factory=RenderBudget)
    profiles: set[str] = field(default_factory=set)
    seen: int = 0
    count: int = 0
    reads: set[FieldPath] = field(default_factory=set)
    hidden: set[Pos] | None = None

    def context(self, values: Mapping[str, object]) -> ExpressionContext:
        scope = Scope(values, self.env, self.profile)
        return ExpressionContext(scope, self.problems, self.budget, reads=self.reads, hidden=self.hidden)

    def documents(self, sources: Iterable[SourceText], values: Mapping[str, object]) -> list[Document]:
        """Return the documents of ``sources`` that belong to the profile, after ``generate`` and expressions."""
        context = self.context(values)
        found: list[Document] = []
        for source in sources:
            for document in read_documents(source, self.problems):
                self.seen += 1
                if not self._is_active(document):
                    continue
                for expanded in expand(document, context):
                    self.count += 1
                    if self.count > MAX_DOCUMENTS:
                        self.problems.add(document.node.pos, "", f"more than {MAX_DOCUMENTS} resources")
                        return found
                    found.append(expanded)
        return found

    def check_profile(self) -> None:
        """Report an unknown profile, or one without effect. Files with other faults may name profiles, too."""
        is_used = self.profile in self.profiles if self.profiles else ("profile",) in self.reads
        if self.profile is not None and not is_used and (self.profiles or not self.problems):
            near = did_you_mean(self.profile, self.profiles)
            known = f"there are {', '.join(sorted(self.profiles))}" if self.profiles else "these manifests have none"
            self.problems.add(Pos("--profile", 1, 1), "", f'unknown profile "{self.profile}"{near}: {known}')

    def _is_active(self, document: Document) -> bool:
        """Return whether the document belongs to the profile, or to all profiles."""
        node = document.node.get("profiles")
        if node is None:
            return True
        names = plain(node)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            self.problems.add(document.node.key_pos("profiles"), "profiles", "expected a list of profile names")
            return True
        self.profiles.update(names)
        return self.profile in names
