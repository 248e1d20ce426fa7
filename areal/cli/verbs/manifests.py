"""Verbs over manifests alone: no state, no GPU, no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal.cli import options
from areal.cli.dryrun import manifest_of, print_manifests
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.output.emit import dump, emit_one, emit_rows, to_yaml, write
from areal.cli.output.table import Column, field
from areal.cli.source import SourceFlags, source_options
from areal.cli.targets import complete_fields, complete_kinds
from areal.errors import Conflict
from areal.resources.kinds import check_name, resolve_kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal.resources.diagnostics import ManifestError
    from areal.resources.resource import Resource

_VALID = (
    Column("OBJECT", lambda row: row["ref"]),
    Column("WHERE", lambda row: f"{row['file']}:{row['line']}"),
)
_ORIGINS = (
    field("OBJECT", "ref"),
    field("FIELD", "path"),
    Column("VALUE", lambda row: json.dumps(row["value"], ensure_ascii=False)),
    Column("ORIGIN", lambda row: f"{row['file']}:{row['line']}:{row['col']}"),
)


@click.command()
@source_options
@options.output()
@options.common
@pass_invocation
def validate(cli: Invocation, source: SourceFlags) -> int:
    """Check manifests: every error of every file, as file:line:col. Exit status 3 when there is one."""
    from areal.resources.diagnostics import ManifestError

    try:
        rendered = source.require("validate").render()
    except ManifestError as error:
        if cli.format.is_table:
            raise
        _print_faults(cli, error)
        return error.exit_code
    rows = [
        {"ref": f"{item.kind}/{item.name}", "valid": True, "file": item.source.file, "line": item.source.line}
        for item in rendered.resources
    ]
    emit_rows(cli, rows, _VALID, name=lambda row: str(row["ref"]))
    cli.say(f"{len(rows)} valid")
    return 0


def _print_faults(cli: Invocation, error: ManifestError) -> None:
    rows = [
        {
            "valid": False,
            "file": fault.pos.file,
            "line": fault.pos.line,
            "col": fault.pos.col,
            "path": fault.path,
            "message": fault.message,
            "hint": fault.hint,
        }
        for fault in error.diagnostics
    ]
    emit_rows(cli, rows, _VALID, name=lambda row: f"{row['file']}:{row['line']}:{row['col']}")


@click.command()
@source_options
@click.option("--show-origin", is_flag=True, help="Where each field comes from: file, line, column.")
@options.output()
@options.common
@pass_invocation
def render(cli: Invocation, source: SourceFlags, show_origin: bool) -> None:
    """Print manifests after templating, overlays and --set; what `apply` would read. YAML unless -o says otherwise."""
    resources = source.require("render").render().resources
    if show_origin:
        rows = [row for item in resources for row in _origins(item)]
        emit_rows(cli, rows, _ORIGINS, name=lambda row: f"{row['ref']}:{row['path']}")
        return
    manifests = [manifest_of(item) for item in resources]
    if cli.format.is_table:
        write(to_yaml(manifests))
    else:
        print_manifests(cli, manifests, "")


def _origins(item: Resource) -> list[dict[str, Any]]:
    from areal.resources.tree import leaves

    rows = []
    for path, value in leaves(item.spec).items():
        pos = item.pos_of(path)
        row = {"ref": str(item.ref), "path": item.text_of(path), "value": value}
        rows.append({**row, "file": pos.file, "line": pos.line, "col": pos.col})
    return rows


@click.command()
@source_options
@click.option(
    "--format",
    "style",
    type=click.Choice(["text", "dot", "mermaid"]),
    default="text",
    show_default=True,
    help="dot: Graphviz.",
)
@options.output()
@options.common
@pass_invocation
def graph(cli: Invocation, source: SourceFlags, style: str) -> None:
    """Print what depends on what, as text, Graphviz or Mermaid."""
    from areal.resources.graph import graph as draw

    resources = source.require("graph").render().resources
    drawn = draw(resources, format=style)
    emit_one(cli, {"format": style, "graph": drawn}, name=style, text=lambda: drawn)


@click.command()
@click.argument("kind", shell_complete=complete_kinds)
@click.option("--draft", type=click.Choice(["7", "2020-12"]), default="7", show_default=True, help="JSON Schema draft.")
@options.output()
@options.common
@pass_invocation
def schema(cli: Invocation, kind: str, draft: str) -> None:
    """Print the JSON Schema of KIND, for editors and CI."""
    from areal.resources.schema import json_schema

    resolved = resolve_kind(kind)
    document = json_schema(resolved, draft=7 if draft == "7" else 2020)
    if cli.format.is_table:
        write(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        _print_document(cli, document, resolved)


def _print_document(cli: Invocation, document: Mapping[str, Any], name: str) -> None:
    emit_one(cli, document, name=name, text=lambda: dump(cli.format, document))


@click.command()
@click.argument("path", metavar="KIND[.FIELD]...", shell_complete=complete_fields)
@options.output()
@options.common
@pass_invocation
def explain(cli: Invocation, path: str) -> None:
    """Explain a field: what it means, type, default, unit, and what changing it does.

    \b
    areal explain inferenceservice.spec.gateway
    """
    from areal.resources.explain import explain as explained

    text = explained(path)
    emit_one(cli, {"path": path, "text": text}, name=path, text=lambda: text)


@click.command()
@click.argument("kind", shell_complete=complete_kinds)
@click.argument("name", required=False)
@click.option("--out", metavar="FILE", type=click.Path(dir_okay=False), help="Write to FILE, which must not exist.")
@click.option("--force", is_flag=True, help="Replace FILE.")
@options.output()
@options.common
@pass_invocation
def init(cli: Invocation, kind: str, name: str | None, out: str | None, force: bool) -> None:
    """Write a commented manifest of KIND, with a modeline that gives editors its schema."""
    from areal.resources.init_manifest import init as commented

    resolved = resolve_kind(kind)
    text = commented(resolved)
    if name is not None:
        text = _named(text, check_name(name))
    if out is None:
        emit_one(cli, {"kind": resolved, "manifest": text}, name=resolved, text=lambda: text)
        return
    path = Path(out)
    if path.exists() and not force:
        raise Conflict(f"{out} exists already", hint="--force replaces it")
    path.write_text(text, encoding="utf-8")
    cli.say(f"wrote {out}; next: areal apply -f {out}")


def _named(text: str, name: str) -> str:
    """The manifest with ``metadata.name`` set."""
    import re

    named, count = re.subn(r"(?m)^(\s+name:\s*)\S+", rf"\g<1>{name}", text, count=1)
    if not count:
        named = re.sub(r"(metadata:\s*\{\s*name:\s*)[^,}\s]+", rf"\g<1>{name}", text, count=1)
    return named
