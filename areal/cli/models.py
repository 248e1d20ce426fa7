"""``areal models``: models of the Hugging Face cache."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal.cli import options
from areal.cli.options import Invocation, interactive, pass_invocation, print_options
from areal.cli.output import Column, emit_one, emit_rows, field
from areal.errors import Conflict, NotFound, UsageFault
from areal.numbers import age, size

if TYPE_CHECKING:
    from areal.hub import Hub


_MODELS = (
    field("MODEL", "id"),
    field("REVISION", "revision"),
    Column("COMMIT", lambda row: row["commit"][:12]),
    Column("SIZE", lambda row: size(row["bytes"]), right=True),
    Column("AGE", lambda row: age(row["ageSeconds"])),
    Column("USED BY", lambda row: ", ".join(row["usedBy"])),
    field("FOLDER", "folder", wide=True),
)
_id = click.argument("id", metavar="ID")


def _name(row: Any) -> str:
    return f"{row['id']}@{row['commit']}"


@click.command()
@_id
@click.option("--revision", default="main", show_default=True, metavar="REV", help="Branch, tag or commit.")
@click.option("--force", is_flag=True, help="Download files again that are there.")
@print_options
def pull(cli: Invocation, /, id: str, revision: str, force: bool) -> int:
    """Download the model ID (ORG/NAME) into the Hugging Face cache; files that are there are not downloaded again."""
    from areal.cli.operate import ProgressPrinter
    from areal.hub import Hub
    from areal.reconcilers.context import Progress

    hub = Hub.of()
    with ProgressPrinter(quiet=cli.quiet, verbose=bool(cli.verbose)) as progress:
        progress(Progress(id, "looking for it"))
        folder = hub.snapshot(
            id, revision, force=force, report=lambda done, total: progress(Progress(id, "downloading", done, total))
        )
    count = _bytes(folder)
    row = {"id": id, "revision": revision, "commit": folder.name, "folder": str(folder), "bytes": count}
    emit_one(cli, row, name=_name(row), text=lambda: str(folder))
    cli.info(f"{id} at {revision} is commit {folder.name}, {size(count)}")
    return 0


@click.command()
@print_options
def ls(cli: Invocation, /) -> int:
    """List the models of the Hugging Face cache, and the objects that use them."""
    from areal.hub import Hub

    hub = Hub.of()
    emit_rows(cli, _rows(cli, hub), _MODELS, name=_name, empty=f"no model is in {hub.cache}")
    return 0


@click.command()
@_id
@click.option("--revision", metavar="REV", help="Only that branch, tag or commit  [default: all].")
@click.option("--force", is_flag=True, help="Remove it even if a Model uses it; its next start downloads it.")
@options.yes
@options.common
@pass_invocation
def rm(cli: Invocation, /, id: str, revision: str | None, force: bool) -> int:
    """Remove the model ID from the Hugging Face cache."""
    from areal.hub import Hub

    hub = Hub.of()
    rows = [row for row in _rows(cli, hub) if row["id"] == id]
    if revision is not None:
        rows = [row for row in rows if revision in (row["commit"], *(row["revision"] or "").split(", "))]
    if not rows:
        at = f" at {revision}" if revision else ""
        raise NotFound(f"{id}{at} is not in {hub.cache}", hint="areal models ls")
    users = sorted({user for row in rows for user in row["usedBy"]})
    if users and not force:
        raise Conflict(f"{id} is used by {', '.join(users)}", hint="--force removes it anyway")
    if not cli.yes:
        if not interactive():
            raise UsageFault(f"{id} would be removed and there is no terminal to ask on", hint="add --yes")
        if not click.confirm(f"Remove {id} ({size(sum(row['bytes'] for row in rows))})?", err=True):
            raise UsageFault("declined; nothing was removed")
    _remove(hub, id, {row["commit"] for row in rows})
    cli.info(f"{id} was removed from {hub.cache}")
    return 0


def _rows(cli: Invocation, hub: Hub) -> list[dict[str, Any]]:
    """Return each snapshot of each model, with its branches and tags, and the objects that recorded its commit."""
    from areal.state.objects import ObjectStore

    used: dict[tuple[str, str], list[str]] = {}
    for item in ObjectStore(cli.home).list():
        for key, commit in item.status.get("commits", {}).items():
            used.setdefault((str(key).partition("@")[0], str(commit)), []).append(str(item.ref))
    rows = []
    for repository in sorted(hub.cache.glob("models--*")):
        name = repository.name.removeprefix("models--").replace("--", "/")
        refs = {path: path.read_text().strip() for path in repository.glob("refs/**/*") if path.is_file()}
        for snapshot in sorted((repository / "snapshots").glob("*")):
            revisions = [str(path.relative_to(repository / "refs")) for path, at in refs.items() if at == snapshot.name]
            rows.append(
                {
                    "id": name,
                    "revision": ", ".join(sorted(revisions)) or None,
                    "commit": snapshot.name,
                    "bytes": _bytes(snapshot),
                    "ageSeconds": max(0.0, time.time() - snapshot.stat().st_mtime),
                    "usedBy": used.get((name, snapshot.name), []),
                    "folder": str(snapshot),
                }
            )
    return rows


def _bytes(snapshot: Path) -> int:
    return sum(path.stat().st_size for path in snapshot.rglob("*") if path.is_file())


def _remove(hub: Hub, name: str, commits: set[str]) -> None:
    """Remove snapshots, their branches and tags, and the blobs that no other snapshot uses."""
    repository = hub.repository(name)
    snapshots = {path for path in (repository / "snapshots").glob("*") if path.name not in commits}
    if not snapshots:
        shutil.rmtree(repository)
        return
    kept = {path.resolve() for snapshot in snapshots for path in snapshot.rglob("*") if path.is_file()}
    for commit in commits:
        shutil.rmtree(repository / "snapshots" / commit)
    for blob in (repository / "blobs").glob("*"):
        if blob.resolve() not in kept:
            blob.unlink()
    for ref in (repository / "refs").rglob("*"):
        if ref.is_file() and ref.read_text().strip() in commits:
            ref.unlink()
