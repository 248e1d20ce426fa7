"""``areal inf register``, ``deregister``, ``models``, ``scaleup``, ``scaledown``."""

from __future__ import annotations

from typing import Any

import click

from areal.cli import options, view
from areal.cli.acting import acting, finish, timeout_s
from areal.cli.dryrun import DryRunCommand, dry_run_option
from areal.cli.inf.converge import converge, preview, recorded
from areal.cli.inf.flags import (
    ModelFlags,
    model_manifest,
    model_name_option,
    model_options,
    service_name,
    service_option,
)
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.options import Seconds
from areal.cli.output.emit import emit_rows
from areal.cli.output.table import field
from areal.cli.remote import gateway
from areal.cli.targets import missing, stored
from areal.errors import Conflict, UsageFault
from areal.resources.kinds import Ref, served_name

_MODEL_S = 1800.0
_COLUMNS = (
    field("NAME", "name"),
    field("STATUS", "phase", state=True),
    field("READY", "ready"),
    field("BACKEND", "backend"),
    field("PATH", "path"),
    field("SERVED AS", "servedModelName", wide=True),
    field("SERVICE", "service", wide=True),
    field("MESSAGE", "message", wide=True),
)


@click.command(cls=DryRunCommand)
@model_name_option(required=True)
@service_option
@model_options
@click.option("--api-url", metavar="URL", help="External: an OpenAI-compatible endpoint, instead of --backend.")
@click.option("--provider-api-key-env", metavar="VAR", help="External: environment variable that holds its key.")
@click.option("--provider-model", metavar="NAME", help="External: the model's name over there.")
@click.option("--provider-api", type=click.Choice(["openai", "anthropic"]), help="External: what is spoken there.")
@click.option("--allow-private", is_flag=True, help="External: the URL may lead to a private address.")
@click.option("--force", is_flag=True, help="Replace a model of this name, whatever it is.")
@dry_run_option
@options.yes
@options.timeout(what="Give up waiting after this long in all (exit 7)")
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def register(
    cli: Invocation,
    model: str,
    service: str | None,
    flags: ModelFlags,
    api_url: str | None,
    provider_api_key_env: str | None,
    provider_model: str | None,
    provider_api: str | None,
    allow_private: bool,
    force: bool,
    dry_run: str | None,
) -> int:
    """Add a model to a service: replicas of our own, or an external endpoint.

    \b
    areal inf register --model qwen --backend sglang:d2t2 --model-path Qwen/Qwen3-8B
    areal inf register --model gpt --api-url https://api.openai.com/v1 --provider-api-key-env OPENAI_API_KEY
    """
    name = service_name(cli, service)
    more: dict[str, Any] = {"model": provider_model, "api": provider_api, "allowPrivate": allow_private or None}
    more["apiKeyFrom"] = {"env": provider_api_key_env} if provider_api_key_env else None
    spec = _spec(flags, api_url, {field: value for field, value in more.items() if value is not None})
    manifests = [model_manifest(model, name, spec)]
    if dry_run:
        return preview(cli, manifests, dry_run, force=force)
    _service_must_exist(cli, Ref("InferenceService", name))
    seconds = cli.timeout_s or flags.model_health_timeout or _MODEL_S
    with acting(cli) as context:
        outcome = converge(cli, context, manifests, what="inf register", force=force, timeout=seconds)
    return finish(cli, outcome, interrupted=context.interrupted.is_set())


def _spec(flags: ModelFlags, url: str | None, external: dict[str, Any]) -> dict[str, Any]:
    """``external``: what was said of an external model beside its URL."""
    if url is None:
        if external:
            raise UsageFault("--provider-... and --allow-private describe an external model: --api-url is missing")
        absent = [f"--{name}" for name in ("backend", "model-path") if not getattr(flags, name.replace("-", "_"))]
        if absent:
            raise UsageFault(f"{absent[0]} is missing", hint="give --backend and --model-path, or --api-url")
        return flags.spec()
    served, flags = flags.served_model_name, flags._replace(served_model_name=None)
    if flags.given:
        raise UsageFault(f"{flags.given[0]} does not go with --api-url, which has no engine of ours")
    spec: dict[str, Any] = {"servedModelName": served} if served else {}
    return {**spec, "external": {"url": _external_url(url, allow_private="allowPrivate" in external), **external}}


def _external_url(text: str, *, allow_private: bool) -> str:
    from areal.resources.external_url import UrlError, parse_external_url

    url = text if "://" in text else f"http://{text}"
    try:
        parse_external_url(url, allow_private=allow_private)
    except UrlError as error:
        hint = "--allow-private, if that is meant" if "allowPrivate" in str(error) else None
        raise UsageFault(f'--api-url "{text}" {str(error).partition(": set external")[0]}', hint=hint) from error
    return url.rstrip("/")


def _service_must_exist(cli: Invocation, ref: Ref) -> None:
    if recorded(cli, ref) is None:
        error = missing(cli.home, ref)
        error.hint = f"start it first: areal inf run {ref.name} -d"
        raise error


@click.command()
@model_name_option(required=True)
@service_option
@click.option("--grace", type=Seconds(), metavar="TIME", help="Between SIGTERM and SIGKILL  [default: the object's].")
@click.option("--force", is_flag=True, help="No grace: SIGKILL at once.")
@options.yes
@options.timeout("10m")
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def deregister(cli: Invocation, model: str, service: str | None, grace: float | None, force: bool) -> int:
    """Take a model out of its service: no new requests, running ones finish, its replicas stop."""
    ref = _model(cli, model, service)
    from areal.reconcilers import operations

    with acting(cli) as context:
        outcome = operations.delete(
            context,
            [ref],
            grace_s=0.0 if force else grace,
            cascade=False,
            wait=True,
            timeout_s=timeout_s(cli),
            approve=lambda plan: True,
        )
    return finish(cli, outcome, interrupted=context.interrupted.is_set())


def _model(cli: Invocation, model: str, service: str | None) -> Ref:
    """The model, which must be of the service when one was named."""
    found = stored(cli.home, Ref("Model", model))
    attached = view.service_of(found)
    if service is not None and attached != service:
        raise Conflict(f"{found.ref} is attached to {attached}, not to {service}", hint=f"--service {attached}")
    return found.ref


@click.command()
@service_option
@options.remote
@options.output()
@options.common
@pass_invocation
def models(cli: Invocation, service: str | None) -> int:
    """List a service's models; of a remote gateway, those that it lists."""
    chosen = gateway(cli)
    if chosen is not None:
        from areal.cli.remote_view import model_rows

        rows = model_rows(chosen)
    else:
        rows = _rows(cli, stored(cli.home, Ref("InferenceService", service_name(cli, service))).name)
    emit_rows(cli, rows, _COLUMNS, name=lambda row: f"model/{row['name']}", empty="no model is registered")
    return 0


def _rows(cli: Invocation, service: str) -> list[dict[str, Any]]:
    from areal.reconcilers.status import statuses
    from areal.state.objects import ObjectStore

    found = [item for item in ObjectStore(cli.home).list("Model") if view.service_of(item) == service]
    runs = view.read_runs(cli.home) if found else {}
    seen = statuses(cli.home, found, runs)
    rows = []
    for item in found:
        state = seen[str(item.ref)]
        external = item.spec.get("external") or {}
        rows.append(
            {
                "name": item.name,
                "servedModelName": served_name(item.name, item.spec),
                "service": service,
                "backend": item.spec.get("backend") or ("external" if external else None),
                "path": item.spec.get("path") or external.get("url"),
                "phase": state.phase,
                "ready": state.ready,
                "replicas": state.desired,
                "readyReplicas": state.ready_replicas,
                "message": state.message,
            }
        )
    return rows


_scale_options = (
    model_name_option(required=True),
    service_option,
    click.option("--replicas", type=click.IntRange(min=0), metavar="N", help="To this many."),
    click.option("--by", type=click.IntRange(min=1), metavar="N", help="By this many  [default: 1]."),
    click.option("--force-conflicts", is_flag=True, help="Take the field when another layer holds it."),
    options.timeout("30m"),
    options.lock_timeout,
    options.output(),
    options.common,
)


def _scaling(function: Any) -> Any:
    for option in reversed(_scale_options):
        function = option(function)
    return function


@click.command()
@_scaling
@pass_invocation
def scaleup(
    cli: Invocation, model: str, service: str | None, replicas: int | None, by: int | None, force_conflicts: bool
) -> int:
    """Add replicas of a model: to --replicas N, or --by N. They get requests once they are ready."""
    return _scale(cli, model, service, replicas, by, force_conflicts, up=True)


@click.command()
@_scaling
@pass_invocation
def scaledown(
    cli: Invocation, model: str, service: str | None, replicas: int | None, by: int | None, force_conflicts: bool
) -> int:
    """Remove replicas of a model: to --replicas N, or --by N. Each drains before it stops; no stream is cut."""
    return _scale(cli, model, service, replicas, by, force_conflicts, up=False)


def _scale(
    cli: Invocation, model: str, service: str | None, replicas: int | None, by: int | None, force: bool, *, up: bool
) -> int:
    from areal.reconcilers.health import desired_replicas

    if replicas is not None and by is not None:
        raise UsageFault("--replicas says to how many, --by by how many; give one of them")
    ref = _model(cli, model, service)
    present = desired_replicas(stored(cli.home, ref).spec)
    wanted = replicas if replicas is not None else present + (by or 1) * (1 if up else -1)
    if wanted < 0 or ((wanted < present) == up and wanted != present):
        verb, other = ("scaleup", "scaledown") if up else ("scaledown", "scaleup")
        raise UsageFault(f"{verb} from {present} to {wanted} makes no sense", hint=f"areal inf {other} --model {model}")
    from areal.reconcilers import operations

    with acting(cli) as context:
        outcome = operations.scale(
            context, ref, wanted, current=present, force=force, timeout_s=timeout_s(cli, _MODEL_S)
        )
    return finish(cli, outcome, interrupted=context.interrupted.is_set())
