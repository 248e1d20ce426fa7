"""``--dry-run[=client]``: alone it means server; the value is only ever joined by ``=``, as in kubectl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from areal.cli.output.emit import emit_rows, to_yaml, write
from areal.cli.output.table import field

if TYPE_CHECKING:
    from areal.cli.invocation import Invocation
    from areal.resources.resource import Resource

_FLAG = "--dry-run"
_COLUMNS = (field("KIND", "kind"), field("NAME", "metadata", "name"))


class DryRunCommand(click.Command):
    """Reads a bare ``--dry-run`` as ``--dry-run=server`` (click would take the next word as its value)."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        spelled = [f"{_FLAG}=server" if word == _FLAG else word for word in args[:end]]
        return super().parse_args(ctx, spelled + args[end:])


dry_run_option = click.option(
    _FLAG,
    type=click.Choice(["server", "client"]),
    metavar="[=client]",
    help="Print what would be done, do nothing; =client looks at no state. With -o yaml: the manifests.",
)


def manifest_of(item: Resource) -> dict[str, Any]:
    """A rendered resource as a manifest: what was written, after templating, and nothing else."""
    from areal.resources.kinds import API_VERSION

    metadata: dict[str, Any] = {"name": item.name}
    if item.labels:
        metadata["labels"] = dict(item.labels)
    if item.annotations:
        metadata["annotations"] = dict(item.annotations)
    if item.depends_on:
        metadata["dependsOn"] = [str(ref) for ref in item.depends_on]
    return {"apiVersion": API_VERSION, "kind": item.kind, "metadata": metadata, "spec": dict(item.spec)}


def print_manifests(cli: Invocation, manifests: Sequence[Mapping[str, Any]], said: str) -> None:
    """Resources as manifests, ready to apply; as a table, one sentence each."""
    if cli.format.kind == "yaml":
        write(to_yaml(manifests))
    elif cli.format.kind == "table":
        write("\n".join(f"{_name(manifest)} {said}".rstrip() for manifest in manifests))
    else:
        emit_rows(cli, manifests, _COLUMNS, name=_name, wrap=as_list)


def as_list(items: Sequence[Any]) -> dict[str, Any]:
    """A List as in Kubernetes."""
    from areal.resources.kinds import API_VERSION

    return {"apiVersion": API_VERSION, "kind": "List", "items": list(items)}


def _name(manifest: Mapping[str, Any]) -> str:
    return f"{str(manifest['kind']).lower()}/{manifest['metadata']['name']}"
