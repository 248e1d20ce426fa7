"""``areal weight-update``: weight-update gateways, which training jobs start. A file in the folder of the job has the
address of its gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import click

from areal.cli import options
from areal.cli.logs import LogQuery, log_options, print_lines
from areal.cli.objects import service_option
from areal.cli.options import Invocation, read_options, stack, watch_options
from areal.cli.output import Column, emit_one, emit_rows, field, show_status
from areal.cli.remote import gateway, gateway_of, local_options, model_at
from areal.client.gateway import GatewayClient, error_message
from areal.dataclasses import replace
from areal.errors import ArealError, NotFound, UsageFault
from areal.numbers import age, duration
from areal.reconcilers.weight_gateways import GatewayRecord, read_gateway
from areal.resources.addresses import is_loopback
from areal.terminal import pause

_LOG = Path("logs") / "latest" / "weight_update.log"
_DEFAULT = "default"
_SYNC_S = 3600.0
_RELEASE_S = 200.0
_POLL_S = 0.2
_BLOCK = 1 << 16

_service = click.option(
    "--service", metavar="NAME", default=_DEFAULT, help="The job whose gateway is meant  [default: the only one]."
)


def _last_update(row: Any) -> str | None:
    at = row.get("last_update")
    return f"{age(max(0.0, time.time() - at))} ago" if at else None


def _duration(row: Any) -> str | None:
    took = row.get("duration_ms")
    return duration(took / 1000) if took is not None else None


_PAIRS = (
    field("NAME", "pair_name"),
    field("MODE", "mode"),
    Column("TRAIN", lambda row: len(row["train_worker_urls"]), right=True),
    Column("INFER", lambda row: len(row["inference_worker_urls"]), right=True),
    field("VERSION", "version", right=True),
    Column("LAST-UPDATE", _last_update),
    Column("DURATION", _duration, right=True),
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
@watch_options()
@read_options()
def status(cli: Invocation, service: str, watch: bool, interval: float) -> int:
    """Show the health of a weight-update gateway. Exit status 1 when it cannot be reached."""
    document = show_status(
        cli,
        lambda: _health(_chosen(cli, service)),
        "{gateway}".format_map,
        _page,
        watch=watch,
        interval=interval,
        answered=True,
    )
    return 0 if document["healthy"] else 1


def _health(chosen: GatewayClient) -> dict[str, Any]:
    try:
        found = chosen.get("/pairs")["pairs"]
    except ArealError as error:
        return {"gateway": chosen.url, "healthy": False, "pairs": [], "error": error.message}
    return {"gateway": chosen.url, "healthy": True, "pairs": found}


def _page(document: Mapping[str, Any]) -> str:
    lines = [f"{document['gateway']}  {'healthy' if document['healthy'] else document['error']}"]
    for pair in document["pairs"]:
        version = "nothing published" if pair["version"] is None else f"version {pair['version']}"
        detail = f", {_last_update(pair)}, {_duration(pair)}" if pair["last_update"] else ""
        lines.append(f"pair {pair['pair_name']} ({pair['mode']}): {pair['state']}, {version}{detail}")
        for worker in pair["inference_workers"]:
            if worker["state"]:
                own = worker["version"] is None
                weights = "its own weights" if own else f"version {worker['version']}"
                lines.append(f"  {worker['url']} {worker['state']}, {weights}")
        if pair["error"]:
            lines.append(f"  {pair['error']}")
    return "\n".join(lines)


@click.command()
@_service
@read_options()
def pairs(cli: Invocation, service: str) -> int:
    """List pairs of training and inference: NAME MODE TRAIN INFER VERSION LAST-UPDATE DURATION STATE."""
    rows = _chosen(cli, service).get("/pairs")["pairs"]
    emit_rows(cli, rows, _PAIRS, name="{pair_name}".format_map, empty="no pair is connected", answered=True)
    return 0


@click.command()
@click.option("-a", "--all", "all_", is_flag=True, help="Also gateways that are gone.")
@local_options
def ps(cli: Invocation, all_: bool) -> int:
    """List weight-update gateways."""
    rows = []
    for found in _gateways(cli):
        try:
            health = _health(_gateway_of(found))
            state, pairs = "running" if health["healthy"] else "dead", len(health["pairs"])
        except ArealError as error:  # its key file cannot be read
            cli.info(f"warning: {found.name}: {error.message}")
            state, pairs = "unknown", 0
        if state != "dead" or all_:
            about = {"name": found.name, "pid": found.pid, "url": found.url, "folder": str(found.folder)}
            rows.append({**about, "pairs": pairs, "state": state})
    emit_rows(cli, rows, _GATEWAYS, name="{name}".format_map, empty="no weight-update gateway runs")
    return 0


@click.command()
@_service
@log_options(since="Only if the log was written in the last TIME.")
@local_options
def logs(cli: Invocation, service: str, query: LogQuery) -> int:
    """Print logs of a weight-update gateway."""
    path = _named(cli, service, ended=True).folder / _LOG
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            old = query.since is not None and time.time() - path.stat().st_mtime > query.since
            *lines, rest = file.read().split("\n")
            if rest and not query.follow:
                lines.append(rest)
            print_lines(cli, lines[-query.lines :] if query.lines and not old else [], follow=query.follow)
            while query.follow:
                *lines, rest = (rest + file.read(_BLOCK)).split("\n")
                print_lines(cli, lines, follow=True)
                pause(_POLL_S)
    except FileNotFoundError as error:
        raise NotFound(f"there is no log {path}") from error
    return 0


@click.command()
@_service
@click.option("--pair", metavar="NAME", required=True, help="The pair.")
@stack(options.timeout("1h", positive=True), read_options())
def force_sync(cli: Invocation, service: str, pair: str) -> int:
    """Push the training side's weights to the inference side now."""
    chosen = replace(_chosen(cli, service), timeout_s=min(cli.timeout_s or _SYNC_S, _SYNC_S))
    status, document = chosen.ask("POST", "/force_sync", {"pair_name": pair})
    if status == 404:
        raise NotFound(error_message(document) or "there is no such pair", hint="areal weight-update pairs")
    done = chosen.checked("POST", "/force_sync", status, document)
    text = f"pair/{pair} synced: version {done['version']}, {duration(done['duration_ms'] / 1000)}"
    emit_one(cli, {"pair_name": pair, **done}, name=f"pair/{pair}", text=lambda: text, answered=True)
    return 0


@click.command()
@click.option("--model", metavar="NAME", required=True, help="The model whose engines wait.")
@service_option
@stack(options.timeout("200s", positive=True), read_options())
def release(cli: Invocation, model: str, service: str | None) -> int:
    """Release a model's engines from waiting for the published weights of a trainer that is gone.

    Engines that start later serve their own weights; running engines keep theirs. Refused while the trainer is alive.
    ``--service`` and ``--gateway`` are those of the inference service.
    """
    chosen = replace(gateway_of(cli, service), timeout_s=cli.timeout_s or _RELEASE_S)
    model = model_at(cli, service, model) or model
    workers = [each["worker_id"] for each in chosen.get("/workers")["workers"] if each["model"] == model]
    if not workers:
        raise NotFound(f"no worker of the model {model!r} is known to {chosen.url}", hint="areal inf status")
    results: list[dict[str, object]] = []
    for worker in workers:
        path = f"/weights/release/{quote(worker, safe='')}"
        status, document = chosen.ask("POST", path, {})
        results += chosen.checked("POST", path, 200 if status == 207 else status, document)["results"]
    if failed := [result for result in results if not result["ok"]]:
        raise ArealError(f"model/{model} was not released", detail="; ".join(str(each["error"]) for each in failed))
    text = f"model/{model} released: engines that start serve their own weights"
    emit_one(cli, {"model": model, "results": results}, name=f"model/{model}", text=lambda: text, answered=True)
    return 0


def _chosen(cli: Invocation, service: str) -> GatewayClient:
    return gateway(cli) or _gateway_of(_named(cli, service))


def _gateway_of(found: GatewayRecord) -> GatewayClient:
    return GatewayClient(found.url, found.key())


def _named(cli: Invocation, service: str, *, ended: bool = False) -> GatewayRecord:
    """Return the gateway of a job. Raises NotFound, and UsageFault if several gateways match."""
    found = {each.name: each for each in _gateways(cli, ended=ended)}
    if service in found:
        return found[service]
    likely = [each for each in found.values() if _lives(each)] or list(found.values())
    if service == _DEFAULT and len(likely) == 1:
        return likely[0]
    if service == _DEFAULT and found:
        raise UsageFault(f"which gateway? There are {', '.join(sorted(found))}", hint="--service NAME")
    job = "" if service == _DEFAULT else f" of job {service!r}"
    raise NotFound(f"no weight-update gateway{job} runs", hint="a training job starts one: areal train ps")


def _lives(found: GatewayRecord) -> bool:
    """Return whether the process of a gateway is alive, since a killed trainer leaves the file behind. True for a
    gateway on another machine, which cannot be checked."""
    if not is_loopback(urlsplit(found.url).hostname or "localhost"):
        return True
    try:
        return b"areal.services.weight_update" in Path(f"/proc/{found.pid}/cmdline").read_bytes()
    except OSError:
        return False


def _gateways(cli: Invocation, *, ended: bool = False) -> Iterator[GatewayRecord]:
    """Yield gateways found by their discovery files; with ``ended`` also those that ended and removed their file."""
    for folder in sorted(cli.home.jobs.glob("*")):
        try:
            yield read_gateway(folder)
        except (OSError, ValueError, KeyError, TypeError):
            if ended and (folder / _LOG).exists():
                yield GatewayRecord(folder.name, folder, "", 0, None)
