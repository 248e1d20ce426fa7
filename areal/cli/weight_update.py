"""``areal weight-update``: gateways that the training side starts, found by the files that they leave in their runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import click

from areal.cli import options
from areal.cli.inf.address import gateway_of, model_at
from areal.cli.inf.flags import service_option
from areal.cli.invocation import Invocation, fancy, pass_invocation
from areal.cli.options import Seconds
from areal.cli.output.emit import clear, emit_one, emit_rows, write
from areal.cli.output.table import Column, field
from areal.cli.output.units import age
from areal.cli.remote import Gateway, gateway, not_remote, read_key
from areal.errors import ArealError, NotFound, UsageFault

DISCOVERY = "weight_update.json"
_LOG = Path("logs") / "latest" / "weight_update.log"
_DEFAULT = "default"
_SYNC_S = 3600.0
_RELEASE_S = 200.0
_POLL_S = 0.2
_BLOCK = 1 << 16

_service = click.option(
    "--service", metavar="NAME", default=_DEFAULT, help="The job whose gateway is meant  [default: the only one]."
)


class Found(NamedTuple):
    """One gateway: ``name`` is its job's. ``url`` and ``pid`` are what its file says; it may be dead since."""

    name: str
    folder: Path
    url: str
    pid: int
    key_file: str | None


def _reading(function: Any) -> Any:
    return options.remote(options.output()(options.common(function)))


def _when(row: Any) -> str | None:
    at = row.get("last_update")
    return f"{age(max(0.0, time.time() - at))} ago" if at else None


def _milliseconds(row: Any) -> str | None:
    took = row.get("duration_ms")
    return f"{took:,.0f} ms" if took is not None else None


_PAIRS = (
    field("NAME", "pair_name"),
    field("MODE", "mode"),
    Column("TRAIN", lambda row: len(row["train_worker_urls"]), right=True),
    Column("INFER", lambda row: len(row["inference_worker_urls"]), right=True),
    field("VERSION", "version", right=True),
    Column("LAST-UPDATE", _when),
    Column("DURATION", _milliseconds, right=True),
    field("STATE", "state", state=True),
    field("ERROR", "error", wide=True),
)
_GATEWAYS = (
    field("NAME", "name"),
    field("PID", "pid", right=True),
    field("URL", "url"),
    field("PAIRS", "pairs", right=True),
    field("STATE", "state", state=True),
)


@click.command()
@_service
@click.option("-w", "--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--interval", type=Seconds(), default="2s", show_default=True, metavar="TIME", help="Between refreshes.")
@_reading
@pass_invocation
def status(cli: Invocation, service: str, watch: bool, interval: float) -> int:
    """Health of a weight-update gateway. Exit status 1 when it cannot be reached."""
    while True:
        document = _health(_chosen(cli, service))
        if watch and fancy(sys.stdout):
            clear()
        emit_one(cli, document, name=document["gateway"], text=lambda: _page(document))  # noqa: B023 - called at once
        if not watch:
            return 0 if document["healthy"] else 1
        time.sleep(interval)


def _health(chosen: Gateway) -> dict[str, Any]:
    try:
        found = chosen.get("/pairs")["pairs"]
    except ArealError as error:
        return {"gateway": chosen.url, "healthy": False, "pairs": [], "error": error.message}
    return {"gateway": chosen.url, "healthy": True, "pairs": found}


def _page(document: dict[str, Any]) -> str:
    lines = [f"{document['gateway']}  {'healthy' if document['healthy'] else document['error']}"]
    for pair in document["pairs"]:
        version = "nothing published" if pair["version"] is None else f"version {pair['version']}"
        detail = f", {_when(pair)}, {_milliseconds(pair)}" if pair["last_update"] else ""
        lines.append(f"pair {pair['pair_name']} ({pair['mode']}): {pair['state']}, {version}{detail}")
        lines += [f"  {each['url']} {_standing(each)}" for each in pair["inference_workers"] if each["state"]]
        if pair["error"]:
            lines.append(f"  {pair['error']}")
    return "\n".join(lines)


def _standing(worker: dict[str, Any]) -> str:
    version = worker["version"]
    return f"{worker['state']}, " + ("its own weights" if version is None else f"version {version}")


@click.command()
@_service
@_reading
@pass_invocation
def pairs(cli: Invocation, service: str) -> int:
    """Pairs of training and inference: NAME MODE TRAIN INFER VERSION LAST-UPDATE DURATION STATE."""
    rows = _chosen(cli, service).get("/pairs")["pairs"]
    emit_rows(cli, rows, _PAIRS, name=lambda row: row["pair_name"], empty="no pair is connected")
    return 0


@click.command()
@click.option("--all", "all_", is_flag=True, help="Also gateways that are gone.")
@_reading
@pass_invocation
def ps(cli: Invocation, all_: bool) -> int:
    """List weight-update gateways."""
    not_remote(cli, "weight-update ps")
    rows = []
    for found in _gateways(cli):
        health = _health(_gateway_of(found))
        if health["healthy"] or all_:
            state = "running" if health["healthy"] else "dead"
            about = {"name": found.name, "pid": found.pid, "url": found.url, "folder": str(found.folder)}
            rows.append({**about, "pairs": len(health["pairs"]), "state": state})
    emit_rows(cli, rows, _GATEWAYS, name=lambda row: row["name"], empty="no weight-update gateway runs")
    return 0


@click.command()
@_service
@click.option("-f", "--follow", is_flag=True, help="Go on, printing new lines.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=200, show_default=True, help="The last N.")
@click.option("--since", type=Seconds(), metavar="TIME", help="Only if it was written to in the last TIME.")
@_reading
@pass_invocation
def logs(cli: Invocation, service: str, follow: bool, lines: int, since: float | None) -> int:
    """Logs of a weight-update gateway."""
    not_remote(cli, "weight-update logs")
    path = _named(cli, service, gone=True).folder / _LOG
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            old = since is not None and time.time() - path.stat().st_mtime > since
            tail = [] if old else file.readlines()[-lines:] if lines else []
            write("".join(tail))
            while follow:
                write(file.read(_BLOCK))
                time.sleep(_POLL_S)
    except FileNotFoundError as error:
        raise NotFound(f"there is no log {path}") from error
    return 0


@click.command()
@_service
@click.option("--pair", metavar="NAME", required=True, help="The pair.")
@options.yes
@options.timeout("10m")
@_reading
@pass_invocation
def force_sync(cli: Invocation, service: str, pair: str) -> int:
    """Push the training side's weights to the inference side now."""
    chosen = _chosen(cli, service)._replace(timeout_s=min(cli.timeout_s or _SYNC_S, _SYNC_S))
    status, document = chosen.ask("POST", "/force_sync", {"pair_name": pair})
    if status == 404:
        raise NotFound(_message(document), hint="areal weight-update pairs")
    done = chosen.checked("POST", "/force_sync", status, document)
    text = f"pair/{pair} synced: version {done['version']}, {done['duration_ms']:,.0f} ms"
    emit_one(cli, {"pair_name": pair, **done}, name=f"pair/{pair}", text=lambda: text)
    return 0


@click.command()
@click.option("--model", metavar="NAME", required=True, help="The model whose engines wait.")
@service_option
@options.yes
@options.timeout("3m")
@_reading
@pass_invocation
def release(cli: Invocation, model: str, service: str | None) -> int:
    """Have a model's engines wait no more for the weights that a trainer published, when it will not come back.

    Engines that start serve their own weights from then on; those that run go on with what they have. Refused while
    the trainer is alive. ``--service`` and ``--gateway`` are those of the inference service.
    """
    chosen = gateway_of(cli, service)._replace(timeout_s=cli.timeout_s or _RELEASE_S)
    model = model_at(cli, service, model) or model
    workers = [each["worker_id"] for each in chosen.get("/workers")["workers"] if each["model"] == model]
    if not workers:
        raise NotFound(f"no worker of the model {model!r} is known to {chosen.url}", hint="areal inf status")
    results = [_released(chosen, worker) for worker in workers]
    if failed := [result for result in results if not result["ok"]]:
        raise ArealError(f"model/{model} was not released", detail="; ".join(str(each["error"]) for each in failed))
    text = f"model/{model} released: engines that start serve their own weights"
    emit_one(cli, {"model": model, "results": results}, name=f"model/{model}", text=lambda: text)
    return 0


def _released(chosen: Gateway, worker: str) -> dict[str, Any]:
    path = f"/weights/release/{quote(worker, safe='')}"
    status, document = chosen.ask("POST", path, {})
    if status == 207:
        status = 200  # the result tells
    (result,) = chosen.checked("POST", path, status, document)["results"]
    return dict(result)


def _message(document: Any) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    return str(error["message"]) if isinstance(error, dict) else "there is no such pair"


# -- which gateway


def _chosen(cli: Invocation, service: str) -> Gateway:
    return gateway(cli) or _gateway_of(_named(cli, service))


def _gateway_of(found: Found) -> Gateway:
    return Gateway(found.url, read_key(found.key_file) if found.key_file and Path(found.key_file).exists() else None)


def _named(cli: Invocation, service: str, *, gone: bool = False) -> Found:
    """Raises NotFound, and UsageFault where several could be meant."""
    found = {each.name: each for each in _gateways(cli, gone=gone)}
    if service in found:
        return found[service]
    likely = [each for each in found.values() if _lives(each)] or list(found.values())
    if service == _DEFAULT and len(likely) == 1:
        return likely[0]
    if service == _DEFAULT and found:
        raise UsageFault(f"which gateway? There are {', '.join(sorted(found))}", hint="--service NAME")
    what = (
        "no weight-update gateway runs" if service == _DEFAULT else f"no weight-update gateway of job {service!r} runs"
    )
    raise NotFound(what, hint="a training job starts one: areal train ps")


def _lives(found: Found) -> bool:
    """A trainer that was killed leaves the file of a gateway that died with it."""
    try:
        return b"areal.services.weight_update" in Path(f"/proc/{found.pid}/cmdline").read_bytes()
    except OSError:
        return False


def _gateways(cli: Invocation, *, gone: bool = False) -> Iterator[Found]:
    """By the files that they left; with ``gone`` also runs whose gateway has ended well, and so left none."""
    for folder in sorted(cli.home.jobs.glob("*")):
        try:
            about = json.loads((folder / DISCOVERY).read_text(encoding="utf-8"))
            yield Found(folder.name, folder, about["url"], int(about["pid"]), about["admin_key_file"])
        except (OSError, ValueError, KeyError, TypeError):
            if gone and (folder / _LOG).exists():
                yield Found(folder.name, folder, "", 0, None)
