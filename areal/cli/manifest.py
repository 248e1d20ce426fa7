"""Commands that only read manifests (no state, no GPU, no network), and the flags that name manifests."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from areal.cli.objects import complete_fields, complete_kinds, json_text, names_of
from areal.cli.options import Invocation, gather, home_path, print_options
from areal.cli.output import Column, emit_one, emit_rows, field, refuse_existing, to_yaml, write, write_file
from areal.errors import ArealError, UsageFault, did_you_mean
from areal.reconcilers.home_view import document_name, manifest
from areal.resources.kinds import API_VERSION, check_name, parse_ref, resolve_kind

if TYPE_CHECKING:
    from areal.resources.render import RenderRequest
    from areal.resources.resource import Rendered


STDIN = "-"
_PACKAGE = Path(__file__).parents[1]


class SourceFlags(NamedTuple):
    """The flags that name manifests, as given."""

    files: tuple[str, ...] = ()
    recursive: bool = False
    overlay: str | None = None
    sets: tuple[str, ...] = ()
    values_files: tuple[str, ...] = ()
    profile: str | None = None

    @property
    def is_empty(self) -> bool:
        return not self.files and self.overlay is None

    def require(self, verb: str) -> SourceFlags:
        if self.is_empty:
            raise UsageFault("no manifests: neither -f nor -k is given", hint=f"areal {verb} -f FILE")
        if self.files.count(STDIN) > 1:
            raise UsageFault("stdin can be read once: -f - is given twice")
        if self.recursive and not self.files:
            raise UsageFault("-R cannot be used without -f")
        return self

    def read(self) -> RenderRequest:
        """Return the request to render the manifests. Reads stdin if a flag names it."""
        from areal.resources.render import RenderRequest
        from areal.resources.yaml_io import MAX_FILE_BYTES

        stdin = None
        if STDIN in self.files:  # in UTF-8, whatever the locale; one byte more than a manifest may have is refused
            stdin = sys.stdin.buffer.read(MAX_FILE_BYTES + 1).decode("utf-8", "surrogateescape")
        return RenderRequest(**self._asdict(), stdin=stdin, note=lambda text: click.echo(text, err=True))

    def render(self) -> Rendered:
        """Render the manifests, from files and values alone. Raises ManifestError."""
        from areal.resources.render import render

        return render(self.read())


def _value_assignment(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not value.partition("=")[0].strip() or "=" not in value:
            raise click.BadParameter(f"{value!r} is not PATH=VALUE, e.g. model/qwen:spec.replicas=2", ctx, param)
    return values


source_options = gather(
    "source",
    SourceFlags,
    (
        click.option(
            "-f", "--filename", "files", multiple=True, metavar="FILE|DIR|-", help="Manifest; may be repeated."
        ),
        click.option("-R", "--recursive", is_flag=True, help="Read folders given with -f recursively."),
        click.option("-k", "--kustomize", "overlay", metavar="DIR", help="Overlay folder."),
        click.option(
            "--set",
            "sets",
            multiple=True,
            metavar="PATH=VALUE",
            callback=_value_assignment,
            help="Set a field: spec.x=1, or KIND/NAME:spec.x=1 when there are several objects.",
        ),
        click.option("--values", "values_files", multiple=True, metavar="FILE", help="Values for ${{ values.* }}."),
        click.option("--profile", metavar="NAME", help="Profile of the overlay."),
    ),
)


_FLAG = "--dry-run"
_COLUMNS = (field("KIND", "kind"), field("NAME", "metadata", "name"))


class DryRunCommand(click.Command):
    """Treats a bare ``--dry-run`` as ``--dry-run=server`` (click would take the next word as its value)."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        spelled = [f"{_FLAG}=server" if word == _FLAG else word for word in args[:end]]
        return super().parse_args(ctx, spelled + args[end:])


dry_run_option = click.option(
    _FLAG,
    type=click.Choice(["server", "client"]),
    metavar="[=client]",
    help="Print the plan, change nothing; =client reads no state. With -o yaml: the manifests.",
)


def print_manifests(cli: Invocation, manifests: Sequence[Mapping[str, object]], note: str) -> None:
    """Print manifests that can be applied; in the table format, one line each with ``note``."""
    if cli.format.kind == "yaml":
        write(to_yaml(manifests, manifests=True))
    elif cli.format.kind == "table":
        write("\n".join(f"{document_name(item)} {note}".rstrip() for item in manifests))
    else:
        emit_rows(cli, manifests, _COLUMNS, name=document_name)


_VALID = (Column("OBJECT", lambda row: row["ref"]), Column("WHERE", lambda row: f"{row['file']}:{row['line']}"))
_ORIGINS = (
    field("OBJECT", "ref"),
    field("FIELD", "path"),
    Column("VALUE", lambda row: json_text(row["value"])),
    Column("ORIGIN", lambda row: f"{row['file']}:{row['line']}:{row['col']}"),
)


@click.command()
@source_options
@print_options
def validate(cli: Invocation, source: SourceFlags) -> int:
    """Check manifests: every error of every file, as file:line:col. Exit status 3 when there is one."""
    from areal.resources.nodes import ManifestError

    try:
        rendered = source.require("validate").render()
    except ManifestError as error:
        if cli.format.is_table:
            raise
        faults = [{"valid": False, **fault.to_json()} for fault in error.diagnostics]
        emit_rows(cli, faults, _VALID, name="{file}:{line}:{col}".format_map)
        return error.exit_code
    rows = [
        {"ref": f"{item.kind}/{item.name}", "valid": True, "file": item.source.file, "line": item.source.line}
        for item in rendered.resources
    ]
    emit_rows(cli, rows, _VALID, name=lambda row: str(row["ref"]))
    cli.info(f"{len(rows)} valid")
    return 0


@click.command()
@source_options
@click.option("--show-origin", is_flag=True, help="Where each field comes from: file, line, column.")
@print_options
def render(cli: Invocation, source: SourceFlags, show_origin: bool) -> None:
    """Print manifests as `apply` reads them, after templating, overlays and --set. YAML unless -o says otherwise."""
    from areal.resources.tree import leaves

    resources = source.require("render").render().resources
    if show_origin:
        rows = []
        for item in resources:
            for path, value in leaves(item.spec).items():
                pos, row = item.pos_of(path), {"ref": str(item.ref), "path": item.text_of(path), "value": value}
                rows.append({**row, "file": pos.file, "line": pos.line, "col": pos.col})
        emit_rows(cli, rows, _ORIGINS, name="{ref}:{path}".format_map)
        return
    manifests = [manifest(item) for item in resources]
    if cli.format.is_table:
        write(to_yaml(manifests, manifests=True))
    else:
        print_manifests(cli, manifests, "")


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
@print_options
def graph(cli: Invocation, source: SourceFlags, style: str) -> None:
    """Print the dependencies of objects, as text, Graphviz or Mermaid."""
    from areal.resources.resource import graph as draw

    resources = source.require("graph").render().resources
    drawn = draw(resources, format=style)
    emit_one(cli, {"format": style, "graph": drawn}, name=style, text=lambda: drawn)


@click.command()
@click.argument("kind", shell_complete=complete_kinds)
@click.option("--draft", type=click.Choice(["7", "2020-12"]), default="7", show_default=True, help="JSON Schema draft.")
@print_options
def schema(cli: Invocation, kind: str, draft: str) -> None:
    """Print the JSON Schema of KIND, for editors and CI."""
    from areal.resources.schema import json_schema

    resolved = resolve_kind(kind)
    document = json_schema(resolved, draft=7 if draft == "7" else 2020)
    if cli.format.is_table:
        write(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        emit_one(cli, document, name=resolved, text=str)


@click.command()
@click.argument("path", metavar="KIND[.FIELD]...", shell_complete=complete_fields)
@print_options
def explain(cli: Invocation, path: str) -> None:
    """Explain a field: meaning, type, default, unit, and the effect of a change.

    \b
    areal explain inferenceservice.spec.gateway
    """
    from areal.resources.explain import explain as explained

    text = explained(path)
    emit_one(cli, {"path": path, "text": text}, name=path, text=lambda: text)


@click.command()
@click.argument("kind", shell_complete=complete_kinds)
@click.argument("name", required=False)
@click.argument("folder", metavar="[DIR]", required=False)
@click.option("--out", metavar="FILE", type=click.Path(dir_okay=False), help="Write to FILE, which must not exist.")
@click.option("--force", is_flag=True, help="Replace FILE, or files in DIR.")
@click.option("--list", "listed", is_flag=True, help="List the examples.")
@print_options
def init(cli: Invocation, kind: str, name: str | None, folder: str | None, out: str | None, **flags: bool) -> None:
    """Write a commented manifest of KIND, with a modeline that gives editors its schema. With --out, also the schema
    and the files that the example needs, beside FILE, where they are not there yet.

    `areal init example NAME [DIR]` writes an example of training into DIR, by default NAME; `areal init example --list`
    lists them. `areal init quickstart DIR` writes all that the quickstart needs into DIR. `areal init dashboards DIR`
    writes dashboards for Grafana.
    """
    force, listed = flags["force"], flags["listed"]
    if kind != "example" and (listed or folder is not None):
        raise UsageFault(
            f"--list and DIR belong to `example`, and KIND is {kind!r}", hint="areal init example NAME [DIR]"
        )
    if force and (listed or (out is None and kind != "example" and kind not in _FOLDERS)):
        hint = "areal init example NAME [DIR] --force" if listed else f"areal init {kind} --out FILE --force"
        raise UsageFault("--force replaces files, and this writes none", hint=hint)
    if kind == "example":
        if out is not None:
            raise UsageFault("an example is written into a folder", hint="areal init example NAME [DIR]")
        if not listed:
            _write_example(cli, name, folder, force)
            return
        heads = {each: (path / "README.md").read_text(encoding="utf-8") for each, path in _examples().items()}
        rows = [{"name": each, "title": text.partition("\n")[0].lstrip("# ")} for each, text in heads.items()]
        emit_rows(cli, rows, _EXAMPLES, name="{name}".format_map)
        return
    if kind in _FOLDERS:
        if name is None or out is not None:
            raise UsageFault(f"{kind} is written into a folder", hint=f"areal init {kind} DIR")
        _FOLDERS[kind](cli, Path(name), force)
        return
    from areal.resources.explain import init as commented
    from areal.resources.schema import ALL_KINDS, schema_files
    from areal.resources.validation import spec_model

    resolved = resolve_kind(kind)
    model = spec_model(resolved)
    text = commented(resolved, None if name is None else check_name(name))
    for ref in map(parse_ref, model.EXAMPLE_NEEDS):
        if ref.name not in names_of(home_path(cli.home_flag), ref.kind):
            text += f"---\napiVersion: {API_VERSION}\nkind: {ref.kind}\nmetadata: {{name: {ref.name}}}\n"
    files = {**model.EXAMPLE_FILES, ALL_KINDS: schema_files()[ALL_KINDS]}
    if out is None:
        emit_one(cli, {"kind": resolved, "manifest": text}, name=resolved, text=lambda: text)
        return
    path = Path(out)
    refuse_existing(path, force=force)
    beside = {path.with_name(each): code for each, code in files.items() if not path.with_name(each).exists()}
    for file, code in {path: text, **beside}.items():
        write_file(file, code)
    command = f"{_in_folder(path.parent)}areal apply -f {shlex.quote(path.name)}"
    cli.info(f"wrote {', '.join(map(str, (path, *beside)))}; next: {command}")


def _in_folder(folder: Path) -> str:
    return "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "


def _shipped_files(folder: str) -> dict[str, Path]:
    """Return the files in a folder of the package, by their paths in it."""
    source = _PACKAGE / folder
    found = (Path(place, name) for place, _, names in os.walk(source, followlinks=True) for name in names)
    return {str(each.relative_to(source)): each for each in sorted(found) if "__pycache__" not in each.parts}


def _copy(target: Path, files: Mapping[str, Path], force: bool) -> None:
    """Copy shipped files into a folder, by their names in it. Its manifests name the schema and files beside them."""
    for name in files:
        refuse_existing(target / name, force=force)
    try:
        for name, file in files.items():
            content = file.read_bytes()
            if name.endswith(".yaml") and "/" not in name:
                content = re.sub(rb"(?:\.\./)+schemas/|manifests/", b"", content)
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(content)
    except OSError as error:
        raise ArealError(f"cannot write {error.filename or target}: {error.strerror or error}") from error


def _write_schema(target: Path) -> None:
    from areal.resources.schema import ALL_KINDS, schema_files

    write_file(target / ALL_KINDS, schema_files()[ALL_KINDS])


def _write_quickstart(cli: Invocation, target: Path, force: bool) -> None:
    names = {"quickstart.yaml": "quickstart.yaml", "agents.yaml": "agents.yaml", "reverser.txt": "agents/reverser.py"}
    names |= {"reward.txt": "examples/reverse_digits/reward.py"}
    shipped = _shipped_files("quickstart")
    _copy(target, {names.get(name, f"examples/reverse_digits/{name}"): file for name, file in shipped.items()}, force)
    _write_schema(target)
    cli.info(f"wrote {target}; next: {_in_folder(target)}areal apply -f quickstart.yaml")


def _write_dashboards(cli: Invocation, target: Path, force: bool) -> None:
    files = _shipped_files("dashboards")
    _copy(target, files, force)
    cli.info(f"wrote {', '.join(str(target / name) for name in files)}; next: import them in Grafana")


_EXAMPLES = (field("NAME", "name"), field("EXAMPLE", "title"))


def _examples() -> dict[str, Path]:
    """Return the folders of the examples, by name."""
    return {each.name: each for each in sorted((_PACKAGE / "examples").iterdir()) if (each / "README.md").is_file()}


def _write_example(cli: Invocation, name: str | None, folder: str | None, force: bool) -> None:
    """Write the example's folder. The next command is the first `areal apply` of its README."""
    known = _examples()
    if name not in known:
        what = "an example has a name" if name is None else f"there is no example {name}{did_you_mean(name, known)}"
        raise UsageFault(f"{what}: {', '.join(known)}", hint="areal init example NAME [DIR]")
    target = Path(folder or name)
    _copy(target, _shipped_files(f"examples/{name}"), force)
    _write_schema(target)
    lines = (known[name] / "README.md").read_text(encoding="utf-8").splitlines()
    command = next(line for line in lines if line.startswith("areal apply ")).partition(" &&")[0]
    cli.info(f"wrote {target}; next: {_in_folder(target)}{command}")


_FOLDERS = {"dashboards": _write_dashboards, "quickstart": _write_quickstart}
