"""``areal inf run`` and ``stop`` of services; ``register``, ``deregister``, ``scaleup``, ``scaledown`` of models."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli.apply import converge, preview, resource, spec_of
from areal.cli.manifest import DryRunCommand, dry_run_option
from areal.cli.objects import complete_names, model_name_option, service_name, service_option, stored
from areal.cli.operate import approver, mutate
from areal.cli.options import Invocation, Seconds, change_options, gather, stack, stop_options, timeout
from areal.cli.remote import refuse_remote_context
from areal.cli.services import (
    ScaleFlags,
    gateway_options,
    run_service,
    scale_options,
    scale_service,
    service_stop_options,
    stop_service,
    with_applied,
)
from areal.errors import Conflict, NotFound, UsageFault
from areal.files import parse_json
from areal.reconcilers.home_view import service_of
from areal.resources.kinds import INFERENCE_SERVICE, MODEL, Ref, check_name

if TYPE_CHECKING:
    from areal.state.records import StoredObject

_LAUNCH_S = 60.0
_STRATEGIES = ("auto", "round_robin", "least_loaded", "least_busy", "prefix")
MODEL_S = 1800.0  # for a model to become ready


class ModelFlags(NamedTuple):
    """The flags of a model that a local engine serves."""

    backend: str | None
    model_path: str | None
    tokenizer_path: str | None
    engine_args: tuple[str, ...]
    proxy_args: tuple[str, ...]
    served_model_name: str | None
    replicas: int | None
    model_health_timeout: float | None

    @property
    def given(self) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name, value in self._asdict().items() if value not in (None, ())]

    def spec(self) -> dict[str, object]:
        flags = self._asdict()
        for name in ("engine_args", "proxy_args"):
            flags[name] = arguments(flags[name], f"--{name.replace('_', '-')}")
        return spec_of(flags)


model_options = gather(
    "flags",
    ModelFlags,
    (
        click.option("--backend", metavar="BACKEND", help="Engine and allocation: embedded, sglang:d2t2, vllm:d4."),
        click.option("--model-path", metavar="PATH", help="Hugging Face id or folder."),
        click.option("--tokenizer-path", metavar="PATH", help="Hugging Face id or folder  [default: the model's]."),
        click.option(
            "--engine-args", multiple=True, metavar="ARGS", help="'--max-model-len 8192 --enable-x', or JSON."
        ),
        click.option("--proxy-args", multiple=True, metavar="ARGS", help="The same, for the data proxies."),
        click.option("--served-model-name", metavar="NAME", help="Model name in requests  [default: --model]."),
        click.option(
            "--replicas", type=click.IntRange(min=0), metavar="N", help="Replicas; overrides d of the backend."
        ),
        click.option(
            "--model-health-timeout",
            type=Seconds(),
            metavar="TIME",
            help="A replica must be ready within  [default: 30m].",
        ),
    ),
)


def arguments(texts: Sequence[str], flag: str) -> dict[str, object]:
    """Parse ``--max-model-len 8192 --enable-x``, ``max-model-len=8192`` or a JSON object to names and typed values.
    Raises UsageFault."""
    found: dict[str, object] = {}
    for text in texts:
        try:
            found.update(json.loads(text) if text.lstrip().startswith("{") else _words(shlex.split(text), flag))
        except json.JSONDecodeError as error:
            raise UsageFault(f"{flag}: not JSON: {error}") from None
        except ValueError as error:
            raise UsageFault(f"{flag}: {error}: {text!r}") from None
    return found


def _words(words: Sequence[str], flag: str) -> dict[str, object]:
    found: dict[str, object] = {}
    at = 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        at += 1
        if not equals and not name.startswith("--"):
            raise UsageFault(f"{flag}: {name!r} is not an argument", hint="write '--name value', name=value, or JSON")
        name = name.removeprefix("--")
        if equals:
            found[name] = _typed(value)
        elif at < len(words) and not words[at].startswith("--"):
            found[name] = _typed(words[at])
            at += 1
        else:
            found[name] = True
    return found


def _typed(text: str) -> Any:
    """Return the value of JSON, which includes numbers and booleans; any other text unchanged."""
    try:
        return parse_json(text)
    except ValueError:
        return text


@click.command(cls=DryRunCommand)
@click.argument("name", required=False, shell_complete=complete_names(INFERENCE_SERVICE))
@click.option(
    "--service",
    metavar="NAME",
    shell_complete=complete_names(INFERENCE_SERVICE),
    help="The same as NAME  [default: `areal config set service`, else 'default'].",
)
@gateway_options(8080)
@click.option("--routing-strategy", type=click.Choice(_STRATEGIES), help="How the router picks replicas.")
@click.option("--launch-timeout", type=Seconds(), metavar="TIME", help="Gateway and router must be up within  [60s].")
@click.option("--model", "--model-name", "model", metavar="NAME", help="Also serve this model.")
@model_options
@dry_run_option
@change_options(timeout(what="Give up waiting after this long in all (exit 7)"), destructive=True)
def run(
    cli: Invocation,
    /,
    name: str | None,
    service: str | None,
    launch_timeout: float | None,
    detach: bool,
    force: bool,
    model: str | None,
    flags: ModelFlags,
    dry_run: str | None,
    **settings: Any,
) -> int:
    """Start the inference service NAME (the same as --service), and a model with --model.

    \b
    areal inf run -d
    areal inf run -d --model qwen --backend embedded --model-path ./qwen
    """
    if name and service and name != service:
        raise UsageFault(f"NAME says {name} and --service says {service}; give one of them")
    ref = Ref(INFERENCE_SERVICE, check_name(service or name or str(cli.default("service") or "default")))
    if flags.given and not model:
        raise UsageFault(f"{flags.given[0]} needs --model NAME")
    if settings["routing_strategy"] == "least_busy":  # AReaL's name
        settings["routing_strategy"] = "least_loaded"
    manifests = [with_applied(cli, resource(INFERENCE_SERVICE, ref.name, spec_of(settings)), force=force)]
    seconds = launch_timeout if launch_timeout is not None else _LAUNCH_S
    if model:
        served = resource(MODEL, model, {"service": ref.name, **flags.spec()})
        manifests.append(with_applied(cli, served, force=force))
        seconds += flags.model_health_timeout if flags.model_health_timeout is not None else MODEL_S
    seconds = cli.deadline_s(seconds, flagged=launch_timeout is not None or flags.model_health_timeout is not None)
    return run_service(cli, ref, manifests, seconds=seconds, detach=detach, force=force, dry_run=dry_run)


@click.command()
@service_option
@service_stop_options
@change_options(destructive=True)
def stop(cli: Invocation, service: str | None, **given: Any) -> int:
    """Stop a service and its models, and forget them, after a confirmation. Running streams finish within the grace.
    With --keep-state the service and its models stay.

    A running TrainJob that uses it is deleted only with --cascade, after a confirmation.
    """
    return stop_service(cli, INFERENCE_SERVICE, service_name(cli, service), **given)


@click.command(cls=DryRunCommand)
@model_name_option(required=True)
@service_option
@model_options
@click.option("--api-url", metavar="URL", help="External: an OpenAI-compatible endpoint, instead of --backend.")
@click.option("--provider-api-key-env", metavar="VAR", help="External: environment variable that holds its key.")
@click.option("--provider-model", metavar="NAME", help="External: the provider's name of the model.")
@click.option("--provider-api", type=click.Choice(["openai", "anthropic"]), help="External: its protocol.")
@click.option("--allow-private", is_flag=True, help="External: the URL may lead to a private address.")
@click.option("--force", is_flag=True, help="Replace an existing model of this name.")
@dry_run_option
@change_options(timeout(what="Give up waiting after this long in all (exit 7)"), destructive=True)
def register(
    cli: Invocation,
    /,
    model: str,
    service: str | None,
    flags: ModelFlags,
    force: bool,
    dry_run: str | None,
    **external: Any,
) -> int:
    """Add a model to a service: replicas of our own, or an external endpoint.

    \b
    areal inf register --model qwen --backend sglang:d2t2 --model-path Qwen/Qwen3-8B
    areal inf register --model gpt --api-url https://api.openai.com/v1 --provider-api-key-env OPENAI_API_KEY
    """
    refuse_remote_context(cli)
    name = service_name(cli, service)
    registered = resource(MODEL, model, {"service": name, **_model_spec(flags, external)})
    manifests = [with_applied(cli, registered, force=force)]
    if dry_run:
        return preview(cli, manifests, dry_run, force=force)
    try:
        stored(cli.home, Ref(INFERENCE_SERVICE, name))
    except NotFound as error:
        error.hint = f"start it first: areal inf run {name} -d"
        raise
    health_timeout = flags.model_health_timeout
    seconds = cli.deadline_s(MODEL_S if health_timeout is None else health_timeout, flagged=health_timeout is not None)
    return mutate(
        cli, lambda context: converge(cli, context, manifests, command="inf register", force=force, timeout=seconds)
    )


def _model_spec(flags: ModelFlags, external: dict[str, Any]) -> dict[str, object]:
    given = {name: value for name, value in external.items() if value not in (None, False)}
    if "api_url" not in given:
        if given:
            raise UsageFault("--provider-... and --allow-private describe an external model: --api-url is missing")
        absent = [f"--{name}" for name in ("backend", "model-path") if not getattr(flags, name.replace("-", "_"))]
        if absent:
            raise UsageFault(f"{absent[0]} is missing", hint="give --backend and --model-path, or --api-url")
        return flags.spec()
    unused = flags._replace(served_model_name=None).given
    if unused:
        raise UsageFault(f"{unused[0]} cannot be used with --api-url: areal starts no engine for it")
    from areal.resources.addresses import UrlError, parse_external_url

    text = given["api_url"]
    url = text if "://" in text else f"http://{text}"
    try:
        parse_external_url(url, allow_private="allow_private" in given)
    except UrlError as error:
        hint = "--allow-private, if that is meant" if error.is_private else None
        raise UsageFault(f'--api-url "{text}" {error.problem}', hint=hint) from error
    given["api_url"] = url.rstrip("/")
    return spec_of({**given, "served_model_name": flags.served_model_name})


@click.command()
@model_name_option(required=True)
@service_option
@stop_options
@change_options(destructive=True)
def deregister(cli: Invocation, model: str, service: str | None, grace: float | None) -> int:
    """Take a model out of its service, and forget it, after a confirmation: no new requests, running ones finish, its
    replicas stop."""
    from areal.reconcilers import operations

    ref, seconds = _model(cli, model, service).ref, cli.deadline_s()
    return mutate(
        cli, operations.delete, [ref], grace_s=grace, timeout_s=seconds, approve=approver(cli, "inf deregister")
    )


def _model(cli: Invocation, model: str, service: str | None) -> StoredObject:
    """Return the stored model. Raises Conflict if it is not attached to ``service``, if that is given."""
    refuse_remote_context(cli)
    found = stored(cli.home, Ref(MODEL, model))
    attached = service_of(found)
    if service is not None and attached != service:
        raise Conflict(f"{found.ref} is attached to {attached}, not to {service}", hint=f"--service {attached}")
    return found


_scale_options = stack(model_name_option(required=True), service_option, scale_options("--replicas"))


@click.command()
@_scale_options
def scaleup(cli: Invocation, **given: Any) -> int:
    """Add replicas of a model: to --replicas N, or --by N. They get requests once they are ready."""
    return _scale(cli, **given, up=True)


@click.command()
@_scale_options
def scaledown(cli: Invocation, **given: Any) -> int:
    """Remove replicas of a model: to --replicas N, or --by N. Each drains before it stops; no stream is cut."""
    return _scale(cli, **given, up=False)


def _scale(cli: Invocation, model: str, service: str | None, scale: ScaleFlags, *, up: bool) -> int:
    scale.require_one("--replicas")
    return scale_service(cli, _model(cli, model, service), scale, f"areal inf {{}} --model {model}", up=up)
